"""`policy_loss`: log-probs, a batch and a config to a scalar loss and its metrics, on any mesh.

The pieces are per-shard functions that others reuse: `token_weights` says what a token counts for, `correct` looks at
the sampler, `token_losses` is the loss of each token, and `reduce_losses` adds up. For a token-local loss (see
`is_token_local`) `token_losses` may be called on one block of tokens at a time, segments unused.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.aggregation import Normalizer, normalize, token_weights
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig, is_zero
from jaxppo.kl import kl_divergence, log_ratio
from jaxppo.log_probs.stats import TokenStats
from jaxppo.metrics import Composite, Metric, Metrics, reduce_metric
from jaxppo.policy_losses import find_policy_loss
from sharding import ParallelMesh, Segments, ShardAxes, shard_call, vary

_NEEDS = {"trainer": "old_log_probs", "sampler": "rollout_log_probs"}


class Correction(NamedTuple):
    """What the off-policy correction says of each token: constants of differentiation."""

    weights: Float[Array, "R T"]
    kept: Float[Array, "R T"]
    metrics: dict[str, Any]


def policy_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a batch: sum over tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy).

    Differentiable in `stats` alone: the batch and the coefficients are constants. Positions with loss mask 0 may hold
    anything, NaN included.

    Args:
      stats: `f32[R, T]` log-probs of the targets, and entropies; see `log_probs_from_hidden`.
      batch: `[R, T]`; needs `advantages`, and the log-probs that `config` compares with.
      config: which loss.
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches; the batch's own
        by default.

    Returns:
      The scalar f32 loss, and metrics by name: `metrics.values` finishes them. `loss` and `pg_loss` add up over
      micro-batches; per-token ones are as `config.metric_aggregation` says.

    Raises:
      ValueError, TypeError: an array that the config needs and the batch lacks, shapes that differ.

    Example:
      >>> ids, one = jnp.array([[1, 1, 0]]), jnp.array([[0]])
      >>> zeros, mask = jnp.zeros((1, 3)), jnp.array([[1.0, 1.0, 0.0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, mask, one, one, one, advantages=mask, old_log_probs=zeros)
      >>> loss, metrics = policy_loss(TokenStats(zeros), batch, PolicyLossConfig())
      >>> float(loss), float(metrics["ratio_max"].value)
      (-1.0, 1.0)
    """
    check_inputs(stats, batch, config)
    coefs = {n: getattr(config, n) for n in ("entropy_coef", "kl_coef") if not is_zero(getattr(config, n))}

    def per_shard(
        axes: ShardAxes, stats: TokenStats, batch: RolloutBatch, normalizer: Normalizer | None, coefs: dict[str, Any]
    ) -> tuple[jax.Array, Metrics]:
        local = dataclasses.replace(config, **lax.stop_gradient(coefs))
        segments = batch.segments(axes)
        weights = step_weights(axes, batch, local, segments, normalizer)
        correction = correct(stats, batch, local, segments)
        losses, values = token_losses(stats, batch, local, segments, correction)
        return reduce_losses(axes, losses, values, weights, batch, local, correction)

    def specs(parallel: ParallelMesh) -> tuple[list[Any], Any]:
        of_normalizer = None if normalizer is None else Normalizer.specs(parallel)
        return [parallel.tokens_spec, batch.specs(parallel), of_normalizer, P()], P()

    args = {"stats": stats, "batch": batch, "normalizer": normalizer, "coefs": coefs}
    return shard_call("policy_loss", per_shard, parallel, args, specs)


def check_inputs(stats: TokenStats, batch: RolloutBatch, config: PolicyLossConfig) -> None:
    """Raises ValueError where the config asks for what stats or batch lack, or where shapes differ."""
    if not isinstance(stats, TokenStats):
        raise TypeError(f"stats: got {type(stats).__name__}, expected TokenStats")
    shape = batch.loss_mask.shape
    if len(shape) != 2:
        raise ValueError(f"batch: got a loss mask of shape {shape}, expected [R, T], one micro-batch")
    if stats.log_probs.shape != shape:
        raise ValueError(f"stats: got log-probs of shape {stats.log_probs.shape}, expected the batch's, {shape}")
    needed = {"advantages": "every policy loss"}
    if config.old_log_probs in _NEEDS:
        needed[_NEEDS[config.old_log_probs]] = f"old_log_probs={config.old_log_probs!r}"
    if not is_zero(config.kl_coef):
        needed["ref_log_probs"] = f"kl_coef={config.kl_coef}"
    if config.off_policy is not None:
        needed["rollout_log_probs"] = "off_policy"
    for name, why in needed.items():
        if getattr(batch, name) is None:
            raise ValueError(f"batch.{name}: got None, expected f32[R, T] for {why}")
    if stats.entropy is None and not is_zero(config.entropy_coef):
        raise ValueError(f"stats.entropy: got None, expected f32[R, T] for entropy_coef={config.entropy_coef}")


def is_token_local(batch: RolloutBatch, config: PolicyLossConfig) -> bool:
    """Whether a token's loss depends on its own log-prob and entropy only, all else given by the batch."""
    return find_policy_loss(config.loss).token_local and config.off_policy is None


def step_weights(
    axes: ShardAxes, batch: RolloutBatch, config: PolicyLossConfig, segments: Segments, normalizer: Normalizer | None
) -> Float[Array, "R T"]:
    """`token_weights` of the batch in its step, or on its own."""
    if normalizer is None:
        normalizer = normalize(axes, batch.loss_mask, batch.segment_ids, batch.rollout_ids, config.aggregation)
    return token_weights(batch.loss_mask, segments, normalizer, config.aggregation, config.aggregation_norm or 1.0)


def _old_log_probs(log_probs: jax.Array, batch: RolloutBatch, config: PolicyLossConfig) -> Any:
    name = _NEEDS.get(config.old_log_probs)
    return lax.stop_gradient(log_probs if name is None else getattr(batch, name))


def correct(stats: TokenStats, batch: RolloutBatch, config: PolicyLossConfig, segments: Segments) -> Correction | None:
    """The off-policy correction of the batch; None without one."""
    if config.off_policy is None:
        return None
    raise NotImplementedError


def token_losses(
    stats: TokenStats,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    segments: Segments,
    correction: Correction | None = None,
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """The loss of each token before weighting, and the per-token values that metrics are made of.

    Args:
      stats: log-probs and entropies.
      batch: the arrays of the same positions.
      config: which loss.
      segments: of the rows; token-local losses do not look at it.
      correction: of `correct`.

    Returns:
      `f32[R, T]`, 0 outside the loss mask; and constants of differentiation by metric name.
    """
    mask = batch.loss_mask
    select = lambda x: jnp.where(mask > 0, x.astype(jnp.float32), 0)  # noqa: E731
    log_probs = select(stats.log_probs)
    old = select(_old_log_probs(stats.log_probs, batch, config))
    advantages = lax.stop_gradient(select(batch.advantages))
    loss = find_policy_loss(config.loss)
    losses, values = loss.fn(log_probs, old, advantages, mask=mask, segments=segments, config=config)
    if correction is not None:
        losses = jnp.where(correction.kept > 0, losses * correction.weights, 0)
    ratio = jnp.exp(log_ratio(log_probs, old))
    values = {**values, "pg_loss": losses, "ppo_kl": -log_ratio(log_probs, old), "ratio": ratio}
    if stats.entropy is not None:
        entropy = values["entropy"] = select(stats.entropy)
        if not is_zero(config.entropy_coef):
            losses = losses - config.entropy_coef * entropy
    if batch.ref_log_probs is not None:
        importance = ratio if config.kl_importance else None
        kl = values["kl"] = kl_divergence(log_probs, select(batch.ref_log_probs), config.kl_estimator, importance)
        if not is_zero(config.kl_coef):
            losses = losses + config.kl_coef * kl
    if batch.rollout_log_probs is not None:
        values["sampler_log_prob_abs_diff"] = jnp.abs(old - select(batch.rollout_log_probs))
    return select(losses), lax.stop_gradient(values)


def reduce_losses(
    axes: ShardAxes,
    losses: Float[Array, "R T"],
    values: dict[str, Float[Array, "R T"]],
    weights: Float[Array, "R T"],
    batch: RolloutBatch,
    config: PolicyLossConfig,
    correction: Correction | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss and the metrics from per-token losses, values and weights, summed over data and context."""
    total = axes.psum(vary(jnp.where(weights > 0, losses * weights, 0).sum(), axes.tokens), axes.tokens)
    mask = batch.loss_mask
    values = dict(values)
    ratio, pg_loss = values.pop("ratio"), values.pop("pg_loss")
    ratio_mean = reduce_metric(axes, ratio, mask, "mean")
    found: Metrics = {
        "loss": Metric(lax.stop_gradient(total), jnp.float32(1), "sum"),
        "pg_loss": reduce_metric(axes, pg_loss, weights, "sum"),
        "ratio_mean": ratio_mean,
        "ratio_min": reduce_metric(axes, ratio, mask, "min"),
        "ratio_max": reduce_metric(axes, ratio, mask, "max"),
    }
    square = reduce_metric(axes, ratio**2, mask, "mean")
    found["effective_sample_size"] = Composite({"mean": ratio_mean, "square": square}, _effective_sample_size)
    by_token = config.metric_aggregation == "token_mean"
    for name, value in values.items():
        found[name] = (
            reduce_metric(axes, value, mask, "mean") if by_token else reduce_metric(axes, value, weights, "sum")
        )
    return total, found


def _effective_sample_size(mean: jax.Array, square: jax.Array) -> jax.Array:
    """(sum r)^2 / (N sum r^2), a share of the tokens: 1 where all ratios are equal, 0 where there is no token."""
    return mean**2 / jnp.where(square == 0, 1, square)
