"""Smooth L1 of features: torch's formula in float64, with gradients, on a mesh; NaN where there
is no loss.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import step_of

from jaxppo import RolloutBatch, loss_from_stats
from jaxppo.contrib.features import Features, States
from sharding import make_parallel_mesh


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_smooth_l1(mesh):
    parallel = mesh and make_parallel_mesh(mesh, context_layout="zigzag")
    batch = RolloutBatch.from_samples(
        step_of(1), row_length=24, rows=4, num_segments=9, parallel=parallel
    )
    on = batch.loss_mask[..., None] > 0
    rng = np.random.default_rng(0)
    given = [np.where(on, rng.normal(size=(4, 24, 6)), np.nan).astype(np.float32) for _ in range(2)]

    @jax.jit
    def run(states):
        return jax.value_and_grad(
            lambda s: loss_from_stats(s, batch, Features(0.5), parallel=parallel)[0]
        )(states)

    value, gradient = run(States(*map(jnp.asarray, given)))
    d = np.float64(given[0]) - np.float64(given[1])
    n = batch.loss_mask.sum()
    each = np.where(np.abs(d) < 0.5, d * d, np.abs(d) - 0.25)
    np.testing.assert_allclose(value, np.nansum(each) / 6 / n, rtol=1e-5)
    slope = np.where(np.abs(d) < 0.5, 2 * d, np.sign(d)) / 6 / n
    np.testing.assert_allclose(gradient.draft, np.where(on, slope, 0), rtol=1e-4, atol=1e-8)
    assert not np.any(gradient.policy)


def test_refusals():
    batch = RolloutBatch.from_samples(step_of(1), row_length=24, rows=4, num_segments=9)
    x = jnp.zeros((4, 24, 6))
    with pytest.raises(TypeError, match="stats: got ArrayImpl"):
        loss_from_stats(x, batch, Features())
    with pytest.raises(ValueError, match=r"stats.policy: got shape \(4, 24, 5\)"):
        loss_from_stats(States(x, x[..., :5]), batch, Features())
    with pytest.raises(ValueError, match="beta: got 0"):
        Features(0.0)
