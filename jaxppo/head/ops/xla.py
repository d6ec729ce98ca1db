"""The arithmetic of a tile in plain XLA, on any platform."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxppo.head import softmax
from jaxppo.head.ops.tile import Form, Op, Tile
from jaxppo.head.softmax import Cotangents, Residuals, Sums


def logits(form: Form, tile: Tile) -> jax.Array:
    """f32 logits `[C, B]` with -inf in columns that are not the block's own."""
    kernel, bias, lora_b = tile.block.parameters
    z = form.dot(tile.rows.hidden, kernel, (1, 1 - form.v_dim))
    z = z if lora_b is None else z + form.lora_scale * form.dot(tile.rows.low, lora_b, (1, 1 - form.v_dim))
    z = z if bias is None else z + bias
    return jnp.where(tile.block.valid, tile.tempered(form.transform.of(z)), -jnp.inf)


def of_products(form: Form, tile: Tile, dz: jax.Array, z: jax.Array, counts: jax.Array) -> jax.Array:
    """The gradient of hidden @ kernel from that of its logits z; 0 in rows that do not count."""
    dz = form.transform.gradient(dz, lambda: z / tile.tempered(jnp.ones_like(z)))
    return jnp.where(counts[:, None] & tile.block.valid, tile.tempered(dz), 0)


def dlogits(
    form: Form, tile: Tile, residuals: Residuals, cotangents: Cotangents, z: jax.Array | None = None
) -> jax.Array:
    """d loss / d (hidden @ kernel), f32 `[C, B]`; z as in `Op.dlogits`."""
    if z is None:
        z = logits(form, tile)
    elif z.shape[0] < tile.targets.shape[0]:
        z = jnp.concatenate([z, logits(form, tile.after(z.shape[0]))])
    dz = softmax.dlogits(z, tile.is_target, tile.nucleus, residuals, cotangents, form.vocab_size)
    return of_products(form, tile, dz, z, cotangents.counts)


class XLA(Op):
    """See `Op`."""

    def forward(self, form: Form, tile: Tile, like: Sums, keep: bool) -> tuple[Sums, Any]:
        z = logits(form, tile)
        z_y = softmax.target_logits(z, tile.is_target, *tile.place)
        return softmax.block_sums(z, z_y, tile.is_target, tile.nucleus, like), z

    def dlogits(
        self,
        form: Form,
        tile: Tile,
        residuals: Residuals,
        cotangents: Cotangents,
        z: jax.Array | None,
        dtype: Any,
        of_bias: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        dz = dlogits(form, tile, residuals, cotangents, z)
        return dz.astype(dtype), dz.sum(axis=0) if of_bias else None
