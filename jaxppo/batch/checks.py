"""Checks of a batch: shapes and dtypes at trace time, values on the host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxppo.base.arrays import IDS, INTEGERS, OPTIONAL, PER_SEGMENT, REQUIRED, check_array, check_count, check_fits
from jaxppo.batch.broken_rules import raise_first
from jaxppo.batch.extras import check_extras
from jaxppo.batch.rules import RULES, RULES_OF_ROWS, RULES_OF_STEPS, Rule, View
from jaxppo.batch.trees import starts
from jaxppo.sharding import check_row_length, in_order, logical_positions, segment_multiple

IN_CACHE = 2**14  # positions that are checked at once: their intermediate arrays stay in a core's cache


def arrays_of(fields: Mapping[str, Any], *, stacked: bool = False, prefix: str = "batch.") -> dict[str, Array]:
    """The arrays of a batch that are not None, but its extras; raises where a shape or a dtype is wrong.

    Args:
      fields: the fields of the batch, by name, unchecked.
      stacked: micro-batches may be stacked, `[K, R, T]`.
      prefix: stands before the names of arrays in errors.
    """
    existing = [name for name in (*REQUIRED, *OPTIONAL) if fields[name] is not None or name in REQUIRED]
    arrays = {name: fields[name] for name in existing}
    for name, x in arrays.items():
        check_array(prefix + name, x)
        if name in INTEGERS:
            check_fits(prefix + name, x)
    rows = arrays["loss_mask"].shape
    if len(rows) != 2 and not (stacked and len(rows) == 3):
        expected = "[R, T], or [K, R, T]" if stacked else "[R, T], one micro-batch"
        raise ValueError(f"{prefix.rstrip('.') or 'batch'}: got a loss mask of shape {rows}, expected {expected}")
    segments = (*rows[:-1], *(arrays["sample_ids"].shape[-1:] or ("S",)))
    for name, x in arrays.items():
        shape, of = (segments, "segments of sample_ids") if name in PER_SEGMENT else (rows, "positions of loss_mask")
        if x.shape != shape:
            raise ValueError(f"{prefix}{name}: got shape {x.shape}, expected {shape}, as the rows and {of}")
    check_extras(fields["extras"], rows, prefix)
    return arrays


def check_entries(
    arrays: Mapping[str, Array],
    vocab_size: Any,
    order: tuple[str, int],
    loss_tokens: Float[Array, "*K R S"] | None,
    *,
    real_last_targets: bool,
) -> None:
    """Raises at the first entry that breaks a rule, see `RolloutBatch.validate`.

    Args:
      arrays: the arrays of the batch, `[R, T]` and `[R, S]`, or stacked.
      vocab_size: V.
      order: the context layout of the rows, and its number of shards.
      loss_tokens: `[R, S]`, the number of each sequence according to the normalizer; None without one.
      real_last_targets: the batch's field.
    """
    check_count("vocab_size", vocab_size, least=1)
    rows = _rows(arrays)
    layout, shards = order
    length = rows["segment_ids"].shape[1]
    check_row_length(length, layout, shards, "row length of tokens")
    if loss_tokens is not None:
        rows["normalizer"] = np.asarray(loss_tokens).reshape(rows["sample_ids"].shape)
    check = partial(_check_rows, vocab_size=vocab_size, order=order, real_last_targets=real_last_targets)
    R, some = len(rows["segment_ids"]), max(1, IN_CACHE // length)
    if some < R:
        blocks = [{name: x[i : i + some] for name, x in rows.items()} for i in range(0, R, some)]
        try:
            lengths = np.concatenate([check(block, RULES_OF_ROWS) for block in blocks])
        except ValueError:  # the check of all rows below names the first entry
            pass
        else:
            ids = {name: rows[name] for name in IDS if name in rows} | {"lengths": lengths}
            raise_first(View(ids, lengths.shape[1], None, None, False, False, vocab_size, np), RULES_OF_STEPS)
            return
    check(rows, RULES)


def _check_rows(
    arrays: Mapping[str, np.ndarray],
    rules: tuple[Rule, ...],
    *,
    vocab_size: int,
    order: tuple[str, int],
    real_last_targets: bool,
) -> np.ndarray:
    """The length of each sequence, `[R, S]`; raises at the first entry of these rows that breaks a rule."""
    layout, shards = order
    segments, num_segments = arrays["segment_ids"], arrays["sample_ids"].shape[1]
    lengths = _lengths(segments, num_segments)
    logical = dict(arrays)
    if not in_order(layout, shards):
        places = np.broadcast_to(logical_positions(layout, segments.shape[1], shards, lengths), segments.shape)
        by_token = set(arrays) - {*PER_SEGMENT, "normalizer"}
        logical |= {name: _logical(arrays[name], places) for name in by_token}
    logical["lengths"] = lengths
    behind = lengths + starts(arrays["parents"], lengths, np) if "parents" in arrays else lengths
    numbered = _numbered(logical["segment_ids"], num_segments)
    lasts = np.pad(behind - 1, ((0, 0), (1, 0)), constant_values=-1).astype(np.int32).reshape(-1)[numbered]
    loss_tokens = None
    if "normalizer" in arrays:
        loss_tokens = _lengths(logical["segment_ids"], num_segments, logical["loss_mask"])
    raise_first(View(logical, num_segments, lasts, loss_tokens, real_last_targets, False, vocab_size, np), rules)
    _check_padding(logical["segment_ids"], lengths, layout, shards)
    return lengths


def _rows(given: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """The arrays on the host, with the rows of micro-batches joined."""
    arrays = {name: np.asarray(x) for name, x in given.items()}
    return {name: x.reshape(-1, x.shape[-1]) for name, x in arrays.items()}


def _lengths(segments: np.ndarray, num_segments: int, weights: np.ndarray | None = None) -> np.ndarray:
    """`[R, S]`, the positions of each sequence, or the sum of their weights; ids out of range left out."""
    each = None if weights is None else weights.reshape(-1)
    numbered = _numbered(segments, num_segments).reshape(-1)
    lengths = np.bincount(numbered, each, minlength=len(segments) * (num_segments + 1))
    return lengths.reshape(len(segments), -1)[:, 1:]


def _numbered(segments: np.ndarray, num_segments: int) -> np.ndarray:
    """`[R, T]`, one number for each sequence of all rows, and for a row's padding and ids out of range."""
    inside = np.where((segments >= 0) & (segments <= num_segments), segments, 0)
    return inside + np.arange(len(segments))[:, None] * (num_segments + 1)


def _logical(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    np.put_along_axis(out, order, x, axis=1)
    return out


def _check_padding(segments: np.ndarray, lengths: np.ndarray, layout: str, shards: int) -> None:
    """Raises where a layout per segment has a sequence that does not start at a multiple of its unit."""
    multiple = segment_multiple(layout, shards)
    first = np.concatenate([np.zeros_like(lengths[:, :1]), -(-lengths // multiple) * multiple], axis=1).cumsum(1)
    for row, slot in zip(*np.nonzero((lengths > 0) & (multiple > 1)), strict=True):
        start = int(np.argmax(segments[row] == slot + 1))
        if start != first[row, slot]:
            raise ValueError(
                f"segment_ids: got {slot + 1} at row {row}, position {start}, expected sequences padded to multiples "
                f"of {multiple} for layout {layout!r}"
            )
