"""Picks the tokens of a step with the highest covariance of log-prob and advantage, for ClipCov
and KLCov.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import masked
from jaxppo.base.pytree import PyTree
from jaxppo.base.ranks import highest, ordered_bits, total
from jaxppo.base.stacked import check_whole_step, of_rows
from jaxppo.base.traced import put_arrays, take_arrays
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import FINITE, LOG_PROBS, PER_TOKEN, ValueRule
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.head import TokenStats
from jaxppo.head.token_arguments import check_stats
from jaxppo.losses.policy_tokens import BY_RATIO, check_config, check_needed, old_log_probs
from jaxppo.losses.unusable_tokens import agreeing, without_policy_loss
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy_losses import PolicyLoss
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call

__all__ = ["covariance_mask"]


def covariance_mask(
    stats: TokenStats,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    key: jax.Array,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Float[Array, "*K R T"]:
    """The tokens of a whole step that ClipCov takes out, or that KLCov penalises.

    Let c = (A - mean A) (log_prob - mean log_prob), with means over the step's N loss tokens, and n
    = max(1, share N). Tokens without a policy loss because they are `Unusable` are not among them.
    KLCov picks the tokens with the n highest c. ClipCov picks n random tokens among those with low
    < c < high that the ratio does not clip. The randomness of a token depends on (key, sample id,
    position) alone, so that packing, mesh and micro-batches do not change which tokens are picked.

    Args:
      stats: log-probs, `f32[R, T]`, or those of the step's micro-batches stacked, `[K, R, T]`.
      batch: the step, of the same leading shape; needs `advantages`, and the old log-probs of the
        config.
      config: with a loss that selects tokens, such as `ClipCov` or `KLCov`.
      key: a key of `jax.random`.
      parallel: the mesh.

    Returns:
      `f32`, the shape of `batch.loss_mask`: 1 where a token is picked; for `policy_loss` the
      batch's extra "selected". NaN at all loss tokens, as the loss then is, where what it reads of
      one of them breaks a rule of the loss.

    Raises:
      ValueError: a config with another loss, an array that the batch lacks, shapes that differ, a
        part of a step.

    Example:
      >>> ids, one = jnp.array([[1, 1, 1]]), jnp.array([[0]])
      >>> x, log_p = jnp.array([[-1.0, 0.0, 2.0]]), jnp.array([[-3.0, -2.0, 0.0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 3)), one, advantages=x, old_log_probs=log_p)
      >>> covariance_mask(TokenStats(log_p), batch, PolicyLossConfig(KLCov()), jax.random.key(0))
      Array([[0., 0., 1.]], dtype=float32)

    Cui et al. 2025, The entropy mechanism of reinforcement learning,
    https://arxiv.org/abs/2505.22617
    """
    batch = checked(batch, stacked=True)
    check_whole_step("covariance_mask", batch)
    check_config(config)
    _check_key(key)
    if config.loss.selects is None:
        raise ValueError(
            f"config.loss: got {config.loss}, expected one that selects tokens, such as ClipCov or"
            " KLCov"
        )
    check_stats(stats, batch.loss_mask.shape)
    check_needed(batch, config)
    static, traced = take_arrays(config.loss)
    log_probs = lax.stop_gradient(stats.log_probs)
    old = old_log_probs(log_probs, agreeing(config, log_probs, batch), config)
    without = without_policy_loss(config, log_probs, batch)
    if without is not None:
        batch = dataclasses.replace(batch, loss_mask=jnp.where(without, 0, batch.loss_mask))
    args = {"stats": log_probs, "old_log_probs": old, "batch": batch, "key": key, "config": traced}
    kind = PER_TOKEN[BY_RATIO.get(config.ratio_to, "log_probs")][0]

    def specs(p: ParallelMesh) -> tuple[PyTree, PyTree]:
        of_batch = batch.specs(p)
        tokens = of_batch.loss_mask
        return [tokens, tokens, of_batch, P(), P()], tokens

    return shard_call("covariance_mask", _pick, parallel, args, specs, (static, kind))


def _check_key(key: Any) -> None:
    """Raises unless this is one key of `jax.random`, of the new kind or of the old one."""
    dtype = getattr(key, "dtype", None)
    rank = getattr(key, "ndim", None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and rank == 0
    is_old = dtype == jnp.uint32 and rank == 1
    got = type(key).__name__ if dtype is None else f"dtype {dtype}, shape {key.shape}"
    if not (is_new or is_old):
        raise TypeError(f"key: got {got}, expected a key of jax.random")


@of_rows
def _pick(
    axes: ShardAxes,
    static: tuple[PolicyLoss, ValueRule],
    log_probs: Array,
    old: Array,
    batch: RolloutBatch,
    key: Array,
    traced: Mapping[str, Array],
) -> Float[Array, "*K R T"]:
    config, kind_of_old = static
    loss: Any = put_arrays(config, traced)
    axes.check_complete("a selection of the step's tokens", batch.loss_mask)
    read = LossTokens.of(batch)
    mask = read.mask
    log_probs = read.read(LOG_PROBS, log_probs)
    old = read.read(kind_of_old, old)
    advantages = read.read(FINITE, batch.advantages)

    def draw(sample: jax.Array, position: jax.Array) -> jax.Array:
        of_token = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return jax.random.bits(of_token, dtype=jnp.uint32)  # u64 with x64 else

    tokens = jnp.maximum(total(axes, mask), 1)
    from_means = [masked(x - total(axes, x) / tokens, mask) for x in (advantages, log_probs)]
    covariance = from_means[0] * from_means[1]
    owners = batch.segments(axes).spread(batch.sample_ids)
    lots = jax.vmap(jax.vmap(draw))(owners, batch.positions)
    wanted = jnp.maximum(jnp.floor(loss.share * tokens), 1).astype(jnp.int32)
    candidates = (mask > 0) & loss.selectable(covariance, log_probs, old, advantages)
    scores = lots if loss.selects == "random" else ordered_bits(covariance)
    picked = highest(axes, scores, lots, candidates, wanted).astype(jnp.float32)
    # all picks depend on the means of the step
    unsound = jnp.isnan(total(axes, log_probs + old + advantages))
    return jnp.where(unsound & (mask > 0), jnp.nan, picked)
