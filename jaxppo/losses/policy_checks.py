"""Checks of what a policy loss is given: statistics, a batch and a config that fit each other."""

from __future__ import annotations

from jaxppo.base.arrays import LOG_PROBS, check_array, needed
from jaxppo.batch.extras import extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import check_stats
from jaxppo.head.head import TokenStats
from jaxppo.policy.config import PolicyLossConfig

SELECTED = "selected"  # the extra of a batch that holds the tokens which ClipCov and KLCov select
BY_RATIO = {"old": "old_log_probs", "rollout": "rollout_log_probs"}  # the log-probs of each `ratio_to` of a batch


def check_policy_stats(stats: TokenStats, batch: RolloutBatch, config: PolicyLossConfig) -> None:
    """Raises where the config needs something that the statistics lack, or where shapes or dtypes are wrong."""
    check_stats(stats, batch.loss_mask.shape)
    if config.entropy_mode != "bonus":
        return
    needed("stats.entropy", stats.entropy, f"f32[R, T] for entropy_coef={config.entropy_coef}")
    if stats.entropy_mode != "bonus":
        raise ValueError(
            f"stats: got entropies of mode {stats.entropy_mode!r}, which have no gradient, expected 'bonus' for "
            f"entropy_coef={config.entropy_coef}: log_probs_from_hidden(..., entropy=config.entropy_mode)"
        )


def check_config(config: PolicyLossConfig) -> None:
    if not isinstance(config, PolicyLossConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected PolicyLossConfig")


def check_batch(batch: RolloutBatch, config: PolicyLossConfig) -> None:
    """Raises where the batch does not fit the config, or its selected tokens the loss."""
    check_needed(batch, config)
    if config.loss.selects is not None:
        expected = f"the step's covariance_mask(stats, batch, config, key), for loss={config.loss}"
        check_array("selected", extra_of(batch, SELECTED, expected), batch.loss_mask.shape, "the batch's")


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
