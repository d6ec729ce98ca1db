"""BAPO: bounds of the clip, searched at each step so that good tokens count as much as bad ones."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import RatioTo, as_number, check, check_choice, plain_number
from jaxppo.base.kl import log_ratio
from jaxppo.base.stacked import as_rows, check_whole_step
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import FINITE, LOG_PROBS, PER_TOKEN
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.head import TokenStats
from jaxppo.head.token_arguments import check_stats
from jaxppo.losses.policy_tokens import BY_RATIO, check_needed
from jaxppo.losses.unusable_tokens import agreeing, without_policy_loss
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.unusable import UnusableRule
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary

__all__ = ["adaptive_clip"]

First = Literal["high", "low"]
Bounds = tuple[float, float]  # the first and the last value of a bound
_MOST_STEPS = 10_000  # of both bounds together: each is a sum over the tokens of the step


def adaptive_clip(
    stats: TokenStats,
    batch: RolloutBatch,
    *,
    ratio_to: RatioTo = "old",
    target: float | Array = 1.0,
    low: Bounds = (0.6, 0.8),
    high: Bounds = (1.2, 2.0),
    step: float = 0.05,
    first: First = "high",
    unusable: UnusableRule = "nan",
    parallel: ParallelMesh | ShardAxes | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """BAPO's bounds of a step: (clip_low, clip_high) of the first bounds with P / N of at least the
    target.

        P(high) = sum over A > 0 of A min(r, high),   N(low) = sum over A < 0 of -A max(r, low)

    The sums are over all loss tokens of the step. One bound is raised in steps from its first to
    its last value, then the other one, until the target is met (without a negative A at once), or
    both have their last values. A raised lower bound makes N larger, so it never brings P / N up.
    Make the loss of the result inside `jit`, as the published code has it:
    `PPO(clip_low=clip_low, clip_high=clip_high, dual_clip=3.0)`.

    Args:
      stats: the current log-probs, `f32[R, T]`, or those of the step's micro-batches stacked,
        `[K, R, T]`.
      batch: the step, of the same leading shape; needs `advantages` and the log-probs of
        `ratio_to`.
      ratio_to: the policy in the ratio's denominator, see `PolicyLossConfig`.
      target: of P / N. The paper's target is the share P / (P + N), of which this is share / (1 -
        share).
      low, high: the first and the last lower bound of the ratio, at most 1, and upper bound, at
        least 1.
      step: by which a bound is raised.
      first: the bound that is raised first: "high", as in the paper, or "low", as in the published
        code.
      unusable: that of the loss, see `PolicyLossConfig`. Tokens without a policy loss are in no
        sum, and those with a ratio of 1 have it here too.
      parallel: the mesh.

    Returns:
      1 - the lower bound and the upper bound - 1, `f32[]`; NaN, as the loss then is, where a loss
      token has no finite advantage, ratio or mask, or a traced target is not above 0.

    Raises:
      TypeError, ValueError: bounds out of order, arrays that the batch lacks, one micro-batch of
        several.

    Example:
      >>> sample = Sample([1] * 5, 1, advantages=[1.0, 0.5, -1.0, -1.0], old_log_probs=[-2.0] * 4)
      >>> batch = RolloutBatch.from_samples([sample], row_length=5)
      >>> stats = TokenStats(jnp.log(jnp.array([[1.5, 1.0, 0.5, 1.3, 1.0]])) - 2)  # with these ratios
      >>> [round(float(x), 2) for x in adaptive_clip(stats, batch, target=1.01)]
      [0.4, 0.45]

    Xi et al. 2025, BAPO, https://arxiv.org/abs/2510.18927, https://github.com/WooooDyy/BAPO
    """
    batch = checked(batch, stacked=True)
    check_whole_step("adaptive_clip", batch)
    check_stats(stats, batch.loss_mask.shape)
    check_choice("first", first, First)
    config = PolicyLossConfig(ratio_to=ratio_to, unusable=unusable)
    check_needed(batch, config)
    lows = _steps("low", low, 0, 1, step)
    highs = _steps("high", high, 1, np.inf, step)
    arguments = {
        "stats": stats.log_probs,
        "batch": batch,
        "target": as_number("target", target, above=0),
    }

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        batch_specs = batch.specs(p)
        return [batch_specs.loss_mask, batch_specs, P()], P()

    return shard_call(
        "adaptive_clip", _per_shard, parallel, arguments, specs, (config, lows, highs, first)
    )


def _steps(what: str, bounds: Bounds, least: float, most: float, step: float) -> tuple[float, ...]:
    """The values of a bound from its first to its last; the last step may be shorter."""
    expected = f"two numbers with {least} <= first <= last <= {most}"
    check(what, repr(bounds), isinstance(bounds, (tuple, list)) and len(bounds) == 2, expected)
    start = plain_number(what, bounds[0])
    end = plain_number(what, bounds[1])
    check(what, repr(bounds), least <= start <= end <= most, expected)
    step_size = plain_number("step", step, above=0)
    count = np.ceil((end - start) / step_size - 1e-9)
    check(
        "step",
        repr(step),
        count <= _MOST_STEPS,
        f"at most {_MOST_STEPS} steps from {start} to {end}",
    )
    values = start + step_size * np.arange(1 + count)
    return tuple(np.minimum(values, end).tolist())


def _per_shard(
    axes: ShardAxes, static: tuple[Any, ...], *arrays: Any
) -> tuple[jax.Array, jax.Array]:
    config, lows, highs, first = static
    log_probs, batch, target = lax.stop_gradient(as_rows(arrays))
    without = without_policy_loss(config, log_probs, batch)
    batch = agreeing(config, log_probs, batch)
    if without is not None:
        batch = dataclasses.replace(batch, loss_mask=jnp.where(without, 0, batch.loss_mask))
    advantages, ratio = _advantages_and_ratio(config, log_probs, batch)
    positive = jnp.stack(
        [(jnp.maximum(advantages, 0) * jnp.minimum(ratio, high)).sum() for high in highs]
    )
    negative = jnp.stack(
        [(jnp.maximum(-advantages, 0) * jnp.maximum(ratio, low)).sum() for low in lows]
    )
    positive, negative = axes.psum(
        (vary(positive, axes.tokens), vary(negative, axes.tokens)), axes.tokens
    )
    raised = np.arange(len(lows) + len(highs) - 1)  # by so many steps in all
    if first == "high":
        high_steps = np.minimum(raised, len(highs) - 1)
    else:
        high_steps = np.maximum(raised - (len(lows) - 1), 0)
    low_steps = raised - high_steps
    met = positive[high_steps] >= target * negative[low_steps]
    steps = jnp.where(met.any(), jnp.argmax(met), raised[-1])
    unsound = jnp.where(
        jnp.isnan(positive.sum() + negative.sum() + target), jnp.nan, jnp.float32(0)
    )
    clip_lows = jnp.asarray(1 - np.asarray(lows)[low_steps], jnp.float32)
    clip_highs = jnp.asarray(np.asarray(highs)[high_steps] - 1, jnp.float32)
    return clip_lows[steps] + unsound, clip_highs[steps] + unsound


def _advantages_and_ratio(
    config: PolicyLossConfig, log_probs: jax.Array, batch: RolloutBatch
) -> tuple[jax.Array, jax.Array]:
    """The advantages and the ratios of the loss tokens, NaN where one breaks a rule."""
    tokens = LossTokens.of(batch)
    advantages = tokens.read(FINITE, batch.advantages)
    new = tokens.read(LOG_PROBS, log_probs)
    old = new
    name = BY_RATIO.get(config.ratio_to)
    if name is not None:
        rule, _ = PER_TOKEN[name]
        old = tokens.read(rule, getattr(batch, name))
    return advantages, jnp.exp(log_ratio(new, old))
