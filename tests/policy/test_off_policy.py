"""Off-policy weights, rejection and masking: against plain numpy, on any mesh, with the
denominators left alone.
"""

import dataclasses
import functools
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_rows import MESHES, hard_batch, sequences
from jax.sharding import PartitionSpec as P

from jaxppo import OffPolicyConfig, Rejection, finalize_metrics
from jaxppo.base.arrays import Compared
from jaxppo.mismatch import mismatch_metrics
from jaxppo.policy.off_policy import Statistic, correction, weight_sums
from sharding import Segments, shard_call
from sharding.testing import assert_mesh_invariant, assert_trees_close

RNG = np.random.default_rng(5)
BATCH, LOG_PROBS = hard_batch()
OLD = np.asarray(BATCH.old_log_probs)


def near():
    return jnp.asarray(OLD + 0.1 * RNG.normal(size=OLD.shape), jnp.float32)


BATCH = dataclasses.replace(BATCH, rollout_log_probs=near())
LOG_PROBS = near()
MASK = np.asarray(BATCH.loss_mask) > 0
D = np.asarray(BATCH.old_log_probs, np.float64) - np.asarray(BATCH.rollout_log_probs, np.float64)
JOINED = OffPolicyConfig(
    weights="geometric",
    low=0.99,
    high=1.03,
    rejections=(
        Rejection("token_k1", 0.85, 1.2),
        Rejection("seq_max_k2", high=0.04),
        Rejection("run_mean_k1", 0.9, 1.1, "current/rollout"),
        Rejection("run_mean_diff", -0.05, 0.05),
    ),
    veto=0.85,
    opsm_delta=0.001,
)


def correct(parallel, log_probs, batch, config, weight_mean=None):
    args = {"log_probs": log_probs, "batch": batch, "weight_mean": weight_mean}

    def specs(p):
        return [p.tokens_spec, batch.specs(p), P()], p.tokens_spec

    return shard_call("correct", correct_shard, parallel, args, specs, static=config)


def correct_shard(axes, config, log_probs, batch, weight_mean):
    policies = {
        "current": log_probs,
        "old": batch.old_log_probs,
        "rollout": batch.rollout_log_probs,
    }
    segments = batch.segments(axes)
    return correction(policies, batch.advantages, batch.loss_mask, segments, config, weight_mean)


@functools.partial(jax.jit, static_argnums=0)
def correct_by_each(configs, log_probs, batch):
    """What `correct` returns for each config, all of them in one program."""
    return [correct(None, log_probs, batch, config) for config in configs]


def by_sequence(reduce, x):
    """reduce(x over the loss tokens of a sequence), on its tokens; 0 elsewhere."""
    out = np.zeros(MASK.shape)
    for row, _, places in sequences(BATCH):
        trained = places[MASK[row, places]]
        if trained.size:
            out[row, trained] = reduce(x[row, trained])
    return out


RHO = {
    "token": np.where(MASK, np.exp(D), 1),
    "sequence": np.where(MASK, np.exp(by_sequence(np.sum, D)), 1),
    "geometric": np.where(MASK, np.exp(by_sequence(np.mean, D)), 1),
}


WEIGHTS = {
    (level, outside): OffPolicyConfig(weights=level, low=0.95, high=1.02, outside=outside)
    for level in RHO
    for outside in ("clamp", "zero")
}


@pytest.mark.parametrize("level", RHO)
@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_weights(level, outside):
    found = correct_by_each(tuple(WEIGHTS.values()), LOG_PROBS, BATCH)
    weights, indicators = dict(zip(WEIGHTS, found, strict=True))[level, outside]
    rho = RHO[level]
    inside = (rho >= 0.95) & (rho <= 1.02)
    expected = np.clip(rho, 0.95, 1.02) if outside == "clamp" else np.where(inside, rho, 0)
    np.testing.assert_allclose(np.asarray(weights)[MASK], expected[MASK], rtol=2e-5)
    np.testing.assert_allclose(indicators["tis"], rho, rtol=2e-5)
    assert (np.asarray(indicators["tis_clipfrac"])[MASK] == ~inside[MASK]).all()
    assert not np.asarray(weights)[~MASK].any()


def test_k3_accepts_what_agrees_to_rounding():
    """exp(d) - 1 - d in f32 is below 0, and so rejected, for 31% of tokens whose log-probs
    differ by 1e-4.
    """
    gap = 1e-4 * np.random.default_rng(0).normal(size=MASK.shape)
    batch = dataclasses.replace(BATCH, rollout_log_probs=jnp.asarray(OLD + gap, jnp.float32))
    levels = ("token", "seq_sum", "seq_mean", "seq_max")
    configs = tuple(OffPolicyConfig(rejections=(Rejection(f"{level}_k3"),)) for level in levels)
    for weights, indicators in correct_by_each(configs, LOG_PROBS, batch):
        np.testing.assert_array_equal(weights, MASK)
        assert not indicators["rejected_fraction"].any()
    d = np.asarray(batch.old_log_probs - batch.rollout_log_probs)[MASK].astype(np.float32)
    assert (np.exp(d) - 1 - d < 0).mean() > 0.1  # of few tokens here


def over_runs(x):
    """The mean over the contiguous loss tokens of a sequence, on them."""
    out = np.zeros(MASK.shape)
    for row, _, places in sequences(BATCH):
        trained = places[MASK[row, places]]
        for run in np.split(trained, np.nonzero(np.diff(trained) > 1)[0] + 1):
            out[row, run] = x[row, run].mean() if run.size else 0
    return out


REDUCED = {"seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max, "seq_min": np.min}
PAIRS = {pair: pair.split("/") for pair in get_args(Compared)}


@functools.cache
def rejection_of(statistic, compares):
    """(the config, whose bounds keep about 60% of the loss tokens, and the tokens it keeps)."""
    level, _, k = statistic.rpartition("_")
    arrays = {"current": LOG_PROBS, "old": BATCH.old_log_probs, "rollout": BATCH.rollout_log_probs}
    a, b = (np.where(MASK, np.asarray(arrays[name], np.float64), 0) for name in PAIRS[compares])
    d = a - b
    value = {
        "k1": -d,
        "k2": d**2 / 2,
        "k3": np.exp(d) - 1 - d,
        "diff": np.exp(a) - np.exp(b),
        "error": np.exp(np.abs(d)),
    }[k]
    if level == "run_mean":
        value = over_runs(value)
    elif level != "token":
        value = by_sequence(REDUCED[level], value)
    ordered = np.unique(value[MASK])
    # 1e-4: off the values themselves
    low, high = (ordered[int(len(ordered) * share)] + 1e-4 for share in (0.2, 0.8))
    bounds = {"k1": (np.exp(low), np.exp(high)), "diff": (low, high)}.get(k, (0.0, high))
    config = OffPolicyConfig(rejections=(Rejection(statistic, *map(float, bounds), compares),))
    least = low if k in ("k1", "diff") else 0
    return config, MASK & (value <= high) & (value >= least)


@pytest.mark.parametrize("compares", PAIRS)
@pytest.mark.parametrize("statistic", get_args(Statistic))
def test_rejection(statistic, compares):
    level = statistic.rpartition("_")[0]
    of_level = [name for name in get_args(Statistic) if name.rpartition("_")[0] == level]
    configs = tuple(rejection_of(name, compares)[0] for name in of_level)
    found = correct_by_each(configs, LOG_PROBS, BATCH)
    weights, indicators = found[of_level.index(statistic)]
    expected = rejection_of(statistic, compares)[1]
    assert 0 < expected.sum() < MASK.sum()
    np.testing.assert_array_equal(weights, expected)
    np.testing.assert_array_equal(np.asarray(indicators["rejected_fraction"]) > 0, MASK & ~expected)


# What SkyRL's and AReaL's own tests compute: log-probs of trainer and sampler, the mask, the
# rejections, what stays. SkyRL drops a sample by an o / q outside [1e-4, 100], AReaL by the largest
# o / q of a sample.
ERROR = "seq_mean_error"
EXTREMES = (Rejection("seq_max_k1", high=1e4), Rejection("seq_min_k1", low=0.01))
VECTORS = {
    "SkyRL, one of e^5": ([-1, -1, -1], [-1, -1, -6], [1, 1, 1], EXTREMES, [0, 0, 0]),
    "SkyRL, it has no loss": ([-1, -1, -1], [-1, -1, -6], [1, 1, 0], EXTREMES, [1, 1, 0]),
    "SkyRL, by token": (
        [-1, -1, -1],
        [-1, -1, -3],
        [1, 1, 1],
        (Rejection("token_k1", 0.5, 2.0),),
        [1, 1, 0],
    ),
    "AReaL, the largest is e^5": (
        [-1, -1],
        [-6, -6],
        [1, 1],
        (Rejection("seq_min_k1", low=0.5),),
        [0, 0],
    ),
    "AReaL, the largest is 1": (
        [-1, -1],
        [-1, -1],
        [1, 1],
        (Rejection("seq_min_k1", low=0.5),),
        [1, 1],
    ),
    "NeMo-RL, an error of 1.408": (
        [-1, -1, -1],
        [-1.1, -0.9, -1.7],
        [1] * 3,
        (Rejection(ERROR, high=1.407),),
        [0] * 3,
    ),
    "NeMo-RL, kept": (
        [-1, -1, -1],
        [-1.1, -0.9, -1.7],
        [1] * 3,
        (Rejection(ERROR, high=1.409),),
        [1] * 3,
    ),
    "NeMo-RL, one of log 8": (
        [-3] * 4,
        [-3, -3, -3, -5.0794],
        [1] * 4,
        (Rejection(ERROR, high=2.7),),
        [0] * 4,
    ),
    "AReaL, k2 by sample": (
        [-1, -1, -1],
        [-1, -3, -1],
        [1] * 3,
        (Rejection("seq_mean_k2", high=0.1),),
        [0, 0, 0],
    ),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", VECTORS)
def test_what_others_drop(name):
    old, rollout, mask, rejections, stays = VECTORS[name]
    config = OffPolicyConfig(rejections=rejections)

    @jax.jit
    def run(old, rollout, mask):
        policies = {"current": None, "old": old, "rollout": rollout}
        segments = Segments(jnp.ones(mask.shape, int), 1)
        return correction(policies, mask, mask, segments, config)[0]

    weights = run(*(np.array([x], np.float32) for x in (old, rollout, mask)))
    assert weights[0].tolist() == stays


def test_veto_and_sequence_masking():
    config = OffPolicyConfig(veto=0.85, opsm_delta=0.001)
    weights, indicators = correct(None, LOG_PROBS, BATCH, config)
    vetoed = MASK & (by_sequence(np.min, D) < math.log(0.85))
    drift = by_sequence(
        np.mean, np.asarray(BATCH.old_log_probs, np.float64) - np.asarray(LOG_PROBS, np.float64)
    )
    off = MASK & (np.nan_to_num(BATCH.advantages) < 0) & (drift > 0.001)
    assert vetoed.any()
    assert off.any()
    np.testing.assert_array_equal(weights, MASK & ~vetoed & ~off)
    np.testing.assert_array_equal(np.asarray(indicators["veto_fraction"]) > 0, vetoed)
    np.testing.assert_array_equal(np.asarray(indicators["opsm_clipfrac"]) > 0, off)


def test_same_on_every_mesh_and_finite():
    def run(parallel, log_probs, batch):
        return correct(parallel, log_probs, batch, JOINED), finalize_metrics(
            mismatch_metrics(batch, parallel=parallel)
        )

    (weights, indicators), found = assert_mesh_invariant(run, LOG_PROBS, BATCH, meshes=MESHES)
    assert all(np.isfinite(x).all() for x in [weights, *indicators.values(), *found.values()])
    assert 0 < int((weights > 0).sum()) < BATCH.loss_mask.sum()


def test_masked_positions_and_extreme_ratios():
    batch = dataclasses.replace(
        BATCH, rollout_log_probs=BATCH.rollout_log_probs.at[0, 5].set(-500.0)
    )
    expected = correct(None, LOG_PROBS, BATCH, JOINED)
    weights, _ = correct(None, LOG_PROBS, batch, dataclasses.replace(JOINED, weights="sequence"))
    assert np.isfinite(weights).all()
    assert weights[0].sum() == 0  # its sequence is rejected by its largest k2
    np.testing.assert_array_equal(weights[1:] > 0, expected[0][1:] > 0)


@functools.partial(jax.jit, static_argnums=0)
def sums_of_weights(config, batch):
    segments = batch.segments()
    return weight_sums(
        batch.old_log_probs, batch.rollout_log_probs, batch.loss_mask, segments, config
    )


@pytest.mark.parametrize("drift", [0.0, 19.0])  # weights of e^-19 too: their mean is below 1e-8
def test_batch_normalised_weights_have_mean_one(drift):
    batch = dataclasses.replace(BATCH, rollout_log_probs=BATCH.rollout_log_probs + drift)

    for level in ("token", "sequence"):
        config = OffPolicyConfig(weights=level, high=1.1, batch_normalize=True)
        total, count = sums_of_weights(config, batch)
        weights, _ = correct(None, LOG_PROBS, batch, config, total / count)
        picked = MASK if level == "token" else np.zeros_like(MASK)
        if level == "sequence":  # one token of each sequence
            for row, _, places in sequences(batch):
                picked[row, places[MASK[row, places]][:1]] = True
        assert float(count) == picked.sum()
        np.testing.assert_allclose(np.asarray(weights)[picked].mean(), 1, rtol=1e-6)


def test_no_gradient_flows():
    config = OffPolicyConfig(weights="sequence", compares="current/rollout", opsm_delta=0.0)

    def total(x):
        return correct(None, x, BATCH, config)[0].sum()

    assert_trees_close(jax.grad(total)(LOG_PROBS), jnp.zeros_like(LOG_PROBS))


def test_bad_input():
    for kwargs, message in [
        (
            {"weights": "row"},
            "weights: got 'row', expected one of 'none', 'token', 'sequence', 'geometric'",
        ),
        ({"low": 2.0, "high": 1.0}, "low, high: got 2.0, 1.0, expected 0 <= low < high"),
        ({"outside": "drop"}, "outside: got 'drop'"),
        ({"veto": 2.0}, r"veto: got 2.0, expected a ratio above .* and below 1"),
        ({"opsm_delta": -1.0}, "opsm_delta: got -1.0"),
        ({"batch_normalize": True}, "batch_normalize: got True with weights='none'"),
        (
            {"batch_normalize": True, "weights": "token", "compares": "current/rollout"},
            "compares='current/rollout', expected weights, and compares='old/rollout'",
        ),
        (
            {"compares": "rollout/old"},
            "compares: got 'rollout/old', expected one of 'old/rollout', 'current/rollout'",
        ),
        ({"opsm_compares": "old"}, "opsm_compares: got 'old'"),
    ]:
        with pytest.raises(ValueError, match=message):
            OffPolicyConfig(**kwargs)
    with pytest.raises(ValueError, match="statistic: got 'token_k4', expected one of 'token_k1'"):
        Rejection("token_k4")
    with pytest.raises(TypeError, match="rejections: got str, expected Rejection"):
        OffPolicyConfig(rejections=("token_k1",))
    bare = dataclasses.replace(BATCH, rollout_log_probs=None)
    with pytest.raises(ValueError, match=r"rollout_log_probs: got None, expected f32\[R, T\]"):
        correct(None, LOG_PROBS, bare, OffPolicyConfig(weights="token"))
    with pytest.raises(ValueError, match="rollout_log_probs: got None"):
        mismatch_metrics(bare)
    with pytest.raises(ValueError, match="weight_mean: got None"):
        correct(None, LOG_PROBS, BATCH, OffPolicyConfig(weights="token", batch_normalize=True))
