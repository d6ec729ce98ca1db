"""Explained tokens: their contributions sum to the loss of every loss on any mesh, and their
reasons are true.
"""

import dataclasses
import functools
import json
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import (
    AGGREGATIONS,
    LOSSES,
    by_sample,
    config_of,
    selected_of,
    step_of,
    with_garbage,
    with_selected,
)

import jaxppo.losses
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
)
from jaxppo.losses import Part, ReferenceKL, explain_tokens, loss_from_stats, preference
from jaxppo.losses.explain import by_sample as sums_by_sample
from jaxppo.losses.explain import write_tokens
from jaxppo.policy.off_policy import Statistic
from sharding import make_parallel_mesh

MESHES = [(None, "contiguous"), ("dp=2,cp=2,tp=2", "zigzag")]
CORRECTION = OffPolicyConfig(
    weights="token",
    low=0.9,
    high=1.1,
    outside="zero",
    rejections=(Rejection("seq_max_k3", high=0.02),),
    veto=0.7,
)


def batch_on(mesh, layout, seed=4):
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    batch = RolloutBatch.from_samples(
        step_of(seed), row_length=24, rows=4, num_segments=9, parallel=parallel
    )
    return with_garbage(batch, np.nan), parallel


def given_to(config, mesh, layout):
    """The statistics, the batch with the tokens that the config selects, and the mesh."""
    batch, parallel = batch_on(mesh, layout)
    if isinstance(config, PolicyLossConfig):
        batch = with_selected(batch, selected_of(batch, config, parallel))
    stats = TokenStats(jnp.asarray(batch.returns), jnp.asarray(batch.values), entropy_mode="bonus")
    return stats, batch, parallel


def explained(config, mesh=None, layout="contiguous"):
    """The explanation, and the batch."""
    stats, batch, parallel = given_to(config, mesh, layout)
    return explain_tokens(stats, batch, config, parallel=parallel), batch


def check_sum(config, mesh, layout):
    *given, parallel = given_to(config, mesh, layout)

    @jax.jit
    def both(stats, batch):
        """The explanation, the loss, and its gradient by statistics."""

        def loss_of(stats):
            return loss_from_stats(stats, batch, config, parallel=parallel)[0]

        found = explain_tokens(stats, batch, config, parallel=parallel)
        return found, *jax.value_and_grad(loss_of)(stats)

    found, loss, slopes = both(*given)
    gradient = slopes.log_probs
    assert np.isfinite(loss)
    contributions = np.asarray(found.arrays["contribution"], np.float64)
    np.testing.assert_allclose(
        contributions.sum(), loss, rtol=2e-6, atol=2e-6 * np.abs(contributions).sum()
    )
    np.testing.assert_allclose(found.arrays["gradient"], gradient, rtol=1e-5, atol=1e-7)
    terms = sum(x for name, x in found.arrays.items() if name.startswith("loss/"))
    np.testing.assert_allclose(terms * found.arrays["weight"], contributions, rtol=1e-5, atol=1e-7)


@pytest.mark.every(4)
@pytest.mark.parametrize(("mesh", "layout"), MESHES)
@pytest.mark.parametrize("off_policy", [None, CORRECTION])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_contributions_of_every_policy_loss_sum_to_it(name, aggregation, off_policy, mesh, layout):
    options = {} if off_policy is None else {"off_policy": off_policy}
    check_sum(config_of(name, aggregation, **options), mesh, layout)


@pytest.mark.parametrize(("mesh", "layout"), MESHES)
@pytest.mark.parametrize(
    "loss", [SFT(aggregation="rollout_mean"), ReferenceKL("k2")], ids=lambda x: type(x).__name__
)
def test_contributions_of_other_losses_sum_to_them(loss, mesh, layout):
    check_sum(loss, mesh, layout)


@pytest.mark.parametrize(("mesh", "layout"), MESHES)
def test_parts_have_their_coefficients_and_masks(mesh, layout):
    batch, parallel = batch_on(mesh, layout)
    odd = (batch.loss_mask > 0) & (batch.positions % 2 == 1)
    batch = dataclasses.replace(batch, extras={"odd": odd})
    stats = TokenStats(jnp.asarray(batch.returns))
    parts = {"policy": PPO(), "odd": jaxppo.losses.Part(SFT(), coef=0.25, mask="odd")}
    loss, _ = loss_from_stats(stats, batch, parts, parallel=parallel)
    found = explain_tokens(stats, batch, parts, parallel=parallel)
    total = sum(np.asarray(x.arrays["contribution"], np.float64).sum() for x in found.values())
    np.testing.assert_allclose(total, loss, rtol=1e-5)
    assert not np.any(np.asarray(found["odd"].arrays["contribution"])[~odd])


@pytest.mark.parametrize("loss", [preference.DPO(), Value(clip=None)], ids=["DPO", "Value"])
def test_losses_of_pairs_and_of_critics(loss):
    samples = preference.samples_of_pairs(
        [[1], [2]], chosen=[[3, 4], [5]], rejected=[[6], [7, 8, 9]]
    )
    rng = np.random.default_rng(0)
    batch = RolloutBatch.from_samples(samples, row_length=8, rows=2)
    numbers = jnp.asarray(-rng.exponential(size=batch.loss_mask.shape), jnp.float32)
    batch = dataclasses.replace(
        batch, ref_log_probs=numbers - 0.5 * (batch.tokens > 5), returns=-numbers
    )
    stats = numbers if isinstance(loss, Value) else TokenStats(numbers)
    total, _ = loss_from_stats(stats, batch, loss)
    found = explain_tokens(stats, batch, loss)
    np.testing.assert_allclose(found.arrays["contribution"].sum(), total, rtol=1e-5)
    assert "padding" in found.reasons


def test_reasons_by_hand():
    """Ratios 2, 0.5 with both signs, an advantage of 0, a loss weight of 0, dual clip, and a
    masked token.
    """
    ratio = np.array([2.0, 0.5, 2.0, 0.5, 3.0, 8.0, 1.0, 1.0])
    advantages = [1.0, 1.0, -1.0, -1.0, 0.0, -1.0, 1.0, 1.0]
    mask = [0, 1, 1, 1, 1, 1, 1, 1, 0]
    old = np.full(8, -4.0)
    weights = [1.0] * 6 + [0.0, 1.0]
    sample = Sample(
        range(9), 1, mask, advantages=advantages, old_log_probs=old, loss_weights=weights
    )
    batch = RolloutBatch.from_samples([sample], row_length=12)
    now = np.zeros(12, np.float32)
    now[:8] = old + np.log(ratio)
    config = PolicyLossConfig(PPO(dual_clip=3.0), kl=None)
    found = explain_tokens(TokenStats(jnp.asarray(now)[None]), batch, config)
    expected = [
        "clipped above",
        "",
        "",
        "clipped below",
        "advantage 0",
        "dual clip",
        "no weight",
        "masked",
    ]
    assert found.reason_names()[0] == [*expected, "masked", *["padding"] * 3]
    np.testing.assert_allclose(found.arrays["ratio"][0, :7], ratio[:7], rtol=1e-5)
    counts = sums_by_sample(found, batch)
    assert {name: float(counts[name][0, 0]) for name in ("trained", "clipped above", "masked", "tokens")} == {
        "trained": 2.0, "clipped above": 1.0, "masked": 2.0, "tokens": 7.0,
    }  # fmt: skip


@pytest.mark.parametrize(("mesh", "layout"), MESHES)
def test_each_rule_of_a_correction_is_named(mesh, layout):
    """Against float64 numpy, by sample: a rejected sample, one that the veto leaves out, weights
    outside bounds.
    """
    config = PolicyLossConfig(PPO(0.2, 0.28), off_policy=CORRECTION)
    found, batch = explained(config, mesh, layout)
    arrays = {
        n: by_sample(getattr(batch, n), batch).astype(np.float64)
        for n in ("old_log_probs", "rollout_log_probs")
    }
    mask, reason = (by_sample(x, batch) for x in (batch.loss_mask, found.reason))
    a = by_sample(batch.advantages, batch).astype(np.float64)
    d = np.where(mask > 0, arrays["old_log_probs"] - arrays["rollout_log_probs"], 0)
    rejected = ((np.exp(d) - 1 - d).max(axis=1) > 0.02).astype(int)
    vetoed = (np.exp(np.where(mask > 0, d, 9)).min(axis=1) < 0.7).astype(int)
    outside = ((np.exp(d) < 0.9) | (np.exp(d) > 1.1)).astype(int)
    ratio = np.exp(by_sample(batch.returns, batch).astype(np.float64) - arrays["old_log_probs"])
    clipped = np.where(a > 0, ratio > 1.28, ratio < 0.8).astype(int)
    seen = set()
    for i, t in zip(*np.nonzero(mask), strict=True):
        rules = ["rejected by seq_max_k3 of old/rollout"] * rejected[i] + ["vetoed"] * vetoed[i]
        rules += ["weight outside its bounds"] * outside[i, t]
        rules += [f"clipped {'above' if a[i, t] > 0 else 'below'}"] * clipped[i, t]
        expected = (*rules, "")[0]
        assert found.reasons[int(reason[i, t])] == expected, (i, t)
        seen.add(expected)
    assert len(seen) >= 4, seen


STATISTICS = get_args(Statistic)


@jax.jit
def rejected(stats, batch, lows, highs):
    """The explanation of a loss with a rejection by each statistic, within these bounds."""
    rejections = tuple(Rejection(name, lows[name], highs[name]) for name in STATISTICS)
    config = PolicyLossConfig(PPO(), off_policy=OffPolicyConfig(rejections=rejections))
    return explain_tokens(stats, batch, config)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_rejection_of_any_statistic_is_a_reason(statistic):
    """Only the bounds of this statistic reject any token."""
    lows = {name: -np.inf if name.endswith("diff") else 0.0 for name in STATISTICS}
    highs = dict.fromkeys(STATISTICS, np.inf)
    lows[statistic] = -1.0 if statistic.endswith("diff") else 0.0
    highs[statistic] = lows[statistic] + 1e-9
    stats, batch, _ = given_to(PolicyLossConfig(PPO()), None, "contiguous")
    found = rejected(stats, batch, lows, highs)
    reasons = {reason for row in found.reason_names() for reason in row}
    others = {name for name in STATISTICS if f"rejected by {name} of old/rollout" in reasons}
    assert others == {statistic}


def test_a_penalty_moves_a_token_that_is_clipped():
    found, _ = explained(PolicyLossConfig(PPO(0.2, 0.28), kl=KL(0.1)))
    names = np.array(found.reason_names())
    assert np.all(
        np.asarray(found.arrays["gradient"])[np.char.startswith(names.astype(str), "clipped")] != 0
    )


def test_lines_of_json(tmp_path):
    batch, _ = batch_on(None, "contiguous")
    stats = TokenStats(jnp.asarray(batch.returns))
    found = explain_tokens(stats, batch, PPO())
    spoilt = dataclasses.replace(
        found, arrays={**found.arrays, "bad": np.full(batch.loss_mask.shape, np.inf)}
    )
    count = functools.partial(write_tokens, tmp_path / "tokens.jsonl", spoilt, batch)
    assert [count(step=1), count(step=2)] == [9, 9]
    lines = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1] * 9 + [2] * 9
    samples = dict(enumerate(step_of(4)))
    for line in lines[:9]:
        sample = samples[line["sample_id"]]
        assert line["tokens"][:-1] == list(sample.tokens)[1:]
        assert line["loss_mask"][:-1] == list(sample.mask)[1:]
        assert set(line["bad"]) <= {None}
        assert line["group_id"] == sample.group_id
        of_loss = [x for x, m in zip(line["advantages"], line["loss_mask"], strict=True) if m]
        np.testing.assert_allclose(of_loss, sample.advantages[: len(of_loss)], rtol=1e-6)


def test_what_was_found_for_another_batch_is_refused(tmp_path):
    batch, _ = batch_on(None, "contiguous")
    other, _ = batch_on(None, "contiguous", seed=5)
    stats = TokenStats(jnp.asarray(batch.returns))
    found = explain_tokens(stats, batch, PPO())
    path = tmp_path / "tokens.jsonl"
    with pytest.raises(
        ValueError,
        match="explained: got another batch's padding, expected what explain_tokens found",
    ):
        write_tokens(path, found, other)
    longer = RolloutBatch.from_samples(step_of(4), row_length=48, rows=4, num_segments=9)
    parts = explain_tokens(stats, batch, {"a": PPO()})
    for call in (functools.partial(write_tokens, path), sums_by_sample):
        with pytest.raises(
            ValueError,
            match=r"batch.segment_ids: got shape \(4, 48\), expected that of explained.reason",
        ):
            call(found, longer)
        with pytest.raises(TypeError, match="explained: got dict, expected ExplainedTokens"):
            call(parts, batch)
        with pytest.raises(TypeError, match="batch: got NoneType, expected RolloutBatch"):
            call(found, None)
    assert not path.exists()


CHANGED = {
    "targets": lambda x: np.where(np.arange(x.shape[-1]) == 1, x + 1, x),
    "loss_mask": lambda x: np.where(np.arange(x.shape[-1]) == 1, 0, x),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_batch_with_the_same_padding_is_another(name, tmp_path):
    """The tokens of the one were written beside the log-probs of the other; a part's own mask
    makes no other batch.
    """
    batch, _ = batch_on(None, "contiguous")
    path = tmp_path / "tokens.jsonl"
    stats = TokenStats(jnp.asarray(batch.returns))
    other = dataclasses.replace(batch, **{name: CHANGED[name](np.asarray(getattr(batch, name)))})
    assert np.any(getattr(other, name) != getattr(batch, name))
    message = (
        f"explained: got another batch's {name}, expected what explain_tokens found for this batch"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        write_tokens(path, explain_tokens(stats, batch, PPO()), other)
    assert not path.exists()
    half = dataclasses.replace(
        batch, extras={"half": (np.arange(batch.targets.shape[1]) % 2)[None] * batch.loss_mask}
    )
    parts = explain_tokens(stats, half, {"a": Part(PPO(), mask="half"), "b": PPO()})
    assert [write_tokens(path, parts[name], half) for name in "ab"] == [9, 9]
