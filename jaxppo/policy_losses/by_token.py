"""Losses in which each token has its own ratio and its own advantage, and a loss of two by the
advantage's sign.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.base.arrays import Coefficient
from jaxppo.base.kl import log_ratio
from jaxppo.policy_losses.base import (
    Level,
    PolicyLoss,
    Result,
    Tokens,
    checked_result,
    choice,
    clipped_surrogate,
    number,
    ratio_at,
)
from jaxppo.sharding import Segments

Divergence = Literal["tv", "kl"]
_TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class PPO(PolicyLoss):
    """Clipped surrogate: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_prob -
    old_log_prob).

    Args:
      clip_low: the ratio is clipped below 1 - clip_low; 1 clips nothing.
      clip_high: the ratio is clipped above 1 + clip_high; unequal bounds are DAPO's clip-higher.
      dual_clip: c, above 1: where A < 0 the loss is at most -A c. None is off.

    Example:
      >>> PPO(clip_high=0.28)
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=None)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020,
    https://arxiv.org/abs/1912.09729; clip-higher: Yu et al. 2025, https://arxiv.org/abs/2503.14476
    """

    clip_low: Coefficient = number(0.2, least=0)
    clip_high: Coefficient = number(0.2, least=0)
    dual_clip: Coefficient | None = number(None, above=1)
    token_local: ClassVar[bool] = True

    def __call__(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object
    ) -> Result:
        ratio = jnp.exp(log_ratio(log_probs, old_log_probs))
        return clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)


@dataclasses.dataclass(frozen=True)
class CISPO(PolicyLoss):
    """REINFORCE with a clipped, constant ratio: -clip(r, 1 - clip_low, 1 + clip_high) A log_prob.

    No token loses its gradient, unless `unified_mask` is set.

    Args:
      clip_low: the ratio is clipped below 1 - clip_low; 1, as in the paper, is no lower bound.
      clip_high: the ratio is clipped above 1 + clip_high. The paper tunes it and does not state it;
        0.28 is slime's.
      level: r is of the "token", or of the "sequence", the geometric mean of its tokens' ratios.
      unified_mask: the loss is 0 where the clip of PPO would end the gradient: A > 0 and r above
        the upper bound, A < 0 and r below the lower one.

    Example:
      >>> CISPO()
      CISPO(clip_low=1.0, clip_high=0.28, level='token', unified_mask=False)

    MiniMax 2025, MiniMax-M1, the mask in equation 7, https://arxiv.org/abs/2506.13585
    """

    clip_low: Coefficient = number(1.0, least=0)
    clip_high: Coefficient = number(0.28, least=0)
    level: Level = choice("token", Level)
    unified_mask: bool = False

    @property
    def token_local(self) -> bool:  # type: ignore[override]
        return self.level == "token"

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
        ratio = lax.stop_gradient(ratio_at(self.level, log_probs, old_log_probs, mask, segments))
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        indicators = {"clip_fraction": (clipped != ratio).astype(jnp.float32)}
        loss = -clipped * advantages * log_probs
        if self.unified_mask:
            leaves = ((advantages > 0) & (ratio > clipped)) | ((advantages < 0) & (ratio < clipped))
            loss = jnp.where(leaves, 0, loss)
            indicators["masked_fraction"] = leaves.astype(jnp.float32)
        return loss, indicators


@dataclasses.dataclass(frozen=True)
class SAPO(PolicyLoss):
    """A soft gate in place of the clip: -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A.

    Args:
      tau_positive: the steepness where A > 0, above 0.
      tau_negative: the steepness elsewhere, above 0.
      level: see `CISPO`.

    Example:
      >>> SAPO().tau_negative
      1.05

    Gao et al. 2025, Soft adaptive policy optimization, https://arxiv.org/abs/2511.20347
    """

    tau_positive: Coefficient = number(1.0, above=0)
    tau_negative: Coefficient = number(1.05, above=0)
    level: Level = choice("token", Level)

    @property
    def token_local(self) -> bool:  # type: ignore[override]
        return self.level == "token"

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
        tau = jnp.where(advantages > 0, self.tau_positive, self.tau_negative)
        ratio = ratio_at(self.level, log_probs, old_log_probs, mask, segments)
        return -4 / tau * _sigmoid(tau * (ratio - 1)) * advantages, {}


@jax.custom_jvp
def _sigmoid(x: Tokens) -> Tokens:
    """The sigmoid with derivative sigmoid(x) sigmoid(-x); JAX's, p (1 - p), is rounding alone
    where p is near 1.
    """
    return jax.nn.sigmoid(x)


@_sigmoid.defjvp
def _sigmoid_jvp(primals: tuple[Tokens], tangents: tuple[Tokens]) -> tuple[Tokens, Tokens]:
    (x,) = primals
    (dx,) = tangents
    p = _sigmoid(x)
    return p, p * _sigmoid(-x) * dx


@dataclasses.dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """The score function: -A log_prob. With `advantages.gpg` it is GPG.

    Example:
      >>> Reinforce()
      Reinforce()

    Williams 1992, https://doi.org/10.1007/BF00992696; GPG: Chu et al. 2025,
    https://arxiv.org/abs/2504.02546
    """

    token_local: ClassVar[bool] = True
    weighs_by_ratio: ClassVar[bool] = False

    def __call__(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object
    ) -> Result:
        return -advantages * log_probs, {}


@dataclasses.dataclass(frozen=True)
class DPPO(PolicyLoss):
    """-min(r, ratio_cap) A log_prob, r constant, for tokens whose probability has moved little
    enough.

    With p and q a token's probability under the policy and the old one, a token with A > 0 and p >
    q has loss 0 where the divergence is above clip_high, one with A < 0 and p < q where it is above
    clip_low. The divergence is of the token against all others: |p - q| ("tv"), or q log(q / p) +
    (1 - q) log((1 - q) / (1 - p)) ("kl").

    Args:
      divergence: "tv" or "kl".
      clip_low: the divergence allowed downward.
      clip_high: the divergence allowed upward. The paper has 0.15 for "tv", and 0.05 for "kl".
      ratio_cap: the largest ratio that weighs a token.

    Example:
      >>> DPPO("kl", 0.05, 0.05).ratio_cap
      20.0

    Qi et al. 2026, Rethinking the trust region in LLM reinforcement learning,
    https://arxiv.org/abs/2602.04879
    """

    divergence: Divergence = choice("tv", Divergence)
    clip_low: Coefficient = number(0.15, least=0)
    clip_high: Coefficient = number(0.15, least=0)
    ratio_cap: Coefficient = number(20.0, above=0)
    token_local: ClassVar[bool] = True

    def __call__(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object
    ) -> Result:
        old = jnp.exp(old_log_probs)
        if self.divergence == "tv":
            divergence = jnp.abs(jnp.exp(log_probs) - old)
        else:
            rest = _log_of_others(log_probs)
            old_rest = _log_of_others(old_log_probs)
            divergence = old * (old_log_probs - log_probs) + (1 - old) * (old_rest - rest)
        divergence = lax.stop_gradient(divergence)
        up = (advantages > 0) & (log_probs > old_log_probs)
        down = (advantages < 0) & (log_probs < old_log_probs)
        leaves = (up & (divergence > self.clip_high)) | (down & (divergence > self.clip_low))
        ratio = _capped_ratio(log_probs, old_log_probs, self.ratio_cap)
        loss = jnp.where(leaves, 0, -ratio * advantages * log_probs)
        return loss, {"clip_fraction": leaves.astype(jnp.float32)}


def _log_of_others(log_probs: Tokens) -> Tokens:
    """log(1 - p): the log of the probability of all other tokens together."""
    return jnp.log(-jnp.expm1(jnp.minimum(log_probs, -_TINY)))


def _capped_ratio(log_probs: Tokens, old_log_probs: Tokens, cap: Coefficient) -> Tokens:
    """min(r, cap), a constant."""
    return lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio(log_probs, old_log_probs)), cap))


@dataclasses.dataclass(frozen=True)
class DRO(PolicyLoss):
    """The score function with a quadratic pull to the old policy: -A log_prob + beta / 2 (log_prob
    - old_log_prob)^2.

    Args:
      beta: the strength of the pull.

    Example:
      >>> DRO()
      DRO(beta=0.1)

    Richemond et al. 2024, Offline regularised reinforcement learning,
    https://arxiv.org/abs/2405.19107
    """

    beta: Coefficient = number(0.1, least=0)
    token_local: ClassVar[bool] = True
    weighs_by_ratio: ClassVar[bool] = False

    def __call__(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object
    ) -> Result:
        return -advantages * log_probs + self.beta / 2 * (log_probs - old_log_probs) ** 2, {}


@dataclasses.dataclass(frozen=True)
class ProbabilityMask(PolicyLoss):
    """-A min(r, ratio_cap) + pull d^2, the first term 0 where p - q is outside [-clip_low,
    clip_high].

    p is the token's probability now, q the old one, d = log p - log q, r = p / q. Unlike in `DPPO`,
    the mask does not depend on the sign of A. The cap bounds the weight of a token's gradient and
    does not end it; the pull also acts on dropped tokens. prime-rl calls it "ipo": it is not the
    preference loss IPO. The published setting has q from the sampler, `ratio_to="rollout"`.

    Args:
      clip_low: how far p may be below q; 1 drops nothing.
      clip_high: how far p may be above q; 1 drops nothing.
      ratio_cap: the largest ratio that weighs a token.
      pull: the strength of the quadratic pull to q.

    Example:
      >>> ProbabilityMask(0.1, 0.1, pull=1e-3)
      ProbabilityMask(clip_low=0.1, clip_high=0.1, ratio_cap=10000.0, pull=0.001)

    https://github.com/PrimeIntellect-ai/prime-rl
    """

    clip_low: Coefficient = number(0.3, least=0)
    clip_high: Coefficient = number(0.3, least=0)
    ratio_cap: Coefficient = number(1e4, above=0)
    pull: Coefficient = number(0.0, least=0)
    token_local: ClassVar[bool] = True

    def __call__(
        self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object
    ) -> Result:
        d = log_probs - old_log_probs
        higher = jnp.maximum(log_probs, old_log_probs)
        moved = lax.stop_gradient(jnp.sign(d) * jnp.exp(higher) * -jnp.expm1(-jnp.abs(d)))
        leaves = (moved < -self.clip_low) | (moved > self.clip_high)
        weight = _capped_ratio(log_probs, old_log_probs, self.ratio_cap)
        ratio = weight * (1 + (log_probs - lax.stop_gradient(log_probs)))
        loss = jnp.where(leaves, 0, -ratio * advantages) + self.pull * d**2
        return loss, {"clip_fraction": leaves.astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class BySign(PolicyLoss):
    """One loss where A > 0, another one elsewhere.

    The default is TOPR, by tokens: -A log_prob where A > 0, and -min(r, 1) A log_prob with a
    constant ratio where A <= 0. Good responses are learnt however old they are; bad ones no longer
    pull once the policy has left them. Metrics of either loss are 0 at the tokens of the other.

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

    positive: PolicyLoss = Reinforce()
    negative: PolicyLoss = CISPO(clip_low=1.0, clip_high=0.0)

    def __post_init__(self) -> None:
        for name, loss in (("positive", self.positive), ("negative", self.negative)):
            if not isinstance(loss, PolicyLoss):
                raise TypeError(
                    f"{name}: got {type(loss).__name__}, expected a policy loss, such as PPO()"
                )
            if loss.selects is not None:
                raise ValueError(
                    f"{name}: got {loss}, expected one that selects no tokens of the step"
                )

    @property
    def token_local(self) -> bool:  # type: ignore[override]
        return self.positive.token_local and self.negative.token_local

    @property
    def weighs_by_ratio(self) -> bool:  # type: ignore[override]
        return self.positive.weighs_by_ratio or self.negative.weighs_by_ratio

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
        good = advantages > 0

        def result_of(loss: PolicyLoss) -> Result:
            result = loss(log_probs, old_log_probs, advantages, mask=mask, segments=segments)
            return checked_result(loss, result, log_probs.shape)

        positive, indicators = result_of(self.positive)
        negative, others = result_of(self.negative)
        by_sign = {}
        for name, x in indicators.items():
            by_sign[name] = jnp.where(good, x, others.get(name, 0 * x))
        for name, x in others.items():
            if name not in indicators:
                by_sign[name] = jnp.where(good, 0, x)
        return jnp.where(good, positive, negative), by_sign
