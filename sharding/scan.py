"""First-order recurrences along a row, across context shards, at the cost of a few numbers a row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .mesh import ParallelMesh, ShardAxes, shard_call, vary, vary_like
from .redistribute import PER_SEGMENT, check_context_rows, check_rows, segment_lengths_and_ends, take, to_layout
from .shift import SegmentPieces


def scan_affine(
    a: Float[Array, "R T"] | float,
    b: Float[Array, "R T"],
    parallel: ParallelMesh | ShardAxes | None = None,
    reverse: bool = True,
    segment_ids: Int[Array, "R T"] | None = None,
    num_segments: int | None = None,
) -> Float[Array, "R T"]:
    """y_t = a_t * y_(t+1) + b_t along the logical positions of a row, y = 0 behind each sequence's end.

    Discounted returns are `scan_affine(gamma, rewards)`, and GAE is `scan_affine(gamma * lambda, deltas)`. Each shard
    scans its own pieces of the row and sends one pair (a, b) a piece, with segment_ids also the ids of its first and
    last position: one piece in contiguous, two in zigzag, and in zigzag_per_segment two a sequence, pairs only. In
    striped the shard goes to contiguous and back. Differentiable in a and b.

    Args:
      a: `[R, T]` coefficients in the mesh's layout, or a scalar.
      b: `[R, T]` addends in the mesh's layout.
      parallel: the mesh; rows sharded over data, positions over context.
      reverse: True runs from the end as above; False from the start, y_t = a_t * y_(t-1) + b_t.
      segment_ids: `i32[R, T]` like b: y starts anew in each sequence, and is 0 on padding whatever a and b hold
        there. Without them a row is one sequence.
      num_segments: S, static; for "zigzag_per_segment" only.

    Returns:
      `[R, T]` in the wider of the dtypes of a and b, at least f32.

    Raises:
      ValueError: shapes that differ, a row length that the layout cannot divide, missing segment_ids.

    Example:
      >>> scan_affine(0.5, jnp.array([[0.0, 4.0, 0.0, 8.0]]), segment_ids=jnp.array([[1, 1, 2, 2]]))
      Array([[2., 4., 4., 8.]], dtype=float32)
    """
    check_rows({"b": b}, segment_ids)
    if b.ndim != 2 or jnp.shape(a) not in ((), b.shape):
        raise ValueError(f"a, b: got shapes {jnp.shape(a)} and {b.shape}, expected [R, T] both, or a scalar a")
    check_context_rows(parallel, b, segment_ids, num_segments, "scan_affine")
    dtype = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    a, b = jnp.broadcast_to(jnp.asarray(a, dtype), b.shape), b.astype(dtype)
    args = {"a": a, "b": b, "segment_ids": segment_ids}
    specs = lambda p: ([p.tokens_spec] * 3, p.tokens_spec)  # noqa: E731
    return shard_call("scan_affine", _per_shard, parallel, args, specs, (reverse, num_segments))


def _per_shard(
    axes: ShardAxes, static: tuple[bool, int | None], a: jax.Array, b: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
    reverse, num_segments = static
    return scan_shard(axes, a, b, reverse, segment_ids, num_segments)


def scan_shard(
    axes: ShardAxes,
    a: jax.Array,
    b: jax.Array,
    reverse: bool,
    segment_ids: jax.Array | None,
    num_segments: int | None,
) -> jax.Array:
    """`scan_affine` for code inside a `shard_map`, each array as this device holds it."""
    shards = axes.size(axes.context)
    layout = axes.context_layout if shards > 1 else "contiguous"
    if layout == "striped":
        a, b, segment_ids = to_layout(axes, (a, b, segment_ids), layout, "contiguous")
        inner = dataclasses.replace(axes, context_layout="contiguous")
        return to_layout(axes, scan_shard(inner, a, b, reverse, segment_ids, num_segments), "contiguous", layout)
    if segment_ids is not None:
        a, b = jnp.where(segment_ids > 0, a, 0), jnp.where(segment_ids > 0, b, 0)
    a, b = vary(vary_like(a, b, segment_ids), axes.context), vary(vary_like(b, a, segment_ids), axes.context)
    segments = None
    if layout == PER_SEGMENT:
        segments = SegmentPieces.of(axes, segment_lengths_and_ends(axes, segment_ids, num_segments)[1], b.shape[1])
    pieces = _Pieces.of(layout, b.shape[0], b.shape[1], reverse, segments)

    # y = product * carry + total, the carry being y at the neighbouring position of the next piece.
    inside = jnp.where(pieces.is_entry | _breaks(segment_ids, reverse), 0, a)
    product, total = _scan(inside, (jnp.where(pieces.is_entry, a, 0), b), axis=1, reverse=reverse)
    if shards == 1:
        return total
    carry = _carries(axes, pieces, product, total, reverse, segment_ids if layout != PER_SEGMENT else None)
    return product * take(carry, pieces.piece) + total


def _breaks(segment_ids: jax.Array | None, reverse: bool) -> jax.Array | bool:
    """Where the neighbour that y is computed from belongs to another sequence; the shard's borders do not count."""
    if segment_ids is None:
        return False
    differs = segment_ids[:, 1:] != segment_ids[:, :-1]
    border = jnp.zeros_like(differs[:, :1])
    return jnp.concatenate([differs, border] if reverse else [border, differs], axis=1)


def _scan(a: jax.Array, bs: Any, axis: int, reverse: bool) -> Any:
    """y_t = a_t * y_(t+1) + b_t for each b, from y = 0, by doubling the reach of each position.

    `lax.associative_scan` does half the multiplications, in strided slices that take twice as long to compile.
    """
    length = a.shape[axis]

    def neighbour(x: jax.Array, distance: int) -> jax.Array:
        kept = lax.slice_in_dim(x, *((distance, length) if reverse else (0, length - distance)), axis=axis)
        none = jnp.zeros_like(lax.slice_in_dim(x, 0, distance, axis=axis))
        return jnp.concatenate([kept, none] if reverse else [none, kept], axis)

    for distance in (1 << level for level in range((length - 1).bit_length())):
        bs = jax.tree.map(lambda b: b + a * neighbour(b, distance), bs)  # noqa: B023
        a = a * neighbour(a, distance)
    return bs


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """The runs of neighbouring positions that a shard holds, P a row, the links of G chains of runs over all shards.

    Args:
      entries: `i32[R, P]`, the place of each run that its carry comes in at: its last one when reversed.
      exits: `i32[R, P]`, the place at its other end, whose y is the carry of the next run.
      piece: `i32[R, T_local]`, the run of each place; P is ordered as [halves, G].
      halves: links of one chain on one shard: shard r has link r and, with two of them, link 2C-1-r.
    """

    entries: Int[Array, "R P"]
    exits: Int[Array, "R P"]
    piece: Int[Array, "R T"]
    halves: int

    @classmethod
    def of(cls, layout: str, rows: int, local: int, reverse: bool, segments: SegmentPieces | None) -> _Pieces:
        places = jnp.arange(local)
        if segments is not None:
            starts = jnp.concatenate([segments.starts, segments.middles], axis=1)
            ends = jnp.concatenate([segments.middles, segments.ends], axis=1)
            second = places >= take(segments.middles, segments.segment)
            piece = segments.segment + segments.starts.shape[1] * second
            halves = 2
        else:
            halves = 2 if layout == "zigzag" else 1
            size = local // halves
            starts = jnp.broadcast_to(jnp.arange(halves) * size, (rows, halves))
            ends = starts + size
            piece = jnp.broadcast_to(places // size, (rows, local))
        last = jnp.maximum(ends - 1, 0)
        return cls(*((last, starts) if reverse else (starts, last)), piece, halves)

    @property
    def is_entry(self) -> Bool[Array, "R T"]:
        return jnp.arange(self.piece.shape[1]) == take(self.entries, self.piece)


def _carries(
    axes: ShardAxes,
    pieces: _Pieces,
    product: jax.Array,
    total: jax.Array,
    reverse: bool,
    segment_ids: jax.Array | None,
) -> Float[Array, "R P"]:
    """The y that enters each piece here, from an all_gather of each piece's pair and, given ids, those of its ends."""
    summary = [take(product, pieces.exits), take(total, pieces.exits)]
    if segment_ids is not None:
        summary += [take(segment_ids, place).astype(total.dtype) for place in (pieces.entries, pieces.exits)]
    links = lax.all_gather(jnp.stack(summary), axes.context)  # [C, 2 or 4, R, P]
    links = links.reshape(*links.shape[:3], pieces.halves, -1)
    chain = links[..., 0, :]
    if pieces.halves == 2:
        chain = jnp.concatenate([chain, links[::-1, ..., 1, :]])
    a, b, *ids = jnp.moveaxis(chain, 1, 0)  # [Q, R, G] each

    def before(x: jax.Array) -> jax.Array:
        """Each link's predecessor in the order of the scan, 0 for the first one."""
        none = jnp.zeros_like(x[:1])
        return jnp.concatenate([x[1:], none] if reverse else [none, x[:-1]])

    linked = ids[0] == before(ids[1]) if ids else jnp.ones_like(a, bool)
    carry = jnp.where(linked, before(_scan(jnp.where(linked, a, 0), b, axis=0, reverse=reverse)), 0)
    me = axes.index(axes.context)
    mine = [me, carry.shape[0] - 1 - me][: pieces.halves]
    return jnp.concatenate([lax.dynamic_index_in_dim(carry, link, keepdims=False) for link in mine], axis=1)
