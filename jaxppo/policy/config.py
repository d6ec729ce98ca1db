"""The config of a policy loss: one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxppo.base.arrays import (
    Aggregation,
    Coefficient,
    MetricAggregation,
    RatioTo,
    check_aggregation,
    check_choices,
    check_field,
    check_flag,
    check_type,
    is_number,
    is_zero,
)
from jaxppo.base.kl import KL
from jaxppo.base.option_names import same_here
from jaxppo.base.traced import is_frozen
from jaxppo.policy.off_policy import OffPolicyConfig
from jaxppo.policy.unusable import Unusable, UnusableRule, check_rule
from jaxppo.policy_losses import BY_NAME, PPO, PolicyLoss
from jaxppo.policy_losses.base import Loss


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig(Loss):
    """The loss, the penalties and the denominators of `policy_loss`.

        loss = aggregate(policy loss + kl.coef * KL(policy || reference) - entropy_coef * entropy)

    Args:
      loss: one of `policy_losses`, or the caller's own `PolicyLoss`.
      kl: the penalty against `batch.ref_log_probs`; None for no penalty and no metric.
      entropy_coef: a number or a traced schedule; with the number 0 the entropy is only a metric.
      ratio_to: the policy in the ratio's denominator: "old", the trainer's at the start of the step
        (`batch.old_log_probs`), "rollout", the sampler's (`batch.rollout_log_probs`), or "current",
        a ratio of 1 for on-policy steps. Corrections and the KL's weight have their own field
        `compares`.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      metric_aggregation: "token_mean", or "loss" to reduce per-token metrics as the loss is.
      off_policy: the correction for a sampler whose policy differs from the trainer's.
      unusable: what to do with a loss token that has a log-prob which is not finite, of the sampler
        or of a policy. "nan": the loss is NaN if it depends on that log-prob, else only metrics
        are. Or an `Unusable`, by which such a token has no policy loss, or one with a ratio of 1;
        the metric `unusable_tokens` counts them.
      clip_by_sign: adds the metrics `clip_fraction_positive` and `clip_fraction_negative`, by the
        advantage's sign.

    Raises:
      TypeError: a loss, kl or off_policy of the wrong class; an option of another class, which the
        error names.
      ValueError: an unknown name, a number out of its range, options that contradict each other,
        weights that count the loss's ratio twice.

    Example:
      >>> PolicyLossConfig(PPO(clip_high=0.28), kl=KL(0.01)).entropy_mode
      'metric'
    """

    loss: PolicyLoss = PPO()  # noqa: RUF009  frozen
    kl: KL | None = None
    entropy_coef: Coefficient = 0.0
    ratio_to: RatioTo = "old"
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None
    metric_aggregation: MetricAggregation = "token_mean"
    off_policy: OffPolicyConfig | None = None
    unusable: UnusableRule = "nan"
    clip_by_sign: bool = False

    @classmethod
    def _in_place_of(cls, name: str, value: Any) -> str:
        """What to write for an option that this class lacks: the class that has it."""
        if name == "temperature":
            where = "an argument of policy_loss_from_hidden and log_probs_from_hidden"
            return f"it where logits are divided by it: {where}"
        for field, kind in (("loss", PPO), ("kl", KL)):
            same = same_here(name, value, kind.__dataclass_fields__)
            if same is not None:
                return f"it in {field}={kind.__name__}({same})"
        places: list[tuple[str, Any]] = []
        for loss in dict.fromkeys([PPO, *BY_NAME.values()]):
            places.append(("loss", loss))
        places += [("kl", KL), ("off_policy", OffPolicyConfig), ("unusable", Unusable)]
        having = [
            f"{field}={kind.__name__}({name}=...)"
            for field, kind in places
            if name in kind.__dataclass_fields__
        ]
        if having:
            return f"it in {' or '.join(having)}"
        return super()._in_place_of(name, value)

    def __post_init__(self) -> None:
        self._check_classes()
        check_field(self, "entropy_coef")
        check_choices(self, ratio_to=RatioTo, metric_aggregation=MetricAggregation)
        check_rule(self.unusable)
        check_flag("clip_by_sign", self.clip_by_sign)
        check_aggregation(self)
        self._check_ratio_counts_once()

    def _check_classes(self) -> None:
        expected = (
            "an instance of a frozen dataclass that derives from jaxppo.policy_losses.PolicyLoss,"
            " such as PPO()"
        )
        if isinstance(self.loss, str):
            expected += f"; policy_losses.by_name({self.loss!r}) is one"
        if not isinstance(self.loss, PolicyLoss):
            raise TypeError(f"loss: got {self.loss!r}, expected {expected}")
        if not is_frozen(self.loss):
            raise TypeError(f"loss: got {type(self.loss).__name__}, expected {expected}")
        if is_number(self.kl):
            raise TypeError(f"kl: got {self.kl!r}, expected KL({self.kl!r}) or None")
        check_type("kl", self.kl, self.kl is None or isinstance(self.kl, KL), "KL or None")
        off_policy = self.off_policy
        good = off_policy is None or isinstance(off_policy, OffPolicyConfig)
        check_type("off_policy", off_policy, good, "OffPolicyConfig or None")

    def _check_ratio_counts_once(self) -> None:
        """A ratio is a product of steps, from the current policy to the trainer's old one, and
        on to the sampler.
        """
        if (
            self.off_policy is None
            or self.off_policy.weights == "none"
            or not self.loss.weighs_by_ratio
        ):
            return
        compares = self.off_policy.compares
        if self.ratio_to == "rollout":
            expected = "weights='none'"
        elif self.ratio_to == "old" and compares != "old/rollout":
            expected = "'old/rollout'"
        else:
            return
        raise ValueError(
            f"off_policy.compares: got {compares!r} for the weights beside a loss that is weighed"
            f" by its ratio, current/{self.ratio_to}, expected {expected}: it would count twice"
        )

    @property
    def entropy_mode(self) -> Literal["metric", "bonus"]:
        """The `entropy=` of the log-prob functions: "metric" where the coefficient is known to
        be 0, else "bonus".
        """
        if is_zero(self.entropy_coef):
            return "metric"
        return "bonus"

    @property
    def policies(self) -> frozenset[str]:
        """The policies that the loss compares, beside the reference: some of "current", "old"
        and "rollout".
        """
        policies: frozenset[str] = frozenset({"current", self.ratio_to})
        if self.kl is not None:
            policies |= self.kl.policies
        if self.off_policy is not None:
            policies |= self.off_policy.policies
        return policies

    @property
    def checked_log_probs(self) -> tuple[str, ...]:
        """The log-probs of a batch that make a token unusable where they are not finite, if the
        batch has them.
        """
        if "old" in self.policies:
            return ("old_log_probs", "rollout_log_probs")
        return ("rollout_log_probs",)

    @property
    def out_of_denominators(self) -> tuple[str, ...]:
        """Those of them that also take the token out of the denominators."""
        if isinstance(self.unusable, Unusable) and self.unusable.denominators == "out":
            return self.checked_log_probs
        return ()

    @property
    def penalises_kl(self) -> bool:
        """Whether the divergence is a part of the loss, and not only a metric."""
        return self.kl is not None and not is_zero(self.kl.coef)
