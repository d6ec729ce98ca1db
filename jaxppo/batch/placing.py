"""Per-sample arrays that come after packing, brought to the places that a constructor would have given them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxppo.batch.extras import At, Extra, as_values
from jaxppo.batch.trees import ends


def placed(batch: Any, values: Any, at: At, fill: float) -> np.ndarray:
    """See `RolloutBatch.place`."""
    Extra(0, at, fill)
    if not isinstance(values, Mapping):
        raise TypeError(f"values: got {type(values).__name__}, expected arrays by sample id")
    if any(isinstance(x, jax.core.Tracer) for x in (batch.sample_ids, batch.segment_ids, batch.positions)):
        raise TypeError("batch: got traced arrays, expected a batch outside of jit")
    ids = np.asarray(batch.sample_ids)
    there = set(ids[ids >= 0].tolist())
    for what, those in (("no array for", there - set(values)), ("arrays for", set(values) - there)):
        if those:
            raise ValueError(f"values: got {what} {sorted(those, key=str)[:5]}, expected those of the batch's samples")
    if not values:
        raise ValueError("batch: got no sample, expected at least one")
    arrays = {i: as_values(f"values[{i}]", x, np.shape(x)[0] if np.ndim(x) else -1) for i, x in values.items()}
    shapes = {x.shape[1:] for x in arrays.values()}
    if len(shapes) > 1:
        raise ValueError(f"values: got {sorted(shapes)} for each token, expected one shape")
    out = np.full((*batch.segment_ids.shape, *shapes.pop()), fill, np.result_type(*arrays.values()))
    return put_into(out, batch, arrays, at)


def put_into(out: np.ndarray, batch: Any, arrays: Mapping[int, np.ndarray], at: At) -> np.ndarray:
    """`out`, with the arrays of the batch's samples, by sample id, at the places of their tokens."""
    ids, segments, positions = (np.asarray(x) for x in (batch.sample_ids, batch.segment_ids, batch.positions))
    owners = ids if at == "predicting" or batch.parents is None else _owners(ids, np.asarray(batch.parents))
    for *row, slot in np.argwhere(owners >= 0).tolist():
        of_row, sample = tuple(row), owners[(*row, slot)]
        mine = np.flatnonzero(segments[of_row] == slot + 1)
        of, places, is_own = arrays[sample], positions[of_row][mine], ids[(*row, slot)] == sample
        length = places.max(initial=-1) + 1
        if at == "predicting":  # a response ends where its sample does
            length -= not batch.real_last_targets
            places, fits = places + len(of) - length, len(of) <= length
        else:  # a shared prefix has a part of the sample's tokens
            fits = len(of) == length or not is_own
        if not fits:
            raise ValueError(f"values[{sample}]: got {len(of)}, expected {length}, the tokens that sample {sample} has")
        inside = (places >= 0) & (places < len(of))
        out[of_row][mine[inside]] = of[places[inside]]
    return out


def _owners(ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """The sample of each segment; of a shared prefix the first sample behind it."""
    found, last = ids.copy(), ends(parents, np)
    for *row, slot in np.argwhere(ids < 0).tolist():
        behind = ids[tuple(row)][slot : last[(*row, slot)]]
        found[(*row, slot)] = next((i for i in behind if i >= 0), -1)
    return found
