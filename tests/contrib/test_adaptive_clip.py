"""BAPO's bounds: the published search in float64, on meshes and stacked steps; by hand in both
orders.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import step_of

from jaxppo import PPO, PolicyLossConfig, RolloutBatch, TokenStats, Unusable, policy_loss
from jaxppo.contrib.adaptive_clip import adaptive_clip
from sharding import make_parallel_mesh


def searched(ratio, a, target, first):
    """The loop of the reference code: raise one bound until the target is met, then the other."""
    low, high = 0.6, 1.2

    def balance():
        good = sum(x * min(r, high) for r, x in zip(ratio, a, strict=True) if x > 0)
        bad = sum(-x * max(r, low) for r, x in zip(ratio, a, strict=True) if x < 0)
        return good / (bad + 1e-8)

    for which in ("high", "low") if first == "high" else ("low", "high"):
        while which == "high" and balance() < target and high < 2 - 1e-9:
            high = min(high + 0.05, 2)
        while which == "low" and balance() < target and low < 0.8 - 1e-9:
            low = min(low + 0.05, 0.8)
    return 1 - low, high - 1


@pytest.mark.parametrize(("first", "expected"), [("high", (0.4, 0.45)), ("low", (0.2, 1.0))])
def test_by_hand(first, expected):
    """P / N is 0.894737 at first.

    Raising the upper bound meets 1.01 at 1.45; the published order never does.
    """
    ratio = np.array([1.5, 1.0, 0.5, 1.3])
    a = np.array([1.0, 0.5, -1.0, -1.0])
    ids = jnp.array([[1, 1, 1, 1]])
    old = jnp.full((1, 4), -2.0)
    batch = RolloutBatch(
        ids, ids, ids, ids, jnp.ones((1, 4)), jnp.array([[0]]), advantages=jnp.asarray(a, jnp.float32)[None],
        old_log_probs=old,
    )  # fmt: skip
    found = adaptive_clip(
        TokenStats(old + jnp.log(jnp.asarray(ratio, jnp.float32))[None]),
        batch,
        first=first,
        target=1.01,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(searched(ratio, a, 1.01, first), expected, rtol=1e-6)


@pytest.mark.parametrize("target", [0.7, 1.0, 1.3, 9.0])
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_the_search_of_a_step(mesh, target):
    """Bounds of all devices and micro-batches together, whatever stands where there is no loss;
    and it makes a loss.
    """
    parallel = mesh and make_parallel_mesh(mesh, context_layout="zigzag")
    batch = RolloutBatch.from_samples(
        step_of(3), row_length=24, rows=2, micro_batches=2, num_segments=9, parallel=parallel
    )
    on = batch.loss_mask > 0
    x = np.where(on, batch.returns, np.nan)
    ratio = np.exp(np.float64(x[on]) - batch.old_log_probs[on])
    a = np.float64(batch.advantages[on])
    batch = dataclasses.replace(batch, advantages=np.where(on, batch.advantages, np.nan))

    @jax.jit
    def bounds(x):
        return adaptive_clip(TokenStats(x), batch, target=target, parallel=parallel)

    np.testing.assert_allclose(bounds(x), searched(ratio, a, target, "high"), rtol=1e-5)


def test_a_loss_of_the_bounds():
    batch = RolloutBatch.from_samples(step_of(3), row_length=24, rows=4, num_segments=9)
    stats = TokenStats(jnp.asarray(batch.returns))

    @jax.jit
    def loss(stats):
        low, high = adaptive_clip(stats, batch)
        return (
            policy_loss(stats, batch, PolicyLossConfig(PPO(low, high, dual_clip=3.0)))[0],
            low,
            high,
        )

    value, low, high = loss(stats)
    expected, _ = policy_loss(
        stats, batch, PolicyLossConfig(PPO(float(low), float(high), dual_clip=3.0))
    )
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def four_tokens(old, advantages, **more):
    """A batch of one row."""
    ids = jnp.array([[1, 1, 1, 1]])
    row = {"advantages": advantages, "old_log_probs": old, **more}
    arrays = {name: jnp.array([x], jnp.float32) for name, x in row.items()}
    return RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 4)), jnp.array([[0]]), **arrays)


OUT = Unusable("weight_0", denominators="out", penalties="out")


@pytest.mark.parametrize("rule", [Unusable("weight_0"), OUT, Unusable("ratio_1")])
def test_impossible_tokens_are_in_no_sum(rule):
    """P = 2 and N = 1 meet 1.9 at once.

    The token that has no loss would bring N to 4, which no bound meets.
    """
    old = [-2.0, -2.0, -2.0, -2.0]
    now = jnp.array([[-2.0, -2.0, -jnp.inf, -2.0]])
    batch = four_tokens(old, [2.0, -1.0, -5.0, 0.0])
    with_it = adaptive_clip(TokenStats(now), batch, target=1.9)
    assert np.isnan(with_it).all()
    left_out = adaptive_clip(TokenStats(now), batch, target=1.9, unusable=rule)
    np.testing.assert_allclose(left_out, (0.4, 0.2), rtol=1e-5)


@pytest.mark.parametrize(
    ("rule", "expected"), [(Unusable("weight_0"), (0.4, 0.2)), (OUT, (0.4, 0.2))]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tokens_that_the_sampler_does_not_know(rule, expected, bad):
    """A ratio of 1 of the third brings N to 6: no bound meets 1.9.

    Without its policy loss P / N is 2.
    """
    batch = four_tokens(
        [-2.0] * 4, [2.0, -1.0, -5.0, 0.0], rollout_log_probs=[-2.0, -2.0, bad, -2.0]
    )
    now = TokenStats(jnp.full((1, 4), -2.0))
    np.testing.assert_allclose(
        adaptive_clip(now, batch, ratio_to="rollout", target=1.9, unusable=rule),
        expected,
        rtol=1e-5,
    )
    with_it = adaptive_clip(
        now, batch, ratio_to="rollout", target=1.9, unusable=Unusable("ratio_1")
    )
    np.testing.assert_allclose(with_it, (0.2, 1.0), rtol=1e-5)
    assert np.isnan(adaptive_clip(now, batch, ratio_to="rollout", target=1.9)).all()


def test_a_log_prob_of_the_sampler_above_0_counts_as_0():
    """The ratio of exp(-0.1) of the capped log-prob is 1 with the cap, and 0.905 without: P =
    0.905, below 0.95.
    """
    batch = four_tokens(
        [-2.0] * 4, [1.0, -1.0, 0.0, 0.0], rollout_log_probs=[0.1, -2.0, -2.0, -2.0]
    )
    now = TokenStats(jnp.array([[0.0, -2.0, -2.0, -2.0]]))
    found = adaptive_clip(now, batch, ratio_to="rollout", target=0.95)
    np.testing.assert_allclose(found, (0.4, 0.2), rtol=1e-5)


@pytest.mark.parametrize("target", [-1.0, 0.0, np.nan])
def test_a_traced_target_out_of_its_range(target):
    """Once the bounds were the last ones, since no sum meets a target of NaN."""
    batch = four_tokens([-2.0] * 4, [1.0, -1.0, 0.0, 0.0])
    run = jax.jit(lambda x: adaptive_clip(TokenStats(batch.old_log_probs), batch, target=x))
    assert np.isnan(run(target)).all()
    np.testing.assert_allclose(run(0.5), (0.4, 0.2), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"low": (0.8, 0.6)},
            r"low: got \(0.8, 0.6\), expected two numbers with 0 <= first <= last <= 1",
        ),
        ({"low": 0.6}, "low: got 0.6, expected two numbers"),
        ({"low": (0.6, "0.8")}, "low: got '0.8', expected a finite number"),
        ({"high": (1.2, 1.5, 2.0)}, "high: got"),
        ({"step": 1e-9}, "step: got 1e-09, expected at most 10000 steps from 0.6 to 0.8"),
        ({"unusable": "drop"}, "unusable: got 'drop', expected 'nan' or an instance of Unusable"),
        ({"high": (0.9, 2.0)}, r"high: got"),
        ({"step": 0.0}, "step: got 0"),
        ({"first": "both"}, "first: got 'both'"),
    ],
)
def test_refusals(options, error):
    batch = RolloutBatch.from_samples(step_of(3), row_length=24, rows=4, num_segments=9)
    with pytest.raises(ValueError, match=error):
        adaptive_clip(TokenStats(jnp.asarray(batch.returns)), batch, **options)
