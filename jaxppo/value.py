"""The critic's loss, in the conventions of the published systems."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo._sharding import ParallelMesh, ShardAxes, shard_call
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.metrics import Metrics, reduce_metric
from jaxppo.token_losses import aggregate, check_denominators, check_like_batch, specs

ClipFraction = Literal["worse", "outside"]


def value_loss(
    values: Float[Array, "R T"],
    batch: RolloutBatch,
    *,
    clip: float | None = 0.2,
    factor: float = 0.5,
    clip_fraction: ClipFraction = "worse",
    aggregation: str = "token_mean",
    aggregation_norm: float | None = None,
    metric_aggregation: Literal["token_mean", "loss"] = "token_mean",
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Squared error to the returns, clipped about the old values: l_t = factor * max((v - G)^2, (v_clip - G)^2).

    v_clip = clip(v, old - clip, old + clip). Differentiable in `values`. verl: the defaults; slime: factor=1,
    clip_fraction="outside".

    Args:
      values: `[R, T]`, the critic's, now.
      batch: `[R, T]`; needs `returns`, and with a clip `values`, the critic's at the start of the step.
      clip: how far a value may move from its old one and still gain; None for the plain squared error.
      factor: multiplies the squared error.
      clip_fraction: what the metric `clip_fraction` counts: tokens whose clipped error is the "worse", or whose value
        moved "outside" the clip.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      metric_aggregation: `clip_fraction` is a "token_mean", or reduced as the "loss" is.
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches), `value_mean`, `value_error` (the mean
      of |v - G|) and, with a clip, `clip_fraction`.

    Raises:
      ValueError: an unknown option, a clip that is not positive, an array that the batch lacks, shapes that differ.

    Example:
      >>> ids, one = jnp.array([[1, 1]]), jnp.array([[0]])
      >>> zero, mask = jnp.zeros((1, 2)), jnp.array([[1.0, 1.0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, mask, one, one, one, values=zero, returns=mask)
      >>> loss, metrics = value_loss(jnp.array([[0.1, 0.5]]), batch, clip=0.2)
      >>> round(float(loss), 4), float(metrics["clip_fraction"].value)
      (0.3625, 0.5)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (without the clip); the clip: OpenAI baselines' PPO2.
    """
    check_denominators(aggregation, aggregation_norm)
    check_like_batch("values", values, batch)
    _check(batch, clip, clip_fraction, metric_aggregation)

    def per_shard(
        axes: ShardAxes, values: jax.Array, batch: RolloutBatch, normalizer: Normalizer | None
    ) -> tuple[jax.Array, Metrics]:
        mask = batch.loss_mask
        select = lambda x: jnp.where(mask > 0, x.astype(jnp.float32), 0)  # noqa: E731
        v, goal = select(values), lax.stop_gradient(select(batch.returns))
        error = (v - goal) ** 2
        moved = None
        if clip is not None:
            old = lax.stop_gradient(select(batch.values))
            clipped_error = (jnp.clip(v, old - clip, old + clip) - goal) ** 2  # exactly v inside, so never worse there
            moved = clipped_error > error if clip_fraction == "worse" else jnp.abs(v - old) > clip
            error = jnp.maximum(error, clipped_error)
        loss, metric, weights = aggregate(axes, factor * error, batch, normalizer, aggregation, aggregation_norm)
        found: Metrics = {"loss": metric}
        if moved is not None:
            by_token = metric_aggregation == "token_mean"
            found["clip_fraction"] = reduce_metric(
                axes, moved, mask if by_token else weights, "mean" if by_token else "sum"
            )
        found["value_mean"] = reduce_metric(axes, v, mask, "mean")
        found["value_error"] = reduce_metric(axes, jnp.abs(v - goal), mask, "mean")
        return loss, found

    args = {"values": values, "batch": batch, "normalizer": normalizer}
    return shard_call("value_loss", per_shard, parallel, args, lambda p: specs(p, batch, normalizer))


def _check(batch: RolloutBatch, clip: float | None, clip_fraction: str, metric_aggregation: str) -> None:
    if batch.returns is None:
        raise ValueError("batch.returns: got None, expected f32[R, T], the critic's targets (see advantages.gae)")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: got {clip}, expected a positive number, or None")
    if clip is not None and batch.values is None:
        raise ValueError(f"batch.values: got None, expected f32[R, T], the old values that clip={clip} is about")
    if clip_fraction not in ("worse", "outside"):
        raise ValueError(f"clip_fraction: got {clip_fraction!r}, expected 'worse' or 'outside'")
    if metric_aggregation not in ("token_mean", "loss"):
        raise ValueError(f"metric_aggregation: got {metric_aggregation!r}, expected 'token_mean' or 'loss'")
