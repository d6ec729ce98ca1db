"""The published policy losses: one frozen dataclass each, which holds its hyperparameters and is called.

A loss takes `f32[R, T]` arrays that are 0 outside the loss mask, and returns the loss of each token, with indicators
of what it did there. To add one, write such a class, in any file: see `PolicyLoss`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxppo._arrays import Coefficient, check_choice, check_number
from jaxppo._sharding import Segments
from jaxppo.kl import MAX_LOG_RATIO, log_ratio, magnitude

Tokens = Float[Array, "R T"]
Indicators = dict[str, Tokens]
Result = tuple[Tokens, Indicators]
_TINY = 1e-30


class PolicyLoss(abc.ABC):
    """A policy loss: a frozen dataclass whose fields are its hyperparameters.

    Its `__call__` is per-shard code: `[R, T]` is what one device holds. What it wants of a whole sequence it asks of
    `segments`, whose sums cross context shards. Fields may hold traced numbers where the loss is made inside `jit`.

    Attributes:
      token_local: the loss of a token depends on that token alone. Then it may be computed a block of tokens at a time,
        `segments` being of no use, and gradients need one product with the head's kernel fewer.
      selects: `__call__` also takes `selected`, the tokens of the step that `covariance_mask` picked: of those for
        which `selectable` holds, the share `share`, either at "random" or of the "highest" covariance.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Focal(PolicyLoss):
      ...     power: float = 2.0
      ...     token_local: ClassVar[bool] = True
      ...
      ...     def __call__(self, log_probs, old_log_probs, advantages, *, mask, segments, selected=None):
      ...         return -advantages * (1 - jnp.exp(log_probs)) ** self.power * log_probs, {}
      >>> Focal(power=1.0)
      Focal(power=1.0)
    """

    token_local: ClassVar[bool] = False
    selects: ClassVar[Literal["highest", "random"] | None] = None

    @abc.abstractmethod
    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        *,
        mask: Tokens,
        segments: Segments,
        selected: Tokens | None = None,
    ) -> Result:
        """The loss of each token, and indicators of what happened to it.

        Args:
          log_probs: of the policy that learns; the only argument with a gradient.
          old_log_probs: what the ratio is over.
          advantages: of each token.
          mask: the loss mask, 0 or 1.
          segments: the sequences of the rows.
          selected: 1 for the tokens that `covariance_mask` picked, where `selects` is set.

        Returns:
          `f32[R, T]`, and by metric name `f32[R, T]` that are averaged over tokens.
        """

    def selectable(
        self, covariance: Tokens, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens
    ) -> Bool[Array, "R T"]:
        """The tokens that `covariance_mask` may pick; all by default."""
        return jnp.ones(covariance.shape, bool)


def _clipped_surrogate(
    ratio: Tokens, advantages: Tokens, clip_low: Any, clip_high: Any, dual_clip: Any = None
) -> Result:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0."""
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.where(clipped > plain, clipped, plain)
    indicators = {"clip_fraction": clipped > plain}
    if dual_clip is not None:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss = jnp.where(beyond, bound, loss)
        indicators["clip_fraction_lower"] = beyond
    return loss, {name: x.astype(jnp.float32) for name, x in indicators.items()}


def _check_clip(loss: PPO | GSPO | CISPO | DPPO | GMPO | ClipCov) -> None:
    for name in ("clip_low", "clip_high"):
        check_number(name, getattr(loss, name), least=0)


def _check_dual_clip(dual_clip: Coefficient | None) -> None:
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, above=1)


@dataclasses.dataclass(frozen=True)
class PPO(PolicyLoss):
    """Clipped surrogate: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_prob - old_log_prob).

    With `dual_clip` c and A < 0 it is at most -A c. Unequal bounds are DAPO's clip-higher.

    Args:
      clip_low: the ratio is clipped below 1 - clip_low; 1 clips nothing.
      clip_high: the ratio is clipped above 1 + clip_high.
      dual_clip: where A < 0, the ratio counts at most this much; above 1. None is off.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> PPO(clip_high=0.28)
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=None)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020,
    https://arxiv.org/abs/1912.09729; clip-higher: Yu et al. 2025, https://arxiv.org/abs/2503.14476
    """

    clip_low: Coefficient = 0.2
    clip_high: Coefficient = 0.2
    dual_clip: Coefficient | None = None
    token_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_clip(self)
        _check_dual_clip(self.dual_clip)

    def __call__(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object) -> Result:
        ratio = jnp.exp(log_ratio(log_probs, old_log_probs))
        return _clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)


@dataclasses.dataclass(frozen=True)
class GSPO(PolicyLoss):
    """The clipped surrogate of the sequence's ratio: s = exp(mean over the sequence of log_prob - old_log_prob).

    Args:
      clip_low: s is clipped below 1 - clip_low.
      clip_high: s is clipped above 1 + clip_high.
      dual_clip: see `PPO`.
      gradient: it runs through the mean over the "sequence" (GSPO), or each "token" has the gradient of
        s * log_prob (GSPO-token). The value is the same, the gradient another where masks are uneven.

    Raises:
      ValueError: a number out of its range, an unknown gradient.

    Example:
      >>> GSPO(3e-4, 4e-4).gradient
      'sequence'

    Zheng et al. 2025, Group sequence policy optimization, https://arxiv.org/abs/2507.18071
    """

    clip_low: Coefficient = 3e-4
    clip_high: Coefficient = 4e-4
    dual_clip: Coefficient | None = None
    gradient: Literal["sequence", "token"] = "sequence"

    def __post_init__(self) -> None:
        _check_clip(self)
        _check_dual_clip(self.dual_clip)
        check_choice("gradient", self.gradient, Literal["sequence", "token"])

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
        sequence = segments.spread(segments.mean(log_probs - old_log_probs, mask))
        if self.gradient == "token":
            sequence = lax.stop_gradient(sequence) + log_probs - lax.stop_gradient(log_probs)
        ratio = jnp.exp(jnp.clip(sequence, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        return _clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)


@dataclasses.dataclass(frozen=True)
class CISPO(PolicyLoss):
    """REINFORCE with a clipped, constant ratio: -clip(r, 1 - clip_low, 1 + clip_high) A log_prob.

    No token loses its gradient.

    Args:
      clip_low: the ratio is clipped below 1 - clip_low; 1, as in the paper, is no lower bound.
      clip_high: the ratio is clipped above 1 + clip_high. The paper tunes it and does not state it; 0.28 is slime's.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> CISPO()
      CISPO(clip_low=1.0, clip_high=0.28)

    MiniMax 2025, MiniMax-M1, https://arxiv.org/abs/2506.13585
    """

    clip_low: Coefficient = 1.0
    clip_high: Coefficient = 0.28
    token_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_clip(self)

    def __call__(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object) -> Result:
        ratio = lax.stop_gradient(jnp.exp(log_ratio(log_probs, old_log_probs)))
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        return -clipped * advantages * log_probs, {"clip_fraction": (clipped != ratio).astype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class SAPO(PolicyLoss):
    """A soft gate in place of the clip: -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A.

    Args:
      tau_positive: the steepness where A > 0.
      tau_negative: the steepness elsewhere.

    Raises:
      ValueError: a steepness that is not above 0.

    Example:
      >>> SAPO().tau_negative
      1.05

    Gao et al. 2025, Soft adaptive policy optimization, https://arxiv.org/abs/2511.20347
    """

    tau_positive: Coefficient = 1.0
    tau_negative: Coefficient = 1.05
    token_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("tau_positive", self.tau_positive, above=0)
        check_number("tau_negative", self.tau_negative, above=0)

    def __call__(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object) -> Result:
        tau = jnp.where(advantages > 0, self.tau_positive, self.tau_negative)
        ratio = jnp.exp(log_ratio(log_probs, old_log_probs))
        return -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantages, {}


@dataclasses.dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """The score function: -A log_prob.

    Example:
      >>> Reinforce()
      Reinforce()

    Williams 1992, https://doi.org/10.1007/BF00992696
    """

    token_local: ClassVar[bool] = True

    def __call__(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object) -> Result:
        return -advantages * log_probs, {}


@dataclasses.dataclass(frozen=True)
class GPG(Reinforce):
    """The score function on the advantages of `advantages.gpg`: -A log_prob.

    Example:
      >>> GPG()
      GPG()

    Chu et al. 2025, GPG, https://arxiv.org/abs/2504.02546
    """


@dataclasses.dataclass(frozen=True)
class DPPO(PolicyLoss):
    """-min(r, ratio_cap) A log_prob, r constant, for the tokens that a divergence of their probability allows.

    With p and q a token's probability under the policy and the old one, a token with A > 0 and p > q counts nothing
    where the divergence is above clip_high, one with A < 0 and p < q where it is above clip_low. The divergence is of
    the token against all others: |p - q| ("tv"), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) ("kl").

    Args:
      divergence: "tv" or "kl".
      clip_low: the divergence allowed downward.
      clip_high: the divergence allowed upward. The paper has 0.15 for "tv", and 0.05 for "kl".
      ratio_cap: the largest ratio that a token is weighed with.

    Raises:
      ValueError: an unknown divergence, a number out of its range.

    Example:
      >>> DPPO("kl", 0.05, 0.05).ratio_cap
      20.0

    Qi et al. 2026, Rethinking the trust region in LLM reinforcement learning, https://arxiv.org/abs/2602.04879
    """

    divergence: Literal["tv", "kl"] = "tv"
    clip_low: Coefficient = 0.15
    clip_high: Coefficient = 0.15
    ratio_cap: Coefficient = 20.0
    token_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("divergence", self.divergence, Literal["tv", "kl"])
        _check_clip(self)
        check_number("ratio_cap", self.ratio_cap, above=0)

    def __call__(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object) -> Result:
        divergence = lax.stop_gradient(self._divergence(log_probs, old_log_probs))
        up, down = (advantages > 0) & (log_probs > old_log_probs), (advantages < 0) & (log_probs < old_log_probs)
        leaves = (up & (divergence > self.clip_high)) | (down & (divergence > self.clip_low))
        ratio = lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio(log_probs, old_log_probs)), self.ratio_cap))
        loss = jnp.where(leaves, 0, -ratio * advantages * log_probs)
        return loss, {"clip_fraction": leaves.astype(jnp.float32)}

    def _divergence(self, log_probs: Tokens, old_log_probs: Tokens) -> Tokens:
        old = jnp.exp(old_log_probs)
        if self.divergence == "tv":
            return jnp.abs(jnp.exp(log_probs) - old)
        rest, old_rest = (jnp.log(-jnp.expm1(jnp.minimum(x, -_TINY))) for x in (log_probs, old_log_probs))
        return old * (old_log_probs - log_probs) + (1 - old) * (old_rest - rest)


@dataclasses.dataclass(frozen=True)
class GMPO(PolicyLoss):
    """The geometric mean of clipped ratios: -A exp(mean over the sequence of d), A the sequence's mean advantage.

    d is log_prob - old_log_prob, at most clip_high where A > 0, at least -clip_low where A < 0: bounds in log space.
    Of one value a sequence, "sequence_mean_token_mean" is the published aggregation. The clip fractions count
    tokens outside the bounds on either side, with A > 0 and (lower) with A < 0.

    Args:
      clip_low: the lower bound, nats.
      clip_high: the upper bound, nats.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> GMPO()
      GMPO(clip_low=0.4, clip_high=0.4)

    Zhao et al. 2025, Geometric-mean policy optimization, https://arxiv.org/abs/2507.20673
    """

    clip_low: Coefficient = 0.4
    clip_high: Coefficient = 0.4

    def __post_init__(self) -> None:
        _check_clip(self)

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
class DRO(PolicyLoss):
    """The score function with a quadratic pull to the old policy: -A log_prob + beta / 2 (log_prob - old_log_prob)^2.

    Args:
      beta: the strength of the pull.

    Raises:
      ValueError: a negative strength.

    Example:
      >>> DRO()
      DRO(beta=0.1)

    Richemond et al. 2024, Offline regularised reinforcement learning, https://arxiv.org/abs/2405.19107
    """

    beta: Coefficient = 0.1
    token_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("beta", self.beta, least=0)

    def __call__(self, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, **_: object) -> Result:
        return -advantages * log_probs + self.beta / 2 * (log_probs - old_log_probs) ** 2, {}


@dataclasses.dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """The `PPO` loss, and 0 for some random tokens of high covariance between advantage and log-prob.

    They are picked over the whole step by `covariance_mask`, among those that the ratio's clip spares.

    Args:
      clip_low: the ratio is clipped below 1 - clip_low.
      clip_high: the ratio is clipped above 1 + clip_high.
      share: of the step's tokens that are picked.
      low: tokens are picked among covariances above this.
      high: and below this.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> ClipCov().share
      0.0002

    Cui et al. 2025, The entropy mechanism of reinforcement learning, https://arxiv.org/abs/2505.22617
    """

    clip_low: Coefficient = 0.2
    clip_high: Coefficient = 0.2
    share: Coefficient = 2e-4
    low: Coefficient = 1.0
    high: Coefficient = 5.0
    token_local: ClassVar[bool] = True
    selects: ClassVar[Literal["random"]] = "random"

    def __post_init__(self) -> None:
        _check_clip(self)
        check_number("share", self.share, least=0, most=1)
        check_number("low", self.low)
        check_number("high", self.high)
        if not isinstance(self.low, jax.Array) and not isinstance(self.high, jax.Array) and not self.low < self.high:
            raise ValueError(f"low, high: got {self.low}, {self.high}, expected low < high")

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
        assert selected is not None  # policy_loss sees to it
        ratio = jnp.exp(log_ratio(log_probs, old_log_probs))
        loss = _clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)[0]
        return jnp.where(selected > 0, 0, loss), {"clip_fraction": selected}


@dataclasses.dataclass(frozen=True)
class KLCov(PolicyLoss):
    """-A r, plus coef |log_prob - old_log_prob| on the tokens of highest covariance between advantage and log-prob.

    They are picked over the whole step by `covariance_mask`.

    Args:
      share: of the step's tokens that are picked. 2e-3 is for 7B models; the paper has 2e-4 for 32B.
      coef: the strength of the penalty.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> KLCov(coef=0.5).selects
      'highest'

    Cui et al. 2025, The entropy mechanism of reinforcement learning, https://arxiv.org/abs/2505.22617
    """

    share: Coefficient = 2e-3
    coef: Coefficient = 1.0
    token_local: ClassVar[bool] = True
    selects: ClassVar[Literal["highest"]] = "highest"

    def __post_init__(self) -> None:
        check_number("share", self.share, least=0, most=1)
        check_number("coef", self.coef, least=0)

    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        *,
        selected: Tokens | None = None,
        **_: object,
    ) -> Result:
        assert selected is not None  # policy_loss sees to it
        distance = magnitude(log_probs - old_log_probs)
        loss = -advantages * jnp.exp(log_ratio(log_probs, old_log_probs))
        loss = loss + jnp.where(selected > 0, self.coef * distance, 0)
        return loss, {"penalised_fraction": selected, "ppo_kl_abs": distance}


BY_NAME: dict[str, type[PolicyLoss]] = {
    "cispo": CISPO,
    "clip_cov": ClipCov,
    "dppo": DPPO,
    "dro": DRO,
    "gmpo": GMPO,
    "gpg": GPG,
    "gspo": GSPO,
    "kl_cov": KLCov,
    "ppo": PPO,
    "reinforce": Reinforce,
    "sapo": SAPO,
}


def by_name(name: str, **hyperparameters: Any) -> PolicyLoss:
    """The published loss of that name, for command lines and configuration files.

    Args:
      name: one of `BY_NAME`.
      **hyperparameters: fields of its class.

    Returns:
      An instance.

    Raises:
      ValueError: an unknown name, a hyperparameter that the loss lacks or that is out of its range.

    Example:
      >>> by_name("ppo", clip_high=0.28).clip_high
      0.28
    """
    if name not in BY_NAME:
        raise ValueError(f"name: got {name!r}, expected one of {', '.join(BY_NAME)}")
    fields = [field.name for field in dataclasses.fields(BY_NAME[name])]  # type: ignore[arg-type]
    for given in hyperparameters:
        if given not in fields:
            raise ValueError(
                f"{given}: got it with {name!r}, expected one of {', '.join(fields) or 'no hyperparameter'}"
            )
    return BY_NAME[name](**hyperparameters)
