"""The tokens of a device in blocks; with a mask, only those that it selects, in a number of blocks that it decides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo._sharding import vary_like, varying


def even_block(count: int, most: int, multiple: int = 8) -> int:
    """The size, at most `most`, of as few equal blocks of `count` as can be; rounded up to a multiple where it may be.

    The last of some blocks overlaps the one before it, and what overlaps is computed twice.

    Example:
      >>> even_block(2304, 2048), even_block(2048, 2048), even_block(30, 12)
      (1152, 2048, 10)
    """
    size = -(-count // -(-count // most))
    rounded = -(-size // multiple) * multiple
    return rounded if rounded <= min(most, count) else size


def _argsort(x: jax.Array) -> jax.Array:
    """The stable order, in the type of x: jnp's has lost the mesh axes along which it varies."""
    return vary_like(jnp.argsort(x, stable=True), x)


def _most_of(blocks: jax.Array, names: frozenset[str]) -> jax.Array:
    """The most that any device along the mesh axes has."""
    blocks = blocks.astype(jnp.int32)
    names &= varying(blocks)  # along the others they are equal already
    return lax.pmax(blocks, tuple(sorted(names))) if names else blocks


class Slots(NamedTuple):
    """One block of token slots."""

    start: Any
    rows: jax.Array | None  # which token is in each slot; None where slot and token are the same
    fresh: jax.Array | None  # bool[block], False for repeats and tokens that do not count; None: all True


class TokenBlocks:
    """Tokens in slots: those that count first, in their order, so that blocks of slots stop where they stop.

    Args:
      where: `bool[N]`, the tokens that count, or None for all.
      count: N.
      block: tokens of a block.
    """

    def __init__(self, where: jax.Array | None, count: int, block: int):
        self.count, self.block = count, max(1, min(block, count))
        self.begin: Any = 0  # the first slot of the first block
        self.most = -(-self.count // self.block)
        self.order: Any = None if where is None else _argsort(~where)
        self.total: Any = count if where is None else where.sum(dtype=jnp.int32)
        self.blocks: Any = (self.total + self.block - 1) // self.block

    def divided(self, first: int, names: frozenset[str]) -> tuple[TokenBlocks, TokenBlocks]:
        """With a mask: a block of the first tokens, taken where so many count, and the blocks of those after it.

        Args:
          first: tokens of the first block; none for 0.
          names: mesh axes along which every device is to have as many blocks, so that a collective may sit in the loop.
        """
        one, rest = copy.copy(self), copy.copy(self)
        one.block, one.most = first, min(first, 1)
        one.blocks = _most_of(self.total >= first, names) * one.most
        rest.begin = first * one.blocks
        rest.most = -(-max(self.count - first, first - 1) // self.block)
        rest.blocks = _most_of((jnp.maximum(self.total - rest.begin, 0) + self.block - 1) // self.block, names)
        return one, rest

    def slots(self, j: Any) -> Slots:
        """Block j; the last one overlaps the one before it rather than going past the end."""
        begin = self.begin + j * self.block
        start = jnp.clip(begin, 0, self.count - self.block)
        slot = start + jnp.arange(self.block)
        if self.order is None:
            return Slots(start, None, slot >= begin if self.count % self.block else None)
        rows = lax.dynamic_slice_in_dim(self.order, start, self.block)
        return Slots(start, rows, (slot >= begin) & (slot < self.total))

    def loop_over_all(self, body: Callable[[Slots, Any], Any], carry: Any) -> Any:
        """`carry = body(slots, carry)` over all blocks, those without any token that counts included."""
        return self._loop(body, carry, 0, self.most)

    def loop(self, body: Callable[[Slots, Any], Any], carry: Any, first: int = 0, last: int | None = None) -> Any:
        """The same over those blocks from `first` to before `last` that have a token that counts."""
        last = self.most if last is None else last
        if self.order is None or first == last:
            return self._loop(body, carry, first, last)
        most = last - first
        # the constant bound says to whoever reads the program how long the loop can be
        more = lambda c: (c[0] < most) & (c[0] < self.blocks - first)  # noqa: E731
        turn = lambda c: (c[0] + 1, body(self.slots(c[0] + first), c[1]))  # noqa: E731
        return lax.while_loop(more, turn, (jnp.zeros_like(self.blocks), carry))[1]

    def _loop(self, body: Callable[[Slots, Any], Any], carry: Any, first: int, last: int) -> Any:
        if last - first < 2:
            return body(self.slots(first), carry) if first < last else carry
        return lax.fori_loop(first, last, lambda j, carry: body(self.slots(j), carry), carry)

    def take(self, x: Any, slots: Slots) -> Any:
        """The rows in the slots of x, an array in token order or a pytree of them."""
        if slots.rows is None:
            return self.read(x, slots)
        return jax.tree.map(lambda x: x.at[slots.rows].get(mode="promise_in_bounds", unique_indices=True), x)

    def read(self, x: Any, slots: Slots) -> Any:
        """The block of x, an array in slot order or a pytree of them."""
        if self.block == self.count:
            return x
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, slots.start, self.block), x)

    def write(self, x: Any, block: Any, slots: Slots) -> Any:
        """x, an array in slot order or a pytree of them, with the fresh slots replaced."""

        def write(x: jax.Array, new: jax.Array) -> jax.Array:
            if slots.fresh is not None:
                fresh = slots.fresh.reshape(-1, *[1] * (new.ndim - 1))
                new = jnp.where(fresh, new, self.read(x, slots))
            return new if self.block == self.count else lax.dynamic_update_slice_in_dim(x, new, slots.start, 0)

        return jax.tree.map(write, x, block)

    def put(self, x: jax.Array, block: jax.Array, slots: Slots) -> jax.Array:
        """x, an array in token order, with the rows in the fresh slots replaced."""
        if slots.rows is None:
            return self.write(x, block, slots)
        fresh: Any = slots.fresh
        return x.at[jnp.where(fresh, slots.rows, self.count)].set(block, mode="drop")

    def to_slots(self, x: Any) -> Any:
        """Arrays from token order to slot order."""
        return x if self.order is None else jax.tree.map(lambda x: x[self.order], x)

    def to_tokens(self, x: Any) -> Any:
        """Arrays from slot order to token order."""
        return x if self.order is None else jax.tree.map(lambda x: x[_argsort(self.order)], x)
