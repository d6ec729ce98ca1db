"""`policy_loss`: log-probs, a batch and a config to a scalar loss and its metrics, on any mesh.

The pieces are per-shard functions that others reuse: `token_weights` says what a token counts for, `correct` looks at
the sampler, `token_losses` is the loss of each token, and `reduce_losses` adds up. For a token-local loss (see
`is_token_local`) `token_losses` may be called on one block of tokens at a time, segments unused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo._sharding import ParallelMesh, Segments, ShardAxes, shard_call
from jaxppo.aggregation import Normalizer, mean_weight, normalize, token_weights, weighted_sum
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig, is_zero
from jaxppo.kl import kl_divergence, log_ratio
from jaxppo.log_probs.stats import TokenStats
from jaxppo.metrics import Composite, Metric, Metrics, Term, reduce_metrics
from jaxppo.off_policy import correction as off_policy_correction
from jaxppo.policy_losses import find_policy_loss

_OLD = {"trainer": "old_log_probs", "sampler": "rollout_log_probs"}


class Correction(NamedTuple):
    """What the off-policy correction says of each token: constants of differentiation."""

    weights: Float[Array, "R T"]
    """0 on the tokens that it leaves out."""
    values: dict[str, Float[Array, "R T"]]


def policy_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    covariance: Float[Array, "R T"] | None = None,
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
      covariance: `f32[R, T]`, the `covariance_mask` of the whole step; for clip_cov and kl_cov.

    Returns:
      The scalar f32 loss, and metrics by name: `metrics.values` finishes them. By what they are normalised by:

      - the loss's own weights, adding up over micro-batches: `loss`, `pg_loss`;
      - loss tokens (or those weights, see `config.metric_aggregation`): `entropy`, `kl` (to the reference), `ppo_kl`
        (mean of old_log_prob - log_prob), `ratio_mean`, the loss's `clip_fraction`, `clip_fraction_lower` and the
        like, the correction's `tis`, `rejected_fraction` and the like, `sampler_log_prob_abs_diff`, `sampler_k3`;
      - nothing, being extremes over loss tokens: `ratio_min`, `ratio_max`;
      - loss tokens, as a share: `effective_sample_size`, (sum r)^2 / (N sum r^2).

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
    check_inputs(stats, batch, config, covariance)
    coefs = {n: getattr(config, n) for n in ("entropy_coef", "kl_coef") if not is_zero(getattr(config, n))}

    def per_shard(
        axes: ShardAxes,
        stats: TokenStats,
        batch: RolloutBatch,
        normalizer: Normalizer | None,
        covariance: jax.Array | None,
        coefs: dict[str, Any],
    ) -> tuple[jax.Array, Metrics]:
        local = dataclasses.replace(config, **lax.stop_gradient(coefs))
        segments = batch.segments(axes)
        normalizer = own_normalizer(batch, local, segments) if normalizer is None else normalizer
        weights = step_weights(batch, local, segments, normalizer)
        correction = correct(stats, batch, local, segments, normalizer)
        losses, values = token_losses(stats, batch, local, segments, correction, covariance)
        return reduce_losses(axes, losses, values, weights, batch, local)

    def specs(parallel: ParallelMesh) -> tuple[list[Any], Any]:
        of_normalizer = None if normalizer is None else Normalizer.specs(parallel)
        tokens = parallel.tokens_spec
        return [tokens, batch.specs(parallel), of_normalizer, None if covariance is None else tokens, P()], P()

    args = {"stats": stats, "batch": batch, "normalizer": normalizer, "covariance": covariance, "coefs": coefs}
    return shard_call("policy_loss", per_shard, parallel, args, specs)


def check_inputs(
    stats: TokenStats, batch: RolloutBatch, config: PolicyLossConfig, covariance: Float[Array, "R T"] | None
) -> None:
    """Raises ValueError where the config asks for what stats or batch lack, or where shapes differ."""
    if not isinstance(stats, TokenStats):
        raise TypeError(f"stats: got {type(stats).__name__}, expected TokenStats")
    shape = batch.loss_mask.shape
    if len(shape) != 2:
        raise ValueError(f"batch: got a loss mask of shape {shape}, expected [R, T], one micro-batch")
    check_batch(batch, config)
    for name, array in (("stats.log_probs", stats.log_probs), ("stats.entropy", stats.entropy)):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: got shape {array.shape}, expected the batch's, {shape}")
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name}: got {array.dtype}, expected a floating-point dtype such as float32")
    if stats.entropy is None and not is_zero(config.entropy_coef):
        raise ValueError(f"stats.entropy: got None, expected f32[R, T] for entropy_coef={config.entropy_coef}")
    check_covariance(covariance, config)


def check_covariance(covariance: Float[Array, "R T"] | None, config: PolicyLossConfig) -> None:
    """Raises ValueError where the loss needs the step's covariance mask and there is none, or the reverse."""
    if (find_policy_loss(config.loss).covariance is not None) != (covariance is not None):
        expected = "None" if covariance is not None else "the step's covariance_mask(stats, batch, config, key)"
        got = "None" if covariance is None else f"shape {covariance.shape}"
        raise ValueError(f"covariance: got {got}, expected {expected} with loss={config.loss!r}")


def check_batch(batch: RolloutBatch, config: PolicyLossConfig) -> None:
    """Raises ValueError where the config asks for an array that the batch lacks."""
    needed = {"advantages": "every policy loss"}
    if config.old_log_probs in _OLD:
        needed[_OLD[config.old_log_probs]] = f"old_log_probs={config.old_log_probs!r}"
    if not is_zero(config.kl_coef):
        needed["ref_log_probs"] = f"kl_coef={config.kl_coef}"
    if config.off_policy is not None and config.off_policy.needs_rollout_log_probs:
        needed["rollout_log_probs"] = f"off_policy={config.off_policy}"
    for name, why in needed.items():
        _given(batch, name, why)


def _given(batch: RolloutBatch, name: str, why: str) -> Float[Array, "R T"]:
    array = getattr(batch, name)
    if array is None:
        raise ValueError(f"batch.{name}: got None, expected f32[R, T] for {why}")
    if array.shape != batch.loss_mask.shape:
        raise ValueError(f"batch.{name}: got shape {array.shape}, expected the loss mask's, {batch.loss_mask.shape}")
    return array


def is_token_local(config: PolicyLossConfig) -> bool:
    """Whether a token's loss depends on its own log-prob and entropy only, all else given by the batch."""
    off = config.off_policy
    given = off is None or (off.trainer == "old" and config.old_log_probs != "current" and off.opsm_delta is None)
    return find_policy_loss(config.loss).token_local and given


def old_log_probs(log_probs: Float[Array, "R T"], batch: RolloutBatch, config: PolicyLossConfig) -> Float[Array, "R T"]:
    """What the ratio of the config is over; a constant of differentiation."""
    name = _OLD.get(config.old_log_probs)
    return lax.stop_gradient(log_probs if name is None else _given(batch, name, config.old_log_probs))


def own_normalizer(batch: RolloutBatch, config: PolicyLossConfig, segments: Segments) -> Normalizer:
    """Per-shard: the `Normalizer` of a batch that is a step of its own."""
    axes, mask, off_policy = segments.axes, batch.loss_mask, config.off_policy
    normalizer = normalize(axes, mask, batch.segment_ids, batch.rollout_ids, config.aggregation)
    if off_policy is None or not off_policy.batch_normalize:
        return normalizer
    old, rollout = (
        _given(batch, name, "off_policy.batch_normalize") for name in ("old_log_probs", "rollout_log_probs")
    )
    weight_mean = mean_weight(old, rollout, mask, segments, off_policy)
    return dataclasses.replace(normalizer, weight_mean=weight_mean)


def step_weights(
    batch: RolloutBatch, config: PolicyLossConfig, segments: Segments, normalizer: Normalizer
) -> Float[Array, "R T"]:
    """Per-shard: what the loss of each token counts for, see `token_weights`."""
    return token_weights(batch.loss_mask, segments, normalizer, config.aggregation, config.aggregation_norm or 1.0)


def correct(
    stats: TokenStats | None,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    segments: Segments,
    normalizer: Normalizer,
) -> Correction | None:
    """Per-shard: the off-policy correction, None without one. Where `is_token_local`, stats are not needed."""
    if config.off_policy is None:
        return None
    advantages = _given(batch, "advantages", "every policy loss")
    log_probs = jnp.zeros_like(advantages) if stats is None else stats.log_probs
    old = old_log_probs(log_probs, batch, config)
    weights, kept, values = off_policy_correction(
        log_probs,
        old,
        batch.rollout_log_probs,
        advantages,
        batch.loss_mask,
        segments,
        config.off_policy,
        normalizer.weight_mean,
    )
    if config.off_policy.opsm_fraction == "response" and "opsm_clipfrac" in values:
        values = values | {"opsm_clipfrac": values["opsm_clipfrac"] * _response_share(batch, segments)}
    return Correction(jnp.where(kept > 0, weights, 0), values)


def _response_share(batch: RolloutBatch, segments: Segments) -> Float[Array, "R T"]:
    """Each sequence's number of positions from its first loss token to its last, over that of its loss tokens."""
    mask, positions = batch.loss_mask, batch.positions.astype(jnp.float32)
    span = segments.max(positions, mask) + segments.max(-positions, mask) + 1
    count = segments.sum((mask > 0).astype(jnp.float32))
    return segments.spread(jnp.where(count > 0, span / jnp.maximum(count, 1), 0))


def token_losses(
    stats: TokenStats,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    segments: Segments,
    correction: Correction | None = None,
    covariance: Float[Array, "R T"] | None = None,
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """The loss of each token before weighting, and the per-token values that metrics are made of.

    Args:
      stats: log-probs and entropies.
      batch: the arrays of the same positions.
      config: which loss.
      segments: of the rows; token-local losses do not look at it.
      correction: of `correct`.
      covariance: see `policy_loss`.

    Returns:
      `f32[R, T]`, 0 outside the loss mask; and constants of differentiation by metric name.
    """
    mask = batch.loss_mask
    select = lambda x: jnp.where(mask > 0, x.astype(jnp.float32), 0)  # noqa: E731
    log_probs = select(stats.log_probs)
    old = select(old_log_probs(stats.log_probs, batch, config))
    advantages = lax.stop_gradient(select(batch.advantages))
    loss = find_policy_loss(config.loss)
    extra = {} if covariance is None else {"covariance": lax.stop_gradient(select(covariance))}
    losses, values = loss.fn(log_probs, old, advantages, mask=mask, segments=segments, config=config, **extra)
    if correction is not None:
        losses = losses * correction.weights
        values = values | correction.values
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
        rollout = select(batch.rollout_log_probs)
        trainer = old if config.old_log_probs == "trainer" else log_probs
        values["sampler_log_prob_abs_diff"] = jnp.abs(trainer - rollout)
        values["sampler_k3"] = kl_divergence(rollout, trainer, "k3")
    return select(losses), lax.stop_gradient(values)


def reduce_losses(
    axes: ShardAxes,
    losses: Float[Array, "R T"],
    values: dict[str, Float[Array, "R T"]],
    weights: Float[Array, "R T"],
    batch: RolloutBatch,
    config: PolicyLossConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss and the metrics from per-token losses, values and weights, summed over data and context."""
    total = weighted_sum(axes, losses, weights)
    mask = batch.loss_mask
    values = dict(values)
    ratio, pg_loss = values.pop("ratio"), values.pop("pg_loss")
    by_token = config.metric_aggregation == "token_mean"
    each: Callable[[jax.Array], Term] = lambda x: (x, mask, "mean") if by_token else (x, weights, "sum")  # noqa: E731
    terms = {name: each(value) for name, value in values.items()}
    terms |= {"pg_loss": (pg_loss, weights, "sum"), "ratio_mean": each(ratio)}
    terms |= {"ratio_min": (ratio, mask, "min"), "ratio_max": (ratio, mask, "max")}
    terms |= {"first": (ratio, mask, "mean"), "second": (ratio**2, mask, "mean")}
    found = reduce_metrics(axes, terms)
    moments = {name: found.pop(name) for name in ("first", "second")}
    loss = Metric(lax.stop_gradient(total), jnp.float32(1), "sum")
    return total, {**found, "loss": loss, "effective_sample_size": Composite(moments, _effective_sample_size)}


def _effective_sample_size(first: jax.Array, second: jax.Array) -> jax.Array:
    """(sum r)^2 / (N sum r^2), a share of the tokens: 1 where all ratios are equal, 0 where there is no token."""
    return first**2 / jnp.where(second == 0, 1, second)
