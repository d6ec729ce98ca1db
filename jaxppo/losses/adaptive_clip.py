"""Bounds of the clip that are searched at each step so that good tokens count as much as bad ones: BAPO."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import RatioTo, as_number, check_choice, check_number, masked, needed
from jaxppo.base.kl import log_ratio
from jaxppo.base.stacked import as_rows, check_whole_step
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.call import check_stats
from jaxppo.head.head import TokenStats
from jaxppo.losses.policy_tokens import BY_RATIO
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary

First = Literal["high", "low"]


def adaptive_clip(
    stats: TokenStats,
    batch: RolloutBatch,
    *,
    ratio_to: RatioTo = "old",
    target: float | Array = 1.0,
    low: tuple[float, float] = (0.6, 0.8),
    high: tuple[float, float] = (1.2, 2.0),
    step: float = 0.05,
    first: First = "high",
    parallel: ParallelMesh | ShardAxes | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """BAPO's bounds of a step: (clip_low, clip_high) of the first bounds with P / N of at least the target.

        P(high) = sum over A > 0 of A min(r, high),   N(low) = sum over A < 0 of -A max(r, low)

    One bound is raised in steps from its first to its last value, then the other one, until the target is met, or both
    have their last values. Without a token of negative advantage the first bounds stay. The sums are over all loss
    tokens of the step. Make the loss of the result inside `jit`, as the published code has it:
    `PPO(clip_low=clip_low, clip_high=clip_high, dual_clip=3.0)`. A raised lower bound makes N larger: with these
    formulas it never brings P / N up.

    Args:
      stats: the current log-probs, `f32[R, T]`, or those of the step's micro-batches stacked, `[K, R, T]`.
      batch: the step, of the same leading shape; needs `advantages` and the log-probs of `ratio_to`.
      ratio_to: the policy in the ratio's denominator, see `PolicyLossConfig`.
      target: of P / N. The paper's target is the share P / (P + N), of which this is share / (1 - share).
      low: the first and the last lower bound of the ratio, at most 1.
      high: the first and the last upper bound, at least 1.
      step: by which a bound is raised.
      first: the bound that is raised first: "high", as in the paper, or "low", as in the published code.
      parallel: the mesh.

    Returns:
      1 - the lower bound and the upper bound - 1, `f32[]`.

    Raises:
      ValueError: bounds out of order, arrays that the batch lacks, one micro-batch of several.

    Example:
      >>> from jaxppo.losses.adaptive_clip import adaptive_clip
      >>> ids, ratio = jnp.array([[1, 1, 1, 1]]), jnp.array([[1.5, 1.0, 0.5, 1.3]])
      >>> a, old = jnp.array([[1.0, 0.5, -1.0, -1.0]]), jnp.full((1, 4), -2.0)
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 4)), jnp.array([[0]]), advantages=a, old_log_probs=old)
      >>> [round(float(x), 2) for x in adaptive_clip(TokenStats(old + jnp.log(ratio)), batch, target=1.01)]
      [0.4, 0.45]

    Xi et al. 2025, BAPO, https://arxiv.org/abs/2510.18927, https://github.com/WooooDyy/BAPO
    """
    batch = checked(batch, stacked=True)
    check_whole_step("adaptive_clip", batch)
    check_stats(stats, batch.loss_mask.shape)
    check_choice("ratio_to", ratio_to, RatioTo)
    check_choice("first", first, First)
    check_number("step", step, above=0)
    for what, (start, end), least, most in (("low", low, 0, 1), ("high", high, 1, np.inf)):
        if not least <= start <= end <= most:
            raise ValueError(f"{what}: got {(start, end)}, expected {least} <= first <= last <= {most}")
    name = BY_RATIO.get(ratio_to)
    old = stats.log_probs if name is None else needed(f"batch.{name}", getattr(batch, name), f"ratio_to={ratio_to!r}")
    advantages = needed("batch.advantages", batch.advantages, "f32[R, T] for adaptive_clip")
    args = {"stats": stats.log_probs, "old_log_probs": old, "advantages": advantages, "loss_mask": batch.loss_mask}
    args["target"] = as_number("target", target, above=0)

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [batch.specs(p).loss_mask] * 4 + [P()], P()

    return shard_call("adaptive_clip", _per_shard, parallel, args, specs, (low, high, step, first))


def _per_shard(
    axes: ShardAxes,
    static: tuple[tuple[float, float], tuple[float, float], float, First],
    log_probs: jax.Array,
    old: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    target: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    low, high, step, first = static
    log_probs, old, advantages, mask = lax.stop_gradient(as_rows((log_probs, old, advantages, loss_mask)))
    mask = mask.astype(jnp.float32)
    ratio, a = jnp.exp(log_ratio(masked(log_probs, mask), masked(old, mask))), masked(advantages, mask)
    lows, highs = _steps(*low, step), _steps(*high, step)
    good = jnp.stack([(jnp.maximum(a, 0) * jnp.minimum(ratio, x)).sum() for x in highs])
    bad = jnp.stack([(jnp.maximum(-a, 0) * jnp.maximum(ratio, x)).sum() for x in lows])
    good, bad = axes.psum((vary(good, axes.tokens), vary(bad, axes.tokens)), axes.tokens)
    m, n = len(lows), len(highs)
    if first == "high":
        order = [(0, j) for j in range(n)] + [(i, n - 1) for i in range(1, m)]
    else:
        order = [(i, 0) for i in range(m)] + [(m - 1, j) for j in range(1, n)]
    of_low, of_high = np.transpose(order)
    met = good[of_high] >= target * bad[of_low]
    at = jnp.where(met.any(), jnp.argmax(met), len(order) - 1)
    return jnp.asarray(1 - lows[of_low], jnp.float32)[at], jnp.asarray(highs[of_high] - 1, jnp.float32)[at]


def _steps(first: float, last: float, step: float) -> np.ndarray:
    """From the first to the last bound, which the last step may cut."""
    return np.minimum(first + step * np.arange(1 + np.ceil((last - first) / step - 1e-9)), last)
