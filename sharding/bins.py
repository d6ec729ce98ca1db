"""Which row takes which sequence: the fewest rows, or even loads, and which micro-batch and
device takes which row.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

# the row of each bundle, and the order in which bundles came into their rows
Placed = tuple[np.ndarray, np.ndarray]


def of_sequences(
    bundle: np.ndarray, padded: np.ndarray, placed: Placed
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The row, the slot and the start of each sequence."""
    row = placed[0][bundle]
    rank = np.argsort(placed[1])[bundle]
    by_place = np.lexsort((rank, row))
    # the index in `by_place` of each row's first sequence
    first = np.searchsorted(row[by_place], row[by_place])
    # padded lengths of all earlier sequences, summed
    before = np.cumsum(padded[by_place]) - padded[by_place]
    slot = np.empty_like(row)
    slot[by_place] = np.arange(len(row)) - first
    start = np.empty_like(row)
    start[by_place] = before - before[first]
    return row, slot, start


def spread(
    lengths: np.ndarray,
    counts: np.ndarray,
    costs: np.ndarray,
    row_length: int,
    most: int,
    rows: int,
) -> Placed | None:
    """Bundles, longest first, each in the row of least cost that it fits; None where a bundle
    then fits no row.
    """
    row_of = np.zeros(len(lengths), np.int32)
    order = np.lexsort((-costs, -lengths))
    # a heap of costs, lengths, rows and numbers of sequences
    least = [(0.0, 0, row, 0) for row in range(rows)]
    for i in order.tolist():
        length = int(lengths[i])
        sequences = int(counts[i])
        passed = []
        while least and (least[0][1] + length > row_length or least[0][3] + sequences > most):
            passed.append(heapq.heappop(least))
        if not least:
            return None
        cost, used, row, held = heapq.heappop(least)
        row_of[i] = row
        for one in (*passed, (cost + float(costs[i]), used + length, row, held + sequences)):
            heapq.heappush(least, one)
    return row_of, order


def first_fit_decreasing(
    lengths: np.ndarray, counts: np.ndarray, row_length: int, most: float
) -> Placed:
    """The fewest rows, about: bundles, longest first, take the first bin that they fit.

    Lengths only fall, so a bin that fits one bundle fits all later ones until it takes one.
    `fitting` holds such bins by their number, `full` the others by their free places. A bin with
    too few slots for a bundle stays in `fitting`.
    """
    free = [row_length] * len(lengths)
    held = [0] * len(lengths)
    row_of = np.zeros(len(lengths), np.int32)
    order = np.argsort(-lengths, kind="stable")
    fitting = list(range(len(lengths)))
    full: list[tuple[int, int]] = []
    for i in order.tolist():
        length = int(lengths[i])
        sequences = int(counts[i])
        passed = []
        while full and -full[0][0] >= length:
            heapq.heappush(fitting, heapq.heappop(full)[1])
        while held[fitting[0]] + sequences > most:
            passed.append(heapq.heappop(fitting))
        first = heapq.heappop(fitting)
        for one in passed:
            heapq.heappush(fitting, one)
        row_of[i] = first
        free[first] -= length
        held[first] += sequences
        if held[first] < most:
            heapq.heappush(full, (-free[first], first))
    return row_of, order


def deal(bins: np.ndarray, costs: np.ndarray, rows: int, count: int, data: int) -> np.ndarray:
    """The row of each bin: micro-batches take as many, of similar cost; the least loaded device
    the next heaviest.
    """
    loads = np.bincount(bins, costs, rows * count)
    held = np.bincount(bins, minlength=rows * count)
    row_of = np.empty(rows * count, np.int32)
    each = rows // data
    heaviest = np.argsort(-loads, kind="stable")
    empty = iter(heaviest[held[heaviest] == 0])
    for k, filled in enumerate(np.array_split(heaviest[held[heaviest] > 0], count)):
        carried = np.zeros(data)
        taken = np.zeros(data, np.int32)
        for one in (*filled, *itertools.islice(empty, rows - len(filled))):
            device = int(np.argmin(np.where(taken < each, carried, np.inf)))
            row_of[one] = k * rows + device * each + taken[device]
            carried[device] += loads[one]
            taken[device] += 1
    return row_of
