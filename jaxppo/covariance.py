"""Which tokens of a step have the highest covariance of log-prob and advantage: what clip_cov and kl_cov act on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo._sharding import ParallelMesh, Segments, ShardAxes, shard_call, vary
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig
from jaxppo.kl import log_ratio
from jaxppo.log_probs.stats import TokenStats
from jaxppo.loss import check_batch, old_log_probs
from jaxppo.policy_losses import find_policy_loss

_ARRAYS = ("loss_mask", "advantages", "segment_ids", "positions", "sample_ids")


def covariance_mask(
    stats: TokenStats,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    key: jax.Array,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Float[Array, "R T"]:
    """The tokens of a whole step that clip_cov takes out, or that kl_cov penalises.

    With c = (A - mean A) (log_prob - mean log_prob), means over the step's N loss tokens, and n = max(1, cov_ratio N):
    kl_cov takes the n highest c; clip_cov n random ones of those with cov_low < c < cov_high that the ratio's clip
    spares. The randomness of a token depends on (key, sample id, position) alone, so that neither packing nor mesh nor
    the split into micro-batches changes what is picked.

    Args:
      stats: log-probs, `f32[R, T]`, or those of the step's micro-batches stacked, `[K, R, T]`.
      batch: the step, of the same leading shape; needs `advantages`, and the old log-probs of the config.
      config: with loss "clip_cov" or "kl_cov".
      key: a key of `jax.random`.
      parallel: the mesh.

    Returns:
      `f32`, the shape of `batch.loss_mask`: 1 where a token is picked. For `policy_loss(..., covariance=...)`.

    Raises:
      ValueError: a config with another loss, an array that the batch lacks, shapes that differ.

    Example:
      >>> ids, one = jnp.array([[1, 1, 1]]), jnp.array([[0]])
      >>> x = jnp.array([[-1.0, 0.0, 2.0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 3)), one, one, one, advantages=x, old_log_probs=x)
      >>> covariance_mask(TokenStats(x), batch, PolicyLossConfig(loss="kl_cov"), jax.random.key(0))
      Array([[0., 0., 1.]], dtype=float32)

    Cui et al. 2025, The entropy mechanism of reinforcement learning, https://arxiv.org/abs/2505.22617
    """
    how = find_policy_loss(config.loss).covariance
    if how is None:
        raise ValueError(f"config.loss: got {config.loss!r}, expected 'clip_cov' or 'kl_cov'")
    shape = batch.loss_mask.shape
    if stats.log_probs.shape != shape:
        raise ValueError(f"stats: got log-probs of shape {stats.log_probs.shape}, expected the batch's, {shape}")
    check_batch(batch, config)
    log_probs = lax.stop_gradient(stats.log_probs)

    def per_shard(axes: ShardAxes, log_probs: jax.Array, old: jax.Array, key: jax.Array, *arrays: jax.Array) -> Any:
        log_probs, old, *arrays = (x.reshape(-1, x.shape[-1]) for x in (log_probs, old, *arrays))  # type: ignore[assignment]
        mask, advantages, segment_ids, positions, sample_ids = arrays
        select = lambda x: jnp.where(mask > 0, x.astype(jnp.float32), 0)  # noqa: E731
        log_probs, old, advantages, weight = select(log_probs), select(old), select(advantages), select(mask > 0)
        total = lambda x: axes.psum(vary(x.sum(), axes.tokens), axes.tokens)  # noqa: E731
        tokens = jnp.maximum(total(weight), 1)
        center = lambda x: x - total(x) / tokens  # noqa: E731
        covariance = center(advantages) * center(log_probs)
        owners = Segments(segment_ids, sample_ids.shape[1], axes).spread(sample_ids)
        draws = jax.vmap(jax.vmap(lambda s, t: jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, s), t))))
        lots = draws(owners, positions)
        wanted = jnp.maximum(jnp.floor(config.cov_ratio * tokens), 1).astype(jnp.int32)
        if how == "random":
            ratio = jnp.exp(log_ratio(log_probs, old))
            clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
            spared = -advantages * clipped <= -advantages * ratio
            inside = (covariance > config.cov_low) & (covariance < config.cov_high)
            picked = _highest(total, lots, lots, (mask > 0) & spared & inside, wanted)
        else:
            picked = _highest(total, _ordered_bits(covariance), lots, mask > 0, wanted)
        return picked.astype(jnp.float32).reshape((*shape[:-2], -1, mask.shape[-1]))

    old = old_log_probs(log_probs, batch, config)
    args = {"stats": log_probs, "old_log_probs": old, "key": key, **{n: getattr(batch, n) for n in _ARRAYS}}

    def specs(parallel: ParallelMesh) -> tuple[list[Any], Any]:
        of = batch.specs(parallel)
        return [of.loss_mask, of.loss_mask, P(), *(getattr(of, name) for name in _ARRAYS)], of.loss_mask

    return shard_call("covariance_mask", per_shard, parallel, args, specs)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """u32 in the order of the f32 x, the two zeros being equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _highest(total: Any, scores: jax.Array, lots: jax.Array, candidates: jax.Array, wanted: jax.Array) -> jax.Array:
    """The `wanted` candidates with the highest u32 scores over all shards, or all; lots decide between equal scores."""
    cut = _kth(total, scores, candidates, wanted)
    above = candidates & (scores > cut)
    tied = candidates & (scores == cut)
    return above | (tied & (lots >= _kth(total, lots, tied, wanted - total(above.astype(jnp.int32)))))


def _kth(total: Any, scores: jax.Array, candidates: jax.Array, k: jax.Array) -> jax.Array:
    """The largest u32 that at least k candidates' scores reach, 0 if none; bit by bit, one scalar all-reduce each."""

    def step(i: jax.Array, cut: jax.Array) -> jax.Array:
        attempt = cut | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached = total((candidates & (scores >= attempt)).astype(jnp.int32))
        return jnp.where(reached >= k, attempt, cut)

    return lax.fori_loop(0, 32, step, jnp.uint32(0))
