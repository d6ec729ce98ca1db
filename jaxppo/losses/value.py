"""The critic's loss, in the conventions of the published systems."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo._arrays import (
    Aggregation,
    Coefficient,
    MetricAggregation,
    check_aggregation,
    check_array,
    check_choice,
    check_field,
    masked,
    needed,
)
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.losses.token_loss import Constants, Reads, Step, TokenLoss, loss_of_stats
from jaxppo.metrics import Metrics, Terms, means
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes
from jaxppo.validation import checked

ClipFraction = Literal["worse", "outside"]


def value_loss(
    values: Float[Array, "R T"],
    batch: RolloutBatch,
    *,
    clip: Coefficient | None = 0.2,
    factor: Coefficient = 0.5,
    huber_delta: Coefficient | None = None,
    clip_fraction: ClipFraction = "worse",
    aggregation: Aggregation = "token_mean",
    aggregation_norm: float | None = None,
    metric_aggregation: MetricAggregation = "token_mean",
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Squared error to the returns, clipped about the old values: l_t = factor * max((v - G)^2, (v_clip - G)^2).

    v_clip = clip(v, old - clip, old + clip). Differentiable in `values`. The defaults are verl's; slime's are factor=1
    and clip_fraction="outside".

    With `huber_delta` d, an error e = v - G beyond d counts as d (2 |e| - d) in place of e^2, so that its gradient
    stops growing.

    Args:
      values: `[R, T]`, the critic's current values.
      batch: `[R, T]`; needs `returns` and, with a clip, `values`: the critic's at the start of the step.
      clip: the largest useful change of a value from its old one; None for the plain squared error.
      factor: multiplies the squared error.
      huber_delta: the error beyond which the loss is linear; only AReaL ships it (10 there). None for squared errors.
      clip_fraction: the metric `clip_fraction` counts tokens whose clipped error is the "worse" one, or whose value
        moved "outside" the clip.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      metric_aggregation: `clip_fraction` is a "token_mean", or reduced as the "loss" is.
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches), `value_mean`, `value_error` (the mean
      of |v - G|), with a clip `clip_fraction`, and `broken_rules` (see `policy_loss`).

    Raises:
      ValueError: an unknown option, a clip or huber_delta that is not positive, an array that the batch lacks,
        shapes that differ.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, values=[0.0, 0.0], returns=[1.0, 1.0])
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> loss, metrics = value_loss(jnp.array([[0.1, 0.5, 0.0]]), batch, clip=0.2)
      >>> round(float(loss), 4), float(metrics["clip_fraction"].value)
      (0.3625, 0.5)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (without the clip); the clip: OpenAI baselines' PPO2;
    Huber 1964, https://doi.org/10.1214/aoms/1177703732
    """
    batch = checked(batch)
    options = (clip_fraction, aggregation, aggregation_norm, metric_aggregation)
    loss = ValueTokenLoss(clip, factor, huber_delta, *options)
    check_array("values", values, batch.loss_mask.shape, "the batch's [R, T]")
    return loss_of_stats("value_loss", loss, values, batch, parallel, normalizer)


@dataclasses.dataclass(frozen=True)
class ValueTokenLoss(TokenLoss):
    """The critic's squared error at a token."""

    clip: Coefficient | None
    factor: Coefficient
    huber_delta: Coefficient | None
    clip_fraction: ClipFraction
    aggregation: Aggregation
    aggregation_norm: float | None
    metric_aggregation: MetricAggregation

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_field(self, "clip", above=0)
        check_field(self, "factor")
        if self.huber_delta is not None:
            check_field(self, "huber_delta", above=0)
        check_choice("clip_fraction", self.clip_fraction, ClipFraction)
        check_choice("metric_aggregation", self.metric_aggregation, MetricAggregation)
        check_aggregation(self)

    @property
    def token_local(self) -> bool:
        return True

    def reads(self, stats: Float[Array, "R T"] | None, batch: RolloutBatch, given: Any, segments: Segments) -> Reads:
        old = {} if self.clip is None else {"values": batch.values}
        return {"new_values": stats, "returns": batch.returns, **old}

    def per_token(
        self, stats: Float[Array, "R T"], batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        v = masked(stats, batch.loss_mask)
        error = self._error(v, batch)
        if self.clip is not None:
            error = jnp.maximum(error, self._error(self._clipped(v, batch, self.clip), batch))
        return self.factor * error

    def terms(self, stats: Float[Array, "R T"], step: Step, constants: Constants) -> Terms:
        batch, mask = step.batch, step.batch.loss_mask
        v = masked(stats, mask)
        terms = means({"value_mean": v, "value_error": jnp.abs(v - _returns(batch))}, mask)
        if self.clip is None:
            return terms
        if self.clip_fraction == "worse":
            moved = self._error(self._clipped(v, batch, self.clip), batch) > self._error(v, batch)
        else:
            moved = jnp.abs(v - _old_values(batch)) > self.clip
        by_token = self.metric_aggregation == "token_mean"
        return terms | {"clip_fraction": (moved, mask, "mean") if by_token else (moved, step.weights, "sum")}

    def _error(self, v: Float[Array, "R T"], batch: RolloutBatch) -> Float[Array, "R T"]:
        """The square of the error v - G; beyond `huber_delta`, its tangent."""
        error = v - _returns(batch)
        if self.huber_delta is None:
            return error**2
        inside = jnp.clip(error, -self.huber_delta, self.huber_delta)
        return inside * (2 * error - inside)

    def _clipped(self, v: Float[Array, "R T"], batch: RolloutBatch, clip: Coefficient) -> Float[Array, "R T"]:
        """The values within the clip about the old ones; exactly v inside, so that the error is never worse there."""
        old = _old_values(batch)
        return jnp.clip(v, old - clip, old + clip)


def _returns(batch: RolloutBatch) -> Float[Array, "R T"]:
    return masked(needed("batch.returns", batch.returns, "f32[R, T] (see advantages.gae)"), batch.loss_mask)


def _old_values(batch: RolloutBatch) -> Float[Array, "R T"]:
    return masked(needed("batch.values", batch.values, "f32[R, T] for a clip (see advantages.gae)"), batch.loss_mask)
