"""Per-sequence sums, means and extremes on packed rows whose positions may be spread over
context shards.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Num

from .axes import ShardAxes, vary, vary_like
from .call import shard_call
from .checks import check_int
from .mesh import ParallelMesh


@dataclasses.dataclass(frozen=True)
class Segments:
    """The sequences of packed rows, for per-shard code: reduces per-token values by sequence, and
    spreads them back.

    The order of the positions does not matter, so this is right in every context layout.

    Args:
      segment_ids: `i32[R, T_local]`, 0 for padding, 1..S for the sequences of the row.
      num_segments: S, static.
      axes: the roles of the mesh axes; reductions cross `axes.context`.

    Example:
      >>> segments = Segments(jnp.array([[1, 1, 2, 0]]), 2)
      >>> segments.sum(jnp.array([[1.0, 2.0, 3.0, 9.0]]))
      Array([[3., 3.]], dtype=float32)
      >>> segments.spread(jnp.array([[5.0, 7.0]]))
      Array([[5., 5., 7., 0.]], dtype=float32)
    """

    segment_ids: Int[Array, "R T"]
    num_segments: int
    axes: ShardAxes = dataclasses.field(default_factory=ShardAxes)

    def sum(self, x: Num[Array, "R T"]) -> Num[Array, "R S"]:
        """The sum of x over each sequence, 0 where there is none."""
        return self.axes.psum(self._scatter(x, 0, "add"), self.axes.context)

    def mean(self, x: Float[Array, "R T"], mask: Float[Array, "R T"]) -> Float[Array, "R S"]:
        """The mean of x over each sequence's positions with mask 1, over max(count, 1); NaN
        elsewhere is fine.
        """
        return self.sum(jnp.where(mask > 0, x, 0) * mask) / jnp.maximum(self.sum(mask), 1)

    def max(self, x: Float[Array, "R T"], mask: Float[Array, "R T"]) -> Float[Array, "R S"]:
        """The largest x of each sequence's positions with mask 1, -inf where there is none; no
        gradient.
        """
        x = lax.stop_gradient(jnp.where(mask > 0, x, -jnp.inf))
        best = self._scatter(x, -jnp.inf, "max")
        if not self.axes.context:
            return best
        return lax.pmax(vary(best, self.axes.context), self.axes.context)

    def spread(self, y: Num[Array, "R S"]) -> Num[Array, "R T"]:
        """For each position the value of its sequence, 0 on padding."""
        padded = jnp.concatenate([jnp.zeros_like(y[:, :1]), y], axis=1)
        return jnp.take_along_axis(padded, self.segment_ids, axis=1)

    def _scatter(
        self, x: Num[Array, "R T"], start: float, how: Literal["add", "max"]
    ) -> Num[Array, "R S"]:
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        out = vary_like(
            jnp.full((x.shape[0], self.num_segments + 1), start, x.dtype), x, self.segment_ids
        )
        return getattr(out.at[rows, self.segment_ids], how)(x)[:, 1:]


def segment_sum(
    x: Num[Array, "*K R T"],
    segment_ids: Int[Array, "*K R T"],
    num_segments: int,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Num[Array, "*K R S"]:
    """The sum of x over each sequence of each row: y[r, s] = sum of x[r, t] over t with
    segment_ids[r, t] = s + 1.

    Args:
      x: `[R, T]` values, or `[K, R, T]`, stacked batches of rows.
      segment_ids: of x's shape, 0 for padding.
      num_segments: S, static.
      parallel: the mesh; rows sharded over data, positions over context in any layout.

    Returns:
      `[R, S]`, or `[K, R, S]`, in x's dtype, 0 for sequences that are absent.

    Raises:
      ValueError, TypeError: shapes that differ, segment_ids that are not integers, num_segments
        that is not static.

    Example:
      >>> segment_sum(jnp.array([[1.0, 2.0, 4.0]]), jnp.array([[1, 2, 2]]), 3)
      Array([[1., 6., 0.]], dtype=float32)
    """
    for name, array in {"x": x, "segment_ids": segment_ids}.items():
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise TypeError(f"{name}: got {type(array).__name__}, expected an array [R, T]")
    if x.shape != segment_ids.shape or x.ndim not in (2, 3):
        raise ValueError(
            f"segment_ids: got shape {segment_ids.shape}, expected [R, T] like x, {x.shape}"
        )
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids: got {segment_ids.dtype}{segment_ids.shape}, expected integers [R, T]"
        )
    check_int("num_segments", num_segments, 0)

    def specs(p: ParallelMesh) -> tuple[list[P], P]:
        leading = (None,) * (x.ndim - 2)
        return [P(*leading, *p.tokens_spec)] * 2, P(*leading, *p.rows_spec)

    args = {"x": x, "segment_ids": segment_ids}
    return shard_call("segment_sum", _segment_sum, parallel, args, specs, num_segments)


def _segment_sum(
    axes: ShardAxes, num_segments: int, x: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    rows = (-1, x.shape[-1])
    sums = Segments(segment_ids.reshape(rows), num_segments, axes).sum(x.reshape(rows))
    return sums.reshape(*x.shape[:-1], num_segments)
