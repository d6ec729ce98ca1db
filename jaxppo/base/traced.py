"""Splits a config that holds traced numbers into a hashable part and its arrays, as a cached `jit`
needs them.

A pytree has the same traced fields in all its objects, but here each object decides: a coefficient
that is the number 0 leaves its term out of the program. And losses that users write are plain
frozen dataclasses that nobody registers.
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
    """Marks the place of a number that an extra of the batch holds for each token; see
    `losses.by_row`.
    """

    own: Any  # the field's own number, for positions without loss
    extra: str


def is_frozen(x: Any) -> bool:
    """Whether x is a frozen dataclass."""
    return dataclasses.is_dataclass(x) and bool(getattr(x, "__dataclass_params__").frozen)  # noqa: B009


def is_mark(x: Any) -> bool:
    """Whether x marks the place of a number."""
    return isinstance(x, _Place | ByToken)


def take_arrays(
    config: Config, coefficients: Sequence[str] = ()
) -> tuple[Config, dict[str, jax.Array]]:
    """The config with a mark in place of each array in its dataclasses, and the arrays by the names
    of their fields.

    The names are those of `name_of`. Fields at the paths `coefficients` become arrays too, unless
    they are known to be 0: other numbers then compile nothing new.
    """
    arrays: dict[str, jax.Array] = {}
    static: dict[Path, Any] = {}
    for path, x in leaves(config).items():
        if ".".join(path) in coefficients:
            if is_zero(x):
                static[path] = 0.0
                continue
            x = jnp.asarray(x, jnp.float32)
        if isinstance(x, jax.Array):
            name = name_of(path)
            if name in arrays:
                name = ".".join(path)
            arrays[name] = x
            static[path] = _Place(name)
    return with_leaves(config, static), arrays


def put_arrays(config: Config, arrays: Mapping[str, jax.Array]) -> Config:
    """The inverse of `take_arrays`."""
    return with_leaves(
        config,
        {path: arrays[x.name] for path, x in leaves(config).items() if isinstance(x, _Place)},
    )


def name_of(path: Path) -> str:
    """The name of a field at this path: within a field "field.name", as in "kl.coef", without
    "loss" and "config".
    """
    return ".".join(name for name in path if name not in ("loss", "config", "own"))


def numbers_of_tokens(config: Any) -> dict[Path, ByToken]:
    """The marks of numbers of tokens, by their paths."""
    return {
        path: x for path, x in leaves(config, whole=(ByToken,)).items() if isinstance(x, ByToken)
    }


def leaves(x: Any, path: Path = (), whole: tuple[type, ...] = ()) -> dict[Path, Any]:
    """What stands in the dataclasses and tuples of x, by path; objects of the classes `whole`
    are not taken apart.
    """
    if isinstance(x, tuple):
        parts = {str(i): part for i, part in enumerate(x)}
    elif dataclasses.is_dataclass(x) and not isinstance(x, (_Place, *whole)):
        parts = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    else:
        return {path: x}
    by_path: dict[Path, Any] = {}
    for name, part in parts.items():
        by_path |= leaves(part, (*path, name), whole)
    return by_path


def with_leaves(
    x: Any, changed: Mapping[Path, Any], replace: Replace | None = None, path: Path = ()
) -> Any:
    """x with other values at these paths, by `dataclasses.replace`, which checks them, or by
    default by `replaced`.
    """
    if path in changed:
        return changed[path]
    if isinstance(x, tuple):
        return tuple(
            with_leaves(part, changed, replace, (*path, str(i))) for i, part in enumerate(x)
        )
    depth = len(path)
    names = sorted({other[depth] for other in changed if other[:depth] == path})
    if not names:
        return x
    fields = {
        name: with_leaves(getattr(x, name), changed, replace, (*path, name)) for name in names
    }
    return (replace or replaced)(x, **fields)


def replaced(x: Config, **changed: Any) -> Config:
    """A copy of a dataclass with other fields, which its constructor does not check: it would
    refuse marks.
    """
    new = copy.copy(x)
    for name, value in changed.items():
        object.__setattr__(new, name, value)
    return new
