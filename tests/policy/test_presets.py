"""Presets: each is a valid config that a batch runs through, and says where it comes from."""

import dataclasses

import jax
import numpy as np
import pytest
from policy_steps import loss_of, selected_of, step_of

from jaxppo import RolloutBatch, TokenStats, presets


@pytest.mark.every(9)
@pytest.mark.parametrize("name", presets.__all__)
def test_preset(name):
    preset = getattr(presets, name)
    args = {
        "dr_grpo": (12,),
        "sequence_masked_importance_sampling": (0.5, 2.0),
        "tinker": ("ppo",),
    }.get(name, ())
    assert "https://" in preset.__doc__
    config = preset(*args)
    assert dataclasses.replace(config, entropy_coef=0.5).entropy_coef == 0.5
    batch = RolloutBatch.from_samples(step_of(0), row_length=24, rows=4, num_segments=9)
    selected = selected_of(batch, config, None)

    def fn(x):
        return loss_of(TokenStats(x), batch, config, None, selected=selected)[0]

    loss, gradient = jax.value_and_grad(fn)(batch.returns)
    assert np.isfinite(loss)
    assert np.any(gradient)
    assert np.all(np.isfinite(gradient))
