"""Sampler against trainer by the place in the row: written out in numpy, on meshes, in layouts,
with shared prompts.
"""

import dataclasses

import jax
import numpy as np
import pytest
from shared_prompts import three_levels

from jaxppo import RolloutBatch, finalize_metrics
from jaxppo.mismatch import packing_metrics
from sharding import make_parallel_mesh

PLACES = [(None, "contiguous"), ("dp=2,cp=2,tp=2", "zigzag"), ("dp=1,cp=4,tp=2", "striped")]


def path_of(segment, parents):
    """The segment and those that it continues."""
    path = {segment}
    while parents is not None and parents[segment - 1]:
        segment = parents[segment - 1]
        path.add(segment)
    return path


def first_in_row(batch):
    """Where a row holds nothing before a token but what the token continues; rows lie in any
    layout.
    """
    found = np.zeros(batch.segment_ids.shape, bool)
    for row, segments in enumerate(np.asarray(batch.segment_ids)):
        parents = None if batch.parents is None else np.asarray(batch.parents)[row]
        for t in np.flatnonzero(segments):
            before = {int(s) for s in segments if 0 < s < segments[t]}
            found[row, t] = before <= path_of(int(segments[t]), parents)
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("mesh", "layout"), PLACES)
def test_the_place_in_the_row(mesh, layout, shared):
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    batch = RolloutBatch.from_samples(
        three_levels(4),
        row_length=64,
        rows=4,
        parallel=parallel,
        share_prefixes=shared,
        num_segments=12,
    )
    found = jax.jit(lambda b: finalize_metrics(packing_metrics(b, b.returns, parallel=parallel)))(
        batch
    )
    on = np.asarray(batch.loss_mask) > 0
    apart = np.abs(np.float64(batch.returns) - np.float64(batch.rollout_log_probs))
    first = first_in_row(batch)
    assert 0 < (first & on).sum() < on.sum()
    assert found.keys() == {"first_in_row_abs_diff", "behind_others_abs_diff"}
    np.testing.assert_allclose(found["first_in_row_abs_diff"], apart[first & on].mean(), rtol=1e-5)
    np.testing.assert_allclose(
        found["behind_others_abs_diff"], apart[~first & on].mean(), rtol=1e-5
    )


def test_what_is_not_there():
    batch = RolloutBatch.from_samples(three_levels(4)[3:4], row_length=64)
    found = finalize_metrics(packing_metrics(batch))
    assert found["first_in_row_abs_diff"] > 0
    assert found["behind_others_abs_diff"] == 0
    with pytest.raises(ValueError, match="rollout_log_probs: got None"):
        packing_metrics(dataclasses.replace(batch, rollout_log_probs=None))
    with pytest.raises(ValueError, match="old_log_probs: got None"):
        packing_metrics(dataclasses.replace(batch, old_log_probs=None))
