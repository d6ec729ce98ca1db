"""A sum over devices that goes around a ring, while each device computes the terms that it adds.

Every device ends with one share of the sum, or with all shares where they are gathered. The sum of a share starts at
the device behind its own and goes from neighbour to neighbour. Each adds its term, which it computed while the sum was
on its way. So links and matrix units work at the same time, as they would not with one collective behind the product.
Half of the rows go around one way, half the other way, since a link carries both at once. A complete share goes around
again to be gathered, beside the products of the block that follows.

Sixteen devices are rings of four, whose shares go around in rings of four again: a product for each of sixteen shares
would be a small one. All turns are written out. In a loop over them XLA for TPUs would copy the operands of products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.types import Index, Names
from jaxppo.sharding import vary, varying

LANES = 128  # of a register
MOST = 4  # devices in a ring; more only if their number is a multiple of no smaller one

# part(start, size, first, width): the block of a matrix with `size` of one dimension, from `start` on, and `width` of
# the other, from `first` on.
Part = Callable[[Index, int, Index, int], jax.Array]


def block_of(x: jax.Array, dim: int, start: Index, size: int, first: Index, width: int) -> jax.Array:
    """`partial(block_of, x, dim)` is the `Part` of an array that is there already, cut into blocks along `dim`."""
    at, shape = ((start, first), (size, width)) if dim == 0 else ((first, start), (width, size))
    return x if shape == x.shape else lax.dynamic_slice(x, at, shape)


def in_mesh_order(names: Collection[str]) -> Names:
    """These axes in the order of the mesh, in which `lax.ppermute` counts devices, whatever the order of its names."""
    return tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in names)


def rings_of(names: Names) -> list[tuple[int, int]]:
    """Splits devices into rings of a few: how many are in a ring, and how many places apart in the order of the mesh.

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


def ring_sum(
    names: Names,
    rings: Sequence[tuple[int, int]],
    term: Part,
    dim: int,
    length: int,
    width: int,
    size: int,
    finish: Callable[[jax.Array], jax.Array],
    across: bool,
    gathers: bool,
) -> jax.Array:
    """Sums a matrix over devices by rings; each block of a term is computed just before it is added.

    Args:
      names: the axes whose devices form the rings, in the order of the mesh.
      rings: what `rings_of` returns. The first cuts the sum into shares, the second shares into shares, and so on.
      term: blocks of this device's term, cut along `dim` and the other dimension.
      dim: the dimension that is cut into blocks of `size`, 0 or 1.
      length: the size of that dimension.
      width: the size of the other.
      size: the size of a block, at most `length`. The last one overlaps the one before it.
      finish: what is done with a share once it is complete.
      across: shares cut the width, else the blocks.
      gathers: give each device all shares, not its own alone.
    """
    if not rings:
        return finish(term(0, length, 0, width))
    (devices, stride), rest = rings[0], rings[1:]
    place = lax.axis_index(names) // stride % devices
    rows, columns = (size, width // devices) if across else (size // devices, width)  # of a share
    pieces = _halves(rows, columns, across)

    def of_share(start: Index, k: int, piece: Sequence[int]) -> tuple[Any, int, Any, int]:
        """Where a piece of the share lies whose sum is at its k-th device behind the last."""
        step, row, n, first, m = piece
        share = (place - step * k) % devices
        return (start + row, n, share * columns + first, m) if across else (start + share * rows + row, n, first, m)

    def terms(start: Index, k: int) -> list[jax.Array]:
        return [term(*of_share(start, k + 1, piece)) for piece in pieces]

    def pass_on(halves: list[jax.Array]) -> list[jax.Array]:
        pairs = [_neighbours(lax.axis_size(names), devices, stride, piece[0]) for piece in pieces]
        return [lax.ppermute(x, names, each) for x, each in zip(halves, pairs, strict=True)]

    def complete(halves: list[jax.Array]) -> list[jax.Array]:
        return [
            ring_sum(names, rest, partial(block_of, x, dim), dim, n, m, n, finish, across, gathers)
            for x, (_, _, n, _, m) in zip(halves, pieces, strict=True)
        ]

    def scattered(start: Index) -> list[jax.Array]:
        sums = terms(start, 0)
        for k in range(1, devices):
            sums = [x + y for x, y in zip(pass_on(sums), terms(start, k), strict=True)]
        return sums

    def gathered(out: jax.Array, ready: list[jax.Array], start: Index) -> jax.Array:
        for k in range(devices if gathers else 1):
            ready = pass_on(ready) if k else ready
            for piece, x in zip(pieces, ready, strict=True):
                at, _, first, _ = of_share(start, k, piece)
                at = (at, first if gathers else 0)
                out = lax.dynamic_update_slice(out, x, at if dim == 0 else at[::-1])
        return out

    def share_of(start: Index) -> list[jax.Array]:
        return scattered(start) if rest else complete(scattered(start))

    unit = math.gcd(size, length - size)  # a factor of starts, from which XLA knows how blocks are aligned

    def block(b: Index, carry: Any) -> Any:
        out, before, at = carry
        start = unit * jnp.minimum(b * (size // unit), (length - size) // unit)
        new = share_of(start)
        return gathered(out, complete(before) if rest else before, at), new, start

    blocks, like = -(-length // size), jax.eval_shape(lambda: (complete(scattered(0))[0], share_of(0)))
    shape = (length, width if gathers else like[0].shape[1 - dim])
    # XLA allocates an uninitialized array long before a loop that fills it
    fill = jnp.zeros if blocks > 1 else lax.empty
    out = vary(fill(shape if dim == 0 else shape[::-1], like[0].dtype), varying(like[0]))
    if blocks == 1:
        return gathered(out, complete(scattered(0)), 0)
    empty = [vary(jnp.zeros(x.shape, x.dtype), varying(x)) for x in like[1]]
    out, last, start = lax.fori_loop(0, blocks, block, (out, empty, jnp.int32(0)))
    return gathered(out, complete(last) if rest else last, start)


def _halves(rows: int, columns: int, across: bool) -> list[tuple[int, int, int, int, int]]:
    """The halves of a share: each its step around the ring, first row, number of rows, first column, number of columns.

    If shares cut the width, halves are of rows; else the longer side is cut.
    """
    if across or rows >= columns:
        cut = rows // 2
        halves = [(1, 0, cut, 0, columns), (-1, cut, rows - cut, 0, columns)]
    else:
        cut = columns // 2 // LANES * LANES or columns // 2
        halves = [(1, 0, rows, 0, cut), (-1, 0, rows, cut, columns - cut)]
    return [half for half in halves if half[2] and half[4]]


def _neighbours(count: int, devices: int, stride: int, step: int) -> list[tuple[int, int]]:
    """(each device, the one `step` places on in its ring), of `count`; devices of a ring are `stride` places apart."""
    places = [(i, i // stride % devices) for i in range(count)]
    return [(i, i + ((place + step) % devices - place) * stride) for i, place in places]
