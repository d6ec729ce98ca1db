"""Twelve defects of other systems.

Each test has a case that such a system fails, and the number it would give.
"""

import dataclasses
import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import normalizer_of
from tables import sampled

from jaxppo import (
    PPO,
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    accumulate_gradients,
    advantages,
    log_probs_from_hidden,
    log_probs_from_logits,
    policy_loss,
    policy_loss_from_hidden,
    policy_losses,
)
from jaxppo.base.kl import kl_divergence
from jaxppo.losses.mtp import mtp_loss
from sharding import logical_positions, make_parallel_mesh

ROW = 16


def batch_of(lengths, prompts, **per_token):
    """One row of sequences of these lengths, padded to ROW.

    The first `prompts` tokens of each are its prompt.
    """
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    mask = np.concatenate(
        [
            (np.arange(n) >= p - 1) & (np.arange(n) < n - 1)
            for n, p in zip(lengths, prompts, strict=True)
        ]
    )

    def pad(x, dtype):
        return np.pad(x, (0, ROW - len(x)))[None].astype(dtype)

    tokens = pad(np.arange(len(ids)) % 7 + 1, np.int32)
    segments = np.arange(len(lengths), dtype=np.int32)[None]
    batch = RolloutBatch(
        tokens,
        np.roll(tokens, -1, 1),
        pad(ids, np.int32),
        pad(positions, np.int32),
        pad(mask, np.float32),
        segments,
        segments,
        segments,
        **{name: pad(x, np.float32) for name, x in per_token.items()},
    )
    return jax.tree.map(jnp.asarray, batch)


def in_layout(batch, order, layout, shards):
    def in_order(x):
        return x[:, order] if x.shape == (1, ROW) else x

    moved = jax.tree.map(in_order, batch)
    return dataclasses.replace(moved, context_layout=layout, context_shards=shards)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_1_the_reward_lands_on_the_last_token_whichever_shard_owns_it(layout):
    batch = batch_of([16], [4])
    mesh = make_parallel_mesh("cp=4,tp=2", context_layout=layout)
    order = logical_positions(layout, ROW, 4)
    moved = in_layout(batch, order, layout, 4)
    rewards = np.array([[5.0]], np.float32)
    got = jax.jit(functools.partial(advantages.token_rewards, rewards, parallel=mesh))(moved)
    expected = np.zeros(ROW)
    expected[14] = 5  # the position that predicts the last token
    np.testing.assert_array_equal(np.asarray(got)[0, np.argsort(order)], expected)
    assert float(got.sum()) == 5  # each shard rewarding the last response token that it holds: 20


def test_2_whitening_far_from_zero():
    noise = np.random.default_rng(0).standard_normal((8, 64))
    x = (1000 + 1e-3 * (noise - noise.mean()) / noise.std(ddof=1)).astype(np.float32)
    # steps of f32 at 1000 are 6e-5, so the deviation of what x holds is 1e-3 to a part in a
    # thousand
    y = jax.jit(advantages.whiten)(x, jnp.ones((8, 64)))
    assert float(y.std(ddof=1)) == pytest.approx(1, abs=1e-5)
    one_pass = np.mean(x * x, dtype=np.float32) - np.mean(x, dtype=np.float32) ** 2
    assert not 0.5e-6 < one_pass < 2e-6  # E[x^2] - E[x]^2 in f32 is 0 where 1e-6 is right


ESTIMATORS = ["k1", "abs", "k2", "k3", "low_var_kl", "k3+"]
FAR = [100.0, -100.0]


@functools.cache
def values_and_slopes():
    """By estimator, its values at the log-ratios `FAR`, and its slopes there."""
    log_ratios = np.array(FAR, np.float32)
    log_probs = np.minimum(log_ratios, 0)
    references = np.minimum(-log_ratios, 0)

    def total(log_probs, estimator):
        values = kl_divergence(log_probs, references, estimator)
        return values.sum(), values

    @jax.jit
    def of_all(log_probs):
        found = {}
        for estimator in ESTIMATORS:
            slope, values = jax.grad(total, has_aux=True)(log_probs, estimator)
            found[estimator] = values, slope
        return found

    return of_all(log_probs)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("log_ratio", FAR)
def test_3_kl_at_log_ratios_of_100(estimator, log_ratio):
    values, slopes = values_and_slopes()[estimator]
    at = FAR.index(log_ratio)
    assert np.isfinite(values[at])
    # exp(100) in f32 is inf, and its gradient through a clamp 0 * inf = NaN
    assert np.isfinite(slopes[at])


def test_4_infinite_and_huge_logits():
    @jax.jit
    def stats(z):
        return log_probs_from_logits(z, np.array([[1]], np.int32), entropy="bonus")

    def total(z):
        found = stats(z)
        return found.log_probs.sum() + found.entropy.sum()

    z = np.array([[[1.0, 2.0, -np.inf, -np.inf]]], np.float32)
    gradient = jax.jit(jax.grad(total))(z)
    # sum p log p with p = 0: NaN
    assert float(stats(z).entropy[0, 0]) == pytest.approx(0.582203, abs=1e-6)
    assert np.isfinite(gradient).all()
    assert float(gradient[0, 0, 2]) == 0
    huge = stats(np.array([[[1e4, 1e4 - 0.5]]], np.float32))
    # through one log-sum-exp, whose steps are 1e-3 there: -0.973633
    assert float(huge.log_probs[0, 0]) == pytest.approx(-0.9740770, abs=1e-7)


def micro_batches():
    """Two micro-batches, of 12 and 2 loss tokens, and the policy's log-probs."""
    rng = np.random.default_rng(1)
    given = [
        {"advantages": rng.normal(size=ROW), "old_log_probs": -rng.exponential(size=ROW)}
        for _ in range(2)
    ]
    parts = [batch_of([8, 7], [1, 2], **given[0]), batch_of([9, 2], [8, 1], **given[1])]

    def stack(*arrays):
        return np.stack(arrays)

    def join(*arrays):
        return np.concatenate(arrays)

    stacked = jax.tree.map(stack, *parts)
    whole = jax.tree.map(join, *parts)
    return stacked, whole, -rng.exponential(size=(2, 1, ROW)).astype(np.float32)


UNEVEN = itertools.product(
    [None, "cp=8"],
    ["ppo", "gspo", "gmpo"],
    ["token_mean", "sequence_mean_token_mean", "rollout_mean"],
)


def every_second(i, case):
    return i % 2 == 0


@pytest.mark.every(9)
@pytest.mark.parametrize(("mesh", "loss", "aggregation"), sampled(UNEVEN, every_second))
def test_5_uneven_micro_batches_are_the_whole(loss, aggregation, mesh):
    stacked, whole, log_probs = micro_batches()
    parallel = None if mesh is None else make_parallel_mesh(mesh)
    config = PolicyLossConfig(policy_losses.by_name(loss), aggregation=aggregation)
    normalizers = normalizer_of(stacked, aggregation)

    def part(scale, given):
        log_probs, batch, normalizer = given
        return policy_loss(
            TokenStats(scale * log_probs), batch, config, parallel=parallel, normalizer=normalizer
        )

    def at_once(scale):
        return policy_loss(TokenStats(scale * log_probs[:, 0]), whole, config)[0]

    def own_mean(k):
        batch = jax.tree.map(operator.itemgetter(k), stacked)
        return policy_loss(TokenStats(log_probs[k]), batch, config)[0]

    step = jax.jit(accumulate_gradients(part, (log_probs, stacked, normalizers)))
    (total, _), gradient = step(jnp.float32(1))
    one = jax.jit(jax.value_and_grad(at_once))(jnp.float32(1))
    np.testing.assert_allclose((total, gradient), one, rtol=1e-5)
    if (loss, aggregation) == ("ppo", "token_mean"):
        own = np.mean([own_mean(0), own_mean(1)])
        # the mean of the micro-batches' own means: 0.3115 where 0.1830 is right
        assert abs(own - one[0]) > 0.1


def test_6_a_shard_without_loss_tokens_gives_zero_gradient():
    batch = batch_of([4], [1], advantages=np.ones(ROW), old_log_probs=np.zeros(ROW))
    mesh = make_parallel_mesh("cp=8")

    def loss(x):
        return policy_loss(TokenStats(x), batch, PolicyLossConfig(), parallel=mesh)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.zeros((1, ROW)))
    # a mean over each shard's own tokens, then over shards: NaN, from 0 / 0 on six of them
    assert float(value) == -1
    np.testing.assert_allclose(gradient[0, :3], -1 / 3, rtol=1e-6)
    assert not gradient[0, 3:].any()


def test_7_multi_token_prediction_across_shards():
    batch = batch_of([16], [1])
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(2, 1, ROW, 8)).astype(np.float32)
    kernel = rng.normal(size=(8, 16)).astype(np.float32)

    def step(parallel, batch):
        return jax.jit(functools.partial(mtp_loss, batch=batch, parallel=parallel))

    one, _ = step(None, batch)(hidden, kernel)
    mesh = make_parallel_mesh("cp=4,tp=2", context_layout="zigzag")
    order = logical_positions("zigzag", ROW, 4)
    moved = in_layout(batch, order, "zigzag", 4)
    got, found = step(mesh, moved)(hidden[:, :, order], kernel)
    np.testing.assert_allclose(got, one, rtol=1e-5)
    # depth 2 predicts the 13 tokens from the fourth on; a shift by 2 that stops at the borders of 4
    # shards leaves 7
    assert float(found["mtp_2_nll"].count) == 13


@pytest.mark.parametrize("V", [151936, 128256, 50257])
def test_8_vocabularies_that_blocks_do_not_divide(V):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(1, 2, 4)).astype(np.float32)
    kernel = (0.1 * rng.normal(size=(4, V))).astype(np.float32)
    targets = np.array([[0, V - 1]], np.int32)
    logits = hidden[0].astype(np.float64) @ kernel.astype(np.float64)
    expected = logits[[0, 1], targets[0]] - np.log(np.exp(logits).sum(1))
    got = jax.jit(log_probs_from_hidden)(hidden, kernel, targets).log_probs
    # zeros that pad the last block of 2048 would count as logits: log(1 + 943 / 50257), 0.0186 too
    # low for GPT-2
    np.testing.assert_allclose(got[0], expected, atol=2e-5)


def test_9_nan_in_a_masked_position():
    batch = batch_of([6, 5], [3, 2], advantages=np.ones(ROW), old_log_probs=np.zeros(ROW))
    off = batch.loss_mask == 0
    dirty = dataclasses.replace(batch, advantages=jnp.where(off, jnp.nan, batch.advantages))

    @jax.jit
    @jax.value_and_grad
    def step(x, b):
        return policy_loss(TokenStats(x), b, PolicyLossConfig())[0]

    clean = step(jnp.zeros((1, ROW)), batch)
    got = step(jnp.where(off, jnp.nan, 0.0), dirty)
    assert float(got[0]) == float(clean[0]) == -1  # mask * NaN is NaN
    np.testing.assert_array_equal(got[1], clean[1])


def test_10_entropy_of_bf16_logits_is_computed_in_f32():
    z = (4 * jax.random.normal(jax.random.key(0), (1, 1, 4096))).astype(jnp.bfloat16)
    got = log_probs_from_logits(z, jnp.array([[0]]), entropy="metric").entropy
    exact = np.asarray(z[0, 0], np.float64)
    p = np.exp(exact - exact.max())
    p /= p.sum()
    assert float(got[0, 0]) == pytest.approx(-(p * np.log(p)).sum(), abs=2e-6)
    log_p = jax.nn.log_softmax(z)
    assert (
        abs(float(-(jnp.exp(log_p) * log_p).sum()) - float(got[0, 0])) > 1e-3
    )  # 3.21875 in bf16 where 3.22083 is right


def test_11_fused_and_unfused_share_one_loss():
    batch = batch_of(
        [8, 7], [2, 3], advantages=np.arange(ROW) - 7.5, old_log_probs=np.full(ROW, -2.0)
    )
    hidden = jax.random.normal(jax.random.key(0), (1, ROW, 8))
    kernel = jax.random.normal(jax.random.key(1), (8, 16))
    config = PolicyLossConfig(PPO(clip_high=0.3, dual_clip=3.0), entropy_coef=0.01)

    def unfused(hidden, kernel):
        stats = log_probs_from_logits(hidden @ kernel, batch.targets, entropy="bonus")
        return policy_loss(stats, batch, config)[0]

    def fused(hidden, kernel):
        return policy_loss_from_hidden(hidden, kernel, batch, config)[0]

    expected, got = (
        jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, kernel) for loss in (unfused, fused)
    )
    # a fused path with a loss of its own, without the entropy bonus, gives 1.8196 where 1.8050 is
    # right
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def test_12_groups_of_unequal_sizes():
    rewards = np.array([[1.0, 0.0, 1.0, 1.0, 0.0, 4.0]], np.float32)
    groups = np.array([[0, 0, 1, 1, 1, 1]], np.int32)
    got = advantages.grpo(rewards, groups, scale_by_std=False)
    # as [-1, 3] rows: 0.333, -0.667, 0.333, -0.667, -1.667, 2.333
    np.testing.assert_allclose(got, [[0.5, -0.5, -0.5, -0.5, -1.5, 2.5]], atol=1e-6)
