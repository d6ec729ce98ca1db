"""Supervised fine-tuning: the mean negative log-likelihood of the targets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo._sharding import ParallelMesh, ShardAxes, shard_call
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.log_probs.stats import TokenStats
from jaxppo.metrics import Metrics, reduce_metric
from jaxppo.token_losses import aggregate, check_denominators, check_like_batch, specs


def sft_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    aggregation: str = "token_mean",
    aggregation_norm: float | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The negative log-likelihood of the targets: loss = sum over tokens of weight_t * l_t.

        l_t = (1 - label_smoothing) * -log_prob_t + label_smoothing * (log_z_t - mean_logit_t) + z_loss * log_z_t^2

    log_z is the log-sum-exp of the logits, and log_z - mean_logit the mean of -log p over the vocabulary.

    Differentiable in `stats`. Positions with loss mask 0 may hold anything, NaN included.

    Args:
      stats: `f32[R, T]` log-probs of the targets, see `log_probs_from_hidden`; with `moments=True` for the next two.
      batch: `[R, T]`; its loss mask and its sequences count.
      label_smoothing: the share of a uniform target, in [0, 1).
      z_loss: how much log_z is drawn to 0.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches), `nll` (the mean of -log_prob over
      tokens, nats) and, where stats has them, `entropy`, `log_z` and
      `accuracy` (how often the target is the likeliest token).

    Raises:
      TypeError: stats that are no `TokenStats`.
      ValueError: an unknown aggregation, shapes that differ, options out of range, moments that stats lacks.

    Example:
      >>> ids, one = jnp.array([[1, 1, 0]]), jnp.array([[0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.array([[1.0, 1.0, 0.0]]), one, one, one)
      >>> loss, metrics = sft_loss(TokenStats(jnp.array([[-1.0, -2.0, jnp.nan]])), batch)
      >>> float(loss), float(metrics["nll"].value)
      (1.5, 1.5)

    Label smoothing: Szegedy et al. 2015, https://arxiv.org/abs/1512.00567; z-loss: Chowdhery et al. 2022, PaLM,
    https://arxiv.org/abs/2204.02311
    """
    _check(stats, label_smoothing, z_loss)
    check_denominators(aggregation, aggregation_norm)
    check_like_batch("stats.log_probs", stats.log_probs, batch)

    def per_shard(
        axes: ShardAxes, stats: TokenStats, batch: RolloutBatch, normalizer: Normalizer | None
    ) -> tuple[jax.Array, Metrics]:
        mask = batch.loss_mask
        select = lambda x: jnp.where(mask > 0, x.astype(jnp.float32), 0)  # noqa: E731
        losses = nll = -select(stats.log_probs)
        if label_smoothing:
            uniform = select(stats.log_z) - select(stats.mean_logit)
            losses = (1 - label_smoothing) * nll + label_smoothing * uniform
        if z_loss:
            losses = losses + z_loss * select(stats.log_z) ** 2
        loss, metric, _ = aggregate(axes, losses, batch, normalizer, aggregation, aggregation_norm)
        found: Metrics = {"loss": metric, "nll": reduce_metric(axes, nll, mask, "mean")}
        for name in ("entropy", "log_z"):
            if getattr(stats, name) is not None:
                found[name] = reduce_metric(axes, getattr(stats, name), mask, "mean")
        if stats.max_log_prob is not None:
            correct = stats.log_probs == stats.max_log_prob
            found["accuracy"] = reduce_metric(axes, correct, mask, "mean")
        return loss, found

    args = {"stats": stats, "batch": batch, "normalizer": normalizer}
    return shard_call("sft_loss", per_shard, parallel, args, lambda p: specs(p, batch, normalizer))


def _check(stats: TokenStats, label_smoothing: float, z_loss: float) -> None:
    if not isinstance(stats, TokenStats):
        raise TypeError(f"stats: got {type(stats).__name__}, expected TokenStats")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: got {label_smoothing}, expected a number in [0, 1)")
    if z_loss < 0:
        raise ValueError(f"z_loss: got {z_loss}, expected a number >= 0")
    if (label_smoothing or z_loss) and stats.log_z is None:
        raise ValueError(
            f"stats.log_z: got None, expected f32[R, T] for label_smoothing={label_smoothing}, z_loss={z_loss}: pass "
            "moments=True to log_probs_from_hidden or log_probs_from_logits"
        )
