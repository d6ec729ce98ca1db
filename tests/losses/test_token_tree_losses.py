"""Samples that share tokens of responses have the losses, metrics and gradients of the same samples
packed whole.

Every expected number is the float64 oracle's, which knows samples alone. The batch that is packed
whole has it too.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from forked import forked, prefixes_of
from oracle import OracleHead
from policy_steps import quick_jit
from random_losses import BASE, of_jaxppo, of_oracle
from tables import sampled

from jaxppo import (
    SFT,
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    accumulate_gradients,
    advantages,
    explain_broken_rules,
    finalize_metrics,
    log_probs_from_hidden,
    loss_from_hidden,
    loss_from_stats,
    policy_loss,
)
from jaxppo.batch.extras import Extra
from jaxppo.batch.token_trees import TokenTrees
from jaxppo.losses import TopKDistillation
from jaxppo.losses.mtp import mtp_loss
from jaxppo.losses.preference import DPO
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.axes import LAYOUTS

STEP = forked(0)
LENGTH = 160
CLIPS = {"clip_low": 0.2, "clip_high": 0.25}
CORRECTED = {
    "compares": "old/rollout",
    "weights": "sequence",
    "low": 0.0,
    "high": 1.5,
    "outside": "clamp",
    "rejections": (
        {"statistic": "seq_mean_k1", "low": 0.7, "high": 1.4, "compares": "old/rollout"},
    ),
    "veto": None,
    "opsm_delta": None,
    "opsm_fraction": "loss",
    "opsm_compares": "current/old",
    "batch_normalize": True,
}
# losses of a token alone, and losses, corrections and denominators that couple a sequence or a
# rollout
CONFIGS = {
    "ppo": {"aggregation": "token_mean"},
    "ppo, dual clip": {
        "loss": {"name": "ppo", **CLIPS, "dual_clip": 1.5},
        "aggregation": "sequence_mean_token_sum",
    },
    "ppo, weighted": {"aggregation": "token_mean", "weighted_denominators": True},
    "ppo, rollouts": {"aggregation": "rollout_mean"},
    "ppo, corrected by sequence": {"off_policy": CORRECTED},
    "cispo": {
        "loss": {"name": "cispo", **CLIPS, "unified_mask": False, "level": "token"},
        "aggregation": "sequence_mean_token_sum_norm",
        "aggregation_norm": 12.0,
    },
    "gspo": {"loss": {"name": "gspo", **CLIPS, "dual_clip": None, "gradient": "sequence"}},
    "gmpo": {"loss": {"name": "gmpo", **CLIPS}, "aggregation": "rollout_mean"},
    "sapo": {
        "loss": {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05, "level": "sequence"}
    },
}
CONFIGS = {
    name: {**BASE, "weighted_denominators": False, **config} for name, config in CONFIGS.items()
}
MESHES = ("dp=2,cp=2,tp=2", "dp=4,cp=2", "dp=2,cp=4", "cp=8", "cp=4,tp=2", "dp=8")
# at night a loss of tokens and one of sequences on each mesh and layout, and the others on some; by
# day these
DAY = (
    ("ppo", "dp=2,cp=2,tp=2", "zigzag"),
    ("ppo, corrected by sequence", "dp=4,cp=2", "zigzag_per_segment"),
    ("gspo", "cp=8", "contiguous"),
    ("gmpo", "dp=2,cp=4", "striped"),
    ("ppo, weighted", None, "contiguous"),
)
PLACES = [*itertools.product(MESHES, LAYOUTS)]
CASES = [(name, *place) for name in ("ppo", "gspo") for place in PLACES]
CASES += [(name, *place) for i, name in enumerate(CONFIGS) for place in PLACES[i % 5 :: 8]]
CASES = [*dict.fromkeys((*DAY, *CASES))]
BY_DAY = sampled(CASES, lambda i, case: case in DAY)


def trees_of(samples, parallel=None, **options):
    return TokenTrees.from_samples(
        samples, **{"row_length": LENGTH, "parallel": parallel} | options
    )


def with_denominators(batch, config):
    return dataclasses.replace(batch, weighted_denominators=config["weighted_denominators"])


def shared_loss(params, trees, numbers, config, parallel=None, normalizer=None):
    """The loss of trees: the model and the head see each shared token once."""
    rows = trees.rows
    hidden = params["table"][numbers]
    stats = log_probs_from_hidden(
        hidden,
        params["kernel"],
        rows.targets,
        where=rows.loss_mask > 0,
        entropy="bonus",
        parallel=parallel,
    )
    batch = with_denominators(trees.batch, config)
    own = trees.to_batch(stats, parallel=parallel)
    return policy_loss(own, batch, of_jaxppo(config), parallel=parallel, normalizer=normalizer)


@functools.cache
def expected_of(name):
    """The oracle's loss, gradients of the table and the kernel, and metrics."""
    samples, config = of_oracle(CONFIGS[name], STEP.in_oracle())
    result, by_hidden, by_head = oracle.policy_loss_from_hidden(
        samples, OracleHead(STEP.kernel), config
    )
    return result, {"table": STEP.by_table(by_hidden), "kernel": by_head.kernel}


def loss_and_gradients(fn):
    """The compiled loss, the numbers of its metrics, and its gradients."""

    def run(*given):
        (loss, metrics), gradients = jax.value_and_grad(fn, has_aux=True)(*given)
        return loss, finalize_metrics(metrics), gradients

    return quick_jit(run)


def check(name, loss, found, gradients):
    result, slopes = expected_of(name)
    assert abs(result.loss) > 1e-3
    np.testing.assert_allclose(loss, result.loss, rtol=2e-5, atol=1e-6)
    for which, want in slopes.items():
        np.testing.assert_allclose(
            gradients[which], want, rtol=1e-4, atol=4e-6 * np.abs(want).max(), err_msg=which
        )
    assert found["broken_rules"] == 0
    assert {*found} - {"broken_rules"} == {*result.metrics}
    for metric, want in result.metrics.items():
        np.testing.assert_allclose(found[metric], want, rtol=2e-5, atol=2e-6, err_msg=metric)


@pytest.mark.parametrize(("name", "mesh", "layout"), BY_DAY)
def test_losses_metrics_and_gradients(name, mesh, layout):
    parallel = None
    if mesh is not None:
        parallel = make_parallel_mesh(mesh, context_layout=layout)
    trees = trees_of(STEP.samples, parallel)
    numbers = prefixes_of(trees.rows, STEP.numbers)
    if layout != "zigzag_per_segment":  # whose padding may outweigh what a short prefix saves
        assert (trees.rows.segment_ids > 0).sum() < 0.5 * sum(len(s.tokens) for s in STEP.samples)

    def fn(params, trees, numbers):
        return shared_loss(params, trees, numbers, CONFIGS[name], parallel)

    check(name, *loss_and_gradients(fn)(STEP.params, trees, numbers))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_batch_that_is_packed_whole_has_the_same(name):
    plain = with_denominators(
        RolloutBatch.from_samples(STEP.samples, row_length=LENGTH), CONFIGS[name]
    )
    numbers = prefixes_of(plain, STEP.numbers)

    def fn(params):
        given = params["table"][numbers], params["kernel"], plain.targets
        stats = log_probs_from_hidden(*given, where=plain.loss_mask > 0, entropy="bonus")
        return policy_loss(stats, plain, of_jaxppo(CONFIGS[name]))

    check(name, *loss_and_gradients(fn)(STEP.params))


@pytest.mark.every(2)
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("name", ["ppo, rollouts", "gspo"])
def test_micro_batches(name, mesh):
    """Trees are divided over micro-batches, and denominators are the step's."""
    parallel = None
    if mesh is not None:
        parallel = make_parallel_mesh(mesh, context_layout="zigzag")
    trees = trees_of(STEP.samples, parallel, row_length=32, micro_batches=3)
    numbers = jnp.asarray(prefixes_of(trees.rows, STEP.numbers))
    config = CONFIGS[name]

    def fn(params, trees, numbers):
        normalizer = Normalizer.of(
            of_jaxppo(config), with_denominators(trees.batch, config), parallel=parallel
        )

        def of_micro_batch(params, micro_batch):
            return shared_loss(
                params, micro_batch[0], micro_batch[1], config, parallel, micro_batch[2]
            )

        step = accumulate_gradients(of_micro_batch, (trees, numbers, normalizer))
        (loss, metrics), gradients = step(params)
        return loss, finalize_metrics(metrics), gradients

    params = jax.tree.map(jnp.asarray, STEP.params)
    check(name, *quick_jit(fn)(params, trees, numbers))


PAIR = [
    Sample([1, 2, 3, 4, 5 + i], 2, advantages=1.0 - 2 * i, old_log_probs=[-1.0] * 3)
    for i in range(2)
]
LOG_PROBS = np.array([[0.0, -0.5, -1.0, -1.0, 0.0, -1.0, 0.0, 0.0]], np.float32)


@pytest.mark.parametrize("garbage", [0.0, np.nan])
def test_a_clip_makes_summed_advantages_another_loss(garbage):
    """By hand: the first shared token has the ratio e^0.5, which one of two samples clips; the
    others have ratio 1.

    The losses are -1.2, -1, -1 and 1.6487, 1, 1, so 0.4487 / 6. The gradients by log-prob are 0 +
    1.6487, -1 + 1, -1 and 1, each by 6. With summed advantages the shared tokens would have no
    gradient at all.
    """
    trees = trees_of(PAIR, row_length=8)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(log_probs):
        own = trees.to_batch(TokenStats(log_probs))
        return policy_loss(own, trees.batch, PolicyLossConfig())[0]

    log_probs = np.where(trees.rows.loss_mask > 0, LOG_PROBS, np.float32(garbage))
    loss, gradient = loss_and_gradient(log_probs)
    ratio = np.exp(0.5)
    np.testing.assert_allclose(loss, (ratio - 1.2) / 6, rtol=1e-6)
    np.testing.assert_allclose(6 * gradient, [[0, ratio, 0, -1, 0, 1, 0, 0]], rtol=1e-6, atol=1e-6)

    summed = [dataclasses.replace(PAIR[0], advantages=[0.0, 0.0, 1.0])]
    alone = RolloutBatch.from_samples(summed, row_length=5)

    @jax.jit
    @jax.grad
    def slope_of(log_probs):
        return policy_loss(TokenStats(log_probs), alone, PolicyLossConfig())[0]

    slope = slope_of(LOG_PROBS[:, :5])
    assert not np.asarray(slope)[0, 1:3].any()


def test_the_mean_over_branches():
    """By hand: weights of 1/2 on the two shared tokens, and their sums as denominators, make the
    mean of 4 tokens.
    """
    samples = [dataclasses.replace(s, loss_weights=[0.5, 0.5, 1.0]) for s in PAIR]
    trees = trees_of(samples, row_length=8)
    batch = dataclasses.replace(trees.batch, weighted_denominators=True)
    log_probs = np.array([[9.0, -0.5, -1.25, -2.0, 9.0, -3.0, 9.0, 9.0]], np.float32)

    def fn(log_probs):
        return loss_from_stats(trees.to_batch(TokenStats(log_probs)), batch, SFT())[0]

    loss, gradient = quick_jit(jax.value_and_grad(fn))(log_probs)
    np.testing.assert_allclose(loss, (0.5 + 1.25 + 2 + 3) / 4, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, -0.25, -0.25, -0.25, 0, -0.25, 0, 0]], rtol=1e-6)


def test_other_losses_and_estimators():
    """A critic's values, pairs, and advantages of a step: all read the batch, and values of the
    rows go to it.
    """
    pairs = [
        dataclasses.replace(s, reward=float(i), group_id=0, ref_log_probs=[-1.5] * 3)
        for i, s in enumerate(PAIR)
    ]
    trees = trees_of(pairs, row_length=8)
    plain = RolloutBatch.from_samples(pairs, row_length=16)
    log_probs = LOG_PROBS.copy()
    log_probs[0, 5] = -0.25  # the last token of the chosen sample, -1 in the other one

    def of_pair(log_probs):
        return loss_from_stats(trees.to_batch(TokenStats(log_probs)), trees.batch, DPO(beta=0.5))[0]

    loss, gradient = quick_jit(jax.value_and_grad(of_pair))(log_probs)
    np.testing.assert_allclose(loss, np.log1p(np.exp(-0.5 * 0.75)), rtol=1e-6)
    slope = 0.5 / (1 + np.exp(0.5 * 0.75))
    np.testing.assert_allclose(gradient, [[0, 0, 0, slope, 0, -slope, 0, 0]], rtol=1e-5, atol=1e-7)
    grouped = advantages.dr_grpo(trees.batch.rewards, **trees.batch.groups)
    np.testing.assert_array_equal(grouped[:, :2], advantages.dr_grpo(plain.rewards, **plain.groups))
    returns = [
        dataclasses.replace(s, returns=[1.0, 2.0, 3.0 + i], values=[0.0] * 3)
        for i, s in enumerate(PAIR)
    ]
    valued = trees_of(returns, row_length=8)
    critic = jnp.array([[9.0, 1.5, 2.0, 3.0, 9.0, 3.0, 9.0, 9.0]])
    loss, _ = loss_from_stats(valued.to_batch(critic), valued.batch, Value(clip=None))
    np.testing.assert_allclose(loss, 0.5 * (0.25 + 0.25 + 1) / 6, rtol=1e-6)


def with_ids(sample, teacher):
    """The sample with a teacher's two likeliest ids, the target and another one, for each token
    of its response.
    """
    targets = np.asarray(sample.tokens)[sample.start :]
    ids = np.stack([targets, (targets + 1 + teacher) % 24], -1)
    given = np.log(np.tile([0.6, 0.3], (len(targets), 1))).astype(np.float32)
    extras = {"teacher_ids": Extra(ids, fill=-1), "teacher_log_probs": given}
    return dataclasses.replace(sample, extras=extras)


TAUGHT = [with_ids(s, s.sample_id % 2) for s in STEP.samples]


@functools.cache
def taught_whole():
    """The distillation of the batch that is packed whole."""
    plain = RolloutBatch.from_samples(TAUGHT, row_length=LENGTH)
    numbers = prefixes_of(plain, STEP.numbers)

    def whole(params):
        hidden = params["table"][numbers]
        return loss_from_hidden(hidden, params["kernel"], plain, TopKDistillation())

    return loss_and_gradients(whole)(STEP.params)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_what_the_head_reads_by_token(layout):
    """Samples of other teachers share no token that both train on, since a teacher's ids are the
    head's input.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    trees = trees_of(TAUGHT, parallel, head_extras=["teacher_ids"])
    of_rows = prefixes_of(trees.rows, STEP.numbers)

    def shared(params, trees):
        rows = trees.rows
        given = params["table"][of_rows], params["kernel"], rows.targets
        options = {
            "ids": rows.extras["teacher_ids"],
            "where": rows.loss_mask > 0,
            "entropy": "metric",
        }
        stats = log_probs_from_hidden(*given, parallel=parallel, **options)
        own = trees.to_batch(stats, parallel=parallel)
        return loss_from_stats(own, trees.batch, TopKDistillation(), parallel=parallel)

    loss, metrics, gradients = loss_and_gradients(shared)(STEP.params, trees)
    wanted, numbers, slopes = taught_whole()
    assert metrics["broken_rules"] == 0
    np.testing.assert_allclose(loss, wanted, rtol=2e-5)
    for name, want in slopes.items():
        size = float(np.abs(want).max())
        np.testing.assert_allclose(gradients[name], want, rtol=1e-4, atol=4e-6 * size, err_msg=name)
    for name, value in numbers.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_what_crosses_the_network():
    """Numbers of tokens over the context axis, each way, and no hidden states; nothing over
    data.
    """
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout="zigzag")
    trees = trees_of(STEP.samples, parallel).put(parallel)
    x = jax.device_put(jnp.ones(trees.rows.tokens.shape), parallel.sharding(parallel.tokens_spec))

    def fn(x, trees):
        return trees.to_batch(x, parallel=parallel)

    (gathered,) = audit(fn, x, trees).collectives
    rows = trees.rows.tokens.shape[0]
    assert (gathered.op, gathered.axes, gathered.bytes) == (
        "all-gather",
        ("cp",),
        4 * rows // 2 * LENGTH,
    )
    back = audit(jax.grad(lambda x, trees: (fn(x, trees) ** 2).sum()), x, trees).collectives
    assert {c.axes for c in back if c.bytes > 8} == {("cp",)}
    assert max(c.bytes for c in back) == gathered.bytes


def test_a_loss_of_the_rows_is_refused():
    """The rows hold shared tokens for no sample, and lack what policies compare with."""
    trees = trees_of(PAIR, row_length=8)
    with pytest.raises(ValueError, match=r"advantages: got None"):
        policy_loss(TokenStats(LOG_PROBS), trees.rows, PolicyLossConfig())
    loss, metrics = loss_from_stats(TokenStats(LOG_PROBS), trees.rows, SFT())
    assert np.isnan(loss)
    lines = explain_broken_rules(finalize_metrics(metrics)["broken_rules"])
    (line,) = [line for line in lines if line.startswith("loss_without_sample: ")]
    assert line.endswith("Losses read `batch` of `TokenTrees`, and not its rows")


def test_statistics_of_the_rows_do_not_pass_for_those_of_the_batch():
    trees = trees_of(PAIR, row_length=8)
    assert trees.batch.tokens.shape == (1, 16)
    with pytest.raises(
        ValueError, match=r"stats.log_probs: got shape \(1, 8\), expected the batch's, \(1, 16\)"
    ):
        policy_loss(TokenStats(LOG_PROBS), trees.batch, PolicyLossConfig())
    with pytest.raises(ValueError, match=r"targets: got shape \(1, 16\), expected \(1, 8\)"):
        loss_from_hidden(jnp.ones((1, 8, 2)), jnp.ones((2, 9)), trees.batch, SFT())
    # nothing is shared, and both could have one shape
    for samples in (PAIR[:1], [Sample([1, 2, 3, 4, 5, 6], 1)]):
        lone = trees_of(samples, row_length=8)
        assert lone.batch.tokens.shape != lone.rows.tokens.shape


def test_depths_behind_shared_responses_are_refused():
    trees = trees_of(PAIR, row_length=8)
    message = "depths: got 1 for a batch with shared prefixes, expected at most 0"
    with pytest.raises(ValueError, match=message):
        mtp_loss(np.zeros((1, 1, 8, 2), np.float32), np.zeros((2, 9), np.float32), trees.rows)
