"""The context layouts of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..axes import ShardAxes
from .base import Fill, Layout, Pair, Points, Row, places_of, take, widen
from .runs import Runs, following, scan_runs


class Contiguous(Layout):
    """Equal runs: all-gather context parallelism, MaxText without load balancing, DeepSeek's sparse
    attention.

    Shifts and scans go run by run, so that only the ends of runs cross the border of a shard.
    """

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
        starts = jnp.broadcast_to(
            jnp.arange(self.halves, dtype=jnp.int32) * size, (rows, self.halves)
        )
        of_place = jnp.broadcast_to(
            jnp.arange(row.local, dtype=jnp.int32) // size, (rows, row.local)
        )
        return Runs(starts, starts + size, of_place, self.halves, size)

    def hop(self, axes: ShardAxes, runs: Runs, x: jax.Array, by: int) -> jax.Array:
        """x shifted by at most the length of the shortest run."""
        split = x.reshape(x.shape[0], self.halves, -1, *x.shape[2:])
        return jnp.concatenate(
            [split[:, :, by:], following(axes, split[:, :, :by])], axis=2
        ).reshape(x.shape)

    def shift(
        self, axes: ShardAxes, row: Row, x: Any, by: int, fill: Fill, segment_ids: jax.Array | None
    ) -> Any:
        runs = self.runs(row, jax.tree.leaves(x)[0].shape[0])
        by = min(by, row.length)

        def shifted(x: jax.Array) -> jax.Array:
            for gone in range(0, by, runs.shortest):
                x = self.hop(axes, runs, x, min(runs.shortest, by - gone))
            return x

        if segment_ids is not None and runs.sequence_ends is None:
            stays = (shifted(segment_ids) == segment_ids) & (segment_ids > 0)
        else:
            position = self.position_at(places_of(axes, row), row)
            end = row.length if runs.sequence_ends is None else runs.sequence_ends
            stays = position + by < end
        return jax.tree.map(
            lambda y: jnp.where(widen(stays, y), shifted(y), jnp.asarray(fill, y.dtype)), x
        )

    def scan(
        self, axes: ShardAxes, row: Row, ab: Pair, reverse: bool, segment_ids: jax.Array | None
    ) -> jax.Array:
        return scan_runs(axes, self.runs(row, ab[1].shape[0]), ab, reverse, segment_ids)


class Zigzag(Contiguous):
    """The row cut into 2C chunks, r and 2C-1-r on shard r, so that causal attention costs every
    shard the same.

    Megatron's context parallelism of a padded batch; Transformer Engine's and MaxText's dual chunk
    swap (MaxText's `context_parallel_load_balance`).
    """

    name = "zigzag"
    halves = 2

    def span(self, points: Any, row: Row) -> tuple[Any, Any]:
        """The start and the size of the span, here the row, whose chunks hold each of the
        positions.
        """
        return 0, row.length

    def position_at(self, places: Points, row: Row) -> Points:
        shard = places // row.local
        place = places % row.local
        start, size = self.span(place * row.shards, row)  # a shard holds an equal part of each span
        chunk = size // (2 * row.shards)
        offset = place - start // row.shards
        second = (offset >= chunk).astype(offset.dtype)
        return start + _mirrored(shard, second, row) * chunk + offset - second * chunk

    def place_of(self, positions: Points, row: Row) -> Points:
        start, size = self.span(positions, row)
        chunk = size // (2 * row.shards)
        link = (positions - start) // chunk
        offset = (positions - start) % chunk
        second = (link >= row.shards).astype(link.dtype)
        return (
            _mirrored(link, second, row) * row.local + start // row.shards + second * chunk + offset
        )

    def from_contiguous(self, axes: ShardAxes, row: Row, x: jax.Array) -> jax.Array:
        sent = _permute(axes, row, jnp.split(x, 2, axis=1), back=False)
        return jnp.concatenate(_even_first(axes, *sent), axis=1)

    def to_contiguous(self, axes: ShardAxes, row: Row, x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=1)
        sent = _permute(axes, row, _even_first(axes, first, second), back=True)
        return jnp.concatenate(sent, axis=1)


def _mirrored(link: Points, second: Points, row: Row) -> Points:
    """The shard of a link of a chain, or the link of a shard: 2C-1-x for second links, else x."""
    return link + second * (2 * row.shards - 1 - 2 * link)


def _permute(axes: ShardAxes, row: Row, halves: Sequence[jax.Array], back: bool) -> list[jax.Array]:
    """Sends the even and the odd chunk of each contiguous shard to its shard in zigzag, or back."""
    homes = [min(chunk, 2 * row.shards - 1 - chunk) for chunk in range(2 * row.shards)]
    sent = []
    for parity, half in enumerate(halves):
        pairs = list(enumerate(homes[parity::2]))
        if back:
            pairs = [(target, source) for source, target in pairs]
        sent.append(axes.permute(half, axes.context, pairs))
    return sent


def _even_first(
    axes: ShardAxes, first: jax.Array, second: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Swaps (first, second) chunk to (even, odd) chunk, or back; the first one on shard r is
    chunk r.
    """
    is_even = axes.index(axes.context) % 2 == 0
    return jnp.where(is_even, first, second), jnp.where(is_even, second, first)


class ZigzagPerSegment(Zigzag):
    """Zigzag within each sequence, padded to a multiple of 2C; the padding at the end of the row is
    one more sequence.

    Packed (thd) context parallelism of Megatron, Transformer Engine and slime. Each sequence is a
    chain with two runs on each shard. All shards know its length, so none sends segment ids.
    """

    name = "zigzag_per_segment"
    per_segment = True
    to_contiguous = Layout.to_contiguous
    from_contiguous = Layout.from_contiguous

    def span(self, points: Any, row: Row) -> tuple[Any, Any]:
        return row.at(points, row.ends - row.sizes), row.at(points, row.sizes)

    def runs(self, row: Row, rows: int) -> Runs:
        ends = row.ends[:, :-1] // row.shards
        sizes = row.sizes[:, :-1] // row.shards
        begins = ends - sizes
        middles = ends - sizes // 2
        S = sizes.shape[1]
        places = jnp.arange(row.local, dtype=jnp.int32)[None]
        behind = places[:, None] >= ends[:, :, None]
        segment = jnp.minimum(behind.sum(axis=1, dtype=jnp.int32), S - 1)
        is_second = (places >= take(middles, segment)).astype(jnp.int32)
        # a link of a chain is present if the sequence reaches it
        link = jnp.arange(2 * row.shards, dtype=jnp.int32)[:, None, None]
        is_present = (link * (sizes // 2)[None] < row.lengths[None]).astype(jnp.int32)
        numbers = jnp.arange(1, S + 1, dtype=jnp.int32)
        return Runs(
            starts=jnp.concatenate([begins, middles], axis=1),
            stops=jnp.concatenate([middles, ends], axis=1),
            of_place=segment + S * is_second,
            halves=2,
            shortest=1,
            sequence_ends=take(begins * row.shards + row.lengths, segment),
            links=is_present * numbers[None, None],
        )

    def hop(self, axes: ShardAxes, runs: Runs, x: jax.Array, by: int) -> jax.Array:
        """One position at a time, since a chunk of a short sequence may hold only one."""
        heads = take(x, runs.starts)
        after = following(axes, heads.reshape(x.shape[0], 2, -1, *x.shape[2:])).reshape(heads.shape)
        at_end = (
            jnp.arange(x.shape[1], dtype=jnp.int32)[None] == take(runs.stops, runs.of_place) - 1
        )
        return jnp.where(
            widen(at_end, x),
            take(after, runs.of_place),
            jnp.concatenate([x[:, 1:], x[:, :1]], axis=1),
        )


class Striped(Layout):
    """Position t on shard t mod C: Transformer Engine's striped load balancing of packed ring
    attention.
    """

    name = "striped"

    def position_at(self, places: Points, row: Row) -> Points:
        return places % row.local * row.shards + places // row.local

    def place_of(self, positions: Points, row: Row) -> Points:
        return positions % row.shards * row.local + positions // row.shards
