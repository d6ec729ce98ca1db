"""Equal runs: all-gather context parallelism, MaxText without load balancing, DeepSeek's sparse attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..axes import ShardAxes
from .base import Fill, Layout, Pair, Points, Row, places_of
from .runs import Runs, following, scan_runs


class Contiguous(Layout):
    """Shifts and scans run by run, so that only the ends of runs cross the border of a shard."""

    name = "contiguous"
    halves = 1

    def row_multiple(self, shards: int) -> int:
        return shards * self.halves

    def position_at(self, places: Points, row: Row) -> Points:
        return places

    def place_of(self, positions: Points, row: Row) -> Points:
        return positions

    def runs(self, row: Row, rows: int) -> Runs:
        """One chain, in equal parts."""
        size = row.local // self.halves
        starts = jnp.broadcast_to(jnp.arange(self.halves, dtype=jnp.int32) * size, (rows, self.halves))
        of_place = jnp.broadcast_to(jnp.arange(row.local, dtype=jnp.int32) // size, (rows, row.local))
        return Runs(starts, starts + size, of_place, self.halves, size)

    def hop(self, axes: ShardAxes, runs: Runs, x: jax.Array, by: int) -> jax.Array:
        """x shifted by at most the length of the shortest run."""
        split = x.reshape(x.shape[0], self.halves, -1, *x.shape[2:])
        return jnp.concatenate([split[:, :, by:], following(axes, split[:, :, :by])], axis=2).reshape(x.shape)

    def shift(
        self, axes: ShardAxes, x: Any, by: int, fill: Fill, segment_ids: jax.Array | None, num_segments: int | None
    ) -> Any:
        row = self.row(axes, x, segment_ids, num_segments)
        runs, by = self.runs(row, jax.tree.leaves(x)[0].shape[0]), min(by, row.length)

        def shifted(x: jax.Array) -> jax.Array:
            for gone in range(0, by, runs.shortest):
                x = self.hop(axes, runs, x, min(runs.shortest, by - gone))
            return x

        if segment_ids is not None and runs.sequence_ends is None:
            stays = (shifted(segment_ids) == segment_ids) & (segment_ids > 0)
        else:
            position = self.position_at(places_of(axes.index(axes.context), row), row)
            stays = position + by < (row.length if runs.sequence_ends is None else runs.sequence_ends)
        return jax.tree.map(lambda y: jnp.where(widen(stays, y), shifted(y), jnp.asarray(fill, y.dtype)), x)

    def scan(
        self, axes: ShardAxes, ab: Pair, reverse: bool, segment_ids: jax.Array | None, num_segments: int | None
    ) -> jax.Array:
        row = self.row(axes, ab, segment_ids, num_segments)
        return scan_runs(axes, self.runs(row, ab[1].shape[0]), ab, reverse, segment_ids)


def widen(mask: jax.Array, like: jax.Array) -> jax.Array:
    """`[R, T]` with dimensions of 1 added, to broadcast against `[R, T, ...]`."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - 2))
