"""Checks of the values of a batch, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxppo.base.arrays import PER_SEGMENT, check, check_count
from jaxppo.batch.broken_rules import raise_first
from jaxppo.batch.rules import View
from jaxppo.batch.trees import starts
from jaxppo.sharding import check_row_length, in_order, physical_places, segment_multiple


def check_entries(
    batch: Any, arrays: Mapping[str, Array], vocab_size: Any, counts: Array | None
) -> None:
    """Raises at the first entry of the batch's arrays that breaks a rule, see
    `RolloutBatch.validate`.

    `counts`, `[*K, R, S]`, are the loss tokens of each sequence according to the normalizer; None
    without one.
    """
    check_count("vocab_size", vocab_size, least=1)
    rows = {name: np.asarray(x).reshape(-1, x.shape[-1]) for name, x in arrays.items()}
    layout = batch.context_layout
    shards = batch.context_shards
    num_segments = batch.num_segments
    ids = rows["segment_ids"]
    length = ids.shape[1]
    check_row_length(length, layout, shards, "row length of tokens")

    known_ids = np.where((ids >= 0) & (ids <= num_segments), ids, 0)
    lengths = _segment_sums(known_ids, num_segments, None)
    ends = lengths
    if "parents" in rows:
        ends = lengths + starts(rows["parents"], lengths, np)
    lasts = np.pad(ends - 1, ((0, 0), (1, 0)), constant_values=-1).astype(np.int32)
    rows["lasts"] = np.take_along_axis(lasts, known_ids, axis=1)
    if not in_order(layout, shards):
        order = np.broadcast_to(physical_places(layout, length, shards, lengths), ids.shape)
        for name, x in rows.items():
            if name not in PER_SEGMENT:
                rows[name] = np.take_along_axis(x, order, axis=1)
    of_segments = {"lengths": lengths}
    if counts is not None:
        of_segments["normalizer"] = np.asarray(counts).reshape(lengths.shape)
        of_segments["loss_tokens"] = _segment_sums(
            known_ids, num_segments, np.asarray(arrays["loss_mask"])
        )
    raise_first(
        View(rows | of_segments, num_segments, batch.real_last_targets, False, vocab_size, np)
    )
    _check_padding(rows["segment_ids"], lengths, layout, shards)


def _segment_sums(ids: np.ndarray, num_segments: int, weights: np.ndarray | None) -> np.ndarray:
    """`[R, S]`, the sums over the segments of each row, or their lengths without weights."""
    rows = len(ids)
    per_row = num_segments + 1  # with padding
    numbers = ids + np.arange(rows)[:, None] * per_row
    if weights is not None:
        weights = weights.reshape(-1)
    sums = np.bincount(numbers.reshape(-1), weights, minlength=rows * per_row)
    return sums.reshape(rows, per_row)[:, 1:]


def _check_padding(segments: np.ndarray, lengths: np.ndarray, layout: str, shards: int) -> None:
    """Raises where a layout per segment has a sequence that does not start at a multiple of its
    unit.
    """
    multiple = segment_multiple(layout, shards)
    padded = -(-lengths // multiple) * multiple
    first = np.concatenate([np.zeros_like(lengths[:, :1]), padded], axis=1).cumsum(1)
    for row, slot in zip(*np.nonzero((lengths > 0) & (multiple > 1)), strict=True):
        start = int(np.argmax(segments[row] == slot + 1))
        expected = f"sequences padded to multiples of {multiple} for layout {layout!r}"
        got = f"{slot + 1} at row {row}, position {start}"
        check("segment_ids", got, start == first[row, slot], expected)
