"""Group advantages with other scales than the group's deviation: MaxRL, several rewards (GDPO),
AReaL's levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.by_group import (
    Groups,
    SampleArrays,
    Singletons,
    by_group,
    readable,
    scale_of,
)
from jaxppo.advantages.groups import grpo, rloo
from jaxppo.advantages.token_statistics import Parallel, counted_tokens, spread, whiten
from jaxppo.base.arrays import (
    Coefficient,
    check,
    check_alike,
    check_choice,
    check_flag,
    check_number,
)
from jaxppo.base.stacked import check_whole_step
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked

Level = Literal["step", "group"]
Whitened = Literal["tokens", "samples"]
# A mean below this share of the largest reward is a mean of 0 with rounding errors.
ROUNDING = 2.0**-22


def maxrl(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    epsilon: Coefficient = 0.0,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """MaxRL: A_i = (r_i - mean_g) / (mean_g + epsilon), over the samples of i's own group; 0 where
    mean_g is 0.

    With rewards of 0 and 1 the mean is the share of right answers, and the expected gradient is
    that of the likelihood of a right answer, up to an order equal to the group's size. A negative
    mean would flip all signs.

    Args:
      rewards: of at least 0.
      epsilon: added to the mean.
      others: see `grpo`, also for returns and errors.

    Raises:
      ValueError: a group with a negative mean; under `jit` its advantages are NaN.

    Example:
      >>> maxrl(jnp.array([[1.0, 0.0, 0.0, 0.0, 0.0]]), jnp.array([[7, 7, 7, 7, 8]]))
      Array([[ 3., -1., -1., -1.,  0.]], dtype=float32)

    Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning, https://arxiv.org/abs/2602.02710
    """
    samples = SampleArrays(rewards, group_ids, among, rollout_ids)
    result = by_group("maxrl", _maxrl, parallel, samples, epsilon=epsilon, singletons=singletons)
    if all(map(readable, (result, rewards, group_ids))):
        refused = np.asarray(group_ids)[np.isnan(result) & np.isfinite(rewards)]
        got = f"a negative mean, or an infinite reward, in group {max(refused, default=0)}"
        check("rewards", got, refused.size == 0, "finite rewards with means of at least 0")
    return result


def _maxrl(groups: Groups, *, epsilon: jax.Array, singletons: Singletons) -> jax.Array:
    # relative to the smallest reward, so that the divisor is not a difference of near numbers:
    # 1/1000 is exact too
    mean = -groups.mean_of(-groups.rewards)
    rounding = ROUNDING * jnp.maximum(groups.max(jnp.abs(groups.rewards)), 0)
    is_zero = (jnp.abs(mean) <= rounding) & jnp.isfinite(rounding)
    scaled = (groups.rewards - mean) / jnp.where(is_zero, 1, mean + epsilon)
    scaled = jnp.where(is_zero, 0, scaled)
    advantages = groups.unless_alone(scaled, singletons)
    return jnp.where(mean < -rounding, jnp.nan, advantages)


def gdpo(
    rewards: Sequence[Float[Array, "*K R S"]],
    group_ids: Int[Array, "*K R S"],
    batch: RolloutBatch,
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    weights: Sequence[float] | None = None,
    leave_one_out: bool = False,
    whitened: Whitened | None = "tokens",
    epsilon: Coefficient = 1e-6,
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """GDPO, for several rewards: A_i = whiten(sum over k of w_k (r_ki - mean_gk) / (std_gk +
    epsilon)).

    Each reward is scaled on its own, so that a reward with a wide range does not drown the others.

    Args:
      rewards: for each reward `f32[R, S]`, one per sample, or `[K, R, S]` of a stacked step. A
        sample that lacks one of them, NaN, has none.
      group_ids, among: see `grpo`.
      rollout_ids: see `grpo`; by default those of the batch.
      batch, parallel: see `spread`, also for returns.
      weights: w, a number for each reward; 1 by default.
      leave_one_out: use the mean and the deviation of the other samples, see `rloo` with
        `scale_by_std` (NeMo-RL).
      whitened: over all "tokens" of the step, as `whiten` does (verl); over its "samples", each
        counted once:
        (A - mean) / (std + epsilon) (TRL, NeMo-RL, ms-swift); or not at all, None.
      epsilon: added to deviations.

    Raises:
      ValueError, TypeError: as `grpo` and `spread`; no reward; another number of weights; one
        micro-batch of several.

    Example:
      >>> ids, one = jnp.array([[1, 2]]), jnp.ones((1, 2))
      >>> batch = RolloutBatch(ids, ids, ids, ids, one, jnp.array([[0, 1]]))
      >>> right, short = jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 100.0]])
      >>> gdpo([right, short], jnp.array([[7, 7]]), batch, weights=[1.0, 0.5]).round(3)
      Array([[ 0.707, -0.707]], dtype=float32)

    Liu et al. 2026, GDPO, https://arxiv.org/abs/2601.05242
    """
    _check_rewards(rewards, group_ids, weights)
    if weights is None:
        weights = [1.0] * len(rewards)
    check_flag("leave_one_out", leave_one_out)
    if whitened is not None:
        check_choice("whitened", whitened, Whitened)
    batch = checked(batch, stacked=True)
    check_whole_step("gdpo", batch)
    if rollout_ids is None:
        rollout_ids = batch.rollout_ids
    options: dict[str, Any] = {
        "among": among,
        "rollout_ids": rollout_ids,
        "epsilon": epsilon,
        "parallel": parallel,
    }
    stacked = jnp.stack([jnp.asarray(reward, jnp.float32) for reward in rewards])
    lacks_one = jnp.isnan(stacked).any(0)
    stacked = jnp.where(lacks_one, jnp.nan, stacked)
    estimator = rloo if leave_one_out else grpo
    scaled = [
        weight * estimator(reward, group_ids, scale_by_std=True, **options)
        for weight, reward in zip(weights, stacked, strict=True)
    ]
    total = sum(scaled[1:], start=scaled[0])
    if whitened == "samples":
        # a NaN would be no reward: infinity makes all NaN
        totals = jnp.where(
            jnp.isnan(stacked[0]), jnp.nan, jnp.where(jnp.isnan(total), jnp.inf, total)
        )
        total = grpo(totals, jnp.where(group_ids >= 0, 0, -1), **options)
    advantages = spread(total, batch, parallel=parallel)
    if whitened != "tokens":
        return advantages
    mask, counted = counted_tokens(stacked[0], group_ids, among, batch, parallel)
    return whiten(advantages, mask, among=counted, parallel=parallel)


def _check_rewards(rewards: Sequence[Any], group_ids: Any, weights: Any) -> None:
    """Raises unless there is a list of arrays `[R, S]`, and a number for each."""
    listed = isinstance(rewards, (list, tuple))
    got = "no reward" if listed else type(rewards).__name__
    check(
        "rewards", got, listed and len(rewards) > 0, "a list of arrays [R, S], one for each reward"
    )
    arrays = {f"rewards[{k}]": reward for k, reward in enumerate(rewards)}
    check_alike({**arrays, "group_ids": group_ids})
    if weights is None:
        return
    if not isinstance(weights, Sequence):
        raise TypeError(
            f"weights: got {type(weights).__name__}, expected a number for each reward, or None"
        )
    check(
        "weights",
        f"{len(weights)} numbers",
        len(weights) == len(rewards),
        f"{len(rewards)}, one for each reward",
    )
    for k, weight in enumerate(weights):
        check_number(f"weights[{k}]", weight)


def standardize(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    mean: Level | None = "step",
    std: Level | None = "step",
    leave_one_out: bool = False,
    unbiased: bool = True,
    epsilon: Coefficient = 1e-5,
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """A_i = (r_i - mean) / (std + epsilon), where mean and std are each taken over the step or over
    i's group.

    The deviation is about the chosen mean: std^2 = sum over j of (r_j - mean_j)^2 / (n - 1), where
    j runs over the deviation's level, and mean_j is the mean that centres j, or 0 without one.

    Args:
      mean: the level of the mean, or None to subtract none. A level without samples `among` gives
        0.
      std: the level of the deviation, or None to divide by nothing.
      leave_one_out: use the mean of the other samples of the level; a sample without others has
        advantage 0.
      unbiased: divide the sum of squares by n - 1 rather than n; a group of one then has deviation
        1.
      others: see `grpo`, also for returns and errors.

    Example:
      >>> rewards, ids = jnp.array([[2.0, 0.0, 9.0, 7.0]]), jnp.array([[7, 7, 8, 8]])
      >>> standardize(rewards, ids, mean="group", std="step", unbiased=False).round(3)
      Array([[ 1., -1.,  1., -1.]], dtype=float32)

    AReaL's `NormConfig`, whose "batch" is the step here; only AReaL ships it.
    https://arxiv.org/abs/2505.24298
    """
    for name, level in {"mean": mean, "std": std}.items():
        if level is not None:
            check_choice(name, level, Level)
    options: dict[str, Any] = {
        "mean": mean,
        "std": std,
        "leave_one_out": leave_one_out,
        "unbiased": unbiased,
    }
    samples = SampleArrays(rewards, group_ids, among, rollout_ids)
    return by_group("standardize", _standardize, parallel, samples, epsilon=epsilon, **options)


def _standardize(
    groups: Groups,
    *,
    mean: Level | None,
    std: Level | None,
    leave_one_out: bool,
    unbiased: bool,
    epsilon: jax.Array,
) -> jax.Array:
    levels = {"group": groups, "step": groups.whole()}
    centred = groups.rewards
    if mean is not None:
        mean_level = levels[mean]
        centred = jnp.where(mean_level.count > 0, groups.rewards - mean_level.mean, 0)
        if leave_one_out:
            centred = mean_level.but_self(centred)
    if std is None:
        return centred
    std_level = levels[std]
    deviation = std_level.deviation(centred, less=int(unbiased))
    if unbiased:
        deviation = jnp.where(std_level.count > 1, deviation, 1)
    scaled = centred / scale_of(deviation, epsilon)
    return jnp.where(std_level.count > 0, scaled, 0)
