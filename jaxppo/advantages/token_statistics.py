"""What estimators on tokens share: calls on the rows of a batch, numbers of samples on their
tokens, whitening.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import (
    Coefficient,
    as_number,
    check,
    check_alike,
    check_array,
    check_flag,
    spec_of,
    unless_mask,
)
from jaxppo.base.stacked import check_whole_step, of_rows
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.sharding import ParallelMesh, ShardAxes, scan_shard, shard_call, vary

Parallel = ParallelMesh | ShardAxes | None


def on_rows(
    name: str,
    fn: Callable[..., Any],
    parallel: Parallel,
    batch: RolloutBatch,
    tokens: Mapping[str, Any],
    samples: Mapping[str, Any] | None = None,
    numbers: Mapping[str, Array] | None = None,
    *,
    optional: Collection[str] = (),
    static: Hashable = None,
    per_sample: bool = False,
) -> Any:
    """The per-shard fn(axes, [static,] *tokens, *samples, *numbers, batch): `[R, T]`, or `[R, S]`
    with `per_sample`.

    `fn` is decorated with `of_rows`. Batch and arrays are checked here; the arrays named in
    `optional` may be None.
    """
    batch = checked(batch, stacked=True)
    samples = samples or {}
    numbers = numbers or {}

    def check_all(arrays: Mapping[str, Any], shape: tuple[int, ...], expected: str) -> None:
        for what, x in arrays.items():
            if x is not None:
                check_array(what, x, shape, expected)
            elif what not in optional:
                raise ValueError(f"{what}: got None, expected {expected}, {shape}")

    check_all(tokens, batch.loss_mask.shape, "the batch's [R, T]")
    check_all(samples, batch.sample_ids.shape, "the batch's [R, S]")

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        batch_specs = batch.specs(p)
        inputs: list[Any] = [batch_specs.loss_mask] * len(tokens)
        inputs += [batch_specs.sample_ids] * len(samples)
        inputs += [P()] * len(numbers)
        result = batch_specs.sample_ids if per_sample else batch_specs.loss_mask
        return [*inputs, batch_specs], result

    arguments = {**tokens, **samples, **numbers, "batch": batch}
    return shard_call(name, fn, parallel, arguments, specs, static)


def scan_rows(
    axes: ShardAxes, batch: RolloutBatch, a: jax.Array, b: jax.Array, *, reverse: bool = False
) -> jax.Array:
    """Per-shard: y_t = a_t * y_(t-1) + b_t within each sequence; y_(t+1) with `reverse`."""
    return scan_shard(axes, a, b, reverse, batch.segment_ids, batch.num_segments)


def spread(
    x: Float[Array, "*K R S"], batch: RolloutBatch, *, parallel: Parallel = None
) -> Float[Array, "*K R T"]:
    """Each sample's value on its loss-carrying tokens: y[r, t] = x[r, segment_ids[r, t] - 1] where
    loss_mask[r, t].

    Args:
      x: `f32[R, S]`, one per sample; `[K, R, S]` with a stacked step.
      batch: `[R, T]`, or a stacked step `[K, R, T]`; its sequences and loss mask.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32`, the shape of the mask, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ, rows in another context layout than the mesh's.

    Example:
      >>> ids, mask = jnp.array([[1, 1, 2, 0]]), jnp.array([[0.0, 1.0, 1.0, 0.0]])
      >>> spread(jnp.array([[5.0, 7.0]]), RolloutBatch(ids, ids, ids, ids, mask, jnp.array([[0, 1]])))
      Array([[0., 5., 7., 0.]], dtype=float32)
    """
    return on_rows("spread", _spread, parallel, batch, {}, {"x": x})


@of_rows
def _spread(axes: ShardAxes, x: jax.Array, batch: RolloutBatch) -> jax.Array:
    return LossTokens.of(batch).see(batch.segments(axes).spread(x))


def counted_tokens(
    rewards: Float[Array, "*K R S"],
    group_ids: Int[Array, "*K R S"],
    among: Bool[Array, "*K R S"] | None,
    batch: RolloutBatch,
    parallel: Parallel,
) -> tuple[Float[Array, "*K R T"], Bool[Array, "*K R T"] | None]:
    """`mask` and `among` of `whiten`: the loss tokens of samples with a group and a reward, and
    those `among`.
    """

    def tokens_of(flags: jax.Array) -> jax.Array:
        return spread(flags.astype(jnp.float32), batch, parallel=parallel)

    mask = tokens_of((group_ids >= 0) & ~jnp.isnan(rewards))
    if among is None:
        return mask, None
    return mask, tokens_of(among) > 0


def whiten(
    x: Float[Array, "*K R T"],
    mask: Float[Array, "*K R T"],
    *,
    among: Bool[Array, "*K R T"] | None = None,
    shift_mean: bool = True,
    epsilon: Coefficient = 1e-12,
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """Mean 0 and deviation 1 over all n tokens of the step with mask 1: y = (x - mean) / sqrt(var +
    epsilon).

    The variance is over n - 1. A mean far larger than the deviation costs no accuracy.

    Args:
      x: `f32[R, T]`, or a stacked step `[K, R, T]`.
      mask: of that shape, 1 where a token counts; x can be anything elsewhere.
      among: `bool` of that shape, the tokens that make mean and variance; all by default. The
        others are whitened by these, only shifted if the variance is 0, and 0 if there are none of
        these. For samples:
        `spread(among.astype(jnp.float32), batch) > 0`.
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
    arrays = {"x": x, "mask": mask}
    if among is not None:
        arrays["among"] = among
    check_alike(arrays)
    check(
        "x, mask",
        f"shapes {x.shape} and {mask.shape}",
        x.ndim in (2, 3),
        "[R, T], or [K, R, T], both",
    )
    check_flag("shift_mean", shift_mean)
    check_whole_step("whiten")
    arguments = {
        "x": x,
        "mask": mask,
        "among": among,
        "epsilon": as_number("epsilon", epsilon, least=0),
    }

    def specs(p: ParallelMesh) -> tuple[list[P], P]:
        tokens = spec_of(p.tokens_spec, x)
        return [tokens, tokens, tokens, P()], tokens

    return shard_call("whiten", _whiten, parallel, arguments, specs, shift_mean)


def _whiten(
    axes: ShardAxes,
    shift_mean: bool,
    x: jax.Array,
    mask: jax.Array,
    among: jax.Array | None,
    epsilon: jax.Array,
) -> jax.Array:
    axes.check_complete("the mean and deviation to whiten by", x, mask)
    there = mask.astype(jnp.float32) > 0
    counts = there
    if among is not None:
        counts = there & among
    centred, mean, variance, count = _moments(
        axes, jnp.where(there, x.astype(jnp.float32), 0), counts
    )
    scale = lax.rsqrt(variance + epsilon)
    if among is not None:
        scale = jnp.where(counts | ~_is_rounding(variance, mean), scale, 1)
        there = there & (count > 0)
    y = centred * scale
    if not shift_mean:
        y = y + mean
    return jnp.where(there, y, 0) + unless_mask(mask)


def _is_rounding(variance: jax.Array, mean: jax.Array) -> jax.Array:
    """Whether the variance of equal numbers may be as large."""
    return variance <= (2.0**-22 * mean) ** 2


def _moments(axes: ShardAxes, x: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
    """(x less the mean, the mean, the variance over n - 1, n), of the tokens of the step that
    count.
    """
    x = lax.stop_gradient(x.astype(jnp.float32))

    def total_of(*values: jax.Array) -> tuple[jax.Array, ...]:
        own = tuple(vary(jnp.where(counts, value, 0).sum(), axes.tokens) for value in values)
        return axes.psum(own, axes.tokens)

    total, count = total_of(x, jnp.ones_like(x))
    centre = total / jnp.maximum(count, 1)
    difference = x - centre
    # `centre` has the rounding error of a sum of large numbers; the sum of the differences corrects
    # it
    rest, squares = total_of(difference, difference * difference)
    rest = rest / jnp.maximum(count, 1)
    squares = jnp.maximum(squares - count * rest * rest, 0)
    variance = squares / jnp.maximum(count - 1, 1)
    return difference - rest, centre + rest, variance, count


def explained_variance(
    values: Float[Array, "*K R T"],
    returns: Float[Array, "*K R T"],
    mask: Float[Array, "*K R T"],
    *,
    parallel: Parallel = None,
) -> Float[Array, ""]:
    """The share of the returns' variance that the critic explains: 1 - var(G - V) / var(G), over
    the step's tokens.

    It is 1 for a perfect critic, 0 for one no better than a constant, and below 0 for a worse one,
    far below where nearly all returns are equal. A constant offset of the values changes
    `value_error` alone.

    Args:
      values: `f32[R, T]`, V, or a stacked step `[K, R, T]`: the critic's before the update, as in
        `batch.values`.
      returns: `f32` of that shape, G, such as the second result of `gae`.
      mask: of that shape, 1 where a token counts; values and returns can be anything elsewhere.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      An f32 scalar; 0 if all returns are equal, since there is no variance to explain.

    Raises:
      ValueError, TypeError: shapes that differ; a call inside `accumulate_gradients`.

    Example:
      >>> returns, mask = jnp.array([[1.0, 2.0, 3.0]]), jnp.ones((1, 3))
      >>> round(float(explained_variance(0.5 * returns, returns, mask)), 3)
      0.75

    OpenAI baselines' `explained_variance`, https://github.com/openai/baselines
    """
    arrays = {"values": values, "returns": returns, "mask": mask}
    check_alike(arrays)
    check("values", f"shape {values.shape}", values.ndim in (2, 3), "[R, T], or [K, R, T]")
    check_whole_step("explained_variance")

    def specs(p: ParallelMesh) -> tuple[list[P], P]:
        return [spec_of(p.tokens_spec, values)] * 3, P()

    return shard_call("explained_variance", _explained_variance, parallel, arrays, specs)


def _explained_variance(
    axes: ShardAxes, values: jax.Array, returns: jax.Array, mask: jax.Array
) -> jax.Array:
    axes.check_complete("the variance of returns", values, returns, mask)
    counts = mask.astype(jnp.float32) > 0
    _, mean, variance, _ = _moments(axes, returns, counts)
    errors = returns.astype(jnp.float32) - values.astype(jnp.float32)
    _, _, error_variance, _ = _moments(axes, errors, counts)
    all_equal = _is_rounding(variance, mean)
    unsound = axes.psum(vary(unless_mask(mask).sum(), axes.tokens), axes.tokens)
    explained = 1 - error_variance / jnp.where(all_equal, 1, variance)
    return jnp.where(all_equal, 0, explained) + unsound
