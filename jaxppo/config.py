"""What a policy loss is made of: one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

import jax
from jaxtyping import Array, Float

from jaxppo.aggregation import check_aggregation
from jaxppo.kl import check_kl_estimator
from jaxppo.policy_losses import LossFn, find_policy_loss

if TYPE_CHECKING:
    from jaxppo.off_policy import OffPolicyConfig

Coefficient = float | Float[Array, ""]


def _check(what: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{what}: got {value}, expected {expected}")


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """Which loss, which penalties and which denominators `policy_loss` uses.

        loss = aggregate(policy loss + kl_coef * KL(policy || reference) - entropy_coef * entropy)

    Args:
      loss: a name out of `POLICY_LOSSES`, or a function like those.
      clip_low: the ratio is clipped below 1 - clip_low; 1 clips nothing.
      clip_high: the ratio is clipped above 1 + clip_high.
      dual_clip: where A < 0, the ratio counts at most this much; above 1. None is off.
      entropy_coef: a number or a traced schedule; the number 0 leaves the entropy a metric only.
      kl_coef: a number or a traced schedule, of the penalty against `batch.ref_log_probs`.
      kl_estimator: see `kl_divergence`.
      kl_importance: weigh the KL estimate by exp(log_prob - old_log_prob), gradient included.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      metric_aggregation: per-token metrics are "token_mean"s, or reduced as the "loss" is.
      old_log_probs: what the ratio is over: "trainer" (`batch.old_log_probs`), "sampler"
        (`batch.rollout_log_probs`), or "current", a ratio of 1 for an on-policy first step.
      off_policy: the correction for a sampler that is not quite the trainer's policy.
      temperature: the sampler's, which whoever computes the log-probs applies to the logits.

    Raises:
      ValueError: a name that is not known, a number out of its range, options that contradict each other.

    Example:
      >>> PolicyLossConfig(clip_high=0.28, kl_coef=0.01).entropy_mode
      'metric'
    """

    loss: str | LossFn = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_coef: Coefficient = 0.0
    kl_coef: Coefficient = 0.0
    kl_estimator: str = "k3"
    kl_importance: bool = False
    aggregation: str = "token_mean"
    aggregation_norm: float | None = None
    metric_aggregation: Literal["token_mean", "loss"] = "token_mean"
    old_log_probs: Literal["trainer", "sampler", "current"] = "trainer"
    off_policy: OffPolicyConfig | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        find_policy_loss(self.loss)
        check_kl_estimator("kl_estimator", self.kl_estimator)
        check_aggregation("aggregation", self.aggregation)
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            _check(name, value, _is_number(value) and value >= 0, "a number of at least 0")
        _check("dual_clip", self.dual_clip, self.dual_clip is None or self.dual_clip > 1, "None or a number above 1")
        if _is_number(self.temperature):
            _check("temperature", self.temperature, self.temperature > 0, "a number above 0")
        _check(
            "metric_aggregation",
            repr(self.metric_aggregation),
            self.metric_aggregation in ("token_mean", "loss"),
            "'token_mean' or 'loss'",
        )
        _check(
            "old_log_probs",
            repr(self.old_log_probs),
            self.old_log_probs in ("trainer", "sampler", "current"),
            "'trainer', 'sampler' or 'current'",
        )
        if self.aggregation == "sequence_mean_token_sum_norm":
            norm = self.aggregation_norm
            good = _is_number(norm) and norm is not None and norm > 0
            _check("aggregation_norm", norm, good, f"a positive number for {self.aggregation!r}")
        else:
            expected = f"None, or aggregation='sequence_mean_token_sum_norm' instead of {self.aggregation!r}"
            _check("aggregation_norm", self.aggregation_norm, self.aggregation_norm is None, expected)

    @property
    def entropy_mode(self) -> Literal["metric", "bonus"]:
        """The `entropy=` of the log-prob functions: "bonus" (differentiable) unless the coefficient is the number 0."""
        return "metric" if is_zero(self.entropy_coef) else "bonus"


def is_zero(coefficient: Coefficient) -> bool:
    """Whether the coefficient is 0 and known to be: a traced schedule never is."""
    return not isinstance(coefficient, jax.core.Tracer) and float(coefficient) == 0
