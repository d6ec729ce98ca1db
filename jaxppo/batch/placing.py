"""Per-sample arrays that come after packing, brought to the places that a constructor would have given them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxppo.base.arrays import check
from jaxppo.batch.extras import At, Extra, as_values, check_fill, common_dtype, without_value
from jaxppo.batch.trees import ends


def placed(batch: Any, values: Any, at: At, fill: float) -> np.ndarray:
    """See `RolloutBatch.place`."""
    fill = Extra(0, at, fill).fill
    if not isinstance(values, Mapping):
        raise TypeError(f"values: got {type(values).__name__}, expected arrays by sample id")
    fields = batch.sample_ids, batch.segment_ids, batch.positions
    if any(isinstance(x, jax.core.Tracer) for x in fields):
        raise TypeError("batch: got traced arrays, expected a batch outside of jit")
    ids, segments, positions = map(np.asarray, fields)
    there = set(ids[ids >= 0].tolist())
    for what, those in (("no array for", there - set(values)), ("arrays for", set(values) - there)):
        found = sorted(those, key=str)[:5]
        check("values", f"{what} {found}", not those, "those of the batch's samples")
    check("batch", "no sample", len(values) > 0, "at least one")
    arrays = {i: as_values(f"values[{i}]", x, np.shape(x)[0] if np.ndim(x) else -1) for i, x in values.items()}
    shapes = {x.shape[1:] for x in arrays.values()}
    check("values", f"{sorted(shapes)} for each token", len(shapes) == 1, "one shape")
    dtype = common_dtype("values", [*arrays.values()])
    check_fill("fill", fill, dtype)
    out = np.full((*segments.shape, *shapes.pop()), fill, dtype)
    for place in map(tuple, np.argwhere(ids >= 0).tolist()):
        mine, its = _places(segments, positions, place)
        of, length = arrays[ids[place]], its.max(initial=-1) + 1
        if at == "predicting":  # a response ends where its sample does
            length -= not batch.real_last_targets
            its = its + len(of) - length
        fits = len(of) <= length if at == "predicting" else len(of) == length
        check(f"values[{ids[place]}]", len(of), fits, f"{length}, the tokens that sample {ids[place]} has")
        inside = (its >= 0) & (its < len(of))
        out[place[:-1]][mine[inside]] = of[its[inside]]
    if at == "input" and batch.parents is not None:
        for place, samples in _owners(ids, np.asarray(batch.parents)).items():
            mine, its = _places(segments, positions, place)
            out[place[:-1]][mine] = _agreed({i: arrays[i][its] for i in samples}, fill)
    return out


def _places(segments: np.ndarray, positions: np.ndarray, place: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where a segment's tokens lie in its row, and where they lie in their sample."""
    *row, slot = place
    mine = np.flatnonzero(segments[tuple(row)] == slot + 1)
    return mine, positions[tuple(row)][mine]


def _agreed(given: Mapping[int, np.ndarray], fill: float) -> np.ndarray:
    """The values of a shared prefix, which all its samples must give alike; a sample may have none of a token."""
    first, *others = given
    found = given[first].copy()
    for i in others:
        values, unknown = given[i], without_value(found, fill)
        found[unknown] = values[unknown]
        differs = (found != values).reshape(len(values), -1).any(axis=1) & ~without_value(values, fill)
        if differs.any():
            at = int(np.argmax(differs))
            got = f"{values[at].tolist()} at token {at} of the prefix that it shares with sample {first}"
            expected = f"{found[at].tolist()}, as of that sample, or a batch without share_prefixes"
            raise ValueError(f"values[{i}]: got {got}, expected {expected}")
    return found


def _owners(ids: np.ndarray, parents: np.ndarray) -> dict[tuple[int, ...], list[int]]:
    """The samples behind each shared prefix, by its place in `ids`."""
    last = ends(parents, np)
    found = {}
    for *row, slot in np.argwhere(ids < 0).tolist():
        behind = ids[tuple(row)][slot : last[(*row, slot)]]
        if (behind >= 0).any():
            found[(*row, slot)] = behind[behind >= 0].tolist()
    return found
