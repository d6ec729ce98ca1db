"""Samples, a packed batch, a head and its policy loss, for the tests of users' mistakes."""

import jax.numpy as jnp
import numpy as np

from jaxppo import (
    PPO,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    policy_loss,
)

R, T, H, V = 4, 8, 6, 24
RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.normal(size=(R, T, H)), jnp.float32)
KERNEL = jnp.asarray(RNG.normal(size=(H, V)), jnp.float32)
CONFIG = PolicyLossConfig(PPO())


def samples(count=6, **more):
    rng = np.random.default_rng(1)
    found = []
    for i in range(count):
        n = int(rng.integers(3, 6))
        values = {"advantages": np.full(n, rng.normal()), "old_log_probs": -rng.exponential(size=n)}
        given = {"reward": float(i), "group_id": i // 2} | more
        tokens = rng.integers(0, V, 2 + n)
        tokens[:2] = i // 2  # the prompt of the group
        found.append(Sample(tokens, response_start=2, **given, **values))
    return found


def packed(**options):
    return RolloutBatch.from_samples(samples(), **{"row_length": T, "rows": 8} | options)


BATCH = packed()
LOG_PROBS = jnp.asarray(-RNG.exponential(size=BATCH.loss_mask.shape), jnp.float32)


def loss_at(batch, log_probs=LOG_PROBS, config=CONFIG, **options):
    return policy_loss(TokenStats(log_probs), batch, config, **options)
