"""The share of a prompt's responses that pass: it tells whether prompts are too easy or too hard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.by_group import Groups, Parallel, check_samples_of
from jaxppo.base.arrays import Coefficient, as_number, spec_of
from jaxppo.base.metrics import Metric, Metrics
from jaxppo.base.stacked import check_whole_step
from jaxppo.sharding import ShardAxes, shard_call


def pass_rates(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    at_least: Coefficient = 1.0,
    parallel: Parallel = None,
) -> Metrics:
    """Metrics of how many samples of each group have at least the reward `at_least`, over the whole step.

    If all samples of a group pass, or none, they have no group advantage.

    Args:
      rewards: `f32[R, S]`, or `[K, R, S]`, the whole step's; NaN for none.
      group_ids: equal for the samples of one prompt, -1 where there is no sample.
      among, rollout_ids: see `grpo`; a rollout counts once.
      at_least: the smallest reward that passes.
      parallel: the mesh; rows sharded over data.

    Returns:
      Metrics. Means over groups: `pass_rate`, the share of a group's samples that pass; `pass_all`, `pass_none` and
      `pass_some`, the share of groups in which all, none or some of the samples pass. Over samples: `no_reward`, the
      share of those without a reward.

    Raises:
      TypeError: arrays of another dtype.
      ValueError: shapes that differ, a threshold that is not a number, a single micro-batch of a step.

    Example:
      >>> found = advantages.pass_rates(jnp.array([[1.0, 0.0, 1.0]]), jnp.array([[7, 7, 8]]))
      >>> {name: float(x) for name, x in finalize_metrics(found).items()}
      {'no_reward': 0.0, 'pass_all': 0.5, 'pass_none': 0.0, 'pass_rate': 0.75, 'pass_some': 0.5}
    """
    check_samples_of("pass_rates", rewards, group_ids, among, rollout_ids)
    check_whole_step("pass_rates")
    args = {"rewards": rewards, "group_ids": group_ids, "among": among, "rollout_ids": rollout_ids}
    args |= {"at_least": as_number("at_least", at_least)}
    found: Metrics = shard_call(
        "pass_rates", _per_shard, parallel, args, lambda p: ([*[spec_of(p.rows_spec, rewards)] * 4, P()], P())
    )
    return found


def _per_shard(
    axes: ShardAxes,
    rewards: jax.Array,
    group_ids: jax.Array,
    among: jax.Array | None,
    rollout_ids: jax.Array | None,
    at_least: jax.Array,
) -> Metrics:
    groups = Groups.of(axes, rewards, group_ids, among, rollout_ids)

    def of_groups(x: jax.Array) -> jax.Array:
        return groups.by_id.sum((x & groups.counts).astype(jnp.float32))

    count, number = of_groups(groups.counts), of_groups(groups.rewards >= at_least)
    each = {
        "pass_rate": number / jnp.maximum(count, 1),
        "pass_all": (number == count).astype(jnp.float32),
        "pass_none": (number == 0).astype(jnp.float32),
        "pass_some": ((number > 0) & (number < count)).astype(jnp.float32),
    }
    known = ~jnp.isnan(at_least) if groups.broken is None else ~groups.broken & ~jnp.isnan(at_least)
    there, is_group = groups.there.astype(jnp.float32), (count > 0).astype(jnp.float32)
    found = {name: (x * is_group, is_group) for name, x in each.items()}
    found["no_reward"] = (jnp.where(groups.rewarded, 0, there), there)
    return {
        name: Metric(lax.stop_gradient(jnp.where(known, x.sum(), jnp.nan)), of.sum()) for name, (x, of) in found.items()
    }
