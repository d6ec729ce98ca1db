"""The losses that a joint loss adds up."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from jaxppo._arrays import Aggregation, Coefficient, check_aggregation, check_choice, check_field, masked, needed
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig
from jaxppo.head.types import TokenStats
from jaxppo.kl import KL, Estimator
from jaxppo.losses.policy import reference_kl
from jaxppo.losses.sft import SFTTokenLoss
from jaxppo.losses.token_loss import Constants, Reads, Step, TokenLoss
from jaxppo.losses.top_k_distillation import TopKLoss
from jaxppo.metrics import Terms, means
from jaxppo.sharding import Segments


@dataclasses.dataclass(frozen=True)
class SFT(SFTTokenLoss):
    """The negative log-likelihood as a part: the loss of `sft_loss`, with its options.

    Args:
      label_smoothing: see `sft_loss`, also for the other arguments.
      z_loss: the coefficient of log_z^2.
      aggregation: the denominators.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".

    Raises:
      ValueError: an option out of its range.

    Example:
      >>> SFT(z_loss=1e-4).aggregation
      'token_mean'
    """


@dataclasses.dataclass(frozen=True)
class ReferenceKL(TokenLoss):
    """The KL divergence to the reference as a part, which may have tokens without a policy loss.

    Args:
      estimator: see `kl_divergence`.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".

    Raises:
      ValueError: an unknown estimator or aggregation.

    Example:
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
    def token_local(self) -> bool:
        return True

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, given: Any, segments: Segments) -> Reads:
        return {"log_probs": None if stats is None else stats.log_probs, "ref_log_probs": batch.ref_log_probs}

    def per_token(
        self, stats: TokenStats, batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        kl = reference_kl(KL(1.0, self.estimator), masked(stats.log_probs, batch.loss_mask), batch, segments)
        return needed("batch.ref_log_probs", kl)

    def terms(self, stats: TokenStats, step: Step, constants: Constants) -> Terms:
        return means({"kl": self.per_token(stats, step.batch, constants, step.segments)}, step.batch.loss_mask)


@dataclasses.dataclass(frozen=True)
class TopKDistillation(TopKLoss):
    """The divergence from a teacher's top-k as a part: the loss of `losses.distillation.top_k_distillation_loss`.

    All parts share the ids of the call. The call takes the teacher's log-probs under the part's name.

    Args:
      divergence: see `losses.distillation.top_k_divergence`, also for `beta` and `tail`.
      beta: for "mixed_kl" and "jensen_shannon".
      tail: "bucket", "renormalise" or "leave_out".
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".

    Raises:
      ValueError: an option out of its range.

    Example:
      >>> TopKDistillation("reverse_kl").tail
      'bucket'
    """


@dataclasses.dataclass(frozen=True)
class Part:
    """One loss of several: coef times the loss.

    Args:
      loss: a `PolicyLossConfig`, an `SFT`, a `ReferenceKL`, a `TopKDistillation`, or a `TokenLoss` of your own.
      coef: a number or a traced schedule.

    Raises:
      TypeError: another loss.
      ValueError: a coefficient that is not a finite number, a policy loss that wants selected tokens.

    Example:
      >>> Part(PolicyLossConfig(), coef=0.5).coef
      0.5
    """

    loss: PolicyLossConfig | TokenLoss
    coef: Coefficient = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.loss, (PolicyLossConfig, TokenLoss)):
            expected = "a PolicyLossConfig, SFT, ReferenceKL or TopKDistillation"
            raise TypeError(f"loss: got {type(self.loss).__name__}, expected {expected}")
        if isinstance(self.loss, PolicyLossConfig) and self.loss.loss.selects is not None:
            raise ValueError(f"loss: got {self.loss.loss}, expected one that selects no tokens of the step")
        check_field(self, "coef")
