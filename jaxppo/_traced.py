"""Splits a config that holds traced numbers into a hashable part and its arrays, as a cached `jit` needs them.

A registered dataclass has the same traced fields in all its objects, but here each object decides: a coefficient that
is the number 0 leaves its term out of the program, and a schedule does not. Losses that users write are plain frozen
dataclasses that nobody registers, and the checks of their constructors would refuse what JAX puts into a tree.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, TypeVar

import jax

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Marks the place of an array."""

    index: int


def take_arrays(config: Config) -> tuple[Config, list[jax.Array]]:
    """The config with a mark in place of each array in its dataclasses, and the arrays."""
    arrays: list[jax.Array] = []

    def mark(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        arrays.append(x)
        return _Place(len(arrays) - 1)

    return _replace_leaves(config, mark), arrays


def put_arrays(config: Config, arrays: list[jax.Array]) -> Config:
    """The inverse of `take_arrays`."""
    return _replace_leaves(config, lambda x: arrays[x.index] if isinstance(x, _Place) else x)


def _replace_leaves(x: Any, fn: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_replace_leaves(part, fn) for part in x)
    if not dataclasses.is_dataclass(x) or isinstance(x, _Place):
        return fn(x)
    # a copy: the constructor's checks would refuse the marks
    new = copy.copy(x)
    for field in dataclasses.fields(x):
        object.__setattr__(new, field.name, _replace_leaves(getattr(x, field.name), fn))
    return new
