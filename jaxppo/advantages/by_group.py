"""The samples of a step by group, for all estimators that compare samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.token_statistics import Parallel
from jaxppo.base.arrays import (
    as_number,
    check,
    check_array,
    check_choice,
    check_flag,
    check_ids,
    spec_of,
)
from jaxppo.base.by_id import ById
from jaxppo.base.stacked import check_whole_step
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call

Singletons = Literal["zero", "reward"]
Result = TypeVar("Result")
# what all samples of a rollout share, and what each of them should have
SHARED_BY_ROLLOUT = {
    "rewards": "the reward of the whole rollout",
    "group_ids": "the group_id of its prompt",
    "among": "the same choice",
}


class SampleArrays(NamedTuple):
    """What all estimators by group read of samples, `[R, S]` or `[K, R, S]`; None for what is
    not given.
    """

    rewards: Any
    group_ids: Any
    among: Any
    rollout_ids: Any


class Moments(NamedTuple):
    """Size, mean and spread of a set of rewards for each sample; all 0 for an empty set."""

    size: Float[Array, " N"]
    mean: Float[Array, " N"]
    squares: Float[Array, " N"]  # the sum of squared differences from the mean


@dataclasses.dataclass(frozen=True)
class Groups:
    """The rewards of all devices' N samples by group; per-shard code.

    Statistics are `[N]`, of each sample's group.
    """

    by_id: ById  # the samples by group
    rewards: Float[Array, " N"]  # 0 where there is none
    there: Bool[Array, " N"]  # which samples have a group
    rewarded: Bool[Array, " N"]  # which samples have a group and a reward
    # what makes the statistics: the rewarded samples that are `among`, one of each rollout
    counts: Bool[Array, " N"]
    first: Int[Array, " N"]  # the first sample of each sample's rollout
    broken: Bool[Array, ""]  # whether samples of a rollout differ in what they should share

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
        all_rewards = by_id.gather(rewards.astype(jnp.float32))
        there = _gather_flags(by_id, by_id.there)
        rewarded = there & ~jnp.isnan(all_rewards)
        all_rewards = jnp.where(rewarded, all_rewards, 0)
        counts = rewarded
        if among is not None:
            counts = rewarded & _gather_flags(by_id, among)
        index = jnp.arange(counts.size, dtype=jnp.int32)
        first = index
        broken = jnp.zeros((), bool)
        if rollout_ids is not None:
            rollouts = ById.of(axes, rollout_ids)
            first = -rollouts.max(-index)[rollouts.all]
            differs = [x != x[first] for x in (all_rewards, rewarded, counts, by_id.all)]
            has_rollout = _gather_flags(rollouts, rollouts.there)
            differs_in_any = functools.reduce(jnp.logical_or, differs)
            broken = jnp.where(has_rollout, differs_in_any, there).any()
        one_of_each_rollout = counts & (first == index)
        return cls(by_id, all_rewards, there, rewarded, one_of_each_rollout, first, broken)

    def sum(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        """The sum over the samples of the group that count."""
        return self.by_id.sum(jnp.where(self.counts, x, 0))[self.by_id.all]

    def max(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        """The largest value of the samples of the group that count; -inf where none does."""
        return self.by_id.max(jnp.where(self.counts, x, -jnp.inf))[self.by_id.all]

    def mean_of(
        self, x: Float[Array, " N"], weights: Float[Array, " N"] | None = None
    ) -> Float[Array, " N"]:
        """The mean, as the largest value plus the mean difference: exact where all are equal; 0
        where none counts.
        """
        if weights is None:
            weights = jnp.ones_like(x)
        largest = jnp.where(self.count > 0, self.max(x), 0)
        total = self.sum(weights)
        difference = self.sum((x - largest) * weights) / jnp.where(total == 0, 1, total)
        return largest + difference

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
        one_id = dataclasses.replace(self.by_id, all=jnp.zeros_like(self.by_id.all))
        return dataclasses.replace(self, by_id=one_id)

    def rollout_sums(self, x: Float[Array, "*K R S"]) -> Float[Array, " N"]:
        """The sum over the samples of each sample's rollout."""
        x = self.by_id.gather(x.astype(jnp.float32))
        return jnp.zeros_like(x).at[self.first].add(x)[self.first]

    def but_self(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        """A difference from the group's mean as one from the mean of the others; 0 without
        others.
        """
        others = jnp.maximum(self.count - 1, 1)
        return jnp.where(self.counts, x * self.count / others, x)

    def unless_alone(
        self,
        advantages: Float[Array, " N"],
        singletons: Singletons,
        reward: Float[Array, " N"] | None = None,
    ) -> Float[Array, " N"]:
        """Replaces the advantages in a group where fewer than two samples count by 0 or by the
        own `reward`.
        """
        alone: jax.Array | int = 0
        if singletons == "reward":
            alone = self.rewards if reward is None else reward
        return jnp.where(self.count > 1, advantages, alone)

    def own(self, result: Float[Array, " N"]) -> Float[Array, "*K R S"]:
        """The result for this device's samples: that of their rollouts, 0 where there is no
        reward.
        """
        result = jnp.where(self.broken, jnp.nan, result[self.first])
        axes = self.by_id.axes
        own = self.by_id.own
        start = axes.index(axes.data) * own.size
        result = jnp.where(self.rewarded, result, 0)
        return lax.dynamic_slice_in_dim(result, start, own.size).reshape(own.shape)

    def others(self) -> Moments:
        """The moments of the other samples of each sample's group.

        The moments of the samples before it and after it in the group are merged. A difference of
        sums is not accurate enough: if the others are nearly equal, it is only rounding error.
        """
        order = jnp.argsort(self.by_id.all)
        ids = self.by_id.all[order]
        rewards = self.rewards[order]
        counts = self.counts[order].astype(jnp.float32)
        changes = ids[1:] != ids[:-1]
        edge = jnp.ones_like(ids[:1], bool)
        each = Moments(counts, rewards * counts, jnp.zeros_like(rewards))
        before = _moments_before(jnp.concatenate([edge, changes]), each, reverse=False)
        after = _moments_before(jnp.concatenate([changes, edge]), each, reverse=True)

        def unsorted(x: jax.Array) -> jax.Array:
            return jnp.zeros_like(x).at[order].set(x, unique_indices=True)

        return jax.tree.map(unsorted, _merged(before, after))


def scale_of(deviation: Float[Array, " N"], epsilon: Float[Array, ""]) -> Float[Array, " N"]:
    """deviation + epsilon; 1 where the deviation is 0, so that a sample outside the statistics
    is not blown up.
    """
    return jnp.where(deviation == 0, 1 + 0 * epsilon, deviation + epsilon)


def _gather_flags(by_id: ById, flags: Bool[Array, "*K R S"]) -> Bool[Array, " N"]:
    return by_id.gather(flags.astype(jnp.int32)) > 0


def _moments_before(starts: Bool[Array, " N"], each: Moments, reverse: bool) -> Moments:
    """The moments of the samples before each one, back to its group's start; with `reverse`, of
    those behind it.
    """

    def step(
        x: tuple[jax.Array, Moments], y: tuple[jax.Array, Moments]
    ) -> tuple[jax.Array, Moments]:
        x_starts, x_moments = x
        y_starts, y_moments = y
        both = _merged(x_moments, y_moments)
        return x_starts | y_starts, jax.tree.map(
            lambda own, merged: jnp.where(y_starts, own, merged), y_moments, both
        )

    _, through = lax.associative_scan(step, (starts, each), reverse=reverse)
    shift = -1 if reverse else 1
    return jax.tree.map(lambda x: jnp.where(starts, 0, jnp.roll(x, shift)), through)


def _merged(x: Moments, y: Moments) -> Moments:
    """The moments of the union of two sets."""
    size = x.size + y.size
    share = y.size / jnp.maximum(size, 1)
    apart = y.mean - x.mean
    mean = x.mean + apart * share
    squares = x.squares + y.squares + apart**2 * x.size * share
    return Moments(size, mean, squares)


def by_group(
    name: str,
    formula: Callable[..., Result],
    parallel: Parallel,
    samples: SampleArrays,
    *,
    lengths: Any = None,
    out: P | None = None,
    **options: Any,
) -> Result:
    """formula(groups, **options), `[N]`: each sample gets its own, 0 without a reward.

    Metrics need `out=P()`.

    All that several estimators take is checked here: `samples`, flags, `singletons` and `epsilon`.
    The `lengths` of a rollout are summed. Options that are arrays may be traced.
    """
    arrays = {**samples._asdict(), "lengths": lengths}
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
        rows = spec_of(p.rows_spec, samples.rewards)
        inputs = [rows] * len(arrays)
        return [*inputs, P()], rows if out is None else out

    names = tuple((what, x) for what, x in options.items() if what not in numbers)
    return shard_call(
        name, _per_shard, parallel, {**arrays, "numbers": numbers}, specs, (formula, names)
    )


def _per_shard(
    axes: ShardAxes, static: tuple[Callable[..., Any], tuple[tuple[str, Any], ...]], *arrays: Any
) -> Any:
    formula, names = static
    *samples, lengths, numbers = arrays
    groups = Groups.of(axes, *samples)
    options = {**numbers, **dict(names)}
    if lengths is not None:
        options["lengths"] = groups.rollout_sums(lengths)
    result = formula(groups, **options)
    if isinstance(result, jax.Array):
        result = groups.own(result)
    return lax.stop_gradient(result)


def _check_samples(name: str, arrays: Mapping[str, Any]) -> None:
    """Raises where arrays of samples have other shapes or dtypes, or samples of a rollout
    differ.
    """
    for what in ("rewards", "group_ids"):
        check(
            what,
            f"None in {name}",
            arrays[what] is not None,
            f"[R, S]; give every Sample its {what[:-1]}",
        )
    rewards = arrays["rewards"]
    present = {what: x for what, x in arrays.items() if x is not None}
    for what, x in present.items():
        if what.endswith("_ids"):
            check_ids(what, x)
        else:
            check_array(what, x)
        got = f"{rewards.dtype}{list(rewards.shape)} in {name}"
        check("rewards", got, rewards.ndim in (2, 3), "floating [R, S], or [K, R, S]")
        check(
            what,
            f"shape {x.shape} in {name}",
            x.shape == rewards.shape,
            f"that of rewards, {rewards.shape}",
        )
    rollout_ids = present.get("rollout_ids")
    shared = {what: present[what] for what in SHARED_BY_ROLLOUT if what in present}
    # what this host cannot read makes the results NaN
    if rollout_ids is not None and all(map(readable, (rollout_ids, *shared.values()))):
        _check_rollouts(rollout_ids, shared)


def _check_rollouts(rollout_ids: Any, shared: Mapping[str, Any]) -> None:
    """Raises where a sample has no rollout, or where samples of one rollout differ in an array
    of `shared`.
    """
    ids = np.asarray(rollout_ids).reshape(-1).astype(np.int64)
    group_ids = np.asarray(shared["group_ids"]).reshape(-1).astype(np.int64)
    missing = (ids < 0) & (group_ids >= 0)
    check("rollout_ids", "-1 for a sample", not missing.any(), "the id of its rollout")
    rollouts, first, inverse = np.unique(ids[ids >= 0], return_index=True, return_inverse=True)
    for what, array in shared.items():
        values = np.asarray(array).reshape(-1)[ids >= 0].astype(np.float64)
        expected = values[first][inverse]
        equal = (values == expected) | (np.isnan(values) & np.isnan(expected))
        if equal.all():
            continue
        i = int(np.argmin(equal))
        got = f"{expected[i]:g} and {values[i]:g} in rollout {rollouts[inverse[i]]}"
        raise ValueError(
            f"{what}: got {got}, expected equal ones for all parts of a rollout, which counts once:"
            f" give each part {SHARED_BY_ROLLOUT[what]}, or leave rollout_ids out, and each part"
            " counts as a rollout of its own"
        )


def readable(x: Any) -> bool:
    """Whether this host knows all values of an array."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable
