"""The critic's loss, in the conventions of the published systems."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.base.arrays import (
    Aggregation,
    Coefficient,
    MetricAggregation,
    check_array,
    check_field,
    needed,
)
from jaxppo.base.metrics import Terms, means
from jaxppo.base.pytree import PyTree
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.token_loss import Asks, Losses, Reads, TokenLoss, WeighedBatch
from jaxppo.policy_losses.base import choice, number
from jaxppo.sharding import Segments

ClipFraction = Literal["worse", "outside"]
Values = Float[Array, "R T"]


@dataclasses.dataclass(frozen=True)
class Value(TokenLoss[Values]):
    """Squared error to the returns, clipped about the old values: l_t = factor * max((v - G)^2,
    (v_clip - G)^2).

    v_clip = clip(v, old - clip, old + clip). `loss_from_stats` takes the critic's current values,
    `[R, T]`, as statistics. The batch needs `returns` and, with a clip, `values`: the critic's at
    the start of the step. The defaults are PPO2's; verl 0.9.1 has clip=0.5, slime at 624b824a
    factor=1 and clip_fraction="outside".

    The metrics are `loss` (adds up over micro-batches), `value_mean`, `value_error` (the mean of |v
    - G|), with a clip `clip_fraction`, and `broken_rules` (see `policy_loss`).

    Args:
      clip: the largest useful change of a value from its old one; None for the plain squared error.
      factor: multiplies the squared error.
      huber_delta: an error e beyond it counts as delta (2 |e| - delta) in place of e^2, so that its
        gradient stops growing; only AReaL ships it (10 there). None for squared errors.
      clip_fraction: this metric counts tokens whose clipped error is the "worse" one, or that moved
        "outside" the clip.
      aggregation, aggregation_norm: the denominators, see `token_weights`.
      metric_aggregation: `clip_fraction` is a "token_mean", or reduced as the "loss" is.

    Raises:
      ValueError: an unknown option, a clip or huber_delta that is not positive.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, values=[0.0, 0.0], returns=[1.0, 1.0])
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> loss, metrics = loss_from_stats(jnp.array([[0.1, 0.5, 0.0]]), batch, Value(clip=0.2))
      >>> round(float(loss), 4), float(metrics["clip_fraction"].value)
      (0.3625, 0.5)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (without the clip); the clip: OpenAI
    baselines' PPO2; Huber 1964, https://doi.org/10.1214/aoms/1177703732
    """

    of_head: ClassVar[bool] = False
    asks = Asks()
    clip: Coefficient | None = 0.2
    factor: Coefficient = number(0.5)
    huber_delta: Coefficient | None = number(None, above=0)
    clip_fraction: ClipFraction = choice("worse", ClipFraction)
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None
    metric_aggregation: MetricAggregation = choice("token_mean", MetricAggregation)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None:
            check_field(self, "clip", above=0)

    def check(self, batch: RolloutBatch) -> None:
        needed("batch.returns", batch.returns, "f32[R, T] (see advantages.gae)")
        if self.clip is not None:
            needed("batch.values", batch.values, "f32[R, T] for a clip (see advantages.gae)")

    def check_stats(self, stats: PyTree, batch: RolloutBatch) -> None:
        check_array("values", stats, batch.loss_mask.shape, "the batch's [R, T]")

    def reads(self, stats: Values | None, batch: RolloutBatch, segments: Segments) -> Reads:
        reads: dict[str, Array | None] = {"new_values": stats, "returns": batch.returns}
        if self.clip is not None:
            reads["values"] = batch.values
        return reads

    def terms(
        self, stats: Values, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        return {"value": self.factor * functools.reduce(jnp.maximum, self._errors(stats, batch))}

    def metrics(self, stats: Values, weighed: WeighedBatch, constants: PyTree) -> Terms:
        batch = weighed.batch
        mask = batch.loss_mask
        terms = means({"value_mean": stats, "value_error": jnp.abs(stats - batch.returns)}, mask)
        if self.clip is None:
            return terms
        if self.clip_fraction == "worse":
            plain, clipped = self._errors(stats, batch)
            moved = clipped > plain
        else:
            moved = jnp.abs(stats - batch.values) > self.clip
        if self.metric_aggregation == "token_mean":
            return terms | {"clip_fraction": (moved, mask, "mean")}
        return terms | {"clip_fraction": (moved, weighed.weights, "sum")}

    def _errors(self, v: Values, batch: RolloutBatch) -> list[Values]:
        """The squares of the error v - G, and with a clip of that of the clipped values; tangents
        beyond `huber_delta`.

        Within the clip the second is exactly the first, so that it is never worse there.
        """
        values = [v]
        if self.clip is not None:
            values.append(jnp.clip(v, batch.values - self.clip, batch.values + self.clip))
        errors = [x - batch.returns for x in values]
        if self.huber_delta is None:
            return [error**2 for error in errors]
        inside = [jnp.clip(error, -self.huber_delta, self.huber_delta) for error in errors]
        return [x * (2 * error - x) for x, error in zip(inside, errors, strict=True)]
