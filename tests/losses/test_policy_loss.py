"""A policy loss does not depend on packing, order, mesh, layout, micro-batches or garbage at
positions without loss.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from policy_steps import (
    AGGREGATIONS,
    LOSSES,
    accumulated,
    by_sample,
    config_of,
    loss_of,
    step_of,
    whole,
    with_garbage,
)

from jaxppo import KL, PPO, OffPolicyConfig, Rejection, RolloutBatch, TokenStats, finalize_metrics
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

MESH = "dp=2,cp=2,tp=2"
PAIRS = [(loss, AGGREGATIONS[(i + 3) % 6]) for i, loss in enumerate(LOSSES)]
OTHER_PAIRS = [(loss, a) for loss in LOSSES for a in AGGREGATIONS if (loss, a) not in PAIRS]


def results(batch, run):
    """(loss beside the sum of the token weights, gradients by sample), to compare between packings.

    The loss sums terms of either sign, each about as large as its weight; so rounding is relative
    to the weights' sum.
    """
    loss, (by_log_prob, by_entropy) = run(batch)
    weights = -np.sum(np.asarray(by_entropy)) / 0.01
    return np.append(loss, weights), by_sample(by_log_prob, batch), by_sample(by_entropy, batch)


@pytest.mark.every(7)
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_else_matters(loss):
    config = config_of(loss, AGGREGATIONS[LOSSES.index(loss) % 6])
    zigzag = make_parallel_mesh(MESH, context_layout="zigzag")

    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(
        seed=st.integers(0, 10**6), garbage=st.sampled_from([np.nan, np.inf, -1e30]), data=st.data()
    )
    def check(seed, garbage, data):
        samples = step_of(seed)
        packed = RolloutBatch.from_samples(samples, row_length=24, rows=4, num_segments=9)
        expected = results(packed, whole(config))
        assert np.all(np.isfinite(expected[0]))
        order = data.draw(st.permutations(range(len(samples))))
        shuffled = [samples[i] for i in order]
        long_rows = RolloutBatch.from_samples(shuffled, row_length=40, rows=3, num_segments=9)
        sharded = RolloutBatch.from_samples(
            shuffled, row_length=24, rows=4, num_segments=9, parallel=zigzag
        )
        for name, got in {
            "garbage": results(with_garbage(packed, garbage), whole(config)),
            "order and row length": results(with_garbage(long_rows, garbage), whole(config)),
            "mesh and layout": results(
                with_garbage(sharded, garbage), whole(config, MESH, "zigzag")
            ),
        }.items():
            # A masked mean that multiplied instead of selecting would be NaN here.
            assert_trees_close(got, expected, rtol=1e-5, atol=2e-6, context=name)

    check()


def check_micro_batches(loss, aggregation, **options):
    config = config_of(loss, aggregation, **options)
    samples = step_of(3)
    # 14, 2 and 0 loss tokens: of ppo's token_mean, 0.369, the mean of the parts' means is 0.440,
    # their sum 1.319.
    uneven = [samples[i] for i in (0, 3, 4, 5, 6, 7)], [samples[8]], [samples[1], samples[2]]
    parts = [
        RolloutBatch.from_samples(part, row_length=32, rows=2, num_segments=6) for part in uneven
    ]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *parts)
    together = RolloutBatch.from_samples(samples, row_length=32, rows=4, num_segments=6)
    got = results(stacked, accumulated(config, MESH))
    assert_trees_close(got, results(together, whole(config)), rtol=1e-5, atol=2e-6)


@pytest.mark.every(7)
@pytest.mark.parametrize(("loss", "aggregation"), PAIRS)
def test_micro_batches_add_up(loss, aggregation):
    check_micro_batches(loss, aggregation)


@pytest.mark.nightly
@pytest.mark.parametrize(("loss", "aggregation"), OTHER_PAIRS)
def test_micro_batches_add_up_all(loss, aggregation):
    check_micro_batches(loss, aggregation)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "off_policy",
    [
        OffPolicyConfig(weights="token", high=1.1, batch_normalize=True),
        OffPolicyConfig(weights="sequence", high=1.3, batch_normalize=True, outside="zero"),
        OffPolicyConfig(
            weights="geometric", opsm_delta=0.1, rejections=(Rejection("seq_mean_k1", 0.98, 1.05),)
        ),
    ],
    ids=["token", "sequence", "masks"],
)
def test_micro_batches_add_up_off_policy(off_policy):
    check_micro_batches("ppo", "sequence_mean_token_mean", off_policy=off_policy)


def test_micro_batches_merge_metrics():
    config = config_of(
        PPO(0.2, 0.28, 1.2),
        off_policy=OffPolicyConfig(weights="token", high=1.1),
        clip_by_sign=True,
    )
    batch = RolloutBatch.from_samples(step_of(6), row_length=24, rows=6, num_segments=9)
    stacked = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), batch)
    *_, found = accumulated(config, MESH, metrics=True)(stacked)
    *_, metrics = whole(config, metrics=True)(batch)
    numbers_of = jax.jit(finalize_metrics)
    expected = numbers_of(metrics)
    assert_trees_close(numbers_of(found), expected, rtol=1e-5, atol=1e-6)
    assert {name for name, x in expected.items() if x == 0} == {"broken_rules", "rollout_capped"}
    assert {
        "loss",
        "pg_loss",
        "entropy",
        "kl",
        "ppo_kl",
        "clip_fraction",
        "clip_fraction_lower",
    } <= set(found)
    assert {"clip_fraction_positive", "clip_fraction_negative"} <= set(found)
    assert {
        "ratio_mean",
        "ratio_min",
        "ratio_max",
        "effective_sample_size",
        "tis",
        "sampler_k3",
    } <= set(found)


def test_metrics_say_what_they_mean():
    config = config_of(PPO(0.2, 0.28, 1.2), kl=KL(0.1, "k2"), clip_by_sign=True)
    batch = RolloutBatch.from_samples(step_of(6), row_length=24, rows=4, num_segments=9)
    *_, found = whole(config, MESH, metrics=True)(batch)
    found = {name: float(x) for name, x in jax.jit(finalize_metrics)(found).items()}
    on = batch.loss_mask > 0
    d = (batch.returns - batch.old_log_probs)[on].astype(np.float64)
    r = np.exp(d)
    a = batch.advantages[on]
    clipped = ((r > 1.28) & (a > 0)) | ((r < 0.8) & (a < 0))
    lower = (r > 1.2) & (a < 0)
    plain = np.where(clipped, -a * np.clip(r, 0.8, 1.28), np.where(lower, -a * 1.2, -a * r))
    kl = (batch.returns - batch.ref_log_probs)[on] ** 2 / 2
    expected = {
        "loss": np.mean(plain + 0.1 * kl - 0.01 * batch.values[on]),
        "pg_loss": plain.mean(),
        "clip_fraction": clipped.mean(),
        "clip_fraction_lower": lower.mean(),
        "clip_fraction_positive": clipped[a > 0].mean(),
        "clip_fraction_negative": clipped[a < 0].mean(),
        "entropy": batch.values[on].mean(),
        "kl": kl.mean(),
        "ppo_kl": -d.mean(),
        "ratio_mean": r.mean(),
        "ratio_min": r.min(),
        "ratio_max": r.max(),
        "effective_sample_size": r.sum() ** 2 / (len(r) * (r**2).sum()),
        "sampler_log_prob_abs_diff": (
            np.abs(batch.old_log_probs - batch.rollout_log_probs)[on].mean()
        ),
    }
    assert 0 < expected["clip_fraction_positive"] != expected["clip_fraction_negative"] > 0
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.every(3)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_token_anywhere_is_exactly_zero(loss):
    batch = RolloutBatch.from_samples(step_of(1), row_length=24, rows=4, num_segments=9)
    batch = with_garbage(
        dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask)), np.nan
    )
    value, gradients = whole(config_of(loss, AGGREGATIONS[LOSSES.index(loss) % 6]))(batch)
    assert value == 0
    assert not any(np.any(g) for g in gradients)


@pytest.mark.parametrize("explicit", [False, True])
def test_inside_the_users_own_shard_map(explicit):
    """A user's shard_map with ShardAxes gives what the mesh-level call gives, on Auto and on
    Explicit meshes.
    """
    config = config_of("gspo", "rollout_mean")
    batch = RolloutBatch.from_samples(step_of(2), row_length=24, rows=4, num_segments=9)
    parallel = make_parallel_mesh(MESH, explicit=explicit)

    def mesh_level(batch):
        def fn(x):
            return loss_of(TokenStats(x, batch.values), batch, config, parallel)[0]

        return jax.value_and_grad(fn)(batch.returns)

    def own(batch):
        def fn(x):
            return loss_of(TokenStats(x, batch.values), batch, config, parallel.axes)[0]

        return jax.value_and_grad(fn)(batch.returns)

    specs = batch.specs(parallel)
    placed = jax.device_put(batch, jax.tree.map(parallel.sharding, specs))
    shard_map = jax.shard_map(
        own, mesh=parallel.mesh, in_specs=(specs,), out_specs=(P(), specs.returns)
    )
    expected, (gradients, _) = whole(config)(batch)
    assert_trees_close(jax.jit(mesh_level)(placed), (expected, gradients), rtol=1e-5, atol=2e-6)
    assert_trees_close(jax.jit(shard_map)(placed), (expected, gradients), rtol=1e-5, atol=2e-6)


def test_batch_and_coefficients_are_constants():
    batch = RolloutBatch.from_samples(step_of(2), row_length=24, rows=4, num_segments=9)
    floats = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    off_policy = OffPolicyConfig(weights="token")

    @jax.jit
    @jax.grad
    def gradients(x):
        kl = KL(x["kl"], importance="token")
        config = config_of("ppo", entropy_coef=x["entropy"], kl=kl, off_policy=off_policy)
        given = dataclasses.replace(batch, **{name: x[name] for name in floats})
        return loss_of(TokenStats(x["log_probs"], batch.values), given, config, None)[0]

    x = {name: jnp.asarray(getattr(batch, name)) for name in floats}
    found = gradients(
        x
        | {
            "entropy": jnp.float32(0.1),
            "kl": jnp.float32(0.1),
            "log_probs": jnp.asarray(batch.returns),
        }
    )
    assert np.any(found.pop("log_probs"))
    for name, gradient in found.items():
        assert not np.any(gradient), name


def test_current_log_probs_are_a_ratio_of_one():
    batch = RolloutBatch.from_samples(step_of(2), row_length=24, rows=4, num_segments=9)
    batch = dataclasses.replace(
        batch, old_log_probs=None, rollout_log_probs=None, ref_log_probs=None
    )
    _, (gradient, _), found = whole(config_of("ppo", ratio_to="current", kl=None), metrics=True)(
        batch
    )
    assert found["ratio_min"].value == found["ratio_max"].value == 1
    np.testing.assert_allclose(
        gradient,
        np.where(batch.loss_mask > 0, -batch.advantages, 0) / batch.loss_mask.sum(),
        rtol=1e-6,
        atol=1e-9,
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("loss", ["ppo", "gspo", "gmpo"])
def test_context_shards_without_loss_tokens(loss):
    """Seven of eight context shards own none: their gradient is exactly 0, and they take part in
    every collective.
    """
    batch = RolloutBatch.from_samples(step_of(2), row_length=64, rows=3, num_segments=9)
    batch = dataclasses.replace(batch, loss_mask=batch.loss_mask * (np.arange(64) < 8))
    config = config_of(loss, "sequence_mean_token_mean")
    value, gradients = whole(config, "cp=8")(batch)
    assert_trees_close((value, gradients), whole(config)(batch), rtol=1e-5, atol=2e-6)
    assert np.any(gradients[0])
    assert not np.any(gradients[0][:, 8:])
    assert not np.any(gradients[1][:, 8:])


def test_micro_batches_on_an_explicit_mesh():
    config = config_of("ppo", "rollout_mean")
    batch = RolloutBatch.from_samples(step_of(5), row_length=24, rows=6, num_segments=9)
    stacked = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), batch)
    parallel = make_parallel_mesh(MESH, explicit=True)
    placed = jax.device_put(stacked, jax.tree.map(parallel.sharding, stacked.specs(parallel)))
    got = accumulated(config, MESH, explicit=True)(placed)
    value, gradients = whole(config)(batch)
    assert_trees_close(
        jax.tree.map(lambda x: np.asarray(x).reshape(-1, 24) if x.ndim else x, got),
        (value, gradients),
        atol=2e-6,
    )
