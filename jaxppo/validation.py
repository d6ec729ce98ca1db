"""What a RolloutBatch must be beyond its shapes, checked on the host, with errors that say where."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxppo._sharding import ParallelMesh, check_row_length, logical_positions, segment_multiple

if TYPE_CHECKING:
    from jaxppo.batch import RolloutBatch

_INTEGERS = ("tokens", "targets", "segment_ids", "positions", "sample_ids", "group_ids", "rollout_ids")
_PER_SEGMENT = ("sample_ids", "group_ids", "rollout_ids", "rewards")


def validate_batch(batch: RolloutBatch, vocab_size: int, parallel: ParallelMesh | None) -> None:
    """See `RolloutBatch.validate`."""
    arrays = _rows(batch)
    layout, shards = (parallel.context_layout, parallel.context_size) if parallel else ("contiguous", 1)
    length = arrays["tokens"].shape[1]
    check_row_length(length, layout, shards, "row length of tokens")
    segments = arrays["segment_ids"]
    num_segments = arrays["sample_ids"].shape[1]
    _check("segment_ids", segments, (segments < 0) | (segments > num_segments), f"0 to {num_segments}")

    numbered = segments + np.arange(len(segments))[:, None] * (num_segments + 1)
    lengths = np.bincount(numbered.reshape(-1), minlength=len(segments) * (num_segments + 1)).reshape(len(segments), -1)
    lengths = lengths[:, 1:]
    order = logical_positions(layout, length, shards, lengths)
    order = np.broadcast_to(order, segments.shape)
    arrays = {name: x if name in _PER_SEGMENT else _logical(x, order) for name, x in arrays.items()}
    _check_segments(arrays, lengths, segment_multiple(layout, shards), layout)
    _check_tokens(arrays, vocab_size)
    _check_values(arrays)
    _check_ids(arrays, lengths)


def _rows(batch: RolloutBatch) -> dict[str, np.ndarray]:
    """All arrays that are there, micro-batches as more rows, with shapes and dtypes checked."""
    given = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    given = {name: np.asarray(x) for name, x in given.items() if x is not None}
    for name, x in given.items():
        like = given["sample_ids" if name in _PER_SEGMENT else "tokens"]
        if x.ndim not in (2, 3) or x.shape != like.shape or x.shape[:-1] != given["tokens"].shape[:-1]:
            expected = f"{given['tokens'].shape[:-1]} and S" if name in _PER_SEGMENT else f"{like.shape} like tokens"
            raise ValueError(f"{name}: got shape {x.shape}, expected {expected}")
        if (name in _INTEGERS) != np.issubdtype(x.dtype, np.integer):
            raise TypeError(f"{name}: got {x.dtype}, expected {'integers' if name in _INTEGERS else 'floats'}")
    return {name: x.reshape(-1, x.shape[-1]) for name, x in given.items()}


def _logical(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    np.put_along_axis(out, order, x, axis=1)
    return out


def _check(name: str, x: np.ndarray, bad: np.ndarray, expected: str, where: str = "position") -> None:
    """Raises at the first bad entry; positions are logical, and rows count on through micro-batches."""
    if bad.any():
        row, place = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}: got {x[row, place]} at row {row}, {where} {place}, expected {expected}")


def _check_segments(arrays: dict[str, np.ndarray], lengths: np.ndarray, multiple: int, layout: str) -> None:
    """Segments 1, 2, ... lie in order, each one run, with positions 0, 1, ... in it."""
    segments, positions = arrays["segment_ids"], arrays["positions"]
    before = np.concatenate([np.zeros_like(segments[:, :1]), segments[:, :-1]], axis=1)
    starts = (segments != before) & (segments > 0)
    highest = np.maximum.accumulate(before, axis=1)
    _check("segment_ids", segments, starts & (segments <= highest), "each sequence to be contiguous and in order")
    offsets = np.arange(segments.shape[1]) - np.maximum.accumulate(np.where(starts, np.arange(segments.shape[1]), 0), 1)
    if multiple > 1:
        first = np.concatenate([np.zeros_like(lengths[:, :1]), -(-lengths // multiple) * multiple], axis=1).cumsum(1)
        expected_start = np.take_along_axis(first, np.maximum(segments - 1, 0), axis=1)
        misplaced = starts & (expected_start != np.arange(segments.shape[1]))
        _check("segment_ids", segments, misplaced, f"sequences padded to multiples of {multiple} for layout {layout!r}")
    _check("positions", positions, (segments > 0) & (positions != offsets), "0, 1, ... in each sequence")


def _check_tokens(arrays: dict[str, np.ndarray], vocab_size: int) -> None:
    tokens, targets, segments, mask = (arrays[name] for name in ("tokens", "targets", "segment_ids", "loss_mask"))
    _check("loss_mask", mask, (mask != 0) & (mask != 1), "0 or 1")
    _check("loss_mask", mask, (mask != 0) & (segments == 0), "0 on padding")
    bound = f"0 to {vocab_size - 1}"
    _check("tokens", tokens, (segments > 0) & ((tokens < 0) | (tokens >= vocab_size)), bound)
    _check("targets", targets, (mask != 0) & ((targets < 0) | (targets >= vocab_size)), bound)
    follows = np.zeros(segments.shape, bool)
    follows[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (mask[:, :-1] != 0)
    following = np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
    _check("targets", targets, follows & (targets != following), "the next token of the sequence")


def _check_values(arrays: dict[str, np.ndarray]) -> None:
    for name, x in arrays.items():
        if name not in _INTEGERS and name not in ("loss_mask", "rewards"):
            _check(name, x, (arrays["loss_mask"] != 0) & ~np.isfinite(x), "a finite number where loss_mask is 1")


def _check_ids(arrays: dict[str, Any], lengths: np.ndarray) -> None:
    present = lengths > 0
    for name in ("sample_ids", "group_ids", "rollout_ids"):
        _check(name, arrays[name], present & (arrays[name] < 0), "at least 0 for a sequence that is there", "segment")
    if "rewards" in arrays:
        _check("rewards", arrays["rewards"], present & ~np.isfinite(arrays["rewards"]), "a finite number", "segment")
