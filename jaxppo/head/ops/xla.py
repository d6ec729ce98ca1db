"""The arithmetic of a tile in plain XLA, on any platform."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxppo.head import softmax
from jaxppo.head.ops.tile import Form, Op, Tile, as_row
from jaxppo.head.softmax import Cotangents, Residuals, Sums


def products(form: Form, tile: Tile) -> jax.Array:
    """f32 hidden @ kernel + bias + LoRA, `[C, B]`."""
    kernel, bias, lora_b = tile.block.parameters
    x = form.dot(tile.rows.hidden, kernel, (1, 1 - form.v_dim))
    x = x if lora_b is None else x + form.lora_scale * form.dot(tile.rows.low, lora_b, (1, 1 - form.v_dim))
    return x if bias is None else x + as_row(bias)


def logits(form: Form, tile: Tile, x: jax.Array) -> jax.Array:
    """f32 logits `[C, B]` of products x, -inf in columns that are not the block's own."""
    return jnp.where(as_row(tile.block.valid), tile.tempered(form.transform.of(x)), -jnp.inf)


def of_products(form: Form, tile: Tile, dz: jax.Array, x: jax.Array, counts: jax.Array) -> jax.Array:
    """The gradient of products x from that of their logits; 0 in rows that do not count and in masked columns."""
    dz = tile.tempered(form.transform.gradient(dz, x))
    return jnp.where(counts[:, None] & as_row(tile.block.valid) & (x != -jnp.inf), dz, 0)


def dlogits(
    form: Form, tile: Tile, residuals: Residuals, cotangents: Cotangents, x: jax.Array | None = None
) -> jax.Array:
    """d loss / d (hidden @ kernel), f32 `[C, B]`; x as in `Op.dlogits`."""
    if x is None:
        x = products(form, tile)
    elif x.shape[0] < tile.targets.shape[0]:
        x = jnp.concatenate([x, products(form, tile.after(x.shape[0]))])
    dz = softmax.dlogits(logits(form, tile, x), tile.is_target, tile.nucleus, residuals, cotangents)
    return of_products(form, tile, dz, x, cotangents.counts)


class XLA(Op):
    """See `Op`."""

    def forward(self, form: Form, tile: Tile, like: Sums, keep: bool) -> tuple[Sums, Any]:
        x = products(form, tile)
        z = logits(form, tile, x)
        z_y = softmax.target_logits(z, tile.is_target, *tile.place)
        return softmax.block_sums(z, z_y, tile.is_target, tile.nucleus, like), x

    def dlogits(
        self,
        form: Form,
        tile: Tile,
        residuals: Residuals,
        cotangents: Cotangents,
        x: jax.Array | None,
        dtype: Any,
        of_bias: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        dz = dlogits(form, tile, residuals, cotangents, x)
        return dz.astype(dtype), dz.sum(axis=0) if of_bias else None
