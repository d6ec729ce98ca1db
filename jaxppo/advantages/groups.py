"""Per-sample advantages that compare the samples of one prompt: the samples with equal `group_ids`.

A group may have any size and may lie on any data shards: a few numbers per sample are gathered over the data axes.
A step of stacked micro-batches, `[K, R, S]`, is one population: the samples of a group may lie in any of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxppo._arrays import check_alike, check_array, check_choice
from jaxppo.advantages.by_group import Groups, Parallel, Singletons, by_group


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
      rewards: `f32[R, S]`, one per sample, or `[K, R, S]` of a stacked step; anything where there is no sample.
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
    return by_group("grpo", _grpo, parallel, rewards, group_ids, **options)


def _grpo(groups: Groups, _: None, *, scale_by_std: bool, epsilon: float, singletons: Singletons) -> jax.Array:
    centred = groups.own - groups.of(groups.mean)
    if not scale_by_std:
        return groups.unless_alone(centred, singletons)
    scaled = centred / (groups.of(groups.deviation()) + epsilon)
    return groups.unless_alone(scaled, singletons, groups.own / (1 + epsilon))


def dr_grpo(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Group-relative advantages without the scale: A_i = r_i - mean_g.

    Args:
      rewards: `f32[R, S]`, one per sample, or `[K, R, S]` of a stacked step.
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
    scale_by_std: bool = False,
    epsilon: float = 1e-6,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Leave-one-out advantages: A_i = r_i - mean of the others of the group = n / (n - 1) * (r_i - mean_g).

    With `scale_by_std` they are divided by the deviation of the others (over n - 2), A_i / (std + epsilon). Where the
    others are a single sample or equal, A_i is not scaled (NeMo-RL).

    Args:
      rewards: `f32[R, S]`, one per sample, or `[K, R, S]` of a stacked step.
      group_ids: `i32` of that shape, equal for the samples of one prompt, -1 where there is no sample.
      scale_by_std: divide by the deviation of the others.
      epsilon: added to the deviation.
      singletons: the advantage in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample.

    Raises:
      ValueError, TypeError: as `grpo`.

    Example:
      >>> rloo(jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[7, 7, 8]]))
      Array([[ 1., -1.,  0.]], dtype=float32)
      >>> rloo(jnp.array([[1.0, 0.0, 0.0]]), jnp.array([[7, 7, 7]]), scale_by_std=True).round(3)
      Array([[ 1.   , -0.707, -0.707]], dtype=float32)

    Ahmadian et al. 2024, Back to Basics, https://arxiv.org/abs/2402.14740; the scale: NeMo-RL alone.
    """

    check_choice("singletons", singletons, Singletons)
    options: dict[str, Any] = {"scale_by_std": scale_by_std, "epsilon": epsilon, "singletons": singletons}
    return by_group("rloo", _rloo, parallel, rewards, group_ids, **options)


def _rloo(groups: Groups, _: None, *, scale_by_std: bool, epsilon: float, singletons: Singletons) -> jax.Array:
    if not scale_by_std:
        count = groups.of(groups.count)
        left_out = (groups.own - groups.of(groups.mean)) * count / jnp.maximum(count - 1, 1)
        return groups.unless_alone(left_out, singletons)
    count, mean, squares = (groups.own_part(x) for x in groups.others())
    deviation = jnp.sqrt(squares / jnp.maximum(count - 1, 1))
    scale = jnp.where(deviation > 0, deviation + epsilon, 1)
    return groups.unless_alone((groups.own - mean) / scale, singletons)


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
      rewards: `f32[R, S]`, one per sample, or `[K, R, S]` of a stacked step.
      group_ids: `i32` of that shape, equal for the samples of one prompt, -1 where there is no sample.
      lengths: numbers of that shape, response tokens of each sample, `segment_sum(loss_mask, ...)`.
      singletons: the advantage in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample, and in groups of several samples without a loss token.

    Raises:
      ValueError, TypeError: as `grpo`; lengths of another shape.

    Example:
      >>> opo(jnp.array([[1.0, 0.0]]), jnp.array([[7, 7]]), jnp.array([[1.0, 3.0]]))
      Array([[ 0.75, -0.25]], dtype=float32)

    Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, https://arxiv.org/abs/2505.23585
    """

    check_choice("singletons", singletons, Singletons)
    check_array("lengths", lengths)
    return by_group("opo", _opo, parallel, rewards, group_ids, lengths, singletons=singletons)


def _opo(groups: Groups, lengths: jax.Array, *, singletons: Singletons) -> jax.Array:
    baseline, total = groups.by_id.mean(groups.rewards, lengths), groups.by_id.sum(lengths)
    return groups.unless_alone(jnp.where(groups.of(total) > 0, groups.own - groups.of(baseline), 0), singletons)


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
      rewards: `f32[R, S]`, one per sample, or `[K, R, S]` of a stacked step.
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

    return by_group("pass_at_k", _pass_at_k, parallel, rewards, group_ids, scale_by_std=scale_by_std, epsilon=epsilon)


def _pass_at_k(groups: Groups, _: None, *, scale_by_std: bool, epsilon: float) -> jax.Array:
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
    """Advantages scaled up to compensate for rewards of 0: A_i = (N / #{r != 0}) * (r_i - mean_g) / f_norm.

    N and the count of rewards that are not 0 are over the whole batch, or stacked step.

    Args:
      rewards: `f32[R, S]`, one per sample, or `[K, R, S]` of a stacked step.
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
    return by_group("gpg", _gpg, parallel, rewards, group_ids, f_norm=f_norm, singletons=singletons)


def _gpg(groups: Groups, _: None, *, f_norm: float, singletons: Singletons) -> jax.Array:
    present = groups.by_id.gather(groups.by_id.there.astype(jnp.float32))
    alpha = present.sum() / jnp.maximum((groups.rewards != 0).sum(dtype=jnp.int32), 1).astype(jnp.float32)
    return alpha * groups.unless_alone(groups.own - groups.of(groups.mean), singletons) / f_norm


def remax(
    rewards: Float[Array, "*K R S"], baselines: Float[Array, "*K R S"], sample_ids: Int[Array, "*K R S"]
) -> Float[Array, "*K R S"]:
    """Advantages over the reward of the greedy response to the same prompt: A_i = r_i - b_i.

    Args:
      rewards: `f32[R, S]`, one per sample, or `[K, R, S]` of a stacked step.
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
