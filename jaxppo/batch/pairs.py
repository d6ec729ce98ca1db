"""Finds the pairs of a step: a chosen sample and a rejected one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.by_id import ById
from jaxppo.sharding import ShardAxes


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of a step, over all data shards; per-shard code.

    Tables have one value for each pair, see `ById`.

    Two samples with loss tokens and the same group id are a pair. The sample with the higher reward
    is the chosen one.
    """

    by_id: ById  # the samples by group
    chosen: Bool[Array, " N"]  # which of all devices' samples were chosen
    rejected: Bool[Array, " N"]
    # which of this device's samples with loss tokens are not in exactly one pair
    alone: Bool[Array, "R S"]

    @classmethod
    def of(
        cls,
        axes: ShardAxes,
        group_ids: Int[Array, "R S"],
        rewards: Float[Array, "R S"],
        loss_tokens: Float[Array, "R S"],
    ) -> Pairs:
        by_id = ById.of(axes, jnp.where(loss_tokens > 0, group_ids, -1))
        all_rewards = by_id.gather(rewards)
        present = by_id.gather(by_id.there.astype(jnp.int32)) > 0
        highest = by_id.max(all_rewards)[by_id.all]
        lowest = -by_id.max(-all_rewards)[by_id.all]
        differ = highest > lowest
        chosen = present & (all_rewards == highest) & differ
        rejected = present & (all_rewards == lowest) & differ

        def is_count(flags: jax.Array, count: int) -> jax.Array:
            return by_id.sum(flags.astype(jnp.int32)) == count

        is_pair = is_count(present, 2) & is_count(chosen, 1) & is_count(rejected, 1)
        paired = is_pair[by_id.own] & by_id.there
        alone = (loss_tokens > 0) & ~paired
        return cls(by_id, chosen, rejected, alone)

    def of_chosen(self, x: Float[Array, "R S"]) -> Float[Array, " N"]:
        return self.by_id.sum(jnp.where(self.chosen, self.by_id.gather(x), 0))

    def of_rejected(self, x: Float[Array, "R S"]) -> Float[Array, " N"]:
        return self.by_id.sum(jnp.where(self.rejected, self.by_id.gather(x), 0))

    def to_both(self, table: Float[Array, " N"]) -> Float[Array, "R S"]:
        """For each of this device's samples, the value of its pair."""
        return table[self.by_id.own]
