"""Distillation through advantages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo.advantages.token_statistics import Parallel, on_rows, scan_rows
from jaxppo.base.arrays import (
    Coefficient,
    as_number,
    check,
    check_alike,
    masked,
    sound,
    unless_mask,
)
from jaxppo.base.stacked import of_rows
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import LOG_PROBS, SAMPLED
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.sharding import ShardAxes


def on_policy_distillation(
    advantages: Float[Array, "*K R T"],
    log_probs: Float[Array, "*K R T"],
    teacher_log_probs: Float[Array, "*K R T"],
    loss_mask: Float[Array, "*K R T"],
    *,
    coef: float | jax.Array = 1.0,
    alpha: float | jax.Array = 1.0,
) -> Float[Array, "*K R T"]:
    """Pulls the policy to a teacher on the policy's own samples: A'_t = A_t - coef * (log_prob_t -
    teacher_log_prob_t).

    The difference of log-probs at a sampled token is an unbiased estimate of KL(policy | teacher).
    With an alpha below 1 the teacher t is mixed with the policy p, so that a token which the
    teacher rules out costs at most log(1 - alpha):

        A'_t = A_t + coef * log(alpha t / p + 1 - alpha)

    Args:
      advantages: `f32[R, T]`, or `[K, R, T]` of a stacked step, like all four; zeros for
        distillation alone.
      log_probs, teacher_log_probs: under the policy that sampled, and of the same tokens under the
        teacher.
      loss_mask: 1 where a token counts.
      coef: the weight of the teacher.
      alpha: the teacher's share of the mixture, above 0 and at most 1.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ, a number out of its range.

    Example:
      >>> on_policy_distillation(jnp.array([[1.0]]), jnp.array([[-2.0]]), jnp.array([[-1.5]]), jnp.ones((1, 1)))
      Array([[1.5]], dtype=float32)

    Agarwal et al. 2023, https://arxiv.org/abs/2306.13649; alpha: Xie et al. 2026, TOP-D,
    https://arxiv.org/abs/2607.04751; Lu 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation/
    """
    arrays = {
        "advantages": advantages,
        "log_probs": log_probs,
        "teacher_log_probs": teacher_log_probs,
    }
    check_alike({**arrays, "loss_mask": loss_mask})
    check(
        "loss_mask",
        f"shape {loss_mask.shape}",
        loss_mask.ndim in (2, 3),
        "[R, T], or [K, R, T] of a stacked step",
    )
    coef = as_number("coef", coef)
    alpha = as_number("alpha", alpha, above=0, most=1)
    mask = loss_mask.astype(jnp.float32)
    seen = {what: masked(sound(what, x), mask) for what, x in arrays.items()}
    log_ratio = seen["teacher_log_probs"] - seen["log_probs"]
    # with alpha = 1 the log-ratio, to the bit
    pull = jnp.logaddexp(log_ratio + jnp.log(alpha), jnp.log1p(-alpha))
    return lax.stop_gradient(
        seen["advantages"] + coef * masked(pull, mask) + unless_mask(loss_mask)
    )


def importance_weighted_distillation(
    log_probs: Float[Array, "*K R T"],
    teacher_log_probs: Float[Array, "*K R T"],
    batch: RolloutBatch,
    *,
    gain: Coefficient = 0.5,
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """IW-OPD: distillation on the policy's own samples, in which the first tokens of a response
    weigh more.

        A_t = w_t d_t,   d_t = teacher_log_prob_t - log_prob_t,   w_t = 1 + gain (1 - sum_{u<t} |d_u| / sum_u |d_u|)

    Sums are over a sample's loss tokens: w falls from 1 + gain to just above 1. Its loss is
    `Reinforce`.

    Args:
      log_probs, teacher_log_probs: `f32[R, T]`, or `[K, R, T]` of a stacked step, under the policy
        that sampled and under the teacher; anything where the loss mask is 0.
      batch, parallel: see `spread`.
      gain: by how much the weight of the first token is above 1; at least 0.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0.

    Raises:
      ValueError, TypeError: shapes or dtypes that differ, a negative gain.

    Example:
      >>> samples = [Sample([1, 2, 3, 4], response_start=1)]
      >>> batch = RolloutBatch.from_samples(samples, row_length=4)
      >>> own, teacher = jnp.array([[-1.0, -2.0, -1.0, 0.0]]), jnp.array([[-0.5, -2.5, -1.0, 0.0]])
      >>> advantages.importance_weighted_distillation(own, teacher, batch).tolist()
      [[0.75, -0.625, 0.0, 0.0]]

    2026, https://arxiv.org/abs/2606.22600; TRL's `iw_opd_trainer`
    """
    arrays = {"log_probs": log_probs, "teacher_log_probs": teacher_log_probs}
    numbers = {"gain": as_number("gain", gain, least=0)}
    return on_rows(
        "importance_weighted_distillation", _weighted, parallel, batch, arrays, numbers=numbers
    )


@of_rows
def _weighted(
    axes: ShardAxes, own: jax.Array, teacher: jax.Array, gain: jax.Array, batch: RolloutBatch
) -> jax.Array:
    tokens = LossTokens.of(batch)
    segments = batch.segments(axes)
    difference = tokens.read(SAMPLED, teacher) - tokens.read(LOG_PROBS, own)
    size = jnp.abs(difference)
    size_before = scan_rows(axes, batch, jnp.ones_like(size), size) - size
    whole_size = segments.spread(segments.sum(size))
    weights = 1 + gain * (1 - size_before / jnp.maximum(whole_size, 1e-8))
    return lax.stop_gradient(tokens.see(weights * difference))
