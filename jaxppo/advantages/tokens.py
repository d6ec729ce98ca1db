"""From one number a sample to one a token, and statistics over all tokens of a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxppo._sharding import ParallelMesh, Segments, ShardAxes, shard_call

Parallel = ParallelMesh | ShardAxes | None


def check_tokens(like: str, **arrays: jax.Array | None) -> None:
    """Raises where the given `[R, T]` arrays differ in shape; `like` names the one that the others must match."""
    first = arrays[like]
    assert first is not None
    if first.ndim != 2:
        raise ValueError(f"{like}: got shape {first.shape}, expected [R, T]")
    for name, x in arrays.items():
        if x is not None and x.shape != first.shape:
            raise ValueError(f"{name}: got shape {x.shape}, expected [R, T] like {like}, {first.shape}")


def spread(
    x: Float[Array, "R S"],
    segment_ids: Int[Array, "R T"],
    loss_mask: Float[Array, "R T"],
    *,
    parallel: Parallel = None,
) -> Float[Array, "R T"]:
    """Each sample's value on its loss-carrying tokens: y[r, t] = x[r, segment_ids[r, t] - 1] * loss_mask[r, t].

    Args:
      x: `f32[R, S]`, one a sample.
      segment_ids: `i32[R, T]`, 0 for padding.
      loss_mask: `f32[R, T]`.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32[R, T]`, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> spread(jnp.array([[5.0, 7.0]]), jnp.array([[1, 1, 2, 0]]), jnp.array([[0.0, 1.0, 1.0, 0.0]]))
      Array([[0., 5., 7., 0.]], dtype=float32)
    """
    check_tokens("segment_ids", segment_ids=segment_ids, loss_mask=loss_mask)
    if x.ndim != 2 or x.shape[0] != segment_ids.shape[0]:
        raise ValueError(f"x: got shape {x.shape}, expected [R, S] with R = {segment_ids.shape[0]}")

    def per_shard(axes: ShardAxes, x: jax.Array, segment_ids: jax.Array, loss_mask: jax.Array) -> jax.Array:
        return jnp.where(loss_mask > 0, Segments(segment_ids, x.shape[1], axes).spread(x), 0).astype(jnp.float32)

    args = {"x": x, "segment_ids": segment_ids, "loss_mask": loss_mask}
    return shard_call(
        "spread", per_shard, parallel, args, lambda p: ([p.rows_spec, p.tokens_spec, p.tokens_spec], p.tokens_spec)
    )


def whiten(
    x: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-12,
    parallel: Parallel = None,
) -> Float[Array, "R T"]:
    """Mean 0 and deviation 1 over all masked-in tokens of the batch: y = (x - mean) / sqrt(var + epsilon).

    The mean is found first and the variance (over n - 1) about it, each over data and context, so that a mean far
    larger than the deviation costs no accuracy.

    Args:
      x: `f32[R, T]`.
      mask: `[R, T]`, 1 where a token counts; x can be anything elsewhere.
      shift_mean: leave the mean at 0; without it the result keeps the mean of x.
      epsilon: added to the variance, in x's units squared.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32[R, T]`, 0 where the mask is 0.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> whiten(jnp.array([[999.0, 1001.0, jnp.nan]]), jnp.array([[1.0, 1.0, 0.0]])).round(3)
      Array([[-0.707,  0.707,  0.   ]], dtype=float32)
    """
    check_tokens("x", x=x, mask=mask)

    def per_shard(axes: ShardAxes, x: jax.Array, mask: jax.Array) -> jax.Array:
        return lax.stop_gradient(_whiten(axes, x, mask, shift_mean, epsilon))

    args = {"x": x, "mask": mask}
    return shard_call("whiten", per_shard, parallel, args, lambda p: ([p.tokens_spec] * 2, p.tokens_spec))


def _whiten(axes: ShardAxes, x: jax.Array, mask: jax.Array, shift_mean: bool, epsilon: float) -> jax.Array:
    keep = mask > 0
    x = jnp.where(keep, x.astype(jnp.float32), 0)
    total, count = axes.psum((x.sum(), keep.sum(dtype=jnp.float32)), axes.tokens)
    centre = total / jnp.maximum(count, 1)
    d = jnp.where(keep, x - centre, 0)
    # `centre` carries the rounding of a sum of large numbers; the sum of the differences takes it out again.
    rest, square = axes.psum((d.sum(), (d * d).sum()), axes.tokens)
    rest = rest / jnp.maximum(count, 1)
    variance = jnp.maximum(square - count * rest * rest, 0) / jnp.maximum(count - 1, 1)
    y = (d - rest) * lax.rsqrt(variance + epsilon)
    return jnp.where(keep, y if shift_mean else y + (centre + rest), 0)
