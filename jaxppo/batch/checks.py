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


def check_entries(batch: Any, arrays: Mapping[str, Array], vocab_size: Any, counts: Array | None) -> None:
    """Raises at the first entry of the batch's arrays that breaks a rule, see `RolloutBatch.validate`.

    `counts`, `[*K, R, S]`, are the loss tokens of each sequence according to the normalizer; None without one.
    """
    check_count("vocab_size", vocab_size, least=1)
    rows = {name: np.asarray(x).reshape(-1, x.shape[-1]) for name, x in arrays.items()}
    layout, shards, num_segments = batch.context_layout, batch.context_shards, batch.num_segments
    length = rows["segment_ids"].shape[1]
    check_row_length(length, layout, shards, "row length of tokens")

    ids = rows["segment_ids"]
    inside = np.where((ids >= 0) & (ids <= num_segments), ids, 0)
    numbered = inside + np.arange(len(ids))[:, None] * (num_segments + 1)  # a number for each sequence of all rows

    def sums(weights: np.ndarray | None) -> np.ndarray:
        each = np.bincount(numbered.reshape(-1), weights, minlength=len(ids) * (num_segments + 1))
        return each.reshape(len(ids), -1)[:, 1:]

    lengths = sums(None)
    behind = lengths + starts(rows["parents"], lengths, np) if "parents" in rows else lengths
    ends = np.pad(behind - 1, ((0, 0), (1, 0)), constant_values=-1).astype(np.int32)
    known = {"lengths": lengths}
    if counts is not None:
        known["normalizer"] = np.asarray(counts).reshape(lengths.shape)
        known["loss_tokens"] = sums(rows["loss_mask"].reshape(-1))
    rows["lasts"] = np.take_along_axis(ends, inside, axis=1)
    if not in_order(layout, shards):
        order = np.broadcast_to(physical_places(layout, length, shards, lengths), ids.shape)
        rows |= {n: np.take_along_axis(x, order, axis=1) for n, x in rows.items() if n not in PER_SEGMENT}
    raise_first(View(rows | known, num_segments, batch.real_last_targets, False, vocab_size, np))
    _check_padding(rows["segment_ids"], lengths, layout, shards)


def _check_padding(segments: np.ndarray, lengths: np.ndarray, layout: str, shards: int) -> None:
    """Raises where a layout per segment has a sequence that does not start at a multiple of its unit."""
    multiple = segment_multiple(layout, shards)
    first = np.concatenate([np.zeros_like(lengths[:, :1]), -(-lengths // multiple) * multiple], axis=1).cumsum(1)
    for row, slot in zip(*np.nonzero((lengths > 0) & (multiple > 1)), strict=True):
        start = int(np.argmax(segments[row] == slot + 1))
        expected = f"sequences padded to multiples of {multiple} for layout {layout!r}"
        got = f"{slot + 1} at row {row}, position {start}"
        check("segment_ids", got, start == first[row, slot], expected)
