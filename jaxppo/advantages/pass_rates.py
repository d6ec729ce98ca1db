"""The share of a prompt's responses that pass: it tells whether prompts are too easy or too hard."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo._arrays import check_alike, check_ids, check_number, spec_of
from jaxppo._stacked import check_whole_step
from jaxppo.by_id import ById
from jaxppo.metrics import Metric, Metrics
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call


def pass_rates(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    at_least: float = 1.0,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Metrics:
    """Metrics of how many samples of each group have at least the reward `at_least`, over the whole step.

    If all samples of a group pass, or none, they have no group advantage.

    Args:
      rewards: `f32[R, S]`, or `[K, R, S]`, the whole step's.
      group_ids: equal for the samples of one prompt, -1 where there is no sample.
      at_least: the smallest reward that passes.
      parallel: the mesh; rows sharded over data.

    Returns:
      Metrics, means over groups, NaN if a reward is NaN: `pass_rate`, the share of a group's samples that pass;
      `pass_all`, `pass_none` and `pass_some`, the share of groups in which all, none or some of the samples pass.

    Raises:
      TypeError: arrays of another dtype.
      ValueError: shapes that differ, a threshold that is not a number, a single micro-batch of a step.

    Example:
      >>> found = advantages.pass_rates(jnp.array([[1.0, 0.0, 1.0]]), jnp.array([[7, 7, 8]]))
      >>> {name: float(x) for name, x in finalize_metrics(found).items()}
      {'pass_all': 0.5, 'pass_none': 0.0, 'pass_rate': 0.75, 'pass_some': 0.5}
    """
    check_alike({"rewards": rewards, "group_ids": group_ids}, group_ids="integers")
    check_ids("group_ids", group_ids)
    check_number("at_least", at_least)
    check_whole_step("pass_rates")
    if rewards.ndim not in (2, 3):
        raise ValueError(f"rewards: got shape {rewards.shape}, expected [R, S], or [K, R, S]")
    args = {"rewards": rewards, "group_ids": group_ids, "at_least": jnp.asarray(at_least, jnp.float32)}
    found: Metrics = shard_call(
        "pass_rates", _per_shard, parallel, args, lambda p: ([*[spec_of(p.rows_spec, rewards)] * 2, P()], P())
    )
    return found


def _per_shard(
    axes: ShardAxes, rewards: Float[Array, "*K R S"], group_ids: Int[Array, "*K R S"], at_least: Float[Array, ""]
) -> Metrics:
    by_id = ById.of(axes, group_ids)
    present = by_id.gather(by_id.there.astype(jnp.float32))
    passes = jnp.where(jnp.isnan(rewards), jnp.nan, (rewards.astype(jnp.float32) >= at_least).astype(jnp.float32))
    passed = by_id.gather(passes)
    count, number = by_id.sum(present), by_id.sum(passed)
    is_group = (count > 0).astype(jnp.float32)
    groups = is_group.sum()
    each = {
        "pass_rate": number / jnp.maximum(count, 1),
        "pass_all": (number == count).astype(jnp.float32),
        "pass_none": (number == 0).astype(jnp.float32),
        "pass_some": ((number > 0) & (number < count)).astype(jnp.float32),
    }
    each = {name: x + 0 * number for name, x in each.items()}  # NaN where a reward is
    return {name: Metric(lax.stop_gradient((x * is_group).sum()), groups) for name, x in each.items()}
