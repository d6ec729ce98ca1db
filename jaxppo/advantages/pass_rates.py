"""The share of a prompt's responses that pass: it tells whether prompts are too easy or too hard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.by_group import Groups, by_group
from jaxppo.advantages.token_statistics import Parallel
from jaxppo.base.arrays import Coefficient, as_number
from jaxppo.base.metrics import Metric, Metrics


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
      rewards, group_ids, among, rollout_ids, parallel: see `grpo`; a rollout counts once.
      at_least: the smallest reward that passes.

    Returns:
      Metrics. Means over groups: `pass_rate`, the share of a group's samples that pass; `pass_all`, `pass_none` and
      `pass_some`, the share of groups in which all, none or some of the samples pass. Over samples: `no_reward`, the
      share of those without a reward.

    Raises:
      ValueError, TypeError: as `grpo`; a threshold that is not a number.

    Example:
      >>> found = advantages.pass_rates(jnp.array([[1.0, 0.0, 1.0]]), jnp.array([[7, 7, 8]]))
      >>> {name: float(x) for name, x in finalize_metrics(found).items()}
      {'no_reward': 0.0, 'pass_all': 0.5, 'pass_none': 0.0, 'pass_rate': 0.75, 'pass_some': 0.5}
    """
    samples = (rewards, group_ids, among, rollout_ids)
    return by_group("pass_rates", _pass_rates, parallel, samples, out=P(), at_least=as_number("at_least", at_least))


def _pass_rates(groups: Groups, *, at_least: jax.Array) -> Metrics:
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
    return {name: Metric(jnp.where(known, x.sum(), jnp.nan), of.sum()) for name, (x, of) in found.items()}
