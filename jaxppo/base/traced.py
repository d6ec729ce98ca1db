"""Splits a config that holds traced numbers into a hashable part and its arrays, as a cached `jit` needs them.

A pytree has the same traced fields in all its objects, but here each object decides: a coefficient that is the number 0
leaves its term out of the program. And losses that users write are plain frozen dataclasses that nobody registers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxppo.base.arrays import is_zero

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Marks the place of an array."""

    name: str


def take_arrays(config: Config, coefficients: Sequence[str] = ()) -> tuple[Config, dict[str, jax.Array]]:
    """The config with a mark in place of each array in its dataclasses, and the arrays by the names of their fields.

    A field within a field is "field.name", as in "kl.coef"; "loss" and "config" are left out. Fields at the paths
    `coefficients` become arrays too, unless they are known to be 0: other numbers then compile nothing new.
    """
    arrays: dict[str, jax.Array] = {}

    def mark(path: tuple[str, ...], x: Any) -> Any:
        if ".".join(path) in coefficients:
            x = 0.0 if is_zero(x) else jnp.asarray(x, jnp.float32)
        if not isinstance(x, jax.Array):
            return x
        name = ".".join(part for part in path if part not in ("loss", "config"))
        name = ".".join(path) if name in arrays else name
        arrays[name] = x
        return _Place(name)

    return map_leaves(config, mark), arrays


def put_arrays(config: Config, arrays: Mapping[str, jax.Array]) -> Config:
    """The inverse of `take_arrays`."""
    return map_leaves(config, lambda _, x: arrays[x.name] if isinstance(x, _Place) else x)


def map_leaves(x: Any, fn: Any, path: tuple[str, ...] = ()) -> Any:
    """x with `fn(path, leaf)` in place of each leaf of its dataclasses and tuples."""
    if isinstance(x, tuple):
        return tuple(map_leaves(part, fn, (*path, str(i))) for i, part in enumerate(x))
    if not dataclasses.is_dataclass(x) or isinstance(x, _Place):
        return fn(path, x)
    # a copy: the constructor's checks would refuse the marks
    new = copy.copy(x)
    for field in dataclasses.fields(x):
        object.__setattr__(new, field.name, map_leaves(getattr(x, field.name), fn, (*path, field.name)))
    return new
