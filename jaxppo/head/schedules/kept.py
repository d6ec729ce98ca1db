"""Logits that the forward leaves to the backward in the memory of the kernel's gradient.

The backward writes the gradient of a kernel `[H, V]` a block of the vocabulary at a time, and until then its memory
holds nothing. So the forward leaves the logits of the first H tokens there, and the backward reads a block of them
before it writes the gradient over it: only the other tokens meet the kernel a fourth time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.schedules.walk import Walk
from jaxppo.head.tokens import Slots


class Kept:
    """The logits of the first `tokens` of a walk: those of whole blocks, or of the start of the only one."""

    def __init__(self, walk: Walk, tokens: int):
        self.walk, self.size = walk, min(tokens, walk.tokens.block)
        self.blocks = -(-tokens // walk.tokens.block)

    def empty(self) -> jax.Array | None:
        return self.walk.zeros(*self.walk.inputs.parameters.kernel.shape) if self.blocks else None

    def write(self, memory: jax.Array, z: jax.Array, slots: Slots, block: Any, i: Any) -> jax.Array:
        """`memory`, of the kernel's shape, with logits of the slots in the columns that are block i's own."""
        z = z[: self.size]
        z = z if block.valid is True else jnp.where(block.valid, z, self.read(memory, slots, i))
        column = self.walk.vocabulary.start(i)
        if self.walk.rule.form.v_dim == 0:
            return lax.dynamic_update_slice(memory, z.T, (column, slots.start))
        return lax.dynamic_update_slice(memory, z, (slots.start, column))

    def read(self, memory: jax.Array, slots: Slots, i: Any) -> jax.Array:
        """What `write` wrote, f32 `[size, B]`; anything in columns of other blocks."""
        column, rows, size = self.walk.vocabulary.start(i), self.size, self.walk.vocabulary.size
        if self.walk.rule.form.v_dim == 0:
            return lax.dynamic_slice(memory, (column, slots.start), (size, rows)).T
        return lax.dynamic_slice(memory, (slots.start, column), (rows, size))
