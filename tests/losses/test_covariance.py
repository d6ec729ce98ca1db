"""The step-wide choice of tokens of ClipCov and KLCov."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import by_sample, config_of, quick_jit, step_of

from jaxppo import PolicyLossConfig, RolloutBatch, TokenStats
from jaxppo.losses.covariance import covariance_mask
from jaxppo.policy_losses import ClipCov, KLCov
from sharding import make_parallel_mesh

KEY = jax.random.key(3)


def packed(seed, **options):
    return RolloutBatch.from_samples(
        step_of(seed, 20), num_segments=20, **{"row_length": 24, "rows": 8} | options
    )


@functools.cache
def compiled(config, mesh):
    """A compiled function of the batch and the key: the tokens that the config selects."""
    parallel = mesh and make_parallel_mesh(mesh)

    def run(batch, key):
        return covariance_mask(TokenStats(batch.returns), batch, config, key, parallel)

    return quick_jit(run)


def picked(config, batch, mesh=None, key=KEY):
    return np.asarray(compiled(config, mesh)(batch, key))


def covariances(batch):
    on = batch.loss_mask > 0

    def center(x):
        return x - x[on].astype(np.float64).mean()

    return np.where(on, center(batch.advantages) * center(batch.returns), np.nan)


def test_kl_cov_takes_the_highest():
    batch = packed(0)
    config = config_of(KLCov(0.2))
    found = picked(config, batch)
    c = covariances(batch)
    wanted = int(0.2 * batch.loss_mask.sum())
    assert found.sum() == wanted
    np.testing.assert_array_equal(found > 0, c >= np.sort(c[batch.loss_mask > 0])[-wanted])


def test_clip_cov_takes_random_ones_of_the_candidates():
    batch = packed(0)
    config = config_of(ClipCov(0.2, 0.28, 0.08, 0.1, 2.0))
    found, other = (picked(config, batch, key=jax.random.key(i)) for i in (0, 1))
    c = covariances(batch)
    r = np.exp(batch.returns - batch.old_log_probs)
    binding = ((batch.advantages > 0) & (r > 1.28)) | ((batch.advantages < 0) & (r < 0.8))
    candidates = (c > 0.1) & (c < 2.0) & ~binding
    wanted = int(0.08 * batch.loss_mask.sum())
    assert 0 < wanted < candidates.sum()
    for mask in (found, other):
        assert mask.sum() == wanted
        assert np.all(candidates[mask > 0])
    assert np.any(found != other)
    everything = picked(
        dataclasses.replace(config, loss=dataclasses.replace(config.loss, share=1.0)), batch
    )
    np.testing.assert_array_equal(everything > 0, candidates)


@pytest.mark.every(2)
@pytest.mark.parametrize("loss", [ClipCov(0.2, 0.28, 0.2, 0.0), KLCov(0.2)])
def test_the_choice_depends_on_the_step_alone(loss):
    config = config_of(loss)
    batch = packed(1)
    expected = by_sample(picked(config, batch), batch, 20)
    for mesh, options in (
        ("dp=8", {}),
        ("dp=2,cp=2,tp=2", {"row_length": 32}),
        ("cp=8", {"row_length": 40, "rows": 6}),
    ):
        again = packed(1, **options)
        np.testing.assert_array_equal(
            by_sample(picked(config, again, mesh), again, 20), expected, err_msg=mesh
        )
    stacked = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
    mask = picked(config, stacked, "dp=2,cp=2,tp=2")
    assert mask.shape == stacked.loss_mask.shape
    np.testing.assert_array_equal(by_sample(mask, stacked, 20), expected)


def test_equal_covariances_are_decided_by_lot():
    batch = packed(2)
    # every covariance is 0 or -0
    constant = dataclasses.replace(batch, advantages=np.ones_like(batch.loss_mask))
    found = picked(config_of(KLCov(0.5)), constant)
    assert found.sum() == int(0.5 * batch.loss_mask.sum())
    on = batch.loss_mask > 0
    low = batch.returns < batch.returns[on].mean()  # the zeros' signs are those of log_prob - mean
    assert 0.2 < found[on & low].mean() < 0.8


def test_bad_input():
    batch = packed(2)
    stats = TokenStats(jnp.asarray(batch.returns))
    with pytest.raises(
        ValueError,
        match=(
            r"config.loss: got PPO\(.*\), expected one that selects tokens, such as ClipCov or"
            r" KLCov"
        ),
    ):
        covariance_mask(stats, batch, PolicyLossConfig(), KEY)
    with pytest.raises(ValueError, match=r"batch.old_log_probs: got None"):
        covariance_mask(
            stats, dataclasses.replace(batch, old_log_probs=None), config_of(KLCov()), KEY
        )
    with pytest.raises(ValueError, match=r"stats.log_probs: got shape"):
        covariance_mask(TokenStats(stats.log_probs[:4]), batch, config_of(KLCov()), KEY)
