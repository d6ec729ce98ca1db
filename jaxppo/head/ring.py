"""A sum over devices that goes around a ring, while each device computes the terms that it adds.

Every device ends with one share of the sum, or with all shares where they are gathered. The sum of a share starts at
the device behind its own and goes from neighbour to neighbour. Each adds its term, which it computed while the sum was
on its way. So links and matrix units work at the same time, as they would not with one collective behind the product.
Half of the rows go around one way, half the other way, since a link carries both at once. A complete share goes around
again to be gathered, beside the products of the block that follows.

Sixteen devices are rings of four, whose shares go around in rings of four again: a product for each of sixteen shares
would be a narrow one. All turns are written out. In a loop over them XLA for TPUs would copy the operands of products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.types import Names
from jaxppo.sharding import vary, varying

LANES = 128  # of a register
LEAST = 64  # features of a share: narrower ones would be padded to many times their size
MOST = 4  # devices in a ring; more only if their number is a multiple of no smaller one

# part(start, size, first, width): the block of a matrix with `size` of one dimension, from `start` on, and `width` of
# the other, from `first` on.
Part = Callable[[Any, int, Any, int], jax.Array]


def block_of(x: jax.Array, dim: int, start: Any, size: int, first: Any, width: int) -> jax.Array:
    """`partial(block_of, x, dim)` is the `Part` of an array that is there already, cut into blocks along `dim`."""
    at, shape = ((start, first), (size, width)) if dim == 0 else ((first, start), (width, size))
    return x if shape == x.shape else lax.dynamic_slice(x, at, shape)


def ring_axes(width: int, names: Names, multiple: int = LEAST) -> Names:
    """Those of the axes whose devices can have equal shares of `width`, each a `multiple`.

    They come in the order of the mesh: `lax.ppermute` counts devices in that order, whatever the order of its names.
    """
    found: Names = ()
    for name in (x for x in jax.sharding.get_abstract_mesh().axis_names if x in names):
        count = math.prod(map(lax.axis_size, (*found, name)))
        if width % (multiple * count) == 0:
            found = (*found, name)
    return found


def rings_of(names: Names) -> list[tuple[int, int]]:
    """Rings of a few devices: how many there are in one, and how many places apart in the order of the mesh.

    After a sum around the first rings, then the second, and so on, device i has share i.
    """
    stride, found = lax.axis_size(names), list[tuple[int, int]]()
    while stride > 1:
        devices = next((n for n in range(MOST, 1, -1) if stride % n == 0), stride)
        stride //= devices
        found.append((devices, stride))
    return found


def ring_sum(
    names: Names,
    rings: Sequence[tuple[int, int]],
    term: Part,
    dim: int,
    length: int,
    width: int,
    size: int,
    finish: Callable[[jax.Array], jax.Array],
    gathers: bool,
) -> jax.Array:
    """The sum of all devices' terms.

    Args:
      names: the axes whose devices form the rings, as `ring_axes` returns them.
      rings: what `rings_of` returns. The first cuts the sum into shares, the second shares into shares, and so on.
      term: blocks of this device's term, cut along `dim` and the other dimension.
      dim: the dimension that is cut into blocks of `size`, 0 or 1.
      length: how much there is of it.
      width: how much there is of the other, which is cut into shares.
      size: the size of a block, at most `length`. The last one overlaps the one before it.
      finish: what is done with a share once it is complete.
      gathers: give each device all shares, not its own alone.
    """
    if not rings:
        return finish(term(0, length, 0, width))
    (devices, stride), rest = rings[0], rings[1:]
    share, place = width // devices, lax.axis_index(names) // stride % devices
    ways = [(1, 0, size // 2), (-1, size // 2, size - size // 2)]  # the step to the neighbour, the first row, rows
    ways = [way for way in ways if way[2]]

    def terms(start: Any, k: int) -> list[jax.Array]:
        return [term(start + row, n, (place - step * (k + 1)) % devices * share, share) for step, row, n in ways]

    def neighbour(i: int, step: int) -> int:
        before = i // stride % devices
        return i + ((before + step) % devices - before) * stride

    def pass_on(halves: list[jax.Array]) -> list[jax.Array]:
        everyone = range(lax.axis_size(names))
        pairs = [[(i, neighbour(i, step)) for i in everyone] for step, _, _ in ways]
        return [lax.ppermute(x, names, each) for x, each in zip(halves, pairs, strict=True)]

    def complete(halves: list[jax.Array]) -> list[jax.Array]:
        given = zip(halves, [rows for _, _, rows in ways], strict=True)
        return [
            ring_sum(names, rest, partial(block_of, x, dim), dim, rows, share, rows, finish, gathers)
            for x, rows in given
        ]

    def scattered(start: Any) -> list[jax.Array]:
        sums = terms(start, 0)
        for k in range(1, devices):
            sums = [x + y for x, y in zip(pass_on(sums), terms(start, k), strict=True)]
        return sums

    def gathered(out: jax.Array, ready: list[jax.Array], start: Any) -> jax.Array:
        for k in range(devices if gathers else 1):
            ready = pass_on(ready) if k else ready
            for (step, row, _), x in zip(ways, ready, strict=True):
                at = (start + row, (place - step * k) % devices * share if gathers else 0)
                out = lax.dynamic_update_slice(out, x, at if dim == 0 else at[::-1])
        return out

    def share_of(start: Any) -> list[jax.Array]:
        return scattered(start) if rest else complete(scattered(start))

    unit = math.gcd(size, length - size)  # a factor of starts, from which XLA knows how blocks are aligned

    def block(b: Any, carry: Any) -> Any:
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
