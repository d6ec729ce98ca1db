"""BradleyTerry: the oracle's, wherever the samples of a pair lie."""

import dataclasses

import jax
import numpy as np
import oracle.preference as truth
import pytest
from policy_steps import quick_jit
from preference_steps import COUNT, MESHES, oracle_of, step_of

from jaxppo import RolloutBatch, finalize_metrics, loss_from_stats
from jaxppo.losses import preference
from sharding import make_parallel_mesh


@pytest.mark.every(3)
@pytest.mark.parametrize("mesh", [None, *MESHES])
def test_reward_model(mesh):
    samples = step_of(8)
    options = {} if mesh == "dp=8" else {"margin": 0.7, "centring": 0.05}
    rng = np.random.default_rng(9)
    scores = np.float32(rng.normal(size=COUNT))
    parallel = mesh and make_parallel_mesh(mesh, context_layout=MESHES[mesh])
    samples = [dataclasses.replace(s, returns=np.full(len(s.returns), np.nan)) for s in samples]
    batch = RolloutBatch.from_samples(
        samples, row_length=24, rows=8, num_segments=6, parallel=parallel
    )
    # a score stands at the last position, where no target is
    of_row = np.take_along_axis(np.pad(batch.sample_ids, ((0, 0), (1, 0))), batch.segment_ids, 1)
    is_last = (batch.segment_ids > 0) & (
        batch.positions == np.array([len(s.tokens) for s in samples])[of_row] - 1
    )
    placed = np.where(is_last, scores[of_row], np.nan).astype(np.float32)
    assert is_last.sum() == COUNT

    def fn(x):
        return loss_from_stats(x, batch, preference.BradleyTerry(**options), parallel=parallel)

    (loss, found), gradient = quick_jit(jax.value_and_grad(fn, has_aux=True))(placed)
    expected, by_score, metrics = truth.bradley_terry(oracle_of(samples), scores, **options)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(
        gradient, np.where(is_last, by_score[of_row], 0), rtol=2e-5, atol=1e-7
    )
    found = finalize_metrics(found)
    assert found.pop("broken_rules") == 0
    assert found.keys() == metrics.keys()
    for key, value in metrics.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=1e-6, err_msg=key)
