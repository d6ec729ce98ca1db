"""Attention over packed rows whose positions are spread over the context axis."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo import ParallelMesh

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attention(
    q: Float[Array, "R Q N D"],
    k: Float[Array, "R K M D"],
    v: Float[Array, "R K M D"],
    q_segments: Int[Array, "R Q"],
    q_positions: Int[Array, "R Q"],
    kv_segments: Int[Array, "R K"],
    kv_positions: Int[Array, "R K"],
) -> Float[Array, "R Q N D"]:
    """Causal attention within segments, for keys in any order: who sees whom is read from ids and positions alone.

    Each of the M key heads serves N / M query heads that follow one another. Scores and their softmax are in f32.
    """
    same = q_segments[:, :, None] == kv_segments[:, None, :]
    visible = same & (q_positions[:, :, None] >= kv_positions[:, None, :])
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("rqmgd,rkmd->rmgqk", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("rmgqk,rkmd->rqmgd", weights.astype(v.dtype), v).reshape(q.shape)


def context_attention(segment_ids: Int[Array, "R T"], positions: Int[Array, "R T"], parallel: ParallelMesh) -> Attend:
    """`attend(q, k, v)` on `[R, T, heads, D]` arrays sharded over data, context and (heads) tensor.

    Each context shard keeps its queries and gathers the keys and values of the whole row, so that it works in every
    context layout: causality comes from `positions`, which travel with the tokens.
    """
    axes = parallel.axes
    heads = P(*parallel.tokens_spec, parallel.logits_spec[2], None)
    whole_row = P(parallel.tokens_spec[0], None)

    def per_shard(q, k, v, *ids):
        if axes.context:
            k, v = lax.all_gather(jnp.stack([k, v]), axes.context, axis=2, tiled=True)
        return attention(q, k, v, *ids)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        in_specs = (heads, heads, heads, parallel.tokens_spec, parallel.tokens_spec, whole_row, whole_row)
        sharded = jax.shard_map(per_shard, mesh=parallel.mesh, in_specs=in_specs, out_specs=heads)
        return sharded(q, k, v, segment_ids, positions, segment_ids, positions)

    return attend
