"""Some columns of the vocabulary: those of a device, of a block, of an eighth."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxppo.head.call import Tokens
from jaxppo.head.order import Index, read
from jaxppo.sharding import ShardAxes, vary, varying


class Columns(NamedTuple):
    """Some columns of the vocabulary, whose ids rise by one."""

    first: jax.Array | int  # the id of the first one
    width: int
    # bool[B], False for padding and for another block's columns; None if none is
    valid: jax.Array | None = None

    @property
    def ids(self) -> jax.Array:
        return self.first + jnp.arange(self.width, dtype=jnp.int32)

    def one_hot(self, ids: jax.Array) -> jax.Array:
        """One-hot `[C, B]` of one id per token."""
        hot = self.ids[None] == ids[:, None]
        if self.valid is not None:
            hot = hot & self.valid[None]
        return hot

    def places(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The place of each id, and whether it is there."""
        place = ids - self.first
        inside = (place >= 0) & (place < self.width)
        place = jnp.where(inside, place, 0)
        if self.valid is not None:
            inside = inside & self.valid[place]
        return place, inside

    def nucleus(self, tokens: Tokens) -> jax.Array:
        """bool[C, B], the columns that the sampler could draw, the target's included."""
        ids = jnp.concatenate([tokens.nucleus_ids, tokens.targets[:, None]], axis=1)
        place, inside = self.places(ids)
        rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        none = vary(jnp.zeros((ids.shape[0], self.width), bool), varying(place) | varying(inside))
        return none.at[rows, jnp.where(inside, place, self.width)].set(True, mode="drop")


def columns_of(axes: ShardAxes, vocab_size: int, V: int) -> Columns:
    """The columns of a device that has V of them."""
    first = axes.index(axes.tensor) * V
    if vocab_size == V * axes.size(axes.tensor):
        return Columns(first, V)
    return Columns(first, V, first + jnp.arange(V, dtype=jnp.int32) < vocab_size)


def block_of(columns: Columns, start: Index, width: int, first_valid: Index) -> Columns:
    """So many of the columns from `start` on, of which those from `first_valid` on are valid."""
    valid = columns.valid
    if valid is not None:
        valid = read(valid, start, width)
    if columns.width % width:
        is_new = start + jnp.arange(width, dtype=jnp.int32) >= first_valid
        valid = is_new if valid is None else valid & is_new
    return Columns(columns.first + start, width, valid)
