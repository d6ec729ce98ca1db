"""Where a number out of its range is refused, an array that holds it gives NaN; of losses, see
losses/test_poison.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import quick_jit

from jaxppo import RolloutBatch, Sample, advantages
from jaxppo.base.kl import adaptive_kl_coef
from jaxppo.losses.distillation import top_k_divergence
from jaxppo.step.masks import second_moment_mask, top_entropy_mask
from jaxppo.step.staleness import staleness_weights

LOG_PROBS = {"old_log_probs": [-1.0, -2.0, -1.5], "rollout_log_probs": [-1.1, -2.5, -1.0]}
BATCH = RolloutBatch.from_samples(
    [Sample([1, 2, 3, 4], response_start=1, **LOG_PROBS)], row_length=4
)
BATCH = dataclasses.replace(BATCH, policy_versions=jnp.array([[1, 2, 3, 3]]))
REWARDS = jnp.array([[1.0, 0.0]])
GROUPS = jnp.array([[0, 0]])
SETS = jnp.log(jnp.array([0.5, 0.2]))
MASK = BATCH.loss_mask
# a function of one number, a value that it takes, and values that it refuses
CASES = {
    "staleness_weights, limit": (lambda x: staleness_weights(BATCH, 9, limit=x), 2.0, [-1.0]),
    "staleness_weights, decay": (
        lambda x: staleness_weights(BATCH, 9, limit=2, decay=x),
        0.5,
        [-2.0, 2.0],
    ),
    "second_moment_mask": (lambda x: second_moment_mask(BATCH, x), 0.04, [-1.0, 0.0]),
    "top_entropy_mask": (lambda x: top_entropy_mask(MASK, BATCH, x), 0.5, [-1.0, 0.0, 2.0]),
    "adaptive_kl_coef, target": (lambda x: adaptive_kl_coef(0.1, 1.0, x, 10), 1.0, [-1.0, 0.0]),
    "adaptive_kl_coef, horizon": (
        lambda x: adaptive_kl_coef(0.1, 2.0, 1.0, 10, x),
        1.0,
        [-1.0, 0.0],
    ),
    "top_k_divergence": (
        lambda x: top_k_divergence(SETS, SETS - 0.1, divergence="mixed_kl", beta=x),
        0.5,
        [-1.0, 2.0],
    ),
    "jensen_shannon": (
        lambda x: top_k_divergence(SETS, SETS - 0.1, divergence="jensen_shannon", beta=x),
        0.5,
        [-1.0, 0.0, 1.0],
    ),
    "on_policy_distillation": (
        lambda x: advantages.on_policy_distillation(MASK, -MASK, -2 * MASK, MASK, alpha=x),
        0.5,
        [-1.0, 0.0, 2.0],
    ),
    "grpo": (lambda x: advantages.grpo(REWARDS, GROUPS, epsilon=x), 0.1, [-1.0]),
    "standardize": (lambda x: advantages.standardize(REWARDS, GROUPS, epsilon=x), 0.1, [-1.0]),
    "whiten": (
        lambda x: advantages.whiten(MASK - 0.5 * BATCH.positions, MASK, epsilon=x),
        0.1,
        [-1.0],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_number_out_of_its_range(case):
    call, good, bad = CASES[case]
    run = quick_jit(call)
    np.testing.assert_allclose(run(good), call(good), rtol=1e-6)
    assert np.isfinite(run(good)).all()
    for value in (*bad, np.nan):
        with pytest.raises(ValueError, match="expected a"):
            call(value)
        assert np.isnan(run(value)).any(), value
