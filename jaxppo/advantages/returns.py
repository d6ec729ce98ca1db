"""Advantages that look along a sequence: discounted returns, GAE, REINFORCE++, and what they are
made from.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.by_group import Singletons
from jaxppo.advantages.groups import dr_grpo
from jaxppo.advantages.token_statistics import (
    Parallel,
    counted_tokens,
    on_rows,
    scan_rows,
    spread,
    whiten,
)
from jaxppo.base.arrays import (
    Coefficient,
    as_number,
    check,
    check_array,
    check_choice,
    check_flag,
    is_number,
    masked,
)
from jaxppo.base.ranks import total
from jaxppo.base.stacked import check_whole_step, of_rows
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.sharding import Segments, ShardAxes, shift_shard

Masked = Literal["skip", "discount"]


def token_rewards(
    rewards: Float[Array, "*K R S"],
    batch: RolloutBatch,
    *,
    kl: Float[Array, "*K R T"] | None = None,
    kl_coef: Coefficient | None = None,
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """Puts each sequence's reward on its last response token, minus a KL penalty on all: r_t = [t =
    last] R - c kl_t.

    Args:
      rewards: `f32[R, S]`, one per sequence. A sequence without a reward, NaN, has NaN on its last
        token: give it one, such as 0, or mask it.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      parallel: the mesh; rows sharded over data, positions over context.
      kl: `f32[R, T]`, the estimated KL to the reference at each token (see `kl_divergence`).
      kl_coef: c, a number or a traced scalar; given with `kl`, and only then.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0; a sequence with no response token
      gets no reward.

    Raises:
      ValueError: shapes that differ, rows in another context layout than the mesh's, one of `kl`
        and `kl_coef` alone.

    Example:
      >>> ids, mask = jnp.array([[1, 1, 1, 2]]), jnp.array([[1.0, 1.0, 0.0, 0.0]])
      >>> batch = RolloutBatch(ids, ids, ids, jnp.array([[0, 1, 2, 0]]), mask, jnp.array([[0, 1]]))
      >>> token_rewards(jnp.array([[5.0, 7.0]]), batch)
      Array([[0., 5., 0., 0.]], dtype=float32)
    """
    numbers = {"kl_coef": _kl_coef(kl, kl_coef)}
    return on_rows(
        "token_rewards",
        _token_rewards,
        parallel,
        batch,
        {"kl": kl},
        {"rewards": rewards},
        numbers,
        optional=["kl"],
    )


@of_rows
def _token_rewards(
    axes: ShardAxes,
    kl: jax.Array | None,
    rewards: jax.Array,
    kl_coef: jax.Array,
    batch: RolloutBatch,
) -> jax.Array:
    segments = batch.segments(axes)
    tokens = LossTokens.of(batch)
    is_last = _is_last(segments, batch, tokens.mask > 0)
    result = tokens.see(jnp.where(is_last, segments.spread(rewards), 0))
    if kl is not None:
        result = result - kl_coef * tokens.see(kl)
    return lax.stop_gradient(result)


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
      rewards: `f32[R, T]`, one a token, such as those of `token_rewards`; anything where the mask
        is 0.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      parallel: the mesh; rows sharded over data, positions over context.
      gamma: the discount.
      masked: how a masked token within a response (a tool's output) enters the returns before it:
        "skip" it, as if it were not there (verl), or "discount" over it as over any other token
        (slime).
      mask: `[R, T]`, 1 where a token counts; the loss mask by default.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0.

    Raises:
      ValueError: as `spread`; an unknown `masked`, gamma outside [0, 1].

    Example:
      >>> ids, one = jnp.array([[1, 1, 2]]), jnp.ones((1, 3))
      >>> batch = RolloutBatch(ids, ids, ids, ids, one, jnp.array([[0, 1]]))
      >>> discounted_returns(one, batch, gamma=0.5)
      Array([[1.5, 1. , 1. ]], dtype=float32)
    """
    check_choice("masked", masked, Masked)
    _check_unit(gamma=gamma)
    masked_gamma = gamma if masked == "discount" else 1.0
    tokens = {"rewards": rewards, "mask": mask}
    static = (gamma, masked_gamma)
    return on_rows(
        "discounted_returns", _returns, parallel, batch, tokens, optional=["mask"], static=static
    )


@of_rows
def _returns(
    axes: ShardAxes,
    static: tuple[float, float],
    rewards: jax.Array,
    mask: jax.Array | None,
    batch: RolloutBatch,
) -> jax.Array:
    gamma, masked_gamma = static
    batch.check_layout(axes)
    tokens = LossTokens.of(batch, mask)
    discounts = jnp.where(tokens.mask > 0, gamma, masked_gamma).astype(jnp.float32)
    returns = scan_rows(axes, batch, discounts, masked(rewards, tokens.mask), reverse=True)
    return lax.stop_gradient(tokens.see(returns))


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
    """Generalised advantage estimation: A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma
    V_(t+1) - V_t.

    t + 1 is the next token of the sequence with mask 1: tokens masked out within a response (a
    tool's output) are stepped over. After the last one A is 0, and V is 0 or the given one.

    Args:
      rewards: `f32[R, T]`, one a token, such as those of `token_rewards`; anything where the mask
        is 0.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      gamma: the discount.
      parallel: the mesh; rows sharded over data, positions over context.
      values: `f32[R, T]`, the critic's, laid out as `rewards`.
      lam: lambda of the advantages.
      value_lam: lambda of the returns, if the critic learns with another one (VC-PPO); `lam` if
        None.
      length_alpha: alpha of a length-dependent lambda of the advantages (VAPO), in place of `lam`:
        1 - 1 / (alpha n) for a sequence of n tokens that count, at least 0; a published value is
        0.05.
      last_values: `f32[R, S]`, V after each sequence's last token: the critic's where a response
        was cut at its length limit, 0 where it ended by itself, see `last_values`. By default 0.
      mask: `[R, T]`, 1 where a token counts; the loss mask by default. A mask of all response
        tokens ignores holes (slime).

    Returns:
      (advantages, returns), `f32[R, T]` each, 0 where the mask is 0; returns = A(value_lam) + V.
      Not whitened.

    Raises:
      ValueError: as `spread`; gamma or a lambda outside [0, 1].

    Example:
      >>> ids, one = jnp.array([[1, 1, 1]]), jnp.ones((1, 3))
      >>> batch = RolloutBatch(ids, ids, ids, ids, one, jnp.array([[0]]))
      >>> advantages, returns = gae(one, 0.5 * one, batch, gamma=1.0, lam=1.0)
      >>> advantages, returns
      (Array([[2.5, 1.5, 0.5]], dtype=float32), Array([[3., 2., 1.]], dtype=float32))

    Schulman et al. 2015, https://arxiv.org/abs/1506.02438; Yuan et al. 2025, VC-PPO,
    https://arxiv.org/abs/2503.01491; `length_alpha`: Yue et al. 2025, VAPO,
    https://arxiv.org/abs/2504.05118, shipped by NeMo-RL alone
    """
    if value_lam is None:
        value_lam = lam
    _check_unit(gamma=gamma, lam=lam, value_lam=value_lam)
    good = length_alpha is None or (is_number(length_alpha) and length_alpha > 0)
    check("length_alpha", repr(length_alpha), good, "a finite number above 0, or None")
    tokens = {"rewards": rewards, "values": values, "mask": mask}
    samples = {"last_values": last_values}
    optional = ["mask", "last_values"]
    static = (gamma, lam, value_lam, length_alpha)
    return on_rows("gae", _gae, parallel, batch, tokens, samples, optional=optional, static=static)


@of_rows
def _gae(
    axes: ShardAxes,
    static: tuple[float, float, float, float | None],
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array | None,
    last_values: jax.Array | None,
    batch: RolloutBatch,
) -> tuple[jax.Array, jax.Array]:
    gamma, lam, value_lam, length_alpha = static
    segments = batch.segments(axes)
    tokens = LossTokens.of(batch, mask)
    counts = tokens.mask > 0
    rewards = tokens.see(rewards)
    values = tokens.see(values)
    nearest = scan_rows(axes, batch, jnp.where(counts, 0.0, 1.0), values, reverse=True)
    next_value = shift_shard(axes, nearest, 1, 0, batch.segment_ids, batch.num_segments)
    if last_values is not None:
        after = segments.spread(last_values.astype(jnp.float32))
        next_value = jnp.where(_is_last(segments, batch, counts), after, next_value)
    delta = jnp.where(counts, rewards + gamma * next_value - values, 0)

    def advantages_of(lam: float | jax.Array) -> jax.Array:
        discounts = jnp.where(counts, gamma * lam, 1.0).astype(jnp.float32)
        return tokens.see(scan_rows(axes, batch, discounts, delta, reverse=True))

    if length_alpha is not None:
        length = segments.spread(segments.sum(counts.astype(jnp.float32)))
        advantages = advantages_of(1 - 1 / jnp.maximum(length_alpha * length, 1))
    else:
        advantages = advantages_of(lam)
    if length_alpha is None and value_lam == lam:
        value_advantages = advantages
    else:
        value_advantages = advantages_of(value_lam)
    return lax.stop_gradient((advantages, value_advantages + values))


def last_values(
    values: Float[Array, "*K R T"],
    batch: RolloutBatch,
    truncated: Bool[Array, "*K R S"],
    *,
    parallel: Parallel = None,
) -> Float[Array, "*K R S"]:
    """V after the last token of each response that was cut at its length limit, for
    `gae(last_values=)`; 0 for others.

    The value at a position is of the state after the token that is read there, so it is the one at
    the last position of the sequence.

    Args:
      values: `f32[R, T]`, the critic's at all positions, those without loss too.
      batch, parallel: see `spread`.
      truncated: `bool[R, S]`, which samples were cut. From flags in the order of `from_samples`:
        `flags[jnp.maximum(batch.sample_ids, 0)]`; where there is no sample it may hold anything.

    Returns:
      `f32[R, S]`, without a gradient.

    Raises:
      TypeError, ValueError: as `spread`; rows whose last position has a target, see
        `from_target_aligned`: the critic has not read the token after it.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], 1), Sample([4, 5], 1)], row_length=5)
      >>> values = jnp.array([[0.0, 0.1, 0.2, 0.3, 0.4]])
      >>> last_values(values, batch, batch.sample_ids == 0).tolist() == [[values[0, 2], 0]]
      True
    """
    tokens = {"values": values}
    samples = {"truncated": truncated}
    return on_rows("last_values", _last_values, parallel, batch, tokens, samples, per_sample=True)


@of_rows
def _last_values(
    axes: ShardAxes, values: jax.Array, truncated: jax.Array, batch: RolloutBatch
) -> jax.Array:
    expected = "rows with all tokens of their samples: the critic has not read the last one"
    check("batch", "rows whose last position has a target", not batch.real_last_targets, expected)
    segments = batch.segments(axes)
    is_last = _is_last(segments, batch, batch.segment_ids > 0)
    result = segments.sum(jnp.where(is_last, values.astype(jnp.float32), 0))
    outside = (batch.segment_ids < 0) | (batch.segment_ids > batch.num_segments)
    unsound = jnp.where(total(axes, outside.astype(jnp.float32)) > 0, jnp.nan, jnp.float32(0))
    result = jnp.where(truncated & (batch.sample_ids >= 0), result, 0)
    return lax.stop_gradient(result + unsound)


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
      rewards: `f32[R, T]`, with the KL penalty in them, as `token_rewards(kl=, kl_coef=)` makes
        them.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      parallel: the mesh; rows sharded over data, positions over context.
      others: see `discounted_returns`, also for returns and errors; one micro-batch of several is
        refused too.

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
      rewards, group_ids, singletons: see `grpo`, with `scale_by_std=False`.
      rollout_ids: see `grpo`; by default those of the batch.
      among: see `grpo`; the tokens of the other samples are whitened by those of these.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      kl, kl_coef: see `token_rewards`, also for returns.
      parallel: the mesh; rows sharded over data, positions over context.
      whitened: whiten over all tokens of the step.

    Raises:
      ValueError: as `grpo` and `token_rewards`; one micro-batch of several.

    Example:
      >>> ids, one = jnp.array([[1, 2]]), jnp.ones((1, 2))
      >>> batch = RolloutBatch(ids, ids, ids, ids, one, jnp.array([[0, 1]]))
      >>> reinforce_plus_plus_baseline(jnp.array([[3.0, 1.0]]), jnp.array([[0, 0]]), batch).round(3)
      Array([[ 0.707, -0.707]], dtype=float32)

    Hu 2025, REINFORCE++, https://arxiv.org/abs/2501.03262
    """
    batch = checked(batch, stacked=True)
    if kl is not None:
        check_array("kl", kl, batch.loss_mask.shape, "the batch's [R, T]")
    coef = _kl_coef(kl, kl_coef)
    check_flag("whitened", whitened)
    check_whole_step("reinforce_plus_plus_baseline", batch)
    if rollout_ids is None:
        rollout_ids = batch.rollout_ids
    centred = dr_grpo(
        rewards,
        group_ids,
        among=among,
        rollout_ids=rollout_ids,
        singletons=singletons,
        parallel=parallel,
    )
    advantages = spread(centred, batch, parallel=parallel)
    mask, counted = counted_tokens(rewards, group_ids, among, batch, parallel)
    if kl is not None:
        advantages = lax.stop_gradient(advantages - coef * masked(kl, mask))
    if not whitened:
        return advantages
    return whiten(advantages, mask, among=counted, parallel=parallel)


def _kl_coef(kl: jax.Array | None, kl_coef: Coefficient | None) -> jax.Array:
    """The coefficient, 0 without kl.

    Raises where one of the two is given alone, since it would then do nothing.
    """
    expected = "expected both, or neither for no penalty"
    if kl is None and kl_coef is not None:
        raise ValueError(f"kl: got None with kl_coef={kl_coef}, {expected}")
    if kl is not None and kl_coef is None:
        raise ValueError(f"kl_coef: got None with kl, {expected}")
    if kl_coef is None:
        kl_coef = 0.0
    return as_number("kl_coef", kl_coef)


def _check_unit(**values: float) -> None:
    for name, value in values.items():
        check(name, repr(value), is_number(value) and 0 <= value <= 1, "a number in [0, 1]")
