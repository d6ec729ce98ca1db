"""A*-PO against the oracle, and with the values of the page: the best policy near the reference
has a loss of 0.
"""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle.preference as truth
import pytest
from policy_steps import quick_jit, with_garbage
from preference_steps import agree, oracle_of, step_of

from jaxppo import RolloutBatch, Sample, TokenStats, finalize_metrics, loss_from_stats
from jaxppo.contrib.a2po import A2PO
from sharding import make_parallel_mesh

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
LOSS = A2PO(beta=0.3)


def of_page():
    """The page's function `optimal_values`."""
    lines = re.search(r">>> def optimal_values.*?(?=>>>)", PAGE, re.DOTALL)[0].splitlines()
    found = {"jax": jax, "jnp": jnp}
    exec("\n".join(line[4:] for line in lines), found)
    return found["optimal_values"]


@pytest.mark.parametrize(("mesh", "layout"), [(None, "contiguous"), ("dp=2,cp=2,tp=2", "zigzag")])
def test_the_oracle(mesh, layout):
    """One sample of a prompt is enough; one has no loss token, and no reward."""
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    samples = [dataclasses.replace(s, group_id=None) for s in step_of(3)]
    samples[4] = dataclasses.replace(
        samples[4], reward=None, loss_mask=[0] * len(samples[4].tokens)
    )
    batch = RolloutBatch.from_samples(
        samples, row_length=24, rows=8, num_segments=6, parallel=parallel
    )

    def run(batch):
        def fn(x):
            return loss_from_stats(TokenStats(x), batch, LOSS, parallel=parallel)

        (loss, found), gradient = jax.value_and_grad(fn, has_aux=True)(batch.returns)
        return loss, gradient, finalize_metrics(found)

    got = quick_jit(run)(with_garbage(batch, np.nan))
    agree(truth.a2po(oracle_of(samples), beta=0.3), batch, len(samples), got)


def responses(log_p, reference, advantage):
    """A response of one token for each token of the vocabulary, and the gradients of their
    losses by log p.
    """
    samples = [
        Sample([9, i], 1, reward=float(a), ref_log_probs=[float(q)])
        for i, (a, q) in enumerate(zip(advantage, reference, strict=True))
    ]
    batch = RolloutBatch.from_samples(samples, row_length=2, rows=len(samples))
    places = np.asarray(batch.sample_ids)[:, 0]
    own = jnp.stack([jnp.asarray(log_p, jnp.float32)[places], jnp.zeros(len(samples))], axis=1)

    def loss(x):
        return loss_from_stats(TokenStats(x), batch, A2PO(beta=0.5))[0]

    value, slopes = jax.value_and_grad(loss)(own)
    return float(value), np.asarray(slopes)[np.argsort(places), 0] * len(samples)


def test_the_best_policy_has_a_loss_of_zero():
    """It is the reference times exp((r - V*) / beta), for the page's V* of samples that are all
    tokens once.

    Elsewhere the gradient of the loss, weighed by the policy's probabilities, leads to it: 20 steps
    come closer.
    """
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
    reference = np.full(5, -np.log(5))
    best = float(of_page()(jnp.asarray(rewards, jnp.float32)[None], beta=0.5)[0])
    np.testing.assert_allclose(best, 0.5 * np.log(np.mean(np.exp(rewards / 0.5))), rtol=1e-6)
    log_p = reference + (rewards - best) / 0.5
    np.testing.assert_allclose(np.exp(log_p).sum(), 1, rtol=1e-6)
    value, slopes = responses(log_p, reference, rewards - best)
    assert value < 1e-12
    assert np.abs(slopes).max() < 1e-6

    def step(z):
        """One of the logits, along the expected gradient over the policy's own tokens."""
        own = z - np.log(np.exp(z).sum())
        p = np.exp(own)
        _, slopes = responses(own, reference, rewards - best)
        return z - 5 * (p * slopes - p * (p * slopes).sum())

    z = reference
    for _ in range(20):
        z = step(z)
    p = np.exp(z) / np.exp(z).sum()
    np.testing.assert_allclose(p, np.exp(log_p), atol=1e-3)
    assert np.abs(np.exp(reference) - np.exp(log_p)).max() > 0.2


def test_what_is_missing_is_named():
    batch = RolloutBatch.from_samples(
        [Sample([1, 2], 1, reward=1.0, ref_log_probs=[-1.0])], row_length=2
    )
    stats = TokenStats(jnp.full((1, 2), -1.0))
    for name in ("rewards", "ref_log_probs"):
        with pytest.raises(ValueError, match=f"batch.{name}: got None, expected"):
            loss_from_stats(stats, dataclasses.replace(batch, **{name: None}), A2PO())
    with pytest.raises(ValueError, match="beta: got 0, expected a finite number above 0"):
        A2PO(0)
    nothing = dataclasses.replace(batch, rewards=jnp.full((1, 1), jnp.nan))
    assert np.isnan(loss_from_stats(stats, nothing, A2PO())[0])
