"""A loss whose weight is the ratio where A < 0, and one over the ratio where A > 0."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from jaxppo.base.arrays import Coefficient
from jaxppo.base.kl import log_ratio
from jaxppo.policy_losses.base import PolicyLoss, Result, Tokens, number


@dataclasses.dataclass(frozen=True)
class ASPO(PolicyLoss):
    """PPO's clip with a flipped weight where A > 0: unlikely tokens of good responses learn most,
    and not least.

        A < 0:  c = max(r, 1 - clip_low),    w = c,        loss = -A c
        A > 0:  c = min(r, 1 + clip_high),   w = 1 / c,    loss = -A c / sg(c)^2
        where w > dual_clip:                               loss = -A dual_clip log_prob

    A clipped token has no gradient, and any other one pulls with its weight, -A min(w, dual_clip).
    So a token beyond `dual_clip` keeps its gradient, which PPO's dual clip ends.

    Args:
      clip_low: where A < 0 the ratio is clipped below 1 - clip_low.
      clip_high: where A > 0 it is clipped above 1 + clip_high.
      dual_clip: the largest weight, above 1.

    Example:
      >>> from jaxppo.policy_losses import ASPO
      >>> old, ratio = jnp.zeros(3), jnp.array([0.5, 1.0, 2.0])
      >>> pull = jax.grad(lambda x: -ASPO()(x, old, jnp.ones(3))[0].sum())(jnp.log(ratio))
      >>> pull.round(3).tolist()  # PPO pulls with 0.5, 1 and 0
      [2.0, 1.0, 0.0]

    Wang et al. 2025, Asymmetric importance sampling policy optimization,
    https://arxiv.org/abs/2510.06062, as in the authors' code:
    https://github.com/wizard-III/Archer2.0
    """

    clip_low: Coefficient = number(0.2, least=0)
    clip_high: Coefficient = number(0.2, least=0)
    dual_clip: Coefficient = number(3.0, above=1)
    token_local: ClassVar[bool] = True

    def __call__(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object
    ) -> Result:
        ratio = jnp.exp(log_ratio(log_probs, old_log_probs))
        good = advantages > 0
        clipped = jnp.where(
            good, jnp.minimum(ratio, 1 + self.clip_high), jnp.maximum(ratio, 1 - self.clip_low)
        )
        constant = lax.stop_gradient(clipped)
        weight = jnp.where(good, 1 / constant, constant)
        surrogate = jnp.where(good, clipped / constant**2, clipped)
        is_heavy = weight > self.dual_clip
        loss = -advantages * jnp.where(is_heavy, self.dual_clip * log_probs, surrogate)
        counts = advantages != 0
        indicators = {
            "clip_fraction": counts & (clipped != ratio),
            "heavy_fraction": counts & is_heavy,
        }
        return loss, {name: x.astype(jnp.float32) for name, x in indicators.items()}
