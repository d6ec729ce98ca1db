"""Masks that select tokens over a whole step before it runs: by the drift of the policy, or by entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import as_number, check_alike, needed
from jaxppo.base.ranks import kth, largest, ordered_bits, total
from jaxppo.base.stacked import check_whole_step, of_rows
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary

__all__ = ["second_moment_mask", "top_entropy_mask"]


def second_moment_mask(
    batch: RolloutBatch, bound: float = 0.04, *, parallel: ParallelMesh | ShardAxes | None = None
) -> Float[Array, "*K R T"]:
    """M2PO: drops the fewest tokens that keep the second moment of the drift below a bound, over the whole step.

    Let d = (rollout_log_prob - old_log_prob)^2. The loss tokens with the largest d are dropped until the mean of the
    rest is below `bound`: first those without a finite d, those with equal d together, never those with the smallest.

    Use it as `dataclasses.replace(batch, loss_mask=...)` to drop tokens from penalties and denominators too, as AReaL
    does; or multiply the advantages by it to drop them from the policy loss alone. The paper compares the sampler with
    the current policy, this function with the old one, which is known before the step. AReaL sorts each micro-batch.

    Args:
      batch: the step, `[R, T]`, or its micro-batches stacked, `[K, R, T]`; needs `old_log_probs`, `rollout_log_probs`.
      bound: the bound of the mean, nats^2, above 0.
      parallel: the mesh.

    Returns:
      `f32`, the shape of `batch.loss_mask`: 1 where a loss token stays.

    Raises:
      ValueError: log-probs that the batch lacks, a bound that is not above 0, one micro-batch of several, a call inside
        `accumulate_gradients`.

    Example:
      >>> ids, x = jnp.array([[1, 1, 1]]), jnp.array([[-1.0, -2.0, -3.0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 3)), jnp.array([[0]]), old_log_probs=x,
      ...                      rollout_log_probs=x - jnp.array([[0.1, 0.25, 0.5]]))
      >>> second_moment_mask(batch, 0.04)  # squares of 0.01, 0.0625 and 0.25
      Array([[1., 1., 0.]], dtype=float32)

    Zheng et al. 2025, https://arxiv.org/abs/2510.01161
    """
    batch = checked(batch, stacked=True)
    check_whole_step("second_moment_mask", batch)
    batch.check_layout(parallel)
    given = {"old_log_probs": batch.old_log_probs, "rollout_log_probs": batch.rollout_log_probs}
    args = {name: needed(f"batch.{name}", x, "f32[R, T] for second_moment_mask") for name, x in given.items()}
    args |= {"loss_mask": batch.loss_mask, "bound": as_number("bound", bound, above=0)}
    return shard_call("second_moment_mask", _second_moment, parallel, args, _specs(batch, 3))


@of_rows
def _second_moment(
    axes: ShardAxes, old: jax.Array, rollout: jax.Array, loss_mask: jax.Array, bound: jax.Array
) -> Float[Array, "*K R T"]:
    axes.check_complete("the second moment of a step", loss_mask)
    mask = loss_mask > 0
    d = jnp.where(mask, jnp.square(rollout - old), 0)
    scores = jnp.where(jnp.isnan(d), jnp.uint32(0xFFFFFFFF), ordered_bits(d))

    def holds(cut: jax.Array) -> jax.Array:
        stays = mask & (scores <= cut)
        sums = jnp.where(stays, d, 0).sum(), stays.sum(dtype=jnp.float32)
        whole, count = axes.psum(jax.tree.map(lambda x: vary(x, axes.tokens), sums), axes.tokens)
        return (whole < bound * count) | (count == 0)

    least = jnp.where(mask, scores, jnp.uint32(0xFFFFFFFF)).min()
    least = lax.pmin(vary(least, axes.tokens), axes.tokens) if axes.tokens else least
    stays = (mask & (scores <= jnp.maximum(largest(holds), least))).astype(jnp.float32)
    return jnp.where(mask & jnp.isnan(bound), jnp.nan, stays)


def top_entropy_mask(
    entropy: Float[Array, "*K R T"],
    batch: RolloutBatch,
    share: float = 0.2,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Float[Array, "*K R T"]:
    """Keeps the loss tokens of the step whose entropy is at least the quantile 1 - share.

    Of n loss tokens, n - ceil((n - 1) (1 - share)) stay, and those that tie with the last of them. Multiply the
    advantages by the mask: the other tokens then have no policy loss, and penalties and denominators are still over all
    tokens. TRL and ms-swift take the quantile of each micro-batch.

    Args:
      entropy: `f32[R, T]`, nats, or `[K, R, T]` for stacked micro-batches, of the policy at the start of the step, from
        the pass of the old log-probs (see `compute_log_probs`); anything where the mask is 0.
      batch: the step, of the same shape; only its loss mask is read.
      share: the share of loss tokens to keep, above 0 and at most 1.
      parallel: the mesh.

    Returns:
      As `second_moment_mask`; NaN where the entropy of a loss token is not finite, so that the loss is NaN.

    Raises:
      ValueError: shapes that differ, a share out of its range, a part of a step as in `second_moment_mask`.

    Example:
      >>> ids = jnp.array([[1, 1, 1, 1]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 4)), jnp.array([[0]]))
      >>> top_entropy_mask(jnp.array([[0.1, 2.0, 0.3, 1.0]]), batch, 0.5)
      Array([[0., 1., 0., 1.]], dtype=float32)

    Wang et al. 2025, Beyond the 80/20 rule, https://arxiv.org/abs/2506.01939
    """
    batch = checked(batch, stacked=True)
    check_whole_step("top_entropy_mask", batch)
    batch.check_layout(parallel)
    check_alike({"batch.loss_mask": batch.loss_mask, "entropy": entropy})
    number = as_number("share", share, above=0, most=1)
    args = {"entropy": entropy, "loss_mask": batch.loss_mask, "share": number}
    return shard_call("top_entropy_mask", _top_entropy, parallel, args, _specs(batch, 2))


@of_rows
def _top_entropy(axes: ShardAxes, entropy: jax.Array, loss_mask: jax.Array, share: jax.Array) -> Float[Array, "*K R T"]:
    axes.check_complete("a quantile of the step's entropies", loss_mask)
    mask = loss_mask > 0
    count = total(axes, mask.astype(jnp.int32))
    wanted = count - jnp.ceil((count - 1).astype(jnp.float32) * (1 - share)).astype(jnp.int32)
    scores = ordered_bits(jnp.where(mask, entropy.astype(jnp.float32), 0))
    stays = (mask & (scores >= kth(axes, scores, mask, wanted))).astype(jnp.float32)
    return jnp.where(mask & ~(jnp.isfinite(entropy) & jnp.isfinite(share)), jnp.nan, stays)


def _specs(batch: RolloutBatch, arrays: int) -> Callable[[ParallelMesh], tuple[list[Any], Any]]:
    """The specs of a mask that is computed from so many arrays of tokens and a number."""
    return lambda p: ([batch.specs(p).loss_mask] * arrays + [P()], batch.specs(p).loss_mask)
