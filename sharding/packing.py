"""Sequences of any length packed into static `[rows, length]` rows on the host, in any context
layout, and back.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int, Num, Shaped
from numpy.typing import DTypeLike

from .bins import deal, first_fit_decreasing, of_sequences, spread
from .checks import check_int
from .layouts import check_row_length, logical_positions, segment_multiple
from .mesh import ParallelMesh, check_parallel
from .multihost import agree, check_equal, local_data_shards, spans_processes, together


@dataclasses.dataclass(frozen=True)
class Packed:
    """The place of each of N sequences in `[R, T]` rows, or in `[K, R, T]` micro-batches.

    Args:
      lengths: `i32[N]`, the tokens of each sequence.
      row: `i32[N]`, the row of each sequence; micro-batch k has rows [k * R, (k+1) * R).
      slot: `i32[N]`, the number of the sequence among its row's S segments, from 0.
      start: `i32[N]`, the first logical position of the sequence in its row.
      num_segments: S.
      rows: R, of one micro-batch.
      micro_batches: K, or None for one batch without a leading dimension.
      order: `i32[K * R, T]`, the logical position at each physical place.
      segment_ids: `i32[R, T]`, 1..S, 0 on padding.
      positions: `i32[R, T]`, places in the sequence, from 0; 0 on padding.
    """

    lengths: Int[np.ndarray, " N"]
    row: Int[np.ndarray, " N"]
    slot: Int[np.ndarray, " N"]
    start: Int[np.ndarray, " N"]
    num_segments: int
    rows: int
    micro_batches: int | None
    order: Int[np.ndarray, "KR T"]

    def place(
        self,
        values: Sequence[Any],
        fill: float = 0,
        dtype: DTypeLike | None = None,
        starts: Sequence[int] | None = None,
    ) -> Shaped[np.ndarray, "*K R T ..."]:
        """The rows that hold values[i], `[lengths[i], ...]`, at the places of sequence i, and fill
        elsewhere.

        Args:
          values: one array for each sequence.
          fill: the value of all other places.
          dtype: the dtype of the rows; by default one that holds all values.
          starts: the place in its sequence where each value begins; then values may be shorter than
            their sequences.

        Raises:
          ValueError: a value whose length is not its sequence's, or that reaches beyond the end of
            its sequence.
        """
        arrays = [np.asarray(value) for value in values]
        sizes = np.array([len(array) if array.ndim else -1 for array in arrays], np.int64)
        begins = np.zeros_like(sizes) if starts is None else np.asarray(starts, np.int64)
        fits = (
            sizes == self.lengths
            if starts is None
            else (sizes >= 0) & (begins + sizes <= self.lengths)
        )
        if not fits.all():
            i = int(np.argmin(fits))
            most = f"at most {self.lengths[i] - begins[i]} numbers"
            expected = f"length {self.lengths[i]}" if starts is None else most
            raise ValueError(f"values[{i}]: got shape {arrays[i].shape}, expected {expected}")
        shape = (*self.order.shape, *next((array.shape[1:] for array in arrays), ()))
        dtype = dtype or (np.result_type(*arrays) if arrays else np.int32)
        # zeros leaves memory untouched
        rows = np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype)
        begins = self.start + begins
        for array, row, begin, end in zip(
            arrays, self.row, begins.tolist(), (begins + sizes).tolist(), strict=True
        ):
            rows[row, begin:end] = array
        return self._split(in_physical_order(rows, self.order))

    def place_segments(
        self, values: Sequence[Any], fill: float, dtype: DTypeLike
    ) -> Num[np.ndarray, "*K R S"]:
        """One number for each sequence, `[R, S]`, and fill where a row has no such segment."""
        rows = np.full((self.order.shape[0], self.num_segments), fill, dtype)
        rows[self.row, self.slot] = np.asarray(values, dtype)
        return self._split(rows)

    @property
    def segment_ids(self) -> Int[np.ndarray, "*K R T"]:
        ids = [
            np.broadcast_to(slot + 1, length)
            for slot, length in zip(self.slot, self.lengths, strict=True)
        ]
        return self.place(ids, 0, np.int32)

    @property
    def positions(self) -> Int[np.ndarray, "*K R T"]:
        longest = np.arange(self.order.shape[1], dtype=np.int32)
        return self.place([longest[:length] for length in self.lengths], 0, np.int32)

    def _split(self, rows: np.ndarray) -> np.ndarray:
        return (
            rows
            if self.micro_batches is None
            else rows.reshape(self.micro_batches, self.rows, *rows.shape[1:])
        )


def in_physical_order(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """y[r, p] = rows[r, order[r, p]] for rows `[R, T, ...]`; `rows` itself where that is the
    same.
    """
    if order.strides[0]:  # each row has its own order
        return np.take_along_axis(
            rows, order.reshape(*order.shape, *(1,) * (rows.ndim - 2)), axis=1
        )
    return rows if (order[0] == np.arange(order.shape[1])).all() else rows[:, order[0]]


def pack(
    sequences: Sequence[Sized],
    *,
    row_length: int,
    parallel: ParallelMesh | None = None,
    rows: int | None = None,
    buckets: Sequence[int] | None = None,
    micro_batches: int | None = None,
    max_tokens: int | None = None,
    num_segments: int | None = None,
    loads: Sequence[float] | None = None,
    bundles: Sequence[int] | None = None,
) -> Packed:
    """Packs sequences into static rows, first-fit-decreasing, and spreads them so that devices have
    even loads.

    Args:
      sequences: anything with a length, 0 included.
      row_length: T; a multiple of what the mesh's context layout needs.
      parallel: the mesh whose data axes share the rows, and whose layout orders the positions. On
        several hosts, each host packs for the data shards of its own devices, all hosts call this
        together, and they agree on the sizes that the options leave open. Hosts that hold the same
        data shards must pack the same sequences.
      rows: R, the rows of the batch, or of each micro-batch; by default the fewest that the data
        axes divide.
      buckets: values of R. The smallest that is large enough is taken, so that batches share few
        compiled programs.
      micro_batches: K, the number of micro-batches; with max_tokens, the least number of them.
      max_tokens: the most positions of a micro-batch on one device, padding included; R and K
        follow from it.
      num_segments: S, the most sequences in a row; by default the power of two that holds the
        fullest row.
      loads: the cost of each sequence, such as its loss tokens; by default its length.
      bundles: the number of each sequence's bundle, 0, 1, ... without gaps. The sequences of a
        bundle stay in one row, next to each other and in their order. By default each sequence is
        its own bundle.

    Raises:
      ValueError: a sequence or a bundle that no row can hold, rows or buckets that are too small or
        that the data axes do not divide, options that exclude each other, a row length that the
        layout cannot divide.

    Example:
      >>> packed = pack([[5, 6, 7], [8], [9, 9]], row_length=4)
      >>> packed.place([[5, 6, 7], [8], [9, 9]])
      array([[5, 6, 7, 8],
             [9, 9, 0, 0]])
      >>> packed.segment_ids
      array([[1, 1, 1, 2],
             [1, 1, 0, 0]], dtype=int32)
    """
    check_parallel(parallel, "ParallelMesh or None")
    mesh = _Mesh.of(parallel)
    data = mesh.data
    options: dict[str, Any] = {
        "rows": rows,
        "buckets": buckets,
        "micro_batches": micro_batches,
        "max_tokens": max_tokens,
        "num_segments": num_segments,
    }
    with together(parallel):
        check_row_length(row_length, mesh.layout, mesh.shards)
        _check_options(options, data)
        if max_tokens is not None:
            rows = _rows_of_tokens(max_tokens, row_length, mesh.shards) * data
        to_pack = _Sequences.of(
            sequences, loads, bundles, segment_multiple(mesh.layout, mesh.shards), row_length
        )
        most = num_segments or math.inf
        size, held = _bundles(to_pack.bundle, to_pack.padded, row_length, most)
        placed = first_fit_decreasing(size, held, row_length, most)
    fullest = num_segments or 1 << int(np.bincount(placed[0], held).max(initial=1) - 1).bit_length()
    used = int(placed[0].max(initial=-1)) + 1
    each = -(-used // data)  # rows for each data shard
    if parallel is not None and spans_processes(parallel):
        by_shard = {
            "rows": rows and rows / data,
            "buckets": [bucket / data for bucket in buckets or ()],
        }
        each, fullest = _agreed({"row_length": row_length, **options, **by_shard}, each, fullest)
    _check_num_segments(options, size, held, row_length, each * data)
    rows, count = _rows_and_count(
        each * data, rows, buckets, micro_batches or 1, max_tokens is not None, data
    )
    if used < rows * count:
        loads_of_bundles = np.bincount(to_pack.bundle, to_pack.costs)
        placed = spread(size, held, loads_of_bundles, row_length, fullest, rows * count) or placed
    row, slot, start = _dealt(to_pack, placed, rows, count, data)
    order = _order(mesh, row, slot, to_pack.lengths, (rows * count, row_length), fullest)
    # sizes may have come as arrays without dimensions, which have no hash
    fullest, rows, micro_batches = int(fullest), int(rows), int(count)
    if options["micro_batches"] is None and max_tokens is None:
        micro_batches = None
    return Packed(to_pack.lengths, row, slot, start, fullest, rows, micro_batches, order)


def _agreed(options: Mapping[str, Any], each: int, fullest: int) -> tuple[int, int]:
    """The most rows of a data shard and sequences of a row on any host.

    Raises unless the hosts have equal options.
    """
    check_equal("pack", {name: value for name, value in options.items() if value})
    each, fullest = agree((each, fullest))
    return each, fullest


def _dealt(
    sequences: _Sequences, placed: tuple[np.ndarray, np.ndarray], rows: int, count: int, data: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The row, slot and start of each sequence, with rows of even loads in each micro-batch and
    on each data shard.
    """
    row, slot, start = of_sequences(sequences.bundle, sequences.padded, placed)
    if len(row):
        row = deal(row, sequences.costs, rows, count, data)[row]
    return row, slot, start


class _Mesh(NamedTuple):
    """What packing reads of a mesh."""

    layout: str
    shards: int  # of the context axes
    data: int  # the data shards of this host

    @classmethod
    def of(cls, parallel: ParallelMesh | None) -> _Mesh:
        if parallel is None:
            return cls("contiguous", 1, 1)
        return cls(parallel.context_layout, parallel.context_size, len(local_data_shards(parallel)))


class _Sequences(NamedTuple):
    """The sequences to pack, by number."""

    lengths: np.ndarray  # i32[N]
    costs: np.ndarray  # f64[N]
    padded: np.ndarray  # i32[N], the places that each takes
    bundle: np.ndarray  # i64[N]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sized],
        loads: Sequence[float] | None,
        bundles: Sequence[int] | None,
        unit: int,
        row_length: int,
    ) -> _Sequences:
        """`unit` is what the layout pads each sequence to a multiple of."""
        _check_sequences(sequences)
        lengths = np.array([len(sequence) for sequence in sequences], np.int32)
        costs = _costs(loads, lengths)
        padded = _padded(lengths, unit, row_length)
        bundle = np.arange(len(lengths))
        if bundles is not None:
            bundle = np.asarray(bundles, np.int64)
        return cls(lengths, costs, padded, bundle)


def _order(
    mesh: _Mesh,
    row: np.ndarray,
    slot: np.ndarray,
    lengths: np.ndarray,
    shape: tuple[int, int],
    fullest: int,
) -> np.ndarray:
    """The logical position at each physical place of rows of this shape, in which `fullest`
    sequences fit a row.
    """
    sizes = np.zeros((shape[0], fullest), np.int64)
    sizes[row, slot] = lengths
    return np.broadcast_to(logical_positions(mesh.layout, shape[1], mesh.shards, sizes), shape)


def _rows_of_tokens(max_tokens: int, row_length: int, shards: int) -> int:
    """The rows of a data shard whose positions on one device are at most so many."""
    rows = max_tokens * shards // row_length
    if rows == 0:
        least = -(-row_length // shards)
        raise ValueError(f"max_tokens: got {max_tokens}, expected at least {least}, one row")
    return rows


def unpack(array: Shaped[Array | np.ndarray, "*K R T ..."], packed: Packed) -> list[np.ndarray]:
    """Splits an array `[R, T, ...]` or `[K, R, T, ...]` into one array for each sequence; inverts
    `Packed.place`.

    Raises:
      ValueError: an array whose rows are not those of `packed`.
      TypeError: `packed` is not a `Packed`.

    Example:
      >>> packed = pack([[5, 6, 7], [8, 9]], row_length=4)
      >>> unpack(packed.place([[5, 6, 7], [8, 9]]), packed)
      [array([5, 6, 7]), array([8, 9])]
    """
    if not isinstance(packed, Packed):
        raise TypeError(f"packed: got {type(packed).__name__}, expected Packed, as pack returns it")
    array = np.asarray(array)
    leading = () if packed.micro_batches is None else (packed.micro_batches,)
    expected = (*leading, packed.rows, packed.order.shape[1])
    if array.shape[: len(expected)] != expected:
        raise ValueError(
            f"array: got shape {array.shape}, expected {expected} and trailing dimensions"
        )
    flat = array.reshape(*packed.order.shape, *array.shape[len(expected) :])
    places = np.argsort(packed.order, axis=1)
    spans = zip(packed.row, packed.start, packed.lengths, strict=True)
    return [flat[row, places[row, start : start + length]] for row, start, length in spans]


def _check_options(options: Mapping[str, Any], data: int) -> None:
    chosen_options = {name: value for name, value in options.items() if value is not None}
    if not isinstance(buckets := chosen_options.get("buckets", ()), Sequence):
        raise TypeError(f"buckets: got {buckets!r}, expected a sequence of numbers of rows")
    chosen = [name for name in ("rows", "buckets", "max_tokens") if name in chosen_options]
    if len(chosen) > 1:
        raise ValueError(f"{', '.join(chosen)}: got all of them, expected one at most")
    for name, value in chosen_options.items():
        for size in value if name == "buckets" else (value,):
            check_int(name, size, 1)
            if name in ("rows", "buckets") and size % data:
                raise ValueError(
                    f"{name}: got {size}, expected a multiple of {data}, the size of the data axes"
                )


def _check_sequences(sequences: Sequence[Sized]) -> None:
    """Raises unless these are sequences: a text has a length too, and its letters would be
    tokens.
    """
    expected = "a sequence of sequences"
    for name, x in [
        ("sequences", sequences),
        *((f"sequences[{i}]", x) for i, x in enumerate(_entries(sequences))),
    ]:
        if isinstance(x, (str, bytes)) or not hasattr(x, "__len__"):
            raise TypeError(f"{name}: got {type(x).__name__}, expected {expected}")
        expected = "anything with a length, but no text"


def _entries(x: Any) -> Sequence[Any]:
    return () if isinstance(x, (str, bytes)) or not hasattr(x, "__len__") else x


def _costs(loads: Sequence[float] | None, lengths: np.ndarray) -> np.ndarray:
    """The cost of each sequence, by default its length."""
    costs = np.asarray(lengths if loads is None else loads, np.float64)
    if costs.shape != lengths.shape:
        raise ValueError(
            f"loads: got shape {costs.shape}, expected one of each of the {len(lengths)} sequences"
        )
    if not np.isfinite(costs).all():
        raise ValueError(f"loads: got {costs[~np.isfinite(costs)][0]}, expected finite numbers")
    return costs


def _padded(lengths: np.ndarray, unit: int, row_length: int) -> np.ndarray:
    """The length of each sequence, padded to a multiple of `unit`; raises where one does not fit
    a row.
    """
    padded = -(-lengths // unit) * unit
    if (padded > row_length).any():
        i = int(np.argmax(padded > row_length))
        raise ValueError(
            f"sequences: got {lengths[i]} tokens ({padded[i]} with the layout's padding) in"
            f" sequence {i}, expected at most row_length={row_length}"
        )
    return padded


def _rows_and_count(
    needed: int, rows: int | None, buckets: Sequence[int] | None, least: int, more: bool, data: int
) -> tuple[int, int]:
    """The rows of a micro-batch, and the number of micro-batches: `least`, or `more` of them
    where rows need it.
    """
    count = max(least, -(-needed // rows)) if more and rows else least
    each = max(-(-needed // count), 1)
    if rows is None and buckets is None:
        rows = -(-each // data) * data
    rows = rows or min((size for size in buckets or () if size >= each), default=None)
    if rows is None:
        raise ValueError(
            f"buckets: got {tuple(buckets or ())}, expected one of at least {each} rows"
        )
    if rows * count < needed:
        raise ValueError(
            f"rows: got {rows} in each of {count} micro-batches, expected at least {needed} in all"
        )
    return rows, count


def _check_num_segments(
    options: Mapping[str, Any], size: np.ndarray, held: np.ndarray, row_length: int, needed: int
) -> None:
    """Raises where the rows that the options allow would do, if each could hold more sequences."""
    num_segments = options["num_segments"]
    rows = (options["rows"] or max(options["buckets"] or (0,))) * (options["micro_batches"] or 1)
    if num_segments is None or options["max_tokens"] is not None or not 0 < rows < needed:
        return

    def fits(most: int) -> bool:
        return int(first_fit_decreasing(size, held, row_length, most)[0].max(initial=-1)) < rows

    more = range(num_segments + 1, int(held.sum()) + 1)
    least = bisect.bisect_left(more, True, key=fits)
    if least < len(more):
        expected = f"at least {more[least]}, the sequences that a row then holds"
        raise ValueError(
            f"num_segments: got {num_segments}, expected {expected}, or more rows than {rows}"
        )


def _bundles(
    bundle: np.ndarray, padded: np.ndarray, row_length: int, most: float
) -> tuple[np.ndarray, np.ndarray]:
    """The places and the sequences of each bundle; raises where one does not fit a row, or a
    number has none.
    """
    if bundle.shape != padded.shape or (
        len(bundle) and set(bundle.tolist()) != set(range(bundle.max() + 1))
    ):
        raise ValueError(
            f"bundles: got {bundle.tolist()[:8]}, expected 0, 1, ... for the {len(padded)}"
            " sequences"
        )
    places = np.bincount(bundle, padded).astype(np.int64)
    held = np.bincount(bundle)
    for what, sizes, limit in (("tokens", places, row_length), ("sequences", held, most)):
        if (sizes > limit).any():
            i = int(np.argmax(sizes > limit))
            raise ValueError(
                f"bundles: got {sizes[i]} {what} in bundle {i}, expected at most {limit}, a row's"
            )
    return places, held
