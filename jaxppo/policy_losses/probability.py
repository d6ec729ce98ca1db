"""A loss that drops a token if its probability is far from the one that it was sampled with."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from jaxppo.base.arrays import Coefficient, check_field
from jaxppo.base.kl import log_ratio
from jaxppo.policy_losses.base import PolicyLoss, Result, Tokens, check_clip


@dataclasses.dataclass(frozen=True)
class ProbabilityMask(PolicyLoss):
    """-A min(r, ratio_cap) + pull d^2, the first term 0 where p - q is outside [-clip_low, clip_high].

    p is the token's probability now, q the old one, d = log p - log q, r = p / q. Unlike in `DPPO`, the mask does not
    depend on the sign of A: it drops a token that is far from q on either side. The cap bounds the weight of a token's
    gradient and does not end it; the pull also acts on dropped tokens. prime-rl calls it "ipo": it is not the
    preference loss IPO. The published setting has q from the sampler, `ratio_to="rollout"`.

    Args:
      clip_low: how far p may be below q; 1 drops nothing.
      clip_high: how far p may be above q; 1 drops nothing.
      ratio_cap: the largest ratio that weighs a token.
      pull: the strength of the quadratic pull to q.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> ProbabilityMask(0.1, 0.1, pull=1e-3)
      ProbabilityMask(clip_low=0.1, clip_high=0.1, ratio_cap=10000.0, pull=0.001)

    https://github.com/PrimeIntellect-ai/prime-rl
    """

    clip_low: Coefficient = 0.3
    clip_high: Coefficient = 0.3
    ratio_cap: Coefficient = 1e4
    pull: Coefficient = 0.0
    token_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_clip(self)
        check_field(self, "ratio_cap", above=0)
        check_field(self, "pull", least=0)

    def __call__(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object) -> Result:
        d = log_probs - old_log_probs
        higher = jnp.maximum(log_probs, old_log_probs)
        moved = lax.stop_gradient(jnp.sign(d) * jnp.exp(higher) * -jnp.expm1(-jnp.abs(d)))
        leaves = (moved < -self.clip_low) | (moved > self.clip_high)
        weight = lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio(log_probs, old_log_probs)), self.ratio_cap))
        ratio = weight * (1 + (log_probs - lax.stop_gradient(log_probs)))
        loss = jnp.where(leaves, 0, -ratio * advantages) + self.pull * d**2
        return loss, {"clip_fraction": leaves.astype(jnp.float32)}
