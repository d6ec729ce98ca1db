"""Supervised fine-tuning: the mean negative log-likelihood of the targets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.log_probs.stats import TokenStats
from jaxppo.metrics import Metrics, reduce_metric
from jaxppo.token_losses import aggregate, check_denominators, check_like_batch, specs
from sharding import ParallelMesh, ShardAxes, shard_call


def sft_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    *,
    aggregation: str = "token_mean",
    aggregation_norm: float | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The negative log-likelihood of the targets: loss = sum over tokens of weight_t * -log_prob_t.

    Differentiable in `stats`. Positions with loss mask 0 may hold anything, NaN included.

    Args:
      stats: `f32[R, T]` log-probs of the targets, see `log_probs_from_hidden`.
      batch: `[R, T]`; its loss mask and its sequences count.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches), `nll` (a mean over tokens, nats) and,
      where stats has it, `entropy`.

    Raises:
      ValueError: an unknown aggregation, shapes that differ.

    Example:
      >>> ids, one = jnp.array([[1, 1, 0]]), jnp.array([[0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.array([[1.0, 1.0, 0.0]]), one, one, one)
      >>> loss, metrics = sft_loss(TokenStats(jnp.array([[-1.0, -2.0, jnp.nan]])), batch)
      >>> float(loss), float(metrics["nll"].value)
      (1.5, 1.5)
    """
    check_denominators(aggregation, aggregation_norm)
    check_like_batch("stats.log_probs", stats.log_probs, batch)

    def per_shard(
        axes: ShardAxes, stats: TokenStats, batch: RolloutBatch, normalizer: Normalizer | None
    ) -> tuple[jax.Array, Metrics]:
        mask = batch.loss_mask
        nll = jnp.where(mask > 0, -stats.log_probs.astype(jnp.float32), 0)
        loss, metric, _ = aggregate(axes, nll, batch, normalizer, aggregation, aggregation_norm)
        found: Metrics = {"loss": metric, "nll": reduce_metric(axes, nll, mask, "mean")}
        if stats.entropy is not None:
            found["entropy"] = reduce_metric(axes, stats.entropy, mask, "mean")
        return loss, found

    args = {"stats": stats, "batch": batch, "normalizer": normalizer}
    return shard_call("sft_loss", per_shard, parallel, args, lambda p: specs(p, batch, normalizer))
