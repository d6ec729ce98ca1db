"""Correction for the gap between the policy that sampled and the policy that trains.

A sampler computes its log-probs with other kernels, another precision, often older parameters. The ratio

    rho_t = trainer_t / sampler_t = exp(trainer_log_prob_t - rollout_log_prob_t)

weighs tokens (truncated importance sampling, IcePop), or throws out tokens and sequences (rejection, veto).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxppo._arrays import check_choice, check_flag, check_number, is_number, masked
from jaxppo.kl import MAX_LOG_RATIO, k3
from jaxppo.sharding import Segments, vary

Level = Literal["none", "token", "sequence", "geometric"]
Outside = Literal["clamp", "zero"]
OPSMFraction = Literal["loss", "response"]
Trainer = Literal["old", "current"]
Statistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k1",
    "seq_max_k2",
    "seq_max_k3",
]


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Keeps the tokens, or whole sequences, whose statistic lies within [low, high].

    With d = log rho: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, at least 0; "token" judges each token by its own,
    "seq_sum", "seq_mean" and "seq_max" a sequence by the sum, mean or largest over its loss-carrying tokens.

    Args:
      statistic: "token_k1", "seq_sum_k1", ..., "seq_max_k3".
      low: for k1 the smallest sampler / trainer ratio exp(k1); for k2 and k3 the smallest value.
      high: for k1 the largest sampler / trainer ratio exp(k1); for k2 and k3 the largest value, nats.

    Raises:
      ValueError: an unknown statistic, bounds out of order, a k1 bound that is no ratio.

    Example:
      >>> Rejection("seq_mean_k1", 0.97, 1.02).statistic
      'seq_mean_k1'
    """

    statistic: Statistic
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, Statistic)
        _check_bounds(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class OffPolicyConfig:
    """Which corrections a policy loss applies; by default none.

    Weights multiply the policy loss of a token, and what is left out has weight 0; the penalties, KL and entropy, and
    all denominators stay those of the loss mask.

    Args:
      weights: the importance weight of a token: its own rho ("token"), the product of rho over its sequence
        ("sequence") or the geometric mean of rho over its sequence ("geometric").
      low: smallest weight.
      high: largest weight.
      outside: what becomes of weights outside [low, high]: "clamp" (truncated importance sampling) or "zero" (IcePop).
      batch_normalize: divide the weights by their mean over the step.
      rejections: a token that is accepted passes all of them.
      veto: leave out each sequence that has a token with rho below this, a ratio above exp(-20).
      opsm_delta: off-policy sequence masking: leave out the tokens with negative advantage of each sequence whose mean
        of old_log_prob - log_prob exceeds this, nats.
      opsm_fraction: the metric `opsm_clipfrac` counts the "loss" tokens left out, or all of the "response" from its
        first to its last loss token, as slime does.
      trainer: the policy that rho sets against the sampler: the loss's "old" one, or the "current" one, for a loss
        that takes the sampler itself for its old policy.

    Raises:
      ValueError: unknown names, bounds out of order, fields that contradict each other.

    Example:
      >>> OffPolicyConfig(weights="token", high=2.0).needs_rollout_log_probs
      True

    Truncated: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; IcePop: Ling Team 2025,
    https://arxiv.org/abs/2510.18855; sequence masking: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556
    """

    weights: Level = "none"
    low: float = 0.0
    high: float = 2.0
    outside: Outside = "clamp"
    batch_normalize: bool = False
    rejections: tuple[Rejection, ...] = ()
    veto: float | None = None
    opsm_delta: float | None = None
    opsm_fraction: OPSMFraction = "loss"
    trainer: Trainer = "old"

    def __post_init__(self) -> None:
        check_choice("weights", self.weights, Level)
        check_choice("outside", self.outside, Outside)
        check_choice("trainer", self.trainer, Trainer)
        check_choice("opsm_fraction", self.opsm_fraction, OPSMFraction)
        _check_bounds(self.low, self.high)
        check_flag("batch_normalize", self.batch_normalize)
        if isinstance(self.rejections, Rejection):
            raise TypeError(f"rejections: got {self.rejections}, expected a tuple of them")
        object.__setattr__(self, "rejections", tuple(self.rejections))
        for rejection in self.rejections:
            if not isinstance(rejection, Rejection):
                raise TypeError(f"rejections: got {type(rejection).__name__}, expected Rejection")
        least = math.exp(-MAX_LOG_RATIO)  # no ratio is below it, since log-ratios are clamped
        if self.veto is not None and not (is_number(self.veto) and least < self.veto < 1):
            raise ValueError(f"veto: got {self.veto!r}, expected a ratio above {least:.2g} and below 1")
        if self.opsm_delta is not None:
            check_number("opsm_delta", self.opsm_delta, least=0)
        if self.batch_normalize and (self.weights == "none" or self.trainer != "old"):
            raise ValueError(
                f"batch_normalize: got True with weights={self.weights!r}, trainer={self.trainer!r}, expected weights, "
                "and trainer='old': their mean over the step must be known before it starts"
            )

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether anything here reads the sampler's log-probs."""
        return self.weights != "none" or bool(self.rejections) or self.veto is not None

    @property
    def token_local(self) -> bool:
        """Whether the correction of a token reads log-probs of that token only."""
        of_tokens = [self.weights in ("none", "token"), *(r.statistic.startswith("token") for r in self.rejections)]
        return all(of_tokens) and self.veto is None and self.opsm_delta is None

    @property
    def of_mean_weight(self) -> OffPolicyConfig | None:
        """What of this the mean weight of a step depends on; None without `batch_normalize`."""
        if not self.batch_normalize:
            return None
        return OffPolicyConfig(self.weights, self.low, self.high, self.outside, batch_normalize=True)


def importance_weights(
    trainer_log_probs: Float[Array, "R T"],
    rollout_log_probs: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segments: Segments,
    config: OffPolicyConfig,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Per-shard: rho at the level that `config.weights` asks for, before and after its bounds; 1 for level "none".

    Neither is normalised; both are 1 where the mask is 0.
    """
    d = _difference(trainer_log_probs, rollout_log_probs, mask)
    if config.weights == "none":
        d = jnp.zeros_like(d)
    elif config.weights != "token":
        of_sequence = segments.sum(d) if config.weights == "sequence" else segments.mean(d, _float(mask > 0))
        d = jnp.where(mask > 0, segments.spread(of_sequence), 0)
    ratio = jnp.exp(jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if config.weights == "none":
        return ratio, ratio
    if config.outside == "clamp":
        return ratio, jnp.where(mask > 0, jnp.clip(ratio, config.low, config.high), 1)
    return ratio, jnp.where((mask > 0) & ((ratio < config.low) | (ratio > config.high)), 0, ratio)


def weight_sums(
    old_log_probs: Float[Array, "R T"],
    rollout_log_probs: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segments: Segments,
    config: OffPolicyConfig,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Per-shard: the sum and the number of bounded weights over data and context, for `batch_normalize`.

    The mean over the step is the sum of the sums over its micro-batches by that of the counts. Token weights count
    once a token, "sequence" and "geometric" ones once a sequence that has loss-carrying tokens. Tokens that either
    policy finds impossible count nothing, see `PolicyLossConfig.impossible_tokens`.
    """
    mask = jnp.where(jnp.isneginf(old_log_probs) | jnp.isneginf(rollout_log_probs), 0, mask)
    _, weights = importance_weights(old_log_probs, rollout_log_probs, mask, segments, config)
    valid, axes = _float(mask > 0), segments.axes
    if config.weights == "token":
        sums, names = ((weights * valid).sum(), valid.sum()), axes.tokens
    else:
        exists = _float(segments.sum(valid) > 0)
        sums, names = ((segments.mean(weights, valid) * exists).sum(), exists.sum()), axes.data
    return axes.psum((vary(sums[0], names), vary(sums[1], names)), names)


def correction(
    log_probs: Float[Array, "R T"],
    old_log_probs: Float[Array, "R T"],
    rollout_log_probs: Float[Array, "R T"] | None,
    advantages: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segments: Segments,
    config: OffPolicyConfig,
    weight_mean: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """Per-shard: the weight of each token's policy loss, 0 on the tokens that are left out, and what to report.

    Denominators of the loss stay those of the original mask: what is left out has weight 0, and the other weights do
    not grow. Everything is detached and finite, whatever stands at masked positions.

    Args:
      log_probs: `f32[R, T]`, of the current policy.
      old_log_probs: `f32[R, T]`, of the old policy of the loss.
      rollout_log_probs: `f32[R, T]`, as the sampler reported them.
      advantages: `f32[R, T]`; only their sign is read, for off-policy sequence masking.
      mask: `f32[R, T]`, the loss mask.
      segments: the sequences of the rows.
      config: which corrections.
      weight_mean: `f32[]`, the mean weight over the step (see `weight_sums`), for `batch_normalize`.

    Returns:
      (weights, indicators), `f32[R, T]` each; indicators by name, to be averaged over the mask: "tis" (rho before its
      bounds), "tis_abs" (|rho - 1|), "tis_clipfrac", "rejected_fraction", "veto_fraction", "opsm_clipfrac", those in
      use.

    Raises:
      ValueError: log-probs that a field of the config needs, or `weight_mean`, are absent.
    """
    weights = _float(mask > 0)
    indicators: dict[str, jax.Array] = {}
    if config.needs_rollout_log_probs:
        if rollout_log_probs is None:
            raise ValueError(
                "rollout_log_probs: got None, expected f32[R, T] for off_policy weights, rejections and veto"
            )
        trainer = old_log_probs if config.trainer == "old" else log_probs
        if config.weights != "none":
            ratio, weights = importance_weights(trainer, rollout_log_probs, mask, segments, config)
            indicators |= {"tis": ratio, "tis_abs": jnp.abs(ratio - 1), "tis_clipfrac": _float(weights != ratio)}
        if config.batch_normalize:
            if weight_mean is None:
                raise ValueError("weight_mean: got None, expected the Normalizer's for off_policy.batch_normalize")
            weights = weights / jnp.where(weight_mean > 0, weight_mean, 1)  # all are 0 where their mean is
        accepted, rejected = _reject(trainer, rollout_log_probs, mask, segments, config)
        weights = jnp.where(accepted, weights, 0)
        indicators |= rejected
    if config.opsm_delta is not None:
        drift = segments.mean(_difference(old_log_probs, log_probs, mask), mask)
        off = (mask > 0) & (advantages < 0) & (segments.spread(drift) > config.opsm_delta)
        weights = jnp.where(off, 0, weights)
        indicators["opsm_clipfrac"] = _float(off)
    return lax.stop_gradient((weights, indicators))


def _reject(
    trainer: jax.Array, rollout: jax.Array, mask: jax.Array, segments: Segments, config: OffPolicyConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """bool[R, T], the tokens that pass all rejections and the veto, and indicators."""
    d = _difference(trainer, rollout, mask)
    valid = accepted = mask > 0
    indicators = {}
    reduce_over = {"seq_sum": lambda x, _: segments.sum(x), "seq_mean": segments.mean, "seq_max": segments.max}
    for rejection in config.rejections:
        level, _, k = rejection.statistic.rpartition("_")
        value = {"k1": -d, "k2": d * d / 2, "k3": k3(d)}[k]
        if level != "token":
            value = segments.spread(reduce_over[level](value, _float(valid)))
        low, high = (_log(b) if k == "k1" else b for b in (rejection.low, rejection.high))
        accepted &= (value >= low) & (value <= high)
    if config.rejections:
        indicators["rejected_fraction"] = _float(valid & ~accepted)
    if config.veto is not None:
        worst = -segments.max(-d, _float(valid))
        vetoed = valid & (segments.spread(worst) < math.log(config.veto))
        accepted &= ~vetoed
        indicators["veto_fraction"] = _float(vetoed)
    return accepted, indicators


def _difference(log_probs: jax.Array, base: jax.Array, mask: jax.Array) -> jax.Array:
    return lax.stop_gradient(masked(log_probs, mask) - masked(base, mask))


def _float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _check_bounds(low: float, high: float) -> None:
    if not all(isinstance(x, (int, float, np.number)) for x in (low, high)) or not 0 <= low < high:
        raise ValueError(f"low, high: got {low!r}, {high!r}, expected 0 <= low < high")
