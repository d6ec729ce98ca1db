"""Metrics are finite numbers: of a step without a loss token, of the widest log-probs, of equal
ratios.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_calls import CALLS, given

from jaxppo import PolicyLossConfig, RolloutBatch, TokenStats, finalize_metrics, policy_loss
from jaxppo.base.metrics import Metric, merge_metrics
from jaxppo.mismatch import mismatch_metrics

WITH_METRICS = [
    name for name in CALLS if "loss" in name or "metrics" in name or name == "advantages.pass_rates"
]


@pytest.mark.every(6)
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("name", WITH_METRICS)
def test_a_step_without_a_loss_token(name, mesh):
    """ratio_min and weight_min were inf, ratio_max and weight_max -inf."""
    g = given(mesh, "as made")
    g = dataclasses.replace(g, batch=dataclasses.replace(g.batch, loss_mask=0 * g.batch.loss_mask))
    for x in jax.tree.leaves(CALLS[name](g)):
        assert np.isfinite(x).all()


def test_nothing_among_something():
    """A micro-batch without a loss token leaves the extremes of the others as they are."""
    for how, nothing, value in (("min", np.inf, 3.0), ("max", -np.inf, -3.0)):
        empty = Metric(jnp.float32(nothing), jnp.float32(0), how)
        one = Metric(jnp.float32(value), jnp.float32(2), how)
        assert empty.value == 0
        assert merge_metrics(empty, one).value == merge_metrics(one, empty).value == value


def batch_of(log_probs, rollout):
    ids = jnp.arange(1, 4)[None]
    more = {"old_log_probs": log_probs, "rollout_log_probs": rollout, "advantages": 0 * rollout}
    return RolloutBatch(ids, ids, ids, 0 * ids, jnp.ones((1, 3)), ids, **more)


def test_perplexities_beyond_f32():
    """exp(89) is inf in f32, and so is the mean of two numbers of 3e38."""
    found = mismatch_metrics(batch_of(jnp.array([[-1e4, -89.0, -88.5]]), jnp.full((1, 3), -88.7)))
    values = {name: float(x) for name, x in finalize_metrics(found).items()}
    assert all(np.isfinite(x) for x in values.values())
    np.testing.assert_allclose(
        [values["trainer_ppl"], values["rollout_ppl"]], np.exp(64), rtol=1e-5
    )
    np.testing.assert_allclose(values["trainer_log_ppl"], (1e4 + 89 + 88.5) / 3, rtol=1e-6)


def test_an_effective_sample_size_is_a_share():
    """It was 1 + 1e-7 for 11 of these 32 equal ratios."""
    batch = batch_of(jnp.full((1, 3), -2.0), jnp.full((1, 3), -2.0))
    run = jax.jit(
        lambda x: policy_loss(TokenStats(batch.old_log_probs + x), batch, PolicyLossConfig())[1]
    )
    for x in np.linspace(-0.3, 0.3, 32):
        assert 1 - 3e-7 < float(run(jnp.float32(x))["effective_sample_size"].value) <= 1
