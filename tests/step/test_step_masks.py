"""Masks over a step's tokens, by log-probs or entropies, compared with sorting, on any mesh."""

import dataclasses
import functools
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
    "micro-batches on a mesh": {
        "rows": 4,
        "micro_batches": 3,
        "mesh": "dp=2,cp=4,tp=1",
        "layout": "zigzag",
    },
}


def packed(mesh=None, layout="contiguous", rows=8, **options):
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    batch = RolloutBatch.from_samples(
        step_of(0, 20), num_segments=20, row_length=32, rows=rows, parallel=parallel, **options
    )
    return with_garbage(batch, np.nan), parallel


def loss_tokens(batch, *names):
    mask = by_sample(batch.loss_mask, batch, 20) > 0
    return mask, [
        np.where(mask, by_sample(getattr(batch, name), batch, 20), 0).astype(np.float64)
        for name in names
    ]


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
    ids = jnp.array([[1] * 6])
    old = jnp.array([[-1.0, -1.0, -1.0, -1.0, -jnp.inf, -jnp.inf]])
    rollout = old - jnp.array([[0.0, 0.5, 0.5, 0.5, 0.0, 0.0]])
    batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 6)), jnp.array([[0]]), old_log_probs=old)
    batch = dataclasses.replace(batch, rollout_log_probs=rollout.at[0, 5].set(-1.0))
    # one of 0.25 more would leave 0.125
    assert second_moment_mask(batch, 0.15).tolist() == [[1, 0, 0, 0, 0, 0]]
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


@pytest.mark.parametrize("traced", [False, True])
def test_a_share_keeps_exactly_its_tokens(traced):
    """Once one token too many went for 0.4, 0.7, 0.9 and 0.95: 10 (1 - 0.4) is 6.0000002 in f32."""
    wrong = []
    for n in (1, 2, 10, 11, 21, 41, 60):
        ids = np.ones((1, n), np.int32)
        mask = np.ones((1, n), np.float32)
        batch = RolloutBatch(ids, ids, ids, ids, mask, np.zeros((1, 1), np.int32))
        entropy = np.arange(n, dtype=np.float32)[None]
        run = quick_jit(functools.partial(top_entropy_mask, entropy, batch))
        for twentieths in range(1, 21):
            share = twentieths / 20
            found = run(share) if traced else top_entropy_mask(entropy, batch, share)
            found = np.asarray(found)
            # n - ceil((n - 1)(1 - share)), in integers
            kept = n + -(n - 1) * (20 - twentieths) // 20
            wrong += [(n, share, float(found.sum()))] * (
                found.tolist() != [[i >= n - kept for i in range(n)]]
            )
    assert not wrong


def test_a_share_of_many_tokens():
    """An f32 holds no share of a million tokens to a token: the fraction does."""
    n = 1_000_001
    ids = jnp.ones((1, n), jnp.int32)
    batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, n)), jnp.array([[0]]))
    entropy = jnp.arange(n, dtype=jnp.float32)[None]
    for share, kept in ((0.2, 200_001), (0.95, 950_001), (1 / 3, 333_334)):
        assert top_entropy_mask(entropy, batch, share).sum() == kept


def test_log_probs_are_no_entropies():
    """Once the mask kept the likeliest tokens."""
    batch, _ = packed()
    assert np.isnan(top_entropy_mask(jnp.asarray(batch.old_log_probs), batch)).any()


def test_the_sampler_is_at_most_0_and_unsound_entries_keep_nothing():
    """The drift of 0.1 above 0 is 0, not 0.01; an entry that is no log-prob makes the mask NaN
    there.
    """
    ids = jnp.array([[1] * 3])
    old = jnp.array([[0.0, -1.0, -1.0]])
    batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 3)), jnp.array([[0]]), old_log_probs=old)
    batch = dataclasses.replace(batch, rollout_log_probs=jnp.array([[0.1, -1.001, -1.2]]))
    assert second_moment_mask(batch, 0.001).tolist() == [[1, 1, 0]]
    for unsound in (np.nan, np.inf, 0.5):
        spoilt = dataclasses.replace(
            batch, rollout_log_probs=batch.rollout_log_probs.at[0, 1].set(unsound)
        )
        assert np.isnan(second_moment_mask(spoilt, 0.001)).tolist() == [[False, True, False]]


def test_an_entropy_that_is_not_finite_makes_the_loss_nan():
    """Once it was taken as the highest of all, and the loss was finite."""
    ids = jnp.array([[1, 1, 1, 1]])
    one = jnp.array([[-1.0, -1.0, -1.0, -1.0]])
    mask = jnp.array([[1.0, 1.0, 1.0, 0.0]])
    batch = RolloutBatch(
        ids,
        ids,
        ids,
        jnp.arange(4)[None],
        mask,
        jnp.array([[0]]),
        advantages=one,
        old_log_probs=one,
    )

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
    part = dataclasses.replace(
        batch, advantages=np.where(batch.loss_mask > 0, batch.advantages, 0) * stays
    )
    (_, every, of_all), (_, some, of_part) = (whole(config, metrics=True)(b) for b in (batch, part))
    assert float(of_all["kl"].value) == float(of_part["kl"].value)
    changed = np.asarray(every[0] != some[0])
    assert 0 < changed.sum() < batch.loss_mask.sum()
    assert not np.any(changed & (np.asarray(stays) > 0))


def test_bad_input():
    batch, _ = packed()
    with pytest.raises(ValueError, match="bound: got 0, expected a finite number above 0"):
        second_moment_mask(batch, 0)
    with pytest.raises(
        ValueError, match=r"batch.rollout_log_probs: got None, expected f32\[R, T\]"
    ):
        second_moment_mask(dataclasses.replace(batch, rollout_log_probs=None))
    with pytest.raises(ValueError, match=r"share: got 0\.0, expected a finite number above 0"):
        top_entropy_mask(jnp.asarray(batch.values), batch, 0.0)
    with pytest.raises(
        ValueError, match=r"entropy: got shape \(1, 2\), expected that of batch.loss_mask"
    ):
        top_entropy_mask(jnp.ones((1, 2)), batch)
