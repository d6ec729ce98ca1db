"""Score centering against the oracle, and its expected gradient under the sampler, which is 0."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import other_losses
from oracle.head import id_gradient, id_log_probs, log_softmax
from policy_steps import quick_jit

from jaxppo import (
    CISPO,
    GSPO,
    PPO,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    Unusable,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_stats,
    policy_loss,
)
from jaxppo.contrib.score_centering import ScoreCentering
from jaxppo.policy_losses import ProbabilityMask, Reinforce
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

R, T, V, K = 4, 8, 23, 6
RNG = np.random.default_rng(5)
MASK = (RNG.random((R, T)) < 0.7).astype(np.float32)
MASK[:, -1] = 0
Z, SAMPLER = RNG.normal(size=(2, R, T, V)) * 1.5
LOG_Q = log_softmax(SAMPLER.reshape(-1, V)).reshape(Z.shape)
UNCLIPPED = PPO(1.0, 1e9)
# the loss, where its ratio is, and f of p and q
LOSSES = {
    "one": (Reinforce(), "current", lambda p, q: 1.0),
    "truncated": (CISPO(1.0, 1.0), "rollout", lambda p, q: min(p / q, 2.0)),
    "masked": (
        ProbabilityMask(0.1, 0.1, 1.5),
        "rollout",
        lambda p, q: min(p / q, 1.5) * (abs(p - q) <= 0.1),
    ),
    "a pull beside": (
        ProbabilityMask(0.1, 0.1, 1.5, 0.5),
        "rollout",
        lambda p, q: min(p / q, 1.5) * (abs(p - q) <= 0.1),
    ),
    "ratio": (UNCLIPPED, "rollout", lambda p, q: p / q),
}


def of_sampler(k):
    ids = np.argsort(-LOG_Q, axis=-1)[..., :k].astype(np.int32)
    return ids, np.take_along_axis(LOG_Q, ids, axis=-1).astype(np.float32)


def batch_of(targets, advantages):
    off = MASK == 0
    one = jnp.ones((R, T), jnp.int32)
    row = jnp.tile(jnp.arange(T)[None], (R, 1))
    rollout = np.take_along_axis(LOG_Q, targets[..., None], axis=-1)[..., 0]
    return RolloutBatch(
        one,
        jnp.asarray(np.where(off, -100, targets), jnp.int32),
        one,
        row,
        jnp.asarray(MASK),
        jnp.arange(R)[:, None],
        advantages=jnp.asarray(np.where(off, np.nan, advantages), jnp.float32),
        rollout_log_probs=jnp.asarray(rollout, jnp.float32),
    )


ADVANTAGES = RNG.normal(size=(R, T))
BATCH = batch_of(RNG.integers(0, V, (R, T)), ADVANTAGES)


def sampled(batch, given):
    return dataclasses.replace(
        batch, extras={"sampler_ids": given[0], "sampler_log_probs": given[1]}
    )


@pytest.mark.every(5)
@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize("name", LOSSES)
def test_against_the_oracle(name, tail):
    """With a bucket, the coefficients of unclipped PPO are all 0: its ratio is exact importance
    sampling.
    """
    loss, ratio_to, f = LOSSES[name]
    config = PolicyLossConfig(loss, ratio_to=ratio_to, aggregation="token_sum")
    ids, log_q = of_sampler(K)
    ids[0, 1, 4:] = -1
    log_p = np.take_along_axis(
        log_softmax(Z.reshape(-1, V)).reshape(Z.shape), np.maximum(ids, 0), axis=-1
    )
    log_p = np.where(ids < 0, -np.inf, log_p).astype(np.float32)
    off = MASK[..., None] == 0
    given = np.where(off, 10**6, ids), np.where(off, np.nan, log_q)

    def run(x):
        stats = TokenStats(jnp.full((R, T), -1.0), id_log_probs=x)
        return loss_from_stats(stats, sampled(BATCH, given), ScoreCentering(config, tail))

    (value, metrics), gradient = quick_jit(jax.value_and_grad(run, has_aux=True))(
        jnp.where(off, jnp.nan, log_p)
    )
    total = 0.0
    expected = np.zeros(log_p.shape)
    for r, t in zip(*np.nonzero(MASK), strict=True):
        k = ids[r, t] >= 0
        own = log_p[r, t, k], log_q[r, t, k], f, ADVANTAGES[r, t], tail
        found, expected[r, t, k] = other_losses.score_centering(*own)
        total += found
    np.testing.assert_allclose(value, total, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=5e-6)
    if name == "ratio" and tail == "bucket":
        assert np.abs(gradient).max() < 1e-5
    np.testing.assert_allclose(
        metrics["rollout_mass"].value, np.exp(log_q[MASK > 0]).sum(-1).mean(), rtol=0.02
    )


@pytest.mark.parametrize(("name", "tail"), [("one", "bucket"), ("truncated", "renormalise")])
def test_an_id_that_the_policy_finds_impossible(name, tail):
    """Drawing it has no policy loss where the config has a rule, and its coefficient is 0;
    otherwise all is NaN.

    The first token that was drawn is one of them.
    """
    ids, log_q = of_sampler(K)
    row, t = np.argwhere(MASK > 0)[0]
    batch = dataclasses.replace(BATCH, targets=BATCH.targets.at[row, t].set(ids[row, t, 1]))
    z = Z.copy()
    np.put_along_axis(
        z, ids[..., 1:2], np.where(np.arange(R)[:, None, None] < 2, -np.inf, 0), axis=-1
    )
    loss, ratio_to, f = LOSSES[name]

    def run(z, rule):
        config = PolicyLossConfig(loss, ratio_to=ratio_to, aggregation="token_sum", unusable=rule)
        stats = log_probs_from_logits(z, batch.targets, ids=ids, where=batch.loss_mask > 0)
        return loss_from_stats(
            stats,
            sampled(batch, (ids, log_q)),
            ScoreCentering(config, tail=tail),
        )

    def f_or_none(p, q):
        return f(p, q) if p > 0 else 0.0

    @quick_jit
    def both(z):
        return [
            jax.value_and_grad(run, has_aux=True)(z, rule) for rule in (Unusable("weight_0"), "nan")
        ]

    ((value, metrics), gradient), ((spoilt, _), no_gradient) = both(jnp.asarray(z, jnp.float32))
    expected = np.zeros(z.shape)
    for r, t in zip(*np.nonzero(MASK), strict=True):
        log_p = id_log_probs(z[r, t : t + 1], ids[r, t : t + 1])[0]
        with np.errstate(all="ignore"):
            by_id = other_losses.score_centering(
                log_p, log_q[r, t], f_or_none, ADVANTAGES[r, t], tail
            )[1]
        expected[r, t] = id_gradient(z[r, t : t + 1], ids[r, t : t + 1], by_id[None])[0]
    assert np.isfinite([value, *(x.value for x in metrics.values())]).all()
    np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=5e-6)
    assert np.isnan(spoilt)
    assert np.isnan(no_gradient).any()


@pytest.mark.parametrize(
    "rule", [Unusable("weight_0"), Unusable.of("torchtitan"), Unusable("ratio_1")]
)
def test_a_token_that_the_sampler_does_not_know(rule):
    """It has no term where it has no policy loss, and may lack the log-probs of the ids; the
    others keep theirs.
    """
    ids, log_q = of_sampler(K)
    place = tuple(np.argwhere(MASK > 0)[0])
    known = (np.arange(R * T).reshape(R, T) != np.ravel_multi_index(place, (R, T))).astype(
        np.float32
    )
    loss, ratio_to, _ = LOSSES["truncated"]

    def run(z, rule, lacking, log_q, mask):
        rollout = BATCH.rollout_log_probs.at[place].set(lacking)
        batch = dataclasses.replace(
            sampled(BATCH, (ids, log_q)), rollout_log_probs=rollout, loss_mask=mask
        )
        config = PolicyLossConfig(loss, ratio_to=ratio_to, unusable=rule)
        stats = log_probs_from_logits(z, batch.targets, ids=ids, where=batch.loss_mask > 0)
        return loss_from_stats(stats, batch, ScoreCentering(config))

    def of(*given):
        return quick_jit(jax.value_and_grad(lambda z: run(z, *given), has_aux=True))(
            jnp.asarray(Z, jnp.float32)
        )

    without_ids = log_q.copy()
    without_ids[place] = np.nan
    has_term = rule.policy == "ratio_1"
    (value, found), gradient = of(rule, np.nan, log_q if has_term else without_ids, BATCH.loss_mask)
    assert float(found["unusable_tokens"].value) == 1
    mask = BATCH.loss_mask if has_term else BATCH.loss_mask * known
    (expected, _), slopes = of("nan", -1.0, log_q, mask)
    share = 1.0 if rule.denominators == "out" else mask.sum() / MASK.sum()  # of the denominators
    np.testing.assert_allclose(value, expected * share, rtol=1e-5)
    np.testing.assert_allclose(gradient, np.asarray(slopes) * share, rtol=1e-4, atol=1e-7)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["one", "truncated", "masked"])
def test_the_expected_gradient_over_the_sampler_is_zero(name):
    """The mean over every token that may be sampled, by its probability.

    Without centering it is not 0.
    """
    loss, ratio_to, _ = LOSSES[name]
    config = PolicyLossConfig(loss, ratio_to=ratio_to, aggregation="token_sum")
    given = of_sampler(V)

    def total(logits, centred):
        found = 0.0
        for y in range(V):
            batch = batch_of(np.full((R, T), y), ADVANTAGES)
            # what a token is worth is its advantage times how often the sampler draws it
            weight = jnp.where(MASK > 0, jnp.exp(batch.rollout_log_probs), 0)
            stats = log_probs_from_logits(logits, batch.targets, where=batch.loss_mask > 0)
            worth = dataclasses.replace(batch, advantages=batch.advantages * weight)
            found += policy_loss(stats, worth, config)[0]
        if centred:
            stats = log_probs_from_logits(
                logits, BATCH.targets, ids=given[0], where=BATCH.loss_mask > 0
            )
            found += loss_from_stats(
                stats, sampled(BATCH, given), ScoreCentering(config, "renormalise")
            )[0]
        return found

    z = jnp.asarray(Z, jnp.float32)
    alone, centred = (
        np.asarray(jax.jit(jax.grad(lambda z, c=c: total(z, c)))(z)) for c in (False, True)
    )
    assert np.abs(alone).max() > 0.05
    np.testing.assert_allclose(centred, 0, atol=2e-6)


@pytest.mark.every(2)
@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "tp=8"])
def test_on_a_mesh_from_hidden_states(mesh):
    hidden = jnp.asarray(RNG.normal(size=(R, T, 5)), jnp.float32)
    kernel = jnp.asarray(RNG.normal(size=(5, V)), jnp.float32)
    config = PolicyLossConfig(CISPO(1.0, 1.0), ratio_to="rollout")
    given = of_sampler(K)

    def total(hidden, kernel, parallel):
        where = BATCH.loss_mask > 0
        stats = log_probs_from_hidden(
            hidden, kernel, BATCH.targets, ids=given[0], where=where, parallel=parallel
        )
        one = policy_loss(stats, BATCH, config, parallel=parallel)[0]
        return (
            one
            + loss_from_stats(
                stats, sampled(BATCH, given), ScoreCentering(config), parallel=parallel
            )[0]
        )

    def of(p):
        return quick_jit(jax.value_and_grad(lambda *x: total(*x, p), (0, 1)))(hidden, kernel)

    assert_trees_close(of(make_parallel_mesh(mesh)), of(None), rtol=1e-5, atol=1e-6)


def test_bad_input():
    given = of_sampler(K)
    stats = TokenStats(jnp.full((R, T), -1.0), id_log_probs=jnp.asarray(given[1]))
    config = PolicyLossConfig(CISPO(1.0, 1.0), ratio_to="rollout")

    def run(config=config, stats=stats, given=given, **more):
        return loss_from_stats(stats, sampled(BATCH, given), ScoreCentering(config, **more))

    assert np.isfinite(run()[0])
    for config_, message in [
        (
            PolicyLossConfig(GSPO(), ratio_to="rollout"),
            "config.loss: got GSPO.*expected one whose tokens are each",
        ),
        (PolicyLossConfig(), "config.ratio_to: got 'old', expected 'rollout' or 'current'"),
        (
            PolicyLossConfig(
                Reinforce(), ratio_to="current", off_policy=OffPolicyConfig(weights="token")
            ),
            "config.off_policy: got a correction, expected None",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            run(config_)
    with pytest.raises(
        ValueError, match="tail: got 'leave_out', expected one of 'bucket', 'renormalise'"
    ):
        run(tail="leave_out")
    with pytest.raises(ValueError, match=r"stats.id_log_probs: got None, expected f32\[R, T, K\]"):
        run(stats=TokenStats(jnp.zeros((R, T))))
    with pytest.raises(
        ValueError, match=r"sampler_log_probs'\]: got shape \(4, 8, 2\), expected that of"
    ):
        run(given=(given[0], given[1][..., :2]))
    spoilt = given[1].copy()
    spoilt[tuple(np.argwhere(MASK > 0)[0])] = np.nan
    assert np.isnan(run(given=(given[0], spoilt))[0])
