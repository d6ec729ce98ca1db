"""Rows of packed sequences brought to another context layout, shifted and scanned along their
logical positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .axes import ShardAxes
from .call import shard_call
from .checks import check_int
from .dtypes import wider_dtype
from .layouts import check_row_length
from .layouts.base import Fill, Layout, Row, find_layout, move, places_of
from .mesh import ParallelMesh, check_parallel

Parallel = ParallelMesh | ShardAxes | None


def redistribute(
    x: Any,
    parallel: Parallel,
    source: str,
    target: str,
    segment_ids: Int[Array, "R T"] | None = None,
    num_segments: int | None = None,
) -> Any:
    """Moves x to another context layout: y[place in target of t] = x[place in source of t] for each
    position t.

    The transpose under a gradient is the move back. docs/layouts.md tells what crosses the network,
    here and below.

    Args:
      x: `[R, T, ...]` of any dtype, or a pytree of them; None leaves stay None.
      parallel: the mesh; rows sharded over data, positions over context.
      source: the layout that x is in, whatever `parallel.context_layout` says.
      target: the layout to bring it to.
      segment_ids: `i32[R, T]` in the source layout, as `pack` gives them; for "zigzag_per_segment"
        only.
      num_segments: S, static; for "zigzag_per_segment" only.

    Raises:
      ValueError: an unknown layout, a row length that it cannot divide, missing or misshapen
        segment_ids.
      TypeError: num_segments that is no static integer.

    Example:
      >>> redistribute(jnp.arange(4)[None], None, "contiguous", "zigzag")
      Array([[0, 1, 2, 3]], dtype=int32)
    """
    here, there = find_layout(source, "source"), find_layout(target, "target")
    check_context_rows(parallel, {"x": x}, segment_ids, num_segments, "redistribute", here, there)
    if here is there:
        return x
    args = {"x": x, "segment_ids": segment_ids if here.per_segment or there.per_segment else None}
    return shard_call(
        "redistribute", _redistribute, parallel, args, _specs(2), (here, there, num_segments)
    )


def _redistribute(axes: ShardAxes, static: Any, x: Any, segment_ids: jax.Array | None) -> Any:
    here, there, num_segments = static
    row = (here if here.per_segment else there).row(axes, x, segment_ids, num_segments)
    return move(axes, x, here, there, row)


def held_positions(
    axes: ShardAxes, length: int, segment_lengths: Int[Array, "R S"] | None = None
) -> Int[Array, "R T_local"]:
    """Per-shard: the logical positions of the places that this device holds, of rows that it knows
    whole.

    Args:
      axes: the mesh's axes, whose context layout orders the rows.
      length: T, a multiple of what the layout needs.
      segment_lengths: `i32[R, S]`, the lengths of the sequences, for "zigzag_per_segment" only.

    Returns:
      `i32[R, T / C]`, or `i32[1, T / C]` where all rows lie alike.

    Example:
      >>> held_positions(ShardAxes(), 4)
      Array([[0, 1, 2, 3]], dtype=int32)
    """
    layout, row = _layout_of(axes), Row(length, axes.size(axes.context))
    if layout.per_segment:
        row = Row.of(length, row.shards, segment_lengths, layout.row_multiple(row.shards), jnp)
    return layout.position_at(places_of(axes, row), row)


def shift_left(
    x: Any,
    parallel: Parallel = None,
    by: int = 1,
    fill: float = 0,
    segment_ids: Int[Array, "R T"] | None = None,
    num_segments: int | None = None,
) -> Any:
    """y[t] = x[t + by] along the logical positions of a row, across shards, and `fill` where that
    leaves the sequence.

    Args:
      x: `[R, T, ...]` of any dtype in the mesh's layout, or a pytree of them; None leaves stay
        None.
      by: how far, static, at least 0.
      fill: a scalar that each array's dtype holds.
      segment_ids: `i32[R, T]` like x: padding reads `fill`. Without them a row is one sequence.
      parallel, num_segments: see `redistribute`.

    Raises:
      ValueError: a negative `by`, a fill that a dtype does not hold, a row length that the layout
        cannot divide, missing or misshapen segment_ids.
      TypeError: by or num_segments that is no static integer.

    Example:
      >>> shift_left(jnp.array([[1, 2, 3, 4]]), by=1, fill=-1, segment_ids=jnp.array([[1, 1, 2, 2]]))
      Array([[ 2, -1,  4, -1]], dtype=int32)
    """
    check_int("by", by, 0)
    if np.shape(fill) != ():
        raise ValueError(f"fill: got shape {np.shape(fill)}, expected a scalar")
    check_context_rows(parallel, {"x": x}, segment_ids, num_segments, "shift_left")
    _check_fill(fill, x)
    args = {"x": x, "segment_ids": segment_ids, "fill": jnp.asarray(fill)}
    return shard_call(
        "shift_left", _shift, parallel, args, _specs(2, scalars=1), (by, num_segments)
    )


def _check_fill(fill: Fill, x: Any) -> None:
    """Raises where an array of x cannot hold the fill: a cast would make another number of it."""
    for dtype in map(jnp.result_type, jax.tree.leaves(x)):
        inexact = jnp.issubdtype(dtype, jnp.inexact)
        if isinstance(fill, jax.core.Tracer):
            fits = inexact or wider_dtype(fill.dtype, dtype) == dtype
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                cast = np.asarray(fill).astype(dtype)
            fits = bool(np.isfinite(cast) == np.isfinite(fill) if inexact else cast == fill)
        if not fits:
            raise ValueError(
                f"fill: got {fill}, expected a number that {dtype} holds, the dtype of x"
            )


def _shift(
    axes: ShardAxes, static: Any, x: Any, segment_ids: jax.Array | None, fill: jax.Array
) -> Any:
    by, num_segments = static
    return shift_shard(axes, x, by, fill, segment_ids, num_segments)


def shift_shard(
    axes: ShardAxes,
    x: Any,
    by: int,
    fill: Fill,
    segment_ids: jax.Array | None,
    num_segments: int | None,
) -> Any:
    """`shift_left` for code inside a `shard_map`, each array as this device holds it."""
    layout = _layout_of(axes)
    return layout.shift(
        axes, layout.row(axes, x, segment_ids, num_segments), x, by, fill, segment_ids
    )


def scan_affine(
    a: Float[Array, "R T"] | float,
    b: Float[Array, "R T"],
    parallel: Parallel = None,
    reverse: bool = True,
    segment_ids: Int[Array, "R T"] | None = None,
    num_segments: int | None = None,
) -> Float[Array, "R T"]:
    """y_t = a_t * y_(t+1) + b_t along the logical positions of a row, y = 0 behind each sequence's
    end.

    Discounted returns are `scan_affine(gamma, rewards)`, and GAE is
    `scan_affine(gamma * lambda, deltas)`. Differentiable in a and b. NaN and inf stay in their own
    sequence, in values and gradients. Nothing depends on padding, or on a at a sequence's end.

    Args:
      a: `[R, T]` coefficients in the mesh's layout, or a scalar.
      b: `[R, T]` addends in the mesh's layout.
      reverse: True runs from the end as above; False from the start, y_t = a_t * y_(t-1) + b_t.
      segment_ids: `i32[R, T]` like b: y is 0 on padding. Without them a row is one sequence.
      parallel, num_segments: see `redistribute`.

    Returns:
      `[R, T]` in the wider of the dtypes of a and b, at least f32.

    Raises:
      ValueError: shapes that differ, a row length that the layout cannot divide, missing
        segment_ids.
      TypeError: num_segments that is no static integer.

    Example:
      >>> scan_affine(0.5, jnp.array([[0.0, 4.0, 0.0, 8.0]]), segment_ids=jnp.array([[1, 1, 2, 2]]))
      Array([[2., 4., 4., 8.]], dtype=float32)
    """
    for name, x in {"a": a, "b": b}.items():
        dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        if not jnp.issubdtype(dtype, jnp.number):
            raise TypeError(f"{name}: got {x!r}, expected numbers [R, T]")
    if np.ndim(b) != 2 or np.shape(a) not in ((), np.shape(b)):
        raise ValueError(
            f"a, b: got shapes {np.shape(a)} and {np.shape(b)}, expected [R, T] both, or a scalar a"
        )
    check_context_rows(parallel, {"b": b}, segment_ids, num_segments, "scan_affine")
    a = jnp.asarray(a)
    dtype = wider_dtype(a, b, jnp.float32)
    args = {
        "a": jnp.broadcast_to(a.astype(dtype), b.shape),
        "b": b.astype(dtype),
        "segment_ids": segment_ids,
    }
    return shard_call("scan_affine", _scan, parallel, args, _specs(3), (reverse, num_segments))


def _scan(
    axes: ShardAxes, static: Any, a: jax.Array, b: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
    reverse, num_segments = static
    return scan_shard(axes, a, b, reverse, segment_ids, num_segments)


def scan_shard(
    axes: ShardAxes,
    a: jax.Array,
    b: jax.Array,
    reverse: bool,
    segment_ids: jax.Array | None,
    num_segments: int | None,
) -> jax.Array:
    """`scan_affine` for code inside a `shard_map`, each array as this device holds it."""
    layout = _layout_of(axes)
    return layout.scan(
        axes, layout.row(axes, b, segment_ids, num_segments), (a, b), reverse, segment_ids
    )


def _specs(rows: int, scalars: int = 0) -> Callable[[ParallelMesh], tuple[list[P], P]]:
    return lambda p: ([p.tokens_spec] * rows + [P()] * scalars, p.tokens_spec)


def check_context_rows(
    parallel: Parallel,
    arrays: dict[str, Any],
    segment_ids: jax.Array | None,
    num_segments: int | None,
    function: str,
    *layouts: Layout,
) -> None:
    """Raises where arrays, by name, or pytrees of them cannot be `[R, T, ...]` in layouts, by
    default the mesh's.
    """
    check_parallel(parallel)
    if parallel is not None:
        layouts = layouts or (find_layout(parallel.context_layout),)
    for layout in layouts:
        for name, value in (("segment_ids", segment_ids), ("num_segments", num_segments)):
            if layout.per_segment and value is None:
                raise ValueError(
                    f"{name}: got None in {function}, expected it for context layout"
                    f" {layout.name!r}"
                )
    if num_segments is not None:
        check_int("num_segments", num_segments, 1)
    rows = None
    if segment_ids is not None:
        rows, dtype = (
            np.shape(segment_ids),
            getattr(segment_ids, "dtype", type(segment_ids).__name__),
        )
        if len(rows) != 2 or isinstance(dtype, str) or not jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(f"segment_ids: got {dtype}{rows}, expected integers [R, T]")
    for name, value in arrays.items():
        if not jax.tree.leaves(value):
            raise TypeError(
                f"{name}: got {value!r} in {function}, expected an array [R, T, ...], or a tree of"
                " them"
            )
    shards = 1 if parallel is None else parallel.size(parallel.context)
    for path, leaf in jax.tree.leaves_with_path(arrays):
        name, shape = path[0].key + jax.tree_util.keystr(path[1:]), np.shape(leaf)
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"{name}: got shape {shape}, expected [R, T, ...], each at least 1")
        rows = rows or shape[:2]
        if shape[:2] != rows:
            raise ValueError(
                f"{name}: got shape {shape}, expected [R, T, ...] with [R, T] = {rows}"
            )
        length = shape[1] * (shards if isinstance(parallel, ShardAxes) else 1)
        for layout in layouts:
            check_row_length(length, layout.name, shards, f"row length in {function}")


def _layout_of(axes: ShardAxes) -> Layout:
    return find_layout(axes.context_layout, shards=axes.size(axes.context))
