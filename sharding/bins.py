"""Which row takes which sequence: the fewest rows, or even loads, and which micro-batch and device takes which row."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

import numpy as np


class Placed(NamedTuple):
    """The row, the first slot in it and the start of each bundle."""

    row: np.ndarray
    slot: np.ndarray
    start: np.ndarray


def of_sequences(bundle: np.ndarray, padded: np.ndarray, placed: Placed) -> Placed:
    """The row, the slot and the start of each sequence, from those of its bundle."""
    order = np.argsort(bundle, kind="stable")
    held = np.bincount(bundle)
    first = np.cumsum(held) - held  # the index in `order` of each bundle's first sequence
    before = np.cumsum(padded[order]) - padded[order]  # padded lengths of all earlier sequences, summed
    slot, start = (np.empty(len(padded), np.int32) for _ in range(2))
    of = bundle[order]
    slot[order] = placed.slot[of] + np.arange(len(order)) - first[of]
    start[order] = placed.start[of] + before - before[first[of]]
    return Placed(placed.row[bundle], slot, start)


def spread(
    lengths: np.ndarray, counts: np.ndarray, costs: np.ndarray, row_length: int, most: int, rows: int
) -> Placed | None:
    """Bundles, longest first, each in the row of least cost that it fits; None where a bundle then fits no row."""
    used, held = [0] * rows, [0] * rows
    placed = Placed(*(np.zeros(len(lengths), np.int32) for _ in range(3)))
    least = [(0.0, 0, row) for row in range(rows)]  # a heap of costs, lengths and rows
    for i in np.lexsort((-costs, -lengths)).tolist():
        length, sequences, passed = int(lengths[i]), int(counts[i]), []
        while least and (used[row := least[0][2]] + length > row_length or held[row] + sequences > most):
            passed.append(heapq.heappop(least))
        if not least:
            return None
        cost, _, row = heapq.heappop(least)
        placed.row[i], placed.slot[i], placed.start[i] = row, held[row], used[row]
        used[row] += length
        held[row] += sequences
        for one in (*passed, (cost + float(costs[i]), used[row], row)):
            heapq.heappush(least, one)
    return placed


def first_fit_decreasing(lengths: np.ndarray, counts: np.ndarray, row_length: int, most: int | None) -> Placed:
    """The fewest rows, about: bundles, longest first, take the first bin that they fit.

    Lengths only fall, so a bin that fits one bundle fits all later ones until it takes one. `fitting` holds such bins
    by their number, `full` the others by their free places. A bin with too few slots for a bundle stays in `fitting`.
    """
    count = len(lengths)
    free, held = [row_length] * count, [0] * count
    bins, slot, start = (np.zeros(count, np.int32) for _ in range(3))
    fitting: list[int] = []
    full: list[tuple[int, int]] = []
    used = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length, sequences = int(lengths[i]), int(counts[i])
        while full and -full[0][0] >= length:
            heapq.heappush(fitting, heapq.heappop(full)[1])
        passed: list[int] = []
        while most is not None and fitting and held[fitting[0]] + sequences > most:
            passed.append(heapq.heappop(fitting))
        if fitting:
            first = heapq.heappop(fitting)
        else:
            first, used = used, used + 1
        for one in passed:
            heapq.heappush(fitting, one)
        bins[i], slot[i], start[i] = first, held[first], row_length - free[first]
        free[first] -= length
        held[first] += sequences
        if most is None or held[first] < most:
            heapq.heappush(full, (-free[first], first))
    return Placed(bins, slot, start)


def deal(bins: np.ndarray, costs: np.ndarray, rows: int, count: int, data: int) -> np.ndarray:
    """The row of each bin. Micro-batches hold as many bins with sequences, of similar cost; the least loaded device
    takes the next heaviest."""
    loads, held = np.zeros(rows * count), np.bincount(bins, minlength=rows * count)
    np.add.at(loads, bins, costs)
    row_of = np.empty(rows * count, np.int32)
    each = rows // data
    heaviest = np.argsort(-loads, kind="stable")
    empty = iter(heaviest[held[heaviest] == 0])
    for k, filled in enumerate(np.array_split(heaviest[held[heaviest] > 0], count)):
        carried, taken = np.zeros(data), np.zeros(data, np.int32)
        for one in (*filled, *itertools.islice(empty, rows - len(filled))):
            device = int(np.argmin(np.where(taken < each, carried, np.inf)))
            row_of[one] = k * rows + device * each + taken[device]
            carried[device] += loads[one]
            taken[device] += 1
    return row_of
