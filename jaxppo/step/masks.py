"""Masks that select tokens over a whole step before it runs: by the drift of the policy, or by
entropy.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import as_number, check_alike, needed, plain_number
from jaxppo.base.ranks import kth, largest, ordered_bits, total
from jaxppo.base.stacked import check_whole_step, of_rows
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import ENTROPIES, LOG_PROBS, SAMPLED
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary

__all__ = ["second_moment_mask", "top_entropy_mask"]

Share = Float[Array, ""] | tuple[Int[Array, ""], Int[Array, ""]]  # a traced number, or a fraction
_LARGEST = 2**15  # denominator of a fraction


def second_moment_mask(
    batch: RolloutBatch, bound: float = 0.04, *, parallel: ParallelMesh | ShardAxes | None = None
) -> Float[Array, "*K R T"]:
    """M2PO: drops the fewest tokens that keep the second moment of the drift below a bound, over
    the whole step.

    Let d = (rollout_log_prob - old_log_prob)^2. The loss tokens with the largest d are dropped
    until the mean of the rest is below `bound`: first those without a finite d, those with equal d
    together, never those with the smallest.

    Use it as `dataclasses.replace(batch, loss_mask=...)` to drop tokens from penalties and
    denominators too, as AReaL does; or multiply the advantages by it to drop them from the policy
    loss alone. The paper compares the sampler with the current policy, this function with the old
    one, which is known before the step. AReaL sorts each micro-batch.

    Args:
      batch: the step, `[R, T]`, or its micro-batches stacked, `[K, R, T]`; needs `old_log_probs`,
        `rollout_log_probs`.
      bound: the bound of the mean, nats^2, above 0.
      parallel: the mesh.

    Returns:
      `f32`, the shape of `batch.loss_mask`: 1 where a loss token stays.

    Raises:
      ValueError: log-probs that the batch lacks, a bound that is not above 0, one micro-batch of
        several, a call inside `accumulate_gradients`.

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
    for name in ("old_log_probs", "rollout_log_probs"):
        needed(f"batch.{name}", getattr(batch, name), "f32[R, T] for second_moment_mask")
    args = {"batch": batch, "bound": as_number("bound", bound, above=0)}

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        return [batch.specs(p), P()], batch.specs(p).loss_mask

    return shard_call("second_moment_mask", _second_moment, parallel, args, specs)


@of_rows
def _second_moment(
    axes: ShardAxes, batch: RolloutBatch, bound: jax.Array
) -> Float[Array, "*K R T"]:
    axes.check_complete("the second moment of a step", batch.loss_mask)
    tokens = LossTokens.of(batch)
    mask = tokens.mask > 0
    old = tokens.read(LOG_PROBS, batch.old_log_probs, impossible=True)
    rollout = tokens.read(SAMPLED, batch.rollout_log_probs, impossible=True)
    d = jnp.where(mask, jnp.square(rollout - old), 0)
    scores = jnp.where(jnp.isnan(d), jnp.uint32(0xFFFFFFFF), ordered_bits(d))

    def holds(cut: jax.Array) -> jax.Array:
        stays = mask & (scores <= cut)
        own_sum = jnp.where(stays, d, 0).sum()
        own_count = stays.sum(dtype=jnp.float32)
        drift, count = axes.psum(
            (vary(own_sum, axes.tokens), vary(own_count, axes.tokens)), axes.tokens
        )
        return (drift < bound * count) | (count == 0)

    least = jnp.where(mask, scores, jnp.uint32(0xFFFFFFFF)).min()
    if axes.tokens:
        least = lax.pmin(vary(least, axes.tokens), axes.tokens)
    cut = jnp.maximum(largest(holds), least)
    stays = (mask & (scores <= cut)).astype(jnp.float32)
    unsound = jnp.isnan(old) | jnp.isnan(rollout) | (mask & jnp.isnan(bound))
    return jnp.where(unsound, jnp.nan, stays)


def top_entropy_mask(
    entropy: Float[Array, "*K R T"],
    batch: RolloutBatch,
    share: float = 0.2,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Float[Array, "*K R T"]:
    """Keeps the loss tokens of the step whose entropy is at least the quantile 1 - share.

    Of n loss tokens, n - ceil((n - 1) (1 - share)) stay, and those that tie with the last of them.
    Multiply the advantages by the mask: the other tokens then have no policy loss, and penalties
    and denominators are still over all tokens. TRL and ms-swift take the quantile of each
    micro-batch.

    Args:
      entropy: `f32[R, T]`, nats, or `[K, R, T]` for stacked micro-batches, of the policy at the
        start of the step, from the pass of the old log-probs (see `compute_log_probs`); anything
        where the mask is 0.
      batch: the step, of the same shape; only its loss mask is read.
      share: the share of loss tokens to keep, above 0 and at most 1.
      parallel: the mesh.

    Returns:
      As `second_moment_mask`; NaN where the entropy of a loss token is not finite, so that the loss
      is NaN.

    Raises:
      ValueError: shapes that differ, a share out of its range, a part of a step as in
        `second_moment_mask`.

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
    args = {"entropy": entropy, "batch": batch, "share": _share(share)}

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        return [batch.specs(p).loss_mask, batch.specs(p), P()], batch.specs(p).loss_mask

    return shard_call("top_entropy_mask", _top_entropy, parallel, args, specs)


@of_rows
def _top_entropy(
    axes: ShardAxes, entropy: jax.Array, batch: RolloutBatch, share: Share
) -> Float[Array, "*K R T"]:
    axes.check_complete("a quantile of the step's entropies", batch.loss_mask)
    tokens = LossTokens.of(batch)
    mask = tokens.mask > 0
    entropy = tokens.read(ENTROPIES, entropy)
    count = total(axes, mask.astype(jnp.int32))
    scores = ordered_bits(entropy)
    cut = kth(axes, scores, mask, count - _dropped(count - 1, share))
    stays = (mask & (scores >= cut)).astype(jnp.float32)
    sound = jnp.isfinite(entropy)
    if isinstance(share, jax.Array):
        sound = sound & (jnp.isfinite(share) | ~mask)
    return jnp.where(sound, stays, jnp.nan)


def _share(share: Any) -> Share:
    """The checked share: a fraction of two integers where it is known, since 0.7 is none in f32;
    else f32.
    """
    if isinstance(share, jax.core.Tracer):
        return as_number("share", share, above=0, most=1)
    number = float(plain_number("share", share, above=0, most=1))
    fraction = Fraction(number).limit_denominator(_LARGEST)
    return jnp.int32(fraction.numerator), jnp.int32(fraction.denominator)


def _dropped(most: Int[Array, ""], share: Share) -> Int[Array, ""]:
    """ceil(most (1 - share)), exact where the share is a fraction."""
    if isinstance(share, jax.Array):
        number = most.astype(jnp.float32)
        rounding = number * 2.0**-23  # of the share, of 1 - share and of their product
        return jnp.ceil(number * (1 - share) - rounding).astype(jnp.int32)
    numerator, denominator = share
    rest = denominator - numerator
    # most = denominator * q + r: no product is beyond 32 bits
    return most // denominator * rest + (most % denominator * rest + denominator - 1) // denominator
