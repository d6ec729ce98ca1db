"""Zigzag within each sequence, padded to a multiple of 2C; the padding at the end of the row is one more sequence.

Packed (thd) context parallelism of Megatron, Transformer Engine and slime.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..axes import ShardAxes
from .base import Layout, Row, take
from .contiguous import widen
from .runs import Runs, following
from .zigzag import Zigzag


class ZigzagPerSegment(Zigzag):
    """Each sequence is a chain with two runs on each shard. All shards know its length, so none sends segment ids."""

    name = "zigzag_per_segment"
    per_segment = True
    to_contiguous, from_contiguous = Layout.to_contiguous, Layout.from_contiguous

    def span(self, points: Any, row: Row) -> tuple[Any, Any]:
        return row.at(points, row.ends - row.sizes), row.at(points, row.sizes)

    def runs(self, row: Row, rows: int) -> Runs:
        ends, sizes = row.ends[:, :-1] // row.shards, row.sizes[:, :-1] // row.shards
        places, middles = jnp.arange(row.local, dtype=jnp.int32)[None], ends - sizes // 2
        behind = places[:, None] >= ends[:, :, None]
        segment = jnp.minimum(behind.sum(axis=1, dtype=jnp.int32), sizes.shape[1] - 1)
        starts, stops = jnp.concatenate([ends - sizes, middles], axis=1), jnp.concatenate([middles, ends], axis=1)
        of_place = segment + sizes.shape[1] * (places >= take(middles, segment)).astype(jnp.int32)
        chunk, q = (sizes // 2)[None], jnp.arange(2 * row.shards, dtype=jnp.int32)[:, None, None]
        numbers = jnp.arange(1, sizes.shape[1] + 1, dtype=jnp.int32)
        links = (q * chunk < row.lengths[None]).astype(jnp.int32) * numbers[None, None]
        return Runs(starts, stops, of_place, 2, 1, take((ends - sizes) * row.shards + row.lengths, segment), links)

    def hop(self, axes: ShardAxes, runs: Runs, x: jax.Array, by: int) -> jax.Array:
        """One position at a time, since a chunk of a short sequence may hold only one."""
        heads = take(x, runs.starts)
        after = following(axes, heads.reshape(x.shape[0], 2, -1, *x.shape[2:])).reshape(heads.shape)
        at_end = jnp.arange(x.shape[1], dtype=jnp.int32)[None] == take(runs.stops, runs.of_place) - 1
        return jnp.where(widen(at_end, x), take(after, runs.of_place), jnp.concatenate([x[:, 1:], x[:, :1]], axis=1))
