"""Finds the largest numbers among those spread over devices, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.sharding import ShardAxes, vary


def total(axes: ShardAxes, x: jax.Array) -> jax.Array:
    """Per-shard: the sum of the entries of all data and context shards, in the dtype of x."""
    return axes.psum(vary(x.sum(dtype=x.dtype), axes.tokens), axes.tokens)


def ordered_bits(x: jax.Array) -> jax.Array:
    """u32 numbers in the same order as the f32 x; -0 and 0 are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def highest(
    axes: ShardAxes, scores: jax.Array, lots: jax.Array, candidates: jax.Array, wanted: jax.Array
) -> jax.Array:
    """The `wanted` candidates with the highest u32 scores over all shards, or all if fewer;
    `lots` break ties.
    """
    cut = kth(axes, scores, candidates, wanted)
    above = candidates & (scores > cut)
    tied = candidates & (scores == cut)
    missing = wanted - total(axes, above.astype(jnp.int32))
    return above | (tied & (lots >= kth(axes, lots, tied, missing)))


def kth(axes: ShardAxes, scores: jax.Array, candidates: jax.Array, k: jax.Array) -> jax.Array:
    """The largest u32 that the scores of at least k candidates reach, 0 if there is none."""

    def reached(cut: jax.Array) -> jax.Array:
        return total(axes, (candidates & (scores >= cut)).astype(jnp.int32)) >= k

    return largest(reached)


def largest(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest u32 for which `holds` is true, if it is true up to some number and false
    beyond; 0 if never true.
    """

    def step(i: jax.Array, cut: jax.Array) -> jax.Array:
        attempt = cut | (jnp.uint32(1) << jnp.uint32(31 - i))
        return jnp.where(holds(attempt), attempt, cut)

    return lax.fori_loop(0, 32, step, jnp.uint32(0))
