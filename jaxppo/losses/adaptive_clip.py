"""BAPO: bounds of the clip, searched at each step so that good tokens count as much as bad ones."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import RatioTo, as_number, check, check_choice, check_number, masked, needed
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

    The sums are over all loss tokens of the step. One bound is raised in steps from its first to its last value, then
    the other one, until the target is met (without a negative A at once), or both have their last values. A raised
    lower bound makes N larger, so it never brings P / N up. Make the loss of the result inside `jit`, as the published
    code has it: `PPO(clip_low=clip_low, clip_high=clip_high, dual_clip=3.0)`.

    Args:
      stats: the current log-probs, `f32[R, T]`, or those of the step's micro-batches stacked, `[K, R, T]`.
      batch: the step, of the same leading shape; needs `advantages` and the log-probs of `ratio_to`.
      ratio_to: the policy in the ratio's denominator, see `PolicyLossConfig`.
      target: of P / N. The paper's target is the share P / (P + N), of which this is share / (1 - share).
      low, high: the first and the last lower bound of the ratio, at most 1, and upper bound, at least 1.
      step: by which a bound is raised.
      first: the bound that is raised first: "high", as in the paper, or "low", as in the published code.
      parallel: the mesh.

    Returns:
      1 - the lower bound and the upper bound - 1, `f32[]`.

    Raises:
      ValueError: bounds out of order, arrays that the batch lacks, one micro-batch of several.

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
    check_choice("ratio_to", ratio_to, RatioTo)
    check_choice("first", first, First)
    check_number("step", step, above=0)
    for what, (start, end), least, most in (("low", low, 0, 1), ("high", high, 1, np.inf)):
        check(what, (start, end), least <= start <= end <= most, f"{least} <= first <= last <= {most}")
    name = BY_RATIO.get(ratio_to)
    old = stats.log_probs if name is None else needed(f"batch.{name}", getattr(batch, name), f"ratio_to={ratio_to!r}")
    advantages = needed("batch.advantages", batch.advantages, "f32[R, T] for adaptive_clip")
    args = {"stats": stats.log_probs, "old_log_probs": old, "advantages": advantages, "loss_mask": batch.loss_mask}
    args["target"] = as_number("target", target, above=0)
    given = args, lambda p: ([batch.specs(p).loss_mask] * 4 + [P()], P()), (low, high, step, first)
    return shard_call("adaptive_clip", _per_shard, parallel, *given)


def _per_shard(axes: ShardAxes, static: tuple[Any, ...], *given: jax.Array) -> tuple[jax.Array, jax.Array]:
    low, high, step, first = static
    *of_tokens, target = given
    log_probs, old, advantages, mask = lax.stop_gradient(as_rows(of_tokens))
    mask = mask.astype(jnp.float32)
    ratio, a = jnp.exp(log_ratio(masked(log_probs, mask), masked(old, mask))), masked(advantages, mask)
    lows, highs = (start + step * np.arange(1 + np.ceil((end - start) / step - 1e-9)) for start, end in (low, high))
    lows, highs = np.minimum(lows, low[1]), np.minimum(highs, high[1])  # the last step may be cut
    good = jnp.stack([(jnp.maximum(a, 0) * jnp.minimum(ratio, x)).sum() for x in highs])
    bad = jnp.stack([(jnp.maximum(-a, 0) * jnp.maximum(ratio, x)).sum() for x in lows])
    good, bad = axes.psum((vary(good, axes.tokens), vary(bad, axes.tokens)), axes.tokens)
    last, raised = (len(lows) - 1, len(highs) - 1), np.arange(len(lows) + len(highs) - 1)  # by so many steps in all
    of_high = np.minimum(raised, last[1]) if first == "high" else np.maximum(raised - last[0], 0)
    of_low = raised - of_high
    met = good[of_high] >= target * bad[of_low]
    at = jnp.where(met.any(), jnp.argmax(met), raised[-1])
    return jnp.asarray(1 - lows[of_low], jnp.float32)[at], jnp.asarray(highs[of_high] - 1, jnp.float32)[at]
