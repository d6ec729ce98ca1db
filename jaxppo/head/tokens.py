"""The tokens of a device in blocks; with a mask, only those that it selects, in a number of blocks that it decides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.sharding import vary_like, varying


def even_block(count: int, most: int, multiple: int = 8) -> int:
    """The size, at most `most`, of as few blocks of `count` as can be.

    They are equal where that many can be. Else the last overlaps the one before it, and what overlaps is computed twice
    and masked; then the size is rounded up to a multiple where it may be.

    Example:
      >>> even_block(2304, 2048), even_block(30, 12), even_block(100, 40)
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

    start: Any  # the first slot, of each part
    tokens: jax.Array | None  # i32[n], which token is in each slot; None where slot and token are the same
    fresh: jax.Array | None  # bool[n], False for repeats and tokens that do not count; None: all True


class Tokens:
    """Tokens in slots: those that count first, in their order, so that blocks of slots stop where they stop.

    Of hidden states that are sharded by position over the tensor axis, a device holds one of several parts of the
    tokens; a block then takes as many slots of each part.

    Args:
      where: `bool[N]`, the tokens that count, or None for all. One block has all tokens, and needs no order.
      count: N.
      block: tokens of a block at most.
      parts: of the tokens, one after the other.
      follow: those that count come first; else all take their turn where they are.
      equal: mesh axes along which every device is to take as many turns, so that a collective may sit in the loop.
    """

    def __init__(
        self,
        where: jax.Array | None,
        count: int,
        block: int,
        parts: int = 1,
        equal: frozenset[str] = frozenset(),
        follow: bool = True,
    ):
        self.count, self.parts = count, parts
        self.each = count // parts
        self.size = max(1, min(block // parts, self.each))
        self.block = self.size * parts
        self.most = -(-self.each // self.size)
        self.where = where
        self.order: Any = None
        self.turns: Any = self.most
        if where is not None and follow and self.most > 1:
            of_part = where.reshape(parts, self.each)
            order = vary_like(jnp.argsort(~of_part, axis=1, stable=True), where)  # whose type has lost the mesh axes
            self.order = order.astype(jnp.int32) + self.each * jnp.arange(parts, dtype=jnp.int32)[:, None]
            self.totals = of_part.sum(axis=1, dtype=jnp.int32)
            turns = (self.totals.max() + self.size - 1) // self.size
            names = equal & varying(turns)  # along the others they are equal already
            self.turns = lax.pmax(turns, tuple(sorted(names))) if names else turns

    def slots(self, j: Any) -> Slots:
        """Block j; the last one overlaps the one before it rather than going past the end."""
        if self.most == 1:
            return Slots(0, None, self.where)
        begin = j * self.size
        start = jnp.minimum(begin, self.each - self.size)
        slot = start + jnp.arange(self.size, dtype=jnp.int32)
        if self.order is None:
            fresh = jnp.tile(slot >= begin, self.parts) if self.each % self.size else None
            if self.where is not None:
                counts = self.read(self.where, Slots(start, None, None))
                fresh = counts if fresh is None else fresh & counts
            return Slots(start, None, fresh)
        tokens = lax.dynamic_slice_in_dim(self.order, start, self.size, axis=1)
        fresh = (slot >= begin)[None] & (slot[None] < self.totals[:, None])
        return Slots(start, tokens.reshape(-1), fresh.reshape(-1))

    def loop(self, body: Callable[[Slots, Any], Any], carry: Any, first: int = 0, last: int | None = None) -> Any:
        """`carry = body(slots, carry)` over the blocks from `first` to before `last` with a token that counts."""
        last = self.most if last is None else last
        if self.order is None or last <= first:
            return self.loop_over_all(body, carry, first, last)
        most = last - first
        # the constant bound says to whoever reads the program how long the loop can be
        more = lambda c: (c[0] < most) & (c[0] < self.turns - first)  # noqa: E731
        turn = lambda c: (c[0] + 1, body(self.slots(c[0] + first), c[1]))  # noqa: E731
        return lax.while_loop(more, turn, (jnp.zeros_like(self.turns), carry))[1]

    def loop_over_all(
        self, body: Callable[[Slots, Any], Any], carry: Any, first: int = 0, last: int | None = None
    ) -> Any:
        """The same, whether a token counts or not."""
        last = self.most if last is None else last
        if last - first < 2:
            return body(self.slots(first), carry) if first < last else carry
        return lax.fori_loop(first, last, lambda j, carry: body(self.slots(j), carry), carry)

    def take(self, x: Any, slots: Slots) -> Any:
        """The slots of x, an array in token order or a pytree of them."""
        return self.read(x, slots) if slots.tokens is None else jax.tree.map(lambda x: _rows(x, slots.tokens), x)

    def take_own(self, x: Any, slots: Slots, part: Any) -> Any:
        """The slots of this device's part, of an array that has only that."""
        if slots.tokens is None:
            return jax.tree.map(partial(self._slice, start=slots.start), x)
        own = slots.tokens.reshape(self.parts, -1)[part] - part * self.each
        return jax.tree.map(lambda x: _rows(x, own), x)

    def read(self, x: Any, slots: Slots) -> Any:
        """The block of x, an array in slot order or a pytree of them."""

        def read(x: jax.Array) -> jax.Array:
            if self.parts == 1:
                return self._slice(x, slots.start)
            by_part = x.reshape(self.parts, self.each, *x.shape[1:])
            return jax.vmap(partial(self._slice, start=slots.start))(by_part).reshape(-1, *x.shape[1:])

        return jax.tree.map(read, x)

    def _slice(self, x: jax.Array, start: Any) -> jax.Array:
        return x if self.most == 1 else lax.dynamic_slice_in_dim(x, start, self.size)

    def write(self, x: Any, block: Any, slots: Slots) -> Any:
        """x, an array in slot order or a pytree of them, with the fresh slots replaced."""

        def write(x: jax.Array, new: jax.Array) -> jax.Array:
            if slots.fresh is not None:
                new = jnp.where(slots.fresh.reshape(-1, *[1] * (new.ndim - 1)), new, self.read(x, slots))
            if self.most == 1:
                return new
            shape = (self.parts, self.each, *x.shape[1:])
            new = new.reshape(self.parts, self.size, *x.shape[1:])
            return lax.dynamic_update_slice_in_dim(x.reshape(shape), new, slots.start, 1).reshape(x.shape)

        return jax.tree.map(write, x, block)

    def add(self, total: jax.Array, new: jax.Array, slots: Slots) -> jax.Array:
        """total, an array in slot order of one part, plus a block that is 0 where it is not fresh."""
        new = self.read(total, slots) + new
        return new if self.most == 1 else lax.dynamic_update_slice_in_dim(total, new, slots.start, 0)

    def put_own(self, x: jax.Array, block: jax.Array, slots: Slots, part: Any) -> jax.Array:
        """x, an array in token order of this device's part, with the rows in the fresh slots replaced.

        x and the other rows of the block are 0, unless they repeat tokens of the block before.
        """
        if self.most == 1:
            return block
        fresh = None if slots.fresh is None else slots.fresh.reshape(self.parts, -1)[part]
        if slots.tokens is None:
            if fresh is not None:
                block = jnp.where(fresh[:, None], block, self._slice(x, slots.start))
            return lax.dynamic_update_slice_in_dim(x, block, slots.start, 0)
        own = slots.tokens.reshape(self.parts, -1)[part] - part * self.each
        assert fresh is not None
        return x.at[jnp.where(fresh, own, self.each)].set(block, mode="drop")

    def to_slots(self, x: Any) -> Any:
        """Arrays from token order to slot order."""
        return x if self.order is None else jax.tree.map(lambda x: _rows(x, self.order.reshape(-1)), x)

    def to_tokens(self, x: Any) -> Any:
        """Arrays from slot order to token order."""
        if self.order is None:
            return x
        places = vary_like(jnp.argsort(self.order.reshape(-1)), self.order)
        return jax.tree.map(lambda x: _rows(x, places), x)


def _rows(x: jax.Array, rows: Any) -> jax.Array:
    return x.at[rows].get(mode="promise_in_bounds", unique_indices=True)


@dataclasses.dataclass(frozen=True)
class TokenOrder:
    """How the `[R, T]` tokens of a device are one dimension: the parts that several devices hold, one after the other.

    Args:
      shape: [R, T].
      parts: devices that share the hidden states by position.
      pad: tokens that are added to each part.
    """

    shape: tuple[int, int]
    parts: int
    pad: int

    @classmethod
    def of(cls, shape: tuple[int, int], parts: int, least: int) -> TokenOrder:
        """With at least so many tokens."""
        return cls(shape, parts, max(0, -(-least // parts) - math.prod(shape) // parts))

    def flat(self, x: Any) -> Any:
        """`[R, T, ...]` to `[N, ...]`, or None."""
        if x is None:
            return None
        R, T = self.shape
        x = x.reshape(R, self.parts, T // self.parts, *x.shape[2:]).swapaxes(0, 1)
        return self._padded(x.reshape(self.parts, -1, *x.shape[3:])).reshape(-1, *x.shape[3:])

    def flat_part(self, x: jax.Array) -> jax.Array:
        """`flat`, for an array that has one part."""
        return self._padded(x.reshape(1, -1, x.shape[2]))[0]

    def _padded(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, self.pad), *[(0, 0)] * (x.ndim - 2))) if self.pad else x

    def back(self, x: jax.Array) -> jax.Array:
        """`[N]` to `[R, T]`."""
        R, T = self.shape
        x = x.reshape(self.parts, -1)[:, : R * T // self.parts]
        return x.reshape(self.parts, R, -1).swapaxes(0, 1).reshape(R, T)
