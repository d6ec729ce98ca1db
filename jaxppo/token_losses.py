"""What losses that are plain means over tokens share: denominators, the sum over devices, the metric `loss`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo._sharding import ParallelMesh, ShardAxes
from jaxppo.aggregation import Normalizer, check_aggregation, normalize, token_weights, weighted_sum
from jaxppo.batch import RolloutBatch
from jaxppo.metrics import Metric


def check_denominators(aggregation: str, aggregation_norm: float | None) -> None:
    """Raises where the aggregation is unknown, or has no use for the constant length, or needs one."""
    check_aggregation("aggregation", aggregation)
    if (aggregation == "sequence_mean_token_sum_norm") != (aggregation_norm is not None):
        raise ValueError(
            f"aggregation_norm: got {aggregation_norm} with aggregation={aggregation!r}, expected a number with "
            "'sequence_mean_token_sum_norm' and None with any other"
        )


def check_like_batch(name: str, x: Any, batch: RolloutBatch) -> None:
    """Raises where x is no `[R, T]` array of the batch's shape."""
    if x.shape != batch.loss_mask.shape or x.ndim != 2:
        raise ValueError(f"{name}: got shape {x.shape}, expected the batch's [R, T], {batch.loss_mask.shape}")


def aggregate(
    axes: ShardAxes,
    losses: Float[Array, "R T"],
    batch: RolloutBatch,
    normalizer: Normalizer | None,
    aggregation: str,
    aggregation_norm: float | None = None,
) -> tuple[Float[Array, ""], Metric, Float[Array, "R T"]]:
    """Per-shard: the loss, sum over tokens of weight * loss, as a scalar and as a metric, and the weights."""
    if normalizer is None:
        normalizer = normalize(axes, batch.loss_mask, batch.segment_ids, batch.rollout_ids, aggregation)
    weights = token_weights(batch.loss_mask, batch.segments(axes), normalizer, aggregation, aggregation_norm or 1.0)
    total = weighted_sum(axes, losses, weights)
    return total, Metric(lax.stop_gradient(total), jnp.float32(1), "sum"), weights


def specs(
    parallel: ParallelMesh, batch: RolloutBatch, normalizer: Normalizer | None
) -> tuple[list[Any], jax.sharding.PartitionSpec]:
    """For `shard_call` of (per-token arrays, batch, normalizer) to scalars."""
    return [parallel.tokens_spec, batch.specs(parallel), normalizer and Normalizer.specs(parallel)], P()
