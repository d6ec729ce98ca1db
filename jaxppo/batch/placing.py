"""Per-sample arrays that come after packing, brought to the places that a constructor would have
given them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    ids = _on_host(batch.sample_ids)
    segments = _on_host(batch.segment_ids)
    positions = _on_host(batch.positions)
    _check_same_samples(set(ids[ids >= 0].tolist()), set(values))
    arrays = {
        i: as_values(f"values[{i}]", x, np.shape(x)[0] if np.ndim(x) else -1)
        for i, x in values.items()
    }
    out = _empty(arrays, segments.shape, fill)
    for *row, slot in np.argwhere(ids >= 0).tolist():
        segment = _Segment.of(segments, positions, row, slot)
        sample_id = ids[(*row, slot)]
        array = arrays[sample_id]
        length = segment.positions.max(initial=-1) + 1
        places = segment.positions
        fits = len(array) == length
        if at == "predicting":  # a response ends where its sample does
            length -= not batch.real_last_targets
            places = places + len(array) - length
            fits = len(array) <= length
        check(
            f"values[{sample_id}]",
            len(array),
            fits,
            f"{length}, the tokens that sample {sample_id} has",
        )
        inside = (places >= 0) & (places < len(array))
        out[segment.row][segment.places[inside]] = array[places[inside]]
    if at == "input" and batch.parents is not None:
        for (*row, slot), samples in _owners(ids, np.asarray(batch.parents)).items():
            segment = _Segment.of(segments, positions, row, slot)
            of_samples = {i: arrays[i][segment.positions] for i in samples}
            out[segment.row][segment.places] = _agreed(of_samples, fill)
    return out


def _empty(arrays: Mapping[Any, np.ndarray], shape: tuple[int, ...], fill: float) -> np.ndarray:
    """An array of rows of this shape that can hold the values of all samples."""
    shapes = {x.shape[1:] for x in arrays.values()}
    check("values", f"{sorted(shapes)} for each token", len(shapes) == 1, "one shape")
    dtype = common_dtype("values", [*arrays.values()])
    check_fill("fill", fill, dtype)
    return np.full((*shape, *shapes.pop()), fill, dtype)


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.core.Tracer):
        raise TypeError("batch: got traced arrays, expected a batch outside of jit")
    return np.asarray(x)


def _check_same_samples(ids: set[int], given: set[Any]) -> None:
    """Raises unless arrays are given for the samples of the batch, and there is one."""
    for what, those in (("no array for", ids - given), ("arrays for", given - ids)):
        first = sorted(those, key=str)[:5]
        check("values", f"{what} {first}", not those, "those of the batch's samples")
    check("batch", "no sample", len(given) > 0, "at least one")


class _Segment(NamedTuple):
    """A segment of a row."""

    row: tuple[int, ...]
    places: np.ndarray  # of its tokens in the row
    positions: np.ndarray  # of its tokens in their sample

    @classmethod
    def of(
        cls, segments: np.ndarray, positions: np.ndarray, row: Sequence[int], slot: int
    ) -> _Segment:
        index = tuple(row)
        places = np.flatnonzero(segments[index] == slot + 1)
        return cls(index, places, positions[index][places])


def _agreed(arrays: Mapping[int, np.ndarray], fill: float) -> np.ndarray:
    """The values of a shared prefix, which all its samples must give alike; a sample may have
    none of a token.
    """
    first, *others = arrays
    agreed = arrays[first].copy()
    for i in others:
        values = arrays[i]
        unknown = without_value(agreed, fill)
        agreed[unknown] = values[unknown]
        differs = (agreed != values).reshape(len(values), -1).any(axis=1) & ~without_value(
            values, fill
        )
        if differs.any():
            token = int(np.argmax(differs))
            got = (
                f"{values[token].tolist()} at token {token} of the prefix that it shares with"
                f" sample {first}"
            )
            expected = (
                f"{agreed[token].tolist()}, as of that sample, or a batch without share_prefixes"
            )
            raise ValueError(f"values[{i}]: got {got}, expected {expected}")
    return agreed


def _owners(ids: np.ndarray, parents: np.ndarray) -> dict[tuple[int, ...], list[int]]:
    """The samples behind each shared prefix, by its place in `ids`."""
    last = ends(parents, np)
    owners = {}
    for *row, slot in np.argwhere(ids < 0).tolist():
        behind = ids[tuple(row)][slot : last[(*row, slot)]]
        samples = behind[behind >= 0].tolist()
        if samples:
            owners[(*row, slot)] = samples
    return owners
