"""Where a number out of its range is refused, an array that holds it gives NaN; of losses, see
losses/test_poison.
"""

import dataclasses
from functools import partial

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
BATCH = dataclasses.replace(BATCH, policy_versions=np.array([[1, 2, 3, 3]], np.int32))
REWARDS = np.array([[1.0, 0.0]], np.float32)
GROUPS = np.array([[0, 0]], np.int32)
SETS = np.log(np.array([0.5, 0.2], np.float32))
MASK = BATCH.loss_mask
SPREAD = MASK - np.float32(0.5) * BATCH.positions.astype(np.float32)
WEIGHTS = partial(staleness_weights, BATCH, 9)
ADAPTIVE = partial(adaptive_kl_coef, coef=0.1, samples=10)
DIVERGENCE = partial(top_k_divergence, SETS, SETS - np.float32(0.1))
DISTILLATION = partial(advantages.on_policy_distillation, MASK, -MASK, -2 * MASK, MASK)
# a function, its number, a value that it takes, and values that it refuses
CASES = {
    "staleness_weights, limit": (WEIGHTS, "limit", 2.0, [-1.0]),
    "staleness_weights, decay": (partial(WEIGHTS, limit=2), "decay", 0.5, [-2.0, 2.0]),
    "second_moment_mask": (partial(second_moment_mask, BATCH), "bound", 0.04, [-1.0, 0.0]),
    "top_entropy_mask": (partial(top_entropy_mask, MASK, BATCH), "share", 0.5, [-1.0, 0.0, 2.0]),
    "adaptive_kl_coef, target": (partial(ADAPTIVE, kl=1.0), "target", 1.0, [-1.0, 0.0]),
    "adaptive_kl_coef, horizon": (
        partial(ADAPTIVE, kl=2.0, target=1.0),
        "horizon",
        1.0,
        [-1.0, 0.0],
    ),
    "top_k_divergence": (partial(DIVERGENCE, divergence="mixed_kl"), "beta", 0.5, [-1.0, 2.0]),
    "jensen_shannon": (
        partial(DIVERGENCE, divergence="jensen_shannon"),
        "beta",
        0.5,
        [-1.0, 0.0, 1.0],
    ),
    "on_policy_distillation": (DISTILLATION, "alpha", 0.5, [-1.0, 0.0, 2.0]),
    "grpo": (partial(advantages.grpo, REWARDS, GROUPS), "epsilon", 0.1, [-1.0]),
    "standardize": (partial(advantages.standardize, REWARDS, GROUPS), "epsilon", 0.1, [-1.0]),
    "whiten": (partial(advantages.whiten, SPREAD, MASK), "epsilon", 0.1, [-1.0]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_number_out_of_its_range(case):
    function, name, good, bad = CASES[case]

    def call(value):
        return function(**{name: value})

    run = quick_jit(call)
    found = run(good)
    np.testing.assert_allclose(found, call(good), rtol=1e-6)
    assert np.isfinite(found).all()
    for value in (*bad, np.nan):
        with pytest.raises(ValueError, match="expected a"):
            call(value)
        assert np.isnan(run(value)).any(), value
