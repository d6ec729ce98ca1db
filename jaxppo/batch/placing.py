"""Per-sample arrays that come after packing, brought to the places that a constructor would have given them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxppo.base.arrays import check
from jaxppo.batch.extras import At, Extra, as_values
from jaxppo.batch.trees import ends


def placed(batch: Any, values: Any, at: At, fill: float) -> np.ndarray:
    """See `RolloutBatch.place`."""
    Extra(0, at, fill)
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
    out = np.full((*segments.shape, *shapes.pop()), fill, np.result_type(*arrays.values()))
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
        check(f"values[{sample}]", len(of), fits, f"{length}, the tokens that sample {sample} has")
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
