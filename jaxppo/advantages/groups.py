"""Per-sample advantages that compare the samples of one prompt: the samples with equal `group_ids`.

A group may have any size and may lie on any data shards: the few numbers a sample has are gathered over the data
axes, and each sample is compared with all others by id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxppo._sharding import ParallelMesh, ShardAxes, shard_call

Parallel = ParallelMesh | ShardAxes | None
Singletons = Literal["zero", "reward"]


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Each local sample (row) against all samples of all data shards (columns)."""

    same: jax.Array  # bool[n, N]
    everyone: jax.Array  # f32[N], the rewards
    own: jax.Array  # f32[n]
    present: jax.Array  # bool[n]
    count: jax.Array  # f32[n], at least 1

    def sum(self, x: jax.Array) -> jax.Array:
        return jnp.where(self.same, x, 0).sum(1)

    def mean(self, weights: jax.Array | None = None) -> jax.Array:
        """Each sample's group's mean reward, as its own reward plus the mean difference: exact where all are equal."""
        difference = self.everyone - self.own[:, None]
        if weights is None:
            return self.own + self.sum(difference) / self.count
        return self.own + self.sum(difference * weights) / jnp.maximum(self.sum(weights), 1e-8)

    def deviation(self, mean: jax.Array) -> jax.Array:
        """The group's standard deviation, over count - 1; 0 for a group of one."""
        square = self.sum((self.everyone - mean[:, None]) ** 2)
        return jnp.sqrt(square / jnp.maximum(self.count - 1, 1))


def _gather(axes: ShardAxes, x: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    return lax.all_gather(flat, axes.data, tiled=True) if axes.data else flat


def _by_group(
    name: str,
    formula: Callable[..., jax.Array],
    parallel: Parallel,
    rewards: Float[Array, "R S"],
    group_ids: Int[Array, "R S"],
    weights: Float[Array, "R S"] | None = None,
) -> Float[Array, "R S"]:
    """formula(groups, all_weights) for every sample, 0 where there is none."""
    if rewards.ndim != 2 or not jnp.issubdtype(rewards.dtype, jnp.floating):
        raise ValueError(f"rewards: got {rewards.dtype}{list(rewards.shape)} in {name}, expected floating [R, S]")
    if group_ids.shape != rewards.shape:
        raise ValueError(f"group_ids: got shape {group_ids.shape} in {name}, expected that of rewards, {rewards.shape}")
    if not jnp.issubdtype(group_ids.dtype, jnp.integer):
        raise TypeError(f"group_ids: got {group_ids.dtype} in {name}, expected integers")
    if weights is not None and weights.shape != rewards.shape:
        raise ValueError(f"lengths: got shape {weights.shape} in {name}, expected that of rewards, {rewards.shape}")

    def per_shard(axes: ShardAxes, rewards: jax.Array, ids: jax.Array, weights: jax.Array | None) -> jax.Array:
        own = jnp.where(ids >= 0, rewards.astype(jnp.float32), 0)
        same = (ids.reshape(-1, 1) == _gather(axes, ids)) & (ids.reshape(-1, 1) >= 0)
        groups = _Groups(same, _gather(axes, own), own.reshape(-1), ids.reshape(-1) >= 0, jnp.maximum(same.sum(1), 1.0))
        everyone = None if weights is None else _gather(axes, weights.astype(jnp.float32))
        result = formula(groups, everyone).reshape(rewards.shape)
        return lax.stop_gradient(jnp.where(ids >= 0, result, 0))

    args = {"rewards": rewards, "group_ids": group_ids, "lengths": weights}
    return shard_call(name, per_shard, parallel, args, lambda p: ([p.rows_spec] * 3, p.rows_spec))


def _lone(groups: _Groups, advantages: jax.Array, singletons: Singletons) -> jax.Array:
    if singletons not in ("zero", "reward"):
        raise ValueError(f"singletons: got {singletons!r}, expected 'zero' or 'reward'")
    return jnp.where(groups.count > 1, advantages, groups.own if singletons == "reward" else 0)


def grpo(
    rewards: Float[Array, "R S"],
    group_ids: Int[Array, "R S"],
    *,
    scale_by_std: bool = True,
    epsilon: float = 1e-6,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "R S"]:
    """Group-relative advantages: A_i = (r_i - mean_g) / (std_g + epsilon), over the samples of i's own group.

    The standard deviation is over n - 1. Groups may be of unequal size and spread over data shards.

    Args:
      rewards: `f32[R, S]`, one a sample; anything where there is no sample.
      group_ids: `i32[R, S]`, equal for the samples of one prompt, -1 where there is no sample.
      scale_by_std: divide by the group's deviation; without it this is `dr_grpo`.
      epsilon: added to the deviation.
      singletons: the advantage in a group of one: "zero", or its own "reward" over 1 + epsilon (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32[R, S]`, 0 where there is no sample; `spread` puts them on tokens.

    Raises:
      ValueError, TypeError: shapes that differ, ids that are no integers, an unknown `singletons`.

    Example:
      >>> grpo(jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[7, 7, 8]])).round(3)
      Array([[ 0.707, -0.707,  0.   ]], dtype=float32)

    Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300
    """

    def formula(groups: _Groups, _: None) -> jax.Array:
        mean = groups.mean()
        scale = groups.deviation(mean) + epsilon if scale_by_std else 1.0
        lone = 1 + epsilon if scale_by_std else 1.0
        return jnp.where(groups.count > 1, (groups.own - mean) / scale, _lone(groups, groups.own, singletons) / lone)

    return _by_group("grpo", formula, parallel, rewards, group_ids)


def dr_grpo(
    rewards: Float[Array, "R S"],
    group_ids: Int[Array, "R S"],
    *,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "R S"]:
    """Group-relative advantages without the scale: A_i = r_i - mean_g.

    Args:
      rewards: `f32[R, S]`, one a sample.
      group_ids: `i32[R, S]`, equal for the samples of one prompt, -1 where there is no sample.
      singletons: the advantage in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32[R, S]`, 0 where there is no sample.

    Raises:
      ValueError, TypeError: as `grpo`.

    Example:
      >>> dr_grpo(jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[7, 7, 8]]))
      Array([[ 0.5, -0.5,  0. ]], dtype=float32)

    Liu et al. 2025, Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783
    """
    return grpo(rewards, group_ids, scale_by_std=False, singletons=singletons, parallel=parallel)


def rloo(
    rewards: Float[Array, "R S"],
    group_ids: Int[Array, "R S"],
    *,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "R S"]:
    """Leave-one-out advantages: A_i = r_i - mean of the others of the group = n / (n - 1) * (r_i - mean_g).

    Args:
      rewards: `f32[R, S]`, one a sample.
      group_ids: `i32[R, S]`, equal for the samples of one prompt, -1 where there is no sample.
      singletons: the advantage in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32[R, S]`, 0 where there is no sample.

    Raises:
      ValueError, TypeError: as `grpo`.

    Example:
      >>> rloo(jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[7, 7, 8]]))
      Array([[ 1., -1.,  0.]], dtype=float32)

    Ahmadian et al. 2024, Back to Basics, https://arxiv.org/abs/2402.14740
    """

    def formula(groups: _Groups, _: None) -> jax.Array:
        left_out = (groups.own - groups.mean()) * groups.count / jnp.maximum(groups.count - 1, 1)
        return _lone(groups, left_out, singletons)

    return _by_group("rloo", formula, parallel, rewards, group_ids)


def opo(
    rewards: Float[Array, "R S"],
    group_ids: Int[Array, "R S"],
    lengths: Float[Array, "R S"],
    *,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "R S"]:
    """Advantages over the length-weighted baseline: A_i = r_i - sum_g(len_j * r_j) / sum_g(len_j).

    Args:
      rewards: `f32[R, S]`, one a sample.
      group_ids: `i32[R, S]`, equal for the samples of one prompt, -1 where there is no sample.
      lengths: `[R, S]`, response tokens of each sample, `segment_sum(loss_mask, ...)`.
      singletons: the advantage in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32[R, S]`, 0 where there is no sample.

    Raises:
      ValueError, TypeError: as `grpo`; lengths of another shape.

    Example:
      >>> opo(jnp.array([[1.0, 0.0]]), jnp.array([[7, 7]]), jnp.array([[1.0, 3.0]]))
      Array([[ 0.75, -0.25]], dtype=float32)

    Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, https://arxiv.org/abs/2505.23585
    """

    def formula(groups: _Groups, lengths: jax.Array) -> jax.Array:
        return _lone(groups, groups.own - groups.mean(lengths), singletons)

    return _by_group("opo", formula, parallel, rewards, group_ids, lengths)


def pass_at_k(
    rewards: Float[Array, "R S"],
    group_ids: Int[Array, "R S"],
    *,
    scale_by_std: bool = True,
    epsilon: float = 1e-6,
    parallel: Parallel = None,
) -> Float[Array, "R S"]:
    """Only a group's best sample learns: A_best = (r_best - r_second) / (std_g + epsilon), 0 for all others.

    Args:
      rewards: `f32[R, S]`, one a sample.
      group_ids: `i32[R, S]`, equal for the samples of one prompt, -1 where there is no sample.
      scale_by_std: divide by the group's deviation (over n - 1).
      epsilon: added to the deviation.
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32[R, S]`, 0 where there is no sample, where two samples share the best reward, and in groups of one.

    Raises:
      ValueError, TypeError: as `grpo`.

    Example:
      >>> pass_at_k(jnp.array([[1.0, 0.0, 0.25]]), jnp.array([[7, 7, 7]]), scale_by_std=False)
      Array([[0.75, 0.  , 0.  ]], dtype=float32)

    Tang et al. 2025, Optimizing Language Models for Inference Time Objectives, https://arxiv.org/abs/2503.19595
    """

    def formula(groups: _Groups, _: None) -> jax.Array:
        members = jnp.where(groups.same, groups.everyone, -jnp.inf)
        best = members.max(1)
        others = jnp.where(members < best[:, None], members, -jnp.inf).max(1)
        ties = groups.sum((groups.everyone == best[:, None]).astype(jnp.float32))
        wins = (groups.own == best) & (ties == 1) & (groups.count > 1)
        gap = jnp.where(wins, best - jnp.where(wins, others, best), 0)
        return gap / (groups.deviation(groups.mean()) + epsilon if scale_by_std else 1.0)

    return _by_group("pass_at_k", formula, parallel, rewards, group_ids)


def gpg(
    rewards: Float[Array, "R S"],
    group_ids: Int[Array, "R S"],
    *,
    f_norm: float = 1.0,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "R S"]:
    """Advantages scaled up for the samples that teach nothing: A_i = (N / #{r != 0}) * (r_i - mean_g) / f_norm.

    N and the count of rewards that are not 0 are over the whole batch.

    Args:
      rewards: `f32[R, S]`, one a sample.
      group_ids: `i32[R, S]`, equal for the samples of one prompt, -1 where there is no sample.
      f_norm: the paper's normaliser.
      singletons: the centred reward in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32[R, S]`, 0 where there is no sample.

    Raises:
      ValueError, TypeError: as `grpo`.

    Example:
      >>> gpg(jnp.array([[1.0, 0.0]]), jnp.array([[7, 7]]))
      Array([[ 1., -1.]], dtype=float32)

    Chu et al. 2025, GPG, https://arxiv.org/abs/2504.02546
    """

    def formula(groups: _Groups, present: jax.Array) -> jax.Array:
        alpha = present.sum() / jnp.maximum((groups.everyone != 0).sum(), 1)
        return alpha * _lone(groups, groups.own - groups.mean(), singletons) / f_norm

    return _by_group("gpg", formula, parallel, rewards, group_ids, (group_ids >= 0).astype(jnp.float32))


def remax(
    rewards: Float[Array, "R S"], baselines: Float[Array, "R S"], sample_ids: Int[Array, "R S"]
) -> Float[Array, "R S"]:
    """Advantages over the reward of the greedy response to the same prompt: A_i = r_i - b_i.

    Args:
      rewards: `f32[R, S]`, one a sample.
      baselines: `f32[R, S]`, the greedy response's reward for each sample's prompt.
      sample_ids: `i32[R, S]`, -1 where there is no sample.

    Returns:
      `f32[R, S]`, 0 where there is no sample.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> remax(jnp.array([[1.0, 9.0]]), jnp.array([[0.25, 0.0]]), jnp.array([[3, -1]]))
      Array([[0.75, 0.  ]], dtype=float32)

    Li et al. 2023, ReMax, https://arxiv.org/abs/2310.10505
    """
    for name, x in (("baselines", baselines), ("sample_ids", sample_ids)):
        if x.shape != rewards.shape:
            raise ValueError(f"{name}: got shape {x.shape}, expected that of rewards, {rewards.shape}")
    return lax.stop_gradient(jnp.where(sample_ids >= 0, rewards - baselines, 0).astype(jnp.float32))
