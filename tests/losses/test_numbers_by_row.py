"""Numbers by row: the ranges, rules and names of the fields that they replace, also where a
field is 0.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import (
    KL,
    PPO,
    SFT,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    explain_broken_rules,
    finalize_metrics,
    log_probs_from_hidden,
    loss_from_hidden,
    loss_from_stats,
)
from jaxppo.batch.extras import Extra
from jaxppo.contrib.features import Features, States
from jaxppo.contrib.score_centering import ScoreCentering
from jaxppo.losses import TopKDistillation, by_row, explain_tokens, preference
from jaxppo.policy_losses import CISPO, BySign, Reinforce
from sharding import make_parallel_mesh

R, T = 4, 8
NUMBERS = np.repeat([0.1, 0.3, 0.2, 0.05], T).reshape(R, T)  # one for each row
MESH = "dp=2,cp=2,tp=2"


def normal(seed, *shape):
    return np.float32(np.random.default_rng(seed).normal(size=shape or (R, T)))


def batch_of(numbers=NUMBERS, parallel=None):
    """A sample a row, of 8 tokens; the first and the last position have no loss, and nothing
    sound in the extras.
    """
    mask = np.ones((R, T), np.float32)
    mask[:, [0, -1]] = 0
    ids = np.arange(R * T).reshape(R, T) % 7
    slots = np.arange(R)[:, None]
    extras = {
        "client": np.where(mask > 0, 0, 7),
        "number": np.where(mask > 0, numbers, np.nan).astype(np.float32),
    }
    teacher = np.log(np.random.default_rng(5).dirichlet(np.ones(4), (R, T))[..., :3])
    extras |= {
        "teacher_ids": np.arange(3) + 0 * ids[..., None],
        "teacher_log_probs": np.float32(teacher),
    }
    extras |= {
        "sampler_ids": extras["teacher_ids"],
        "sampler_log_probs": extras["teacher_log_probs"],
    }
    arrays = {
        name: -1 - np.abs(normal(i)) for i, name in enumerate(("old_log_probs", "ref_log_probs"), 1)
    }
    arrays |= {"rollout_log_probs": arrays["old_log_probs"] + 0.1, "advantages": normal(3)}
    arrays |= {"values": normal(8), "returns": normal(9)}
    segments = np.ones((R, T), np.int32)
    places = np.arange(T) + np.zeros((R, 1), np.int32)
    batch = RolloutBatch(
        ids,
        (ids + 1) % 7,
        segments,
        places,
        mask,
        slots,
        slots // 2,
        slots,
        **arrays,
        extras=extras,
    )
    batch = dataclasses.replace(batch, rewards=np.float32(slots % 2))
    return batch.put(parallel) if parallel else batch


OWN = -1 - np.abs(normal(0))
ENTROPY = np.abs(normal(4))
LOG_Z = normal(6)
MEAN_LOGIT = normal(7)


def stats_of(log_probs=OWN, entropy=ENTROPY):
    given = {
        "entropy_mode": "bonus",
        "log_z": jnp.asarray(LOG_Z),
        "mean_logit": jnp.asarray(MEAN_LOGIT),
    }
    return TokenStats(jnp.asarray(log_probs), jnp.asarray(entropy), **given)


PLAIN = PolicyLossConfig(Reinforce(), ratio_to="current", aggregation="token_sum")
BATCH = batch_of()
ON = BATCH.loss_mask > 0
A = np.float64(BATCH.advantages)
# By hand: the loss of a token with the number c, and its slopes by the log-prob and by the entropy.
ZERO = 0 * OWN
BY_HAND = {
    "entropy_coef": (PLAIN, lambda c: (-A * OWN - c * ENTROPY, -A, -c)),
    "kl.coef": (
        dataclasses.replace(PLAIN, kl=KL(0.0, "k2")),
        lambda c: (
            -A * OWN + c * (OWN - BATCH.ref_log_probs) ** 2 / 2,
            -A + c * (OWN - BATCH.ref_log_probs),
            ZERO,
        ),
    ),
    "z_loss": (SFT(aggregation="token_sum"), lambda c: (-OWN + c * LOG_Z**2, ZERO - 1, ZERO)),
    "label_smoothing": (
        SFT(aggregation="token_sum"),
        lambda c: (-(1 - c) * OWN + c * (LOG_Z - MEAN_LOGIT), ZERO - (1 - c), ZERO),
    ),
    "aggregation_norm": (
        dataclasses.replace(
            PLAIN, aggregation="sequence_mean_token_sum_norm", aggregation_norm=7.0
        ),
        lambda c: (-A * OWN / c / R, -A / c / R, ZERO),
    ),
}


@pytest.mark.parametrize("field", BY_HAND)
@pytest.mark.parametrize("mesh", [None, MESH])
def test_by_hand(field, mesh):
    """The norm was the config's, whatever the batch said."""
    loss, of_number = BY_HAND[field]
    value, by_log_prob, by_entropy = of_number(np.float64(NUMBERS))
    parallel = mesh and make_parallel_mesh(mesh)
    batch = batch_of(parallel=parallel)
    parts = by_row({"a": loss}, "client", {"a": {field: "number"}})

    @jax.jit
    def run(log_probs, entropy):
        def of(*given):
            return loss_from_stats(stats_of(*given), batch, parts, parallel=parallel)[0]

        return jax.value_and_grad(of, (0, 1))(log_probs, entropy)

    found, slopes = run(OWN, ENTROPY)
    np.testing.assert_allclose(found, (value * ON).sum(), rtol=1e-5)
    for got, expected in zip(slopes, (by_log_prob, by_entropy), strict=True):
        np.testing.assert_allclose(got, expected * ON, rtol=1e-5, atol=1e-7)


STATES = normal(10, R, T, 8), 0.3 * normal(11, 8, 32)


def parts_with(field):
    """The loss whose field the batch's numbers replace."""
    return by_row({"a": BY_HAND[field][0]}, "client", {"a": {field: "number"}})


@functools.cache
def in_two_steps(field):
    """The loss after the statistics, and its gradients by hidden states and kernel."""
    asked = {
        "entropy": "bonus",
        "logit_stats": ("log_z", "mean_logit"),
        "where": BATCH.loss_mask > 0,
    }

    def two(hidden, kernel):
        stats = log_probs_from_hidden(hidden, kernel, BATCH.targets, **asked)
        return loss_from_stats(stats, BATCH, parts_with(field))[0]

    return jax.jit(jax.value_and_grad(two, (0, 1)))(*STATES)


@pytest.mark.parametrize("memory", [2**30, 25_000])
@pytest.mark.parametrize("field", BY_HAND)
def test_from_hidden_in_one_pass_or_two(field, memory):
    """Where the config has 0, entropy_coef had no gradient, and z_loss and label_smoothing
    crashed.
    """

    def one(hidden, kernel):
        return loss_from_hidden(hidden, kernel, BATCH, parts_with(field), memory=memory)[0]

    got = jax.jit(jax.value_and_grad(one, (0, 1)))(*STATES)
    expected = in_two_steps(field)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, expected)


OFF = OffPolicyConfig(
    "token",
    low=0.5,
    high=2.0,
    rejections=(Rejection("token_k3", high=9.0), Rejection("token_k1", 0.5)),
    veto=1e-4,
)
CORRECTED = PolicyLossConfig(off_policy=OFF)
# A loss, the field, numbers that it takes, numbers out of its range, and the rule that names it.
RANGES = [
    (PPO(), "clip_low", (0.0, 0.3), (-1.0, np.nan, np.inf), "clip_low"),
    (PPO(dual_clip=3.0), "dual_clip", (1.5,), (1.0,), "dual_clip"),
    (BySign(negative=PPO()), "negative.clip_high", (0.3,), (-0.1,), "clip_high"),
    (PolicyLossConfig(PPO(), kl=KL(0.1)), "kl.coef", (-0.5, 0.0), (np.inf,), "kl.coef"),
    (PolicyLossConfig(PPO()), "entropy_coef", (-0.5, 0.0), (np.nan,), "entropy_coef"),
    (CORRECTED, "off_policy.low", (0.0, 1.9), (-0.1, 2.0, np.nan), "off_policy.low"),
    (CORRECTED, "off_policy.high", (0.6, np.inf), (0.5, np.nan), "off_policy.high"),
    (CORRECTED, "off_policy.veto", (0.5,), (0.0, 1.0), "off_policy.veto"),
    (
        CORRECTED,
        "off_policy.rejections.0.high",
        (np.inf, 1.0),
        (0.0, -1.0),
        "off_policy.rejections.high",
    ),
    (CORRECTED, "off_policy.rejections.1.low", (0.0,), (-0.5, np.nan), "off_policy.rejections.low"),
    (SFT(), "z_loss", (0.0, 1.0), (-0.1,), "z_loss"),
    (SFT(), "label_smoothing", (0.0, 0.9), (1.0,), "label_smoothing"),
    (TopKDistillation("jensen_shannon"), "beta", (0.1,), (0.0, 1.0, 2.0), "beta"),
    (TopKDistillation("mixed_kl"), "beta", (0.0, 1.0), (2.0,), "beta"),
    (
        PolicyLossConfig(aggregation="sequence_mean_token_sum_norm", aggregation_norm=3),
        "aggregation_norm",
        (2.0,),
        (0.0, -1.0),
        "aggregation_norm",
    ),
]


@pytest.mark.parametrize(
    ("loss", "field", "good", "bad", "rule"), RANGES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_ranges_and_names_are_those_of_fields(loss, field, good, bad, rule):
    parts = by_row({"a": loss}, "client", {"a": {field: "number"}})
    ids = BATCH.extras["teacher_ids"]
    stats = dataclasses.replace(stats_of(), ids=ids, id_log_probs=jnp.log(jnp.full((R, T, 3), 0.2)))

    @jax.jit
    def run(number):
        # of one row
        numbers = jnp.where(jnp.arange(R)[:, None] == 1, number, BATCH.extras["number"])
        batch = dataclasses.replace(BATCH, extras=BATCH.extras | {"number": numbers})
        start = jnp.asarray(good[-1] if np.isfinite(good[-1]) else good[0], jnp.float32)
        numbers = jnp.where(
            jnp.arange(R)[:, None] == 1, number, jnp.where(batch.loss_mask > 0, start, jnp.nan)
        )
        batch = dataclasses.replace(batch, extras=batch.extras | {"number": numbers})
        loss, metrics = loss_from_stats(stats, batch, parts)
        return loss, finalize_metrics(metrics)["a/broken_rules"]

    for number in good:
        value, broken = run(number)
        assert np.isfinite(value), number
        assert broken == 0
    for number in bad:
        value, broken = run(number)
        assert np.isnan(value), number
        assert explain_broken_rules(broken)[0].startswith(f"{rule}: expected a"), number


CENTERED = PolicyLossConfig(CISPO(), ratio_to="rollout", aggregation="token_sum")


def with_beta(loss, number):
    return dataclasses.replace(loss, beta=number)


def with_clip(loss, number):
    config = dataclasses.replace(loss.config, loss=CISPO(clip_high=number))
    return dataclasses.replace(loss, config=config)


@pytest.mark.parametrize(
    ("loss", "field", "own"),
    [
        (TopKDistillation("jensen_shannon", aggregation="token_sum"), "beta", with_beta),
        (TopKDistillation("adaptive_kl", aggregation="token_sum"), "beta", with_beta),
        (ScoreCentering(CENTERED), "clip_high", with_clip),
        (Features(aggregation="token_sum"), "beta", with_beta),
    ],
    ids=["jensen_shannon", "adaptive_kl", "score_centering", "features"],
)
def test_losses_of_several_entries_a_token(loss, field, own):
    """Several ids of a token, or several features: each row's loss with the number of that row
    as its config's.
    """
    parts = by_row({"a": loss}, "client", {"a": {field: "number"}})
    x = jax.nn.log_softmax(jnp.asarray(normal(12, R, T, 4)))[..., :3]

    def stats_from(x):
        if isinstance(loss, Features):
            return States(3 * x, jnp.zeros_like(x))
        return dataclasses.replace(stats_of(), ids=BATCH.extras["teacher_ids"], id_log_probs=x)

    @jax.jit
    @jax.value_and_grad
    def together(x):
        return loss_from_stats(stats_from(x), BATCH, parts)[0]

    def alone(x, row):
        mask = BATCH.loss_mask * (np.arange(R) == row)[:, None]
        batch = dataclasses.replace(BATCH, loss_mask=mask)
        of_row = own(loss, float(NUMBERS[row, 0]))
        return loss_from_stats(stats_from(x), batch, of_row)[0]

    @jax.jit
    @jax.value_and_grad
    def each_alone(x):
        return sum(alone(x, row) for row in range(R))

    value, slopes = together(x)
    expected, expected_slopes = each_alone(x)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slopes, expected_slopes, rtol=1e-5, atol=1e-6)
    assert np.abs(slopes).max() > 0


def test_the_terms_of_a_field_that_is_0_are_explained():
    parts = by_row({"a": PLAIN}, "client", {"a": {"entropy_coef": "number"}})
    found = explain_tokens(stats_of(), BATCH, parts)["a"]
    np.testing.assert_allclose(found.arrays["loss/entropy"], -NUMBERS * ENTROPY * ON, rtol=1e-6)
    with pytest.raises(ValueError, match="stats: got entropies of mode 'metric'"):
        loss_from_stats(dataclasses.replace(stats_of(), entropy_mode="metric"), BATCH, parts)
    parts = by_row(
        {"a": dataclasses.replace(PLAIN, kl=KL(0.0))}, "client", {"a": {"kl.coef": "number"}}
    )
    with pytest.raises(ValueError, match=re.escape("batch.ref_log_probs: got None")):
        loss_from_stats(stats_of(), dataclasses.replace(BATCH, ref_log_probs=None), parts)


def test_a_traced_number_of_the_config_is_only_for_positions_without_loss():
    def run(own):
        parts = by_row({"a": PPO(clip_low=own)}, "client", {"a": {"clip_low": "number"}})
        return loss_from_stats(stats_of(), BATCH, parts)[0]

    np.testing.assert_allclose(jax.jit(run)(0.4), run(0.9), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (
            (PPO(), {"clip_low": "x", "loss.clip_low": "y"}),
            "numbers: got 'loss.clip_low",
        ),
        (
            (preference.DPO(), {"beta": "x"}),
            r"numbers: got \['beta'\], expected none",
        ),
        (
            (PPO(), ["clip_low"]),
            "numbers: got list, expected the names of extras",
        ),
        (
            (PPO(), {"dual_clip": "x"}),
            "numbers: got 'dual_clip', expected a number of",
        ),
        (
            (Value(), {"metric_aggregation": "x"}),
            "numbers: got 'metric_aggregation'",
        ),
    ],
)
def test_refusals(given, error):
    loss, numbers = given
    with pytest.raises((ValueError, TypeError), match=error):
        by_row({"a": loss}, "c", {"a": numbers})


def test_an_extra_of_samples_is_spread_by_the_caller():
    """The numbers of samples, packed: what `Sample(extras=)` gives them."""
    samples = [
        Sample([1, 2, 3], 1, extras={"number": Extra([c, c]), "client": [0, 0]})
        for c in (0.25, 0.5)
    ]
    batch = RolloutBatch.from_samples(samples, row_length=6)
    parts = by_row({"a": SFT(aggregation="token_sum")}, "client", {"a": {"z_loss": "number"}})
    stats = TokenStats(jnp.zeros((1, 6)), log_z=jnp.full((1, 6), 2.0))
    assert float(loss_from_stats(stats, batch, parts)[0]) == 2 * (0.25 + 0.5) * 4
