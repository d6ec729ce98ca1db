"""What the rule of a config for unusable tokens, see `Unusable`, does with the arrays of a batch.

The current log-probs are None where they are not computed yet. Results are None where a config has
no such rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.unusable import Unusable, not_finite

Flags = Bool[Array, "*K R T"]
Tokens = Float[Array, "*K R T"]


def without_loss(
    config: PolicyLossConfig, log_probs: Tokens | None, batch: RolloutBatch
) -> Flags | None:
    """The loss tokens without policy loss, penalties and statistics."""
    if not isinstance(config.unusable, Unusable):
        return None
    flags = not_finite(batch, config.out_of_denominators)
    if log_probs is None:
        return flags
    return flags | ((batch.loss_mask > 0) & jnp.isneginf(log_probs))


def unusable_tokens(
    config: PolicyLossConfig, log_probs: Tokens | None, batch: RolloutBatch
) -> Flags | None:
    """The loss tokens with a log-prob that is not finite."""
    flags = without_loss(config, log_probs, batch)
    if flags is None:
        return None
    return flags | not_finite(batch, config.checked_log_probs)


def without_policy_loss(
    config: PolicyLossConfig, log_probs: Tokens | None, batch: RolloutBatch
) -> Flags | None:
    """The unusable tokens whose policy loss is 0."""
    rule = config.unusable
    if isinstance(rule, Unusable) and rule.policy == "weight_0":
        return unusable_tokens(config, log_probs, batch)
    return without_loss(config, log_probs, batch)


def agreeing(config: PolicyLossConfig, log_probs: Tokens, batch: RolloutBatch) -> RolloutBatch:
    """The batch with the current log-probs, as constants, in place of those that are not finite:
    ratios of 1.

    Where a token has no penalties, they take the place of the reference's too.
    """
    rule = config.unusable
    if not isinstance(rule, Unusable):
        return batch
    own = lax.stop_gradient(log_probs)
    replaced: dict[str, Any] = {}
    for name in ("old_log_probs", "rollout_log_probs"):
        log_probs_of_batch = getattr(batch, name)
        if log_probs_of_batch is not None:
            usable = jnp.isfinite(log_probs_of_batch)
            replaced[name] = jnp.where(usable, log_probs_of_batch, own)
    if batch.ref_log_probs is not None and rule.penalties == "out":
        unusable = not_finite(batch, config.checked_log_probs)
        replaced["ref_log_probs"] = jnp.where(unusable, own, batch.ref_log_probs)
    return dataclasses.replace(batch, **replaced)


def excused(
    config: PolicyLossConfig,
    read: Mapping[str, Array],
    log_probs: Tokens | None,
    batch: RolloutBatch,
) -> dict[str, Array]:
    """The log-probs that a loss reads, by name, but 0, which breaks no rule of values, where it
    does not use them.
    """
    rule = config.unusable
    left_out = without_loss(config, log_probs, batch)
    if not isinstance(rule, Unusable) or left_out is None:
        return dict(read)
    flags = {"log_probs": left_out, "ref_log_probs": left_out}
    for name in config.checked_log_probs:
        flags[name] = left_out | not_finite(batch, [name])
    if rule.penalties == "out":
        flags["ref_log_probs"] = left_out | not_finite(batch, config.checked_log_probs)
    return {name: jnp.where(flags[name], 0, x) for name, x in read.items()}


def penalised(
    config: PolicyLossConfig, penalty: Float[Array, "R T"], batch: RolloutBatch
) -> Float[Array, "R T"]:
    """A penalty of each token, 0 where the rule takes the token out of the penalties."""
    rule = config.unusable
    if not isinstance(rule, Unusable) or rule.penalties == "in":
        return penalty
    return jnp.where(not_finite(batch, config.checked_log_probs), 0, penalty)
