"""Splits a config that holds traced numbers into a hashable part and its arrays, as a cached `jit` needs them.

A pytree has the same traced fields in all its objects, but here each object decides: a coefficient that is the number 0
leaves its term out of the program. And losses that users write are plain frozen dataclasses that nobody registers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxppo.base.arrays import is_zero

Config = TypeVar("Config")
Path = tuple[str, ...]  # the names of fields, and the places in tuples, from the outside in
Replace = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Marks the place of an array."""

    name: str


@dataclasses.dataclass(frozen=True)
class ByToken:
    """Marks the place of a number that an extra of the batch holds for each token; see `losses.by_row`."""

    own: Any  # the field's own number, for positions without loss
    extra: str


def is_frozen(x: Any) -> bool:
    """Whether x is a frozen dataclass."""
    return dataclasses.is_dataclass(x) and bool(getattr(x, "__dataclass_params__").frozen)  # noqa: B009


def is_mark(x: Any) -> bool:
    """Whether x marks the place of a number."""
    return isinstance(x, _Place | ByToken)


def take_arrays(config: Config, coefficients: Sequence[str] = ()) -> tuple[Config, dict[str, jax.Array]]:
    """The config with a mark in place of each array in its dataclasses, and the arrays by the names of their fields.

    The names are those of `name_of`. Fields at the paths `coefficients` become arrays too, unless they are known to be
    0: other numbers then compile nothing new.
    """
    arrays: dict[str, jax.Array] = {}

    def mark(path: tuple[str, ...], x: Any) -> Any:
        if ".".join(path) in coefficients:
            x = 0.0 if is_zero(x) else jnp.asarray(x, jnp.float32)
        if not isinstance(x, jax.Array):
            return x
        name = name_of(path)
        name = ".".join(path) if name in arrays else name
        arrays[name] = x
        return _Place(name)

    return map_leaves(config, mark), arrays


def name_of(path: Path) -> str:
    """The name of a field at this path: within a field "field.name", as in "kl.coef", without "loss" and "config"."""
    return ".".join(part for part in path if part not in ("loss", "config", "own"))


def put_arrays(config: Config, arrays: Mapping[str, jax.Array]) -> Config:
    """The inverse of `take_arrays`."""
    return map_leaves(config, lambda _, x: arrays[x.name] if isinstance(x, _Place) else x)


def numbers_of_tokens(x: Any, path: Path = ()) -> dict[Path, ByToken]:
    """The marks of numbers of tokens in the dataclasses and tuples of x, by their paths."""
    if isinstance(x, ByToken):
        return {path: x}
    parts: dict[str, Any] = {}
    if isinstance(x, tuple):
        parts = {str(i): part for i, part in enumerate(x)}
    elif dataclasses.is_dataclass(x):
        parts = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    found: dict[Path, ByToken] = {}
    for name, part in parts.items():
        found |= numbers_of_tokens(part, (*path, name))
    return found


def at_path(x: Any, path: Path) -> Any:
    """What stands at this path of dataclasses and tuples."""
    for name in path:
        x = x[int(name)] if isinstance(x, tuple) else getattr(x, name)
    return x


def put_numbers(x: Any, numbers: Mapping[Path, Any], replace: Replace, path: Path = ()) -> Any:
    """x with these numbers at their paths, by `dataclasses.replace`, which checks them, or by `replaced`."""
    if path in numbers:
        return numbers[path]
    if isinstance(x, tuple):
        return tuple(put_numbers(part, numbers, replace, (*path, str(i))) for i, part in enumerate(x))
    within = sorted({its[len(path)] for its in numbers if its[: len(path)] == path})
    changed = {name: put_numbers(getattr(x, name), numbers, replace, (*path, name)) for name in within}
    return replace(x, **changed) if changed else x


def replaced(x: Config, **changed: Any) -> Config:
    """A copy of a dataclass with other fields, which its constructor does not check: it would refuse marks."""
    new = copy.copy(x)
    for name, value in changed.items():
        object.__setattr__(new, name, value)
    return new


def map_leaves(x: Any, fn: Any, path: Path = ()) -> Any:
    """x with `fn(path, leaf)` in place of each leaf of its dataclasses and tuples, without their constructors."""
    if isinstance(x, tuple):
        return tuple(map_leaves(part, fn, (*path, str(i))) for i, part in enumerate(x))
    if not dataclasses.is_dataclass(x) or isinstance(x, _Place):
        return fn(path, x)
    names = [field.name for field in dataclasses.fields(x)]
    return replaced(x, **{name: map_leaves(getattr(x, name), fn, (*path, name)) for name in names})
