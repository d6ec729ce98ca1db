"""Spreads one number per sample to its tokens, and computes statistics over all tokens of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import Coefficient, as_number, check_alike, check_array, check_flag, spec_of, unless_mask
from jaxppo.base.stacked import check_whole_step, of_rows
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary

Parallel = ParallelMesh | ShardAxes | None


def check_tokens(
    batch: RolloutBatch, needed: Mapping[str, Any] | None = None, **optional: jax.Array | None
) -> RolloutBatch:
    """The checked batch; raises where an array does not have its shape, `[R, T]` or `[K, R, T]`."""
    batch = checked(batch, stacked=True)
    shape = batch.loss_mask.shape
    given = {name: x for name, x in optional.items() if x is not None}
    for name, x in {**(needed or {}), **given}.items():
        check_array(name, x, shape, "the batch's [R, T]")
    return batch


def check_segments(batch: RolloutBatch, **arrays: jax.Array | None) -> None:
    """Raises where an array is None or does not have the batch's `[R, S]`."""
    for name, x in arrays.items():
        if x is not None:
            check_array(name, x)
        if x is None or x.shape != batch.sample_ids.shape:
            got = "None" if x is None else f"shape {x.shape}"
            raise ValueError(f"{name}: got {got}, expected the batch's [R, S], {batch.sample_ids.shape}")


def spread(x: Float[Array, "*K R S"], batch: RolloutBatch, *, parallel: Parallel = None) -> Float[Array, "*K R T"]:
    """Each sample's value on its loss-carrying tokens: y[r, t] = x[r, segment_ids[r, t] - 1] where loss_mask[r, t].

    Args:
      x: `f32[R, S]`, one per sample; `[K, R, S]` with a stacked step.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32`, the shape of the mask, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> ids, mask = jnp.array([[1, 1, 2, 0]]), jnp.array([[0.0, 1.0, 1.0, 0.0]])
      >>> spread(jnp.array([[5.0, 7.0]]), RolloutBatch(ids, ids, ids, ids, mask, jnp.array([[0, 1]])))
      Array([[0., 5., 7., 0.]], dtype=float32)
    """
    batch = check_tokens(batch)
    check_segments(batch, x=x)
    found: Float[Array, "*K R T"] = shard_call(
        "spread",
        _spread,
        parallel,
        {"x": x, "batch": batch},
        lambda p: ([spec_of(p.rows_spec, x), batch.specs(p)], batch.specs(p).loss_mask),
    )
    return found


@of_rows
def _spread(axes: ShardAxes, x: jax.Array, batch: RolloutBatch) -> jax.Array:
    return jnp.where(batch.loss_mask > 0, batch.segments(axes).spread(x), 0).astype(jnp.float32)


def whiten(
    x: Float[Array, "*K R T"],
    mask: Float[Array, "*K R T"],
    *,
    among: Bool[Array, "*K R T"] | None = None,
    shift_mean: bool = True,
    epsilon: Coefficient = 1e-12,
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """Mean 0 and deviation 1 over all tokens of the step with mask 1: y = (x - mean) / sqrt(var + epsilon).

    The mean is found first and the variance (over n - 1) about it, each over the data and context axes, so that a mean
    far larger than the deviation costs no accuracy.

    Args:
      x: `f32[R, T]`, or a stacked step `[K, R, T]`.
      mask: of that shape, 1 where a token counts; x can be anything elsewhere.
      among: `bool` of that shape, the tokens that make mean and variance; all by default. The others are whitened with
        that mean and variance. They are only shifted if the variance is 0, and are 0 if `among` has no token. For
        samples: `spread(among.astype(jnp.float32), batch) > 0`.
      shift_mean: leave the mean at 0; without it the result keeps the mean of x.
      epsilon: added to the variance, in x's units squared; at least 0.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32`, the shape of the mask, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ; a negative epsilon; a call inside `accumulate_gradients`.

    Example:
      >>> whiten(jnp.array([[999.0, 1001.0, jnp.nan]]), jnp.array([[1.0, 1.0, 0.0]])).round(3)
      Array([[-0.707,  0.707,  0.   ]], dtype=float32)
    """
    check_array("x", x)
    check_array("mask", mask)
    if x.ndim not in (2, 3) or x.shape != mask.shape:
        raise ValueError(f"x, mask: got shapes {x.shape} and {mask.shape}, expected [R, T], or [K, R, T], both")
    if among is not None:
        check_array("among", among, x.shape, "that of x")
    check_flag("shift_mean", shift_mean)
    check_whole_step("whiten")
    args = {"x": x, "mask": mask, "among": among, "epsilon": as_number("epsilon", epsilon, least=0)}

    def specs(p: ParallelMesh) -> tuple[list[P], P]:
        tokens = spec_of(p.tokens_spec, x)
        return [tokens, tokens, tokens, P()], tokens

    found: Float[Array, "*K R T"] = shard_call("whiten", _whiten, parallel, args, specs, shift_mean)
    return found


def rewarded_tokens(
    rewards: Float[Array, "*K R S"], group_ids: Int[Array, "*K R S"], batch: RolloutBatch, parallel: Parallel
) -> Float[Array, "*K R T"]:
    """The loss mask of the samples that have a group and a reward."""
    rewarded = (group_ids >= 0) & ~jnp.isnan(rewards)
    return spread(rewarded.astype(jnp.float32), batch, parallel=parallel)


def whiten_samples(
    x: Float[Array, "*K R T"],
    mask: Float[Array, "*K R T"],
    among: Bool[Array, "*K R S"] | None,
    batch: RolloutBatch,
    parallel: Parallel,
) -> Float[Array, "*K R T"]:
    """`whiten`, among the tokens of these samples."""
    tokens = None if among is None else spread(among.astype(jnp.float32), batch, parallel=parallel) > 0
    return whiten(x, mask, among=tokens, parallel=parallel)


def _whiten(
    axes: ShardAxes, shift_mean: bool, x: jax.Array, mask: jax.Array, among: jax.Array | None, epsilon: jax.Array
) -> jax.Array:
    axes.check_complete("the mean and deviation to whiten by", x, mask)
    there = mask.astype(jnp.float32) > 0
    counts = there if among is None else there & among
    centred, mean, variance, count = _moments(axes, jnp.where(there, x.astype(jnp.float32), 0), counts)
    scale = lax.rsqrt(variance + epsilon)
    if among is not None:
        scale = jnp.where(counts | ~_is_rounding(variance, mean), scale, 1)
        there = there & (count > 0)
    y = centred * scale
    return jnp.where(there, y if shift_mean else y + mean, 0) + unless_mask(mask)


def _is_rounding(variance: jax.Array, mean: jax.Array) -> jax.Array:
    """Whether the variance of equal numbers may be as large."""
    return variance <= (2.0**-22 * mean) ** 2


def _moments(axes: ShardAxes, x: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
    """(x less the mean, the mean, the variance over n - 1, n), of the tokens of the step that count."""
    x = lax.stop_gradient(x.astype(jnp.float32))

    def total_of(*values: jax.Array) -> tuple[jax.Array, ...]:
        return axes.psum(tuple(vary(jnp.where(counts, v, 0).sum(), axes.tokens) for v in values), axes.tokens)

    total, count = total_of(x, jnp.ones_like(x))
    centre = total / jnp.maximum(count, 1)
    d = x - centre
    # `centre` has the rounding error of a sum of large numbers; the sum of the differences corrects it
    rest, square = total_of(d, d * d)
    rest = rest / jnp.maximum(count, 1)
    variance = jnp.maximum(square - count * rest * rest, 0) / jnp.maximum(count - 1, 1)
    return d - rest, centre + rest, variance, count


def explained_variance(
    values: Float[Array, "*K R T"],
    returns: Float[Array, "*K R T"],
    mask: Float[Array, "*K R T"],
    *,
    parallel: Parallel = None,
) -> Float[Array, ""]:
    """The share of the returns' variance that the critic explains: 1 - var(G - V) / var(G), over the step's tokens.

    It is 1 for a perfect critic, 0 for a critic no better than a constant, and below 0 for a worse critic. A constant
    offset of the values changes `value_error` alone. Where nearly all returns are equal it may be far below 0.
    Variances take two passes over the tokens, as in `whiten`.

    Args:
      values: `f32[R, T]`, V, or a stacked step `[K, R, T]`: the critic's before the update, as in `batch.values`.
      returns: `f32` of that shape, G, see `gae`.
      mask: of that shape, 1 where a token counts; values and returns can be anything elsewhere.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      An f32 scalar; NaN if all returns are equal, since there is no variance to explain.

    Raises:
      ValueError, TypeError: shapes that differ; a call inside `accumulate_gradients`.

    Example:
      >>> returns, mask = jnp.array([[1.0, 2.0, 3.0]]), jnp.ones((1, 3))
      >>> round(float(explained_variance(0.5 * returns, returns, mask)), 3)
      0.75

    OpenAI baselines' `explained_variance`, https://github.com/openai/baselines
    """
    check_alike({"values": values, "returns": returns, "mask": mask})
    if values.ndim not in (2, 3):
        raise ValueError(f"values: got shape {values.shape}, expected [R, T], or [K, R, T]")
    check_whole_step("explained_variance")
    args = {"values": values, "returns": returns, "mask": mask}
    found: Float[Array, ""] = shard_call(
        "explained_variance", _explained_variance, parallel, args, lambda p: ([spec_of(p.tokens_spec, values)] * 3, P())
    )
    return found


def _explained_variance(axes: ShardAxes, values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    axes.check_complete("the variance of returns", values, returns, mask)
    counts = mask.astype(jnp.float32) > 0
    _, mean, variance, _ = _moments(axes, returns, counts)
    _, _, left, _ = _moments(axes, returns.astype(jnp.float32) - values.astype(jnp.float32), counts)
    nothing = _is_rounding(variance, mean)
    bad = axes.psum(vary(unless_mask(mask).sum(), axes.tokens), axes.tokens)
    return jnp.where(nothing, jnp.nan, 1 - left / jnp.where(nothing, 1, variance)) + bad
