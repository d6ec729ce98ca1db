"""Stale tokens: against plain float64 on any mesh, and with a sampler that lags behind."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_rows import MESHES, hard_batch, layouts_on, sequences

from jaxppo import (
    PPO,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    advantages,
    finalize_metrics,
    log_probs_from_logits,
    policy_loss,
)
from jaxppo.step.staleness import proximal_log_probs, staleness_metrics, staleness_weights
from sharding import make_parallel_mesh
from sharding.testing import assert_mesh_invariant

VERSION = 20
BATCH, LOG_PROBS = hard_batch()
MASK = np.asarray(BATCH.loss_mask) > 0
DRAWN = np.random.default_rng(3).integers(12, VERSION + 1, MASK.shape)
BATCH = dataclasses.replace(
    BATCH, policy_versions=jnp.asarray(np.where(MASK, DRAWN, -(2**31)), jnp.int32)
)
AGE = VERSION - DRAWN


def oldest():
    """The largest staleness in each loss token's sequence."""
    out = np.zeros(MASK.shape)
    for row, _, places in sequences(BATCH):
        trained = places[MASK[row, places]]
        if trained.size:
            out[row, trained] = AGE[row, trained].max()
    return out


@pytest.mark.parametrize("proximal", [None, 17, 20])
def test_proximal_log_probs(proximal):
    got = proximal_log_probs(
        LOG_PROBS, BATCH.rollout_log_probs, BATCH.policy_versions, VERSION, proximal
    )
    pi, b = (np.asarray(x, np.float64) for x in (LOG_PROBS, BATCH.rollout_log_probs))
    between = (VERSION - 1 if proximal is None else proximal) - DRAWN
    alpha = np.where(AGE == 0, 0, np.clip(between / np.maximum(AGE, 1), 0, 1))
    np.testing.assert_allclose(
        np.asarray(got)[MASK], (b + alpha * (pi - b))[MASK], rtol=0, atol=5e-7
    )
    assert (AGE[MASK] == 0).any()


def test_a_proximal_policy_newer_than_the_version():
    """Once its log-probs were those of the policy that learns."""
    given = LOG_PROBS, BATCH.rollout_log_probs, BATCH.policy_versions, VERSION
    with pytest.raises(
        ValueError, match="proximal_version: got 21, expected at most the version, 20"
    ):
        proximal_log_probs(*given, VERSION + 1)
    assert np.isnan(jax.jit(proximal_log_probs)(*given, VERSION + 1)).all()
    assert np.isfinite(np.asarray(jax.jit(proximal_log_probs)(*given, VERSION))[MASK]).all()


def test_proximal_log_probs_are_constants():
    def fn(x):
        return proximal_log_probs(x, BATCH.rollout_log_probs, BATCH.policy_versions, VERSION).sum()

    np.testing.assert_array_equal(jax.grad(fn)(LOG_PROBS), 0)


@pytest.mark.parametrize(("limit", "decay"), [(0, 0.0), (3, 0.0), (3, 0.5), (3, 1.0), (30, 0.5)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights(level, limit, decay):
    got = staleness_weights(BATCH, VERSION, limit=limit, decay=decay, level=level)
    age = AGE if level == "token" else oldest()
    expected = np.where(MASK & (age > limit), np.float64(decay) ** np.maximum(age - limit, 0), 1)
    np.testing.assert_allclose(got, expected, rtol=2e-6)


def expected_metrics():
    spans = [
        np.ptp(AGE[row, p[MASK[row, p]]]) for row, _, p in sequences(BATCH) if MASK[row, p].any()
    ]
    found = AGE[MASK]
    return {
        "staleness": found.mean(),
        "staleness_max": found.max(),
        "staleness_min": found.min(),
        "version_span": np.mean(spans),
    }


def test_metrics():
    got = finalize_metrics(staleness_metrics(BATCH, VERSION))
    assert {name: float(x) for name, x in got.items()} == pytest.approx(
        expected_metrics(), rel=1e-6
    )


def test_any_mesh():
    def both(parallel, batch):
        weights = staleness_weights(
            batch, VERSION, limit=3, decay=0.5, level="sequence", parallel=parallel
        )
        return weights, finalize_metrics(staleness_metrics(batch, VERSION, parallel=parallel))

    assert_mesh_invariant(both, BATCH, meshes=MESHES)


def test_any_layout_and_a_traced_version():
    whole = staleness_weights(BATCH, VERSION, limit=3, level="sequence")

    def fn(v, batch, parallel):
        return staleness_weights(batch, v, limit=3, level="sequence", parallel=parallel)

    for layout, parallel, to_physical, to_logical in layouts_on():
        got = jax.jit(fn, static_argnums=2)(jnp.int32(VERSION), to_physical(BATCH), parallel)
        np.testing.assert_array_equal(to_logical(got), whole, err_msg=layout)


@pytest.mark.parametrize("make", ["samples", "padded"])
def test_versions_travel_with_their_tokens(make):
    if make == "samples":
        sample = Sample([5, 6, 7, 8, 9], response_start=2, policy_versions=[3, 3, 4])
        batch = RolloutBatch.from_samples([sample], row_length=8)
    else:
        prompt = np.array([[5, 6]])
        completion = np.array([[7, 8, 9]])
        batch = RolloutBatch.from_padded(
            prompt, completion, np.ones((1, 3)), policy_versions=jnp.array([[3, 3, 4]])
        )
    assert batch.policy_versions.dtype == np.int32
    trained = np.asarray(batch.loss_mask) > 0
    assert np.asarray(batch.targets)[trained].tolist() == [7, 8, 9]
    assert np.asarray(batch.policy_versions)[trained].tolist() == [3, 3, 4]
    batch.validate(10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            functools.partial(staleness_weights, BATCH, 1, limit=-1),
            "limit: got -1, expected a finite number of at least 0",
        ),
        (
            functools.partial(staleness_weights, BATCH, 1, limit=1, decay=2.0),
            "decay: got 2.0, expected",
        ),
        (
            functools.partial(staleness_weights, BATCH, 1, limit=1, level="row"),
            "level: got 'row', expected one of",
        ),
        (
            functools.partial(
                staleness_metrics, dataclasses.replace(BATCH, policy_versions=None), 1
            ),
            r"batch.policy_versions: got None, expected i32\[R, T\]",
        ),
        (
            lambda: proximal_log_probs(LOG_PROBS, LOG_PROBS[:1], BATCH.policy_versions, 1),
            "rollout_log_probs: got shape",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_versions_are_integers():
    with pytest.raises(TypeError, match=r"policy_versions: got float64, .* expected integers"):
        Sample([1, 2], response_start=1, policy_versions=[0.5])


# A sampler that lags behind: a table of logits [prompt, place, token] learns the one right token of
# each.

PROMPTS, PLACES, VOCAB, COPIES, STEPS, LAG = 4, 3, 8, 16, 20, 24
RIGHT = np.random.default_rng(0).integers(0, VOCAB, (PROMPTS, PLACES))
PLAIN = PolicyLossConfig(PPO(clip_high=0.28))
DECOUPLED = dataclasses.replace(PLAIN, off_policy=OffPolicyConfig(weights="token", high=5.0))
PARALLEL = make_parallel_mesh("dp=2,cp=2,tp=1", devices=jax.devices()[:4])


def draw(tables, versions, rng):
    """Draws samples in which later tokens may come from a newer policy than earlier ones."""
    found = []
    for i in range(PROMPTS * COPIES):
        prompt = i // COPIES
        drawn = np.sort(rng.choice(versions, PLACES))
        log_p = np.stack(
            [jax.nn.log_softmax(tables[v][prompt, place]) for place, v in enumerate(drawn)]
        )
        tokens = (log_p + rng.gumbel(size=log_p.shape)).argmax(1)
        found.append(
            Sample(
                [prompt, *tokens],
                response_start=1,
                reward=float((tokens == RIGHT[prompt]).mean()),
                group_id=prompt,
                rollout_log_probs=log_p[np.arange(PLACES), tokens],
                policy_versions=drawn,
            )
        )
    return found


@functools.partial(jax.jit, static_argnums=4)
def learn(table, batch, prompts, version, corrected):
    batch = dataclasses.replace(
        batch,
        advantages=advantages.spread(
            advantages.grpo(batch.rewards, **batch.groups, parallel=PARALLEL),
            batch,
            parallel=PARALLEL,
        ),
    )

    def stats(table):
        logits = table[prompts, jnp.minimum(batch.positions, PLACES - 1)]
        return log_probs_from_logits(
            logits, batch.targets, where=batch.loss_mask > 0, parallel=PARALLEL
        )

    now = stats(table).log_probs
    proximal = proximal_log_probs(now, batch.rollout_log_probs, batch.policy_versions, version)
    batch = dataclasses.replace(batch, old_log_probs=proximal if corrected else now)
    config = DECOUPLED if corrected else PLAIN
    gradient = jax.grad(lambda t: policy_loss(stats(t), batch, config, parallel=PARALLEL)[0])(table)
    return table - 10.0 * gradient, finalize_metrics(
        staleness_metrics(batch, version, parallel=PARALLEL)
    )


def final_reward(lag, corrected=True, seed=1):
    rng = np.random.default_rng(seed)
    tables = [np.zeros((PROMPTS, PLACES, VOCAB), np.float32)]
    for version in range(STEPS):
        samples = draw(
            tables, np.arange(max(0, version - lag), max(0, version - lag // 2) + 1), rng
        )
        shape = {"row_length": 16, "rows": 16, "num_segments": 4}
        batch = RolloutBatch.from_samples(samples, parallel=PARALLEL, **shape)
        first = np.maximum(np.asarray(batch.sample_ids), 0) // COPIES
        segments = np.maximum(np.asarray(batch.segment_ids) - 1, 0)
        prompts = np.take_along_axis(first, segments, axis=1)
        table, metrics = learn(
            jnp.asarray(tables[-1]),
            batch.put(PARALLEL),
            jnp.asarray(prompts),
            jnp.int32(version),
            corrected,
        )
        tables.append(np.asarray(table))
    chosen = jax.nn.softmax(tables[-1])[np.arange(PROMPTS)[:, None], np.arange(PLACES), RIGHT]
    return float(chosen.mean()), float(metrics["staleness_max"])


def check_lagging(seed):
    synchronous, fresh = final_reward(0, seed=seed)
    corrected, stale = final_reward(LAG, seed=seed)
    plain, _ = final_reward(LAG, corrected=False, seed=seed)
    assert (fresh, stale) == (0, STEPS - 1)  # all that the first version can be
    assert synchronous > 0.8
    assert corrected > synchronous - 0.02
    assert plain < synchronous - 0.04


def test_a_lagging_sampler_reaches_what_a_synchronous_one_does():
    check_lagging(1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 8))
def test_a_lagging_sampler_with_other_numbers(seed):
    check_lagging(seed)
