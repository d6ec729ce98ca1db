"""`RolloutBatch.validate`: what shapes do not show, checked on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxppo._arrays import IDS, INTEGERS, PER_SEGMENT, check_ids
from jaxppo._sharding import check_row_length, logical_positions, segment_multiple
from jaxppo.rules import View, raise_first

if TYPE_CHECKING:
    from jaxppo.batch import RolloutBatch


def check_batch(batch: RolloutBatch, given: Mapping[str, Any], vocab_size: int) -> None:
    """Raises at the first entry of the given arrays, those that the batch has, that breaks a rule."""
    if not isinstance(vocab_size, (int, np.integer)) or vocab_size < 1:
        raise ValueError(f"vocab_size: got {vocab_size!r}, expected an integer of at least 1")
    arrays = _rows(given)
    layout, shards, segments = batch.context_layout, batch.context_shards, arrays["segment_ids"]
    length = segments.shape[1]
    check_row_length(length, layout, shards, "row length of tokens")
    lengths = _lengths(segments, batch.num_segments)
    order = np.broadcast_to(logical_positions(layout, length, shards, lengths), segments.shape)
    logical = {name: x if name in PER_SEGMENT else _logical(x, order) for name, x in arrays.items()}
    logical["present"] = lengths > 0
    inside = np.clip(logical["segment_ids"], 0, batch.num_segments)
    counts = np.take_along_axis(np.pad(lengths, ((0, 0), (1, 0))), inside, axis=1)
    raise_first(View(logical, batch.num_segments, counts, batch.real_last_targets, vocab_size, np))
    _check_padding(logical["segment_ids"], lengths, layout, shards)


def _rows(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays, micro-batches as more rows, with shapes and dtypes checked."""
    arrays = {name: np.asarray(x) for name, x in given.items()}
    for name, x in arrays.items():
        like = arrays["sample_ids" if name in PER_SEGMENT else "tokens"]
        if x.ndim not in (2, 3) or x.shape != like.shape or x.shape[:-1] != arrays["tokens"].shape[:-1]:
            expected = f"{arrays['tokens'].shape[:-1]} and S" if name in PER_SEGMENT else f"{like.shape} like tokens"
            raise ValueError(f"{name}: got shape {x.shape}, expected {expected}")
        is_integer = np.issubdtype(x.dtype, np.integer)
        if name != "loss_mask" and (name in INTEGERS) != is_integer:
            raise TypeError(f"{name}: got {x.dtype}, expected {'integers' if name in INTEGERS else 'floats'}")
        if name in IDS:
            check_ids(name, x)
    return {name: x.reshape(-1, x.shape[-1]) for name, x in arrays.items()}


def _lengths(segments: np.ndarray, num_segments: int) -> np.ndarray:
    """`[R, S]`, the positions of each sequence; ids out of range left out."""
    inside = np.where((segments >= 0) & (segments <= num_segments), segments, 0)
    numbered = inside + np.arange(len(segments))[:, None] * (num_segments + 1)
    counts = np.bincount(numbered.reshape(-1), minlength=len(segments) * (num_segments + 1))
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
