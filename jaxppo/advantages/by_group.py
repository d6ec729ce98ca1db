"""The samples of a step by group, for all estimators that compare samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.token_statistics import Parallel
from jaxppo.base.arrays import as_number, check, check_array, check_choice, check_flag, check_ids, spec_of
from jaxppo.base.by_id import ById
from jaxppo.base.stacked import check_whole_step
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call

Singletons = Literal["zero", "reward"]
Found = TypeVar("Found")
# what all parts of a cut rollout share
OF_PARTS = {"rewards": "the reward of the whole rollout", "group_ids": "the group_id of its prompt"}
OF_PARTS["among"] = "the same choice"
Moments = tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]


@dataclasses.dataclass(frozen=True)
class Groups:
    """The rewards of all devices' N samples by group; per-shard code. Statistics are `[N]`, of each sample's group."""

    by_id: ById  # the samples by group
    rewards: Float[Array, " N"]  # 0 where there is none
    there: Bool[Array, " N"]  # which samples have a group
    rewarded: Bool[Array, " N"]  # which samples have a group and a reward
    counts: Bool[Array, " N"]  # what makes the statistics: the rewarded samples that are `among`, one of each rollout
    first: Int[Array, " N"]  # the first sample of each sample's rollout
    broken: Bool[Array, ""]  # whether parts of a rollout differ

    @classmethod
    def of(
        cls,
        axes: ShardAxes,
        rewards: Float[Array, "*K R S"],
        group_ids: Int[Array, "*K R S"],
        among: Bool[Array, "*K R S"] | None,
        rollout_ids: Int[Array, "*K R S"] | None,
    ) -> Groups:
        by_id = ById.of(axes, group_ids)
        given = by_id.gather(rewards.astype(jnp.float32))
        there = by_id.gather(by_id.there.astype(jnp.int32)) > 0
        rewarded = there & ~jnp.isnan(given)
        given = jnp.where(rewarded, given, 0)
        counts = rewarded if among is None else rewarded & (by_id.gather(among.astype(jnp.int32)) > 0)
        first = place = jnp.arange(counts.size, dtype=jnp.int32)
        broken = jnp.zeros((), bool)
        if rollout_ids is not None:
            rollouts = ById.of(axes, rollout_ids)
            first = -rollouts.max(-place)[rollouts.all]
            differs = [x != x[first] for x in (given, rewarded, counts, by_id.all)]
            part = rollouts.gather(rollouts.there.astype(jnp.int32)) > 0
            broken = jnp.where(part, functools.reduce(jnp.logical_or, differs), there).any()
        return cls(by_id, given, there, rewarded, counts & (first == place), first, broken)

    def sum(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        """The sum over the samples of the group that count."""
        return self.by_id.sum(jnp.where(self.counts, x, 0))[self.by_id.all]

    def max(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        """The largest value of the samples of the group that count; -inf where none does."""
        return self.by_id.max(jnp.where(self.counts, x, -jnp.inf))[self.by_id.all]

    def mean_of(self, x: Float[Array, " N"], weights: Float[Array, " N"] | None = None) -> Float[Array, " N"]:
        """The mean, as the largest value plus the mean difference: exact where all are equal; 0 where none counts."""
        weights = jnp.ones_like(x) if weights is None else weights
        largest, total = jnp.where(self.count > 0, self.max(x), 0), self.sum(weights)
        return largest + self.sum((x - largest) * weights) / jnp.where(total == 0, 1, total)

    @functools.cached_property
    def count(self) -> Float[Array, " N"]:
        return self.sum(jnp.ones_like(self.rewards))

    @functools.cached_property
    def mean(self) -> Float[Array, " N"]:
        return self.mean_of(self.rewards)

    def deviation(self, centred: Float[Array, " N"], less: int = 1) -> Float[Array, " N"]:
        """The standard deviation of differences from a mean, over count - less."""
        return jnp.sqrt(self.sum(centred**2) / jnp.maximum(self.count - less, 1))

    def whole(self) -> Groups:
        """All samples of the step as one group."""
        return dataclasses.replace(self, by_id=dataclasses.replace(self.by_id, all=jnp.zeros_like(self.by_id.all)))

    def of_rollouts(self, x: Float[Array, "*K R S"]) -> Float[Array, " N"]:
        """The sum of each sample's values over the parts of its rollout."""
        x = self.by_id.gather(x.astype(jnp.float32))
        return jnp.zeros_like(x).at[self.first].add(x)[self.first]

    def but_self(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        """A difference from the group's mean as one from the mean of the others; 0 without others."""
        return jnp.where(self.counts, x * self.count / jnp.maximum(self.count - 1, 1), x)

    def unless_alone(
        self, advantages: Float[Array, " N"], singletons: Singletons, reward: Float[Array, " N"] | None = None
    ) -> Float[Array, " N"]:
        """Replaces the advantages in a group where fewer than two samples count by 0 or by the own `reward`."""
        own = self.rewards if reward is None else reward
        return jnp.where(self.count > 1, advantages, own if singletons == "reward" else 0)

    def own(self, result: Float[Array, " N"]) -> Float[Array, "*K R S"]:
        """This device's part of a result of all samples: that of their rollouts, 0 where there is no reward."""
        result, own = jnp.where(self.broken, jnp.nan, result[self.first]), self.by_id.own
        start = self.by_id.axes.index(self.by_id.axes.data) * own.size
        return lax.dynamic_slice_in_dim(jnp.where(self.rewarded, result, 0), start, own.size).reshape(own.shape)

    def others(self) -> Moments:
        """(count, mean, sum of squares about that mean) of the other samples of each sample's group, `[N]` each.

        The moments of the samples before it and after it in the group are merged. A difference of sums is not accurate
        enough: if the others are nearly equal, it is only rounding error.
        """
        order = jnp.argsort(self.by_id.all)
        ids, rewards, counts = self.by_id.all[order], self.rewards[order], self.counts[order].astype(jnp.float32)
        changes, edge = ids[1:] != ids[:-1], jnp.ones_like(ids[:1], bool)
        each = (counts, rewards * counts, jnp.zeros_like(rewards))

        def step(x: tuple[jax.Array, Moments], y: tuple[jax.Array, Moments]) -> tuple[jax.Array, Moments]:
            return x[0] | y[0], jax.tree.map(lambda own, both: jnp.where(y[0], own, both), y[1], _merged(x[1], y[1]))

        def beside(starts: jax.Array, reverse: bool) -> Moments:
            """The moments of the samples before each one, or behind it, back to the group's start or end."""
            through = lax.associative_scan(step, (starts, each), reverse=reverse)[1]
            return jax.tree.map(lambda x: jnp.where(starts, 0, jnp.roll(x, -1 if reverse else 1)), through)

        before = beside(jnp.concatenate([edge, changes]), reverse=False)
        after = beside(jnp.concatenate([changes, edge]), reverse=True)
        return jax.tree.map(lambda x: jnp.zeros_like(x).at[order].set(x, unique_indices=True), _merged(before, after))


def scale_of(deviation: Float[Array, " N"], epsilon: Float[Array, ""]) -> Float[Array, " N"]:
    """deviation + epsilon; 1 where the deviation is 0, so that a sample outside the statistics is not blown up."""
    return jnp.where(deviation == 0, 1 + 0 * epsilon, deviation + epsilon)


def _merged(x: Moments, y: Moments) -> Moments:
    """The moments of the union of two sets; those of an empty set are 0."""
    count = x[0] + y[0]
    share, apart = y[0] / jnp.maximum(count, 1), y[1] - x[1]
    return count, x[1] + apart * share, x[2] + y[2] + apart**2 * x[0] * share


def by_group(
    name: str,
    formula: Callable[..., Found],
    parallel: Parallel,
    samples: tuple[Any, Any, Any, Any],
    *,
    lengths: Any = None,
    out: P | None = None,
    **options: Any,
) -> Found:
    """formula(groups, **options), `[N]`: each sample gets its own, 0 without a reward. Metrics need `out=P()`.

    All that several estimators take is checked here: `samples` (rewards, group_ids, among, rollout_ids), flags,
    `singletons` and `epsilon`. The `lengths` of a rollout are summed. Options that are arrays may be traced.
    """
    arrays = dict(zip(("rewards", "group_ids", "among", "rollout_ids"), samples, strict=True)) | {"lengths": lengths}
    _check_samples(name, arrays)
    check_whole_step(name)
    for what in {"scale_by_std", "leave_one_out", "unbiased"} & options.keys():
        check_flag(what, options[what])
    if "singletons" in options:
        check_choice("singletons", options["singletons"], Singletons)
    if "epsilon" in options:
        options["epsilon"] = as_number("epsilon", options["epsilon"], least=0)
    numbers = {what: x for what, x in options.items() if isinstance(x, jax.Array)}

    def specs(p: ParallelMesh) -> tuple[list[P], P]:
        rows = spec_of(p.rows_spec, arrays["rewards"])
        return [*[rows] * len(arrays), P()], rows if out is None else out

    static = formula, tuple((what, x) for what, x in options.items() if what not in numbers)
    return shard_call(name, _per_shard, parallel, {**arrays, "numbers": numbers}, specs, static)


def _per_shard(axes: ShardAxes, static: tuple[Callable[..., Any], tuple[tuple[str, Any], ...]], *arrays: Any) -> Any:
    formula, options = static
    *samples, lengths, numbers = arrays
    groups = Groups.of(axes, *samples)
    of_rollouts = {} if lengths is None else {"lengths": groups.of_rollouts(lengths)}
    found = formula(groups, **of_rollouts, **numbers, **dict(options))
    return lax.stop_gradient(groups.own(found) if isinstance(found, jax.Array) else found)


def _check_samples(name: str, arrays: Mapping[str, Any]) -> None:
    """Raises where arrays of samples have other shapes or dtypes, or, as far as this host sees, parts that differ."""
    for what in ("rewards", "group_ids"):
        check(what, f"None in {name}", arrays[what] is not None, f"[R, S]; give every Sample its {what[:-1]}")
    rewards, given = arrays["rewards"], {what: x for what, x in arrays.items() if x is not None}
    for what, x in given.items():
        check_ids(what, x) if what.endswith("_ids") else check_array(what, x)
        got = f"{rewards.dtype}{list(rewards.shape)} in {name}"
        check("rewards", got, rewards.ndim in (2, 3), "floating [R, S], or [K, R, S]")
        check(what, f"shape {x.shape} in {name}", x.shape == rewards.shape, f"that of rewards, {rewards.shape}")
    parts = [what for what in ("rewards", "group_ids", "among") if what in given]
    if "rollout_ids" not in given or not all(readable(given[what]) for what in ("rollout_ids", *parts)):
        return
    ids, groups = (np.asarray(given[what]).reshape(-1).astype(np.int64) for what in ("rollout_ids", "group_ids"))
    check("rollout_ids", "-1 for a sample", not ((ids < 0) & (groups >= 0)).any(), "the id of its rollout")
    rollouts, first, inverse = np.unique(ids[ids >= 0], return_index=True, return_inverse=True)
    for what in parts:
        each = np.asarray(given[what]).reshape(-1)[ids >= 0].astype(np.float64)
        of_first = each[first][inverse]
        for i in np.flatnonzero(~((each == of_first) | (np.isnan(each) & np.isnan(of_first))))[:1]:
            got = f"{of_first[i]:g} and {each[i]:g} in rollout {rollouts[inverse[i]]}"
            raise ValueError(
                f"{what}: got {got}, expected equal ones for all parts of a rollout, which counts once: give each part "
                f"{OF_PARTS[what]}, or leave rollout_ids out, and each part counts as a rollout of its own"
            )


def readable(x: Any) -> bool:
    """Whether this host knows all values of an array."""
    return not isinstance(x, jax.core.Tracer) and (not isinstance(x, jax.Array) or x.is_fully_addressable)
