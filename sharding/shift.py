"""Rows shifted along their logical positions, across shard borders, in every context layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from .layout import held_at
from .mesh import ParallelMesh, ShardAxes, shard_call, vary
from .redistribute import PER_SEGMENT, check_context_rows, check_rows, segment_lengths_and_ends, take, to_layout


def shift_left(
    x: Any,
    parallel: ParallelMesh | ShardAxes | None = None,
    by: int = 1,
    fill: float = 0,
    segment_ids: Int[Array, "R T"] | None = None,
    num_segments: int | None = None,
) -> Any:
    """y[t] = x[t + by] along the logical positions of a row, across shards, and `fill` where that leaves the sequence.

    By the mesh's context layout, what each row of an array (and of segment_ids, once) sends from a device is by
    positions in contiguous, 2 * by in zigzag, 2 * S * by in zigzag_per_segment (and there S counts, summed, in place of
    the segment_ids), and the shard, to contiguous and back, in striped. A shift longer than a piece of the row hops.

    Args:
      x: `[R, T, ...]` of any dtype in the mesh's layout, or a pytree of them; None leaves stay None.
      parallel: the mesh; rows sharded over data, positions over context.
      by: how far, static, at least 0.
      fill: a scalar, cast to each array's dtype.
      segment_ids: `i32[R, T]` like x: nothing crosses from one sequence to another, and padding reads `fill`. Without
        them a row is one sequence.
      num_segments: S, static; for "zigzag_per_segment" only.

    Returns:
      The pytree of x, shifted.

    Raises:
      ValueError: a negative `by`, a row length that the layout cannot divide, missing or misshapen segment_ids.

    Example:
      >>> shift_left(jnp.array([[1, 2, 3, 4]]), by=1, fill=-1, segment_ids=jnp.array([[1, 1, 2, 2]]))
      Array([[ 2, -1,  4, -1]], dtype=int32)
    """
    if by < 0:
        raise ValueError(f"by: got {by}, expected at least 0")
    check_rows(x, segment_ids)
    check_context_rows(parallel, x, segment_ids, num_segments, "shift_left")
    args = {"x": x, "fill": fill, "segment_ids": segment_ids}
    specs = lambda p: ([p.tokens_spec, P(), p.tokens_spec], p.tokens_spec)  # noqa: E731
    return shard_call("shift_left", _per_shard, parallel, args, specs, (by, num_segments))


def _per_shard(
    axes: ShardAxes, static: tuple[int, int | None], x: Any, fill: Any, segment_ids: jax.Array | None
) -> Any:
    by, num_segments = static
    return shift_shard(axes, x, by, fill, segment_ids, num_segments)


def shift_shard(
    axes: ShardAxes, x: Any, by: int, fill: Any, segment_ids: jax.Array | None, num_segments: int | None
) -> Any:
    """`shift_left` for code inside a `shard_map`, each array as this device holds it."""
    shards = axes.size(axes.context)
    layout = axes.context_layout if shards > 1 else "contiguous"
    if layout == "striped":
        x, segment_ids = to_layout(axes, (x, segment_ids), layout, "contiguous")
        inner = dataclasses.replace(axes, context_layout="contiguous")
        return to_layout(axes, shift_shard(inner, x, by, fill, segment_ids, num_segments), "contiguous", layout)
    leaves = jax.tree.leaves(x)
    if not leaves:
        return x
    local = leaves[0].shape[1]
    length = local * shards
    places = axes.index(axes.context) * local + jnp.arange(local)
    if layout == PER_SEGMENT:
        lengths, ends = segment_lengths_and_ends(axes, segment_ids, num_segments)
        pieces = SegmentPieces.of(axes, ends, local)
        shifted = _hops(functools.partial(_hop_per_segment, axes, pieces), by, longest=1)
        stops = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-2]], axis=1) + lengths
        position, stop = held_at(layout, places, length, shards, ends, jnp), take(stops, pieces.segment)
        stays = (position < stop) & (position + by < stop)
    else:
        hop = functools.partial(_hop_contiguous if layout == "contiguous" else _hop_zigzag, axes)
        shifted = _hops(hop, by, longest=local if layout == "contiguous" else local // 2)
        if segment_ids is None:
            stays = (held_at(layout, places, length, shards, None, jnp) + by < length)[None]
        else:
            stays = (shifted(segment_ids) == segment_ids) & (segment_ids > 0)

    def place(leaf: jax.Array) -> jax.Array:
        here = stays.reshape(stays.shape + (1,) * (leaf.ndim - 2))
        return jnp.where(here, shifted(leaf), jnp.asarray(fill, leaf.dtype))

    return jax.tree.map(place, x)


def _hops(hop: Callable[[jax.Array, int], jax.Array], by: int, longest: int) -> Callable[[jax.Array], jax.Array]:
    def shifted(x: jax.Array) -> jax.Array:
        for start in range(0, by, longest):
            x = hop(x, min(longest, by - start))
        return x

    return shifted


@dataclasses.dataclass(frozen=True)
class SegmentPieces:
    """Where on this shard the two pieces of each sequence lie in "zigzag_per_segment"; absent sequences lie anywhere.

    Args:
      starts: `i32[R, S]`, the local place of the first piece's first position.
      middles: `i32[R, S]`, of the second piece's.
      ends: `i32[R, S]`, one behind the second piece.
      segment: `i32[R, T_local]`, the sequence (from 0) that each place belongs to; S-1 on the padding behind the last.
    """

    starts: Int[Array, "R S"]
    middles: Int[Array, "R S"]
    ends: Int[Array, "R S"]
    segment: Int[Array, "R T"]

    @classmethod
    def of(cls, axes: ShardAxes, ends: jax.Array, local: int) -> SegmentPieces:
        """From the logical ends of the padded sequences and the number of positions here."""
        ends = ends[:, :-1] // axes.size(axes.context)
        starts = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        middles = (starts + ends) // 2
        segment = (jnp.arange(local) >= ends[:, :, None]).sum(axis=1)
        last = ends.shape[1] - 1
        inside = lambda place: jnp.minimum(place, local - 1)  # noqa: E731
        return cls(inside(starts), inside(middles), ends, jnp.minimum(segment, last))

    def at(self, places: Int[Array, "R S"]) -> Bool[Array, "R T"]:
        """Which positions are at their sequence's `places`."""
        return jnp.arange(self.segment.shape[1]) == take(places, self.segment)


def _from_next(axes: ShardAxes, x: jax.Array) -> jax.Array:
    """Shard r gets the x of shard r+1, the last one 0."""
    return lax.ppermute(vary(x, axes.context), axes.context, [(r + 1, r) for r in range(axes.size(axes.context) - 1)])


def _from_previous(axes: ShardAxes, x: jax.Array) -> jax.Array:
    """Shard r gets the x of shard r-1, the first one 0."""
    return lax.ppermute(vary(x, axes.context), axes.context, [(r, r + 1) for r in range(axes.size(axes.context) - 1)])


def _hop_contiguous(axes: ShardAxes, x: jax.Array, by: int) -> jax.Array:
    incoming = _from_next(axes, x[:, :by]) if axes.context else jnp.zeros_like(x[:, :by])
    return jnp.concatenate([x[:, by:], incoming], axis=1)


def _hop_zigzag(axes: ShardAxes, x: jax.Array, by: int) -> jax.Array:
    """Chunk r is followed by chunk r+1 of the next shard, chunk 2C-1-r by chunk 2C-r of the one before."""
    first, second = jnp.split(x, 2, axis=1)
    is_last = axes.index(axes.context) == axes.size(axes.context) - 1  # its two chunks are neighbours
    after_first = jnp.where(is_last, second[:, :by], _from_next(axes, first[:, :by]))
    after_second = _from_previous(axes, second[:, :by])
    return jnp.concatenate([first[:, by:], after_first, second[:, by:], after_second], axis=1)


def _hop_per_segment(axes: ShardAxes, pieces: SegmentPieces, x: jax.Array, by: int) -> jax.Array:
    """One position at a time, since a chunk of a short sequence may hold only one."""
    assert by == 1
    first = take(x, pieces.starts)
    second = take(x, pieces.middles)
    after_first, after_second = _from_next(axes, first), _from_previous(axes, second)
    here = jnp.concatenate([x[:, 1:], x[:, :1]], axis=1)
    wide = lambda mask: mask.reshape(mask.shape + (1,) * (x.ndim - 2))  # noqa: E731
    is_last = axes.index(axes.context) == axes.size(axes.context) - 1
    y = jnp.where(wide(pieces.at(pieces.middles - 1) & ~is_last), take(after_first, pieces.segment), here)
    return jnp.where(wide(pieces.at(pieces.ends - 1)), take(after_second, pieces.segment), y)
