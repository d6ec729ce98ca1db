"""What a policy loss does with loss tokens that have a log-prob which is not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxppo.base.arrays import check, check_choice, check_choices
from jaxppo.base.option_names import NamesItsOptions
from jaxppo.batch.rollout_batch import RolloutBatch

PolicyTerm = Literal["weight_0", "ratio_1"]
Place = Literal["in", "out"]
System = Literal["trl", "tunix", "torchtitan"]


@dataclasses.dataclass(frozen=True)
class Unusable(NamesItsOptions):
    """The rule for loss tokens with a log-prob that is not finite; for
    `PolicyLossConfig(unusable=)`.

    A loss token is unusable if the log-prob of the sampler, where the batch has it, or that of the
    old policy, where the config compares it, is NaN or infinite, or if that of the current policy
    is -inf. A NaN of the current policy makes the loss NaN under every rule: parameters, hidden
    states or targets are wrong.

    Each ratio that would read a log-prob which is not finite is 1: that of the loss, those of
    `off_policy`, and the weight of the KL. In a sum or mean over the sequence its logarithm counts
    as 0, and so it does in metrics.

    A token that the current policy finds impossible, -inf, has neither policy loss nor penalties
    under any rule. Means over its sequence and metrics leave it out. The denominators of the loss
    count it: they are known before the step.

    Args:
      policy: the policy loss of the token. "weight_0": it is 0. "ratio_1": it is that of a ratio of
        1.
      denominators: "in", or "out": the token is in no denominator of the loss, of a mean over its
        sequence or of a metric.
      penalties: "in", or "out": the KL and the entropy of the token are 0, and its reference
        log-prob may be anything.

    Raises:
      ValueError: an unknown choice; "out" of the denominators for a token that has a policy loss or
        penalties.

    Example:
      >>> sample = Sample([1, 2, 3], 1, advantages=[1.0, 1.0], rollout_log_probs=[-2.0, float("nan")])
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> stats = TokenStats(jnp.array([[-2.0, -2.0, 0.0]]))
      >>> rules = Unusable("ratio_1"), Unusable("weight_0"), Unusable("weight_0", denominators="out", penalties="out")
      >>> configs = [PolicyLossConfig(ratio_to="rollout", unusable=rule) for rule in rules]
      >>> [float(policy_loss(stats, batch, config)[0]) for config in configs]
      [-1.0, -0.5, -1.0]
    """

    policy: PolicyTerm = "weight_0"
    denominators: Place = "in"
    penalties: Place = "in"

    def __post_init__(self) -> None:
        check_choices(self, policy=PolicyTerm, denominators=Place, penalties=Place)
        if self.denominators == "out":
            got = f"'out' with policy={self.policy!r}, penalties={self.penalties!r}"
            has_loss = self.policy != "weight_0" or self.penalties != "out"
            expected = (
                "'in' unless policy='weight_0' and penalties='out': a token with a loss is in its"
                " denominators"
            )
            check("denominators", got, not has_loss, expected)

    @classmethod
    def of(cls, system: System) -> Unusable:
        """The rule of another system for log-probs of its sampler.

        Args:
          system: "trl", 1.16: a NaN has a ratio of 1. "tunix", the main branch of September 2026:
            the weight is 0 where a correction is on. "torchtitan", 0.3.0: the token is in neither
            the loss nor its denominator.

        Raises:
          ValueError: another name.

        Example:
          >>> Unusable.of("trl")
          Unusable(policy='ratio_1', denominators='in', penalties='in')

        https://github.com/huggingface/trl: trl/trainer/grpo_trainer.py;
        https://github.com/google/tunix:
        tunix/rl/common.py; https://github.com/pytorch/torchtitan:
        torchtitan/experiments/rl/losses/dapo.py
        """
        check_choice("system", system, System)
        match system:
            case "trl":
                return cls("ratio_1")
            case "tunix":
                return cls("weight_0")
            case _:
                return cls("weight_0", denominators="out", penalties="out")


UnusableRule = Literal["nan"] | Unusable


def check_rule(rule: Any) -> None:
    """Raises ValueError unless this is "nan" or an `Unusable`."""
    expected = "'nan' or an instance of Unusable, such as Unusable('weight_0')"
    if isinstance(rule, str) and rule in get_args(System):
        expected += f"; Unusable.of({rule!r}) is one"
    good = isinstance(rule, Unusable) or (isinstance(rule, str) and rule == "nan")
    check("unusable", repr(rule), good, expected)


def not_finite(batch: RolloutBatch, names: Iterable[str]) -> Bool[Array, "*K R T"]:
    """The loss tokens at which one of these log-probs of the batch, where it has them, is not
    finite.
    """
    unusable = jnp.zeros(batch.loss_mask.shape, bool)
    for name in names:
        log_probs = getattr(batch, name)
        if log_probs is not None:
            unusable = unusable | ((batch.loss_mask > 0) & ~jnp.isfinite(log_probs))
    return unusable
