"""Per-sample advantages that compare the samples of one prompt, those with equal `group_ids`; and
their pass rates.

A group may have any size and lie on any data shards, and in any of the stacked micro-batches of a
step, `[K, R, S]`: a few numbers per sample are gathered over the data axes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.by_group import Groups, SampleArrays, Singletons, by_group, scale_of
from jaxppo.advantages.token_statistics import Parallel
from jaxppo.base.arrays import Coefficient, as_number, check_alike, check_array
from jaxppo.base.metrics import Metric, Metrics


def grpo(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    scale_by_std: bool = True,
    leave_one_out: bool = False,
    epsilon: Coefficient = 1e-6,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Group-relative advantages: A_i = (r_i - mean_g) / (std_g + epsilon), over the n samples of
    i's own group.

    Args:
      rewards: `f32[R, S]`, one per sample, or `[K, R, S]` of a stacked step; anything where there
        is no sample. A sample without a reward has NaN: it is in no statistic, and its advantage is
        0.
      group_ids: `i32` of that shape, equal for the samples of one prompt, -1 where there is no
        sample.
      among: `bool` of that shape, the samples that make the statistics, by default all; the others
        are compared with them.
      rollout_ids: `i32` of that shape, equal for the samples that were cut from one rollout. A
        rollout counts once, and its parts get its advantage. By default each sample is a rollout.
        `**batch.groups` gives both ids of a batch.
      scale_by_std: divide by the group's deviation, over n - 1; without it this is `dr_grpo`.
      leave_one_out: the mean of the others in place of mean_g, but the deviation of all: A_i times
        n / (n - 1), Tunix's "grpo-loo". `rloo(scale_by_std=True)` leaves the sample out of the
        deviation too.
      epsilon: added to the deviation, at least 0. A deviation of 0 divides by 1.
      singletons: the advantage where fewer than two samples make a group's statistics: "zero", or a
        sample's own "reward" over 1 + epsilon (verl).
      parallel: the mesh; rows sharded over data.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample or no reward; `spread` puts them on
      tokens. Under `jit`, NaN in place of an error that cannot be raised there.

    Raises:
      ValueError, TypeError: shapes that differ, ids that are no integers, an unknown `singletons`,
        a negative epsilon; a call inside `accumulate_gradients`; parts of a rollout whose rewards,
        groups or `among` differ: each part has the reward of the whole.

    Example:
      >>> grpo(jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[7, 7, 8]])).round(3)
      Array([[ 0.707, -0.707,  0.   ]], dtype=float32)

    Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300
    """
    samples = SampleArrays(rewards, group_ids, among, rollout_ids)
    options: dict[str, Any] = {
        "scale_by_std": scale_by_std,
        "leave_one_out": leave_one_out,
        "singletons": singletons,
    }
    return by_group("grpo", _grpo, parallel, samples, epsilon=epsilon, **options)


def _grpo(
    groups: Groups,
    *,
    scale_by_std: bool,
    leave_one_out: bool,
    epsilon: jax.Array,
    singletons: Singletons,
) -> jax.Array:
    centred = groups.rewards - groups.mean
    scale = scale_of(groups.deviation(centred), epsilon)
    if leave_one_out:
        centred = groups.but_self(centred)
    if not scale_by_std:
        return groups.unless_alone(centred, singletons)
    scaled = centred / scale
    return groups.unless_alone(scaled, singletons, groups.rewards / (1 + epsilon))


def dr_grpo(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Group-relative advantages without the scale: A_i = r_i - mean_g.

    Arguments, returns and errors: see `grpo`.

    Example:
      >>> dr_grpo(jnp.array([[1.0, 0.0, 0.5]]), jnp.array([[7, 7, 8]]))
      Array([[ 0.5, -0.5,  0. ]], dtype=float32)

    Liu et al. 2025, Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783
    """
    samples = SampleArrays(rewards, group_ids, among, rollout_ids)
    options: dict[str, Any] = {
        "scale_by_std": False,
        "leave_one_out": False,
        "singletons": singletons,
    }
    return by_group("dr_grpo", _grpo, parallel, samples, epsilon=0.0, **options)


def rloo(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    scale_by_std: bool = False,
    epsilon: Coefficient = 1e-6,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Leave-one-out advantages: A_i = r_i - mean of the others of the group = n / (n - 1) * (r_i -
    mean_g).

    Args:
      scale_by_std: A_i / (std + epsilon), with the deviation of the others (over n - 2). Where the
        others are a single sample or equal, A_i is not scaled (NeMo-RL).
      others: see `grpo`, also for returns and errors.

    Example:
      >>> rloo(jnp.array([[1.0, 0.0, 0.0]]), jnp.array([[7, 7, 7]]), scale_by_std=True).round(3)
      Array([[ 1.   , -0.707, -0.707]], dtype=float32)

    Ahmadian et al. 2024, Back to Basics, https://arxiv.org/abs/2402.14740; the scale: NeMo-RL
    alone.
    """
    samples = SampleArrays(rewards, group_ids, among, rollout_ids)
    return by_group(
        "rloo",
        _rloo,
        parallel,
        samples,
        scale_by_std=scale_by_std,
        epsilon=epsilon,
        singletons=singletons,
    )


def _rloo(
    groups: Groups, *, scale_by_std: bool, epsilon: jax.Array, singletons: Singletons
) -> jax.Array:
    if not scale_by_std:
        from_others = groups.but_self(groups.rewards - groups.mean)
        return groups.unless_alone(from_others, singletons)
    others = groups.others()
    variance = others.squares / jnp.maximum(others.size - 1, 1)
    scale = scale_of(jnp.sqrt(variance), epsilon)
    return groups.unless_alone((groups.rewards - others.mean) / scale, singletons)


def opo(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    lengths: Float[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Advantages over the length-weighted baseline: A_i = r_i - sum_g(len_j * r_j) / sum_g(len_j).

    Args:
      lengths: numbers of the shape of rewards, at least 0: response tokens of each sample,
        `segment_sum(loss_mask,
        ...)`. The length of a rollout is the sum of its parts'.
      others: see `grpo`, also for errors.

    Returns:
      As `grpo`; 0 also in groups of several samples without a loss token.

    Example:
      >>> opo(jnp.array([[1.0, 0.0]]), jnp.array([[7, 7]]), jnp.array([[1.0, 3.0]]))
      Array([[ 0.75, -0.25]], dtype=float32)

    Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, https://arxiv.org/abs/2505.23585
    """
    check_array("lengths", lengths)
    samples = SampleArrays(rewards, group_ids, among, rollout_ids)
    return by_group("opo", _opo, parallel, samples, lengths=lengths, singletons=singletons)


def _opo(groups: Groups, *, lengths: jax.Array, singletons: Singletons) -> jax.Array:
    lengths = jnp.where(lengths >= 0, lengths, jnp.nan)
    centred = groups.rewards - groups.mean_of(groups.rewards, lengths)
    centred = jnp.where(groups.sum(lengths) == 0, 0, centred)
    return groups.unless_alone(centred, singletons)


def pass_at_k(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    scale_by_std: bool = True,
    epsilon: Coefficient = 1e-6,
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Only a group's best sample has an advantage: A_best = (r_best - r_second) / (std_g +
    epsilon), 0 for all others.

    Arguments and errors: see `grpo`.

    Returns:
      As `grpo`; 0 also where two samples share the best reward, in groups of one, and outside of
      `among`.

    Example:
      >>> pass_at_k(jnp.array([[1.0, 0.0, 0.25]]), jnp.array([[7, 7, 7]]), scale_by_std=False)
      Array([[0.75, 0.  , 0.  ]], dtype=float32)

    Tang et al. 2025, Optimizing Language Models for Inference Time Objectives,
    https://arxiv.org/abs/2503.19595
    """
    samples = SampleArrays(rewards, group_ids, among, rollout_ids)
    return by_group(
        "pass_at_k", _pass_at_k, parallel, samples, scale_by_std=scale_by_std, epsilon=epsilon
    )


def _pass_at_k(groups: Groups, *, scale_by_std: bool, epsilon: jax.Array) -> jax.Array:
    best = groups.max(groups.rewards)
    is_best = groups.counts & (groups.rewards == best)
    second = groups.max(jnp.where(is_best, -jnp.inf, groups.rewards))
    one_is_best = groups.sum(is_best.astype(jnp.float32)) == 1
    wins = one_is_best & (groups.count > 1) & is_best
    # where none wins, the second best may be -inf
    gap = jnp.where(wins, best - jnp.where(wins, second, best), 0)
    if not scale_by_std:
        return gap
    deviation = groups.deviation(groups.rewards - groups.mean)
    return gap / scale_of(deviation, epsilon)


def gpg(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    f_norm: Coefficient = 1.0,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """Advantages scaled up to compensate for rewards of 0: A_i = (N / #{r != 0}) * (r_i - mean_g) /
    f_norm.

    N and the count of rewards that are not 0 are over the samples of the whole batch, or stacked
    step.

    Args:
      f_norm: the paper's normaliser, above 0.
      others: see `grpo`, also for returns and errors.

    Example:
      >>> gpg(jnp.array([[1.0, 0.0]]), jnp.array([[7, 7]]))
      Array([[ 1., -1.]], dtype=float32)

    Chu et al. 2025, GPG, https://arxiv.org/abs/2504.02546
    """
    norm = as_number("f_norm", f_norm, above=0)
    samples = SampleArrays(rewards, group_ids, among, rollout_ids)
    return by_group("gpg", _gpg, parallel, samples, singletons=singletons) / norm


def _gpg(groups: Groups, *, singletons: Singletons) -> jax.Array:
    step = groups.whole()
    not_zero = step.sum((groups.rewards != 0).astype(jnp.float32))
    alpha = step.count / jnp.maximum(not_zero, 1)
    return alpha * groups.unless_alone(groups.rewards - groups.mean, singletons)


def remax(
    rewards: Float[Array, "*K R S"],
    baselines: Float[Array, "*K R S"],
    sample_ids: Int[Array, "*K R S"],
) -> Float[Array, "*K R S"]:
    """Advantages over the reward of the greedy response to the same prompt: A_i = r_i - b_i.

    Args:
      rewards: see `grpo`.
      baselines: `f32` of that shape, the greedy response's reward for each sample's prompt.
      sample_ids: `i32` of that shape, -1 where there is no sample. Other shapes are a ValueError.

    Returns:
      `f32`, the shape of rewards, 0 where there is no sample.

    Example:
      >>> remax(jnp.array([[1.0, 9.0]]), jnp.array([[0.25, 0.0]]), jnp.array([[3, -1]]))
      Array([[0.75, 0.  ]], dtype=float32)

    Li et al. 2023, ReMax, https://arxiv.org/abs/2310.10505
    """
    check_alike({"rewards": rewards, "baselines": baselines, "sample_ids": sample_ids})
    rewarded = (sample_ids >= 0) & ~jnp.isnan(rewards)
    advantages = jnp.where(rewarded, rewards - baselines, 0)
    return lax.stop_gradient(advantages.astype(jnp.float32))


def pass_rates(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    at_least: Coefficient = 1.0,
    parallel: Parallel = None,
) -> Metrics:
    """Metrics of how many samples of each group have at least the reward `at_least`, over the whole
    step.

    If all samples of a group have the same reward, they have no group advantage.

    Args:
      at_least: the smallest reward that passes.
      others: see `grpo`, also for errors.

    Returns:
      Metrics. Means over groups: `pass_rate`, the share of a group's samples that pass; `pass_all`,
      `pass_none` and `pass_some`, whether all, none or some of them do; `equal_rewards`, whether
      all rewards of a group are equal, as that of a single sample is. Over samples: `no_reward`,
      the share without a reward.

    Example:
      >>> found = advantages.pass_rates(jnp.array([[1.0, 0.0, 1.0]]), jnp.array([[7, 7, 8]]))
      >>> {name: float(x) for name, x in finalize_metrics(found).items() if name != "no_reward"}
      {'equal_rewards': 0.5, 'pass_all': 0.5, 'pass_none': 0.0, 'pass_rate': 0.75, 'pass_some': 0.5}
    """
    samples = SampleArrays(rewards, group_ids, among, rollout_ids)
    return by_group(
        "pass_rates",
        _pass_rates,
        parallel,
        samples,
        out=P(),
        at_least=as_number("at_least", at_least),
    )


def _pass_rates(groups: Groups, *, at_least: jax.Array) -> Metrics:
    def group_counts(x: jax.Array) -> jax.Array:
        return groups.by_id.sum((x & groups.counts).astype(jnp.float32))

    count = group_counts(groups.counts)
    passed = group_counts(groups.rewards >= at_least)
    largest = groups.by_id.max(jnp.where(groups.counts, groups.rewards, -jnp.inf))
    smallest = -groups.by_id.max(jnp.where(groups.counts, -groups.rewards, -jnp.inf))
    rates = {
        "pass_rate": passed / jnp.maximum(count, 1),
        "pass_all": (passed == count).astype(jnp.float32),
        "pass_none": (passed == 0).astype(jnp.float32),
        "pass_some": ((passed > 0) & (passed < count)).astype(jnp.float32),
        "equal_rewards": (largest == smallest).astype(jnp.float32),
    }
    known = ~groups.broken & ~jnp.isnan(at_least)

    def mean(x: jax.Array, weights: jax.Array) -> Metric:
        return Metric(jnp.where(known, x.sum(), jnp.nan), weights.sum())

    there = groups.there.astype(jnp.float32)
    is_group = (count > 0).astype(jnp.float32)
    metrics: Metrics = {name: mean(rate * is_group, is_group) for name, rate in rates.items()}
    metrics["no_reward"] = mean(jnp.where(groups.rewarded, 0, there), there)
    return metrics
