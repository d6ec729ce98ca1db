"""What a batch holds: of which shapes and dtypes, and on the host what shapes do not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxppo._arrays import (
    IDS,
    INTEGERS,
    LOG_PROBS,
    OPTIONAL,
    PER_SEGMENT,
    REQUIRED,
    Kind,
    check_array,
    check_f32,
    check_ids,
)
from jaxppo.rules import View, raise_first
from jaxppo.sharding import check_row_length, logical_positions, segment_multiple
from jaxppo.trees import starts


def arrays_of(fields: Mapping[str, Any], *, stacked: bool = False, prefix: str = "batch.") -> dict[str, Any]:
    """The arrays of a batch that are there; raises where one holds something else than numbers in its shapes.

    Args:
      fields: the batch's, by name; its arrays may be anything.
      stacked: micro-batches may be stacked, `[K, R, T]`.
      prefix: before the names of its arrays.
    """
    there = [name for name in (*REQUIRED, *OPTIONAL) if fields[name] is not None or name in REQUIRED]
    arrays = {name: fields[name] for name in there}
    for name, x in arrays.items():
        kind: Kind = "integers" if name in INTEGERS else "numbers" if name == "loss_mask" else "floats"
        check_array(prefix + name, x, kind)
        if name in LOG_PROBS:
            check_f32(prefix + name, x)
    rows = arrays["loss_mask"].shape
    if len(rows) != 2 and not (stacked and len(rows) == 3):
        expected = "[R, T], or [K, R, T]" if stacked else "[R, T], one micro-batch"
        raise ValueError(f"{prefix.rstrip('.') or 'batch'}: got a loss mask of shape {rows}, expected {expected}")
    segments = (*rows[:-1], *(arrays["sample_ids"].shape[-1:] or ("S",)))
    for name, x in arrays.items():
        shape, of = (segments, "segments of sample_ids") if name in PER_SEGMENT else (rows, "positions of loss_mask")
        if x.shape != shape:
            raise ValueError(f"{prefix}{name}: got shape {x.shape}, expected {shape}, as the rows and {of}")
    return arrays


def check_entries(
    arrays: Mapping[str, Any],
    vocab_size: int | None,
    order: tuple[str, int],
    counts: Any,
    *,
    real_last_targets: bool,
) -> None:
    """Raises at the first entry that breaks a rule, see `RolloutBatch.validate`.

    Args:
      arrays: the batch's, `[R, T]` and `[R, S]`, or stacked.
      vocab_size: V.
      order: the context layout that rows are in, and for how many shards.
      counts: `[R, S]`, the loss tokens of each sequence as the normalizer has them; None without one.
      real_last_targets: as the batch's.
    """
    if not isinstance(vocab_size, (int, np.integer)) or vocab_size < 1:
        raise ValueError(f"vocab_size: got {vocab_size!r}, expected an integer of at least 1")
    arrays = _rows(arrays)
    layout, shards = order
    segments, num_segments = arrays["segment_ids"], arrays["sample_ids"].shape[1]
    length = segments.shape[1]
    check_row_length(length, layout, shards, "row length of tokens")
    lengths = _lengths(segments, num_segments)
    places = np.broadcast_to(logical_positions(layout, length, shards, lengths), segments.shape)
    logical = {name: x if name in PER_SEGMENT else _logical(x, places) for name, x in arrays.items()}
    logical["lengths"] = lengths
    behind = lengths + starts(arrays["parents"], lengths, np) if "parents" in arrays else lengths
    inside = np.clip(logical["segment_ids"], 0, num_segments)
    lasts = np.take_along_axis(np.pad(behind, ((0, 0), (1, 0))), inside, axis=1) - 1
    loss_tokens = None
    if counts is not None:
        logical["normalizer"] = np.asarray(counts).reshape(lengths.shape)
        loss_tokens = _lengths(logical["segment_ids"], num_segments, logical["loss_mask"])
    raise_first(View(logical, num_segments, lasts, loss_tokens, real_last_targets, False, vocab_size, np))
    _check_padding(logical["segment_ids"], lengths, layout, shards)


def _rows(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays on the host, micro-batches as more rows."""
    arrays = {name: np.asarray(x) for name, x in given.items()}
    for name in set(IDS) & set(arrays):
        check_ids(name, arrays[name])
    return {name: x.reshape(-1, x.shape[-1]) for name, x in arrays.items()}


def _lengths(segments: np.ndarray, num_segments: int, weights: np.ndarray | None = None) -> np.ndarray:
    """`[R, S]`, the positions of each sequence, or the sum of their weights; ids out of range left out."""
    inside = np.where((segments >= 0) & (segments <= num_segments), segments, 0)
    numbered = inside + np.arange(len(segments))[:, None] * (num_segments + 1)
    each = None if weights is None else weights.reshape(-1)
    counts = np.bincount(numbered.reshape(-1), each, minlength=len(segments) * (num_segments + 1))
    return counts.reshape(len(segments), -1)[:, 1:]


def _logical(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    np.put_along_axis(out, order, x, axis=1)
    return out


def _check_padding(segments: np.ndarray, lengths: np.ndarray, layout: str, shards: int) -> None:
    """Raises where a layout that cuts each sequence finds one that does not start at its multiple."""
    multiple = segment_multiple(layout, shards)
    first = np.concatenate([np.zeros_like(lengths[:, :1]), -(-lengths // multiple) * multiple], axis=1).cumsum(1)
    for row, slot in zip(*np.nonzero((lengths > 0) & (multiple > 1)), strict=True):
        start = int(np.argmax(segments[row] == slot + 1))
        if start != first[row, slot]:
            raise ValueError(
                f"segment_ids: got {slot + 1} at row {row}, position {start}, expected sequences padded to multiples "
                f"of {multiple} for layout {layout!r}"
            )
