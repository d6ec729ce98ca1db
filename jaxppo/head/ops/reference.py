"""The plain arithmetic of a tile, for comparison: every array written out, each formula as it stands in the papers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.ops.tile import Form, Op, Tile, as_row
from jaxppo.head.softmax import Cotangents, Residuals, Sums, top_key


class Reference(Op):
    """See `Op`."""

    def forward(self, form: Form, tile: Tile, like: Sums, keep: bool) -> tuple[Sums, Any]:
        x = _products(form, tile)
        z = _logits_of(form, tile, x)
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
            columns=(z > -jnp.inf).astype(jnp.float32).sum(axis=1),
            top=top_key(z, tile.is_target).max(axis=1),
        )
        asked: Any = (None if x is None else y for x, y in zip(like, found, strict=True))
        return Sums(*asked), x

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
        x = _products(form, tile)
        logits = _logits_of(form, tile, x)
        column = lambda x: x[:, None]  # noqa: E731
        p = log_p = jnp.zeros_like(logits)
        if residuals.m is not None:
            log_p = logits - column(residuals.m) - column(residuals.log_s)
            p = jnp.exp(log_p)
        renormalised = p
        if tile.nucleus is not None:
            inside = jnp.where(tile.nucleus, logits, -jnp.inf)
            renormalised = jnp.exp(inside - column(residuals.nucleus_m) - column(residuals.nucleus_log_s))
        dz = column(cotangents.log_prob) * (tile.is_target.astype(jnp.float32) - renormalised)
        if cotangents.entropy is not None:
            dz -= column(cotangents.entropy) * p * jnp.where(p > 0, log_p + column(residuals.entropy), 0)
        if cotangents.of_logits is not None:
            dz += column(cotangents.of_logits[0]) * p
            dz += column(cotangents.of_logits[1]) / column(residuals.columns)
        counts = column(cotangents.counts) & as_row(tile.block.valid) & (x != -jnp.inf)
        dx = jnp.where(counts, tile.tempered(dz) * _slope(form, x), 0)
        return dx.astype(dtype), dx.sum(axis=0) if of_bias else None


def _products(form: Form, tile: Tile) -> jax.Array:
    """hidden @ kernel + bias + LoRA."""
    kernel, bias, lora_b = tile.block.parameters
    x = form.dot(tile.rows.hidden, kernel, (1, 1 - form.v_dim))
    x = x if lora_b is None else x + form.lora_scale * form.dot(tile.rows.low, lora_b, (1, 1 - form.v_dim))
    return x if bias is None else x + as_row(bias)


def _logits_of(form: Form, tile: Tile, x: jax.Array) -> jax.Array:
    """transform(x) / temperature, -inf in columns that are not the block's own."""
    return jnp.where(as_row(tile.block.valid), tile.tempered(form.transform.of(x)), -jnp.inf)


def _slope(form: Form, x: jax.Array) -> jax.Array:
    """d transform(x) / d x, by the rounded x: scale / cosh(scale x / softcap)^2."""
    transform = form.transform
    if transform.softcap is None:
        return jnp.full_like(x, transform.scale)
    if transform.dtype == "bfloat16":
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return transform.scale / jnp.cosh(transform.scale * x / transform.softcap) ** 2


def _exponentials(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """m = max z, exp(z - m) and z - m; zeros where no logit is finite."""
    m = z.max(axis=1)
    d = z - jnp.where(m == -jnp.inf, 0, m)[:, None]
    return m, jnp.exp(d), d
