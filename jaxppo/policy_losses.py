"""One short function for each published policy loss, and the registry that finds it by name.

A loss takes `f32[R, T]` arrays that are 0 outside the loss mask, and returns the loss of each token, with indicators
of what it did there. Adding one: write the function, decorate it, and every test picks it up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.kl import log_ratio
from sharding import Segments

if TYPE_CHECKING:
    from jaxppo.config import PolicyLossConfig

Tokens = Float[Array, "R T"]
Indicators = dict[str, Tokens]
LossFn = Callable[..., tuple[Tokens, Indicators]]


class RegisteredLoss(NamedTuple):
    """A policy loss: `fn(log_probs, old_log_probs, advantages, *, mask, segments, config) -> (loss, indicators)`."""

    fn: LossFn
    token_local: bool = False
    """A token's loss depends on that token alone, so it can be computed one block of tokens at a time."""
    covariance: bool = False
    """The function also takes `covariance`, the tokens that `covariance_mask` picked."""


POLICY_LOSSES: dict[str, RegisteredLoss] = {}


def register_policy_loss(
    name: str, *, token_local: bool = False, covariance: bool = False
) -> Callable[[LossFn], LossFn]:
    """Makes a policy loss known by name.

    Args:
      name: what `PolicyLossConfig(loss=name)` calls it.
      token_local: see `RegisteredLoss`.
      covariance: see `RegisteredLoss`.

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
        POLICY_LOSSES[name] = RegisteredLoss(fn, token_local, covariance)
        return fn

    return register


def find_policy_loss(loss: str | LossFn) -> RegisteredLoss:
    """The loss of that name, or the caller's own function as a loss that is not token-local."""
    if callable(loss):
        return RegisteredLoss(loss)
    if loss not in POLICY_LOSSES:
        raise ValueError(f"loss: got {loss!r}, expected a function or one of {', '.join(sorted(POLICY_LOSSES))}")
    return POLICY_LOSSES[loss]


def _clipped_surrogate(ratio: Tokens, advantages: Tokens, config: PolicyLossConfig) -> tuple[Tokens, Indicators]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0."""
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    worse = clipped > plain
    loss = jnp.where(worse, clipped, plain)
    indicators = {"clip_low": worse & (advantages < 0), "clip_high": worse & (advantages > 0)}
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss = jnp.where(beyond, bound, loss)
        indicators["dual_clip"] = beyond
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
