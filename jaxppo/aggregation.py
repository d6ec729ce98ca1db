"""From per-token losses to one number: the published denominators, taken once over the whole step."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo._sharding import ParallelMesh, Segments, ShardAxes, shard_call, vary
from jaxppo.batch import RolloutBatch
from jaxppo.off_policy import OffPolicyConfig, weight_sums

AGGREGATIONS = (
    "token_mean",
    "token_sum",
    "sequence_mean_token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum_norm",
    "rollout_mean",
)


_part_of_a_step: contextvars.ContextVar[bool] = contextvars.ContextVar("part_of_a_step", default=False)


@contextlib.contextmanager
def part_of_a_step() -> Iterator[None]:
    """While tracing inside, a batch is a part of a step: its own denominators are refused."""
    token = _part_of_a_step.set(True)
    try:
        yield
    finally:
        _part_of_a_step.reset(token)


def check_aggregation(what: str, aggregation: str) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"{what}: got {aggregation!r}, expected one of {', '.join(AGGREGATIONS)}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normalizer:
    """The denominators of a whole optimiser step, so that its micro-batches add up to exactly the full batch.

    Of a batch of stacked micro-batches `[K, R, T]` every field has a leading K too: `lax.scan` over (batch,
    normalizer) hands each micro-batch its own part.

    Args:
      tokens: `f32[]`, the sum of the loss mask.
      sequences: `f32[]`, how many sequences ("rollout_mean": rollouts) have a loss token.
      denominators: `f32[R, S]`, the loss tokens of each sequence ("rollout_mean": of all samples of its rollout).
      weight_mean: `f32[]`, the mean importance weight, for `OffPolicyConfig(batch_normalize=True)`; else None.

    Example:
      >>> ids, one = jnp.array([[1, 1, 2, 0]]), jnp.array([[0, 1]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.array([[1.0, 1.0, 1.0, 0.0]]), one, one, one)
      >>> normalizer = Normalizer.from_batches(batch, "token_mean")
      >>> float(normalizer.tokens), float(normalizer.sequences), normalizer.denominators.tolist()
      (3.0, 2.0, [[2.0, 1.0]])
    """

    tokens: Float[Array, ""]
    sequences: Float[Array, ""]
    denominators: Float[Array, "R S"]
    weight_mean: Float[Array, ""] | None = None

    @classmethod
    def from_batches(
        cls,
        micro_batches: RolloutBatch,
        aggregation: str,
        *,
        off_policy: OffPolicyConfig | None = None,
        parallel: ParallelMesh | ShardAxes | None = None,
    ) -> Normalizer:
        """The denominators of a step.

        Args:
          micro_batches: a batch, or the step's micro-batches stacked: `[K, R, T]`.
          aggregation: that of the loss, see `token_weights`.
          off_policy: that of the loss, where it normalises importance weights over the step.
          parallel: the mesh.

        Returns:
          A `Normalizer` for the batch, or one for each micro-batch, stacked.

        Raises:
          ValueError: an unknown aggregation, log-probs that `off_policy` needs and the batch lacks.
        """
        check_aggregation("aggregation", aggregation)
        stacked = micro_batches.loss_mask.ndim == 3
        names = ["loss_mask", "segment_ids", "rollout_ids"]
        if off_policy is not None and off_policy.batch_normalize:
            names += ["old_log_probs", "rollout_log_probs"]
        args = {name: getattr(micro_batches, name) for name in names}
        for name, array in args.items():
            if array is None:
                raise ValueError(f"micro_batches.{name}: got None, expected f32[R, T] for off_policy.batch_normalize")

        def per_shard(axes: ShardAxes, *arrays: jax.Array) -> Normalizer:
            mask, segment_ids, rollout_ids, *log_probs = (x.reshape(-1, x.shape[-1]) for x in arrays)
            normalizer = normalize(axes, mask, segment_ids, rollout_ids, aggregation)
            if off_policy is not None and log_probs:
                segments = Segments(segment_ids, rollout_ids.shape[1], axes)
                weight_mean = mean_weight(log_probs[0], log_probs[1], mask, segments, off_policy)
                normalizer = dataclasses.replace(normalizer, weight_mean=weight_mean)
            if not stacked:
                return normalizer
            denominators = normalizer.denominators.reshape(arrays[2].shape)
            repeat = lambda x: jnp.broadcast_to(x, denominators.shape[:1])  # noqa: E731
            scalars = dataclasses.replace(normalizer, denominators=normalizer.tokens)
            return dataclasses.replace(jax.tree.map(repeat, scalars), denominators=denominators)

        def specs(parallel: ParallelMesh) -> tuple[list[Any], Any]:
            of = micro_batches.specs(parallel)
            return [getattr(of, name) for name in names], Normalizer.specs(parallel, stacked)

        return shard_call("Normalizer.from_batches", per_shard, parallel, args, specs)

    @staticmethod
    def specs(parallel: ParallelMesh, stacked: bool = False) -> Normalizer:
        """The PartitionSpecs of its fields, for `shard_call`."""
        rows = P(None, *parallel.rows_spec) if stacked else parallel.rows_spec
        return Normalizer(P(), P(), rows, P())  # type: ignore[arg-type]


def mean_weight(
    old_log_probs: Float[Array, "R T"],
    rollout_log_probs: Float[Array, "R T"],
    loss_mask: Float[Array, "R T"],
    segments: Segments,
    off_policy: OffPolicyConfig,
) -> Float[Array, ""]:
    """Per-shard: the mean importance weight of all data and context shards."""
    total, count = weight_sums(old_log_probs, rollout_log_probs, loss_mask, segments, off_policy)
    return total / jnp.maximum(count, 1)


def normalize(
    axes: ShardAxes,
    loss_mask: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    rollout_ids: Int[Array, "R S"],
    aggregation: str,
) -> Normalizer:
    """The per-shard computation of a `Normalizer`."""
    if _part_of_a_step.get() and aggregation != "token_sum":
        raise ValueError(
            f"normalizer: got None inside accumulate_gradients, expected the step's, for aggregation={aggregation!r}: "
            "Normalizer.from_batches(micro_batches, aggregation), as a part of micro_batches"
        )
    mask = lax.stop_gradient(loss_mask.astype(jnp.float32))
    counts = Segments(segment_ids, rollout_ids.shape[1], axes).sum(mask)
    tokens = axes.psum(counts.sum(), axes.data)
    if aggregation != "rollout_mean":
        return Normalizer(tokens, axes.psum((counts > 0).sum(dtype=jnp.float32), axes.data), counts)
    everyone, owned = rollout_ids.reshape(-1), counts.reshape(-1)
    if axes.data:
        everyone, owned = (lax.all_gather(x, axes.data, tiled=True, to="invarying") for x in (everyone, owned))
    unique, of = jnp.unique(everyone, return_inverse=True, size=everyone.size, fill_value=-1)
    totals = jnp.zeros_like(owned).at[of].add(jnp.where(everyone >= 0, owned, 0))
    place = jnp.searchsorted(unique, rollout_ids.reshape(-1))
    denominators = totals[place].reshape(counts.shape)
    unnamed = (rollout_ids < 0) & (counts > 0)  # a NaN loss rather than a plausible one
    return Normalizer(tokens, (totals > 0).sum(dtype=jnp.float32), jnp.where(unnamed, jnp.nan, denominators))


def token_weights(
    loss_mask: Float[Array, "R T"],
    segments: Segments,
    normalizer: Normalizer,
    aggregation: str,
    norm: float = 1.0,
) -> Float[Array, "R T"]:
    """What each token's loss counts for: loss = sum over all tokens of weight * token loss.

    With m the loss mask, N its sum, n_s its sum over a sequence, B the number of sequences with n_s > 0:

        token_mean                     m / N
        token_sum                      m
        sequence_mean_token_sum        m / B
        sequence_mean_token_mean       m / (n_s B)
        sequence_mean_token_sum_norm   m / (norm B)
        rollout_mean                   m / (n_r B_r), n_r over all samples of a rollout, B_r rollouts

    Args:
      loss_mask: `f32[R, T]`.
      segments: of the rows.
      normalizer: N, B, n of the whole step.
      aggregation: one of the above.
      norm: a constant length, for sequence_mean_token_sum_norm.

    Returns:
      `f32[R, T]`, 0 where the mask is 0; all 0 where the step has no loss token.
    """
    check_aggregation("aggregation", aggregation)
    mask = lax.stop_gradient(loss_mask.astype(jnp.float32))
    some = lambda count: jnp.where(count == 0, 1, count)  # noqa: E731  of nothing, 0 / 1
    if aggregation == "token_sum":
        return mask
    if aggregation == "token_mean":
        return mask / some(normalizer.tokens)
    if aggregation == "sequence_mean_token_sum":
        return mask / some(normalizer.sequences)
    if aggregation == "sequence_mean_token_sum_norm":
        return mask / (some(normalizer.sequences) * norm)
    return mask * segments.spread(1 / (some(normalizer.denominators) * some(normalizer.sequences)))


def weighted_sum(axes: ShardAxes, losses: Float[Array, "R T"], weights: Float[Array, "R T"]) -> Float[Array, ""]:
    """Per-shard: the loss, sum of weight * loss over all data and context shards; NaN where the weight is 0 is fine."""
    return axes.psum(vary((jnp.where(weights > 0, losses, 0) * weights).sum(), axes.tokens), axes.tokens)
