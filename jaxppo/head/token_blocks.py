"""The tokens of a device in blocks. With a mask the tokens that count come first, and loops stop after the last one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from jaxppo.base.arrays import needed
from jaxppo.head.slices import Tree, put_slice, rows_at, slice_of
from jaxppo.head.types import Index
from jaxppo.sharding import vary_like, varying


def even_size(count: int, most: int, multiple: int = 8) -> int:
    """The size of equal blocks that cover `count`, with as few blocks as sizes up to `most` allow.

    The size is rounded up to a multiple of `multiple` if that stays within `most`. If the blocks hold more than
    `count`, the caller pads the last one or lets it overlap the one before.

    Example:
      >>> even_size(2304, 2048), even_size(30, 12), even_size(100, 40)
      (1152, 10, 40)
    """
    blocks = -(-count // most)
    size = -(-count // blocks)
    if blocks * size == count:
        return size
    rounded = -(-size // multiple) * multiple
    return rounded if rounded <= min(most, count) else size


class Slots(NamedTuple):
    """One block of token slots."""

    start: Index
    counts: jax.Array | None  # bool[n], False for padding and tokens that do not count; None if all are True


class TokenBlocks:
    """Tokens sorted into slots: those that count first, in their order, so that a loop over blocks can stop early.

    Args:
      counts: `bool[N]`, the tokens that count, or None for all. A single block keeps the tokens in place.
      count: N.
      size: the number of tokens in a block.
      least: the smallest number of blocks; empty blocks are added.
      follow: sort the tokens that count to the front. Otherwise every token stays in place and takes its turn.
      equal: mesh axes along which all devices take the same number of turns, so that a collective may sit in the loop.
    """

    def __init__(
        self,
        counts: jax.Array | None,
        count: int,
        size: int,
        least: int = 1,
        follow: bool = True,
        equal: frozenset[str] = frozenset(),
    ):
        self.count, self.size = count, size
        self.blocks = max(least, -(-count // size))
        self.slots_count = self.blocks * size
        self.order: jax.Array | None = None
        self.turns: Index = self.blocks
        self._counts = None if counts is None else self.padded(counts)
        if counts is not None and follow and self.blocks > 1:
            order = vary_like(jnp.argsort(~counts, stable=True), counts)  # argsort's type loses the mesh axes
            self.order = self.padded(order)
            self.total = counts.sum(dtype=jnp.int32)
            turns = (self.total + size - 1) // size
            names = equal & varying(turns)  # along other axes the turns are equal already
            self.turns = lax.pmax(turns, tuple(sorted(names))) if names else turns

    def grouped(self, blocks: int) -> TokenBlocks:
        """The same slots in larger blocks, each made of `blocks` of these."""
        found = copy.copy(self)
        found.size, found.blocks = self.size * blocks, self.blocks // blocks
        found.turns = -(-self.turns // blocks)
        return found

    def slots(self, j: Index) -> Slots:
        """Block j."""
        start = j * self.size
        if self.order is not None:
            return Slots(start, start + jnp.arange(self.size, dtype=jnp.int32) < self.total)
        if self._counts is not None:
            return Slots(start, self.read(self._counts, Slots(start, None)))
        if self.slots_count > self.count:
            return Slots(start, start + jnp.arange(self.size, dtype=jnp.int32) < self.count)
        return Slots(start, None)

    def loop(self, body: Callable[[Slots, Tree], Tree], carry: Tree) -> Tree:
        """`carry = body(slots, carry)` over the blocks with a token that counts, or over all if there is no order."""
        if self.blocks == 1:
            return body(self.slots(0), carry)
        if self.order is None:
            return lax.fori_loop(0, self.blocks, lambda j, carry: body(self.slots(j), carry), carry)

        def more(state: tuple[jax.Array, Tree]) -> jax.Array:
            # the constant bound tells `audit` how long the loop can be
            return (state[0] < self.blocks) & (state[0] < self.turns)

        def turn(state: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
            j, carry = state
            return j + 1, body(self.slots(j), carry)

        return lax.while_loop(more, turn, (jnp.zeros_like(self.turns), carry))[1]

    def to_slots(self, x: Tree) -> Tree:
        """Arrays from token order to slot order, padding included."""
        if (order := self.order) is None:
            return self.padded(x)
        return rows_at(x, order)

    def to_tokens(self, x: Tree) -> Tree:
        """Arrays from slot order to token order."""
        if self.order is None:
            return jax.tree.map(lambda x: x[: self.count], x)
        places = vary_like(jnp.argsort(self.order[: self.count]), self.order)
        return rows_at(x, places)

    def read(self, x: Tree, slots: Slots) -> Tree:
        """The block's part of x, an array in slot order or a pytree of them."""
        if self.blocks == 1:
            return x
        return jax.tree.map(lambda x: slice_of(x, slots.start, self.size), x)

    def take(self, x: Tree, slots: Slots) -> Tree:
        """The block's part of x, a padded array in token order or a pytree of them."""
        if (order := self.order) is None:
            return self.read(x, slots)
        return rows_at(x, self.read(order, slots))

    def write(self, x: Tree, block: Tree, slots: Slots) -> Tree:
        """Replaces the block's part of x, an array in slot order or a pytree of them."""
        if self.blocks == 1:
            return block
        return jax.tree.map(lambda x, new: put_slice(x, new, slots.start), x, block)

    def put(self, x: jax.Array, rows: jax.Array, slots: Slots) -> jax.Array:
        """Replaces the rows of x, a padded array in token order, that belong to the slots' tokens that count."""
        if self.order is None:
            return self.write(x, rows, slots)
        counts = needed("slots.counts", slots.counts, "which tokens count, as they are in order")
        places = jnp.where(counts, self.read(self.order, slots), x.shape[0])
        return x.at[places].set(rows, mode="drop")

    def padded(self, x: Tree) -> Tree:
        """Arrays in token order, with rows added for all slots."""
        extra = self.slots_count - self.count
        if not extra:
            return x
        return jax.tree.map(lambda x: jnp.pad(x, ((0, extra), *[(0, 0)] * (x.ndim - 1))), x)


def zero_unless(counts: Bool[Array, " N"] | None, tree: Tree) -> Tree:
    """Arrays `[N, ...]` of tokens with 0 at each token that does not count; unchanged if `counts` is None."""
    if counts is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, 0), tree)
