"""Bad input to the policy losses: each error names the field, what was got and what was
expected.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import config_of, loss_of, step_of

from jaxppo import (
    CISPO,
    GSPO,
    KL,
    PPO,
    SAPO,
    SFT,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    accumulate_gradients,
    policy_loss,
)
from jaxppo.base.metrics import Metric, merge_metrics
from jaxppo.policy_losses import (
    BY_NAME,
    DPPO,
    DRO,
    VESPO,
    ClipCov,
    KLCov,
    PolicyLoss,
    ProbabilityMask,
    by_name,
)


class Unfrozen(PolicyLoss):
    def __call__(self, log_probs, *_, **__):
        return -log_probs, {}


@pytest.fixture(scope="module")
def batch():
    return RolloutBatch.from_samples(step_of(0), row_length=24, rows=4, num_segments=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "ppo"},
            (
                r"loss: got 'ppo', expected an instance of a frozen dataclass .*by_name\('ppo'\)"
                r" is one"
            ),
        ),
        (
            {"loss": PPO},
            (
                r"loss: got <class .*PPO'>, expected an instance of a frozen dataclass that derives"
                r" from"
            ),
        ),
        ({"loss": Unfrozen()}, r"loss: got Unfrozen, expected an instance of a frozen dataclass"),
        (
            {"aggregation": "mean"},
            r"aggregation: got 'mean', expected one of 'token_mean', .*, 'rollout_mean'",
        ),
        ({"kl": 0.1}, r"kl: got 0.1, expected KL\(0.1\) or None"),
        ({"kl": "k3"}, r"kl: got str, expected KL or None"),
        ({"entropy_coef": float("nan")}, r"entropy_coef: got nan, expected a finite number"),
        (
            {"entropy_coef": jnp.ones(2)},
            r"entropy_coef: got shape \(2,\), expected a finite number, or a scalar array",
        ),
        (
            {"ratio_to": "mine"},
            r"ratio_to: got 'mine', expected one of 'old', 'rollout', 'current'",
        ),
        (
            {"metric_aggregation": "sum"},
            r"metric_aggregation: got 'sum', expected one of 'token_mean', 'loss'",
        ),
        (
            {"aggregation": "sequence_mean_token_sum_norm"},
            r"aggregation_norm: got None, expected a finite number above",
        ),
        (
            {"aggregation_norm": 5.0},
            r"aggregation_norm: got 5.0 with aggregation='token_mean', expected None, or",
        ),
        (
            {"off_policy": OffPolicyConfig(weights="token"), "ratio_to": "rollout"},
            (
                r"off_policy.compares: got 'old/rollout' for the weights .* current/rollout,"
                r" expected weights='none'"
            ),
        ),
        (
            {
                "off_policy": OffPolicyConfig(weights="token", compares="current/rollout"),
                "ratio_to": "rollout",
            },
            (
                r"off_policy.compares: got 'current/rollout' for the weights .* expected"
                r" weights='none': it would count"
            ),
        ),
        (
            {"off_policy": OffPolicyConfig(weights="token", compares="current/rollout")},
            (
                r"off_policy.compares: got 'current/rollout' for the weights .* current/old,"
                r" expected 'old/rollout'"
            ),
        ),
        (
            {"off_policy": {"weights": "token"}},
            r"off_policy: got dict, expected OffPolicyConfig or None",
        ),
    ],
)
def test_config(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PolicyLossConfig(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(PPO, clip_low=-0.1), "clip_low: got -0.1, expected a finite number of at least 0"),
        (
            partial(PPO, clip_high="0.2"),
            "clip_high: got '0.2', expected a finite number of at least 0",
        ),
        (
            partial(PPO, clip_high=True),
            "clip_high: got True, expected a finite number of at least 0",
        ),
        (partial(PPO, dual_clip=1.0), "dual_clip: got 1.0, expected a finite number above 1"),
        (
            partial(GSPO, gradient="both"),
            "gradient: got 'both', expected one of 'sequence', 'token'",
        ),
        (partial(DPPO, "js"), "divergence: got 'js', expected one of 'tv', 'kl'"),
        (
            partial(SAPO, tau_positive=0.0),
            "tau_positive: got 0.0, expected a finite number above 0",
        ),
        (partial(DRO, -1), "beta: got -1, expected a finite number of at least 0"),
        (partial(ClipCov, low=5.0, high=1.0), "low, high: got 5.0, 1.0, expected low < high"),
        (
            partial(KLCov, share=2.0),
            "share: got 2.0, expected a finite number of at least 0 and of at most 1",
        ),
        (partial(KL, None), "coef: got None, expected a finite number"),
        (partial(CISPO, level="word"), "level: got 'word', expected one of 'token', 'sequence'"),
        (partial(SAPO, level="word"), "level: got 'word', expected one of 'token', 'sequence'"),
        (partial(CISPO, unified_mask="yes"), "unified_mask: got 'yes', expected True or False"),
        (
            partial(VESPO, k_positive=-1.0),
            "k_positive: got -1.0, expected a finite number of at least 0",
        ),
        (
            partial(VESPO, lambda_negative=-1.0),
            "lambda_negative: got -1.0, expected a finite number of at least 0",
        ),
        (
            partial(ProbabilityMask, clip_high=math.nan),
            "clip_high: got nan, expected a finite number of at least 0",
        ),
        (
            partial(ProbabilityMask, ratio_cap=0.0),
            "ratio_cap: got 0.0, expected a finite number above 0",
        ),
        (
            partial(ProbabilityMask, pull=-1.0),
            "pull: got -1.0, expected a finite number of at least 0",
        ),
        (
            partial(KL, 0.1, importance=True),
            "importance: got True, expected one of 'none', 'token', 'sequence', 'score'",
        ),
        (
            partial(KL, 0.1, "k2+", "score"),
            "importance: got 'score', expected another with estimator='k2[+]'",
        ),
        (partial(KL, 0.1, "k9"), "estimator: got 'k9', expected one of 'k1', 'abs'"),
        (
            partial(by_name, "pp0"),
            "name: got 'pp0', expected one of aspo, by_sign, cispo, clip_cov, dppo, .*, ppo, ",
        ),
        (
            partial(by_name, "cispo", dual_clip=3.0),
            "dual_clip: got it with 'cispo', expected one of clip_low, clip_high",
        ),
        (
            partial(by_name, "reinforce", clip=1),
            "clip: got it with 'reinforce', expected one of no hyperparameter",
        ),
        (
            partial(OffPolicyConfig, veto=1e-9),
            r"veto: got 1e-09, expected a ratio above 2.1e-09 and below 1",
        ),
    ],
)
def test_hyperparameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.every(7)
@pytest.mark.parametrize("name", BY_NAME)
def test_hyperparameters_may_be_traced(name):
    """Where the loss is made inside jit: equality and hash are for plain numbers."""
    fields = [f.name for f in dataclasses.fields(BY_NAME[name]) if isinstance(f.default, float)]

    @jax.jit
    def run(values, batch):
        loss = by_name(name, **dict(zip(fields, values, strict=True)))
        config = PolicyLossConfig(
            loss,
            entropy_coef=values[0] if values else 0.1,
            kl=KL(0.1 * values[0] if values else 0.1),
        )
        selected = batch.loss_mask if loss.selects else None
        return loss_of(
            TokenStats(batch.returns, batch.values), batch, config, None, selected=selected
        )[0]

    batch = RolloutBatch.from_samples(step_of(0), row_length=24, rows=4, num_segments=9)
    defaults = [getattr(by_name(name), field) for field in fields]
    plain = PolicyLossConfig(
        by_name(name),
        entropy_coef=(defaults or [0.1])[0],
        kl=KL(0.1 * defaults[0] if defaults else 0.1),
    )
    selected = batch.loss_mask if plain.loss.selects else None
    expected = loss_of(
        TokenStats(batch.returns, batch.values), batch, plain, None, selected=selected
    )[0]
    np.testing.assert_allclose(run(defaults, batch), expected, rtol=1e-5)
    assert hash(by_name(name)) == hash(by_name(name))


def test_entropy_mode():
    assert PolicyLossConfig().entropy_mode == "metric"
    assert PolicyLossConfig(entropy_coef=0).entropy_mode == "metric"
    assert PolicyLossConfig(entropy_coef=-0.1).entropy_mode == "bonus"
    assert PolicyLossConfig(entropy_coef=jnp.zeros(())).entropy_mode == "metric"
    modes = []
    jax.jit(lambda c: modes.append(PolicyLossConfig(entropy_coef=c).entropy_mode))(0.0)
    assert modes == ["bonus"]


@pytest.mark.parametrize("zero", [0, np.float32(0), jnp.zeros(())], ids=["int", "numpy", "jax"])
def test_a_coefficient_known_to_be_zero_adds_no_term(batch, zero):
    """If 0 times the term were added, an infinite term would make the loss NaN."""
    batch = dataclasses.replace(batch, ref_log_probs=jnp.full(batch.loss_mask.shape, -1e30))
    stats = TokenStats(batch.old_log_probs, jnp.full(batch.loss_mask.shape, jnp.inf))
    config = PolicyLossConfig(PPO(), kl=KL(zero, "k2"), entropy_coef=zero)
    loss, metrics = policy_loss(stats, batch, config)
    assert loss == policy_loss(stats, batch, PolicyLossConfig(PPO()))[0]
    assert jnp.isinf(metrics["kl"].value)
    assert jnp.isinf(metrics["entropy"].value)


@pytest.mark.parametrize(
    ("lacking", "options", "message"),
    [
        (
            "advantages",
            {},
            r"batch.advantages: got None, expected f32\[R, T\] for every policy loss",
        ),
        (
            "old_log_probs",
            {},
            r"batch.old_log_probs: got None, expected f32\[R, T\] for ratio_to='old'",
        ),
        (
            "ref_log_probs",
            {"kl": KL(0.1)},
            r"batch.ref_log_probs: got None, expected f32\[R, T\] for kl=KL\(coef=0.1",
        ),
        (
            "rollout_log_probs",
            {"ratio_to": "rollout"},
            r"batch.rollout_log_probs: got None, .*'rollout'",
        ),
        (
            "rollout_log_probs",
            {"off_policy": OffPolicyConfig(weights="token")},
            r"rollout_log_probs: got None",
        ),
    ],
)
def test_arrays_that_the_batch_lacks(batch, lacking, options, message):
    config = PolicyLossConfig(**options)
    with pytest.raises(ValueError, match=message):
        loss_of(
            TokenStats(batch.returns), dataclasses.replace(batch, **{lacking: None}), config, None
        )


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
    }
    for message, (given, rows, selected) in cases.items():
        with pytest.raises((ValueError, TypeError), match=message):
            loss_of(given, rows, PolicyLossConfig(), None, selected=selected)
    with pytest.raises(
        ValueError, match=r"stats.entropy: got None, expected f32\[R, T\] for entropy_coef=0.1"
    ):
        loss_of(stats, batch, PolicyLossConfig(entropy_coef=0.1), None)
    integers = TokenStats(batch.returns.astype(np.int32))
    with pytest.raises(TypeError, match=r"stats.log_probs: got dtype int32, expected float32"):
        loss_of(integers, batch, PolicyLossConfig(), None)


@pytest.mark.parametrize("loss", ["ppo", "clip_cov", "kl_cov"])
def test_accumulation_refuses_denominators_of_a_part(batch, loss):
    """Without the step's numbers the sum over K micro-batches of token means would be K times
    the loss.
    """
    stacked = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    config = config_of(loss, entropy_coef=0.0)
    normalizer = Normalizer.of(SFT(), stacked)
    selected = stacked.loss_mask if loss != "ppo" else None

    def run(normalizer, selected):
        def fn(x, part):
            return loss_of(TokenStats(x[part[3]]), part[0], config, None, part[1], part[2])

        return accumulate_gradients(fn, (stacked, normalizer, selected, np.arange(2)))(
            jnp.asarray(stacked.returns)
        )

    run(normalizer, selected)
    with pytest.raises(
        ValueError, match="normalizer: got None inside accumulate_gradients, expected the step's"
    ):
        run(None, selected)
    if loss != "ppo":
        with pytest.raises(
            ValueError,
            match=(
                r"batch\.extras: got .*, expected 'selected' among them, the step's covariance_mask"
            ),
        ):
            run(normalizer, None)


def test_accumulation_wants_one_leading_dimension():
    def fn(w, x):
        return (w * x.sum(), {})

    for parts in ((jnp.ones(2), jnp.ones(3)), jnp.ones((0, 2)), jnp.float32(1)):
        with pytest.raises(ValueError, match="micro_batches: got leading dimensions"):
            accumulate_gradients(fn, parts)


def test_accumulators_are_f32():
    """512 gradients of 1 in bf16: a bf16 sum stops at 256."""

    def fn(w, x):
        return (jnp.sum(w.astype(jnp.float32) * x), {})

    _, gradient = jax.jit(accumulate_gradients(fn, jnp.ones((512, 3))))(jnp.ones(3, jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    assert gradient.tolist() == [512.0] * 3


def test_metric():
    with pytest.raises(
        ValueError, match="reduce: got 'median', expected one of 'mean', 'sum', 'min', 'max'"
    ):
        Metric(jnp.float32(1), jnp.float32(1), "median")
    for reduce, expected in {"mean": 7 / 6, "sum": 7.0, "min": 1.0, "max": 6.0}.items():
        parts = (
            Metric(jnp.float32(6), jnp.float32(2), reduce),
            Metric(jnp.float32(1), jnp.float32(4), reduce),
        )
        np.testing.assert_allclose(merge_metrics(*parts).value, expected, rtol=1e-6)
    assert Metric(jnp.float32(0), jnp.float32(0)).value == 0


def test_a_rollout_without_an_id_is_no_plausible_number(batch):
    unnamed = dataclasses.replace(
        batch, rollout_ids=np.where(batch.sample_ids == 0, -1, batch.rollout_ids)
    )
    for rows, finite in ((batch, True), (unnamed, False)):
        loss, _ = loss_of(
            TokenStats(batch.returns), rows, PolicyLossConfig(aggregation="rollout_mean"), None
        )
        assert np.isfinite(loss) == finite
