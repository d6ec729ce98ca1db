"""Losses that use the ratio of whole sequences."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax import lax

from jaxppo.base.arrays import Coefficient
from jaxppo.base.kl import MAX_LOG_RATIO, log_ratio
from jaxppo.policy_losses.base import (
    PolicyLoss,
    Result,
    Tokens,
    choice,
    clipped_surrogate,
    number,
    sequence_log_ratio,
)
from jaxppo.sharding import Segments

Gradient = Literal["sequence", "token"]
_LEAST_LOG_WEIGHT = math.log(1e-8)


@dataclasses.dataclass(frozen=True)
class GSPO(PolicyLoss):
    """The clipped surrogate of the sequence's ratio: s = exp(mean over the sequence of log_prob -
    old_log_prob).

    Args:
      clip_low: s is clipped below 1 - clip_low.
      clip_high: s is clipped above 1 + clip_high.
      dual_clip: see `PPO`.
      gradient: "sequence" differentiates the mean over the sequence (GSPO); "token" gives each
        token the gradient of s * log_prob (GSPO-token). The values are the same. The gradients
        differ if the advantages or the weights of a sequence's tokens differ.

    Example:
      >>> GSPO(3e-4, 4e-4).gradient
      'sequence'

    Zheng et al. 2025, Group sequence policy optimization, https://arxiv.org/abs/2507.18071
    """

    clip_low: Coefficient = number(3e-4, least=0)
    clip_high: Coefficient = number(4e-4, least=0)
    dual_clip: Coefficient | None = number(None, above=1)
    gradient: Gradient = choice("sequence", Gradient)

    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        *,
        mask: Tokens,
        segments: Segments,
        **_: object,
    ) -> Result:
        sequence = sequence_log_ratio(log_probs, old_log_probs, mask, segments)
        if self.gradient == "token":
            sequence = lax.stop_gradient(sequence) + log_probs - lax.stop_gradient(log_probs)
        ratio = jnp.exp(jnp.clip(sequence, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        return clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)


@dataclasses.dataclass(frozen=True)
class GMPO(PolicyLoss):
    """The geometric mean of clipped ratios: -A exp(mean over the sequence of d), A the sequence's
    mean advantage.

    d is log_prob - old_log_prob, at most clip_high where A > 0, at least -clip_low where A < 0:
    bounds in log space. There is one value per sequence, so "sequence_mean_token_mean" is the
    published aggregation. The clip fractions count tokens outside the bounds on either side, with A
    > 0 and (lower) with A < 0.

    Args:
      clip_low: the lower bound, nats.
      clip_high: the upper bound, nats.

    Example:
      >>> GMPO()
      GMPO(clip_low=0.4, clip_high=0.4)

    Zhao et al. 2025, Geometric-mean policy optimization, https://arxiv.org/abs/2507.20673
    """

    clip_low: Coefficient = number(0.4, least=0)
    clip_high: Coefficient = number(0.4, least=0)

    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        *,
        mask: Tokens,
        segments: Segments,
        **_: object,
    ) -> Result:
        d = log_probs - old_log_probs
        clipped = jnp.clip(d, -self.clip_low, self.clip_high)
        worse = jnp.where(jnp.sign(advantages) * clipped < jnp.sign(advantages) * d, clipped, d)
        mean = segments.mean(jnp.where(advantages == 0, 0, worse), mask)
        ratio = jnp.exp(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        indicators = {"clip_fraction": (clipped != d) & (advantages > 0)}
        indicators["clip_fraction_lower"] = (clipped != d) & (advantages < 0)
        loss = -segments.spread(segments.mean(advantages, mask) * ratio)
        return loss, {name: x.astype(jnp.float32) for name, x in indicators.items()}


@dataclasses.dataclass(frozen=True)
class VESPO(PolicyLoss):
    """The score function, softly weighted by the sequence's ratio w: -phi A log_prob with phi = w^k
    exp(l (1 - w)).

    w is the product of the ratios of the sequence's tokens. phi is a constant: 1 where w is 1,
    largest at w = k / l, and 0 far from there on either side. k and l depend on the sign of A. A
    token's log-ratio counts within [-20, 20], log w within [log 1e-8, 20].

    Args:
      k_positive: k where A >= 0.
      lambda_positive: l where A >= 0.
      k_negative: k where A < 0.
      lambda_negative: l where A < 0.

    Example:
      >>> VESPO()
      VESPO(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)

    2026, Variational sequence-level soft policy optimization, https://arxiv.org/abs/2602.10693
    """

    k_positive: Coefficient = number(2.0, least=0)
    lambda_positive: Coefficient = number(3.0, least=0)
    k_negative: Coefficient = number(3.0, least=0)
    lambda_negative: Coefficient = number(2.0, least=0)

    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        *,
        mask: Tokens,
        segments: Segments,
        **_: object,
    ) -> Result:
        d = lax.stop_gradient(log_ratio(log_probs, old_log_probs))
        log_w = segments.spread(jnp.clip(segments.sum(d), _LEAST_LOG_WEIGHT, MAX_LOG_RATIO))
        k = jnp.where(advantages < 0, self.k_negative, self.k_positive)
        rate = jnp.where(advantages < 0, self.lambda_negative, self.lambda_positive)
        weight = jnp.exp(k * log_w - rate * jnp.expm1(log_w))
        return -weight * advantages * log_probs, {"sequence_weight": weight}
