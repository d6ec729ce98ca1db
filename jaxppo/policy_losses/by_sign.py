"""A loss of two: one for tokens that the advantage calls good, one for the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxppo.policy_losses.base import PolicyLoss, Result, Tokens
from jaxppo.policy_losses.by_token import CISPO, Reinforce


@dataclasses.dataclass(frozen=True)
class BySign(PolicyLoss):
    """One loss where A > 0, another one elsewhere.

    The default is TOPR, by tokens: -A log_prob where A > 0, and -min(r, 1) A log_prob with a constant ratio where
    A <= 0. Good responses are learnt however old they are; bad ones no longer pull once the policy has left them. The
    metrics are those of both losses, each 0 at the tokens of the other loss.

    Args:
      positive: the loss where A > 0.
      negative: the loss where A <= 0.

    Raises:
      TypeError: something else than policy losses.
      ValueError: a loss that selects tokens of the step.

    Example:
      >>> BySign(positive=PPO(), negative=GSPO()).token_local
      False

    Le Roux et al. 2025, Tapered off-policy REINFORCE, https://arxiv.org/abs/2503.14286
    """

    positive: PolicyLoss = Reinforce()  # noqa: RUF009  frozen
    negative: PolicyLoss = CISPO(clip_low=1.0, clip_high=0.0)  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        for name, loss in (("positive", self.positive), ("negative", self.negative)):
            if not isinstance(loss, PolicyLoss):
                raise TypeError(f"{name}: got {type(loss).__name__}, expected a policy loss, such as PPO()")
            if loss.selects is not None:
                raise ValueError(f"{name}: got {loss}, expected one that selects no tokens of the step")

    @property
    def token_local(self) -> bool:  # type: ignore[override]
        return self.positive.token_local and self.negative.token_local

    @property
    def weighs_by_ratio(self) -> bool:  # type: ignore[override]
        return self.positive.weighs_by_ratio or self.negative.weighs_by_ratio

    def __call__(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **given: Any) -> Result:
        good = advantages > 0

        (loss, found), (other, others) = (
            of(log_probs, old_log_probs, advantages, **given) for of in (self.positive, self.negative)
        )
        indicators = {name: jnp.where(good, x, others.get(name, 0 * x)) for name, x in found.items()}
        indicators |= {name: jnp.where(good, 0, x) for name, x in others.items() if name not in found}
        return jnp.where(good, loss, other), indicators
