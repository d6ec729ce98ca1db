"""Log-probs of samplers and teachers as bf16 rounds them, and ids that are not those of statistics.

`top_k_divergence` of a teacher of bf16, log(1/8) eight times, was NaN: its mass is 1.0013.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import quick_jit

from jaxppo import (
    SFT,
    Head,
    LoRA,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    TokenStats,
    accumulate_gradients,
    explain_broken_rules,
    finalize_metrics,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_hidden,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.contrib.score_centering import ScoreCentering
from jaxppo.losses import TopKDistillation
from jaxppo.losses.distillation import check_top_k
from jaxppo.policy_losses import Reinforce
from jaxppo.step.staleness import proximal_log_probs
from sharding import make_parallel_mesh

R, T, H, V, K = 4, 8, 8, 24, 8
RNG = np.random.default_rng(0)
OLD = -RNG.uniform(0.5, 2, 3)


def make_batch() -> RolloutBatch:
    values = {"advantages": [1.0, -1.0, 0.5], "old_log_probs": OLD, "rollout_log_probs": OLD - 0.1}
    samples = [Sample(RNG.integers(0, V, 5), response_start=2, **values) for _ in range(R)]
    return RolloutBatch.from_samples(samples, row_length=T, rows=R)


BATCH = make_batch()
LOSS = BATCH.loss_mask > 0
AT = tuple(int(i) for i in np.argwhere(LOSS)[4])
HIDDEN, KERNEL = (RNG.normal(size=shape).astype(np.float32) for shape in ((R, T, H), (H, V)))
IDS = np.stack([RNG.permutation(V)[:K] for _ in range(R * T)]).reshape(R, T, K).astype(np.int32)
BF16 = jnp.full((R, T, K), np.log(1 / 8), jnp.bfloat16)


def lines_of(found) -> list[str]:
    return [
        line
        for name, x in found.items()
        if name.endswith("broken_rules")
        for line in explain_broken_rules(x.value)
    ]


def expected_divergence() -> float:
    """The mean over tokens of sum q log(q / p) for q = 1/8, in float64."""
    z = HIDDEN.astype(np.float64) @ KERNEL.astype(np.float64)
    log_p = np.take_along_axis(z - np.log(np.exp(z).sum(-1, keepdims=True)), IDS, axis=-1)
    return float((np.log(1 / 8) - log_p).mean(axis=-1)[LOSS].mean())


@quick_jit
def losses_of_ids(log_probs):
    """The distillation from a teacher with these log-probs in three ways, and score centring of a
    sampler with them.
    """
    names = ("teacher_ids", "teacher_log_probs", "sampler_ids", "sampler_log_probs")
    extras = dict(zip(names, (IDS, log_probs) * 2, strict=True))
    batch = dataclasses.replace(BATCH, extras=extras)
    loss = TopKDistillation()
    stats = log_probs_from_hidden(HIDDEN, KERNEL, BATCH.targets, ids=IDS, where=LOSS)
    ways = {
        "statistics": loss_from_stats(stats, batch, loss),
        "hidden": loss_from_hidden(HIDDEN, KERNEL, batch, loss),
        "joint": loss_from_hidden(HIDDEN, KERNEL, batch, {"taught": loss}),
    }
    config = PolicyLossConfig(Reinforce(), ratio_to="current")
    return ways, loss_from_stats(stats, batch, ScoreCentering(config))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_teacher_that_was_rounded_to_bf16(dtype):
    """Before: NaN from both, with `broken_rules` 0."""
    teacher = BF16.astype(dtype)
    assert float(np.exp(np.asarray(teacher, np.float64))[0, 0].sum()) == pytest.approx(
        1.001317, abs=1e-6
    )
    check_top_k(IDS, np.asarray(teacher), V)
    ways, centred = losses_of_ids(teacher)
    for way, (loss, found) in ways.items():
        np.testing.assert_allclose(loss, expected_divergence(), rtol=1e-5, err_msg=way)
        assert lines_of(found) == []
        prefix = "taught/" if way == "joint" else ""
        assert float(found[f"{prefix}teacher_capped"].value) == LOSS.sum()
    loss, found = centred
    assert np.isfinite(loss)
    assert float(found["rollout_capped"].value) == LOSS.sum()


@pytest.mark.parametrize("tail", ["bucket", "renormalise", "leave_out"])
def test_how_far_a_teacher_may_be_off(tail):
    """A log-prob up to 0.125 counts as 0, and the mass may be e^0.125; beyond that the loss is
    NaN, by name.
    """
    stats = log_probs_from_hidden(HIDDEN, KERNEL, BATCH.targets, ids=IDS, where=LOSS)
    alone, sure = (np.full((R, T, K), -np.inf, np.float32) for _ in range(2))
    sure[..., 0] = 0

    def run(teacher):
        return loss_from_stats(
            stats,
            dataclasses.replace(BATCH, extras={"teacher_ids": IDS, "teacher_log_probs": teacher}),
            TopKDistillation(tail=tail),
        )

    expected = run(sure)[0]
    for above, capped in ((0.0, 0), (0.03, LOSS.sum()), (0.125, LOSS.sum())):
        alone[..., 0] = above
        loss, found = run(alone)
        assert float(loss) == float(expected)
        assert float(found["teacher_capped"].value) == capped
    for teacher in (
        np.where(np.arange(K) == 0, 0.13, alone),
        np.full((R, T, K), np.log(1.15 / K), np.float32),
    ):
        loss, found = run(teacher.astype(np.float32))
        assert np.isnan(loss)
        (line,) = lines_of(found)
        assert line.startswith("teacher_log_probs: expected log-probs of K ids, each at most 0.125")


def with_sampler(value: float) -> RolloutBatch:
    sampled = np.array(BATCH.rollout_log_probs)
    sampled[AT] = value
    return dataclasses.replace(BATCH, rollout_log_probs=sampled)


READ = {
    "ratio": PolicyLossConfig(ratio_to="rollout"),
    "weights": PolicyLossConfig(
        off_policy=OffPolicyConfig(weights="token", high=5.0, batch_normalize=True)
    ),
    "weights of sequences": PolicyLossConfig(
        off_policy=OffPolicyConfig(weights="sequence", high=5.0)
    ),
    "rejections": PolicyLossConfig(
        off_policy=OffPolicyConfig(rejections=(Rejection("seq_mean_k1", 0.5, 2.0),))
    ),
}
STATS = TokenStats(jnp.asarray(BATCH.old_log_probs) - 0.2)


@pytest.mark.parametrize("name", READ)
def test_a_sampler_whose_log_prob_is_above_zero(name):
    """Before: NaN from 0.0011 on."""
    expected = policy_loss(STATS, with_sampler(0.0), READ[name])[0]
    for value in (0.03, 0.125):
        loss, found = policy_loss(STATS, with_sampler(value), READ[name])
        assert float(loss) == float(expected)
        assert float(found["rollout_capped"].value) == 1
        assert lines_of(found) == []
    for value in (0.13, np.nan, np.inf, -np.inf):
        loss, found = policy_loss(STATS, with_sampler(value), READ[name])
        assert np.isnan(loss)
        assert [line.split(":")[0] for line in lines_of(found)] == ["rollout_log_probs"]


@pytest.mark.parametrize("value", [0.03, 5.0, np.nan, np.inf, -np.inf])
def test_a_sampler_that_only_metrics_read(value):
    """Before: +0.03 made the loss of the default config NaN."""
    run = jax.value_and_grad(
        lambda stats, batch: policy_loss(stats, batch, PolicyLossConfig()), has_aux=True
    )
    (expected, _), slope = run(STATS, BATCH)
    (loss, found), gradient = run(STATS, with_sampler(value))
    assert float(loss) == float(expected)
    np.testing.assert_array_equal(gradient.log_probs, slope.log_probs)
    assert lines_of(found) == []
    assert float(found["rollout_capped"].value) == (value > 0)
    assert np.isfinite(found["sampler_k3"].value) == np.isfinite(value)


def test_the_proximal_policy_of_such_a_sampler():
    """It is between the two policies, so at most 0."""
    zero = jnp.zeros((1, 2))
    log_pi = jnp.full((1, 2), -1.0)
    versions = jnp.array([[8, 10]])
    found = proximal_log_probs(log_pi, zero + 0.1, versions, 10)
    np.testing.assert_array_equal(found, proximal_log_probs(log_pi, zero, versions, 10))


def test_statistics_of_other_ids():
    """Before: another number, 1.083 for 1.111, since only the number of ids was compared."""
    stats = log_probs_from_hidden(HIDDEN, KERNEL, BATCH.targets, ids=IDS, where=LOSS)
    teacher = np.log(np.full((R, T, K), 0.1, np.float32))
    config = PolicyLossConfig(Reinforce(), ratio_to="current")
    for ids in (IDS[..., ::-1], (IDS + 1) % V):
        for run in (
            lambda ids: loss_from_stats(
                stats,
                dataclasses.replace(
                    BATCH, extras={"teacher_ids": ids, "teacher_log_probs": teacher}
                ),
                TopKDistillation(),
            ),
            lambda ids: loss_from_stats(
                stats,
                dataclasses.replace(
                    BATCH, extras={"sampler_ids": ids, "sampler_log_probs": teacher}
                ),
                ScoreCentering(config),
            ),
        ):
            assert np.isfinite(run(IDS)[0])
            loss, found = run(ids)
            assert np.isnan(loss)
            (line,) = lines_of(found)
            assert line.startswith(
                "ids: expected -1, or 0 to V - 1, each id once at a position, and those of the"
            )


NUCLEUS = np.stack([BATCH.targets, np.full((R, T), 3), np.full((R, T), -1)], -1).astype(np.int32)


def of_logits(hidden, parallel, nucleus):
    logits = jnp.matmul(hidden, KERNEL, precision="highest")
    stats = log_probs_from_logits(logits, BATCH.targets, nucleus_ids=nucleus, parallel=parallel)
    return stats.log_probs, policy_loss(stats, BATCH, PolicyLossConfig(), parallel=parallel)


def of_hidden(hidden, parallel, nucleus):
    options = {"nucleus_ids": nucleus, "parallel": parallel}
    stats = log_probs_from_hidden(hidden, KERNEL, BATCH.targets, **options)
    return stats.log_probs, policy_loss_from_hidden(
        hidden, KERNEL, BATCH, PolicyLossConfig(), **options
    )


@functools.cache
def with_nucleus(path, mesh):
    """A compiled function of the nucleus: log-probs, and the loss with its gradient."""
    parallel = mesh and make_parallel_mesh(mesh)

    @quick_jit
    def run(nucleus):
        def loss_of(hidden):
            log_probs, (loss, metrics) = path(hidden, parallel, nucleus)
            return loss, (log_probs, metrics)

        slopes = jax.value_and_grad(loss_of, has_aux=True)
        (loss, (log_probs, metrics)), gradient = slopes(HIDDEN)
        return log_probs, ((loss, metrics), gradient)

    return run


@pytest.mark.parametrize(
    ("path", "explained"),
    [
        (of_logits, "log_probs: expected .* in the vocabulary, as are nucleus_ids"),
        (of_hidden, "nucleus_ids: expected -1, or 0 to V - 1"),
    ],
)
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2", "dp=2,tp=4"])
@pytest.mark.parametrize("bad", [V, 10**6, -2])
def test_a_nucleus_outside_the_vocabulary(bad, mesh, path, explained):
    """Before: such ids were dropped.

    A nucleus of them alone left the target, whose log-prob was 0.
    """
    run = with_nucleus(path, mesh)
    nucleus = NUCLEUS.copy()
    nucleus[(*AT, 1)] = bad
    sound, _ = run(NUCLEUS)
    log_probs, ((loss, found), gradient) = run(nucleus)
    expected = np.array(sound)
    expected[AT] = np.nan
    np.testing.assert_array_equal(log_probs, expected, equal_nan=True)
    assert np.isnan(loss)
    assert np.isnan(gradient).any()
    assert re.match(explained, lines_of(found)[0])


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_an_adapter_that_is_not_there(mesh):
    """Before: explained as a target outside the vocabulary. In micro-batches, on a mesh."""
    parallel = mesh and make_parallel_mesh(mesh)
    lora = LoRA(
        *(RNG.normal(size=shape).astype(np.float32) for shape in ((3, H, 2), (3, 2, V))), 0.5
    )
    batches = jax.tree.map(lambda x: jnp.asarray(x).reshape(2, 2, *x.shape[1:]), BATCH)
    normalizer = Normalizer.of(SFT(), batches, parallel=parallel)

    @quick_jit
    def run(adapter_ids):
        def part(hidden, given):
            place, batch, normalizer, adapter_ids = given
            own = hidden[place]
            options = {"adapter_ids": adapter_ids, "normalizer": normalizer, "parallel": parallel}
            return policy_loss_from_hidden(
                own, Head(KERNEL, lora=lora), batch, PolicyLossConfig(), **options
            )

        given = jnp.arange(2), batches, normalizer, adapter_ids.reshape(2, 2)
        (loss, found), _ = accumulate_gradients(part, given)(
            jnp.asarray(HIDDEN.reshape(2, 2, T, H))
        )
        return loss, finalize_metrics(found)["broken_rules"]

    loss, number = run(jnp.array([0, 2, -1, 1]))
    assert np.isfinite(loss)
    assert int(number) == 0
    for bad in (3, -2):
        loss, number = run(jnp.array([0, 2, bad, 1]))
        assert np.isnan(loss)
        lines = explain_broken_rules(number)
        assert [line.split(":")[0] for line in lines] == ["adapter_ids", "log_probs"]
