"""The recipe of FIPO, as the page has it: its weights and its loss against float64 numpy, in any
packing and layout.
"""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import OracleSample
from oracle import policy_loss as oracle_loss
from policy_steps import by_sample, step_of

from jaxppo import RolloutBatch, TokenStats, advantages, policy_loss, presets
from sharding import make_parallel_mesh

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text()


def of_page():
    """The page's function `look_ahead`."""
    lines = re.search(r">>> def look_ahead.*?(?=>>>)", PAGE, re.DOTALL)[0].splitlines()
    found = {"advantages": advantages, "jnp": jnp, "dataclasses": dataclasses}
    exec("\n".join(line[4:] for line in lines), found)
    return found["look_ahead"]


def weights_of(d, advantage, mask):
    """ms-swift 4.6: the sum over later places, masked ones adding nothing; clip(exp, 1, 1.2),
    then to [0.8, 1].
    """
    found = np.zeros(len(d))
    for t in np.flatnonzero(mask):
        ahead = sum(2 ** (-(k - t) / 32) * d[k] for k in range(t, len(d)) if mask[k])
        found[t] = np.clip(np.exp(ahead), 1.0, 1.2)
        if advantage[t] < 0 and np.exp(d[t]) > 4.0:
            found[t] = np.clip(found[t], 0.8, 1.0)
    return found


def tokens_of(batch, x, samples):
    """The values of each sample's loss tokens; token t is predicted at position t - 1."""
    places = by_sample(x, batch, len(samples))
    return [
        places[i, : len(s.tokens) - 1][np.asarray(s.loss_mask)[1:] > 0]
        for i, s in enumerate(samples)
    ]


@pytest.mark.parametrize(("mesh", "layout"), [(None, "contiguous"), ("dp=2,cp=2,tp=2", "zigzag")])
def test_the_recipe(mesh, layout):
    """`returns` stand for the log-probs of the policy that learns; some ratios are above 4 where
    A < 0.
    """
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    samples = step_of(6, count=24)
    rng = np.random.default_rng(0)
    # inside the clip
    near = [np.minimum(s.returns + 0.03 * rng.normal(size=len(s.returns)), -0.01) for s in samples]
    away = [np.asarray(s.old_log_probs) * 1.5 for s in samples]
    old = [x if i % 2 else y for i, (x, y) in enumerate(zip(near, away, strict=True))]
    samples = [dataclasses.replace(s, old_log_probs=x) for s, x in zip(samples, old, strict=True)]
    batch = RolloutBatch.from_samples(
        samples, row_length=24, rows=12, num_segments=9, parallel=parallel
    )

    def loss(x):
        ahead = of_page()(batch, x, parallel)
        return (
            policy_loss(TokenStats(x), ahead, presets.dapo(), parallel=parallel)[0],
            ahead.advantages,
        )

    (value, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(batch.returns)
    far = 0
    inside = []
    weighed = []
    wanted = []
    for sample in samples:
        mask = np.asarray(sample.loss_mask)[sample.start :] > 0
        x, old, a = (
            np.float64(v) for v in (sample.returns, sample.old_log_probs, sample.advantages)
        )
        weights = weights_of(x - old, a, mask)
        inside.append(weights)
        far += int(((a < 0) & (x - old > np.log(4)) & mask).sum())
        weighed.append(np.where(mask, a * weights, 0)[mask])
        wanted.append(
            OracleSample(mask * 1.0, log_probs=x, old_log_probs=old, advantages=a * weights)
        )
    assert far > 0
    assert any(np.any((x > 1) & (x < 1.2)) for x in inside)
    np.testing.assert_allclose(
        np.concatenate(tokens_of(batch, found, samples)), np.concatenate(weighed), rtol=1e-5
    )
    expected = oracle_loss(wanted, {"loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}})
    np.testing.assert_allclose(value, expected.loss, rtol=1e-5)
    slopes = [y[sample.here] for sample, y in zip(wanted, expected.by_log_probs, strict=True)]
    got = np.concatenate(tokens_of(batch, gradient, samples))
    np.testing.assert_allclose(got, np.concatenate(slopes), rtol=1e-4, atol=1e-7)
