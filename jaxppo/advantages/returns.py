"""Advantages that look along a sequence: discounted returns, GAE, and what builds on them.

All of them scan backwards over each sequence wherever its tokens lie: packed in a row with others, cut over context
shards, in any context layout. What crosses the network is a few numbers a row.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxppo._sharding import Segments, ShardAxes, check_context_rows, scan_shard, shard_call, shift_shard
from jaxppo.advantages.groups import Singletons, dr_grpo
from jaxppo.advantages.tokens import Parallel, check_tokens, spread, whiten

Masked = Literal["skip", "discount"]


def token_rewards(
    rewards: Float[Array, "R S"],
    positions: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    loss_mask: Float[Array, "R T"],
    *,
    kl: Float[Array, "R T"] | None = None,
    kl_coef: float | jax.Array = 0.0,
    parallel: Parallel = None,
) -> Float[Array, "R T"]:
    """Sequence rewards on each sequence's last response token, less a KL penalty on all: r_t = [t = last] R - c kl_t.

    The last token is found by `positions`, so it may lie on any context shard, in any layout.

    Args:
      rewards: `f32[R, S]`, one a sequence.
      positions: `i32[R, T]`, the place of each token in its sequence.
      segment_ids: `i32[R, T]`, 0 for padding.
      loss_mask: `f32[R, T]`, 1 on response tokens.
      kl: `f32[R, T]`, the estimated KL to the reference at each token (see `kl_penalty`).
      kl_coef: c.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32[R, T]`, 0 where the mask is 0; a sequence with no response token gets no reward.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> ids, mask = jnp.array([[1, 1, 1, 2]]), jnp.array([[0.0, 1.0, 1.0, 1.0]])
      >>> token_rewards(jnp.array([[5.0, 7.0]]), jnp.array([[0, 1, 2, 0]]), ids, mask)
      Array([[0., 0., 5., 7.]], dtype=float32)
    """
    check_tokens("segment_ids", segment_ids=segment_ids, positions=positions, loss_mask=loss_mask, kl=kl)
    if rewards.ndim != 2 or rewards.shape[0] != segment_ids.shape[0]:
        raise ValueError(f"rewards: got shape {rewards.shape}, expected [R, S] with R = {segment_ids.shape[0]}")

    def per_shard(axes: ShardAxes, rewards, positions, segment_ids, loss_mask, kl, kl_coef):  # type: ignore[no-untyped-def]
        segments = Segments(segment_ids, rewards.shape[1], axes)
        last = segments.spread(segments.max(positions.astype(jnp.float32), loss_mask))
        is_last = (loss_mask > 0) & (positions == last)
        result = jnp.where(is_last, segments.spread(rewards), 0).astype(jnp.float32)
        return lax.stop_gradient(result if kl is None else result - kl_coef * jnp.where(loss_mask > 0, kl, 0))

    args: dict[str, Any] = {
        "rewards": rewards,
        "positions": positions,
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
    }
    args |= {"kl": kl, "kl_coef": jnp.asarray(kl_coef, jnp.float32)}
    return shard_call(
        "token_rewards",
        per_shard,
        parallel,
        args,
        lambda p: ([p.rows_spec, *[p.tokens_spec] * 4, jax.sharding.PartitionSpec()], p.tokens_spec),
    )


def discounted_returns(
    rewards: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    gamma: float = 1.0,
    masked: Masked = "skip",
    num_segments: int | None = None,
    parallel: Parallel = None,
) -> Float[Array, "R T"]:
    """The discounted sum of what follows: G_t = r_t + gamma * G_(t+1), within each sequence.

    Args:
      rewards: `f32[R, T]`, see `token_rewards`.
      mask: `[R, T]`, 1 where a token counts.
      segment_ids: `i32[R, T]`, 0 for padding.
      gamma: the discount.
      masked: what a masked token within a response (a tool's output) does to the return of those before it: "skip",
        as if it were not there (verl); "discount" it as any other (slime).
      num_segments: S, static; for the "zigzag_per_segment" layout only.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32[R, T]`, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ, an unknown `masked`, gamma outside [0, 1].

    Example:
      >>> one = jnp.ones((1, 3))
      >>> discounted_returns(one, one, jnp.array([[1, 1, 2]]), gamma=0.5)
      Array([[1.5, 1. , 1. ]], dtype=float32)
    """
    through = {"skip": 1.0, "discount": gamma}
    if masked not in through:
        raise ValueError(f"masked: got {masked!r}, expected one of {', '.join(through)}")
    _check_unit(gamma=gamma)
    check_tokens("rewards", rewards=rewards, mask=mask, segment_ids=segment_ids)
    check_context_rows(parallel, {"rewards": rewards}, segment_ids, num_segments, "discounted_returns")

    def per_shard(axes: ShardAxes, rewards: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
        keep = mask > 0
        a = jnp.where(keep, gamma, through[masked]).astype(jnp.float32)
        b = jnp.where(keep, rewards.astype(jnp.float32), 0)
        return lax.stop_gradient(jnp.where(keep, scan_shard(axes, a, b, True, segment_ids, num_segments), 0))

    args = {"rewards": rewards, "mask": mask, "segment_ids": segment_ids}
    return shard_call("discounted_returns", per_shard, parallel, args, lambda p: ([p.tokens_spec] * 3, p.tokens_spec))


def gae(
    rewards: Float[Array, "R T"],
    values: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_lam: float | None = None,
    num_segments: int | None = None,
    parallel: Parallel = None,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Generalised advantage estimation: A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t.

    t + 1 is the next token of the sequence with mask 1: tokens masked out within a response (a tool's output) are
    stepped over, and after the last one V and A are 0. A mask of all response tokens ignores such holes (slime).

    Args:
      rewards: `f32[R, T]`, see `token_rewards`.
      values: `f32[R, T]`, the critic's.
      mask: `[R, T]`, 1 where a token counts; rewards and values can be anything elsewhere.
      segment_ids: `i32[R, T]`, 0 for padding.
      gamma: the discount.
      lam: lambda of the advantages.
      value_lam: lambda of the returns, where the critic is to learn from another one (VC-PPO); `lam` if None.
      num_segments: S, static; for the "zigzag_per_segment" layout only.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      (advantages, returns), `f32[R, T]` each, 0 where the mask is 0; returns = A(value_lam) + V. Not whitened.

    Raises:
      ValueError: shapes that differ; gamma or a lambda outside [0, 1].

    Example:
      >>> one = jnp.ones((1, 3))
      >>> advantages, returns = gae(one, 0.5 * one, one, jnp.array([[1, 1, 1]]), gamma=1.0, lam=1.0)
      >>> advantages, returns
      (Array([[2.5, 1.5, 0.5]], dtype=float32), Array([[3., 2., 1.]], dtype=float32))

    Schulman et al. 2015, https://arxiv.org/abs/1506.02438; Yuan et al. 2025, VC-PPO, https://arxiv.org/abs/2503.01491
    """
    _check_unit(gamma=gamma, lam=lam, value_lam=lam if value_lam is None else value_lam)
    check_tokens("values", values=values, rewards=rewards, mask=mask, segment_ids=segment_ids)
    check_context_rows(parallel, {"rewards": rewards}, segment_ids, num_segments, "gae")

    def per_shard(axes: ShardAxes, rewards, values, mask, segment_ids):  # type: ignore[no-untyped-def]
        keep = mask > 0
        rewards, values = (jnp.where(keep, x.astype(jnp.float32), 0) for x in (rewards, values))
        passing = jnp.where(keep, 0.0, 1.0)
        nearest = scan_shard(axes, passing, values, True, segment_ids, num_segments)
        next_value = shift_shard(axes, nearest, 1, 0, segment_ids, num_segments)
        delta = jnp.where(keep, rewards + gamma * next_value - values, 0)

        def advantages(lam: float) -> jax.Array:
            a = jnp.where(keep, gamma * lam, 1.0).astype(jnp.float32)
            return jnp.where(keep, scan_shard(axes, a, delta, True, segment_ids, num_segments), 0)

        policy = advantages(lam)
        value = policy if value_lam is None or value_lam == lam else advantages(value_lam)
        return lax.stop_gradient((policy, value + values))

    args = {"rewards": rewards, "values": values, "mask": mask, "segment_ids": segment_ids}
    return shard_call("gae", per_shard, parallel, args, lambda p: ([p.tokens_spec] * 4, (p.tokens_spec,) * 2))


def reinforce_plus_plus(
    rewards: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    *,
    gamma: float = 1.0,
    masked: Masked = "skip",
    num_segments: int | None = None,
    parallel: Parallel = None,
) -> Float[Array, "R T"]:
    """REINFORCE++: discounted returns, whitened over all tokens of the batch.

    Args:
      rewards: `f32[R, T]`, with the KL penalty in them: see `token_rewards`.
      mask: `[R, T]`, 1 where a token counts.
      segment_ids: `i32[R, T]`, 0 for padding.
      gamma: the discount.
      masked: see `discounted_returns`, which gives the returns alone.
      num_segments: S, static; for the "zigzag_per_segment" layout only.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32[R, T]`, 0 where the mask is 0.

    Raises:
      ValueError: as `discounted_returns`.

    Example:
      >>> reinforce_plus_plus(jnp.array([[0.0, 1.0]]), jnp.ones((1, 2)), jnp.array([[1, 2]])).round(3)
      Array([[-0.707,  0.707]], dtype=float32)

    Hu 2025, REINFORCE++, https://arxiv.org/abs/2501.03262
    """
    options: dict[str, Any] = {"gamma": gamma, "masked": masked, "num_segments": num_segments, "parallel": parallel}
    returns = discounted_returns(rewards, mask, segment_ids, **options)
    return whiten(returns, mask, parallel=parallel)


def reinforce_plus_plus_baseline(
    rewards: Float[Array, "R S"],
    group_ids: Int[Array, "R S"],
    segment_ids: Int[Array, "R T"],
    loss_mask: Float[Array, "R T"],
    *,
    kl: Float[Array, "R T"] | None = None,
    kl_coef: float | jax.Array = 0.0,
    whitened: bool = True,
    singletons: Singletons = "zero",
    parallel: Parallel = None,
) -> Float[Array, "R T"]:
    """REINFORCE++ with the group's mean as baseline: A_t = whiten(r_i - mean_g - c * kl_t).

    Args:
      rewards: `f32[R, S]`, one a sequence.
      group_ids: `i32[R, S]`, equal for the samples of one prompt, -1 where there is no sample.
      segment_ids: `i32[R, T]`, 0 for padding.
      loss_mask: `f32[R, T]`, 1 on response tokens.
      kl: `f32[R, T]`, the estimated KL to the reference at each token.
      kl_coef: c.
      whitened: whiten over all tokens of the batch.
      singletons: the centred reward in a group of one: "zero", or its own "reward" (verl).
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32[R, T]`, 0 where the mask is 0.

    Raises:
      ValueError: as `grpo` and `spread`; kl of another shape.

    Example:
      >>> mask = jnp.ones((1, 2))
      >>> reinforce_plus_plus_baseline(jnp.array([[3.0, 1.0]]), jnp.array([[0, 0]]), jnp.array([[1, 2]]), mask).round(3)
      Array([[ 0.707, -0.707]], dtype=float32)

    Hu 2025, REINFORCE++, https://arxiv.org/abs/2501.03262
    """
    check_tokens("segment_ids", segment_ids=segment_ids, kl=kl)
    centred = dr_grpo(rewards, group_ids, singletons=singletons, parallel=parallel)
    advantages = spread(centred, segment_ids, loss_mask, parallel=parallel)
    if kl is not None:
        advantages = lax.stop_gradient(advantages - kl_coef * jnp.where(loss_mask > 0, kl, 0))
    return whiten(advantages, loss_mask, parallel=parallel) if whitened else advantages


def on_policy_distillation(
    advantages: Float[Array, "R T"],
    log_probs: Float[Array, "R T"],
    teacher_log_probs: Float[Array, "R T"],
    loss_mask: Float[Array, "R T"],
    *,
    coef: float | jax.Array = 1.0,
) -> Float[Array, "R T"]:
    """Pulls the policy to a teacher on the policy's own samples: A'_t = A_t - coef * (log_prob_t - teacher_log_prob_t).

    The difference of log-probs at a sampled token is an unbiased estimate of KL(policy | teacher).

    Args:
      advantages: `f32[R, T]`; zeros for distillation alone.
      log_probs: `f32[R, T]`, under the policy that sampled.
      teacher_log_probs: `f32[R, T]`, of the same tokens under the teacher.
      loss_mask: `f32[R, T]`.
      coef: the weight of the teacher.

    Returns:
      `f32[R, T]`, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> on_policy_distillation(jnp.array([[1.0]]), jnp.array([[-2.0]]), jnp.array([[-1.5]]), jnp.ones((1, 1)))
      Array([[1.5]], dtype=float32)

    Agarwal et al. 2023, https://arxiv.org/abs/2306.13649; Lu 2025, https://thinkingmachines.ai/blog/on-policy-distillation/
    """
    check_tokens(
        "advantages",
        advantages=advantages,
        log_probs=log_probs,
        teacher_log_probs=teacher_log_probs,
        loss_mask=loss_mask,
    )
    pulled = advantages - coef * (log_probs - teacher_log_probs)
    return lax.stop_gradient(jnp.where(loss_mask > 0, pulled, 0).astype(jnp.float32))


def _check_unit(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: got {value}, expected a number in [0, 1]")
