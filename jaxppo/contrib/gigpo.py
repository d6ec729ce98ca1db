"""Advantages of the steps of an agent: of their trajectory, and of the step among those from the
same state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.by_group import Singletons
from jaxppo.advantages.groups import grpo
from jaxppo.advantages.token_statistics import Parallel
from jaxppo.base.arrays import Coefficient, check, check_alike, check_ids, check_number, is_nan
from jaxppo.batch.host import as_integers, as_list, finite_number, in_f32, scalar, shown

__all__ = ["gigpo", "state_groups", "step_returns"]


def gigpo(
    rewards: Float[Array, "*K R S"],
    returns: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    state_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    step_coef: Coefficient = 1.0,
    scale_by_std: bool = False,
    epsilon: Coefficient = 1e-6,
    singletons: Singletons = "reward",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """GiGPO of steps that are samples: A = grpo(rewards, group_ids) + step_coef * grpo(returns,
    state_ids).

    A step that is alone in its state gets nothing from the second part. With `rollout_ids` a
    trajectory counts once in the baseline of the first part; without, each of its steps does, which
    is verl-agent's default.

    Args:
      rewards: `f32[R, S]`, of the whole trajectory, equal for its steps; or `[K, R, S]` of a
        stacked step, like all.
      returns: of the step itself, see `step_returns`.
      state_ids: equal for the steps that were taken from one state of one prompt, -1 for a step
        that is compared with none; see `state_groups`.
      step_coef: the weight of the second part.
      singletons: what a sample that is alone in its prompt's group gets from the first part, see
        `grpo`.
      others: of both parts; see `grpo`, also for returns and errors.

    Example:
      >>> prompts, states = jnp.array([[7, 7, 7, 7]]), jnp.array([[0, 1, 0, 2]])
      >>> rewards, returns = jnp.array([[1.0, 1.0, 0.0, 0.0]]), jnp.array([[0.95, 1.0, 0.0, 0.0]])
      >>> gigpo(rewards, returns, prompts, states).round(3)
      Array([[ 0.975,  0.5  , -0.975, -0.5  ]], dtype=float32)

    Feng et al. 2025, Group-in-group policy optimization, https://arxiv.org/abs/2505.10978
    """
    check_number("step_coef", step_coef)
    both: dict[str, Any] = {
        "scale_by_std": scale_by_std,
        "epsilon": epsilon,
        "among": among,
        "parallel": parallel,
    }
    whole = grpo(rewards, group_ids, rollout_ids=rollout_ids, singletons=singletons, **both)
    check_alike({"rewards": rewards, "returns": returns, "state_ids": state_ids})
    check_ids("state_ids", state_ids)
    return whole + jnp.float32(step_coef) * grpo(returns, state_ids, **both)


def state_groups(
    group_ids: Sequence[int], states: Sequence[Hashable | None]
) -> Int[np.ndarray, " n"]:
    """The `state_ids` of `gigpo`, on the host: one number for each state of each prompt.

    Equal states of different prompts are not compared: keys such as "step_3" would mix tasks.

    Args:
      group_ids: of each sample.
      states: a hashable key of the state in which each step was taken, such as the text of the
        observation; None for a step that is compared with none.

    Returns:
      `i32[n]`, in the order of the samples, -1 for None. `state_ids = ids[batch.sample_ids]` places
      them in a batch whose sample ids are their indices, -1 where `batch.sample_ids` is.

    Raises:
      TypeError, ValueError: lists of unequal lengths, ids that are not integers, a state that is
        not hashable, or is NaN, which equals nothing.

    Example:
      >>> state_groups([7, 7, 8, 7], ["a", "b", "a", "a"]).tolist()
      [0, 1, 2, 0]
    """
    groups = as_integers("group_ids", group_ids)
    keys = as_list("states", states)
    check(
        "states", len(keys), len(groups) == len(keys), f"{len(groups)}, one for each of group_ids"
    )
    numbers: dict[Hashable, int] = {}
    state_ids = np.full(len(keys), -1, np.int32)
    for i, state in enumerate(map(scalar, keys)):
        if state is None:
            continue
        check(f"states[{i}]", state, not is_nan(state), "a key that equals itself, or None")
        try:
            state_ids[i] = numbers.setdefault((int(groups[i]), state), len(numbers))
        except TypeError:  # a tuple of lists says only when it is hashed that it cannot be
            raise TypeError(
                f"states[{i}]: got {shown(state)}, expected a hashable key, or None"
            ) from None
    return state_ids


def step_returns(
    rewards: Sequence[float], rollout_ids: Sequence[int], *, gamma: float = 0.95
) -> Float[np.ndarray, " n"]:
    """The discounted sum of a step's reward and those after it in its trajectory, `f32[n]`, on the
    host.

    Args:
      rewards: of each step.
      rollout_ids: the trajectory of each step; its steps in their order, others may lie between
        them.
      gamma: the discount of a step, in [0, 1].

    Raises:
      TypeError, ValueError: lists of unequal lengths, ids that are not integers, rewards that are
        not finite numbers, a gamma outside [0, 1].

    Example:
      >>> step_returns([0.0, 5.0, 1.0], [3, 4, 3], gamma=0.5).tolist()
      [0.5, 5.0, 1.0]
    """
    steps = as_list("rewards", rewards)
    rollouts = as_integers("rollout_ids", rollout_ids)
    check(
        "rollout_ids",
        len(rollouts),
        len(steps) == len(rollouts),
        f"{len(steps)}, one for each of rewards",
    )
    numbers = [
        finite_number(f"rewards[{i}]", reward, "a finite number") for i, reward in enumerate(steps)
    ]
    gamma = finite_number("gamma", gamma, "a finite number of at least 0 and of at most 1")
    check_number("gamma", gamma, least=0, most=1)
    later: dict[int, float] = {}  # by trajectory
    returns = np.zeros(len(numbers), np.float64)
    for i in reversed(range(len(numbers))):
        rollout = int(rollouts[i])
        later[rollout] = numbers[i] + gamma * later.get(rollout, 0.0)
        returns[i] = later[rollout]
    return in_f32("rewards", returns)
