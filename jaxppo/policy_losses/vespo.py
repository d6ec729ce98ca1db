"""The policy gradient with a soft weight on whole sequences."""

from __future__ import annotations

import dataclasses
import math
from typing import Unpack

import jax.numpy as jnp
from jax import lax

from jaxppo.base.arrays import Coefficient, check_field
from jaxppo.base.kl import MAX_LOG_RATIO, log_ratio
from jaxppo.policy_losses.base import Beside, PolicyLoss, Result, Tokens

_LEAST_LOG_WEIGHT = math.log(1e-8)


@dataclasses.dataclass(frozen=True)
class VESPO(PolicyLoss):
    """The score function, softly weighted by the sequence's ratio w: -phi A log_prob with phi = w^k exp(l (1 - w)).

    w is the product of the ratios of the sequence's tokens. phi is a constant: 1 where w is 1, largest at w = k / l,
    and 0 far from there on either side. k and l depend on the sign of A. A token's log-ratio counts within [-20, 20],
    log w within [log 1e-8, 20].

    Args:
      k_positive: k where A >= 0.
      lambda_positive: l where A >= 0.
      k_negative: k where A < 0.
      lambda_negative: l where A < 0.

    Raises:
      ValueError: a number below 0.

    Example:
      >>> VESPO()
      VESPO(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)

    2026, Variational sequence-level soft policy optimization, https://arxiv.org/abs/2602.10693
    """

    k_positive: Coefficient = 2.0
    lambda_positive: Coefficient = 3.0
    k_negative: Coefficient = 3.0
    lambda_negative: Coefficient = 2.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_field(self, field.name, least=0)

    def __call__(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **of: Unpack[Beside]) -> Result:
        segments = of["segments"]
        d = lax.stop_gradient(log_ratio(log_probs, old_log_probs))
        log_w = segments.spread(jnp.clip(segments.sum(d), _LEAST_LOG_WEIGHT, MAX_LOG_RATIO))
        k = jnp.where(advantages < 0, self.k_negative, self.k_positive)
        rate = jnp.where(advantages < 0, self.lambda_negative, self.lambda_positive)
        weight = jnp.exp(k * log_w - rate * jnp.expm1(log_w))
        return -weight * advantages * log_probs, {"sequence_weight": weight}
