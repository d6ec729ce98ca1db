"""The largest logits of tokens and their ids, by blocks of columns; among equal logits the lowest id is first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxppo.sharding import ShardAxes, note, vary, varying

Top = tuple[jax.Array, jax.Array]  # f32[N, K] and i32[N, K], the largest first
NO_ID = 2**31 - 1  # the id of an empty place, which sorts last; its logit is -inf


def no_top(count: int, k: int) -> Top:
    """The result of `top_of_block` before any logits are seen."""
    return jnp.full((count, k), -jnp.inf, jnp.float32), jnp.full((count, k), NO_ID, jnp.int32)


def top_of_block(z: Float[Array, "N B"], columns: Int[Array, "1 B"], k: int) -> Top:
    """The k largest logits of a block whose ids rise, and their ids, without gradients; a logit of -inf has no id.

    For k = 1 one reduction reads a logit and its id together. Comparing logits with their maximum is not safe: a
    program may compute a logit twice, an ulp apart.
    """
    z = lax.stop_gradient(jnp.where(z == 0, 0, z))  # otherwise -0 would come behind 0
    B = z.shape[1]
    if k == 1:
        ids = vary(jnp.broadcast_to(columns, z.shape), varying(z))
        nothing = jnp.float32(-jnp.inf), jnp.int32(NO_ID)
        z, ids = (x[:, None] for x in lax.reduce((z, ids), nothing, _larger_or_before, (1,)))
    else:
        z, places = lax.top_k(z, min(k, B))
        ids = columns[0].at[places].get(mode="promise_in_bounds")
    ids = jnp.where(z == -jnp.inf, NO_ID, ids)
    missing = ((0, 0), (0, max(0, k - B)))
    return jnp.pad(z, missing, constant_values=-jnp.inf), jnp.pad(ids, missing, constant_values=NO_ID)


def _larger_or_before(a: Top, b: Top) -> Top:
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])


def merge_top(a: Top, b: Top) -> Top:
    """The largest logits of `a` and `b` together, as many as `a` has."""
    z, ids = (jnp.concatenate(pair, axis=1) for pair in zip(a, b, strict=True))
    return _first_of(a[0].shape[1], z, ids)


def _first_of(k: int, z: Float[Array, "N n"], ids: Int[Array, "N n"]) -> Top:
    z, ids = lax.sort((-z, ids), num_keys=2)
    return -z[:, :k], ids[:, :k]


def top_over_shards(top: Top, axes: ShardAxes) -> Top:
    """The largest of the whole vocabulary. The K largest of each device of the tensor axis are gathered."""
    z, ids = top
    with note(f"{z.shape[1]} likeliest ids per token, gathered over the tensor axis"):
        both = vary(jnp.stack([lax.bitcast_convert_type(z, jnp.int32), ids]), axes.tensor)
        bits, ids = lax.all_gather(both, axes.tensor, axis=2, tiled=True, to="invarying")
    return _first_of(z.shape[1], lax.bitcast_convert_type(bits, jnp.float32), ids)
