"""Dataclasses as pytrees whose constructors check what a user gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

Class = TypeVar("Class", bound=type)


def register_checked(*, static: Iterable[str]) -> Callable[[Class], Class]:
    """Decorates a frozen dataclass as a pytree whose children are all fields but the static ones.

    The constructor, with its checks, runs only where somebody makes an object. With `jax.tree_util.register_dataclass`
    it would also run each time that JAX unflattens the tree: dozens of times in a trace.
    """

    def register(cls: Class) -> Class:
        meta = tuple(static)
        data = tuple(field.name for field in dataclasses.fields(cls) if field.name not in meta)

        def values(x: Any, names: Iterable[str]) -> tuple[Any, ...]:
            return tuple(getattr(x, name) for name in names)

        def flatten_with_keys(x: Any) -> tuple[Any, Any]:
            keys = map(jax.tree_util.GetAttrKey, data)
            return tuple(zip(keys, values(x, data), strict=True)), values(x, meta)

        def unflatten(fixed: Any, leaves: Any) -> Any:
            new: Any = object.__new__(cls)
            for name, value in zip((*data, *meta), (*leaves, *fixed), strict=True):
                object.__setattr__(new, name, value)
            return new

        jax.tree_util.register_pytree_with_keys(
            cls, flatten_with_keys, unflatten, lambda x: (values(x, data), values(x, meta))
        )
        return cls

    return register
