"""Sums over devices of terms that each device computes while sums are on their way, so that links and products overlap.

A sum goes around a ring of devices. Each device ends with one share of it, or with all shares if they are gathered. The
sum of a share starts at the device behind the share's own, and each device adds its term. Half of a share goes around
one way, half the other way, since a link carries both at once. Where there is no ring, one collective sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.border import Axes, Index, put_slice, rounded
from jaxppo.head.call import HeadCall, Names
from jaxppo.sharding import unvary, vary

Term = Callable[[Index, int], jax.Array]  # term(start, size): a part of this device's term along one dimension
UNIT, LANES = 16, 128
LARGE = 2**25  # numbers of a sum that is made in two blocks, one after the other, which takes less memory


def summed(
    call: HeadCall, term: Term, dim: int, length: int, axes: Axes, dtype: Any, scatter: Names = (), wide: bool = True
) -> jax.Array:
    """The sum of terms over `axes`, rounded to `dtype` behind the sum.

    Args:
      call: the static part of the call.
      term: parts of this device's term along `dim`, f32.
      dim: the dimension that is cut into shares, 0 or 1.
      length: its size.
      axes: the mesh axes to sum over.
      dtype: that of the result.
      scatter: the axes that shard `dim` of the result; each device keeps its share.
      wide: sum in f32; otherwise terms are rounded before they are added.
    """
    given = term if wide else lambda *part: rounded(term(*part), dtype)
    names = tuple(n for n in jax.sharding.get_abstract_mesh().axis_names if n in (scatter or axes))
    n = lax.axis_size(names) if names else 1
    rest = tuple(sorted(axes - set(names)))

    def done(x: jax.Array) -> jax.Array:
        return rounded(lax.psum(x, rest) if rest else x, dtype)

    fits = length % (2 * n * UNIT) == 0 and scatter == names if scatter else length >= 2 * n * LANES
    if n == 1 or not call.profile.rings or not fits:
        total = given(0, length)
        if scatter:
            total = lax.psum_scatter(total, scatter, scatter_dimension=dim, tiled=True)
        elif names:
            total = lax.psum(total, names)
        return done(total)
    width = math.prod(jax.eval_shape(lambda: given(0, length)).shape) // length
    blocks = 1 if scatter or length < 4 * n * LANES or length * width < LARGE else 2
    size = -(-length // (2 * n * blocks * UNIT)) * UNIT  # the last share overlaps the one before: both hold its sum

    def block(b: Index, out: jax.Array) -> jax.Array:
        def start(share: Index, half: int) -> Index:
            return jnp.minimum(((2 * share + half) * blocks + b) * size, length - size)

        halves = [done(x) for x in ring_sum(lambda share, half: given(start(share, half), size), names)]
        if scatter:
            return jnp.concatenate(halves, dim)
        return ring_gather(halves, names, lambda out, share, half, x: put_slice(out, x, start(share, half), dim), out)

    like = jax.eval_shape(lambda: given(0, size))
    shape = (length, like.shape[1]) if dim == 0 else (like.shape[0], length)
    kept = frozenset(like.manual_axis_type.varying) - set(rest)
    if scatter:
        return block(0, vary(lax.empty((1, 1), dtype), kept))
    out = vary(lax.empty(shape, dtype), kept)
    return unvary(block(0, out) if blocks == 1 else lax.fori_loop(0, blocks, block, out), names)


def ring_sum(term: Callable[[Index, int], jax.Array], names: Names) -> list[jax.Array]:
    """The two halves of this device's share of the sum over devices of term(share, half); one goes around each way."""
    n, me = lax.axis_size(names), lax.axis_index(names)
    totals = []
    for half, step in enumerate((1, -1)):
        total = term(lax.rem(me - step + n, n), half)
        for k in range(2, n + 1):
            total = _onward(total, names, step) + term(lax.rem(me - k * step + 2 * n, n), half)
        totals.append(total)
    return totals


def ring_gather(
    halves: list[jax.Array], names: Names, put: Callable[[jax.Array, Index, int, jax.Array], jax.Array], out: jax.Array
) -> jax.Array:
    """`out` with the halves of all devices' shares: out = put(out, share, half, x)."""
    n, me = lax.axis_size(names), lax.axis_index(names)
    for k in range(n):
        for half, step in enumerate((1, -1)):
            out = put(out, lax.rem(me - k * step + n, n), half, halves[half])
        if k < n - 1:
            halves = [_onward(x, names, step) for x, step in zip(halves, (1, -1), strict=True)]
    return out


def _onward(x: jax.Array, names: Names, step: int) -> jax.Array:
    n = lax.axis_size(names)
    return lax.ppermute(x, names, [(i, (i + step) % n) for i in range(n)])
