"""Context layouts: which positions of a row each context shard holds, as permutations of the row.

An array `[R, T]` lies in *physical* order: context shard r of C holds its places [r*T/C,
(r+1)*T/C). A layout says which *logical* position (0 the first token of the row) is at each place.
For T = 16 and C = 2, shard 0 before the bar, shard 1 behind it:

    contiguous          0  1  2  3  4  5  6  7 |  8  9 10 11 12 13 14 15
    zigzag              0  1  2  3 12 13 14 15 |  4  5  6  7  8  9 10 11
    zigzag_per_segment  0  1  6  7  8 11 12 15 |  2  3  4  5  9 10 13 14      (segments of 8, 4 and 4 positions)
    striped             0  2  4  6  8 10 12 14 |  1  3  5  7  9 11 13 15
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from ..checks import check_int
from .base import Row, find_layout, register_layout
from .orders import Contiguous, Striped, Zigzag, ZigzagPerSegment

for layout in (Contiguous(), Zigzag(), ZigzagPerSegment(), Striped()):
    register_layout(layout)


def row_multiple(layout: str, shards: int) -> int:
    """The number that divides every valid row length; for "zigzag_per_segment" it divides every
    padded sequence too.

    Example:
      >>> row_multiple("zigzag", 4), row_multiple("striped", 4)
      (8, 4)
    """
    return find_layout(layout, shards=check_int("shards", shards, 1)).row_multiple(shards)


def segment_multiple(layout: str, shards: int) -> int:
    """Each sequence of a row must be padded to a multiple of this number.

    Example:
      >>> segment_multiple("zigzag_per_segment", 4), segment_multiple("zigzag", 4)
      (8, 1)
    """
    return row_multiple(layout, shards) if find_layout(layout).per_segment else 1


def in_order(layout: str, shards: int) -> bool:
    """Whether the physical order of a row is its logical order.

    Example:
      >>> in_order("contiguous", 4), in_order("zigzag", 4), in_order("zigzag", 1)
      (True, False, True)
    """
    return shards == 1 or type(find_layout(layout)) is Contiguous


def check_row_length(length: int, layout: str, shards: int, name: str = "row_length") -> None:
    """Raises ValueError, with the next length that works, where the layout cannot divide the
    row.
    """
    multiple = row_multiple(layout, shards)
    if check_int(name, length, 1) % multiple:
        raise ValueError(
            f"{name}: got {length}, expected a multiple of {multiple} for layout {layout!r} over"
            f" {shards} context shards; the next that works is {-(-length // multiple) * multiple}"
        )


def logical_positions(
    layout: str, length: int, shards: int, segment_lengths: Int[np.ndarray, "R S"] | None = None
) -> Int[np.ndarray, "..."]:
    """The logical position at each physical place: `physical = row[logical_positions(...)]`, on the
    host.

    Args:
      layout: a name in `LAYOUTS`.
      length: T, the positions of a row.
      shards: C, the context shards.
      segment_lengths: `[R, S]` lengths of the sequences of each row, which "zigzag_per_segment"
        alone needs.

    Returns:
      `i32[T]`, or `[R, T]` for a layout that needs segment_lengths.

    Raises:
      ValueError: an unknown layout, a length that it cannot divide, sequences that do not fit in
        the row.

    Example:
      >>> logical_positions("zigzag_per_segment", 8, 2, np.array([[3, 4]])).tolist()
      [[0, 3, 4, 7, 1, 2, 5, 6]]
    """
    return _on_host("position_at", layout, length, shards, segment_lengths)


def physical_places(
    layout: str, length: int, shards: int, segment_lengths: Int[np.ndarray, "R S"] | None = None
) -> Int[np.ndarray, "..."]:
    """The physical place of each logical position: the inverse of `logical_positions`, with the
    same arguments.

    Example:
      >>> physical_places("zigzag", 8, 2).tolist()
      [0, 1, 4, 5, 6, 7, 2, 3]
    """
    return _on_host("place_of", layout, length, shards, segment_lengths)


def _on_host(
    formula: str, layout: str, length: int, shards: int, segment_lengths: np.ndarray | None
) -> np.ndarray:
    check_row_length(length, layout, shards)
    fn, points = (
        getattr(find_layout(layout, shards=shards), formula),
        np.arange(length, dtype=np.int32),
    )
    if not find_layout(layout).per_segment:
        return np.asarray(fn(points, Row(length, shards)), np.int32)
    lengths = np.asarray(segment_lengths)
    if lengths.ndim != 2 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise ValueError(
            f"segment_lengths: got {segment_lengths}, expected [R, S] integers >= 0 for {layout!r}"
        )
    multiple = row_multiple(layout, shards)
    rows = Row.of(length, shards, lengths.astype(np.int64), multiple, np)
    for row in np.flatnonzero(rows.sizes[:, -1] < 0):
        raise ValueError(
            f"segment_lengths: got {length - rows.sizes[row, -1]} positions in row {row}, each"
            f" sequence padded to a multiple of {multiple}, expected at most {length}"
        )
    # row by row: the segment of a point is found by comparing it with all ends
    each = [fn(points, dataclasses.replace(rows, sizes=sizes[None])) for sizes in rows.sizes]
    return np.concatenate([np.broadcast_to(one, (1, length)) for one in each]).astype(np.int32)
