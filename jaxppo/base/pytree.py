"""Classes as pytrees: constructors check what a user gives, and `jax.export` stores functions of
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax import export
from jax.sharding import PartitionSpec

Class = TypeVar("Class", bound=type)
PyTree: TypeAlias = Any  # containers of arrays, or of what belongs to each of them


def register(*, static: Iterable[str] = ()) -> Callable[[Class], Class]:
    """Decorates a frozen dataclass as a pytree whose children are all fields but the static ones,
    or a NamedTuple.

    The constructor, with its checks, runs only where somebody makes an object. With
    `jax.tree_util.register_dataclass` it would also run each time that JAX unflattens the tree:
    dozens of times in a trace. `jax.export` stores functions of the class; see `to_bytes` for what
    its static fields may hold.
    """
    meta = tuple(static)

    def decorate(cls: Class) -> Class:
        is_tuple = issubclass(cls, tuple)
        if not is_tuple:
            _register_node(cls, meta)
        name = f"{cls.__module__}.{cls.__qualname__}"
        # a notebook loads its modules again: JAX keeps the class that it has
        with contextlib.suppress(ValueError):
            if is_tuple:
                export.register_namedtuple_serialization(cls, serialized_name=name)
            else:
                export.register_pytree_node_serialization(
                    cls,
                    serialized_name=name,
                    serialize_auxdata=to_bytes,
                    deserialize_auxdata=from_bytes,
                )
        return cls

    return decorate


def _register_node(cls: Any, meta: tuple[str, ...]) -> None:
    data = [field.name for field in dataclasses.fields(cls) if field.name not in meta]

    def flatten(x: Any) -> tuple[Any, Any]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(x, name)) for name in data]
        return children, tuple([getattr(x, name) for name in meta])

    def unflatten(fixed: Any, leaves: Any) -> Any:
        new = object.__new__(cls)
        for name, value in zip((*data, *meta), (*leaves, *fixed), strict=True):
            object.__setattr__(new, name, value)
        return new

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)


def to_bytes(static: tuple[Any, ...]) -> bytes:
    """Static fields as JSON: numbers, text, None, tuples, PartitionSpecs, and this package's
    functions and dataclasses.

    Another value, such as a lambda, raises a TypeError.
    """
    return json.dumps(_plain(static)).encode()


def from_bytes(stored: bytes) -> Any:
    """The inverse of `to_bytes`.

    It finds names of this package and no others, and nothing is unpickled.
    """
    return json.loads(stored, object_hook=_made)


def _plain(x: Any) -> Any:
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, np.generic):
        return _plain(x.item())
    if isinstance(x, PartitionSpec):
        return {"spec": [_plain(entry) for entry in x]}
    if isinstance(x, tuple):
        return {"tuple": [_plain(entry) for entry in x]}
    kind: Any = x if isinstance(x, FunctionType) else type(x)
    place = [kind.__module__, kind.__qualname__]
    with contextlib.suppress(AttributeError, ImportError, ValueError):
        if _named(*place) is x:
            return {"name": place}
        if _named(*place) is kind and dataclasses.is_dataclass(x):
            fields = [
                [field.name, _plain(getattr(x, field.name))] for field in dataclasses.fields(x)
            ]
            return {"class": [place, fields]}
    raise TypeError(
        f"jax.export: got {x!r} in a static field, expected numbers, text or functions of jaxppo"
    )


def _made(x: dict[str, Any]) -> Any:
    """What `_plain` made a dict of one kind; the values in it are made already."""
    ((kind, value),) = x.items()
    match kind:
        case "spec":
            return PartitionSpec(*value)
        case "tuple":
            return tuple(value)
        case "name":
            return _named(*value)
    place, fields = value
    return _named(*place)(**dict(fields))


def _named(module: str, name: str) -> Any:
    """A function or class of this package by its name."""
    package = __name__.partition(".")[0]
    if module.partition(".")[0] != package:
        raise ValueError(f"jax.export: got {module}.{name}, expected a name of {package}")
    return getattr(importlib.import_module(module), name)
