"""The KL divergence to the reference: a penalty of policy losses, and a loss of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo.base.arrays import Aggregation, check_aggregation, check_choice, masked, needed
from jaxppo.base.kl import KL, Estimator, kl_divergence
from jaxppo.base.metrics import Terms, means
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import TokenStats
from jaxppo.losses.token_loss import Asks, Losses, Reads, Step, TokenLoss
from jaxppo.policy_losses.base import ratio_at
from jaxppo.sharding import Segments


@dataclasses.dataclass(frozen=True)
class ReferenceKL(TokenLoss[TokenStats]):
    """The KL divergence to the reference as a loss, for tokens that may have no policy loss.

    Its metric is `kl`, the mean over tokens.

    Args:
      estimator: see `kl_divergence`.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".

    Raises:
      ValueError: an unknown estimator or aggregation.

    Example:
      >>> from jaxppo.losses import ReferenceKL
      >>> ReferenceKL("k2").estimator
      'k2'
    """

    estimator: Estimator = "k3"
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, Estimator)
        check_aggregation(self)

    @property
    def asks(self) -> Asks:
        return Asks()

    def check(self, batch: RolloutBatch) -> None:
        needed("batch.ref_log_probs", batch.ref_log_probs, f"f32[R, T] for {self}")

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        return {"log_probs": None if stats is None else stats.log_probs, "ref_log_probs": batch.ref_log_probs}

    def terms(self, stats: TokenStats, batch: RolloutBatch, constants: Any, segments: Segments) -> Losses:
        kl = reference_kl(KL(1.0, self.estimator), stats.log_probs, batch, segments)
        return {"kl": needed("batch.ref_log_probs", kl)}

    def metrics(self, stats: TokenStats, step: Step, constants: Any) -> Terms:
        return means(self.terms(stats, step.batch, constants, step.segments), step.batch.loss_mask)


def reference_kl(
    kl: KL | None, log_probs: Float[Array, "R T"], batch: RolloutBatch, segments: Segments
) -> Float[Array, "R T"] | None:
    """The KL divergence to the reference at each token; None without a config or a reference."""
    if kl is None or batch.ref_log_probs is None:
        return None
    weight, mask = None, batch.loss_mask
    if kl.importance == "score":
        weight = jnp.exp(log_probs - lax.stop_gradient(log_probs))
    elif kl.importance != "none":
        name = "old_log_probs" if kl.compares == "current/old" else "rollout_log_probs"
        base = masked(needed(f"batch.{name}", getattr(batch, name)), mask)
        weight = ratio_at(kl.importance, log_probs, base, mask, segments)
    return kl_divergence(log_probs, masked(batch.ref_log_probs, mask), kl.estimator, weight)
