"""Advantages that look along a sequence: discounted returns, GAE and estimators that build on them.

All of them scan backwards over each sequence wherever its tokens lie: packed in a row with others, cut over context
shards, in any context layout. Only a few numbers for each row cross the network.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.by_group import Singletons
from jaxppo.advantages.groups import dr_grpo
from jaxppo.advantages.token_statistics import (
    Parallel,
    check_segments,
    check_tokens,
    rewarded_tokens,
    spread,
    whiten,
    whiten_samples,
)
from jaxppo.base.arrays import (
    Coefficient,
    check,
    check_alike,
    check_choice,
    check_flag,
    check_number,
    is_number,
    masked,
    sound,
    spec_of,
    unless_mask,
)
from jaxppo.base.stacked import check_whole_step, of_rows
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, scan_shard, shard_call, shift_shard

Masked = Literal["skip", "discount"]


def token_rewards(
    rewards: Float[Array, "*K R S"],
    batch: RolloutBatch,
    *,
    kl: Float[Array, "*K R T"] | None = None,
    kl_coef: Coefficient | None = None,
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """Puts each sequence's reward on its last response token, minus a KL penalty on all: r_t = [t = last] R - c kl_t.

    The last token is found by `batch.positions`, so it may lie on any context shard, in any layout.

    Args:
      rewards: `f32[R, S]`, one per sequence. A sequence without a reward, NaN, has NaN on its last token: give it one,
        or mask it.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      kl: `f32[R, T]`, the estimated KL to the reference at each token (see `kl_divergence`).
      kl_coef: c, a number or a traced scalar; given with `kl`, and only then.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0; a sequence with no response token gets no reward.

    Raises:
      ValueError: shapes that differ, rows in another context layout than the mesh's.

    Example:
      >>> ids, mask = jnp.array([[1, 1, 1, 2]]), jnp.array([[1.0, 1.0, 0.0, 0.0]])
      >>> batch = RolloutBatch(ids, ids, ids, jnp.array([[0, 1, 2, 0]]), mask, jnp.array([[0, 1]]))
      >>> token_rewards(jnp.array([[5.0, 7.0]]), batch)
      Array([[0., 5., 0., 0.]], dtype=float32)
    """
    batch = check_tokens(batch, kl=kl)
    kl_coef = _kl_coef(kl, kl_coef)
    check_segments(batch, rewards=rewards)
    args = {"rewards": rewards, "batch": batch, "kl": kl, "kl_coef": jnp.asarray(kl_coef, jnp.float32)}

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        of = batch.specs(p)
        return [spec_of(p.rows_spec, rewards), of, of.loss_mask, P()], of.loss_mask

    found: Float[Array, "*K R T"] = shard_call("token_rewards", _token_rewards, parallel, args, specs)
    return found


@of_rows
def _token_rewards(
    axes: ShardAxes, rewards: jax.Array, batch: RolloutBatch, kl: jax.Array | None, kl_coef: jax.Array
) -> jax.Array:
    segments, mask = batch.segments(axes), batch.loss_mask
    result = jnp.where(_is_last(segments, batch, mask > 0), segments.spread(rewards), 0).astype(jnp.float32)
    return lax.stop_gradient(result if kl is None else result - kl_coef * masked(kl, mask))


def _is_last(segments: Segments, batch: RolloutBatch, counts: jax.Array) -> jax.Array:
    """The last token of each sequence that counts."""
    positions = batch.positions.astype(jnp.float32)
    last = segments.spread(segments.max(positions, counts.astype(jnp.float32)))
    return counts & (positions == last)


def discounted_returns(
    rewards: Float[Array, "*K R T"],
    batch: RolloutBatch,
    *,
    gamma: float = 1.0,
    masked: Masked = "skip",
    mask: Float[Array, "*K R T"] | None = None,
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """The discounted sum of future rewards: G_t = r_t + gamma * G_(t+1), within each sequence.

    Args:
      rewards: `f32[R, T]`, see `token_rewards`; anything where the mask is 0.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      gamma: the discount.
      masked: how a masked token within a response (a tool's output) enters the returns before it: "skip" it, as if it
        were not there (verl), or "discount" over it as over any other token (slime).
      mask: `[R, T]`, 1 where a token counts; the loss mask by default.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ, an unknown `masked`, gamma outside [0, 1], rows in another context layout than the
        mesh's.

    Example:
      >>> ids, one = jnp.array([[1, 1, 2]]), jnp.ones((1, 3))
      >>> batch = RolloutBatch(ids, ids, ids, ids, one, jnp.array([[0, 1]]))
      >>> discounted_returns(one, batch, gamma=0.5)
      Array([[1.5, 1. , 1. ]], dtype=float32)
    """
    check_choice("masked", masked, Masked)
    _check_unit(gamma=gamma)
    batch = check_tokens(batch, {"rewards": rewards}, mask=mask)
    args = {"rewards": rewards, "mask": batch.loss_mask if mask is None else mask, "batch": batch}
    static = (gamma, gamma if masked == "discount" else 1.0)
    found: Float[Array, "*K R T"] = shard_call(
        "discounted_returns",
        _returns,
        parallel,
        args,
        lambda p: ([*[batch.specs(p).loss_mask] * 2, batch.specs(p)], batch.specs(p).loss_mask),
        static,
    )
    return found


@of_rows
def _returns(
    axes: ShardAxes, static: tuple[float, float], rewards: jax.Array, mask: jax.Array, batch: RolloutBatch
) -> jax.Array:
    gamma, through = static
    counts = mask.astype(jnp.float32) > 0
    a = jnp.where(counts, gamma, through).astype(jnp.float32)
    b = jnp.where(counts, rewards.astype(jnp.float32), 0)
    return lax.stop_gradient(jnp.where(counts, _scan(axes, batch, a, b), 0) + unless_mask(mask))


def _scan(axes: ShardAxes, batch: RolloutBatch, a: jax.Array, b: jax.Array) -> jax.Array:
    """y_t = a_t * y_(t+1) + b_t within each sequence."""
    batch.check_layout(axes)
    return scan_shard(axes, a, b, True, batch.segment_ids, batch.num_segments)


def gae(
    rewards: Float[Array, "*K R T"],
    values: Float[Array, "*K R T"],
    batch: RolloutBatch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_lam: float | None = None,
    length_alpha: float | None = None,
    last_values: Float[Array, "*K R S"] | None = None,
    mask: Float[Array, "*K R T"] | None = None,
    parallel: Parallel = None,
) -> tuple[Float[Array, "*K R T"], Float[Array, "*K R T"]]:
    """Generalised advantage estimation: A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t.

    t + 1 is the next token of the sequence with mask 1: tokens masked out within a response (a tool's output) are
    stepped over, and after the last one A is 0, and V is 0 or the given one. A mask of all response tokens ignores such
    holes (slime).

    Args:
      rewards: `f32[R, T]`, see `token_rewards`; anything where the mask is 0.
      values: `f32[R, T]`, the critic's, laid out as `rewards`.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      gamma: the discount.
      lam: lambda of the advantages.
      value_lam: lambda of the returns, if the critic learns with another one (VC-PPO); `lam` if None.
      length_alpha: alpha of a length-dependent lambda of the advantages (VAPO), in place of `lam`: 1 - 1 / (alpha n)
        for a sequence of n tokens that count, at least 0; a published value is 0.05. It does not change the returns.
      last_values: `f32[R, S]`, V after each sequence's last token, which a response that ended by itself does not have:
        the critic's value where a response was cut at its length limit, 0 elsewhere, see `last_values`. By default 0.
      mask: `[R, T]`, 1 where a token counts; the loss mask by default.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      (advantages, returns), `f32[R, T]` each, 0 where the mask is 0; returns = A(value_lam) + V. Not whitened.

    Raises:
      ValueError: shapes that differ; gamma or a lambda outside [0, 1]; rows in another context layout than the mesh's.

    Example:
      >>> ids, one = jnp.array([[1, 1, 1]]), jnp.ones((1, 3))
      >>> batch = RolloutBatch(ids, ids, ids, ids, one, jnp.array([[0]]))
      >>> advantages, returns = gae(one, 0.5 * one, batch, gamma=1.0, lam=1.0)
      >>> advantages, returns
      (Array([[2.5, 1.5, 0.5]], dtype=float32), Array([[3., 2., 1.]], dtype=float32))

    Schulman et al. 2015, https://arxiv.org/abs/1506.02438; Yuan et al. 2025, VC-PPO, https://arxiv.org/abs/2503.01491;
    `length_alpha`: Yue et al. 2025, VAPO, https://arxiv.org/abs/2504.05118, shipped by NeMo-RL alone
    """
    value_lam = lam if value_lam is None else value_lam
    _check_unit(gamma=gamma, lam=lam, value_lam=value_lam)
    if length_alpha is not None:
        good = is_number(length_alpha) and length_alpha > 0
        check("length_alpha", repr(length_alpha), good, "a finite number above 0, or None")
    batch = check_tokens(batch, {"rewards": rewards, "values": values}, mask=mask)
    args = {"rewards": rewards, "values": values, "mask": batch.loss_mask if mask is None else mask, "batch": batch}
    if last_values is not None:
        check_segments(batch, last_values=last_values)
    args["last_values"] = last_values

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        of = batch.specs(p)
        return [*[of.loss_mask] * 3, of, of.sample_ids], of.loss_mask

    static = (gamma, lam, value_lam, length_alpha)
    found: tuple[jax.Array, jax.Array] = shard_call("gae", _gae, parallel, args, specs, static)
    return found


@of_rows
def _gae(
    axes: ShardAxes,
    static: tuple[float, float, float, float | None],
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    batch: RolloutBatch,
    last_values: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    gamma, lam, value_lam, length_alpha = static
    segments = batch.segments(axes)
    counts = mask.astype(jnp.float32) > 0
    rewards, values = (jnp.where(counts, x.astype(jnp.float32), 0) + unless_mask(mask) for x in (rewards, values))
    nearest = _scan(axes, batch, jnp.where(counts, 0.0, 1.0), values)
    next_value = shift_shard(axes, nearest, 1, 0, batch.segment_ids, batch.num_segments)
    if last_values is not None:
        after = segments.spread(last_values.astype(jnp.float32))
        next_value = jnp.where(_is_last(segments, batch, counts), after, next_value)
    delta = jnp.where(counts, rewards + gamma * next_value - values, 0)

    def advantages(lam: float | jax.Array) -> jax.Array:
        a = jnp.where(counts, gamma * lam, 1.0).astype(jnp.float32)
        return jnp.where(counts, _scan(axes, batch, a, delta), 0)

    if length_alpha is None:
        policy = advantages(lam)
        value = policy if value_lam == lam else advantages(value_lam)
    else:
        length = segments.spread(segments.sum(counts.astype(jnp.float32)))
        policy, value = advantages(1 - 1 / jnp.maximum(length_alpha * length, 1)), advantages(value_lam)
    return lax.stop_gradient((policy, value + values))


def reinforce_plus_plus(
    rewards: Float[Array, "*K R T"],
    batch: RolloutBatch,
    *,
    gamma: float = 1.0,
    masked: Masked = "skip",
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """REINFORCE++: discounted returns, whitened over all tokens of the step.

    Args:
      rewards: `f32[R, T]`, with the KL penalty in them: see `token_rewards`.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      gamma: the discount.
      masked: see `discounted_returns`, which gives the returns alone.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0.

    Raises:
      ValueError: as `discounted_returns` and `whiten`; one micro-batch of several.

    Example:
      >>> ids, one = jnp.array([[1, 2]]), jnp.ones((1, 2))
      >>> batch = RolloutBatch(ids, ids, ids, ids, one, jnp.array([[0, 1]]))
      >>> reinforce_plus_plus(jnp.array([[0.0, 1.0]]), batch).round(3)
      Array([[-0.707,  0.707]], dtype=float32)

    Hu 2025, REINFORCE++, https://arxiv.org/abs/2501.03262
    """
    returns = discounted_returns(rewards, batch, gamma=gamma, masked=masked, parallel=parallel)
    check_whole_step("reinforce_plus_plus", batch)
    return whiten(returns, batch.loss_mask, parallel=parallel)


def reinforce_plus_plus_baseline(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    batch: RolloutBatch,
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    kl: Float[Array, "*K R T"] | None = None,
    kl_coef: Coefficient | None = None,
    whitened: bool = True,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """REINFORCE++ with the group's mean as baseline: A_t = whiten(r_i - mean_g - c * kl_t).

    Args:
      rewards: `f32[R, S]`, one per sequence; NaN for none.
      group_ids: `i32[R, S]`, equal for the samples of one prompt, -1 where there is no sample.
      among, rollout_ids: see `grpo`; the tokens of samples outside of `among` are whitened by those of the others.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      kl: `f32[R, T]`, the estimated KL to the reference at each token.
      kl_coef: c, a number or a traced scalar; given with `kl`, and only then.
      whitened: whiten over all tokens of the step.
      singletons: the centred reward in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0.

    Raises:
      ValueError: as `grpo` and `spread`; kl of another shape; one micro-batch of several.

    Example:
      >>> ids, one = jnp.array([[1, 2]]), jnp.ones((1, 2))
      >>> batch = RolloutBatch(ids, ids, ids, ids, one, jnp.array([[0, 1]]))
      >>> reinforce_plus_plus_baseline(jnp.array([[3.0, 1.0]]), jnp.array([[0, 0]]), batch).round(3)
      Array([[ 0.707, -0.707]], dtype=float32)

    Hu 2025, REINFORCE++, https://arxiv.org/abs/2501.03262
    """
    batch = check_tokens(batch, kl=kl)
    kl_coef = _kl_coef(kl, kl_coef)
    check_flag("whitened", whitened)
    check_whole_step("reinforce_plus_plus_baseline", batch)
    which: dict[str, Any] = {"among": among, "rollout_ids": rollout_ids}
    centred = dr_grpo(rewards, group_ids, singletons=singletons, parallel=parallel, **which)
    advantages, mask = spread(centred, batch, parallel=parallel), rewarded_tokens(rewards, group_ids, batch, parallel)
    if kl is not None:
        advantages = lax.stop_gradient(advantages - kl_coef * masked(kl, mask))
    return whiten_samples(advantages, mask, among, batch, parallel) if whitened else advantages


def on_policy_distillation(
    advantages: Float[Array, "*K R T"],
    log_probs: Float[Array, "*K R T"],
    teacher_log_probs: Float[Array, "*K R T"],
    loss_mask: Float[Array, "*K R T"],
    *,
    coef: float | jax.Array = 1.0,
) -> Float[Array, "*K R T"]:
    """Pulls the policy to a teacher on the policy's own samples: A'_t = A_t - coef * (log_prob_t - teacher_log_prob_t).

    The difference of log-probs at a sampled token is an unbiased estimate of KL(policy | teacher).

    Args:
      advantages: `f32[R, T]`, or `[K, R, T]` of a stacked step, like all four; zeros for distillation alone.
      log_probs: `f32[R, T]`, under the policy that sampled.
      teacher_log_probs: `f32[R, T]`, of the same tokens under the teacher.
      loss_mask: `f32[R, T]`.
      coef: the weight of the teacher.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> on_policy_distillation(jnp.array([[1.0]]), jnp.array([[-2.0]]), jnp.array([[-1.5]]), jnp.ones((1, 1)))
      Array([[1.5]], dtype=float32)

    Agarwal et al. 2023, https://arxiv.org/abs/2306.13649; Lu 2025, https://thinkingmachines.ai/blog/on-policy-distillation/
    """
    arrays = {"advantages": advantages, "log_probs": log_probs, "teacher_log_probs": teacher_log_probs}
    check_alike({**arrays, "loss_mask": loss_mask})
    if loss_mask.ndim not in (2, 3):
        raise ValueError(f"loss_mask: got shape {loss_mask.shape}, expected [R, T], or [K, R, T] of a stacked step")
    check_number("coef", coef)
    before, own, theirs = (masked(sound(what, x), loss_mask.astype(jnp.float32)) for what, x in arrays.items())
    return lax.stop_gradient(before - coef * (own - theirs) + unless_mask(loss_mask))


def _kl_coef(kl: jax.Array | None, kl_coef: Coefficient | None) -> Coefficient:
    """The coefficient, 0 without kl. Raises where one of the two is given alone, since it would then do nothing."""
    if kl is None and kl_coef is None:
        return 0.0
    if kl is None or kl_coef is None:
        missing, given = ("kl", f"kl_coef={kl_coef}") if kl is None else ("kl_coef", "kl")
        raise ValueError(f"{missing}: got None with {given}, expected both, or neither for no penalty")
    check_number("kl_coef", kl_coef)
    return kl_coef


def _check_unit(**values: float) -> None:
    for name, value in values.items():
        check(name, repr(value), is_number(value) and 0 <= value <= 1, "a number in [0, 1]")
