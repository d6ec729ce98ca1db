"""Checks of what a policy loss is given: statistics, a batch and a config that fit each other."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo._arrays import LOG_PROBS, check_f32, needed
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig
from jaxppo.head.head import TokenStats
from jaxppo.validation import checked

BY_RATIO = {"old": "old_log_probs", "rollout": "rollout_log_probs"}  # the log-probs of each `ratio_to` of a batch


def check_stats(stats: TokenStats, batch: RolloutBatch, config: PolicyLossConfig) -> None:
    """Raises where the config needs something that the statistics lack, or where shapes differ."""
    if not isinstance(stats, TokenStats):
        raise TypeError(f"stats: got {type(stats).__name__}, expected TokenStats")
    shape = batch.loss_mask.shape
    for name, array in (("stats.log_probs", stats.log_probs), ("stats.entropy", stats.entropy)):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: got shape {array.shape}, expected the batch's, {shape}")
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name}: got {array.dtype}, expected a floating-point dtype such as float32")
    check_f32("stats.log_probs", stats.log_probs)
    if config.entropy_mode != "bonus":
        return
    needed("stats.entropy", stats.entropy, f"f32[R, T] for entropy_coef={config.entropy_coef}")
    if stats.entropy_mode != "bonus":
        raise ValueError(
            f"stats: got entropies of mode {stats.entropy_mode!r}, which have no gradient, expected 'bonus' for "
            f"entropy_coef={config.entropy_coef}: log_probs_from_hidden(..., entropy=config.entropy_mode)"
        )


def check_batch(batch: RolloutBatch, config: PolicyLossConfig, selected: Float[Array, "R T"] | None) -> RolloutBatch:
    """The batch, checked. Raises where it does not fit the config, or where `selected` does not fit the loss."""
    batch = checked(batch)
    if not isinstance(config, PolicyLossConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected PolicyLossConfig")
    check_needed(batch, config)
    shape = batch.loss_mask.shape
    selects = config.loss.selects is not None
    if selects != (selected is not None) or (selected is not None and selected.shape != shape):
        got = "None" if selected is None else f"shape {selected.shape}"
        expected = f"the step's covariance_mask(stats, batch, config, key), {shape}," if selects else "None"
        raise ValueError(f"selected: got {got}, expected {expected} with loss={config.loss}")
    return batch


def check_needed(batch: RolloutBatch, config: PolicyLossConfig) -> None:
    """Raises ValueError where the config asks for an array that the batch lacks."""
    purposes = {"advantages": "every policy loss"}
    if config.ratio_to in BY_RATIO:
        purposes[BY_RATIO[config.ratio_to]] = f"ratio_to={config.ratio_to!r}"
    if config.penalises_kl:
        purposes["ref_log_probs"] = f"kl={config.kl}"
    for name in sorted(config.policies - {"current"}):
        parts = {"off_policy": config.off_policy, "kl": config.kl}
        asks = [f"{what}={x}" for what, x in parts.items() if x is not None and name in x.policies]
        purposes.setdefault(f"{name}_log_probs", ", ".join(asks))
    for name in ("advantages", *LOG_PROBS):
        if name in purposes:
            needed(f"batch.{name}", getattr(batch, name), f"f32[R, T] for {purposes[name]}")
