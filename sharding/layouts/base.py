"""The base class of context layouts, their registry, and the collectives that move rows from one
to another.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import linear_call

from ..axes import LAYOUTS, ShardAxes, check_layout, vary, varying

Points = TypeVar("Points", np.ndarray, jax.Array)  # on the host, or on a device
Pair = tuple[jax.Array, jax.Array]
Fill = jax.Array | float


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["lengths", "sizes"],
    meta_fields=["length", "shards"],
)
@dataclasses.dataclass(frozen=True)
class Row:
    """The shape of a row, which decides where positions lie.

    Args:
      length: T.
      shards: C.
      lengths: per segment, `[R, S]`, those of the sequences: a numpy array on the host, else a JAX
        array.
      sizes: per segment, `[R, S+1]`, the padded lengths and, last, the padding at the end of the
        row.
    """

    length: int
    shards: int
    lengths: Any = None
    sizes: Any = None

    @classmethod
    def of(cls, length: int, shards: int, lengths: Any, multiple: int, xp: ModuleType) -> Row:
        sizes = -(-lengths // multiple) * multiple
        behind = length - sizes.sum(axis=1, keepdims=True, dtype=sizes.dtype)
        return cls(length, shards, lengths, xp.concatenate([sizes, behind], axis=1))

    @property
    def local(self) -> int:
        return self.length // self.shards

    @property
    def ends(self) -> Any:
        """`[R, S+1]`, the position behind each padded sequence."""
        return self.sizes.cumsum(axis=1, dtype=self.sizes.dtype)

    def at(self, points: Any, values: Any) -> Any:
        """`[R, n]`: looks up `values` `[R, S+1]` at the sequence of each position, `[n]`,
        `[1, n]` or `[R, n]`.
        """
        points = points[..., None, :]
        ends = self.ends[:, :, None]
        inside = (points >= ends - self.sizes[:, :, None]) & (points < ends)
        return (inside.astype(values.dtype) * values[:, :, None]).sum(axis=1, dtype=values.dtype)


class Layout:
    """A permutation of the positions of a row over C > 1 context shards.

    A new layout is a subclass with a name, `position_at` and `place_of`. The other methods are
    correct for any layout, but move the whole shard. Override them where a layout can send less.
    """

    name: str
    # True if the formulas need sequence lengths; all functions then need segment_ids
    per_segment = False

    def row_multiple(self, shards: int) -> int:
        """T must be a multiple of this number; per segment, each padded sequence too."""
        return shards

    def position_at(self, places: Points, row: Row) -> Points:
        """The logical positions at physical places, numpy's `[n]` or JAX's `[1, n]`; `[R, n]`
        per segment.
        """
        raise NotImplementedError

    def place_of(self, positions: Points, row: Row) -> Points:
        """The physical places of logical positions `[n]`, `[1, n]` or `[R, n]`: the inverse of
        `position_at`.
        """
        raise NotImplementedError

    def to_contiguous(self, axes: ShardAxes, row: Row, x: jax.Array) -> jax.Array:
        """x in the contiguous layout, as this device holds it."""
        return exchange(axes, self, LAYOUTS["contiguous"], row, x)

    def from_contiguous(self, axes: ShardAxes, row: Row, x: jax.Array) -> jax.Array:
        """The inverse, and the transpose, of `to_contiguous`."""
        return exchange(axes, LAYOUTS["contiguous"], self, row, x)

    def shift(
        self, axes: ShardAxes, row: Row, x: Any, by: int, fill: Fill, segment_ids: jax.Array | None
    ) -> Any:
        """`shift_left` of what this device holds."""
        contiguous = LAYOUTS["contiguous"]
        x, segment_ids = move(axes, (x, segment_ids), self, contiguous, row)
        return move(
            axes, contiguous.shift(axes, row, x, by, fill, segment_ids), contiguous, self, row
        )

    def scan(
        self, axes: ShardAxes, row: Row, ab: Pair, reverse: bool, segment_ids: jax.Array | None
    ) -> jax.Array:
        """`scan_affine` of what this device holds."""
        contiguous = LAYOUTS["contiguous"]
        ab, segment_ids = move(axes, (ab, segment_ids), self, contiguous, row)
        return move(
            axes, contiguous.scan(axes, row, ab, reverse, segment_ids), contiguous, self, row
        )

    def row(
        self, axes: ShardAxes, x: Any, segment_ids: jax.Array | None, num_segments: int | None
    ) -> Row:
        """The `Row` of x; per segment it costs one psum of `[R, S]`."""
        shards = axes.size(axes.context)
        length = shards * jax.tree.leaves(x)[0].shape[1]
        if not self.per_segment:
            return Row(length, shards)
        for name, value in {"segment_ids": segment_ids, "num_segments": num_segments}.items():
            if value is None:
                raise ValueError(f"{name}: got None, expected it for context layout {self.name!r}")
        assert segment_ids is not None
        assert num_segments is not None
        numbers = jnp.arange(1, num_segments + 1, dtype=jnp.int32)
        held = segment_ids.astype(jnp.int32)[:, :, None] == numbers[None, None]
        lengths = axes.psum(held.sum(axis=1, dtype=jnp.int32), axes.context)
        return Row.of(length, shards, lengths, self.row_multiple(shards), jnp)


def register_layout(layout: Layout) -> None:
    """Registers a layout: `context_layout=layout.name` then means it in every function.

    Raises:
      TypeError, ValueError: not a Layout, a name that is taken.

    Example:
      >>> class Rotated(Layout):
      ...     name = "rotated"
      ...     def position_at(self, places, row):
      ...         return (places + row.local) % row.length
      ...     def place_of(self, positions, row):
      ...         return (positions - row.local) % row.length
      >>> register_layout(Rotated())
      >>> logical_positions("rotated", 6, 3).tolist()
      [2, 3, 4, 5, 0, 1]
      >>> del LAYOUTS["rotated"]
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout: got {layout!r}, expected an instance of a subclass of Layout")
    if layout.name in LAYOUTS:
        raise ValueError(
            f"layout: got the name {layout.name!r}, expected another than {', '.join(LAYOUTS)}"
        )
    LAYOUTS[layout.name] = layout


def find_layout(name: str, argument: str = "context_layout", shards: int | None = None) -> Layout:
    """The layout of that name; contiguous where there is one shard, which holds the row in order
    in any layout.
    """
    check_layout(name, argument)
    if shards == 1:
        return LAYOUTS["contiguous"]
    return LAYOUTS[name]


def move(axes: ShardAxes, x: Any, source: Layout, target: Layout, row: Row) -> Any:
    """`redistribute` of what this device holds; its transpose is the move back."""
    if row.shards == 1 or source is target:
        return x
    # jit keeps constants inside: in second derivatives linear_call would pass those of one trace to
    # another
    forth = jax.jit(functools.partial(_move, axes, source, target))
    back = jax.jit(functools.partial(_move, axes, target, source))
    needed = varying(row).union(axes.context)

    def move_one(x: jax.Array) -> jax.Array:
        x = vary(x, needed)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return forth(row, x)
        return linear_call(forth, back, row, x)

    return jax.tree.map(move_one, x)


def _move(axes: ShardAxes, source: Layout, target: Layout, row: Row, x: jax.Array) -> jax.Array:
    contiguous = LAYOUTS["contiguous"]
    if source is contiguous:
        return target.from_contiguous(axes, row, x)
    if target is contiguous:
        return source.to_contiguous(axes, row, x)
    return exchange(axes, source, target, row, x)


def exchange(axes: ShardAxes, source: Layout, target: Layout, row: Row, x: jax.Array) -> jax.Array:
    """Moves x from any layout to any: by one all_to_all or, per segment, by an all_gather of the
    row and a take.
    """
    if source.per_segment or target.per_segment:
        here = target.position_at(places_of(axes, row), row)
        whole = lax.all_gather(x, axes.context, axis=1, tiled=True)
        return take(whole, source.place_of(here, row))
    me = axes.index(axes.context)
    send, received_at = _exchange_tables(source, target, row.length, row.shards)
    outgoing = x[:, jnp.asarray(send)[me].reshape(-1)]
    received = lax.all_to_all(outgoing, axes.context, split_axis=1, concat_axis=1, tiled=True)
    return received[:, jnp.asarray(received_at)[me]]


def places_of(axes: ShardAxes, row: Row) -> jax.Array:
    """`i32[1, T_local]`, the physical places that this device holds."""
    return (axes.index(axes.context) * row.local + jnp.arange(row.local, dtype=jnp.int32))[None]


@functools.lru_cache
def _exchange_tables(
    source: Layout, target: Layout, length: int, shards: int
) -> tuple[np.ndarray, np.ndarray]:
    """The local places that shards send to each other, `[C, C, m]`, and which of `C*m` received
    each place keeps.
    """
    row = Row(length, shards)
    position = target.position_at(np.arange(length), row)
    came = source.place_of(position, row).reshape(shards, row.local)
    senders = came // row.local
    width = max(np.bincount(each).max() for each in senders)
    send = np.zeros((shards, shards, width), np.int32)
    received_at = np.zeros((shards, row.local), np.int32)
    for sender, receiver in np.ndindex(shards, shards):
        (places,) = np.nonzero(senders[receiver] == sender)
        send[sender, receiver, : places.size] = came[receiver, places] % row.local
        received_at[receiver, places] = sender * width + np.arange(places.size)
    return send, received_at


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[r, index[r, j], ...] for x `[R, T, ...]` and index `[R, n]`; an index out of range is
    clipped.
    """
    return jnp.take_along_axis(x, widen(index, x), axis=1, mode="clip")


def widen(x: jax.Array, like: jax.Array) -> jax.Array:
    """`[R, T]` with dimensions of 1 added, to broadcast against `[R, T, ...]`."""
    return x.reshape(x.shape + (1,) * (like.ndim - 2))
