"""A sum over devices that goes around a ring, while each device computes the terms that it adds.

Every device ends with one share of the sum, or with all shares if they are gathered. The sum of a share starts at the
device behind the share's own and goes from neighbour to neighbour. Each device adds its term, which it computed while
the sum was on its way. So links and matrix units work at the same time. With one collective behind the product they
would not. Half of the rows go around one way, half the other way, since a link carries both at once. If shares are
gathered, a complete share goes around again, beside the products of the block that follows.

Sixteen devices form rings of four, and the shares go around in rings of four again: a product for each of sixteen
shares would be small. All turns are written out. In a loop over them XLA for TPUs would copy the operands of products.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.slices import submatrix
from jaxppo.head.types import Index, Names, Submatrix
from jaxppo.sharding import vary, varying

LANES = 128  # lanes of a register
MOST = 4  # the most devices in a ring, if 2, 3 or 4 divides their number


def in_mesh_order(names: Collection[str]) -> Names:
    """These axes in the order of the mesh: `lax.ppermute` counts devices so, however its names are ordered."""
    return tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in names)


def rings_of(names: Names) -> list[tuple[int, int]]:
    """Splits devices into rings: pairs of the devices in a ring, and their distance in the order of the mesh.

    After a sum around the first rings, then the second, and so on, device i has share i.
    """
    stride, found = lax.axis_size(names), list[tuple[int, int]]()
    while stride > 1:
        devices = next((n for n in range(MOST, 1, -1) if stride % n == 0), stride)
        stride //= devices
        found.append((devices, stride))
    return found


def ring_size(length: int, most: int, rings: Sequence[tuple[int, int]]) -> int:
    """The size of blocks, at most about `most`, that rings can cut into equal shares; 0 if there is none."""
    unit, blocks = 16 * math.prod(devices for devices, _ in rings), -(-length // most)
    if blocks == 1 and length % unit == 0:
        return length
    size = -(-length // max(blocks, 2) // unit) * unit
    return size if size <= length else 0


# The half of a share that goes around one way: its step around the ring, 1 or -1, its rows and its columns.
_Half = tuple[int, slice, slice]


@dataclasses.dataclass(frozen=True)
class RingSum:
    """A sum over devices by rings; each block of a device's term is computed just before it is added.

    Args:
      names: the axes whose devices form the rings, in the order of the mesh.
      rings: what `rings_of` returns. The first cuts the sum into shares, the second shares into shares, and so on.
      term: blocks of this device's term, cut along `dim` and the other dimension.
      dim: the dimension that is cut into blocks, 0 or 1.
      length: the size of `dim`.
      width: the size of the other dimension.
      size: the size of a block, at most `length`. The last one overlaps the one before it.
      across: cut the width into shares; otherwise the length of a block is cut.
      gathers: give each device all shares, not only its own.
      by_rows: cut shares into halves by rows even if they have more columns. A term that computes dlogits for its rows
        would otherwise compute them again for the other columns.
      finish: what is done with a share once it is complete.
    """

    names: Names
    rings: Sequence[tuple[int, int]]
    term: Submatrix
    dim: int
    length: int
    width: int
    size: int
    across: bool
    gathers: bool
    by_rows: bool
    finish: Callable[[jax.Array], jax.Array]

    def sum(self) -> jax.Array:
        """The sum of all devices' terms, a block at a time; a block is gathered beside the products of the next."""
        if not self.rings:
            return self.finish(self.term(0, self.length, 0, self.width))
        _ = self._shares  # computed here, outside of the loop that uses it too
        later = len(self.rings) > 1  # the other rings overlap the products of the next block too

        def sums_of(start: Index) -> list[jax.Array]:
            return self._sums(start) if later else self._complete(self._sums(start))

        def put(out: jax.Array, sums: list[jax.Array], start: Index) -> jax.Array:
            return self._put(out, self._complete(sums) if later else sums, start)

        # a factor of all starts, which tells XLA how blocks are aligned
        unit = math.gcd(self.size, self.length - self.size)

        def block(b: Index, carry: Any) -> Any:
            out, before, at = carry
            start = unit * jnp.minimum(b * (self.size // unit), (self.length - self.size) // unit)
            new = sums_of(start)
            return put(out, before, at), new, start

        sums = jax.eval_shape(lambda: self._terms(0, 0))
        completed = jax.eval_shape(self._complete, sums)
        share = completed[0]
        shape = (self.length, self.width if self.gathers else share.shape[1 - self.dim])
        blocks = -(-self.length // self.size)
        # XLA allocates an uninitialized array long before a loop that fills it
        fill = jnp.zeros if blocks > 1 else lax.empty
        out = vary(fill(shape if self.dim == 0 else shape[::-1], share.dtype), varying(share))
        if blocks == 1:
            return put(out, sums_of(0), 0)
        empty = [vary(jnp.zeros(x.shape, x.dtype), varying(x)) for x in (sums if later else completed)]
        return put(*lax.fori_loop(0, blocks, block, (out, empty, jnp.int32(0))))

    @functools.cached_property
    def _shares(self) -> list[jax.Array]:
        """Where the share of this device starts, that of the next device in its ring, and so on."""
        devices, stride = self.rings[0]
        place = lax.div(lax.axis_index(self.names), jnp.int32(stride))
        size = self._share[1 if self.across else 0]
        return [size * lax.rem(place + k, jnp.int32(devices)) for k in range(devices)]

    @property
    def _share(self) -> tuple[int, int]:
        """Rows and columns of a share of a block."""
        devices = self.rings[0][0]
        return (self.size, self.width // devices) if self.across else (self.size // devices, self.width)

    @property
    def _halves(self) -> list[_Half]:
        """The halves of a share, cut by rows or along its longer side."""
        rows, columns = self._share
        if self.across or self.by_rows or rows >= columns:
            cut = rows // 2
            halves = [(1, slice(0, cut), slice(0, columns)), (-1, slice(cut, rows), slice(0, columns))]
        else:
            cut = columns // 2 // LANES * LANES or columns // 2
            halves = [(1, slice(0, rows), slice(0, cut)), (-1, slice(0, rows), slice(cut, columns))]
        return [half for half in halves if _size(half[1]) and _size(half[2])]

    def _at(self, start: Index, k: int, half: _Half) -> tuple[Index, int, Index, int]:
        """A half's place, as arguments of a `Submatrix`, in the share of the device k places behind, on its way."""
        step, rows, columns = half
        share = self._shares[-step * k % self.rings[0][0]]
        row, column = ((start,), (share,)) if self.across else ((start, share), ())
        return _total(*row, rows.start), _size(rows), _total(*column, columns.start), _size(columns)

    def _terms(self, start: Index, k: int) -> list[jax.Array]:
        return [self.term(*self._at(start, k + 1, half)) for half in self._halves]

    def _passed_on(self, sums: list[jax.Array]) -> list[jax.Array]:
        pairs = [_neighbours(lax.axis_size(self.names), *self.rings[0], step) for step, _, _ in self._halves]
        return [lax.ppermute(x, self.names, each) for x, each in zip(sums, pairs, strict=True)]

    def _sums(self, start: Index) -> list[jax.Array]:
        """The halves of this device's share of a block, summed around the first ring."""
        sums = self._terms(start, 0)
        for k in range(1, self.rings[0][0]):
            sums = [x + y for x, y in zip(self._passed_on(sums), self._terms(start, k), strict=True)]
        return sums

    def _complete(self, sums: list[jax.Array]) -> list[jax.Array]:
        """The sums after they have gone around the other rings too."""
        return [
            dataclasses.replace(
                self,
                rings=self.rings[1:],
                term=partial(submatrix, x, self.dim),
                length=_size(rows),
                width=_size(columns),
                size=_size(rows),
            ).sum()
            for x, (_, rows, columns) in zip(sums, self._halves, strict=True)
        ]

    def _put(self, out: jax.Array, ready: list[jax.Array], start: Index) -> jax.Array:
        """`out` with the complete halves of a block, and with those of the other devices if they are gathered."""
        if not isinstance(start, int):
            # It is never negative, but if XLA for a v6e sees that, it hides less: 1.8 ms of sums remain, not 1.1 ms.
            start = lax.select(lax.lt(start, 0), lax.add(start, self.length), start)
        for k in range(self.rings[0][0] if self.gathers else 1):
            ready = self._passed_on(ready) if k else ready
            for half, x in zip(self._halves, ready, strict=True):
                row, _, column, _ = self._at(start, k, half)
                at = (row, column if self.gathers else 0)
                at = at if self.dim == 0 else at[::-1]
                out = lax.dynamic_update_slice(out, x, at, allow_negative_indices=False)
        return out


def _total(*places: Index) -> Index:
    """The sum of places. Numbers are added in Python: each operation on an array takes its time to trace."""
    total: Index = sum(x for x in places if isinstance(x, int))
    for x in places:
        if not isinstance(x, int):
            total = x if isinstance(total, int) and total == 0 else lax.add(x, total)
    return total


def _size(side: slice) -> int:
    size: int = side.stop - side.start
    return size


def _neighbours(count: int, devices: int, stride: int, step: int) -> list[tuple[int, int]]:
    """Pairs of each device and the one `step` places on in its ring; devices of a ring are `stride` apart."""
    places = [(i, i // stride % devices) for i in range(count)]
    return [(i, i + ((place + step) % devices - place) * stride) for i, place in places]
