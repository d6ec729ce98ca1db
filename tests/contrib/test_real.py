"""REAL against the oracle, for groups of unequal sizes anywhere in the step; groups that are cut
or one-sided.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle.preference as truth
import pytest
from policy_steps import by_sample, quick_jit, with_garbage
from preference_steps import agree, oracle_of

from jaxppo import (
    Normalizer,
    RolloutBatch,
    Sample,
    TokenStats,
    accumulate_gradients,
    advantages,
    explain_broken_rules,
    finalize_metrics,
    loss_from_stats,
)
from jaxppo.contrib.real import REAL
from jaxppo.losses import preference
from sharding import make_parallel_mesh

COUNT = 14
LOSS = REAL(tau=0.4)


def step_of(seed):
    """Groups of four, four, three and three; the last has bad samples alone.

    `returns` hold the policy's log-probs.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(COUNT):
        prompt = int(rng.integers(1, 4))
        response = int(rng.integers(2, 9))
        mask = np.zeros(prompt + response)
        mask[prompt:] = (rng.random(response) < 0.7) * (i != 5)  # one sample has no loss token
        mask[-1] = i != 5
        own = -0.05 - rng.exponential(1.0, response)
        tokens = rng.integers(0, 50, prompt + response)
        tokens[:prompt] = i % 4
        ids = {"sample_id": i, "group_id": 7 * (i % 4), "rollout_id": 7 * (i % 4)}
        old = np.minimum(own + 0.5 * rng.normal(size=response), -0.01)
        reward = float(i % 3 == 0) * (i % 4 < 3)
        samples.append(
            Sample(
                tokens, prompt, loss_mask=mask, reward=reward, old_log_probs=old, returns=own, **ids
            )
        )
    return samples


def expected_of(samples):
    return truth.real(oracle_of(samples, "old_log_probs"), tau=0.4)


@pytest.mark.parametrize(("mesh", "layout"), [(None, "contiguous"), ("dp=2,cp=2,tp=2", "zigzag")])
def test_the_oracle(mesh, layout):
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    samples = step_of(0)
    order = np.random.default_rng(1).permutation(COUNT)
    options = {"row_length": 24, "rows": 8, "num_segments": 6, "parallel": parallel}
    batch = RolloutBatch.from_samples([samples[i] for i in order], **options)

    def run(batch):
        def fn(x):
            return loss_from_stats(TokenStats(x), batch, LOSS, parallel=parallel)

        (loss, found), gradient = jax.value_and_grad(fn, has_aux=True)(batch.returns)
        return loss, gradient, finalize_metrics(found)

    agree(expected_of(samples), batch, COUNT, quick_jit(run)(with_garbage(batch, np.nan)))


def accumulated(batches):
    normalizer = Normalizer.of(LOSS, batches)
    places = jnp.eye(len(batches.tokens))

    def loss_fn(x, given):
        place, batch, part = given
        own = TokenStats((x * place[:, None, None]).sum(axis=0))
        return loss_from_stats(own, batch, LOSS, normalizer=part)

    (loss, found), gradient = accumulate_gradients(loss_fn, (places, batches, normalizer))(
        jnp.asarray(batches.returns)
    )
    return loss, gradient, finalize_metrics(found)


def test_micro_batches_of_whole_groups_add_up():
    samples = step_of(2)
    batches = preference.micro_batches_of_pairs(samples, 3, row_length=24)
    sizes = [len({*x[x >= 0].tolist()}) for x in np.asarray(batches.group_ids)]
    assert sorted(sizes) == [1, 1, 2]  # a mean of the parts' means is another number
    agree(expected_of(samples), batches, COUNT, quick_jit(accumulated)(batches))


def test_a_group_in_two_micro_batches_is_nan():
    """Each half by itself is a plausible group."""
    samples = step_of(2)
    parts = [samples[:8], samples[8:]]
    batches = [RolloutBatch.from_samples(x, row_length=24, rows=8, num_segments=6) for x in parts]
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    loss, gradient, found = quick_jit(accumulated)(stacked)
    assert np.isnan(loss)
    assert np.isnan(gradient).any()
    assert explain_broken_rules(found["broken_rules"])[0].startswith("loss: expected a finite loss")


def small(rewards=(1.0, 0.0, 0.0, 0.0), rollout_ids=(0, 0, 0, 1)):
    """Four samples in a row: s = 0.25, -0.25 and 0 in one group, -1 in another.

    `returns` hold their log-probs.
    """
    old = [[-1.5, -1.5], [-1.75], [-2.0], [-1.0]]
    own = [[-1.0, -1.5], [-2.0], [-2.0], [-2.0]]
    samples = []
    for i in range(4):
        ids = {"group_id": i // 3, "rollout_id": rollout_ids[i]}
        tokens = [1] * (len(old[i]) + 1)
        samples.append(
            Sample(tokens, 1, reward=rewards[i], old_log_probs=old[i], returns=own[i], **ids)
        )
    return RolloutBatch.from_samples(samples, row_length=9)


def loss_of(batch, loss=None, **changed):
    return loss_from_stats(
        TokenStats(batch.returns), dataclasses.replace(batch, **changed), loss or REAL()
    )


def test_by_hand():
    """(log(1 + x) + log(1 + x + 1)) / 2 with x = exp(-1/2): the second group has a bad sample
    alone.
    """
    loss, metrics = loss_of(small())
    x = math.exp(-0.5)
    np.testing.assert_allclose(loss, (math.log(1 + x) + math.log(2 + x)) / 2, rtol=1e-6)
    assert float(metrics["one_sided"].value) == 0.5


def test_rewards_less_the_mean_of_their_group_are_labels():
    """Rewards of 5, 4 and 4 have the mean 4 1/3: the first is good.

    As they are, all samples are.
    """
    batch = small(rewards=(5.0, 4.0, 4.0, 4.0))
    centred = advantages.dr_grpo(batch.rewards, batch.group_ids)
    np.testing.assert_allclose(loss_of(batch, rewards=centred)[0], loss_of(small())[0], rtol=1e-6)
    assert float(loss_of(batch)[0]) == 0


def test_a_sample_that_is_far_off_is_finite():
    """s / tau = 1000 of a good sample that the policy has lost, and of a bad one that it has
    found.
    """
    samples = []
    for reward, old, own in ((1.0, -0.5, -100.5), (0.0, -100.5, -0.5)):
        values = {"old_log_probs": [old], "returns": [own], "group_id": 0, "rollout_id": 0}
        samples.append(Sample([1, 2], 1, reward=reward, **values))
    batch = RolloutBatch.from_samples(samples, row_length=4)

    def run(x):
        return loss_from_stats(TokenStats(x), batch, REAL(0.1))[0]

    loss, gradient = jax.value_and_grad(run)(jnp.asarray(batch.returns))
    np.testing.assert_allclose(loss, 2000, rtol=1e-5)
    np.testing.assert_allclose(by_sample(gradient, batch, 2)[:, :2], [[-10, 0], [10, 0]], rtol=1e-5)


def test_what_is_missing_is_named():
    batch = small()
    for name in ("rewards", "old_log_probs", "group_ids", "rollout_ids"):
        with pytest.raises(ValueError, match=f"batch.{name}: got None, expected"):
            loss_of(batch, **{name: None})
    with pytest.raises(ValueError, match=r"batch.loss_weights: got an array, expected None"):
        loss_of(batch, loss_weights=batch.loss_mask)
    with pytest.raises(ValueError, match="tau: got 0, expected a finite number above 0"):
        REAL(0)
    assert np.isnan(loss_of(small(rollout_ids=(0, 1, 2, 3)))[0])  # each sample a rollout of its own
