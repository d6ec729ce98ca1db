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
    is_number,
    is_zero,
)
from jaxppo.base.kl import KL
from jaxppo.base.option_names import same_here
from jaxppo.policy.off_policy import OffPolicyConfig
from jaxppo.policy_losses import BY_NAME, PPO, PolicyLoss
from jaxppo.policy_losses.base import Loss

ImpossibleTokens = Literal["nan", "leave_out"]


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig(Loss):
    """The loss, the penalties and the denominators of `policy_loss`.

        loss = aggregate(policy loss + kl.coef * KL(policy || reference) - entropy_coef * entropy)

    Args:
      loss: one of `policy_losses`, or the caller's own `PolicyLoss`.
      kl: the penalty against `batch.ref_log_probs`; None for no penalty and no metric.
      entropy_coef: a number or a traced schedule; with the number 0 the entropy is only a metric.
      ratio_to: the policy in the ratio's denominator: "old", the trainer's at the start of the step
        (`batch.old_log_probs`), "rollout", the sampler's (`batch.rollout_log_probs`), or "current", a ratio of 1 for
        on-policy steps. Corrections and the KL's weight have their own field `compares`.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      metric_aggregation: "token_mean", or "loss" to reduce per-token metrics as the loss is.
      off_policy: the correction for a sampler whose policy differs from the trainer's.
      impossible_tokens: what to do with a loss token whose log-prob is -inf under the policy, under the old policy if
        it is compared, or under the sampler if the batch has its log-probs. "nan": the loss is NaN if it depends on
        that log-prob, else only metrics are. "leave_out": the token has no loss, penalty and gradient, and is in no
        statistics and metrics but `impossible_tokens`, which counts it. Denominators still follow the mask.
      clip_by_sign: adds the metrics `clip_fraction_positive` and `clip_fraction_negative`, by the advantage's sign.

    Raises:
      TypeError: a loss, kl or off_policy of the wrong class; an option of another class, which the error names.
      ValueError: an unknown name, a number out of its range, options that contradict each other, weights that count the
        loss's ratio twice.

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
    impossible_tokens: ImpossibleTokens = "nan"
    clip_by_sign: bool = False

    @classmethod
    def _in_place_of(cls, name: str, value: Any) -> str:
        """What to write for an option that this class lacks: the class that has it."""
        if name == "temperature":
            where = "an argument of policy_loss_from_hidden and log_probs_from_hidden"
            return f"it where logits are divided by it: {where}"
        for field, kind in (("loss", PPO), ("kl", KL)):
            own = same_here(name, value, kind.__dataclass_fields__)
            if own is not None:
                return f"it in {field}={kind.__name__}({own})"
        losses = dict.fromkeys([PPO, *BY_NAME.values()])
        classes: list[tuple[str, Any]] = [*(("loss", x) for x in losses), ("kl", KL), ("off_policy", OffPolicyConfig)]
        found = [f"{field}={kind.__name__}({name}=...)" for field, kind in classes if name in kind.__dataclass_fields__]
        return f"it in {' or '.join(found)}" if found else super()._in_place_of(name, value)

    def __post_init__(self) -> None:
        expected = "an instance of a frozen dataclass that derives from jaxppo.policy_losses.PolicyLoss, such as PPO()"
        if not isinstance(self.loss, PolicyLoss):
            by_name = f"; policy_losses.by_name({self.loss!r}) is one" if isinstance(self.loss, str) else ""
            raise TypeError(f"loss: got {self.loss!r}, expected {expected}{by_name}")
        if not dataclasses.is_dataclass(self.loss) or not getattr(self.loss, "__dataclass_params__").frozen:  # noqa: B009
            raise TypeError(f"loss: got {type(self.loss).__name__}, expected {expected}")
        for name, value, kind in (("kl", self.kl, KL), ("off_policy", self.off_policy, OffPolicyConfig)):
            if value is not None and not isinstance(value, kind):
                got, given = type(value).__name__, ""
                if name == "kl" and is_number(value):
                    got, given = repr(value), f"({value!r})"
                raise TypeError(f"{name}: got {got}, expected {kind.__name__}{given} or None")
        check_field(self, "entropy_coef")
        check_choices(self, ratio_to=RatioTo, metric_aggregation=MetricAggregation, impossible_tokens=ImpossibleTokens)
        check_flag("clip_by_sign", self.clip_by_sign)
        check_aggregation(self)
        if self.off_policy is None or self.off_policy.weights == "none" or not self.loss.weighs_by_ratio:
            return
        # a ratio is a product of steps, from the current policy to the trainer's old one, and from that to the sampler
        compares, beside = self.off_policy.compares, {"old": "'old/rollout'", "rollout": "weights='none'"}
        if self.ratio_to == "rollout" or (self.ratio_to == "old" and compares != "old/rollout"):
            raise ValueError(
                f"off_policy.compares: got {compares!r} for the weights beside a loss that is weighed by "
                f"its ratio, current/{self.ratio_to}, expected {beside[self.ratio_to]}: it would count twice"
            )

    @property
    def entropy_mode(self) -> Literal["metric", "bonus"]:
        """The `entropy=` of the log-prob functions: "metric" where the coefficient is known to be 0, else "bonus"."""
        return "metric" if is_zero(self.entropy_coef) else "bonus"

    @property
    def policies(self) -> frozenset[str]:
        """The policies that the loss compares, beside the reference: some of "current", "old" and "rollout"."""
        compared = [x.policies for x in (self.kl, self.off_policy) if x is not None]
        return frozenset({"current", self.ratio_to}).union(*compared)

    @property
    def penalises_kl(self) -> bool:
        """Whether the divergence is a part of the loss, and not only a metric."""
        return self.kl is not None and not is_zero(self.kl.coef)
