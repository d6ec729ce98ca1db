"""Correction for the gap between the policy that sampled and the policy that trains.

Their kernels, precision and often parameters differ. The ratio of the two weighs tokens, or decides
which are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import (
    AnyArray,
    Compared,
    check,
    check_choices,
    check_field,
    check_flag,
    check_scalar,
    check_type,
    is_number,
    masked,
    needed,
)
from jaxppo.base.kl import MAX_LOG_RATIO, k3
from jaxppo.base.option_names import NamesItsOptions
from jaxppo.sharding import Segments, scan_affine, vary

Level = Literal["none", "token", "sequence", "geometric"]
Outside = Literal["clamp", "zero"]
OPSMFraction = Literal["loss", "response"]
Policies = Mapping[str, Array | None]  # the log-probs of "current", "old" and "rollout"
Statistic = Literal[  # noqa: RUF041  a level a line
    Literal["token_k1", "token_k2", "token_k3", "token_diff"],
    Literal["run_mean_k1", "run_mean_diff"],
    Literal["seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_sum_diff"],
    Literal["seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_mean_diff", "seq_mean_error"],
    Literal["seq_max_k1", "seq_max_k2", "seq_max_k3", "seq_min_k1"],
]


@dataclasses.dataclass(frozen=True)
class Rejection(NamesItsOptions):
    """Keeps the tokens, runs of tokens or sequences whose statistic lies within [low, high].

    The statistic compares two policies a / b. With d = log a - log b: k1 = -d, k2 = d^2 / 2, k3 =
    exp(d) - 1 - d, "diff" = a - b, the difference of probabilities, and "error" = exp(|d|), the
    multiplicative error, at least 1. "token" takes each token's own value; "run_mean" the mean over
    each run of contiguous loss tokens, such as a turn; "seq_sum", "seq_mean", "seq_max" and
    "seq_min" reduce the loss tokens of a sequence.

    `Rejection("seq_max_k1", high=1e4)` and `Rejection("seq_min_k1", low=0.01)` together reject
    sequences with a ratio rho outside 1e-4 to 100. `Rejection("seq_mean_error", high=2.0)` is
    NeMo-RL's `seq_logprob_error_threshold`, which also takes the sequence out of the denominators:
    mask it for that, see `advantages.accepted_samples`.

    Args:
      statistic: "token_k1", "seq_sum_k1", "run_mean_diff" and others.
      low: the smallest value, in nats for k2 and k3; for k1 the smallest ratio b / a = exp(k1). By
        default no bound.
      high: the largest.
      compares: the two policies a / b, "old/rollout", "current/rollout" or "current/old".

    Raises:
      ValueError: an unknown statistic or pair, bounds out of order, a k1 bound that is no ratio.

    Example:
      >>> Rejection("seq_mean_k1", 0.97, 1.02).compares
      'old/rollout'

    Names: verl's rollout correction, https://verl.readthedocs.io/en/latest/algo/rollout_corr.html;
    extreme ratios:
    SkyRL, https://github.com/NovaSky-AI/SkyRL; runs and differences: ROLL alone,
    https://github.com/alibaba/ROLL; errors: NeMo-RL, https://github.com/NVIDIA-NeMo/RL
    """

    statistic: Statistic
    low: float | None = None
    high: float = math.inf
    compares: Compared = "old/rollout"

    def __post_init__(self) -> None:
        check_choices(self, statistic=Statistic, compares=Compared)
        least = 0.0
        if self.statistic.endswith("diff"):
            least = -math.inf
        if self.low is None:
            object.__setattr__(self, "low", least)
        _check_bounds(self, least)

    @property
    def token_local(self) -> bool:
        """Whether the statistic of a token reads log-probs of that token only."""
        return self.statistic.startswith("token")


@dataclasses.dataclass(frozen=True)
class OffPolicyConfig(NamesItsOptions):
    """The off-policy corrections of a policy loss, by rho = a / b of two policies; by default none.

    Weights multiply the policy loss of a token, and a token that is left out has weight 0. The
    penalties (KL and entropy) and all denominators still follow the loss mask.

    Args:
      weights: the importance weight of a token: its own rho ("token"), or the product ("sequence")
        or the geometric mean ("geometric") of rho over its sequence.
      low: smallest weight, a number or a traced one, as are all bounds.
      high: largest weight.
      outside: weights outside [low, high] are set to the bound, "clamp" (truncated importance
        sampling), or to 0, "zero" (IcePop).
      batch_normalize: divide the weights by their mean over the step.
      rejections: a token must pass all of them.
      veto: leave out each sequence that has a token with rho below this, a ratio above exp(-20).
      compares: the two policies of the weights and the veto, whatever the loss's ratio; each
        rejection has its own.
      opsm_delta: off-policy sequence masking: leave out the tokens with negative advantage of each
        sequence whose mean of -log rho exceeds this, nats.
      opsm_compares: the two policies of that rho.
      opsm_fraction: the metric `opsm_clipfrac` is over the "loss" tokens, or over the whole
        "response" from its first to its last loss token, as in slime.

    Raises:
      ValueError: unknown names, bounds out of order, fields that contradict each other.

    Example:
      >>> sorted(OffPolicyConfig(weights="token", high=2.0, opsm_delta=0.1).policies)
      ['current', 'old', 'rollout']

    Truncated: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; IcePop: Ling Team 2025,
    https://arxiv.org/abs/2510.18855; sequence masking: DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556
    """

    weights: Level = "none"
    low: float = 0.0
    high: float = 2.0
    outside: Outside = "clamp"
    batch_normalize: bool = False
    rejections: tuple[Rejection, ...] = ()
    veto: float | None = None
    compares: Compared = "old/rollout"
    opsm_delta: float | None = None
    opsm_compares: Compared = "current/old"
    opsm_fraction: OPSMFraction = "loss"

    def __post_init__(self) -> None:
        check_choices(self, weights=Level, outside=Outside, compares=Compared)
        check_choices(self, opsm_compares=Compared, opsm_fraction=OPSMFraction)
        _check_bounds(self, 0.0)
        check_flag("batch_normalize", self.batch_normalize)
        self._check_rejections()
        self._check_veto()
        if self.opsm_delta is not None:
            check_field(self, "opsm_delta", least=0)
        if self.batch_normalize:
            self._check_mean_is_known()

    def _check_rejections(self) -> None:
        if not isinstance(self.rejections, Iterable) or isinstance(self.rejections, AnyArray):
            raise TypeError(f"rejections: got {self.rejections!r}, expected a tuple of Rejection")
        object.__setattr__(self, "rejections", tuple(self.rejections))
        for rejection in self.rejections:
            check_type("rejections", rejection, isinstance(rejection, Rejection), "Rejection")

    def _check_veto(self) -> None:
        least = math.exp(-MAX_LOG_RATIO)  # no ratio is below it, since log-ratios are clamped
        if isinstance(self.veto, jax.Array):
            check_field(self, "veto", above=least, below=1)
        elif self.veto is not None:
            good = is_number(self.veto) and least < self.veto < 1
            check("veto", repr(self.veto), good, f"a ratio above {least:.2g} and below 1")

    def _check_mean_is_known(self) -> None:
        """The mean of the weights, which a `Normalizer` has, is computed before the step."""
        good = self.weights != "none" and self.compares == "old/rollout"
        got = f"True with weights={self.weights!r}, compares={self.compares!r}"
        expected = (
            "weights, and compares='old/rollout': their mean over the step must be known before it"
            " starts"
        )
        check("batch_normalize", got, good, expected)
        traced = [name for name in ("low", "high") if isinstance(getattr(self, name), jax.Array)]
        expected = (
            "Python numbers with batch_normalize, whose mean a Normalizer has for these bounds"
        )
        check("low, high", f"arrays as {traced}", not traced, expected)

    @property
    def policies(self) -> frozenset[str]:
        """The policies that these corrections compare, out of "current", "old" and "rollout"."""
        pairs = [rejection.compares for rejection in self.rejections]
        if self.weights != "none" or self.veto is not None:
            pairs.append(self.compares)
        if self.opsm_delta is not None:
            pairs.append(self.opsm_compares)
        return frozenset(name for pair in pairs for name in pair.split("/"))

    @property
    def token_local(self) -> bool:
        """Whether the correction of a token reads log-probs of that token only."""
        of_sequences = (
            self.weights in ("sequence", "geometric")
            or self.veto is not None
            or self.opsm_delta is not None
        )
        return not of_sequences and all(rejection.token_local for rejection in self.rejections)


def of_mean_weight(config: OffPolicyConfig | None) -> OffPolicyConfig | None:
    """The config with only the fields that the mean weight of a step depends on; None without
    `batch_normalize`.
    """
    if config is None or not config.batch_normalize:
        return None
    return OffPolicyConfig(
        config.weights, config.low, config.high, config.outside, batch_normalize=True
    )


def importance_weights(
    log_ratio: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segments: Segments,
    config: OffPolicyConfig,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Per-shard: rho at the level of `config.weights`, before and after its bounds; both are 1
    where the mask is 0.
    """
    valid = mask > 0
    if config.weights != "token":
        if config.weights == "sequence":
            sequence = segments.sum(log_ratio)
        else:
            sequence = segments.mean(log_ratio, _float(valid))
        log_ratio = jnp.where(valid, segments.spread(sequence), 0)
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if config.outside == "clamp":
        return ratio, jnp.where(valid, jnp.clip(ratio, config.low, config.high), 1)
    outside = (ratio < config.low) | (ratio > config.high)
    return ratio, jnp.where(valid & outside, 0, ratio)


def weight_sums(
    old_log_probs: Float[Array, "R T"],
    rollout_log_probs: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segments: Segments,
    config: OffPolicyConfig,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Per-shard: the sum and the number of bounded weights over data and context, for
    `batch_normalize`.

    "token" weights count once for each token, others once for each sequence with loss tokens.
    """
    log_ratio = _log_ratio(
        {"old": old_log_probs, "rollout": rollout_log_probs}, "old/rollout", mask
    )
    _, weights = importance_weights(log_ratio, mask, segments, config)
    counted = _float(mask > 0)
    names = segments.axes.tokens
    if config.weights != "token":
        exists = _float(segments.sum(counted) > 0)
        weights = segments.mean(weights, counted)
        counted = exists
        names = segments.axes.data
    total = (weights * counted).sum()
    return segments.axes.psum((vary(total, names), vary(counted.sum(), names)), names)


# By the name of a metric, how the names of the rules that it counts begin in `left_out_by`.
_METRICS = {
    "rejected_fraction": "rejected",
    "veto_fraction": "vetoed",
    "opsm_clipfrac": "off-policy",
}


def correction(
    policies: Policies,
    advantages: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segments: Segments,
    config: OffPolicyConfig,
    weight_mean: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """Per-shard: the weight of each token's policy loss, 0 for tokens that are left out, and
    indicators for metrics.

    Both are detached and finite, whatever masked positions hold. Of the advantages only the sign is
    read.
    """
    valid = mask > 0
    weights = _float(valid)
    indicators: dict[str, jax.Array] = {}
    if config.weights != "none":
        log_ratio = _log_ratio(policies, config.compares, mask)
        ratio, weights = importance_weights(log_ratio, mask, segments, config)
        indicators = {
            "tis": ratio,
            "tis_abs": jnp.abs(ratio - 1),
            "tis_clipfrac": _float(weights != ratio),
        }
        weights = jnp.where(valid, weights, 0)
    if config.batch_normalize:
        weight_mean = needed(
            "weight_mean", weight_mean, "the Normalizer's for off_policy.batch_normalize"
        )
        # a mean of 0 means that all weights are 0
        weights = weights / jnp.where(weight_mean > 0, weight_mean, 1)
    by_rule = left_out_by(policies, advantages, mask, segments, config)
    for metric, rule in _METRICS.items():
        left_out = [tokens for name, tokens in by_rule.items() if name.startswith(rule)]
        if left_out:
            indicators[metric] = _float(functools.reduce(jnp.logical_or, left_out))
            weights = jnp.where(indicators[metric] > 0, 0, weights)
    return lax.stop_gradient((weights, indicators))


def left_out_by(
    policies: Policies,
    advantages: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segments: Segments,
    config: OffPolicyConfig,
) -> dict[str, Bool[Array, "R T"]]:
    """Per-shard: the loss tokens that each rule of the config leaves out, by a name of the rule;
    see `correction`.
    """
    valid = mask > 0
    by_rule: dict[str, Bool[Array, "R T"]] = {}
    for rejection in config.rejections:
        name = f"rejected by {rejection.statistic} of {rejection.compares}"
        rejected = valid & ~_accepted(rejection, policies, mask, segments)
        by_rule[name] = by_rule.get(name, False) | rejected
    if config.veto is not None:
        worst = -segments.max(-_log_ratio(policies, config.compares, mask), _float(valid))
        by_rule["vetoed"] = valid & (segments.spread(worst) < _log(config.veto))
    if config.opsm_delta is not None:
        drift = segments.mean(-_log_ratio(policies, config.opsm_compares, mask), mask)
        by_rule["off-policy sequence"] = (
            valid & (advantages < 0) & (segments.spread(drift) > config.opsm_delta)
        )
    return by_rule


def _accepted(
    rejection: Rejection, policies: Policies, mask: jax.Array, segments: Segments
) -> jax.Array:
    """bool[R, T], the tokens that pass the rejection; anything where the mask is 0."""
    level, _, divergence = rejection.statistic.rpartition("_")
    value = _of_token(divergence, *_pair(policies, rejection.compares, mask))
    if level != "token":
        value = _over(level, value, _float(mask > 0), segments)
    low: float | jax.Array = needed("low", rejection.low, "a number")
    high: float | jax.Array = rejection.high
    if divergence == "k1":  # the bounds are of a ratio
        low = _log(low)
        high = _log(high)
    return (value >= low) & (value <= high)


def _of_token(divergence: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """How far two log-probs of a token are apart, by the end of a `Rejection`'s statistic."""
    match divergence:
        case "k1":
            return b - a
        case "k2":
            return (a - b) ** 2 / 2
        case "k3":
            return k3(a - b)
        case "diff":
            return jnp.exp(a) - jnp.exp(b)
        case _:  # "error"
            return jnp.exp(jnp.abs(a - b))


def _over(level: str, value: jax.Array, valid: jax.Array, segments: Segments) -> jax.Array:
    """At each loss token the value of its run or of its sequence, by the beginning of a
    `Rejection`'s statistic.
    """
    match level:
        case "run_mean":
            return _mean_over_runs(value, valid, segments)
        case "seq_sum":
            sequence = segments.sum(value * valid)
        case "seq_mean":
            sequence = segments.mean(value, valid)
        case "seq_max":
            sequence = segments.max(value, valid)
        case _:  # "seq_min"
            sequence = -segments.max(-value, valid)
    return segments.spread(sequence)


def _mean_over_runs(value: jax.Array, valid: jax.Array, segments: Segments) -> jax.Array:
    """At each loss token, the mean over its run of contiguous loss tokens."""

    scan = functools.partial(
        scan_affine,
        valid,
        parallel=segments.axes,
        segment_ids=segments.segment_ids,
        num_segments=segments.num_segments,
    )

    def over_run(x: jax.Array) -> jax.Array:
        return scan(x) + scan(x, reverse=False) - x

    return over_run(value * valid) / jnp.maximum(over_run(valid), 1)


def _pair(policies: Policies, compares: Compared, mask: jax.Array) -> list[jax.Array]:
    """The log-probs of the two policies, constants, 0 where the mask is 0.

    Where one of the two is not finite they are equal, a ratio of 1: see `Unusable`. Without such a
    rule the loss is NaN there.
    """
    expected = f"f32[R, T] for a correction by {compares!r}"
    pair = [needed(f"{name}_log_probs", policies[name], expected) for name in compares.split("/")]
    a, b = (lax.stop_gradient(masked(log_probs, mask)) for log_probs in pair)
    both = jnp.isfinite(a) & jnp.isfinite(b)
    return [jnp.where(both, a, 0), jnp.where(both, b, 0)]


def _log_ratio(policies: Policies, compares: Compared, mask: jax.Array) -> jax.Array:
    a, b = _pair(policies, compares, mask)
    return a - b


def _float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _log(x: float | Array) -> float | Array:
    """The log of a number, or of one for each token (see `losses.by_row`)."""
    if isinstance(x, jax.Array):
        return jnp.log(x)
    if x > 0:
        return math.log(x)
    return -math.inf


def _check_bounds(config: Rejection | OffPolicyConfig, least: float) -> None:
    """Raises where the bounds are out of order; those that are arrays become NaN."""
    low: Any = config.low
    high: Any = config.high
    got = f"{low!r}, {high!r}"
    traced = []
    good = True
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, jax.Array):
            traced.append(name)
        else:
            good = (
                good and isinstance(bound, (int, float, np.number)) and not isinstance(bound, bool)
            )
    if "low" in traced:
        low = check_scalar("low", low)
    if "high" in traced:
        high = check_scalar("high", high)
    expected = "0 <= low < high"
    if least:
        expected = "low < high"
    check("low, high", got, good and (bool(traced) or least <= low < high), expected)
    bounds = {"low": low, "high": high}
    for name in traced:
        bound = jnp.where((least <= low) & (low < high), bounds[name], jnp.nan)
        object.__setattr__(config, name, bound)
