"""Sums over devices of gradients, in f32: collectives, or a ring whose messages travel beside the
products.

A term is this device's part of a sum: `term(starts, size)` computes so many of its rows or columns
from each start on, one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.call import Names
from jaxppo.head.order import Index, read
from jaxppo.head.sizes import UNIT
from jaxppo.head.tile import rounded

Starts = tuple[Index, ...]
Permutation = list[tuple[int, int]]
Term = Callable[[Starts, int], jax.Array]


def stored(array: jax.Array, dim: int, starts: Starts, size: int) -> jax.Array:
    """The term that lies in an array."""
    return jnp.concatenate([read(array, start, size, dim) for start in starts], dim)


def summed(
    term: Term, dim: int, length: int, names: Names, dtype: Any, ring: int, pieces: int
) -> jax.Array:
    """The sum over the axes `names` of terms with this length of a dimension, rounded after the
    sum.

    Whole shares go around a ring, unless `ring` is 0. Collectives sum the rest, or else all in so
    many pieces: the product of one is computed beside the sum of another. Without a sum there is
    one piece: XLA for GPUs would copy several.
    """
    devices = lax.axis_size(names)
    sums = []
    done = 0
    if not names:
        pieces = 1
    elif ring and devices > 1:
        whole = UNIT * parts_around(devices, ring)
        done = length // whole * whole
        pieces = 1  # for what is left
    if done:
        share = sum_around(term, dim, done, names, ring)
        sums.append(
            lax.all_gather(rounded(share, dtype), names, axis=dim, tiled=True, to="invarying")
        )
    size = max(1, -(-(length - done) // pieces))
    for start in range(done, length, size):
        piece = term((start,), min(size, length - start))
        if names:
            piece = lax.psum(piece, names)
        sums.append(rounded(piece, dtype))
    return jnp.concatenate(sums, dim)


def scattered(
    term: Term, dim: int, length: int, names: Names, rest: Names, dtype: Any, ring: int
) -> jax.Array:
    """This device's share, as the axes `names` shard a dimension, of the sum over them and the axes
    `rest`.

    It goes around a ring, or is a psum_scatter if `ring` is 0 or the length does not divide.
    """
    devices = lax.axis_size(names)
    is_ring = ring > 0 and devices > 1 and names == in_order(names)
    if is_ring and length % parts_around(devices, ring) == 0:
        share = sum_around(term, dim, length, names, ring)
    else:
        share = lax.psum_scatter(term((0,), length), names, scatter_dimension=dim, tiled=True)
    if rest:
        share = lax.psum(share, rest)
    return rounded(share, dtype)


def parts_around(devices: int, ring: int) -> int:
    """In how many equal parts `sum_around` cuts a dimension."""
    if devices <= ring:
        return 2 * devices
    return devices


def sum_around(term: Term, dim: int, length: int, names: Names, ring: int) -> jax.Array:
    """This device's share of the sum: around at most `ring` devices as in `ring_sum`, around more
    as in `wide_ring_sum`.

    XLA for TPUs makes an all-reduce of a psum_scatter over 16, and computes no product beside it.
    """
    if lax.axis_size(names) <= ring:
        return ring_sum(term, dim, length, names)
    return wide_ring_sum(term, dim, length, names)


def in_order(names: Any) -> Names:
    """Names in the order in which JAX counts places along several axes."""
    return tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in names)


def ring_sum(term: Term, dim: int, length: int, names: Names) -> jax.Array:
    """This device's share of the sum over a ring of devices, whose halves go around one each way.

    Share i of the first half starts on device i + 1 and reaches device i last. Each device on its
    way adds its own term, which it can compute while the sum so far is on a link. The second half
    goes the other way.
    """
    devices = lax.axis_size(names)
    size = length // (2 * devices)  # of half a share
    me = lax.axis_index(names)

    def half_term(share: Index, half: int) -> jax.Array:
        return term(((2 * lax.rem(share, devices) + half) * size,), size)

    up, down = neighbours(devices)
    first = half_term(me + devices - 1, 0)
    second = half_term(me + 1, 1)
    for step in range(2, devices + 1):
        first = lax.ppermute(first, names, up) + half_term(me + devices - step, 0)
        second = lax.ppermute(second, names, down) + half_term(me + step, 1)
    return jnp.concatenate([first, second], dim)


def wide_ring_sum(term: Term, dim: int, length: int, names: Names) -> jax.Array:
    """This device's share of the sum over a ring of many devices, to which half of them send from
    each side.

    A sum that goes up starts on the farthest device below and comes to that of its share. Each
    device on its way adds its own term. At each step a device computes its terms of two shares, one
    that goes up and one that goes down, as one product where it can: `ring_sum` would take four
    times as many, each of which reads the same array.
    """
    devices = lax.axis_size(names)
    size = length // devices
    me = lax.axis_index(names)

    def start_of(distance: int) -> Index:  # the share of the device so many places further up
        return lax.rem(me + distance + devices, devices) * size

    up, down = neighbours(devices)
    going_up = None
    going_down = None
    for distance in range(devices // 2, 0, -1):
        starts = [start_of(distance)]
        if 2 * distance < devices:  # else it is the same device both ways, whose share goes up
            starts.append(start_of(-distance))
        terms = jnp.split(term(tuple(starts), size), len(starts), dim)
        going_up = _passed_on(going_up, names, up, terms[0])
        if len(terms) == 2:
            going_down = _passed_on(going_down, names, down, terms[1])
    own = _passed_on(going_up, names, up, term((start_of(0),), size))
    return _passed_on(going_down, names, down, own)


def neighbours(devices: int) -> tuple[Permutation, Permutation]:
    """The permutations that send an array on, up and down a ring."""
    up = [(i, (i + 1) % devices) for i in range(devices)]
    down = [(i, (i - 1) % devices) for i in range(devices)]
    return up, down


def _passed_on(
    total: jax.Array | None, names: Names, permutation: Permutation, own: jax.Array
) -> jax.Array:
    """The sum so far, as a neighbour sends it, and a device's own term; the term alone where the
    sum starts.
    """
    if total is None:
        return own
    return lax.ppermute(total, names, permutation) + own
