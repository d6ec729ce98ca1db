"""The samples of a step by group, for all estimators that compare samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxppo._arrays import check_array, check_ids, spec_of
from jaxppo._stacked import check_whole_step
from jaxppo.by_id import ById
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call

Parallel = ParallelMesh | ShardAxes | None
Singletons = Literal["zero", "reward"]
Moments = tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]


@dataclasses.dataclass(frozen=True)
class Groups:
    """The samples by group. Tables have one value for each group, see `ById`."""

    by_id: ById
    rewards: Float[Array, " N"]
    """The values of all devices' samples, 0 where there is no sample."""
    count: Float[Array, " N"]
    mean: Float[Array, " N"]

    @property
    def own(self) -> Float[Array, "*K R S"]:
        """The rewards of this device's samples."""
        return self.own_part(self.rewards)

    def own_part(self, x: Float[Array, " N"]) -> Float[Array, "*K R S"]:
        """This device's part of the values of all samples."""
        first = self.by_id.axes.index(self.by_id.axes.data) * self.by_id.own.size
        return lax.dynamic_slice_in_dim(x, first, self.by_id.own.size).reshape(self.by_id.own.shape)

    def of(self, table: Float[Array, " N"]) -> Float[Array, "*K R S"]:
        """For each of this device's samples, its group's value."""
        return table[self.by_id.own]

    def deviation(self) -> Float[Array, " N"]:
        """The groups' standard deviations, over count - 1; 0 for a group of one."""
        squares = self.by_id.sum((self.rewards - self.mean[self.by_id.all]) ** 2)
        return jnp.sqrt(squares / jnp.maximum(self.count - 1, 1))

    def whole(self) -> Groups:
        """All samples of the step as one group."""
        present = self.by_id.gather(self.by_id.there.astype(jnp.int32))
        by_id = dataclasses.replace(self.by_id, own=(~self.by_id.there).astype(jnp.int32), all=1 - present)
        return Groups(by_id, self.rewards, by_id.count(), by_id.mean(self.rewards))

    def unless_alone(
        self, advantages: Float[Array, "*K R S"], singletons: Singletons, reward: Float[Array, "*K R S"] | None = None
    ) -> Float[Array, "*K R S"]:
        """Replaces the advantage of a sample that is alone in its group by 0 or by its `reward`."""
        own = self.own if reward is None else reward
        return jnp.where(self.of(self.count) > 1, advantages, own if singletons == "reward" else 0)

    def others(self) -> Moments:
        """(count, mean, sum of squares about that mean) of the other samples of each sample's group, `[N]` each.

        The moments of the samples before it and after it in the group are merged. A difference of sums is not accurate
        enough: if the others are nearly equal, it is only rounding error.
        """
        order = jnp.argsort(self.by_id.all)
        ids, rewards = self.by_id.all[order], self.rewards[order]
        changes, edge = ids[1:] != ids[:-1], jnp.ones_like(ids[:1], bool)
        first, last = jnp.concatenate([edge, changes]), jnp.concatenate([changes, edge])
        each: Moments = (jnp.ones_like(rewards), rewards, jnp.zeros_like(rewards))
        through, back = (_running(each, first, reverse=False), _running(each, last, reverse=True))
        before = jax.tree.map(lambda x: jnp.where(first, 0, jnp.roll(x, 1)), through)
        after = jax.tree.map(lambda x: jnp.where(last, 0, jnp.roll(x, -1)), back)
        count, mean, squares = (jnp.zeros_like(x).at[order].set(x, unique_indices=True) for x in _merged(before, after))
        return count, mean, squares


def _merged(x: Moments, y: Moments) -> Moments:
    """The moments of the union of two sets; those of an empty set are 0."""
    count = x[0] + y[0]
    share, apart = y[0] / jnp.maximum(count, 1), y[1] - x[1]
    return count, x[1] + apart * share, x[2] + y[2] + apart**2 * x[0] * share


def _running(each: Moments, starts: Bool[Array, " N"], *, reverse: bool) -> Moments:
    """Running moments, up to and including each sample, that begin anew at each start."""

    def step(x: tuple[jax.Array, Moments], y: tuple[jax.Array, Moments]) -> tuple[jax.Array, Moments]:
        together = jax.tree.map(lambda own, both: jnp.where(y[0], own, both), y[1], _merged(x[1], y[1]))
        return x[0] | y[0], together

    found: Moments = lax.associative_scan(step, (starts, each), reverse=reverse)[1]
    return found


def by_group(
    name: str,
    formula: Callable[..., jax.Array],
    parallel: Parallel,
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    weights: Float[Array, "*K R S"] | None = None,
    **options: Any,
) -> Float[Array, "*K R S"]:
    """formula(groups, all_weights, **options) for every sample, 0 where there is none."""
    if rewards is None or group_ids is None:
        missing = "rewards" if rewards is None else "group_ids"
        field = missing.removesuffix("s")
        raise ValueError(f"{missing}: got None in {name}, expected [R, S]; give every Sample its {field}")
    check_array("rewards", rewards)
    check_ids("group_ids", group_ids)
    if rewards.ndim not in (2, 3) or not jnp.issubdtype(rewards.dtype, jnp.floating):
        got = f"{rewards.dtype}{list(rewards.shape)} in {name}"
        raise ValueError(f"rewards: got {got}, expected floating [R, S], or [K, R, S]")
    if group_ids.shape != rewards.shape:
        raise ValueError(f"group_ids: got shape {group_ids.shape} in {name}, expected that of rewards, {rewards.shape}")
    if weights is not None and weights.shape != rewards.shape:
        raise ValueError(f"lengths: got shape {weights.shape} in {name}, expected that of rewards, {rewards.shape}")
    check_whole_step(name)
    args = {"rewards": rewards, "group_ids": group_ids, "lengths": weights}
    static = (formula, tuple(options.items()))
    found: Float[Array, "*K R S"] = shard_call(
        name,
        _per_shard,
        parallel,
        args,
        lambda p: ([spec_of(p.rows_spec, rewards)] * 3, spec_of(p.rows_spec, rewards)),
        static,
    )
    return found


def _per_shard(
    axes: ShardAxes,
    static: tuple[Callable[..., jax.Array], tuple[tuple[str, Any], ...]],
    rewards: jax.Array,
    ids: jax.Array,
    weights: jax.Array | None,
) -> jax.Array:
    formula, options = static
    by_id = ById.of(axes, ids)
    everyone = by_id.gather(rewards.astype(jnp.float32))
    groups = Groups(by_id, everyone, by_id.count(), by_id.mean(everyone))
    of_all = None if weights is None else by_id.gather(weights.astype(jnp.float32))
    result = formula(groups, of_all, **dict(options))
    return lax.stop_gradient(jnp.where(by_id.there, result, 0))
