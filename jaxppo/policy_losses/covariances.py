"""Losses that treat the tokens with high covariance of log-prob and advantage differently."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxppo.base.arrays import Coefficient, check, needed
from jaxppo.base.kl import log_ratio, magnitude
from jaxppo.policy_losses.base import PolicyLoss, Result, Tokens, clipped_surrogate, number


@dataclasses.dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """The `PPO` loss, and 0 for some random tokens of high covariance between advantage and
    log-prob.

    `covariance_mask` picks them over the whole step, among the tokens that the ratio's clip leaves
    alone.

    Args:
      clip_low, clip_high: see `PPO`.
      share: the share of the step's tokens that are picked.
      low: tokens are picked among covariances above this.
      high: tokens are picked among covariances below this.

    Example:
      >>> ClipCov().share
      0.0002

    Cui et al. 2025, The entropy mechanism of reinforcement learning,
    https://arxiv.org/abs/2505.22617
    """

    clip_low: Coefficient = number(0.2, least=0)
    clip_high: Coefficient = number(0.2, least=0)
    share: Coefficient = number(2e-4, least=0, most=1)
    low: Coefficient = number(1.0)
    high: Coefficient = number(5.0)
    token_local: ClassVar[bool] = True
    selects: ClassVar[Literal["random"]] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.low, jax.Array) or isinstance(self.high, jax.Array):
            object.__setattr__(self, "high", jnp.where(self.low < self.high, self.high, jnp.nan))
        else:
            check("low, high", f"{self.low}, {self.high}", self.low < self.high, "low < high")

    def selectable(
        self, covariance: Tokens, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens
    ) -> Bool[Array, "R T"]:
        ratio = jnp.exp(log_ratio(log_probs, old_log_probs))
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        spared = -advantages * clipped <= -advantages * ratio
        return spared & (covariance > self.low) & (covariance < self.high)

    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        *,
        selected: Tokens | None = None,
        **_: object,
    ) -> Result:
        selected = needed("selected", selected, "the step's covariance_mask")
        ratio = jnp.exp(log_ratio(log_probs, old_log_probs))
        loss = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)[0]
        return jnp.where(selected > 0, 0, loss), {"clip_fraction": selected}


@dataclasses.dataclass(frozen=True)
class KLCov(PolicyLoss):
    """-A r, plus coef |log_prob - old_log_prob| on the tokens of highest covariance between
    advantage and log-prob.

    `covariance_mask` picks them over the whole step.

    Args:
      share: the share of the step's tokens that are picked. 2e-3 is for 7B models; the paper has
        2e-4 for 32B.
      coef: the strength of the penalty.

    Example:
      >>> KLCov(coef=0.5).selects
      'highest'

    Cui et al. 2025, The entropy mechanism of reinforcement learning,
    https://arxiv.org/abs/2505.22617
    """

    share: Coefficient = number(2e-3, least=0, most=1)
    coef: Coefficient = number(1.0, least=0)
    token_local: ClassVar[bool] = True
    selects: ClassVar[Literal["highest"]] = "highest"

    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        *,
        selected: Tokens | None = None,
        **_: object,
    ) -> Result:
        selected = needed("selected", selected, "the step's covariance_mask")
        distance = magnitude(log_probs - old_log_probs)
        loss = -advantages * jnp.exp(log_ratio(log_probs, old_log_probs))
        loss = loss + jnp.where(selected > 0, self.coef * distance, 0)
        return loss, {"penalised_fraction": selected, "ppo_kl_abs": distance}
