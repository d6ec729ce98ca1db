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
from jax import lax
from jaxtyping import Array, Float

from jaxppo._sharding import Segments, vary
from jaxppo.kl import MAX_LOG_RATIO, log_ratio

Level = Literal["none", "token", "sequence", "geometric"]
_STATISTICS = tuple(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3"))


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Keeps the tokens, or whole sequences, whose statistic lies within [low, high].

    With d = log rho: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d; "token" judges each token by its own, "seq_sum",
    "seq_mean" and "seq_max" a sequence by the sum, mean or largest over its loss-carrying tokens.

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

    statistic: str
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        if self.statistic not in _STATISTICS:
            raise ValueError(f"statistic: got {self.statistic!r}, expected one of {', '.join(_STATISTICS)}")
        _check_bounds(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class OffPolicyConfig:
    """Which corrections a policy loss applies; by default none.

    Args:
      weights: the importance weight of a token: its own rho ("token"), the product of rho over its sequence
        ("sequence") or the geometric mean of rho over its sequence ("geometric").
      low: smallest weight.
      high: largest weight.
      outside: what becomes of weights outside [low, high]: "clamp" (truncated importance sampling) or "zero" (IcePop).
      batch_normalize: divide the weights by their mean over the step.
      rejections: what is kept must pass all of them.
      veto: leave out each sequence that has a token with rho below this.
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
    outside: Literal["clamp", "zero"] = "clamp"
    batch_normalize: bool = False
    rejections: tuple[Rejection, ...] = ()
    veto: float | None = None
    opsm_delta: float | None = None
    opsm_fraction: Literal["loss", "response"] = "loss"
    trainer: Literal["old", "current"] = "old"

    def __post_init__(self) -> None:
        _check_choice("weights", self.weights, ("none", "token", "sequence", "geometric"))
        _check_choice("outside", self.outside, ("clamp", "zero"))
        _check_choice("trainer", self.trainer, ("old", "current"))
        _check_choice("opsm_fraction", self.opsm_fraction, ("loss", "response"))
        _check_bounds(self.low, self.high)
        object.__setattr__(self, "rejections", tuple(self.rejections))
        for rejection in self.rejections:
            if not isinstance(rejection, Rejection):
                raise TypeError(f"rejections: got {type(rejection).__name__}, expected Rejection")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ValueError(f"veto: got {self.veto}, expected a ratio in (0, 1)")
        if self.opsm_delta is not None and self.opsm_delta < 0:
            raise ValueError(f"opsm_delta: got {self.opsm_delta}, expected a number >= 0")
        if self.batch_normalize and (self.weights == "none" or self.trainer != "old"):
            raise ValueError(
                f"batch_normalize: got True with weights={self.weights!r}, trainer={self.trainer!r}, expected weights, "
                "and trainer='old': their mean over the step must be known before it starts"
            )

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether anything here reads the sampler's log-probs."""
        return self.weights != "none" or bool(self.rejections) or self.veto is not None


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
    d = _masked_log_ratio(trainer_log_probs, rollout_log_probs, mask)
    if config.weights == "none":
        d = jnp.zeros_like(d)
    elif config.weights != "token":
        total = segments.sum(d)
        if config.weights == "geometric":
            total = total / jnp.maximum(segments.sum((mask > 0).astype(jnp.float32)), 1)
        d = jnp.where(mask > 0, segments.spread(jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)), 0)
    ratio = jnp.exp(d)
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
    once a token, "sequence" and "geometric" ones once a sequence that has loss-carrying tokens.
    """
    _, weights = importance_weights(old_log_probs, rollout_log_probs, mask, segments, config)
    kept, axes = _float(mask > 0), segments.axes
    if config.weights == "token":
        sums, names = ((weights * kept).sum(), kept.sum()), axes.tokens
    else:
        exists = _float(segments.sum(kept) > 0)
        sums, names = ((segments.mean(weights, kept) * exists).sum(), exists.sum()), axes.data
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
) -> tuple[Float[Array, "R T"], Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """Per-shard: the weight of each token's policy loss, the mask that rejections leave, and what to report.

    Denominators of the loss stay those of the original mask: what is left out counts as 0, and does not make the
    rest louder. Everything is detached and finite, whatever stands at masked positions.

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
      (weights, mask, indicators), `f32[R, T]` each: weights are 0 on tokens that IcePop or sequence masking leave
      out; indicators by name, to be averaged over the original mask: "tis" (rho before its bounds), "tis_abs"
      (|rho - 1|), "tis_clipfrac", "rejected_fraction", "veto_fraction", "opsm_clipfrac", those in use.

    Raises:
      ValueError: log-probs that a field of the config needs, or `weight_mean`, are absent.
    """
    weights, kept = jnp.ones_like(mask, jnp.float32), mask
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
            weights = weights / jnp.where(weight_mean > 1e-8, weight_mean, 1)
        kept, rejected = _reject(trainer, rollout_log_probs, mask, segments, config)
        indicators |= rejected
    if config.opsm_delta is not None:
        drift = segments.mean(-_masked_log_ratio(log_probs, old_log_probs, mask), mask)
        off = (mask > 0) & (advantages < 0) & (segments.spread(drift) > config.opsm_delta)
        weights = jnp.where(off, 0, weights)
        indicators["opsm_clipfrac"] = _float(off)
    return lax.stop_gradient((weights, kept, indicators))


def _reject(
    trainer: jax.Array, rollout: jax.Array, mask: jax.Array, segments: Segments, config: OffPolicyConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    d = _masked_log_ratio(trainer, rollout, mask)
    valid, kept = mask > 0, mask > 0
    indicators = {}
    reduce_over = {"seq_sum": lambda x, _: segments.sum(x), "seq_mean": segments.mean, "seq_max": segments.max}
    for rejection in config.rejections:
        level, _, k = rejection.statistic.rpartition("_")
        value = {"k1": -d, "k2": d * d / 2, "k3": jnp.exp(d) - 1 - d}[k]
        if level != "token":
            value = segments.spread(reduce_over[level](value, _float(valid)))
        low, high = (_log(b) if k == "k1" else b for b in (rejection.low, rejection.high))
        kept &= (value >= low) & (value <= high)
    if config.rejections:
        indicators["rejected_fraction"] = _float(valid & ~kept)
    if config.veto is not None:
        worst = -segments.max(-d, _float(valid))
        vetoed = valid & (segments.spread(worst) < math.log(config.veto))
        kept &= ~vetoed
        indicators["veto_fraction"] = _float(vetoed)
    return jnp.where(kept, mask, 0), indicators


def _masked_log_ratio(log_probs: jax.Array, base: jax.Array, mask: jax.Array) -> jax.Array:
    return lax.stop_gradient(jnp.where(mask > 0, log_ratio(log_probs, base), 0))


def _float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(choices)}")


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"low, high: got {low}, {high}, expected 0 <= low < high")
