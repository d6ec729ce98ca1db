"""Bad input to the policy losses: each error names the field, what was got and what was expected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import config_of, loss_of, step_of

from jaxppo import (
    Metric,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    accumulate_gradients,
    metrics,
)


@pytest.fixture(scope="module")
def batch():
    return RolloutBatch.from_samples(step_of(0), row_length=24, rows=4, num_segments=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "pp0"}, r"loss: got 'pp0', expected a function or one of cispo, clip_cov, dppo_kl, .*, ppo, "),
        ({"aggregation": "mean"}, r"aggregation: got 'mean', expected one of token_mean, .*, rollout_mean"),
        ({"kl_estimator": "k9"}, r"kl_estimator: got 'k9', expected one of k1, abs"),
        ({"clip_low": -0.1}, r"clip_low: got -0.1, expected a number of at least 0"),
        ({"clip_high": "0.2"}, r"clip_high: got 0.2, expected a number of at least 0"),
        ({"dual_clip": 1.0}, r"dual_clip: got 1.0, expected None or a number above 1"),
        ({"dual_clip": 3.0, "loss": "cispo"}, r"dual_clip: got 3.0 with loss='cispo', expected None"),
        ({"temperature": -1.0}, r"temperature: got -1.0, expected a number above 0"),
        ({"entropy_coef": float("nan")}, r"entropy_coef: got nan, expected a finite number"),
        ({"kl_coef": None}, r"kl_coef: got None, expected a finite number"),
        ({"cov_low": 5.0, "cov_high": 1.0}, r"cov_low, cov_high: got \(5.0, 1.0\), expected cov_low < cov_high"),
        ({"cov_ratio": 2.0}, r"cov_ratio: got 2.0, expected a share of at most 1"),
        ({"gspo_gradient": "both"}, r"gspo_gradient: got 'both', expected 'sequence' or 'token'"),
        ({"old_log_probs": "mine"}, r"old_log_probs: got 'mine', expected 'trainer' or 'sampler' or 'current'"),
        (
            {"aggregation": "sequence_mean_token_sum_norm"},
            r"aggregation_norm: got None, expected a positive number",
        ),
        ({"aggregation_norm": 5.0}, r"aggregation_norm: got 5.0, expected None, or aggregation='sequence_mean_token_s"),
        (
            {"off_policy": OffPolicyConfig(weights="token", batch_normalize=True), "old_log_probs": "current"},
            r"old_log_probs: got 'current', expected 'trainer' for off_policy.batch_normalize",
        ),
        (
            {"off_policy": OffPolicyConfig(weights="token"), "old_log_probs": "sampler"},
            r"off_policy.trainer: got 'old', expected 'current' with old_log_probs='sampler'",
        ),
        ({"off_policy": {"weights": "token"}}, r"off_policy: got dict, expected OffPolicyConfig or None"),
    ],
)
def test_config(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PolicyLossConfig(**options)


def test_entropy_mode():
    assert PolicyLossConfig().entropy_mode == "metric"
    assert PolicyLossConfig(entropy_coef=0).entropy_mode == "metric"
    assert PolicyLossConfig(entropy_coef=-0.1).entropy_mode == "bonus"
    modes = []
    jax.jit(lambda c: modes.append(PolicyLossConfig(entropy_coef=c).entropy_mode))(0.0)
    assert modes == ["bonus"]


@pytest.mark.parametrize(
    ("lacking", "options", "message"),
    [
        ("advantages", {}, r"batch.advantages: got None, expected f32\[R, T\] for every policy loss"),
        ("old_log_probs", {}, r"batch.old_log_probs: got None, expected f32\[R, T\] for old_log_probs='trainer'"),
        ("ref_log_probs", {"kl_coef": 0.1}, r"batch.ref_log_probs: got None, expected f32\[R, T\] for kl_coef=0.1"),
        ("rollout_log_probs", {"old_log_probs": "sampler"}, r"batch.rollout_log_probs: got None, .*'sampler'"),
        ("rollout_log_probs", {"off_policy": OffPolicyConfig(weights="token")}, r"rollout_log_probs: got None"),
    ],
)
def test_arrays_that_the_batch_lacks(batch, lacking, options, message):
    config = PolicyLossConfig(**options)
    with pytest.raises(ValueError, match=message):
        loss_of(TokenStats(batch.returns), dataclasses.replace(batch, **{lacking: None}), config, None)


def test_shapes(batch):
    stats = TokenStats(batch.returns)
    cases = {
        r"stats: got ndarray, expected TokenStats": (batch.returns, batch, None),
        r"stats.log_probs: got shape \(2, 24\), expected the batch's, \(4, 24\)": (
            TokenStats(batch.returns[:2]),
            batch,
            None,
        ),
        r"batch.advantages: got shape \(24,\)": (
            stats,
            dataclasses.replace(batch, advantages=batch.advantages[0]),
            None,
        ),
        r"batch: got a loss mask of shape \(1, 4, 24\), expected \[R, T\]": (
            stats,
            jax.tree.map(lambda x: x[None], batch),
            None,
        ),
        r"covariance: got shape \(4, 24\), expected None with loss='ppo'": (stats, batch, batch.loss_mask),
    }
    for message, (given, rows, covariance) in cases.items():
        with pytest.raises((ValueError, TypeError), match=message):
            loss_of(given, rows, PolicyLossConfig(), None, covariance=covariance)
    with pytest.raises(ValueError, match=r"stats.entropy: got None, expected f32\[R, T\] for entropy_coef=0.1"):
        loss_of(stats, batch, PolicyLossConfig(entropy_coef=0.1), None)
    integers = TokenStats(batch.returns.astype(np.int32))
    with pytest.raises(TypeError, match=r"stats.log_probs: got int32, expected a floating-point dtype"):
        loss_of(integers, batch, PolicyLossConfig(), None)


@pytest.mark.parametrize("loss", ["ppo", "clip_cov", "kl_cov"])
def test_accumulation_refuses_denominators_of_a_part(batch, loss):
    """Without the step's numbers the sum over K micro-batches of token means would be K times the loss."""
    stacked = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    config = config_of(loss, entropy_coef=0.0)
    normalizer = Normalizer.from_batches(stacked, "token_mean")
    covariance = stacked.loss_mask if loss != "ppo" else None

    def run(normalizer, covariance):
        fn = lambda x, part: loss_of(TokenStats(x[part[3]]), part[0], config, None, part[1], part[2])  # noqa: E731
        return accumulate_gradients(fn, (stacked, normalizer, covariance, np.arange(2)))(jnp.asarray(stacked.returns))

    run(normalizer, covariance)
    with pytest.raises(ValueError, match="normalizer: got None inside accumulate_gradients, expected the step's"):
        run(None, covariance)
    if loss != "ppo":
        with pytest.raises(ValueError, match="covariance: got None, expected the step's covariance_mask"):
            run(normalizer, None)


def test_accumulation_wants_one_leading_dimension():
    fn = lambda w, x: (w * x.sum(), {})  # noqa: E731
    for parts in ((jnp.ones(2), jnp.ones(3)), jnp.ones((0, 2)), jnp.float32(1)):
        with pytest.raises(ValueError, match="micro_batches: got leading dimensions"):
            accumulate_gradients(fn, parts)


def test_accumulators_are_f32():
    """512 gradients of 1 in bf16: a bf16 sum stops at 256."""
    fn = lambda w, x: (jnp.sum(w.astype(jnp.float32) * x), {})  # noqa: E731
    _, gradient = jax.jit(accumulate_gradients(fn, jnp.ones((512, 3))))(jnp.ones(3, jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    assert gradient.tolist() == [512.0] * 3


def test_metric():
    with pytest.raises(ValueError, match="reduce: got 'median', expected one of mean, sum, min, max"):
        Metric(jnp.float32(1), jnp.float32(1), "median")
    for reduce, expected in {"mean": 7 / 6, "sum": 7.0, "min": 1.0, "max": 6.0}.items():
        parts = Metric(jnp.float32(6), jnp.float32(2), reduce), Metric(jnp.float32(1), jnp.float32(4), reduce)
        np.testing.assert_allclose(metrics.merge(*parts).value, expected, rtol=1e-6)
    assert Metric(jnp.float32(0), jnp.float32(0)).value == 0


def test_a_rollout_without_an_id_is_no_plausible_number(batch):
    unnamed = dataclasses.replace(batch, rollout_ids=np.where(batch.sample_ids == 0, -1, batch.rollout_ids))
    for rows, finite in ((batch, True), (unnamed, False)):
        loss, _ = loss_of(TokenStats(batch.returns), rows, PolicyLossConfig(aggregation="rollout_mean"), None)
        assert np.isfinite(loss) == finite
