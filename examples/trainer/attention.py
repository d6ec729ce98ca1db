"""Attention over packed rows whose positions are spread over the context axis."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo import ParallelMesh
from jaxppo.batch.trees import Paths


class Attend(Protocol):
    """Attention of queries to keys and values, as far as the rows allow it: see `attention` for the options."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None = None, scale: float | None = None
    ) -> jax.Array: ...


def attention(
    q: Float[Array, "R Q N D"],
    k: Float[Array, "R K M D"],
    v: Float[Array, "R K M D"],
    queries: Paths,
    keys: Paths,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "R Q N D"]:
    """Causal attention along paths, for keys in any order: arrays that travel with the tokens say who sees whom.

    Each of the M key heads serves N / M query heads that follow one another. Scores and their softmax are in f32.

    Args:
      q: queries.
      k: keys.
      v: values.
      queries: the paths of the queries.
      keys: those of the keys.
      window: a query sees so many tokens of its path, the last of them itself; None for all up to itself.
      scale: of the scores, D^-0.5 by default.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    seen = queries.attends(keys)
    if window is not None:
        seen &= queries.positions[:, :, None] - keys.positions[:, None, :] < window
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("rqmgd,rkmd->rmgqk", grouped, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("rmgqk,rkmd->rqmgd", weights.astype(v.dtype), v).reshape(q.shape)


def context_attention(paths: Paths, parallel: ParallelMesh) -> Attend:
    """`attend(q, k, v)` on `[R, T, heads, D]` arrays sharded over data, context and (heads) tensor.

    Each context shard keeps its queries and gathers the keys and values of the whole row, so that it works in every
    context layout: causality comes from the `paths` of a batch, which travel with the tokens.
    """
    axes = parallel.axes
    heads = P(*parallel.tokens_spec, parallel.logits_spec[2], None)
    whole_row = P(parallel.tokens_spec[0], None)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None = None, scale: float | None = None
    ) -> jax.Array:
        def per_shard(q, k, v, queries, keys):
            if axes.context:
                k, v = lax.all_gather(jnp.stack([k, v]), axes.context, axis=2, tiled=True)
            return attention(q, k, v, queries, keys, window=window, scale=scale)

        in_specs = (heads, heads, heads, parallel.tokens_spec, whole_row)
        sharded = jax.shard_map(per_shard, mesh=parallel.mesh, in_specs=in_specs, out_specs=heads)
        return sharded(q, k, v, paths, paths)

    return attend
