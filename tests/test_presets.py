"""Presets: each is a valid config that a batch runs through, and says where it comes from."""

import jax
import numpy as np
import pytest
from policy_steps import covariance_of, loss_of, step_of

from jaxppo import RolloutBatch, TokenStats, presets


@pytest.mark.parametrize("name", presets.__all__)
def test_preset(name):
    preset = getattr(presets, name)
    args = (12.0,) if name == "dr_grpo" else ()
    assert "https://" in preset.__doc__
    assert preset(*args, entropy_coef=0.5).entropy_coef == 0.5
    config = preset(*args)
    batch = RolloutBatch.from_samples(step_of(0), row_length=24, rows=4, num_segments=9)
    covariance = covariance_of(batch, config, None)
    fn = lambda x: loss_of(TokenStats(x), batch, config, None, covariance=covariance)[0]  # noqa: E731
    loss, gradient = jax.value_and_grad(fn)(batch.returns)
    assert np.isfinite(loss)
    assert np.any(gradient)
    assert np.all(np.isfinite(gradient))
