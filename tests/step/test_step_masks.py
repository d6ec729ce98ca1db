"""Masks over a step's tokens, by log-probs or entropies, compared with sorting, on any mesh."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import by_sample, config_of, quick_jit, step_of, whole, with_garbage

from jaxppo import PolicyLossConfig, RolloutBatch, TokenStats, policy_loss
from jaxppo.step.masks import second_moment_mask, top_entropy_mask
from sharding import make_parallel_mesh

PLACES = {
    "one device": {},
    "a mesh": {"mesh": "dp=2,cp=2,tp=2", "layout": "zigzag"},
    "a striped mesh": {"mesh": "dp=1,cp=8,tp=1", "layout": "striped"},
    "micro-batches": {"rows": 4, "micro_batches": 3},
    "micro-batches on a mesh": {"rows": 4, "micro_batches": 3, "mesh": "dp=2,cp=4,tp=1", "layout": "zigzag"},
}


def packed(mesh=None, layout="contiguous", rows=8, **options):
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    batch = RolloutBatch.from_samples(
        step_of(0, 20), num_segments=20, row_length=32, rows=rows, parallel=parallel, **options
    )
    return with_garbage(batch, np.nan), parallel


def loss_tokens(batch, *names):
    mask = by_sample(batch.loss_mask, batch, 20) > 0
    return mask, [np.where(mask, by_sample(getattr(batch, name), batch, 20), 0).astype(np.float64) for name in names]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bound", [1e-9, 2e-3, 5e-3, 1.0])
def test_the_fewest_largest_go(place, bound):
    batch, parallel = packed(**PLACES[place])
    got = quick_jit(lambda b: second_moment_mask(b, bound, parallel=parallel))(batch)
    mask, (old, rollout) = loss_tokens(batch, "old_log_probs", "rollout_log_probs")
    d = np.sort(((rollout - old) ** 2)[mask])
    kept = max(1, max((n for n in range(1, len(d) + 1) if d[:n].mean() < bound), default=0))
    expected = mask & ((rollout - old) ** 2 <= d[kept - 1] * (1 + 1e-5))
    assert {1e-9: kept == 1, 1.0: kept == len(d)}.get(bound, 1 < kept < len(d))
    np.testing.assert_array_equal(by_sample(got, batch, 20) > 0, expected)


def test_tokens_of_one_drift_go_together_and_impossible_ones_first():
    ids, old = jnp.array([[1] * 6]), jnp.array([[-1.0, -1.0, -1.0, -1.0, -jnp.inf, -jnp.inf]])
    rollout = old - jnp.array([[0.0, 0.5, 0.5, 0.5, 0.0, 0.0]])
    batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 6)), jnp.array([[0]]), old_log_probs=old)
    batch = dataclasses.replace(batch, rollout_log_probs=rollout.at[0, 5].set(-1.0))
    assert second_moment_mask(batch, 0.15).tolist() == [[1, 0, 0, 0, 0, 0]]  # one of 0.25 more would leave 0.125
    assert second_moment_mask(batch, 0.2).tolist() == [[1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("share", [1e-3, 0.2, 0.5, 1.0])
def test_the_highest_entropies_stay(place, share):
    batch, parallel = packed(**PLACES[place])
    got = quick_jit(lambda b: top_entropy_mask(b.values, b, share, parallel=parallel))(batch)
    mask, (entropy,) = loss_tokens(batch, "values")
    expected = mask & (entropy >= np.quantile(entropy[mask].astype(np.float32), 1 - share) - 1e-7)
    np.testing.assert_array_equal(by_sample(got, batch, 20) > 0, expected)
    n = mask.sum()
    assert expected.sum() == n - math.ceil((n - 1) * (1 - share) - 1e-9)


def test_an_entropy_that_is_not_finite_makes_the_loss_nan():
    """Once it was taken as the highest of all, and the loss was finite."""
    ids, one = jnp.array([[1, 1, 1, 1]]), jnp.array([[-1.0, -1.0, -1.0, -1.0]])
    mask = jnp.array([[1.0, 1.0, 1.0, 0.0]])
    batch = RolloutBatch(ids, ids, ids, jnp.arange(4)[None], mask, jnp.array([[0]]), advantages=one, old_log_probs=one)

    def loss(entropy):
        stays = top_entropy_mask(entropy, batch, 0.5)
        step = dataclasses.replace(batch, advantages=jnp.where(mask > 0, one, 0) * stays)
        return stays, policy_loss(TokenStats(one), step, PolicyLossConfig())[0]

    for spoilt in (jnp.nan, jnp.inf, -jnp.inf):
        stays, found = loss(jnp.array([[0.1, spoilt, 0.3, jnp.nan]]))
        assert np.isnan(stays).tolist() == [[False, True, False, False]]
        assert np.isnan(found)
    stays, found = loss(jnp.array([[0.1, 0.2, 0.3, jnp.nan]]))
    assert stays.tolist() == [[0, 1, 1, 0]]
    assert np.isfinite(found)


def test_other_tokens_keep_their_penalties_and_the_denominators():
    """20 of 100 tokens keep their policy loss. The KL term stays that of all tokens."""
    batch, _ = packed()
    stays = top_entropy_mask(jnp.asarray(batch.values), batch, 0.2)
    config = config_of("ppo")
    part = dataclasses.replace(batch, advantages=np.where(batch.loss_mask > 0, batch.advantages, 0) * stays)
    (_, every, of_all), (_, some, of_part) = (whole(config, metrics=True)(b) for b in (batch, part))
    assert float(of_all["kl"].value) == float(of_part["kl"].value)
    changed = np.asarray(every[0] != some[0])
    assert 0 < changed.sum() < batch.loss_mask.sum()
    assert not np.any(changed & (np.asarray(stays) > 0))


def test_bad_input():
    batch, _ = packed()
    with pytest.raises(ValueError, match="bound: got 0, expected a finite number above 0"):
        second_moment_mask(batch, 0)
    with pytest.raises(ValueError, match=r"batch.rollout_log_probs: got None, expected f32\[R, T\]"):
        second_moment_mask(dataclasses.replace(batch, rollout_log_probs=None))
    with pytest.raises(ValueError, match=r"share: got 0\.0, expected a finite number above 0"):
        top_entropy_mask(jnp.asarray(batch.values), batch, 0.0)
    with pytest.raises(ValueError, match=r"entropy: got shape \(1, 2\), expected that of batch.loss_mask"):
        top_entropy_mask(jnp.ones((1, 2)), batch)
