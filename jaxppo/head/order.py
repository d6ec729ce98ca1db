"""Tokens that count before the others, so that a loop over chunks can stop behind the last of
them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxppo.sharding import vary, varying

Index = int | jax.Array  # a scalar
Tree = TypeVar("Tree")  # a pytree of arrays


class Order(NamedTuple):
    """Where each token stands. Without places all tokens stay where they are."""

    N: int  # tokens
    places: jax.Array | None = None  # i32[N], the tokens in the order in which they are computed
    inverse: jax.Array | None = None  # i32[N], where each token is in that order

    @classmethod
    def of(cls, counts: jax.Array) -> Order:
        """The order that has the tokens with `counts`, bool[N], first."""
        # the type of a sort loses the axes along which its operand varies
        places = vary(jnp.argsort(~counts, stable=True).astype(jnp.int32), varying(counts))
        inverse = vary(jnp.argsort(places).astype(jnp.int32), varying(counts))
        return cls(counts.shape[0], places, inverse)

    def put(self, tree: Tree, size: int) -> Tree:
        """Arrays `[N, ...]` in this order, with rows of 0 added up to `size`."""

        def put_one(array: jax.Array) -> jax.Array:
            if self.places is not None:
                array = rows_at(self.places, array)
            return jnp.pad(array, ((0, size - self.N), *[(0, 0)] * (array.ndim - 1)))

        return jax.tree.map(put_one, tree)

    def take_back(self, tree: Tree) -> Tree:
        """Arrays `[size, ...]` in this order, as the caller's `[N, ...]`."""

        def take_one(array: jax.Array) -> jax.Array:
            array = array[: self.N]
            if self.inverse is not None:
                array = rows_at(self.inverse, array)
            return array

        return jax.tree.map(take_one, tree)


def rows_at(places: jax.Array, array: jax.Array) -> jax.Array:
    """array[places], by a start in all dimensions.

    XLA for a v6e cannot compile array[places] @ kernel if the array has 15 to 16 MiB.
    """
    starts = lax.expand_dims(places, (1,))
    if array.ndim > 1:
        starts = lax.pad(starts, np.int32(0), ((0, 0, 0), (0, array.ndim - 1, 0)))
    offsets = tuple(range(1, array.ndim))
    dims = lax.GatherDimensionNumbers(
        offsets, collapsed_slice_dims=(0,), start_index_map=tuple(range(array.ndim))
    )
    return lax.gather(
        array, starts, dims, slice_sizes=(1, *array.shape[1:]), mode="promise_in_bounds"
    )


def read(tree: Tree, start: Index, size: int, dim: int = 0) -> Tree:
    """`size` entries of a dimension of all arrays, from `start` on."""

    def read_one(array: jax.Array) -> jax.Array:
        if size == array.shape[dim]:
            return array
        assert size < array.shape[dim], "more entries than there are"
        return lax.dynamic_slice_in_dim(array, start, size, dim, allow_negative_indices=False)

    return jax.tree.map(read_one, tree)


def write(tree: Tree, new: Tree, start: Index, dim: int = 0) -> Tree:
    """All arrays, with the new entries of each written along a dimension from `start` on."""

    def write_one(array: jax.Array, entries: jax.Array) -> jax.Array:
        if entries.shape == array.shape:
            return entries
        return lax.dynamic_update_slice_in_dim(
            array, entries, start, dim, allow_negative_indices=False
        )

    return jax.tree.map(write_one, tree, new)


def where_counts(counts: jax.Array | None, tree: Tree, fill: float = 0) -> Tree:
    """Arrays `[N, ...]` of tokens, with `fill` at the tokens that do not count."""
    if counts is None:
        return tree

    def fill_one(array: jax.Array) -> jax.Array:
        by_row = counts.reshape(-1, *[1] * (array.ndim - 1))
        return jnp.where(by_row, array, array.dtype.type(fill))

    return jax.tree.map(fill_one, tree)


def loop(turns: Index, body: Any, carry: Tree) -> Tree:
    """`lax.fori_loop` from 0 on; a single turn is no loop."""
    if isinstance(turns, int) and turns == 1:
        return body(0, carry)
    return lax.fori_loop(0, turns, body, carry)
