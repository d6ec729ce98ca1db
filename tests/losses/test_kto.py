"""KTO: desirable and undesirable samples without pairs, and the reference point of a step."""

import dataclasses

import jax
import numpy as np
import oracle.preference as truth
import pytest
from preference_steps import check, oracle_of, step_of, whole

from jaxppo import (
    RolloutBatch,
    TokenStats,
    compute_log_probs,
    explain_broken_rules,
    loss_from_stats,
)
from jaxppo.losses import preference
from sharding import make_parallel_mesh


def test_kto_wants_no_pairs():
    samples = [dataclasses.replace(s, group_id=None) for s in step_of(5)[:-3]]
    batch = RolloutBatch.from_samples(samples, row_length=24, rows=8, num_segments=6)
    check("kto", samples, batch, whole("kto")(batch))


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_a_reward_that_says_nothing_makes_kto_nan(mesh):
    """If NaN counted as not above 0, the sample would be an undesirable one."""
    batch = RolloutBatch.from_samples(
        step_of(5),
        row_length=24,
        rows=8,
        num_segments=6,
        parallel=mesh and make_parallel_mesh(mesh),
    )
    rewards = np.where(batch.sample_ids == 3, np.nan, batch.rewards)
    loss, gradient, found = whole("kto", mesh)(dataclasses.replace(batch, rewards=rewards))
    assert np.isnan(loss)
    assert np.isnan(gradient).any()
    (text,) = explain_broken_rules(found["broken_rules"])
    assert text.startswith("sample_rewards")
    # of a sample that is not there a reward may be anything
    loss, *_ = whole("kto", mesh)(
        dataclasses.replace(batch, rewards=np.where(batch.sample_ids < 0, np.nan, batch.rewards))
    )
    assert np.isfinite(loss)


def test_kto_reference_point():
    """The step's micro-batches are uneven: the mean of the parts' means is another number.

    Below 0 it is 0.
    """
    samples = step_of(7)
    lower = {
        name: [np.subtract(getattr(s, name), 1) for s in samples]
        for name in ("returns", "ref_log_probs")
    }
    samples = [
        dataclasses.replace(s, **{name: x[i] for name, x in lower.items()})
        for i, s in enumerate(samples)
    ]  # so that what is above the reference is a log-prob too
    mixed = preference.mismatched_samples(samples)
    assert [list(x.tokens[: x.start]) for x in mixed] == [
        list(x.tokens[: x.start]) for x in samples
    ]
    assert not any(list(x.tokens) == list(y.tokens) for x in mixed for y in samples)
    parts = [samples[:9], samples[9:]]
    batches = [RolloutBatch.from_samples(x, row_length=24, rows=4, num_segments=6) for x in parts]
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)

    def score(up, batch):
        return TokenStats(batch.returns + up)

    for up in (0.3, -0.3):
        stats = jax.jit(lambda up: compute_log_probs(score, up, stacked))(up)
        moved = [dataclasses.replace(s, returns=np.add(s.returns, up)) for s in samples]
        expected = truth.reference_point(oracle_of(moved))
        assert (expected > 0) == (up > 0)
        for mesh in (None, "dp=2,cp=2,tp=2"):
            parallel = mesh and make_parallel_mesh(mesh)
            found = preference.kto_reference_point(stats, stacked, parallel=parallel)
            np.testing.assert_allclose(found, expected, rtol=1e-5)
    empty = dataclasses.replace(stacked, loss_mask=np.zeros_like(stacked.loss_mask))
    assert np.isnan(preference.kto_reference_point(stats, empty))
    impossible = np.array(stats.log_probs)
    impossible[tuple(np.argwhere(stacked.loss_mask > 0)[0])] = -np.inf
    assert np.isnan(preference.kto_reference_point(TokenStats(impossible), stacked))
    # traced, as a step has it
    batch = RolloutBatch.from_samples(samples, row_length=24, rows=8, num_segments=6)

    def run(z):
        return loss_from_stats(TokenStats(batch.returns), batch, preference.KTO(z))[0]

    np.testing.assert_allclose(jax.jit(run)(0.4), run(0.4), rtol=1e-6)
    assert float(jax.jit(jax.grad(run))(0.4)) == 0  # a constant
