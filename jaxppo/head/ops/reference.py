"""The plain arithmetic of a tile, for comparison: every array written out, each formula as it stands in the papers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxppo.head.ops.tile import Form, Op, Tile
from jaxppo.head.softmax import Cotangents, Residuals, Sums, top_key


class Reference(Op):
    """See `Op`."""

    def forward(self, form: Form, tile: Tile, like: Sums, keep: bool) -> tuple[Sums, Any]:
        z = _logits_of(form, tile, _products(form, tile))
        inside = z if tile.nucleus is None else jnp.where(tile.nucleus, z, -jnp.inf)
        (m, e, d), (nucleus_m, nucleus_e, _) = _exponentials(z), _exponentials(inside)
        found = Sums(
            m=m,
            s=e.sum(axis=1),
            u=jnp.where(e > 0, e * d, 0).sum(axis=1),
            nucleus_m=nucleus_m,
            nucleus_s=nucleus_e.sum(axis=1),
            z_y=jnp.where(tile.is_target, z, 0).sum(axis=1),
            total=jnp.where(jnp.isfinite(z), z, 0).sum(axis=1),
            top=top_key(z, tile.is_target).max(axis=1),
        )
        asked: Any = (None if x is None else y for x, y in zip(like, found, strict=True))
        return Sums(*asked), z

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
        logits, to_products = jax.vjp(partial(_logits_of, form, tile), _products(form, tile))
        column = lambda x: x[:, None]  # noqa: E731
        p = log_p = jnp.zeros_like(logits)
        if residuals.m is not None:
            log_p = logits - column(residuals.m) - column(residuals.log_s)
            p = jnp.exp(log_p)
        renormalised = p
        if tile.nucleus is not None:
            inside = jnp.where(tile.nucleus, logits, -jnp.inf)
            renormalised = jnp.exp(inside - column(residuals.nucleus_m) - column(residuals.nucleus_log_s))
        dz = column(cotangents.log_prob) * (tile.is_target - renormalised)
        if cotangents.entropy is not None:
            dz -= column(cotangents.entropy) * p * jnp.where(p > 0, log_p + column(residuals.entropy), 0)
        if cotangents.of_logits is not None:
            dz += column(cotangents.of_logits[0]) * p + column(cotangents.of_logits[1]) / form.vocab_size
        counts = column(cotangents.counts) & tile.block.valid
        dx = jnp.where(counts, to_products(jnp.where(counts, dz, 0))[0], 0)
        return dx.astype(dtype), dx.sum(axis=0) if of_bias else None


def _products(form: Form, tile: Tile) -> jax.Array:
    """hidden @ kernel + bias + LoRA."""
    kernel, bias, lora_b = tile.block.parameters
    x = form.dot(tile.rows.hidden, kernel, (1, 1 - form.v_dim))
    x = x if lora_b is None else x + form.lora_scale * form.dot(tile.rows.low, lora_b, (1, 1 - form.v_dim))
    return x if bias is None else x + bias


def _logits_of(form: Form, tile: Tile, x: jax.Array) -> jax.Array:
    """transform(x) / temperature, -inf in columns that are not the block's own."""
    return jnp.where(tile.block.valid, tile.tempered(form.transform.of(x)), -jnp.inf)


def _exponentials(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """m = max z, exp(z - m) and z - m; zeros where no logit is finite."""
    m = z.max(axis=1)
    d = z - jnp.where(m == -jnp.inf, 0, m)[:, None]
    return m, jnp.exp(d), d
