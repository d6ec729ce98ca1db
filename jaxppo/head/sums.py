"""Sums over devices of gradients, in f32: collectives, or a ring whose messages travel beside the products.

A term is this device's part of a sum: `term(start, size)` computes so many of its rows or columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.call import Names
from jaxppo.head.order import Index
from jaxppo.head.sizes import UNIT
from jaxppo.head.tile import rounded

Term = Callable[[Index, int], jax.Array]


def summed(term: Term, dim: int, length: int, names: Names, dtype: Any, ring: int, pieces: int) -> jax.Array:
    """The sum over the axes `names` of terms with this length of a dimension, rounded behind the sum.

    Whole shares go around a ring of at most so many devices. Collectives sum the rest, or else all in so many pieces:
    the product of one is computed beside the sum of another. Without a sum there is one piece: XLA for GPUs would copy
    several.
    """
    devices = lax.axis_size(names)
    sums = []
    done = 0
    if not names:
        pieces = 1
    elif 1 < devices <= ring:
        whole = 2 * devices * UNIT
        done = length // whole * whole
        pieces = 1  # for what is left
    if done:
        share = jnp.concatenate(ring_sum(term, done, names), dim)
        sums.append(lax.all_gather(rounded(share, dtype), names, axis=dim, tiled=True, to="invarying"))
    size = max(1, -(-(length - done) // pieces))
    for start in range(done, length, size):
        piece = term(start, min(size, length - start))
        if names:
            piece = lax.psum(piece, names)
        sums.append(rounded(piece, dtype))
    return jnp.concatenate(sums, dim)


def scattered(term: Term, dim: int, length: int, names: Names, rest: Names, dtype: Any, ring: int) -> jax.Array:
    """This device's share, as the axes `names` shard a dimension, of the sum over them and the axes `rest`."""
    devices = lax.axis_size(names)
    if 1 < devices <= ring and length % (2 * devices) == 0 and names == in_order(names):
        share = jnp.concatenate(ring_sum(term, length, names), dim)
    else:
        share = lax.psum_scatter(term(0, length), names, scatter_dimension=dim, tiled=True)
    if rest:
        share = lax.psum(share, rest)
    return rounded(share, dtype)


def in_order(names: Any) -> Names:
    """Names in the order in which JAX counts places along several axes."""
    return tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in names)


def ring_sum(term: Term, length: int, names: Names) -> tuple[jax.Array, jax.Array]:
    """This device's share of the sum over a ring of devices, in two halves: one goes around each way.

    Share i of the first half starts on device i + 1 and reaches device i last. Each device on its way adds its own
    term, which it can compute while the sum so far is on a link. The second half goes the other way.
    """
    devices = lax.axis_size(names)
    size = length // (2 * devices)  # of half a share
    me = lax.axis_index(names)

    def half_term(share: Index, half: int) -> jax.Array:
        return term((2 * lax.rem(share, devices) + half) * size, size)

    up = [(i, (i + 1) % devices) for i in range(devices)]
    down = [(i, (i - 1) % devices) for i in range(devices)]
    first = half_term(me + devices - 1, 0)
    second = half_term(me + 1, 1)
    for step in range(2, devices + 1):
        first = lax.ppermute(first, names, up) + half_term(me + devices - step, 0)
        second = lax.ppermute(second, names, down) + half_term(me + step, 1)
    return first, second
