"""One short function for each published policy loss, and the registry that finds it by name.

A loss takes `f32[R, T]` arrays that are 0 outside the loss mask, and returns the loss of each token, with indicators
of what it did there. Adding one: write the function, decorate it, and every test picks it up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo._sharding import Segments
from jaxppo.kl import MAX_LOG_RATIO, log_ratio

if TYPE_CHECKING:
    from jaxppo.config import PolicyLossConfig

Tokens = Float[Array, "R T"]
Indicators = dict[str, Tokens]
_TINY = 1e-30
DUAL_CLIPPED = ("ppo", "gspo", "clip_cov")
LossFn = Callable[..., tuple[Tokens, Indicators]]


class PolicyLoss(NamedTuple):
    """A policy loss: `fn(log_probs, old_log_probs, advantages, *, mask, segments, config) -> (loss, indicators)`."""

    fn: LossFn
    token_local: bool = False
    """A token's loss depends on that token alone, so it can be computed one block of tokens at a time."""
    covariance: Literal["highest", "random"] | None = None
    """The function also takes `covariance`, the tokens of the step that `covariance_mask` picked, and in which way."""


POLICY_LOSSES: dict[str, PolicyLoss] = {}


def register_policy_loss(
    name: str, *, token_local: bool = False, covariance: Literal["highest", "random"] | None = None
) -> Callable[[LossFn], LossFn]:
    """Makes a policy loss known by name.

    Args:
      name: what `PolicyLossConfig(loss=name)` calls it.
      token_local: see `PolicyLoss`.
      covariance: see `PolicyLoss`.

    Returns:
      A decorator that returns its function unchanged.

    Raises:
      ValueError: a name that is taken.

    Example:
      >>> @register_policy_loss("log_likelihood", token_local=True)
      ... def log_likelihood(log_probs, old_log_probs, advantages, *, mask, segments, config):
      ...     return -log_probs, {}
      >>> POLICY_LOSSES.pop("log_likelihood").token_local
      True
    """
    if name in POLICY_LOSSES:
        raise ValueError(f"name: got {name!r}, expected one that is not taken: {', '.join(POLICY_LOSSES)}")

    def register(fn: LossFn) -> LossFn:
        POLICY_LOSSES[name] = PolicyLoss(fn, token_local, covariance)
        return fn

    return register


def find_policy_loss(loss: str | LossFn | PolicyLoss) -> PolicyLoss:
    """The loss of that name, or the caller's own; a bare function is taken for one that is not token-local."""
    if isinstance(loss, PolicyLoss):
        return loss
    if callable(loss):
        return PolicyLoss(loss)
    if loss not in POLICY_LOSSES:
        raise ValueError(f"loss: got {loss!r}, expected a function or one of {', '.join(sorted(POLICY_LOSSES))}")
    return POLICY_LOSSES[loss]


def _clipped_surrogate(ratio: Tokens, advantages: Tokens, config: PolicyLossConfig) -> tuple[Tokens, Indicators]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0."""
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    loss = jnp.where(clipped > plain, clipped, plain)
    indicators = {"clip_fraction": clipped > plain}
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss = jnp.where(beyond, bound, loss)
        indicators["clip_fraction_lower"] = beyond
    return loss, {name: x.astype(jnp.float32) for name, x in indicators.items()}


@register_policy_loss("ppo", token_local=True)
def ppo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
) -> tuple[Tokens, Indicators]:
    """Clipped surrogate: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_prob - old_log_prob).

    With `dual_clip` c > 1 and A < 0 it is at most -A c. Unequal bounds are DAPO's clip-higher.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020,
    https://arxiv.org/abs/1912.09729; clip-higher: Yu et al. 2025, https://arxiv.org/abs/2503.14476
    """
    return _clipped_surrogate(jnp.exp(log_ratio(log_probs, old_log_probs)), advantages, config)


@register_policy_loss("gspo")
def gspo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
) -> tuple[Tokens, Indicators]:
    """The clipped surrogate of the sequence's ratio: s = exp(mean over the sequence of log_prob - old_log_prob).

    With `gspo_gradient="sequence"` the gradient runs through that mean (GSPO); with "token" the value is the same
    and each token has the gradient of s * log_prob (GSPO-token): unlike the first where masks are uneven.

    Zheng et al. 2025, Group sequence policy optimization, https://arxiv.org/abs/2507.18071
    """
    sequence = segments.spread(segments.mean(log_probs - old_log_probs, mask))
    if config.gspo_gradient == "token":
        sequence = lax.stop_gradient(sequence) + log_probs - lax.stop_gradient(log_probs)
    return _clipped_surrogate(jnp.exp(jnp.clip(sequence, -MAX_LOG_RATIO, MAX_LOG_RATIO)), advantages, config)


@register_policy_loss("cispo", token_local=True)
def cispo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
) -> tuple[Tokens, Indicators]:
    """REINFORCE with a clipped, constant ratio: -clip(r, 1 - clip_low, 1 + clip_high) A log_prob.

    No token loses its gradient. `clip_low=1` leaves the ratio without a lower bound, as the paper has it.

    MiniMax 2025, MiniMax-M1, https://arxiv.org/abs/2506.13585
    """
    ratio = lax.stop_gradient(jnp.exp(log_ratio(log_probs, old_log_probs)))
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    return -clipped * advantages * log_probs, {"clip_fraction": (clipped != ratio).astype(jnp.float32)}


@register_policy_loss("sapo", token_local=True)
def sapo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
) -> tuple[Tokens, Indicators]:
    """A soft gate in place of the clip: -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A.

    Gao et al. 2025, Soft adaptive policy optimization, https://arxiv.org/abs/2511.20347
    """
    tau = jnp.where(advantages > 0, config.sapo_tau_positive, config.sapo_tau_negative)
    ratio = jnp.exp(log_ratio(log_probs, old_log_probs))
    return -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantages, {}


@register_policy_loss("gpg", token_local=True)
@register_policy_loss("reinforce", token_local=True)
def reinforce(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
) -> tuple[Tokens, Indicators]:
    """The score function: -A log_prob. GPG is the same objective on the advantages of `advantages.gpg`.

    Williams 1992, https://doi.org/10.1007/BF00992696; Chu et al. 2025, GPG, https://arxiv.org/abs/2504.02546
    """
    return -advantages * log_probs, {}


def _trust_region(
    divergence: Tokens, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens, config: PolicyLossConfig
) -> tuple[Tokens, Indicators]:
    """-min(r, cap) A log_prob with r constant, 0 for tokens that A pushes on beyond the divergence allowed there."""
    delta = log_probs - old_log_probs
    leaves = jnp.where(
        advantages > 0, (delta > 0) & (divergence > config.clip_high), (delta < 0) & (divergence > config.clip_low)
    )
    ratio = lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio(log_probs, old_log_probs)), config.dppo_ratio_cap))
    loss = jnp.where(leaves, 0, -ratio * advantages * log_probs)
    return loss, {"clip_fraction": leaves.astype(jnp.float32)}


@register_policy_loss("dppo_tv", token_local=True)
def dppo_tv(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
) -> tuple[Tokens, Indicators]:
    """-min(r, cap) A log_prob, r constant, where |p - q| allows it: total variation of sampled against not sampled.

    A token with A > 0 and p > q drops out where p - q > clip_high; one with A < 0 and p < q where q - p > clip_low.

    Qi et al. 2026, Rethinking the trust region in LLM reinforcement learning, https://arxiv.org/abs/2602.04879
    """
    divergence = lax.stop_gradient(jnp.abs(jnp.exp(log_probs) - jnp.exp(old_log_probs)))
    return _trust_region(divergence, log_probs, old_log_probs, advantages, config)


@register_policy_loss("dppo_kl", token_local=True)
def dppo_kl(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
) -> tuple[Tokens, Indicators]:
    """Like `dppo_tv`, with the binary KL divergence q log(q / p) + (1 - q) log((1 - q) / (1 - p)).

    Qi et al. 2026, Rethinking the trust region in LLM reinforcement learning, https://arxiv.org/abs/2602.04879
    """
    rest, old_rest = (jnp.log(-jnp.expm1(jnp.minimum(x, -_TINY))) for x in (log_probs, old_log_probs))
    old = jnp.exp(old_log_probs)
    divergence = lax.stop_gradient(old * (old_log_probs - log_probs) + (1 - old) * (old_rest - rest))
    return _trust_region(divergence, log_probs, old_log_probs, advantages, config)


@register_policy_loss("gmpo")
def gmpo(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
) -> tuple[Tokens, Indicators]:
    """The geometric mean of clipped ratios: -A exp(mean over the sequence of d), A the sequence's mean advantage.

    d is log_prob - old_log_prob, at most clip_high where A > 0, at least -clip_low where A < 0: bounds in log space.
    Of one value a sequence, "sequence_mean_token_mean" is the published aggregation. The clip fractions count
    tokens outside the bounds on either side, with A > 0 and (lower) with A < 0.

    Zhao et al. 2025, Geometric-mean policy optimization, https://arxiv.org/abs/2507.20673
    """
    d = log_probs - old_log_probs
    clipped = jnp.clip(d, -config.clip_low, config.clip_high)
    worse = jnp.where(jnp.sign(advantages) * clipped < jnp.sign(advantages) * d, clipped, d)
    mean = segments.mean(jnp.where(advantages == 0, 0, worse), mask)
    ratio = jnp.exp(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    indicators = {"clip_fraction": (clipped != d) & (advantages > 0)}
    indicators["clip_fraction_lower"] = (clipped != d) & (advantages < 0)
    loss = -segments.spread(segments.mean(advantages, mask) * ratio)
    return loss, {name: x.astype(jnp.float32) for name, x in indicators.items()}


@register_policy_loss("dro", token_local=True)
def dro(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
) -> tuple[Tokens, Indicators]:
    """The score function with a quadratic pull to the old policy: -A log_prob + beta / 2 (log_prob - old_log_prob)^2.

    Richemond et al. 2024, Offline regularised reinforcement learning, https://arxiv.org/abs/2405.19107
    """
    return -advantages * log_probs + config.dro_beta / 2 * (log_probs - old_log_probs) ** 2, {}


@register_policy_loss("clip_cov", token_local=True, covariance="random")
def clip_cov(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
    covariance: Tokens,
) -> tuple[Tokens, Indicators]:
    """The `ppo` loss, 0 for the tokens that `covariance_mask` picked: some of those with a high covariance.

    Cui et al. 2025, The entropy mechanism of reinforcement learning, https://arxiv.org/abs/2505.22617
    """
    loss, _ = _clipped_surrogate(jnp.exp(log_ratio(log_probs, old_log_probs)), advantages, config)
    return jnp.where(covariance > 0, 0, loss), {"clip_fraction": covariance}


@register_policy_loss("kl_cov", token_local=True, covariance="highest")
def kl_cov(
    log_probs: Tokens,
    old_log_probs: Tokens,
    advantages: Tokens,
    *,
    mask: Tokens,
    segments: Segments,
    config: PolicyLossConfig,
    covariance: Tokens,
) -> tuple[Tokens, Indicators]:
    """-A r, plus kl_cov_coef |log_prob - old_log_prob| on the tokens that `covariance_mask` picked: the highest.

    Cui et al. 2025, The entropy mechanism of reinforcement learning, https://arxiv.org/abs/2505.22617
    """
    distance = jnp.abs(log_probs - old_log_probs)
    loss = -advantages * jnp.exp(log_ratio(log_probs, old_log_probs))
    loss = loss + jnp.where(covariance > 0, config.kl_cov_coef * distance, 0)
    return loss, {"penalised_fraction": covariance, "ppo_kl_abs": distance}
