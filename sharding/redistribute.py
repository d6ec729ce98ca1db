"""Rows moved from one context layout to another by explicit collectives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import linear_call
from jaxtyping import Array, Int

from .layout import check_row_length, held_at, logical_positions, padded_ends, physical_places, place_of
from .mesh import ParallelMesh, ShardAxes, check_layout, shard_call, vary, varying
from .segments import Segments

PER_SEGMENT = "zigzag_per_segment"


def redistribute(
    x: Any,
    parallel: ParallelMesh | ShardAxes | None,
    source: str,
    target: str,
    segment_ids: Int[Array, "R T"] | None = None,
    num_segments: int | None = None,
) -> Any:
    """x in another context layout: y[place in target of t] = x[place in source of t] for each logical position t.

    Between contiguous and zigzag two ppermutes move every element at most once; between striped and either of them it
    is one all_to_all; where "zigzag_per_segment" takes part, an all_gather of the row and a take. The way back is the
    exact inverse, and so is the transpose under a gradient.

    Args:
      x: `[R, T, ...]` of any dtype, or a pytree of them; None leaves stay None.
      parallel: the mesh; rows sharded over data, positions over context.
      source: the layout that x is in, whatever `parallel.context_layout` says.
      target: the layout to bring it to.
      segment_ids: `i32[R, T]` in the source layout, as `pack` gives them; for "zigzag_per_segment" only.
      num_segments: S, static; for "zigzag_per_segment" only.

    Returns:
      The pytree of x in the target layout.

    Raises:
      ValueError: an unknown layout, a row length that it cannot divide, missing or misshapen segment_ids.

    Example:
      >>> redistribute(jnp.arange(4)[None], None, "contiguous", "zigzag")
      Array([[0, 1, 2, 3]], dtype=int32)
    """
    check_layout(source, "source")
    check_layout(target, "target")
    check_rows(x, segment_ids)
    if source == target:
        return x
    per_segment = PER_SEGMENT in (source, target)
    if per_segment:
        require_segments("redistribute", segment_ids, num_segments)
    for layout in (source, target):
        _check_divides(parallel, x, layout, "redistribute")
    args = {"x": x, "segment_ids": segment_ids if per_segment else None}
    specs = lambda p: ([p.tokens_spec] * 2, p.tokens_spec)  # noqa: E731
    return shard_call("redistribute", _per_shard, parallel, args, specs, (source, target, num_segments))


def _per_shard(axes: ShardAxes, static: tuple[str, str, int | None], x: Any, segment_ids: jax.Array | None) -> Any:
    source, target, num_segments = static
    ends = None if segment_ids is None else segment_lengths_and_ends(axes, segment_ids, num_segments)[1]
    return to_layout(axes, x, source, target, ends)


def to_layout(axes: ShardAxes, tree: Any, source: str, target: str, ends: jax.Array | None = None) -> Any:
    """`redistribute` for code inside a `shard_map`; `ends` from `segment_lengths_and_ends` for "zigzag_per_segment"."""
    return jax.tree.map(lambda leaf: move(axes, leaf, source, target, ends), tree)


def segment_lengths_and_ends(
    axes: ShardAxes, segment_ids: jax.Array | None, num_segments: int | None
) -> tuple[Int[Array, "R S"], Int[Array, "R S+1"]]:
    """Lengths of the sequences of each row and the logical ends of the padded ones, for one psum of `[R, S]`."""
    segment_ids, num_segments = require_segments("segment_lengths_and_ends", segment_ids, num_segments)
    lengths = Segments(segment_ids, num_segments, axes).sum(jnp.ones_like(segment_ids))
    shards = axes.size(axes.context)
    return lengths, padded_ends(lengths, segment_ids.shape[1] * shards, shards, jnp)


def check_context_rows(
    parallel: ParallelMesh | ShardAxes | None,
    x: Any,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    function: str,
) -> None:
    """Raises where arrays in the mesh's own layout cannot be: their row length, or no segments where it needs them."""
    if parallel is None:
        return
    if parallel.context_layout == PER_SEGMENT:
        require_segments(function, segment_ids, num_segments)
    _check_divides(parallel, x, parallel.context_layout, function)


def _check_divides(parallel: ParallelMesh | ShardAxes | None, x: Any, layout: str, function: str) -> None:
    shards = 1 if parallel is None else parallel.size(parallel.context)
    for leaf in jax.tree.leaves(x):
        length = leaf.shape[1] * (shards if isinstance(parallel, ShardAxes) else 1)
        check_row_length(length, layout, shards, f"row length in {function}")


def check_rows(x: Any, segment_ids: jax.Array | None) -> None:
    """Raises where x is not of arrays `[R, T, ...]` with segment_ids `i32[R, T]`."""
    if segment_ids is not None and not (segment_ids.ndim == 2 and jnp.issubdtype(segment_ids.dtype, jnp.integer)):
        raise ValueError(f"segment_ids: got {segment_ids.dtype}{segment_ids.shape}, expected integers [R, T]")
    rows = None if segment_ids is None else segment_ids.shape
    for path, leaf in jax.tree.leaves_with_path(x):
        name = "x" + jax.tree_util.keystr(path)
        if leaf.ndim < 2:
            raise ValueError(f"{name}: got shape {leaf.shape}, expected [R, T, ...]")
        rows = rows or leaf.shape[:2]
        if leaf.shape[:2] != rows:
            raise ValueError(f"{name}: got shape {leaf.shape}, expected [R, T, ...] with [R, T] = {rows}")


def require_segments(function: str, segment_ids: Any, num_segments: int | None) -> tuple[jax.Array, int]:
    """Both, which "zigzag_per_segment" needs."""
    if segment_ids is None or num_segments is None:
        missing = "segment_ids" if segment_ids is None else "num_segments"
        raise ValueError(f"{missing}: got None in {function}, expected it for context layout {PER_SEGMENT!r}")
    if num_segments < 1:
        raise ValueError(f"num_segments: got {num_segments} in {function}, expected at least 1")
    return segment_ids, num_segments


def move(axes: ShardAxes, x: jax.Array, source: str, target: str, ends: jax.Array | None) -> jax.Array:
    """One array from layout to layout; its transpose is the move back."""
    if axes.size(axes.context) == 1 or source == target:
        return x
    x = vary(x, varying(x) | set(axes.context) | (varying(ends) if ends is not None else set()))
    forward = functools.partial(_move, axes, source, target)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return forward(ends, x)
    return linear_call(forward, functools.partial(_move, axes, target, source), ends, x)


def _move(axes: ShardAxes, source: str, target: str, ends: jax.Array | None, x: jax.Array) -> jax.Array:
    if PER_SEGMENT in (source, target):
        return _gather_and_take(axes, source, target, ends, x)
    if "striped" in (source, target):
        return _all_to_all(axes, source, target, x)
    return _to_zigzag(axes, x) if target == "zigzag" else _from_zigzag(axes, x)


def _homes(shards: int) -> tuple[list[int], list[int]]:
    """The shard that holds, in zigzag, the even and the odd chunk of each contiguous shard; each is a permutation."""
    homes = [min(chunk, 2 * shards - 1 - chunk) for chunk in range(2 * shards)]
    return homes[::2], homes[1::2]


def _to_zigzag(axes: ShardAxes, x: jax.Array) -> jax.Array:
    evens, odds = _homes(axes.size(axes.context))
    halves = jnp.split(x, 2, axis=1)
    even, odd = (
        lax.ppermute(half, axes.context, list(enumerate(homes)))
        for half, homes in zip(halves, (evens, odds), strict=True)
    )
    is_even = axes.index(axes.context) % 2 == 0  # shard r's first chunk is chunk r
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)


def _from_zigzag(axes: ShardAxes, x: jax.Array) -> jax.Array:
    evens, odds = _homes(axes.size(axes.context))
    first, second = jnp.split(x, 2, axis=1)
    is_even = axes.index(axes.context) % 2 == 0
    halves = (jnp.where(is_even, first, second), jnp.where(is_even, second, first))
    back = [
        lax.ppermute(half, axes.context, [(home, shard) for shard, home in enumerate(homes)])
        for half, homes in zip(halves, (evens, odds), strict=True)
    ]
    return jnp.concatenate(back, axis=1)


@functools.lru_cache
def _exchange_tables(source: str, target: str, length: int, shards: int) -> tuple[np.ndarray, np.ndarray]:
    """What each shard sends, `[C, C, m]` local places by receiver, and which of the `C*m` received it keeps."""
    local = length // shards
    home = physical_places(target, length, shards)[logical_positions(source, length, shards)]
    sender, receiver = np.arange(length) // local, home // local
    pair = sender * shards + receiver
    order = np.argsort(pair, kind="stable")
    counts = np.bincount(pair, minlength=shards * shards)
    slot = np.empty(length, np.int32)
    slot[order] = np.arange(length) - np.repeat(np.cumsum(counts) - counts, counts)
    width = counts.max()
    send = np.zeros((shards, shards, width), np.int32)
    send[sender, receiver, slot] = np.arange(length) % local
    keep = np.empty(length, np.int32)
    keep[home] = sender * width + slot
    return send, keep.reshape(shards, local)


def _all_to_all(axes: ShardAxes, source: str, target: str, x: jax.Array) -> jax.Array:
    shards = axes.size(axes.context)
    send, keep = _exchange_tables(source, target, x.shape[1] * shards, shards)
    me = axes.index(axes.context)
    outgoing = x[:, jnp.asarray(send)[me].reshape(-1)]
    received = lax.all_to_all(outgoing, axes.context, split_axis=1, concat_axis=1, tiled=True)
    return received[:, jnp.asarray(keep)[me]]


def _gather_and_take(axes: ShardAxes, source: str, target: str, ends: Any, x: jax.Array) -> jax.Array:
    shards = axes.size(axes.context)
    local, length = x.shape[1], x.shape[1] * shards
    row = lax.all_gather(x, axes.context, axis=1, tiled=True)
    places = axes.index(axes.context) * local + jnp.arange(local)
    logical = held_at(target, places, length, shards, ends, jnp)
    return take(row, place_of(source, logical, length, shards, ends, jnp))


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[r, index[r, j], ...] for x `[R, T, ...]` and index `[R, n]`."""
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1, mode="clip")
