"""Attention over packed rows whose positions are spread over the context axis."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from examples.trainer.chunks import in_chunks
from jaxppo import ParallelMesh
from jaxppo.batch.trees import Paths


class Attend(Protocol):
    """Attention of queries to keys and values, as far as the rows allow it: see `attention` for
    the options.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        scale: float | None = None,
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
    """Causal attention along paths, for keys in any order: arrays that travel with the tokens say
    who sees whom.

    Each of the M key heads serves N / M query heads that follow one another. Scores and their
    softmax are in f32.

    Args:
      q: queries.
      k: keys.
      v: values.
      queries: the paths of the queries.
      keys: those of the keys.
      window: a query sees so many tokens of its path, the last of them itself; None for all up to
        itself.
      scale: of the scores, D^-0.5 by default.
    """
    seen = queries.attends(keys)
    if window is not None:
        seen &= queries.positions[:, :, None] - keys.positions[:, None, :] < window
    return _mixed(q, k, v, seen, scale)


def _mixed(
    q: Float[Array, "R Q N D"],
    k: Float[Array, "R K M D"],
    v: Float[Array, "R K M D"],
    seen: Bool[Array, "R Q K"],
    scale: float | None,
) -> Float[Array, "R Q N D"]:
    """The mean of the values that each query sees, weighed by the softmax of its scores."""
    if scale is None:
        scale = q.shape[-1] ** -0.5
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("rqmgd,rkmd->rmgqk", grouped, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("rmgqk,rkmd->rqmgd", weights.astype(v.dtype), v).reshape(q.shape)


def context_attention(paths: Paths, parallel: ParallelMesh) -> Attend:
    """`attend(q, k, v)` on `[R, T, heads, D]` arrays sharded over data, context and (heads) tensor.

    Each context shard keeps its queries and gathers the keys and values of the whole row, so that
    it works in every context layout: causality comes from the `paths` of a batch, which travel with
    the tokens.
    """
    axes = parallel.axes
    heads = P(*parallel.tokens_spec, parallel.logits_spec[2], None)
    whole_row = P(parallel.tokens_spec[0], None)

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> jax.Array:
        def per_shard(q, k, v, queries, keys):
            if axes.context:
                k, v = lax.all_gather(jnp.stack([k, v]), axes.context, axis=2, tiled=True)
            return attention(q, k, v, queries, keys, window=window, scale=scale)

        in_specs = (heads, heads, heads, parallel.tokens_spec, whole_row)
        sharded = jax.shard_map(per_shard, mesh=parallel.mesh, in_specs=in_specs, out_specs=heads)
        return sharded(q, k, v, paths, paths)

    return attend


def ordered_attention(queries: Paths, keys: Paths, slots: int, parallel: ParallelMesh) -> Attend:
    """`attend(q, k, v)` of these queries to these keys, with the same bits however rows are packed;
    see `chunks`.

    Each query has its keys in a row of its own, in the order of their positions: the key of
    position p in slot p. Slots beyond its keys have weight 0. So a sum over keys has the same terms
    in the same places, in a packed row as in a cache. A query that sees more keys than there are
    slots gets NaN: part of them would be a wrong number.

    Args:
      queries: their paths.
      keys: those of the keys, in any order.
      slots: the most keys that a query sees.
      parallel: the mesh.
    """
    sees = queries.attends(keys)
    late = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(sees, keys.positions[:, None, :], late), axis=-1)[..., :slots]

    def in_slots(x: jax.Array) -> jax.Array:
        """`[R, Q, slots]` from `[R, Q, K]`."""
        ordered = jnp.take_along_axis(x, order, axis=-1)
        return jnp.pad(ordered, ((0, 0), (0, 0), (0, slots - order.shape[2])))

    padding = queries.segment_ids == 0  # which sees all padding of its row
    fits = padding | (sees.sum(-1) <= slots)
    sees_slot = in_slots(sees)
    distance = in_slots(queries.positions[:, :, None] - keys.positions[:, None, :])
    places = jnp.pad(order, ((0, 0), (0, 0), (0, slots - order.shape[2])))
    rows = jnp.broadcast_to(jnp.arange(sees.shape[0], dtype=jnp.int32)[:, None], sees.shape[:2])

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> jax.Array:
        near = sees_slot
        if window is not None:
            near = near & (distance < window)
        q = jnp.where(fits[..., None, None], q, jnp.nan)
        return in_chunks(partial(_of_chunk, scale), parallel, (k, v), q, rows, places, near)

    return attend


def _of_chunk(
    scale: float | None,
    whole: tuple[jax.Array, jax.Array],
    q: Float[Array, "1 C N D"],
    rows: Int[Array, "1 C"],
    places: Int[Array, "1 C slots"],
    sees: Bool[Array, "1 C slots"],
) -> Float[Array, "1 C N D"]:
    """A chunk of queries, each with the keys and values at its places in its row."""
    k, v = (x[rows[0][:, None], places[0]] for x in whole)
    return _mixed(q[0][:, None], k, v, sees[0][:, None], scale)[:, 0][None]
