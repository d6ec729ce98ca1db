"""The row cut into 2C chunks, r and 2C-1-r on shard r, so that causal attention costs every shard the same.

Megatron's context parallelism of a padded batch; Transformer Engine's and MaxText's dual chunk swap (MaxText's
`context_parallel_load_balance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..axes import ShardAxes
from .base import Points, Row
from .contiguous import Contiguous


class Zigzag(Contiguous):
    name = "zigzag"
    halves = 2

    def span(self, points: Any, row: Row) -> tuple[Any, Any]:
        """The start and the size of the span, here the row, whose chunks hold each of the positions."""
        return 0, row.length

    def position_at(self, places: Points, row: Row) -> Points:
        shard, offset = places // row.local, places % row.local
        start, size = self.span(offset * row.shards, row)  # a shard holds an equal part of each span
        chunk, offset = size // (2 * row.shards), offset - start // row.shards
        second = (offset >= chunk).astype(offset.dtype)
        return start + _mirrored(shard, second, row) * chunk + offset - second * chunk

    def place_of(self, positions: Points, row: Row) -> Points:
        start, size = self.span(positions, row)
        chunk = size // (2 * row.shards)
        link, offset = (positions - start) // chunk, (positions - start) % chunk
        second = (link >= row.shards).astype(link.dtype)
        return _mirrored(link, second, row) * row.local + start // row.shards + second * chunk + offset

    def from_contiguous(self, axes: ShardAxes, row: Row, x: jax.Array) -> jax.Array:
        sent = _permute(axes, row, jnp.split(x, 2, axis=1), back=False)
        return jnp.concatenate(_even_first(axes, *sent), axis=1)

    def to_contiguous(self, axes: ShardAxes, row: Row, x: jax.Array) -> jax.Array:
        return jnp.concatenate(_permute(axes, row, _even_first(axes, *jnp.split(x, 2, axis=1)), back=True), axis=1)


def _mirrored(link: Points, second: Points, row: Row) -> Points:
    """The shard of a link of a chain, or the link of a shard: 2C-1-x for second links, else x."""
    return link + second * (2 * row.shards - 1 - 2 * link)


def _permute(axes: ShardAxes, row: Row, halves: Sequence[jax.Array], back: bool) -> list[jax.Array]:
    """Sends the even and the odd chunk of each contiguous shard to its shard in zigzag, or back."""
    homes = [min(chunk, 2 * row.shards - 1 - chunk) for chunk in range(2 * row.shards)]
    ways = [[pair[::-1] if back else pair for pair in enumerate(homes[odd::2])] for odd in (0, 1)]
    return [axes.permute(half, axes.context, way) for half, way in zip(halves, ways, strict=True)]


def _even_first(axes: ShardAxes, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Swaps (first, second) chunk to (even, odd) chunk, or back; the first one on shard r is chunk r."""
    is_even = axes.index(axes.context) % 2 == 0
    return jnp.where(is_even, first, second), jnp.where(is_even, second, first)
