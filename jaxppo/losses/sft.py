"""Supervised fine-tuning: the mean negative log-likelihood of the targets."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from jaxppo.base.arrays import Aggregation, Coefficient, check_type, is_zero
from jaxppo.base.metrics import Terms, means
from jaxppo.base.pytree import PyTree
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import LogitStat, TokenStats
from jaxppo.head.token_arguments import as_logit_stats
from jaxppo.losses.token_loss import Asks, Losses, Reads, TokenLoss, WeighedBatch
from jaxppo.policy_losses.base import number
from jaxppo.sharding import Segments


@dataclasses.dataclass(frozen=True)
class SFT(TokenLoss[TokenStats]):
    """The negative log-likelihood of the targets: loss = sum over tokens of weight_t * l_t.

        l_t = (1 - label_smoothing) * -log_prob_t + label_smoothing * (log_z_t - mean_logit_t) + z_loss * log_z_t^2

    log_z is the log-sum-exp of the logits, and log_z - mean_logit the mean of -log p over the
    vocabulary. Columns whose logit is -inf, as under a bias of -inf, are left out of that mean, and
    their gradient is 0.

    The metrics are `loss` (adds up over micro-batches), `nll` (the mean of -log_prob over tokens,
    nats), where the statistics have them `entropy`, `log_z` and `accuracy` (how often no token is
    likelier than the target), and `broken_rules` (see `policy_loss`).

    Args:
      label_smoothing: the share of a uniform target, in [0, 1); a number or a traced schedule.
        `loss_from_stats` wants statistics made with `logit_stats=("log_z", "mean_logit")` for it.
      z_loss: the coefficient of log_z^2, a number or a traced schedule, for statistics with
        `logit_stats=("log_z",)`.
      dft: dynamic fine-tuning: all of l_t times the target's probability, a constant; denominators
        stay counts.
      logit_stats: "log_z" and "accuracy", for these metrics from hidden states. The first two
        options bring "log_z".
      aggregation, aggregation_norm: the denominators, see `token_weights`.

    Raises:
      ValueError: an unknown aggregation or statistic, a number out of its range.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> loss, metrics = loss_from_stats(TokenStats(jnp.array([[-1.0, -2.0, jnp.nan]])), batch, SFT())
      >>> float(loss), float(metrics["nll"].value)
      (1.5, 1.5)

    Label smoothing: Szegedy et al. 2015, https://arxiv.org/abs/1512.00567; z-loss: Chowdhery et al.
    2022, PaLM, https://arxiv.org/abs/2204.02311; dft: Wu et al. 2025,
    https://arxiv.org/abs/2508.05629
    """

    coefficients: ClassVar[tuple[str, ...]] = ("label_smoothing", "z_loss")
    label_smoothing: Coefficient = number(0.0, least=0, below=1)
    z_loss: Coefficient = number(0.0, least=0)
    dft: bool = False
    logit_stats: tuple[LogitStat, ...] = ()
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type(
            "logit_stats",
            self.logit_stats,
            not hasattr(self.logit_stats, "dtype"),
            "names of statistics",
        )
        object.__setattr__(self, "logit_stats", as_logit_stats(self.logit_stats))

    @property
    def asks(self) -> Asks:
        return Asks(logit_stats=(*self.logit_stats, *self._in_loss))

    @property
    def _in_loss(self) -> tuple[LogitStat, ...]:
        if not is_zero(self.label_smoothing):
            return "log_z", "mean_logit"
        if not is_zero(self.z_loss):
            return ("log_z",)
        return ()

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        if stats is None:
            return {}
        return {name: getattr(stats, name) for name in ("log_probs", *self._in_loss)}

    def terms(
        self, stats: TokenStats, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        terms = {"nll": -stats.log_probs}
        if not is_zero(self.label_smoothing):
            terms["nll"] = (1 - self.label_smoothing) * terms["nll"]
            terms["label_smoothing"] = self.label_smoothing * (stats.log_z - stats.mean_logit)
        if not is_zero(self.z_loss):
            terms["z_loss"] = self.z_loss * stats.log_z**2
        if self.dft:
            probability = lax.stop_gradient(jnp.exp(stats.log_probs))
            terms = {name: probability * x for name, x in terms.items()}
        return terms

    def metrics(self, stats: TokenStats, weighed: WeighedBatch, constants: PyTree) -> Terms:
        values = {
            "nll": -stats.log_probs,
            "entropy": stats.entropy,
            "log_z": stats.log_z,
            "accuracy": stats.accuracy,
        }
        return means(
            {name: x for name, x in values.items() if x is not None}, weighed.batch.loss_mask
        )
