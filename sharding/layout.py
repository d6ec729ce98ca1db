"""Context layouts: which positions of a row each context shard holds, as permutations of the row.

An array `[R, T]` lies in *physical* order: context shard r of C holds its places [r*T/C, (r+1)*T/C). A layout says
which *logical* position (0 the first token of the row) is at each place. For T = 16 and C = 2, shard 0 before the bar,
shard 1 behind it:

    contiguous          0  1  2  3  4  5  6  7 |  8  9 10 11 12 13 14 15
    zigzag              0  1  2  3 12 13 14 15 |  4  5  6  7  8  9 10 11
    zigzag_per_segment  0  1  6  7  8 11 12 15 |  2  3  4  5  9 10 13 14      (segments of 8, 4 and 4 positions)
    striped             0  2  4  6  8 10 12 14 |  1  3  5  7  9 11 13 15

- contiguous: equal runs. All-gather context parallelism; MaxText without load balancing, DeepSeek's sparse attention.
- zigzag: the row is cut into 2C chunks and shard r holds chunks r and 2C-1-r, so that causal attention costs every
  shard the same. Megatron's context parallelism of a padded batch; Transformer Engine's and MaxText's dual chunk swap
  (MaxText's `context_parallel_load_balance`).
- zigzag_per_segment: the same cut within each sequence, each padded to a multiple of 2C, the padding behind the last
  sequence counted as one more. Packed (thd) context parallelism of Megatron, Transformer Engine and slime.
- striped: position t is on shard t mod C. Transformer Engine's striped load balancing of packed ring attention.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int

from .mesh import check_layout


def row_multiple(layout: str, shards: int) -> int:
    """What the length of a row, and for "zigzag_per_segment" of each of its sequences, must be a multiple of.

    Example:
      >>> row_multiple("zigzag", 4), row_multiple("striped", 4)
      (8, 4)
    """
    check_layout(layout)
    return shards * (2 if layout.startswith("zigzag") and shards > 1 else 1)


def check_row_length(length: int, layout: str, shards: int, name: str = "row_length") -> None:
    """Raises ValueError, with the next length that works, where the layout cannot divide the row."""
    multiple = row_multiple(layout, shards)
    if length % multiple:
        raise ValueError(
            f"{name}: got {length}, expected a multiple of {multiple} for layout {layout!r} over {shards} context "
            f"shards; the next that works is {-(-length // multiple) * multiple}"
        )


def logical_positions(
    layout: str, length: int, shards: int, segment_lengths: Int[np.ndarray, "R S"] | None = None
) -> Int[np.ndarray, "..."]:
    """The logical position at each physical place: `physical = row[logical_positions(...)]`, on the host.

    Args:
      layout: "contiguous", "zigzag", "zigzag_per_segment" or "striped".
      length: T, the positions of a row.
      shards: C, the context shards.
      segment_lengths: `[R, S]` lengths of the sequences of each row; for "zigzag_per_segment" only.

    Returns:
      `i32[T]`, or `[R, T]` where segment_lengths are given.

    Raises:
      ValueError: an unknown layout, a length that it cannot divide, sequences that do not fit in the row.

    Example:
      >>> logical_positions("zigzag", 8, 2).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
      >>> logical_positions("zigzag_per_segment", 8, 2, np.array([[3, 4]])).tolist()
      [[0, 3, 4, 7, 1, 2, 5, 6]]
    """
    return _host_order(held_at, layout, length, shards, segment_lengths)


def physical_places(
    layout: str, length: int, shards: int, segment_lengths: Int[np.ndarray, "R S"] | None = None
) -> Int[np.ndarray, "..."]:
    """The physical place of each logical position: the inverse of `logical_positions`, with the same arguments.

    Example:
      >>> physical_places("zigzag", 8, 2).tolist()
      [0, 1, 4, 5, 6, 7, 2, 3]
    """
    return _host_order(place_of, layout, length, shards, segment_lengths)


def _host_order(formula: Any, layout: str, length: int, shards: int, lengths: np.ndarray | None) -> np.ndarray:
    check_row_length(length, layout, shards)
    ends = None
    if layout == "zigzag_per_segment":
        if lengths is None:
            raise ValueError("segment_lengths: got None, expected [R, S] for layout 'zigzag_per_segment'")
        ends = padded_ends(np.asarray(lengths), length, shards, np)
        over = np.flatnonzero(ends[:, :-1].max(axis=1, initial=0) > length)
        if over.size:
            raise ValueError(
                f"segment_lengths: got {int(ends[over[0], -2])} positions in row {over[0]}, each sequence padded to a "
                f"multiple of {row_multiple(layout, shards)}, expected at most {length}"
            )
    points = np.arange(length, dtype=np.int32)
    if ends is None:
        return formula(layout, points, length, shards, None, np).astype(np.int32)
    # row by row: the segment of a point is found by comparing it with all ends
    rows = [formula(layout, points, length, shards, ends[r : r + 1], np) for r in range(len(ends))]
    return np.concatenate(rows).astype(np.int32)


# The same formulas for numpy on the host and jax.numpy on a device (`xp`).


def padded_ends(lengths: Any, length: int, shards: int, xp: ModuleType) -> Any:
    """`[R, S+1]` logical ends of the padded sequences and, last, of the padding behind them."""
    multiple = row_multiple("zigzag_per_segment", shards)
    padded = -(-lengths // multiple) * multiple
    ends = xp.cumsum(padded, axis=1)
    return xp.concatenate([ends, xp.full_like(ends[:, :1], length)], axis=1)


def held_at(layout: str, places: Any, length: int, shards: int, ends: Any, xp: ModuleType) -> Any:
    """The logical positions at physical places `[n]`; `[R, n]` for "zigzag_per_segment"."""
    local = length // shards
    shard, offset = places // local, places % local
    if layout == "contiguous" or shards == 1:
        return places if ends is None else xp.broadcast_to(places, (ends.shape[0], places.shape[0]))
    if layout == "striped":
        return offset * shards + shard
    start, size = (0, length) if layout == "zigzag" else _segment_at(offset, ends // shards, shards, xp)
    chunk = size // (2 * shards)
    within = offset - start // shards
    first = start + shard * chunk + within
    second = start + (2 * shards - 1 - shard) * chunk + within - chunk
    return xp.where(within < chunk, first, second)


def place_of(layout: str, positions: Any, length: int, shards: int, ends: Any, xp: ModuleType) -> Any:
    """The physical places of logical positions `[n]`, or `[R, n]`: the inverse of `held_at`."""
    local = length // shards
    if layout == "contiguous" or shards == 1:
        return positions if ends is None else xp.broadcast_to(positions, (ends.shape[0], positions.shape[-1]))
    if layout == "striped":
        return positions % shards * local + positions // shards
    start, size = (0, length) if layout == "zigzag" else _segment_at(positions, ends, 1, xp)
    chunk = size // (2 * shards)
    safe = xp.maximum(chunk, 1)
    which, within = (positions - start) // safe, (positions - start) % safe
    second = which >= shards
    shard = xp.where(second, 2 * shards - 1 - which, which)
    return shard * local + start // shards + xp.where(second, chunk, 0) + within


def _segment_at(points: Any, ends: Any, scale: int, xp: ModuleType) -> tuple[Any, Any]:
    """The logical start and size of the segment that holds each point, both `[R, n]`; ends are in units of scale."""
    index = (points[..., None, :] >= ends[:, :, None]).sum(axis=1)
    index = xp.minimum(index, ends.shape[1] - 1)
    starts = xp.concatenate([xp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
    start = xp.take_along_axis(starts, index, axis=1)
    return start * scale, (xp.take_along_axis(ends, index, axis=1) - start) * scale
