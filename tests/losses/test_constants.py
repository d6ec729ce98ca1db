"""Arrays that a loss reads beside model, batch and coefficients get no gradient, in whatever way
they are read.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import quick_jit

from jaxppo import (
    KL,
    SFT,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    loss_from_hidden,
    loss_from_stats,
    policy_loss,
)
from jaxppo.contrib.draft import Draft, draft_loss
from jaxppo.losses import Part, ReferenceKL, preference
from jaxppo.losses.mtp import MTP, mtp_loss
from jaxppo.policy_losses import GSPO

RNG = np.random.default_rng(0)
T, H, V = 12, 3, 7
OF_TOKENS = (
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "values",
    "returns",
)


def sample(group, reward, length):
    arrays = {name: -0.1 - np.abs(RNG.normal(size=length)) for name in OF_TOKENS}
    return Sample(
        [group, group, *RNG.integers(0, V, length)], 2, reward=reward, group_id=group, **arrays
    )


BATCH = RolloutBatch.from_samples(
    [sample(0, 1.0, 4), sample(0, 0.2, 3), sample(1, 0.5, 2), sample(1, 2.0, 4)], row_length=T
)
R = BATCH.loss_mask.shape[0]
KERNEL = jnp.asarray(RNG.normal(size=(H, V)), jnp.float32)


def gspo(x, batch, coef):
    kl = KL(coef, "k1", importance="sequence", compares="current/rollout")
    config = PolicyLossConfig(
        GSPO(0.1, coef), kl=kl, off_policy=OffPolicyConfig(weights="geometric")
    )
    return policy_loss(TokenStats(x[..., 0]), batch, config)


def joint(x, batch, coef):
    parts = {"gspo": Part(PolicyLossConfig(GSPO()), coef), "kl": ReferenceKL()}
    parts["sft"] = Part(SFT(), coef, weights="own")
    return loss_from_hidden(
        x, KERNEL, dataclasses.replace(batch, extras={"own": jnp.full((R, T), coef)}), parts
    )


def simpo(x, batch, coef):
    return loss_from_stats(TokenStats(x[..., 0]), batch, preference.SimPO(beta=coef, nll_coef=coef))


def reward_model(x, batch, coef):
    return loss_from_stats(x[..., 0], batch, preference.BradleyTerry(margin=coef))


LOSSES = {
    "gspo": gspo,
    "joint": joint,
    "simpo": simpo,
    "reward model": reward_model,
    "value": lambda x, batch, _: loss_from_stats(x[..., 0], batch, Value()),
    "mtp": lambda x, batch, coef: mtp_loss(x[None], KERNEL, batch, MTP(coef=coef)),
    "draft": lambda x, batch, coef: draft_loss(
        x[None], KERNEL, x, KERNEL, batch, Draft(objective="likelihood", coef=coef)
    ),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", LOSSES)
def test_batches_and_coefficients_are_constants(name):
    arrays = {
        name: jnp.asarray(getattr(BATCH, name)) for name in ("loss_mask", "rewards", *OF_TOKENS)
    }

    def run(x, arrays, coef):
        return LOSSES[name](x, dataclasses.replace(BATCH, **arrays), coef)[0]

    x = -jnp.abs(jax.random.normal(jax.random.key(0), (R, T, H)))
    by_model, *others = quick_jit(jax.grad(run, (0, 1, 2)))(x, arrays, jnp.float32(0.3))
    assert np.isfinite(by_model).all()
    assert np.any(by_model)
    for path, gradient in jax.tree.leaves_with_path(others):
        assert not np.any(gradient), path
