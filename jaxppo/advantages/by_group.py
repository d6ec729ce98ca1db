"""The samples of a step by group, for all estimators that compare samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.token_statistics import check_segments
from jaxppo.base.arrays import Coefficient, as_number, check, check_array, check_choice, check_flag, check_ids, spec_of
from jaxppo.base.by_id import ById
from jaxppo.base.stacked import check_whole_step
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call

Parallel = ParallelMesh | ShardAxes | None
Singletons = Literal["zero", "reward"]
SAMPLES = ("rewards", "group_ids", "among", "rollout_ids")
FLAGS = {"scale_by_std", "leave_one_out", "unbiased"}
Moments = tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]


@dataclasses.dataclass(frozen=True)
class Groups:
    """The rewards of all devices' N samples by group; per-shard code.

    Statistics are `[N]`, for each sample those of its group. They are over the samples that count, see `of`.

    Args:
      by_id: the samples by group.
      rewards: 0 where there is none.
      there: which samples have a group.
      rewarded: which samples have a group and a reward.
      counts: the samples that make the statistics, one of each rollout.
      first: the first sample of each sample's rollout; None where each sample is one.
      broken: whether parts of a rollout differ; None where each sample is one.
    """

    by_id: ById
    rewards: Float[Array, " N"]
    there: Bool[Array, " N"]
    rewarded: Bool[Array, " N"]
    counts: Bool[Array, " N"]
    first: Int[Array, " N"] | None
    broken: Bool[Array, ""] | None

    @classmethod
    def of(
        cls,
        axes: ShardAxes,
        rewards: Float[Array, "*K R S"],
        group_ids: Int[Array, "*K R S"],
        among: Bool[Array, "*K R S"] | None,
        rollout_ids: Int[Array, "*K R S"] | None,
    ) -> Groups:
        """The groups of all devices' samples. A sample counts if it has a reward and is `among`; a rollout, once."""
        by_id = ById.of(axes, group_ids)
        given = by_id.gather(rewards.astype(jnp.float32))
        there = by_id.gather(by_id.there.astype(jnp.int32)) > 0
        rewarded = there & ~jnp.isnan(given)
        counts = rewarded if among is None else rewarded & (by_id.gather(among.astype(jnp.int32)) > 0)
        found = cls(by_id, jnp.where(rewarded, given, 0), there, rewarded, counts, None, None)
        if rollout_ids is None:
            return found
        rollouts = ById.of(axes, rollout_ids)
        place = jnp.arange(counts.size, dtype=jnp.int32)
        first = -rollouts.max(-place)[rollouts.all]
        differs = [x != x[first] for x in (found.rewards, rewarded, counts, by_id.all)]
        part = rollouts.gather(rollouts.there.astype(jnp.int32)) > 0
        broken = jnp.where(part, functools.reduce(jnp.logical_or, differs), there).any()
        return dataclasses.replace(found, counts=counts & (first == place), first=first, broken=broken)

    def sum(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        """The sum over the samples of the group that count."""
        return self.by_id.sum(jnp.where(self.counts, x, 0))[self.by_id.all]

    def max(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        """The largest value of the samples of the group that count; -inf where none does."""
        return self.by_id.max(jnp.where(self.counts, x, -jnp.inf))[self.by_id.all]

    def mean_of(self, x: Float[Array, " N"], weights: Float[Array, " N"] | None = None) -> Float[Array, " N"]:
        """The mean, as the largest value plus the mean difference: exact where all are equal; 0 where none counts."""
        largest = jnp.where(self.count > 0, self.max(x), 0)
        total = self.count if weights is None else self.sum(weights)
        difference = x - largest if weights is None else (x - largest) * weights
        return largest + self.sum(difference) / jnp.where(total == 0, 1, total)

    @functools.cached_property
    def count(self) -> Float[Array, " N"]:
        return self.sum(jnp.ones_like(self.rewards))

    @functools.cached_property
    def mean(self) -> Float[Array, " N"]:
        return self.mean_of(self.rewards)

    def scale(self, epsilon: Float[Array, ""]) -> Float[Array, " N"]:
        """The standard deviation over count - 1, plus epsilon; 1 where it is 0."""
        squares = self.sum((self.rewards - self.mean) ** 2)
        return scale_of(jnp.sqrt(squares / jnp.maximum(self.count - 1, 1)), epsilon)

    def whole(self) -> Groups:
        """All samples of the step as one group."""
        return dataclasses.replace(self, by_id=dataclasses.replace(self.by_id, all=jnp.zeros_like(self.by_id.all)))

    def of_rollouts(self, x: Float[Array, "*K R S"]) -> Float[Array, " N"]:
        """The sum of each sample's values over the parts of its rollout."""
        x = self.by_id.gather(x.astype(jnp.float32))
        return x if self.first is None else jnp.zeros_like(x).at[self.first].add(x)[self.first]

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
        if self.first is not None and self.broken is not None:
            result = jnp.where(self.broken, jnp.nan, result[self.first])
        own = self.by_id.own
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
        first, last = jnp.concatenate([edge, changes]), jnp.concatenate([changes, edge])
        each: Moments = (counts, rewards * counts, jnp.zeros_like(rewards))
        through, back = (_running(each, first, reverse=False), _running(each, last, reverse=True))
        before = jax.tree.map(lambda x: jnp.where(first, 0, jnp.roll(x, 1)), through)
        after = jax.tree.map(lambda x: jnp.where(last, 0, jnp.roll(x, -1)), back)
        count, mean, squares = (jnp.zeros_like(x).at[order].set(x, unique_indices=True) for x in _merged(before, after))
        return count, mean, squares


def scale_of(deviation: Float[Array, " N"], epsilon: Float[Array, ""]) -> Float[Array, " N"]:
    """deviation + epsilon; 1 where the deviation is 0, so that a sample outside the statistics is not blown up."""
    return jnp.where(deviation == 0, 1 + 0 * epsilon, deviation + epsilon)


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
    samples: Sequence[Any],
    *,
    lengths: Float[Array, "*K R S"] | None = None,
    epsilon: Coefficient | None = None,
    **options: Any,
) -> Float[Array, "*K R S"]:
    """formula(groups, lengths=, epsilon=, **options) of every sample, 0 where it has no reward; without what is None.

    Args:
      name: the estimator's name.
      formula: takes `Groups` and returns `[N]`.
      parallel: the mesh.
      samples: rewards, group_ids, among and rollout_ids, as `grpo` takes them; unchecked.
      lengths: a number of each sample; those of a rollout are summed.
      epsilon: unchecked; may be traced.
      **options: static; flags and `singletons` are unchecked.
    """
    check_samples_of(name, *samples, lengths=lengths)
    check_whole_step(name)
    for what in FLAGS & options.keys():
        check_flag(what, options[what])
    if "singletons" in options:
        check_choice("singletons", options["singletons"], Singletons)
    epsilon = None if epsilon is None else as_number("epsilon", epsilon, least=0)
    args = dict(zip((*SAMPLES, "lengths", "epsilon"), (*samples, lengths, epsilon), strict=True))

    def specs(p: ParallelMesh) -> tuple[list[P], P]:
        rows = spec_of(p.rows_spec, samples[0])
        return [*[rows] * 5, P()], rows

    static = (formula, tuple(options.items()))
    found: Float[Array, "*K R S"] = shard_call(name, _per_shard, parallel, args, specs, static)
    return found


def _per_shard(
    axes: ShardAxes,
    static: tuple[Callable[..., jax.Array], tuple[tuple[str, Any], ...]],
    rewards: jax.Array,
    group_ids: jax.Array,
    among: jax.Array | None,
    rollout_ids: jax.Array | None,
    lengths: jax.Array | None,
    epsilon: jax.Array | None,
) -> jax.Array:
    formula, options = static
    groups = Groups.of(axes, rewards, group_ids, among, rollout_ids)
    more = {"lengths": None if lengths is None else groups.of_rollouts(lengths), "epsilon": epsilon}
    given = {name: x for name, x in more.items() if x is not None}
    return lax.stop_gradient(groups.own(formula(groups, **given, **dict(options))))


def check_samples_of(
    name: str, rewards: Any, group_ids: Any, among: Any = None, rollout_ids: Any = None, **more: Any
) -> None:
    """Raises where arrays of samples have other shapes or dtypes, or, as far as this host sees, parts that differ."""
    for what, x in {"rewards": rewards, "group_ids": group_ids}.items():
        if x is None:
            raise ValueError(f"{what}: got None in {name}, expected [R, S]; give every Sample its {what[:-1]}")
    check_array("rewards", rewards)
    if rewards.ndim not in (2, 3) or not jnp.issubdtype(rewards.dtype, jnp.floating):
        got = f"{rewards.dtype}{list(rewards.shape)} in {name}"
        raise ValueError(f"rewards: got {got}, expected floating [R, S], or [K, R, S]")
    optional = {"among": among, "rollout_ids": rollout_ids, **more}
    given = {"group_ids": group_ids, **{what: x for what, x in optional.items() if x is not None}}
    for what, x in given.items():
        check_ids(what, x) if what.endswith("_ids") else check_array(what, x)
        if x.shape != rewards.shape:
            raise ValueError(f"{what}: got shape {x.shape} in {name}, expected that of rewards, {rewards.shape}")
    if rollout_ids is not None:
        _check_parts(rollout_ids, {"rewards": rewards, "group_ids": group_ids, "among": among})


def check_members(batch: RolloutBatch, group_ids: Any, among: Any) -> dict[str, Any]:
    """Both, as arguments of a per-shard function; raises where they do not fit the batch."""
    check_segments(batch, group_ids=group_ids)
    check_ids("group_ids", group_ids)
    if among is not None:
        check_segments(batch, among=among)
    return {"group_ids": group_ids, "among": among}


def _check_parts(rollout_ids: Any, given: Mapping[str, Any]) -> None:
    """Raises where parts of a rollout differ, or a sample has no rollout, if this host can read all arrays."""
    arrays = {what: x for what, x in given.items() if x is not None}
    if not all(map(readable, (rollout_ids, *arrays.values()))):
        return
    ids, groups = (np.asarray(x).reshape(-1).astype(np.int64) for x in (rollout_ids, arrays["group_ids"]))
    check("rollout_ids", "-1 for a sample", not ((ids < 0) & (groups >= 0)).any(), "the id of its rollout")
    rollouts, first, inverse = np.unique(ids[ids >= 0], return_index=True, return_inverse=True)
    for what, x in arrays.items():
        each = np.asarray(x).reshape(-1)[ids >= 0].astype(np.float64)
        of_first = each[first][inverse]
        for i in np.flatnonzero(~((each == of_first) | (np.isnan(each) & np.isnan(of_first))))[:1]:
            got = f"{of_first[i]:g} and {each[i]:g} in rollout {rollouts[inverse[i]]}"
            raise ValueError(f"{what}: got {got}, expected equal ones for all parts of a rollout")


def readable(x: Any) -> bool:
    """Whether this host knows all values of an array."""
    return not isinstance(x, jax.core.Tracer) and (not isinstance(x, jax.Array) or x.is_fully_addressable)
