"""A teacher that is mixed with the policy: TOP-D's reward, its mean over tokens, and the credit
of the page.
"""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import advantages as truth
from policy_steps import by_sample, quick_jit, step_of, with_garbage

from jaxppo import PolicyLossConfig, RolloutBatch, TokenStats, advantages, policy_loss
from jaxppo.policy_losses import Reinforce
from sharding import make_parallel_mesh

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text()


def of_page():
    """The page's function `trust_region`."""
    lines = re.search(r">>> def trust_region.*?(?=>>>)", PAGE, re.DOTALL)[0].splitlines()
    found = {"advantages": advantages, "jnp": jnp}
    exec("\n".join(line[4:] for line in lines), found)
    return found["trust_region"]


def test_by_hand():
    """p = 0.4 against 0.8, 0.1 and 0: log(0.2 * 2 + 0.8), log(0.2 / 4 + 0.8) and log(0.8), which
    is the lowest.
    """
    own = jnp.log(jnp.full((1, 4), 0.4))
    teacher = jnp.array([[np.log(0.8), np.log(0.1), -np.inf, np.nan]], jnp.float32)
    mask = jnp.array([[1.0, 1.0, 1.0, 0.0]])
    given = jnp.ones((1, 4)), own, teacher, mask
    found = advantages.on_policy_distillation(*given, coef=2.0, alpha=0.2)
    np.testing.assert_allclose(found[0], [*(1 + 2 * np.log([1.2, 0.85, 0.8])), 0], rtol=1e-6)
    alone = advantages.on_policy_distillation(*given, coef=2.0)[0]
    np.testing.assert_allclose(alone, [1 + 2 * np.log(2), 1 - 2 * np.log(4), -np.inf, 0], rtol=1e-6)


def test_the_mean_over_tokens_leads_to_the_mixture():
    """Weighed by the policy's probabilities, the gradients of all tokens are those of KL(policy
    | mixture), held.
    """
    logits, teacher = np.random.default_rng(0).normal(size=(2, 5))
    p, t = (np.exp(x) / np.exp(x).sum() for x in (logits, teacher))
    log_ratio = np.log(p / (0.3 * t + 0.7 * p))
    expected = p * (log_ratio - p @ log_ratio)  # of sum p log(p / mixture) by the logits
    ids = jnp.arange(1, 6)[None]
    batch = RolloutBatch(ids, ids, ids, 0 * ids, jnp.ones((1, 5)), ids, real_last_targets=True)
    own, theirs = (jnp.asarray(np.log(x), jnp.float32)[None] for x in (p, t))
    pull = advantages.on_policy_distillation(
        jnp.zeros((1, 5)), own, theirs, batch.loss_mask, alpha=0.3
    )
    step = dataclasses.replace(
        batch, advantages=pull, loss_weights=jnp.asarray(p, jnp.float32)[None]
    )
    config = PolicyLossConfig(Reinforce(), aggregation="token_sum", ratio_to="current")

    def loss(x):
        return policy_loss(TokenStats(jax.nn.log_softmax(x)[None]), step, config)[0]

    found = jax.grad(loss)(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize(("mesh", "layout"), [(None, "contiguous"), ("dp=2,cp=2,tp=2", "zigzag")])
def test_the_credit_of_the_page(mesh, layout):
    """Before it is whitened: a token's reward and the mean of those after it, over holes in the
    mask.
    """
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    samples = step_of(6)
    batch = RolloutBatch.from_samples(
        samples, row_length=24, rows=4, num_segments=9, parallel=parallel
    )
    batch = with_garbage(batch, np.nan)
    found = quick_jit(lambda b: of_page()(b, b.ref_log_probs, parallel=parallel))(batch)
    expected = []
    for s in samples:
        own, teacher = (np.float64(np.float32(x)) for x in (s.rollout_log_probs, s.ref_log_probs))
        mask = np.asarray(s.loss_mask)[s.start :]
        expected.append(truth.trust_region_credit(own, teacher, mask, 0.2))
    on = np.concatenate([np.asarray(s.loss_mask)[s.start :] > 0 for s in samples])
    flat = np.concatenate(expected)
    whitened = np.where(on, (flat - flat[on].mean()) / flat[on].std(ddof=1), 0)
    got = by_sample(found, batch, len(samples))
    got = np.concatenate([got[i, s.start - 1 : len(s.tokens) - 1] for i, s in enumerate(samples)])
    np.testing.assert_allclose(got, whitened, rtol=1e-4, atol=1e-5)


def test_a_share_out_of_its_range_is_refused():
    given = [-jnp.ones((1, 2))] * 3
    for alpha in (0.0, -0.1, 1.5):
        with pytest.raises(
            ValueError,
            match=f"alpha: got {alpha}, expected a finite number above 0 and of at most 1",
        ):
            advantages.on_policy_distillation(*given, jnp.ones((1, 2)), alpha=alpha)
