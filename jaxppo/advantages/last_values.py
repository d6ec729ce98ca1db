"""The critic's values after responses that were cut, from which returns go on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxppo.advantages.token_statistics import Parallel, check_segments, check_tokens
from jaxppo.base.stacked import of_rows
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, shift_left


def last_values(
    values: Float[Array, "*K R T"],
    batch: RolloutBatch,
    truncated: Bool[Array, "*K R S"],
    *,
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """V after the last token of each response that was cut at its length limit, for `gae(last_values=)`; 0 for others.

    The value at a position is of the state after the token that is read there, so it is the one at the last position of
    the sequence. A response that ended by itself has no state after it.

    Args:
      values: `f32[R, T]`, the critic's at all positions, those without loss too.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; only its sequences are read.
      truncated: `bool[R, S]`, which samples were cut. From flags in the order of `from_samples`:
        `flags[jnp.maximum(batch.sample_ids, 0)]`; where there is no sample it may hold anything.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32[R, S]`, without a gradient.

    Raises:
      TypeError, ValueError: shapes that differ; rows whose last position has a target, see `from_target_aligned`: the
        token after it is not among those that the critic has read.

    Example:
      >>> from jaxppo.advantages import last_values
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], 1), Sample([4, 5], 1)], row_length=5)
      >>> values = jnp.array([[0.0, 0.1, 0.2, 0.3, 0.4]])
      >>> last_values(values, batch, batch.sample_ids == 0).tolist() == [[values[0, 2], 0]]
      True
    """
    batch = check_tokens(batch, {"values": values})
    check_segments(batch, truncated=truncated)
    if batch.real_last_targets:
        raise ValueError(
            "batch: got rows whose last position has a target, expected rows with all tokens of their samples: the "
            "critic has not read the last one"
        )

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        of = batch.specs(p)
        return [of.loss_mask, of.sample_ids, of], of.sample_ids

    args = {"values": values, "truncated": truncated, "batch": batch}
    found: Array = shard_call("last_values", _per_shard, parallel, args, specs)
    return found


@of_rows
def _per_shard(axes: ShardAxes, values: jax.Array, truncated: jax.Array, batch: RolloutBatch) -> jax.Array:
    segments, ids = batch.segments(axes), batch.segment_ids
    goes_on = shift_left(jnp.ones(ids.shape, jnp.int32), axes, 1, 0, ids, batch.num_segments)
    last = (ids > 0) & (goes_on == 0)
    found = segments.sum(jnp.where(last, values.astype(jnp.float32), 0))
    return lax.stop_gradient(jnp.where(truncated & (batch.sample_ids >= 0), found, 0))
