"""Slices of arrays at places that are known to lie inside.

JAX is told that starts are not negative. Otherwise it adds operations for negative starts to each slice, which take a
sixth of the time to trace a gradient.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np
from jax import lax

from jaxppo.head.types import Index

Tree = TypeVar("Tree")  # a pytree of arrays


def slice_of(x: jax.Array, start: Index, size: int, dim: int = 0) -> jax.Array:
    """`size` entries of a dimension, from `start` on."""
    if size == x.shape[dim]:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)


def put_slice(x: jax.Array, part: jax.Array, start: Index, dim: int = 0) -> jax.Array:
    """x with `part` written along a dimension, from `start` on."""
    return lax.dynamic_update_slice_in_dim(x, part, start, dim, allow_negative_indices=False)


def submatrix(x: jax.Array, dim: int, start: Index, size: int, first: Index, width: int) -> jax.Array:
    """A part of a matrix: `size` of dimension `dim` from `start` on, and `width` of the other from `first` on.

    `partial(submatrix, x, dim)` is the `Submatrix` of a matrix that exists already.
    """
    at, shape = ((start, first), (size, width)) if dim == 0 else ((first, start), (width, size))
    return x if shape == x.shape else lax.dynamic_slice(x, at, shape, allow_negative_indices=False)


def rows_at(x: Tree, places: jax.Array) -> Tree:
    """The rows at these places of an array, or of each array of a pytree."""
    starts = lax.expand_dims(places.astype(np.int32), (1,))  # argsort's are i64 where JAX allows 64 bits

    def of_array(x: jax.Array) -> jax.Array:
        # a start in all dimensions: XLA for a v6e cannot compile x[places] @ kernel if x has 15 to 16 MiB
        dims = lax.GatherDimensionNumbers(tuple(range(1, x.ndim)), (0,), tuple(range(x.ndim)))
        at = starts if x.ndim == 1 else lax.pad(starts, np.int32(0), ((0, 0, 0), (0, x.ndim - 1, 0)))
        return lax.gather(x, at, dims, (1, *x.shape[1:]), mode="promise_in_bounds")

    found: Tree = jax.tree.map(of_array, x)
    return found
