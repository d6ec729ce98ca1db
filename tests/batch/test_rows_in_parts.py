"""`validate` checks a few rows at a time, and raises what it would raise for all of them at once."""

import dataclasses

import numpy as np
import pytest
from policy_steps import step_of

from jaxppo import SFT, Normalizer, RolloutBatch, make_parallel_mesh
from jaxppo.batch import checks

V = 50
MESHES = {"in order": None, "zigzag": make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag")}
# name, which of the rows that hold something, place and value: the first by rules is not always in the first row
BROKEN = {
    "a token": [("tokens", -1, 0, V)],
    "a mask behind a token": [("tokens", 0, 0, V), ("loss_mask", -1, 1, 0.5)],
    "a position behind a mask": [("loss_mask", 0, 1, 0.5), ("positions", -1, 0, 3)],
    "one rule twice": [("tokens", 1, 0, V), ("tokens", -1, 0, V)],
    "an id in two rows": [("sample_ids", 0, 0, 0), ("sample_ids", -1, 0, 0)],
    "an id in two rows, and a reward": [("sample_ids", 0, 0, 0), ("sample_ids", -1, 0, 0), ("rewards", 0, 0, np.inf)],
    "nothing": [],
}


def said(batch, normalizer):
    try:
        batch.validate(V, normalizer=normalizer)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", BROKEN)
def test_the_same_error(case, mesh, monkeypatch):
    options = {"row_length": 12, "rows": 8, "num_segments": 4, "parallel": MESHES[mesh]}
    samples = [dataclasses.replace(sample, reward=1.0) for sample in step_of(0)]
    batch = RolloutBatch.from_samples(samples, **options)
    normalizer = Normalizer.of(SFT(), batch, parallel=MESHES[mesh])
    for name, i, place, value in BROKEN[case]:
        x = np.array(getattr(batch, name))
        x[np.flatnonzero(batch.segment_ids.any(axis=1))[i], place] = value
        batch = dataclasses.replace(batch, **{name: x})
    whole = said(batch, normalizer)
    monkeypatch.setattr(checks, "IN_CACHE", 24)
    assert said(batch, normalizer) == whole
    assert (whole is None) == (case == "nothing")
