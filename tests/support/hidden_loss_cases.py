"""A batch, a head with adapters, and the gradients of `policy_loss_from_hidden` for them."""

import jax
import jax.numpy as jnp

from jaxppo import (
    KL,
    PPO,
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    finalize_metrics,
    policy_loss_from_hidden,
)

R, T, H, V = 8, 64, 16, 1003
# bytes; the second number is too small for a chunk of the one pass
ONE_PASS = 2**30
TWO_PASSES = 2**17
KEYS = jax.random.split(jax.random.key(0), 10)


def normal(i, *shape):
    return jax.random.normal(KEYS[i], shape or (R, T))


def make_batch(mask):
    ids = jnp.ones((R, T), jnp.int32)
    one = jnp.zeros((R, 1), jnp.int32)
    near = -jnp.log(V)
    per_token = {
        "advantages": normal(1),
        "old_log_probs": near + 0.3 * normal(2),
        "ref_log_probs": near + 0.3 * normal(3),
        "rollout_log_probs": near + 0.3 * normal(4),
    }
    return RolloutBatch(
        ids, jax.random.randint(KEYS[5], (R, T), 0, V), ids, ids, mask, one, one, one, **per_token
    )


BATCH = make_batch(jax.random.bernoulli(KEYS[6], 0.4, (R, T)).astype(jnp.float32))
HIDDEN = normal(7, R, T, H)
KERNEL = 0.3 * normal(8, H, V)


def step(parallel, hidden, kernel, batch=BATCH, config=None, memory=ONE_PASS, lora=None, **options):
    """Loss, metrics and gradients, those of a LoRA's adapters too."""
    config = PolicyLossConfig(PPO(clip_high=0.28)) if config is None else config
    of_head = {
        n: options.pop(n)
        for n in ("bias", "layout", "softcap", "scale", "vocab_size")
        if n in options
    }

    def loss(hidden, kernel, lora):
        return policy_loss_from_hidden(
            hidden,
            Head(kernel, lora=lora and LoRA(*lora, scale=0.5), **of_head),
            batch,
            config,
            **{"temperature": 0.8, "parallel": parallel, "memory": memory} | options,
        )

    (value, found), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
        hidden, kernel, lora
    )
    return value, finalize_metrics(found), gradients


def bonus_and_kl():
    return PolicyLossConfig(PPO(clip_high=0.28, dual_clip=3.0), kl=KL(0.1), entropy_coef=0.01)


ADAPTERS = (0.3 * normal(0, H, 3), 0.3 * normal(1, 3, V))
