"""Samples that share prompts have the same losses, metrics, gradients and advantages as whole
samples.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import config_of, normalizer_of, quick_jit, whole
from shared_prompts import assert_same_tokens, both, three_levels
from tables import sampled

from jaxppo import (
    SFT,
    Normalizer,
    RolloutBatch,
    Value,
    advantages,
    explain_broken_rules,
    finalize_metrics,
    loss_from_hidden,
    loss_from_stats,
    policy_loss_from_hidden,
)
from jaxppo.batch.nucleus import pack_nucleus_ids
from jaxppo.losses.mtp import MTP, mtp_loss, shift_targets
from sharding import make_parallel_mesh
from sharding.axes import LAYOUTS

SAMPLES = three_levels(0)
LENGTH = 160
MESHES = ("dp=2,cp=2,tp=2", "dp=4,cp=2", "dp=2,cp=4", "cp=8", "dp=8")
KINDS = (
    ("ppo", "token_mean"),
    ("gspo", "sequence_mean_token_mean"),
    ("cispo", "rollout_mean"),
    ("kl_cov", "sequence_mean_token_sum"),
    ("gmpo", "sequence_mean_token_sum_norm"),
)
CASES = [*itertools.product(MESHES, LAYOUTS, KINDS)]
# by day each mesh, layout and loss once or more
BY_DAY = sampled(CASES, lambda i, case: (i // 20 + i % 5) % 5 == 0 and i // 5 % 4 == i // 20 % 4)


def parallel_of(mesh, layout):
    return make_parallel_mesh(mesh, context_layout=layout)


@pytest.mark.every(4)
@pytest.mark.parametrize(("mesh", "layout", "kind"), BY_DAY)
def test_losses_metrics_and_gradients(mesh, layout, kind):
    plain, _ = both(SAMPLES, row_length=LENGTH)
    _, trees = both(SAMPLES, row_length=LENGTH, parallel=parallel_of(mesh, layout))
    config = config_of(*kind)
    loss, gradients, found = whole(config, mesh, layout, metrics=True)(trees)
    expected, slopes, metrics = whole(config, metrics=True)(plain)
    assert float(expected) != 0
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    for got, want in zip(gradients, slopes, strict=True):
        assert_same_tokens(got, trees, want, plain, rtol=1e-5, atol=1e-9)
        assert not np.asarray(got)[np.asarray(trees.loss_mask) == 0].any()
    found, metrics = (jax.jit(finalize_metrics)(x) for x in (found, metrics))
    assert found.keys() == metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "rollout_mean"])
def test_no_denominator_counts_a_shared_prefix(aggregation):
    plain, trees = (normalizer_of(batch, aggregation) for batch in both(SAMPLES, row_length=LENGTH))
    assert float(plain.sequences) == float(trees.sequences)
    assert float(plain.tokens) == float(trees.tokens)
    assert sorted(plain.denominators[plain.counts > 0]) == sorted(
        trees.denominators[trees.counts > 0]
    )


def of_step(batch, parallel):
    """Group advantages of each token, GAE (its mask may be all response tokens) and REINFORCE++."""
    grouped = advantages.grpo(batch.rewards, batch.group_ids, parallel=parallel)
    rewards = advantages.token_rewards(batch.rewards, batch, parallel=parallel)
    found = {"grpo": advantages.spread(grouped, batch, parallel=parallel), "token_rewards": rewards}
    options = {"gamma": 0.9, "lam": 0.8, "parallel": parallel}
    found |= dict(
        zip(
            ("gae", "returns"), advantages.gae(rewards, batch.values, batch, **options), strict=True
        )
    )
    responses = (batch.old_log_probs < 0).astype(jnp.float32)
    found["gae through holes"] = advantages.gae(
        rewards, batch.values, batch, mask=responses, **options
    )[0]
    found["reinforce++"] = advantages.reinforce_plus_plus(
        rewards, batch, gamma=0.9, parallel=parallel
    )
    return found


@functools.cache
def of_whole_samples():
    """The packed batch without shared prefixes, and `of_step` of it."""
    plain, _ = both(SAMPLES, row_length=LENGTH)
    return plain, quick_jit(functools.partial(of_step, parallel=None))(plain)


@pytest.mark.every(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_advantages(layout):
    mesh = {"contiguous": "dp=2,cp=2,tp=2", "zigzag": "cp=4,dp=2", "striped": "dp=4,cp=2"}.get(
        layout, "cp=8"
    )
    parallel = parallel_of(mesh, layout)
    _, trees = both(SAMPLES, row_length=LENGTH, parallel=parallel)
    plain, expected = of_whole_samples()
    found = quick_jit(functools.partial(of_step, parallel=parallel))(trees)
    for name, value in expected.items():
        assert np.abs(np.asarray(value)).max() > 0.1, name
        assert_same_tokens(found[name], trees, value, plain, rtol=1e-5, atol=1e-6)


DEPTHS = 2


def states(batch, depth):
    """Hidden states `[R, T, H]` that depend on sample and position alone; a shared prefix has
    its own.
    """
    rng = np.random.default_rng(depth)
    table = rng.normal(size=(len(SAMPLES) + 1, 64, 6)).astype(np.float32)
    owners = np.take_along_axis(batch.sample_ids, np.maximum(batch.segment_ids - 1, 0), axis=1)
    return table[owners, batch.positions]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_multi_token_prediction(layout):
    parallel = parallel_of("dp=2,cp=2,tp=2", layout)
    options = {"row_length": LENGTH, "mtp_depths": DEPTHS}
    plain, _ = both(SAMPLES, **options)
    _, trees = both(SAMPLES, **options, parallel=parallel)

    def run(batch, hidden, parallel):
        def fn(hidden):
            return mtp_loss(hidden, KERNEL, batch, MTP(coef=0.5), parallel=parallel)

        return jax.value_and_grad(fn, has_aux=True)(hidden)

    hidden = [[states(batch, depth) for depth in range(DEPTHS)] for batch in (plain, trees)]
    (expected, metrics), slopes = run(plain, hidden[0], None)
    (loss, found), gradients = quick_jit(functools.partial(run, parallel=parallel))(
        trees, hidden[1]
    )
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    for depth in range(DEPTHS):
        assert float(found[f"mtp_{depth + 1}_nll"].count) == float(
            metrics[f"mtp_{depth + 1}_nll"].count
        )
        of_depth = [shift_targets(plain, depth + 1), shift_targets(trees, depth + 1, parallel)]
        assert_same_tokens(
            gradients[depth], of_depth[1], slopes[depth], of_depth[0], rtol=1e-5, atol=1e-8
        )


def test_more_depths_than_packed_for():
    """Depth 2 of branches packed for depth 1 would silently lose one target each."""
    plain, trees = both(SAMPLES, row_length=LENGTH, mtp_depths=1)
    message = (
        "depths: got 2 for a batch with shared prefixes, expected at most 1:"
        " RolloutBatch.from_samples"
    )
    with pytest.raises(ValueError, match=message):
        mtp_loss(
            np.zeros((2, *trees.tokens.shape, 6), np.float32), np.zeros((6, 56), np.float32), trees
        )
    with pytest.raises(ValueError, match=message):
        Normalizer.of(MTP(2), trees)
    assert float(Normalizer.of(MTP(1), trees)[0].tokens) == float(
        Normalizer.of(MTP(1), plain)[0].tokens
    )
    Normalizer.of(MTP(2), plain)


def test_recorded_nuclei():
    nuclei = [[[int(t), 7] for t in sample.tokens[sample.start :]] for sample in SAMPLES]
    plain, trees = both(SAMPLES, row_length=LENGTH)
    made = [pack_nucleus_ids(nuclei, SAMPLES, batch) for batch in (plain, trees)]
    assert_same_tokens(made[1], trees, made[0], plain)


OF_LOSSES = {
    "sft": lambda hidden, batch: loss_from_hidden(hidden, KERNEL, batch, SFT()),
    "policy": lambda hidden, batch: policy_loss_from_hidden(
        hidden, KERNEL, batch, config_of("ppo")
    ),
    "value": lambda hidden, batch: loss_from_stats(hidden[..., 0], batch, Value()),
    "mtp": lambda hidden, batch: mtp_loss([hidden], KERNEL, batch),
}
KERNEL = np.random.default_rng(9).normal(size=(6, 56)).astype(np.float32)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", OF_LOSSES)
def test_losses_of_broken_trees_are_nan(kind):
    _, trees = both(SAMPLES, row_length=LENGTH, mtp_depths=1)
    hidden = states(trees, 0)
    wrong = {
        "parents": trees.parents + (trees.parents > 1) * 9,
        "loss_without_sample": trees.loss_mask.copy(),
    }
    wrong["loss_without_sample"][0, 1] = 1
    for rule, x in wrong.items():
        name = "loss_mask" if rule == "loss_without_sample" else rule
        if kind == "mtp" and name == "loss_mask":
            continue  # what stands before it, and is the only one to move there, is shared as well
        run = jax.jit(OF_LOSSES[kind])
        assert np.isfinite(run(hidden, trees)[0])
        loss, found = run(hidden, dataclasses.replace(trees, **{name: x}))
        assert np.isnan(loss)
        bits = next(metric for what, metric in found.items() if what.endswith("broken_rules")).value
        assert any(line.startswith(f"{rule}: ") for line in explain_broken_rules(bits))


def test_stacked_micro_batches():
    plain, trees = both(SAMPLES, row_length=48, micro_batches=2)
    assert trees.parents.shape == trees.sample_ids.shape
    for batch in (plain, trees):
        batch.validate(60)
    found, expected = (
        Normalizer.of(SFT(aggregation="sequence_mean_token_mean"), batch)
        for batch in (trees, plain)
    )
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert isinstance(jax.tree.map(lambda x: x[0], trees), RolloutBatch)
    assert trees.paths.attends(trees.paths).shape == (*trees.tokens.shape, 48)
