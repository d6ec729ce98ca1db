"""Per-sample advantages that compare the samples of one prompt: the samples with equal `group_ids`.

A group may have any size and may lie on any data shards: the few numbers a sample has are gathered over the data axes.
A step of stacked micro-batches, `[K, R, S]`, is one population: the samples of a group may lie in any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxppo._arrays import check_alike, check_array, check_choice, check_ids
from jaxppo._stacked import check_whole_step, spec_of
from jaxppo.by_id import ById
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call

Parallel = ParallelMesh | ShardAxes | None
Singletons = Literal["zero", "reward"]


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The samples by group: tables have a value a group, see `ById`."""

    by_id: ById
    rewards: Float[Array, "N"]
    """The values of everyone's samples, 0 where there is none."""
    count: Float[Array, "N"]
    mean: Float[Array, "N"]

    @property
    def own(self) -> Float[Array, "*K R S"]:
        """The rewards of this device's samples."""
        first = self.by_id.axes.index(self.by_id.axes.data) * self.by_id.own.size
        return lax.dynamic_slice_in_dim(self.rewards, first, self.by_id.own.size).reshape(self.by_id.own.shape)

    def of(self, table: Float[Array, "N"]) -> Float[Array, "*K R S"]:
        """The value of the group of each of this device's samples."""
        return table[self.by_id.own]

    def deviation(self) -> Float[Array, "N"]:
        """The groups' standard deviations, over count - 1; 0 for a group of one."""
        squares = self.by_id.sum((self.rewards - self.mean[self.by_id.all]) ** 2)
        return jnp.sqrt(squares / jnp.maximum(self.count - 1, 1))


def _by_group(
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
    specs = lambda p: ([spec_of(p.rows_spec, rewards)] * 3, spec_of(p.rows_spec, rewards))  # noqa: E731
    static = (formula, tuple(options.items()))
    found: Float[Array, "*K R S"] = shard_call(name, _per_shard, parallel, args, specs, static)
    return found


def _per_shard(
    axes: ShardAxes, static: tuple[Any, Any], rewards: jax.Array, ids: jax.Array, weights: jax.Array | None
) -> jax.Array:
    formula, options = static
    by_id = ById.of(axes, ids)
    everyone = by_id.gather(rewards.astype(jnp.float32))
    groups = _Groups(by_id, everyone, by_id.count(), by_id.mean(everyone))
    of_all = None if weights is None else by_id.gather(weights.astype(jnp.float32))
    result = formula(groups, of_all, **dict(options))
    return lax.stop_gradient(jnp.where(by_id.there, result, 0))


def _lone(groups: _Groups, advantages: jax.Array, singletons: Singletons) -> jax.Array:
    lone = groups.own if singletons == "reward" else jnp.zeros_like(advantages)
    return jnp.where(groups.of(groups.count) > 1, advantages, lone)


def grpo(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    scale_by_std: bool = True,
    epsilon: float = 1e-6,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Group-relative advantages: A_i = (r_i - mean_g) / (std_g + epsilon), over the samples of i's own group.

    The standard deviation is over n - 1. Groups may be of unequal size and spread over data shards.

    Args:
      rewards: `f32[R, S]`, one a sample, or `[K, R, S]` of a stacked step; anything where there is no sample.
      group_ids: `i32` of that shape, equal for the samples of one prompt, -1 where there is no sample.
      scale_by_std: divide by the group's deviation; without it this is `dr_grpo`.
      epsilon: added to the deviation.
      singletons: the advantage in a group of one: "zero", or its own "reward" over 1 + epsilon (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample; `spread` puts them on tokens.

    Raises:
      ValueError, TypeError: shapes that differ, ids that are no integers, an unknown `singletons`, a call inside
        `accumulate_gradients`.

    Example:
      >>> grpo(jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[7, 7, 8]])).round(3)
      Array([[ 0.707, -0.707,  0.   ]], dtype=float32)

    Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300
    """

    check_choice("singletons", singletons, Singletons)
    options: dict[str, Any] = {"scale_by_std": scale_by_std, "epsilon": epsilon, "singletons": singletons}
    return _by_group("grpo", _grpo, parallel, rewards, group_ids, **options)


def _grpo(groups: _Groups, _: None, *, scale_by_std: bool, epsilon: float, singletons: Singletons) -> jax.Array:
    centred = groups.own - groups.of(groups.mean)
    if not scale_by_std:
        return _lone(groups, centred, singletons)
    scaled = centred / (groups.of(groups.deviation()) + epsilon)
    lone = _lone(groups, groups.own, singletons) / (1 + epsilon)
    return jnp.where(groups.of(groups.count) > 1, scaled, lone)


def dr_grpo(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Group-relative advantages without the scale: A_i = r_i - mean_g.

    Args:
      rewards: `f32[R, S]`, one a sample, or `[K, R, S]` of a stacked step.
      group_ids: `i32` of that shape, equal for the samples of one prompt, -1 where there is no sample.
      singletons: the advantage in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample.

    Raises:
      ValueError, TypeError: as `grpo`.

    Example:
      >>> dr_grpo(jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[7, 7, 8]]))
      Array([[ 0.5, -0.5,  0. ]], dtype=float32)

    Liu et al. 2025, Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783
    """
    return grpo(rewards, group_ids, scale_by_std=False, singletons=singletons, parallel=parallel)


def rloo(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Leave-one-out advantages: A_i = r_i - mean of the others of the group = n / (n - 1) * (r_i - mean_g).

    Args:
      rewards: `f32[R, S]`, one a sample, or `[K, R, S]` of a stacked step.
      group_ids: `i32` of that shape, equal for the samples of one prompt, -1 where there is no sample.
      singletons: the advantage in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample.

    Raises:
      ValueError, TypeError: as `grpo`.

    Example:
      >>> rloo(jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[7, 7, 8]]))
      Array([[ 1., -1.,  0.]], dtype=float32)

    Ahmadian et al. 2024, Back to Basics, https://arxiv.org/abs/2402.14740
    """

    check_choice("singletons", singletons, Singletons)
    return _by_group("rloo", _rloo, parallel, rewards, group_ids, singletons=singletons)


def _rloo(groups: _Groups, _: None, *, singletons: Singletons) -> jax.Array:
    count = groups.of(groups.count)
    left_out = (groups.own - groups.of(groups.mean)) * count / jnp.maximum(count - 1, 1)
    return _lone(groups, left_out, singletons)


def opo(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    lengths: Float[Array, "*K R S"],
    *,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Advantages over the length-weighted baseline: A_i = r_i - sum_g(len_j * r_j) / sum_g(len_j).

    Args:
      rewards: `f32[R, S]`, one a sample, or `[K, R, S]` of a stacked step.
      group_ids: `i32` of that shape, equal for the samples of one prompt, -1 where there is no sample.
      lengths: numbers of that shape, response tokens of each sample, `segment_sum(loss_mask, ...)`.
      singletons: the advantage in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample, and in groups of several without a token.

    Raises:
      ValueError, TypeError: as `grpo`; lengths of another shape.

    Example:
      >>> opo(jnp.array([[1.0, 0.0]]), jnp.array([[7, 7]]), jnp.array([[1.0, 3.0]]))
      Array([[ 0.75, -0.25]], dtype=float32)

    Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, https://arxiv.org/abs/2505.23585
    """

    check_choice("singletons", singletons, Singletons)
    check_array("lengths", lengths)
    return _by_group("opo", _opo, parallel, rewards, group_ids, lengths, singletons=singletons)


def _opo(groups: _Groups, lengths: jax.Array, *, singletons: Singletons) -> jax.Array:
    baseline, total = groups.by_id.mean(groups.rewards, lengths), groups.by_id.sum(lengths)
    return _lone(groups, jnp.where(groups.of(total) > 0, groups.own - groups.of(baseline), 0), singletons)


def pass_at_k(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    scale_by_std: bool = True,
    epsilon: float = 1e-6,
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Only a group's best sample has an advantage: A_best = (r_best - r_second) / (std_g + epsilon), 0 for all others.

    Args:
      rewards: `f32[R, S]`, one a sample, or `[K, R, S]` of a stacked step.
      group_ids: `i32` of that shape, equal for the samples of one prompt, -1 where there is no sample.
      scale_by_std: divide by the group's deviation (over n - 1).
      epsilon: added to the deviation.
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample, where two samples share the best reward, and in groups
      of one.

    Raises:
      ValueError, TypeError: as `grpo`.

    Example:
      >>> pass_at_k(jnp.array([[1.0, 0.0, 0.25]]), jnp.array([[7, 7, 7]]), scale_by_std=False)
      Array([[0.75, 0.  , 0.  ]], dtype=float32)

    Tang et al. 2025, Optimizing Language Models for Inference Time Objectives, https://arxiv.org/abs/2503.19595
    """

    return _by_group("pass_at_k", _pass_at_k, parallel, rewards, group_ids, scale_by_std=scale_by_std, epsilon=epsilon)


def _pass_at_k(groups: _Groups, _: None, *, scale_by_std: bool, epsilon: float) -> jax.Array:
    best = groups.by_id.max(groups.rewards)
    is_best = groups.rewards == best[groups.by_id.all]
    second = groups.by_id.max(jnp.where(is_best, -jnp.inf, groups.rewards))
    alone = (groups.by_id.sum(is_best.astype(jnp.float32)) == 1) & (groups.count > 1)
    gap = jnp.where(alone, best - jnp.where(alone, second, best), 0)
    gap = gap / (groups.deviation() + epsilon) if scale_by_std else gap
    return jnp.where(groups.own == groups.of(best), groups.of(gap), 0)


def gpg(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    f_norm: float = 1.0,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Advantages scaled up for the samples that teach nothing: A_i = (N / #{r != 0}) * (r_i - mean_g) / f_norm.

    N and the count of rewards that are not 0 are over the whole batch, or stacked step.

    Args:
      rewards: `f32[R, S]`, one a sample, or `[K, R, S]` of a stacked step.
      group_ids: `i32` of that shape, equal for the samples of one prompt, -1 where there is no sample.
      f_norm: the paper's normaliser.
      singletons: the centred reward in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample.

    Raises:
      ValueError, TypeError: as `grpo`.

    Example:
      >>> gpg(jnp.array([[1.0, 0.0]]), jnp.array([[7, 7]]))
      Array([[ 1., -1.]], dtype=float32)

    Chu et al. 2025, GPG, https://arxiv.org/abs/2504.02546
    """

    check_choice("singletons", singletons, Singletons)
    return _by_group("gpg", _gpg, parallel, rewards, group_ids, f_norm=f_norm, singletons=singletons)


def _gpg(groups: _Groups, _: None, *, f_norm: float, singletons: Singletons) -> jax.Array:
    present = groups.by_id.gather(groups.by_id.there.astype(jnp.float32))
    alpha = present.sum() / jnp.maximum((groups.rewards != 0).sum(dtype=jnp.int32), 1).astype(jnp.float32)
    return alpha * _lone(groups, groups.own - groups.of(groups.mean), singletons) / f_norm


def remax(
    rewards: Float[Array, "*K R S"], baselines: Float[Array, "*K R S"], sample_ids: Int[Array, "*K R S"]
) -> Float[Array, "*K R S"]:
    """Advantages over the reward of the greedy response to the same prompt: A_i = r_i - b_i.

    Args:
      rewards: `f32[R, S]`, one a sample, or `[K, R, S]` of a stacked step.
      baselines: `f32` of that shape, the greedy response's reward for each sample's prompt.
      sample_ids: `i32` of that shape, -1 where there is no sample.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> remax(jnp.array([[1.0, 9.0]]), jnp.array([[0.25, 0.0]]), jnp.array([[3, -1]]))
      Array([[0.75, 0.  ]], dtype=float32)

    Li et al. 2023, ReMax, https://arxiv.org/abs/2310.10505
    """
    check_alike({"rewards": rewards, "baselines": baselines, "sample_ids": sample_ids}, sample_ids="integers")
    return lax.stop_gradient(jnp.where(sample_ids >= 0, rewards - baselines, 0).astype(jnp.float32))
