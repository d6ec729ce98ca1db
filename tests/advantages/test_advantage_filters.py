"""Changes of rewards, samples and advantages around an estimator, against numbers worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import RolloutBatch, Sample, advantages
from sharding import make_parallel_mesh

PAIRS = [(7, 1.0), (8, 0.5), (7, 0.0), (9, 1.0), (8, 0.5), (5, 0.0)]
SAMPLES = [Sample([5, 6, 4], response_start=1, group_id=g, reward=r) for g, r in PAIRS]


def test_groups_of_equal_rewards():
    assert [s.group_id for s in advantages.drop_equal_groups(SAMPLES)] == [7, 7]
    kept = advantages.drop_equal_groups(SAMPLES, keep_lone=True)
    assert [(s.group_id, s.reward) for s in kept] == [(7, 1.0), (7, 0.0), (9, 1.0), (5, 0.0)]
    assert advantages.drop_equal_groups(SAMPLES[1:2]) == []
    # a difference of one ulp is one
    near = [dataclasses.replace(SAMPLES[0], reward=r) for r in (1.0, 1.0 + 2**-52)]
    assert advantages.drop_equal_groups(near) == near


def test_what_is_left_is_what_has_advantages():
    batch = RolloutBatch.from_samples(SAMPLES, row_length=24)
    found, kept = np.asarray(advantages.grpo(batch.rewards, batch.group_ids)), advantages.drop_equal_groups(SAMPLES)
    assert [found[batch.sample_ids == i].item() != 0 for i in range(len(SAMPLES))] == [s in kept for s in SAMPLES]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (SAMPLES[0], "samples: got Sample, expected a sequence of Sample"),
        ([dataclasses.replace(SAMPLES[0], reward=None)], r"samples\[0\].reward: got None, expected one for every"),
        ([SAMPLES[0], dataclasses.replace(SAMPLES[0], group_id=None)], r"samples\[1\].group_id: got None"),
    ],
)
def test_samples_that_cannot_be_compared(samples, message):
    with pytest.raises((TypeError, ValueError), match=message):
        advantages.drop_equal_groups(samples)


def test_overlong_penalty():
    """verl's goes on falling beyond the maximal length; the paper's equation ends at -1."""
    lengths = jnp.array([[0, 3, 4, 5], [6, 7, 8, 80]])
    got = advantages.overlong_penalty(lengths, max_length=8, buffer=4, factor=2.0)
    np.testing.assert_array_equal(got, [[0, 0, 0, -0.5], [-1, -1.5, -2, -2]])
    assert not np.signbit(got[0, 0])


def test_bad_lengths():
    lengths = jnp.ones((1, 2))
    for name, wrong in {"max_length": 0, "buffer": 9, "factor": -1.0}.items():
        with pytest.raises(ValueError, match=f"{name}: got {wrong}, expected a finite number"):
            advantages.overlong_penalty(lengths, **{"max_length": 8, "buffer": 4, "factor": 1.0, name: wrong})


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_samples_out_of_a_packed_step(mesh):
    """The overlong filter: a truncated sample carries no loss, and may leave its group's statistics as well."""
    parallel = mesh and make_parallel_mesh(mesh)
    batch = RolloutBatch.from_samples(SAMPLES, row_length=8, rows=4)
    kept = (batch.sample_ids != 2).astype(np.float32)
    loss_mask = advantages.spread(kept, batch, parallel=parallel)
    sample = np.take_along_axis(batch.sample_ids, np.maximum(batch.segment_ids - 1, 0), axis=1)
    assert (batch.loss_mask[sample == 2] > 0).any()
    np.testing.assert_array_equal(loss_mask, np.where(sample == 2, 0, batch.loss_mask))
    ids = np.where(kept, batch.group_ids, -1)
    assert (np.asarray(advantages.rloo(batch.rewards, ids, singletons="reward", parallel=parallel)) != 0).sum() == 2


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_explained_variance(mesh):
    parallel = mesh and make_parallel_mesh(mesh)
    returns = np.array([[3.0, 5.0, 0, 1.0], [7.0, 0, 9.0, 2.0]]) + 1000
    mask = np.array([[1.0, 1, 0, 1], [1, 0, 1, 1]])
    values = np.where(mask > 0, 0.5 * returns - 3, np.nan)
    got = advantages.explained_variance(*map(jnp.asarray, (values, returns, mask)), parallel=parallel)
    np.testing.assert_allclose(got, 0.75, rtol=1e-5)


def test_equal_returns_leave_nothing_to_explain():
    """The variance of 97 equal numbers is 1e-21 in some programs: numbers of 1e20 without the bound."""
    values, mask = jnp.linspace(-1, 1, 97)[None], jnp.ones((1, 97))
    explained = jax.jit(lambda x: advantages.explained_variance(values, jnp.full((1, 97), x), jnp.ones((1, 97), bool)))
    assert all(np.isnan(explained(jnp.float32(value))) for value in (1.2573022, -1.321048, 0.1, 0.0))
    one_apart = jnp.full((1, 97), 1.25).at[0, 0].set(1.5)
    np.testing.assert_allclose(advantages.explained_variance(0 * values, one_apart, mask), 0, atol=1e-6)
