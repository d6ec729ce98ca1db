"""The arithmetic of a tile in plain formulas, for comparison. Every array is materialised."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.likeliest import NO_ID, Top, merge_top, no_top
from jaxppo.head.softmax import Cotangents, Residuals, Sums, top_key
from jaxppo.head.tile import factor_and_bias, is_target, products, tempered, transformed
from jaxppo.head.types import HeadCall, Op, Tile, Transform


@dataclasses.dataclass(frozen=True)
class Reference(Op):
    """A tile by the plain formulas, for tests of the other implementations."""

    def forward(self, call: HeadCall, tile: Tile, like: Sums, keep: bool) -> tuple[Sums, jax.Array]:
        x, hot = products(call, tile.chunk.rows, tile.block.parameters), is_target(tile)
        z = _logits(call, tile, x)
        inside = z if tile.nucleus is None else jnp.where(tile.nucleus, z, -jnp.inf)
        (m, e, d), (nucleus_m, nucleus_e, _) = _exponentials(z), _exponentials(inside)
        found = Sums(
            m=m,
            s=e.sum(axis=1),
            u=jnp.where(e > 0, e * d, 0).sum(axis=1),
            nucleus_m=nucleus_m,
            nucleus_s=nucleus_e.sum(axis=1),
            z_y=jnp.where(hot, z, 0).sum(axis=1),
            total=jnp.where(jnp.isfinite(z), z, 0).sum(axis=1),
            finite=(z > -jnp.inf).astype(jnp.float32).sum(axis=1),
            likeliest=top_key(z, hot).max(axis=1),
            squares=(e**2).sum(axis=1),
            z_ids=None if tile.ids is None else jnp.where(_hot_ids(tile), z[:, None], 0).sum(axis=2),
            top=None if like.top is None else _top(z, tile.block.column_ids, like.top[0].shape[1]),
        )
        asked: Any = (None if before is None else y for before, y in zip(like, found, strict=True))
        return Sums(*asked), x

    def dlogits(
        self, call: HeadCall, tile: Tile, residuals: Residuals, cotangents: Cotangents, x: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        x = products(call, tile.chunk.rows, tile.block.parameters)
        logits = _logits(call, tile, x)
        p = log_p = jnp.zeros_like(logits)
        if residuals.m is not None:
            log_p = logits - residuals.m[:, None] - residuals.log_s[:, None]
            p = jnp.exp(log_p)
        renormalised = p
        if tile.nucleus is not None:
            inside = jnp.where(tile.nucleus, logits, -jnp.inf)
            renormalised = jnp.exp(inside - residuals.nucleus_m[:, None] - residuals.nucleus_log_s[:, None])
        dz = cotangents.log_prob[:, None] * (is_target(tile).astype(jnp.float32) - renormalised)
        if cotangents.entropy is not None:
            of_entropy = jnp.where(p > 0, log_p + residuals.entropy[:, None], 0)
            dz -= cotangents.entropy[:, None] * p * of_entropy
        if cotangents.log_z is not None:
            dz += cotangents.log_z[:, None] * p
        if cotangents.mean_logit is not None:
            dz += cotangents.mean_logit[:, None] / residuals.finite[:, None]
        if cotangents.ids is not None:
            dz += (cotangents.ids[:, :, None] * (_hot_ids(tile).astype(jnp.float32) - p[:, None])).sum(axis=1)
        counts = cotangents.counts[:, None] & tile.block.valid & (x != -jnp.inf)
        dx = jnp.where(counts, tempered(tile.chunk, dz) * _slope(call.transform, x), 0)
        return factor_and_bias(tile, dx)


def _hot_ids(tile: Tile) -> jax.Array:
    """One-hot of each id, `[C, K, B]`."""
    ids = jnp.asarray(tile.chunk.ids)
    return ids[:, :, None] == jnp.where(tile.block.valid, tile.block.column_ids, -1)[None]


def _top(z: jax.Array, columns: jax.Array, k: int) -> Top:
    """All logits sorted, and the first k."""
    return merge_top(no_top(z.shape[0], k), (z, jnp.where(z == -jnp.inf, NO_ID, columns)))


def _logits(call: HeadCall, tile: Tile, x: jax.Array) -> jax.Array:
    """transform(x) / temperature, -inf in columns that are not the block's own."""
    return jnp.where(tile.block.valid, tempered(tile.chunk, transformed(call.transform, x)), -jnp.inf)


def _slope(transform: Transform, x: jax.Array) -> jax.Array:
    """d transform(x) / d x at the rounded x: scale / cosh(scale x / softcap)^2."""
    if transform.softcap is None:
        return jnp.full_like(x, transform.scale)
    if transform.dtype == "bfloat16":
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return transform.scale / jnp.cosh(transform.scale * x / transform.softcap) ** 2


def _exponentials(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """m = max z, exp(z - m) and z - m. The exponentials are 0 if no logit is finite."""
    m = z.max(axis=1)
    d = z - jnp.where(m == -jnp.inf, 0, m)[:, None]
    return m, jnp.exp(d), d
