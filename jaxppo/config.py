"""What a policy loss is made of: one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, TypeGuard

import jax
from jaxtyping import Array, Float

from jaxppo.aggregation import check_aggregation
from jaxppo.kl import check_kl_estimator
from jaxppo.off_policy import OffPolicyConfig
from jaxppo.policy_losses import DUAL_CLIPPED, LossFn, PolicyLoss, find_policy_loss

Coefficient = float | Float[Array, ""]
_CHOICES = {
    "metric_aggregation": ("token_mean", "loss"),
    "old_log_probs": ("trainer", "sampler", "current"),
    "gspo_gradient": ("sequence", "token"),
}


def _check(what: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{what}: got {value}, expected {expected}")


def _is_number(x: Any) -> TypeGuard[float]:
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
      gspo_gradient: the gradient of gspo runs through the "sequence" ratio, or is each "token"'s own.
      sapo_tau_positive: sapo's steepness where A > 0.
      sapo_tau_negative: sapo's steepness elsewhere.
      dppo_ratio_cap: the largest ratio that dppo_tv and dppo_kl weigh a token with.
      dro_beta: the strength of dro's quadratic.
      cov_ratio: the share of the step's tokens that clip_cov takes out and kl_cov penalises.
      cov_low: clip_cov picks among covariances above this.
      cov_high: clip_cov picks among covariances below this.
      kl_cov_coef: the strength of kl_cov's penalty.
      temperature: the sampler's, which whoever computes the log-probs applies to the logits.

    Raises:
      ValueError: a name that is not known, a number out of its range, options that contradict each other.

    Example:
      >>> PolicyLossConfig(clip_high=0.28, kl_coef=0.01).entropy_mode
      'metric'
    """

    loss: str | LossFn | PolicyLoss = "ppo"
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
    gspo_gradient: Literal["sequence", "token"] = "sequence"
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    dppo_ratio_cap: float = 20.0
    dro_beta: float = 0.1
    cov_ratio: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    kl_cov_coef: float = 1.0
    temperature: Coefficient = 1.0

    def __post_init__(self) -> None:
        find_policy_loss(self.loss)
        check_kl_estimator("kl_estimator", self.kl_estimator)
        check_aggregation("aggregation", self.aggregation)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _check(name, repr(value), value in choices, " or ".join(map(repr, choices)))
        for name in ("clip_low", "clip_high", "dro_beta", "cov_ratio", "kl_cov_coef"):
            value = getattr(self, name)
            _check(name, value, _is_number(value) and value >= 0, "a number of at least 0")
        for name in ("sapo_tau_positive", "sapo_tau_negative", "dppo_ratio_cap", "temperature"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, jax.Array) or (_is_number(value) and value > 0), "a number above 0")
        for name in ("entropy_coef", "kl_coef"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, jax.Array) or _is_number(value), "a finite number or a scalar array")
        _check("dual_clip", self.dual_clip, self.dual_clip is None or self.dual_clip > 1, "None or a number above 1")
        if self.dual_clip is not None and self.loss not in DUAL_CLIPPED and not callable(self.loss):
            _check("dual_clip", f"{self.dual_clip} with loss={self.loss!r}", False, f"None; {DUAL_CLIPPED} have it")
        if self.off_policy is not None and not isinstance(self.off_policy, OffPolicyConfig):
            raise TypeError(f"off_policy: got {type(self.off_policy).__name__}, expected OffPolicyConfig or None")
        _check("cov_low, cov_high", (self.cov_low, self.cov_high), self.cov_low < self.cov_high, "cov_low < cov_high")
        _check("cov_ratio", self.cov_ratio, self.cov_ratio <= 1, "a share of at most 1")
        norm = self.aggregation_norm
        if self.aggregation == "sequence_mean_token_sum_norm":
            good = _is_number(norm) and norm > 0
            _check("aggregation_norm", norm, good, f"a positive number for {self.aggregation!r}")
        else:
            expected = f"None, or aggregation='sequence_mean_token_sum_norm' instead of {self.aggregation!r}"
            _check("aggregation_norm", norm, norm is None, expected)
        off_policy = self.off_policy
        if off_policy is not None and off_policy.needs_rollout_log_probs and self.old_log_probs == "sampler":
            expected = "'current' with old_log_probs='sampler': the old policy is the sampler's, and its ratio to it 1"
            _check("off_policy.trainer", repr(off_policy.trainer), off_policy.trainer == "current", expected)
        if off_policy is not None and off_policy.batch_normalize:
            expected = "'trainer' for off_policy.batch_normalize: the mean weight of the step is known beforehand"
            _check("old_log_probs", repr(self.old_log_probs), self.old_log_probs == "trainer", expected)

    @property
    def entropy_mode(self) -> Literal["metric", "bonus"]:
        """The `entropy=` of the log-prob functions: "bonus" (differentiable) unless the coefficient is the number 0."""
        return "metric" if is_zero(self.entropy_coef) else "bonus"


def is_zero(coefficient: Coefficient) -> bool:
    """Whether the coefficient is 0 and known to be: a traced schedule never is."""
    return not isinstance(coefficient, jax.core.Tracer) and float(coefficient) == 0
