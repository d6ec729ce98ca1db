"""Advantages of rewards for the reasoning steps inside a response, compared by group: process supervision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.by_group import Parallel, Singletons, check_members, scale_of
from jaxppo.advantages.token_statistics import check_tokens
from jaxppo.base.arrays import Coefficient, as_number, check_choice, check_flag, masked, spec_of, unless_mask
from jaxppo.base.by_id import ById
from jaxppo.base.stacked import check_whole_step, of_rows
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.sharding import ParallelMesh, ShardAxes, scan_shard, shard_call


def process_grpo(
    rewards: Float[Array, "*K R T"],
    ends: Float[Array, "*K R T"],
    group_ids: Int[Array, "*K R S"],
    batch: RolloutBatch,
    *,
    among: Bool[Array, "*K R S"] | None = None,
    scale_by_std: bool = True,
    epsilon: Coefficient = 1e-6,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """GRPO with process supervision: rewards of reasoning steps, which are parts of a response.

        A_t = sum over the reasoning steps j that end at t or later of (r_j - mean_g) / (std_g + e)

    Mean and deviation (over n - 1) are taken over the rewards of all reasoning steps of all samples of the group,
    however many each sample has. A reasoning step that ends before t does not change the advantage at t. The number of
    reasoning steps is not rewarded: where each has reward 1, samples with one and with three all have advantage 0. The
    page "Choosing a loss" has returns that count it.

    Args:
      rewards: `f32[R, T]`, the reward of a reasoning step at its last token; anything elsewhere.
      ends: `[R, T]`, 1 at the last token of each reasoning step and 0 elsewhere; read only where the loss mask is 1.
      group_ids: `i32[R, S]`, equal for the samples of one prompt, -1 where there is no sample.
      among: `bool[R, S]`, the samples whose steps make mean and deviation, see `grpo`; all by default.
      batch: `[R, T]`, or the stacked micro-batches of an optimiser step `[K, R, T]`.
      scale_by_std: divide by the deviation.
      epsilon: e, added to the deviation, at least 0. A deviation of 0 divides by 1.
      singletons: the value of a reasoning step that is alone in its group: "zero", or "reward", its own reward over
        1 + epsilon.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0, after the last reasoning step, and in samples without a
      group.

    Raises:
      ValueError, TypeError: as `grpo`; shapes that differ; one micro-batch of several.

    Example:
      >>> ids, one = jnp.array([[1, 1, 1, 2]]), jnp.ones((1, 4))
      >>> batch = RolloutBatch(ids, ids, ids, jnp.array([[0, 1, 2, 0]]), one, jnp.array([[0, 1]]))
      >>> rewards, ends = jnp.array([[1.0, 0.0, 3.0, 2.0]]), jnp.array([[1, 0, 1, 1]])
      >>> process_grpo(rewards, ends, jnp.array([[7, 7]]), batch, epsilon=0.0)  # mean 2, deviation 1
      Array([[0., 1., 1., 0.]], dtype=float32)

    Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.3
    """
    check_choice("singletons", singletons, Singletons)
    check_flag("scale_by_std", scale_by_std)
    batch = check_tokens(batch, {"rewards": rewards, "ends": ends})
    of_samples = check_members(batch, group_ids, among)
    check_whole_step("process_grpo", batch)
    args = {"rewards": rewards, "ends": ends, **of_samples, "batch": batch}
    args["epsilon"] = as_number("epsilon", epsilon, least=0)

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        of, rows = batch.specs(p), spec_of(p.rows_spec, group_ids)
        return [of.loss_mask, of.loss_mask, rows, rows, of, P()], of.loss_mask

    static = (scale_by_std, singletons)
    found: Float[Array, "*K R T"] = shard_call("process_grpo", _process_grpo, parallel, args, specs, static)
    return found


@of_rows
def _process_grpo(
    axes: ShardAxes,
    static: tuple[bool, Singletons],
    rewards: jax.Array,
    ends: jax.Array,
    group_ids: jax.Array,
    among: jax.Array | None,
    batch: RolloutBatch,
    epsilon: jax.Array,
) -> jax.Array:
    scale_by_std, singletons = static
    segments, by_id = batch.segments(axes), ById.of(axes, group_ids)
    in_group = segments.spread(by_id.there.astype(jnp.int32)) > 0
    is_end = (ends.astype(jnp.float32) > 0) & (batch.loss_mask > 0) & in_group
    counts = is_end if among is None else is_end & (segments.spread(among.astype(jnp.int32)) > 0)
    rewards = masked(rewards, is_end.astype(jnp.float32))

    def to_tokens(table: jax.Array) -> jax.Array:
        return segments.spread(table[by_id.own])

    def total(x: jax.Array) -> jax.Array:
        """The table of sums over the reasoning steps of each group that count."""
        return by_id.sum(by_id.gather(segments.sum(jnp.where(counts, x, 0))))

    count = total(jnp.ones_like(rewards))
    # The mean is of differences from the largest reward, so that it is exact where all are equal.
    largest = by_id.max(by_id.gather(segments.max(rewards, counts.astype(jnp.float32))))
    below = rewards - to_tokens(jnp.where(count > 0, largest, 0))
    centred = below - to_tokens(total(below) / jnp.maximum(count, 1))
    if scale_by_std:
        deviation = jnp.sqrt(total(centred**2) / jnp.maximum(count - 1, 1))
        centred, rewards = centred / to_tokens(scale_of(deviation, epsilon)), rewards / (1 + epsilon)
    of_steps = jnp.where(to_tokens(count) > 1, centred, rewards if singletons == "reward" else 0)
    of_steps = jnp.where(is_end, of_steps, 0)
    following = scan_shard(axes, jnp.ones_like(of_steps), of_steps, True, batch.segment_ids, batch.num_segments)
    return lax.stop_gradient(jnp.where(batch.loss_mask > 0, following + unless_mask(ends), 0))
