"""Advantages that compare the tokens of a group: the optimal token baseline."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import quick_jit, step_of

from jaxppo import RolloutBatch, Sample, TokenStats, advantages
from sharding import make_parallel_mesh
from sharding.audit import audit

VERL = json.loads((Path(__file__).parents[1] / "golden/peers/verl_baselines.json").read_text())[
    "cases"
]
MESHES = [None, "dp=2,cp=2,tp=2"]


def placed(batch, rows):
    """Puts arrays, one for each sample, into `[R, T]`, each from its sample's first response
    token on.
    """
    out = np.full(batch.tokens.shape, np.nan, np.float32)
    row, t = np.nonzero(batch.segment_ids)
    sample = batch.sample_ids[row, batch.segment_ids[row, t] - 1]
    for at in zip(row, t, sample, batch.positions[row, t], strict=True):
        if at[3] < len(rows[at[2]]):
            out[at[:2]] = rows[at[2]][at[3]]
    return out


def packed(masks, groups, parallel):
    samples = [
        Sample([5] * (len(m) + 1), 1, loss_mask=[0, *m], group_id=g)
        for m, g in zip(masks, groups, strict=True)
    ]
    layout = {"row_length": 16, "rows": 4, "num_segments": 3}
    return RolloutBatch.from_samples(samples, parallel=parallel, **layout)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "case", VERL, ids=lambda c: c["function"].split("_")[1] + " weighted" * bool(c["weights"])
)
def test_the_baseline_of_verl(case, mesh):
    """verl's form without places of loss tokens counts lengths in another way if tools wrote
    tokens in a sample.
    """
    parallel = mesh and make_parallel_mesh(mesh, context_layout="zigzag")
    batch = packed(case["mask"], case["groups"], parallel)
    of = {
        name: placed(batch, case[name])
        for name in ("rewards", "log_probs", "sum_pi_squared", "advantages")
    }
    weights = None if case["weights"] is None else placed(batch, case["weights"])
    place = "loss_token" if "multi_turn" in case["function"] else "position"
    stats = TokenStats(of["log_probs"], sum_p2=of["sum_pi_squared"])

    @quick_jit
    def run(rewards, stats, batch):
        returns = advantages.discounted_returns(rewards, batch, parallel=parallel)
        options = {"place": place, "weights": weights, "parallel": parallel}
        return advantages.optimal_token_baseline(returns, stats, batch.group_ids, batch, **options)

    got = run(of["rewards"], stats, batch)
    np.testing.assert_allclose(
        got, np.where(batch.loss_mask > 0, of["advantages"], 0), rtol=2e-5, atol=2e-6
    )


def test_what_the_baseline_sums_over_devices():
    """With rows twice as long, 4 bytes more for each token of the step, and no array of places
    times groups.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")

    def sent(length):
        layout = {"row_length": length, "rows": 8, "num_segments": 6, "parallel": parallel}
        batch = RolloutBatch.from_samples(step_of(3), **layout)
        stats = TokenStats(jnp.asarray(batch.returns), sum_p2=jnp.exp(jnp.asarray(batch.returns)))

        def run(batch):
            returns = jnp.asarray(batch.advantages)
            return advantages.optimal_token_baseline(
                returns, stats, batch.group_ids, batch, parallel=parallel
            )

        return sum(c.bytes for c in audit(run, batch).collectives)

    assert sent(256) - sent(128) == 4 * 8 * 128


@pytest.mark.parametrize("place", ["position", "loss_token"])
def test_equal_returns_have_no_advantage_but_behind_all_others(place):
    """0.1 minus its own weighted mean is 1e-8 because of rounding, which `whiten` would make 1."""
    batch = packed([[1] * 7, [1, 0, 1, 1, 0], [1, 1]], [3, 3, 3], None)
    rng = np.random.default_rng(0)
    log_probs = -rng.exponential(size=batch.tokens.shape).astype(np.float32)
    stats = TokenStats(jnp.asarray(log_probs), sum_p2=jnp.exp(jnp.asarray(log_probs)))
    returns = jnp.full(batch.tokens.shape, 0.1)

    @quick_jit
    def run(returns, stats, batch):
        given = (returns, stats, batch.group_ids, batch)
        return {
            singletons: advantages.optimal_token_baseline(
                *given, place=place, singletons=singletons
            )
            for singletons in ("reward", "zero")
        }

    found = run(returns, stats, batch)
    got = found["reward"]
    behind = 4 if place == "position" else 3
    row, column = np.nonzero(
        (batch.positions >= behind) & (batch.loss_mask > 0) & (np.asarray(got) != 0)
    )
    assert len(row) == 7 - behind
    expected = np.zeros(batch.tokens.shape, np.float32)
    expected[row, column] = 0.1
    np.testing.assert_array_equal(got, expected)
    assert not np.any(found["zero"])


def test_a_sample_without_a_group_has_no_part():
    batch = packed([[1] * 4, [1] * 3, [1] * 2], [3, 3, 3], None)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.random(batch.tokens.shape), jnp.float32)
    stats = TokenStats(-x, sum_p2=jnp.exp(-x))
    ids = np.where(batch.sample_ids == 2, -1, batch.group_ids)
    rest = dataclasses.replace(
        batch,
        loss_mask=np.asarray(advantages.spread((batch.sample_ids != 2).astype(np.float32), batch)),
        group_ids=ids,
    )
    left_out = dataclasses.replace(batch, group_ids=ids)
    of = quick_jit(lambda b: advantages.optimal_token_baseline(x, stats, b.group_ids, b))
    np.testing.assert_array_equal(of(left_out), of(rest))
    assert np.any(np.asarray(of(batch)) != np.asarray(of(left_out)))


def test_refusals():
    batch = packed([[1, 1], [1]], [3, 3], None)
    x = jnp.zeros(batch.tokens.shape)
    stats = TokenStats(x, sum_p2=x)
    given = {"returns": x, "stats": stats, "group_ids": batch.group_ids, "batch": batch}
    refused = {
        "stats: got ArrayImpl, expected TokenStats": {"stats": x},
        "stats.sum_p2: got None, expected f32": {"stats": TokenStats(x)},
        "stats.log_probs: got shape": {"stats": TokenStats(x[:1], sum_p2=x)},
        "weights: got shape": {"weights": x[:1]},
        "place: got 'turn', expected one of 'position', 'loss_token'": {"place": "turn"},
        "singletons: got 'one'": {"singletons": "one"},
        "epsilon: got -1, expected a finite number of at least 0": {"epsilon": -1},
        "group_ids: got shape": {"group_ids": batch.group_ids[:1]},
        "group_ids: got dtype float32, expected integers": {
            "group_ids": jnp.ones(batch.group_ids.shape)
        },
    }
    for message, wrong in refused.items():
        with pytest.raises((TypeError, ValueError), match=message):
            advantages.optimal_token_baseline(**given | wrong)
