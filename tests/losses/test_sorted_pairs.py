"""AOT: the oracle sorts in float64; values and gradients wherever the pairs lie."""

import dataclasses

import jax
import numpy as np
import pytest
from policy_steps import by_sample
from preference_steps import MESHES, oracle_of, step_of

from jaxppo import RolloutBatch, TokenStats, loss_from_stats
from jaxppo.losses import preference
from sharding import make_parallel_mesh


def pairs_of(samples):
    """(chosen, rejected) of each group, by their places."""
    groups = {}
    for i, s in enumerate(samples):
        groups.setdefault(s.group_id, []).append(i)
    return [sorted(x, key=lambda i: -samples[i].reward) for x in groups.values()]


def truth(log_probs, samples, beta, e, ranks):
    """TRL's formulas: both sides sorted over the pairs of the step; `log_probs` `[samples, 16]`."""
    mask = np.array([s.mask > 0 for s in samples])
    own = np.where(mask, log_probs, 0).sum(axis=1)
    ref = np.array([s.at("ref_log_probs").sum() for s in samples])
    c, r = np.transpose(pairs_of(samples))
    sides = (
        (own[c] - own[r], ref[c] - ref[r])
        if ranks == "pairs"
        else (own[c] - ref[c], own[r] - ref[r])
    )
    d = beta * (np.sort(sides[0]) - np.sort(sides[1]))
    return np.mean((1 - e) * np.log1p(np.exp(-d)) + e * np.log1p(np.exp(d)))


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("ranks", ["pairs", "responses"])
def test_the_oracle(ranks, mesh):
    samples = step_of(3)
    parallel = mesh and make_parallel_mesh(mesh, context_layout=MESHES[mesh])
    batch = RolloutBatch.from_samples(
        samples, row_length=24, rows=8, num_segments=6, parallel=parallel
    )
    loss = preference.AOT(0.3, 0.1, ranks)

    @jax.jit
    def run(x):
        return jax.value_and_grad(
            lambda x: loss_from_stats(TokenStats(x), batch, loss, parallel=parallel)[0]
        )(x)

    value, gradient = run(batch.returns)
    theirs = oracle_of(samples)
    own = np.array([s.log_probs for s in theirs])
    np.testing.assert_allclose(value, truth(own, theirs, 0.3, 0.1, ranks), rtol=1e-5)
    by = by_sample(gradient, batch, len(samples))
    for i, s in enumerate(theirs):
        at = np.argmax(s.mask > 0)
        step = np.zeros_like(own)
        step[i, at] = 1e-6
        slope = (
            truth(own + step, theirs, 0.3, 0.1, ranks) - truth(own - step, theirs, 0.3, 0.1, ranks)
        ) / 2e-6
        np.testing.assert_allclose(by[i][s.mask > 0], slope, rtol=1e-4, atol=1e-7)


def test_one_pair_is_dpo():
    samples = [s for s in step_of(3) if s.group_id == 7]
    batch = RolloutBatch.from_samples(samples, row_length=24)
    found = [
        loss_from_stats(TokenStats(batch.returns), batch, x)[0]
        for x in (preference.AOT(), preference.DPO())
    ]
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_a_part_of_a_step_is_refused():
    batch = RolloutBatch.from_samples(step_of(3), row_length=24, rows=8, num_segments=6)
    part = dataclasses.replace(batch, micro_batches=2)
    with pytest.raises(
        ValueError, match="batch: got one of 2 micro-batches, expected a whole step"
    ):
        loss_from_stats(TokenStats(batch.returns), part, preference.AOT())
    with pytest.raises(ValueError, match="ranks: got 'groups'"):
        preference.AOT(ranks="groups")
