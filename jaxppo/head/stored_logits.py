"""Logits that the forward leaves to the backward in the memory of the kernel's gradient.

The backward writes the gradient of a kernel `[H, V]` a block of the vocabulary at a time, and until then its memory
holds nothing. So the forward leaves the logits of the first H tokens there, and the backward reads a block of them
before it writes the gradient over it: only the other tokens meet the kernel a fourth time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxppo.head.columns import LANES, Block, Columns
from jaxppo.head.tokens import Slots, TokenBlocks


@dataclasses.dataclass(frozen=True)
class Stored:
    """Which logits are stored: the first `rows` of each of the first `blocks` blocks of tokens; none by default."""

    blocks: int = 0
    rows: int = 0

    @staticmethod
    def of(tokens: TokenBlocks, features: int) -> Stored:
        """As many as a kernel of H `features` has room for: part of the only block, or whole blocks."""
        rows = min(features, tokens.block)
        whole = rows == tokens.block
        return Stored(min(features, tokens.count) // rows if whole else 1, rows)

    def loop(self, tokens: TokenBlocks, body: Callable[[bool, Slots, Any], Any], carry: Any) -> Any:
        """`carry = body(stored, slots, carry)` over the blocks of tokens, `stored` saying whether this one's are."""
        carry = tokens.loop(partial(body, True), carry, 0, self.blocks)
        return tokens.loop(partial(body, False), carry, self.blocks)

    def write(self, memory: jax.Array, z: jax.Array, slots: Slots, block: Block, head: Columns, i: Any) -> jax.Array:
        """`memory`, of the kernel's shape, with logits of the slots in the columns that are block i's own."""
        column = head.start(i, memory.shape[head.v_dim])
        z = z[: self.rows]
        z = z if block.valid is True else jnp.where(block.valid, z, self.read(memory, slots, head, i))
        if head.v_dim == 0:
            return lax.dynamic_update_slice(memory, z.T, (column, slots.start))
        return lax.dynamic_update_slice(memory, _laid_out(z, memory), (slots.start, column))

    def read(self, memory: jax.Array, slots: Slots, head: Columns, i: Any) -> jax.Array:
        """What `write` wrote, f32 `[rows, B]`; anything in columns of other blocks."""
        columns = memory.shape[head.v_dim]
        column, size = head.start(i, columns), head.size(columns)
        if head.v_dim == 0:
            return lax.dynamic_slice(memory, (column, slots.start), (size, self.rows)).T
        return _laid_out(lax.dynamic_slice(memory, (slots.start, column), (self.rows, size)), memory)


def _laid_out(z: jax.Array, memory: jax.Array) -> jax.Array:
    """z, for XLA for TPU in the layout that it gives arrays of the memory's shape: by another it copies them whole."""
    order = (0, 1) if memory.shape[1] % LANES == 0 else (1, 0)
    constrained = lambda z: with_layout_constraint(z, Layout(order))  # noqa: E731
    return lax.platform_dependent(z, tpu=constrained, default=lambda z: z)
