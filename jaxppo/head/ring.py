"""Sums over devices of terms that each device computes while sums are on their way, so that links and products overlap.

The sum of a share goes around a ring, from the device behind the share's own. Half of it goes around each way, since a
link carries both at once. Where there is no ring, collectives sum it in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.border import Axes, Index, put_slice, rounded, slice_of
from jaxppo.head.call import Names
from jaxppo.head.sweep import Work
from jaxppo.sharding import unvary, vary

# term(start, size, first, width): a part of this device's term, `size` of one dimension, and `width` of the other
Term = Callable[[Index, int, Index, int], jax.Array]
UNIT, LANES = 16, 128  # the rows and columns of a TPU's tile of bf16, to which parts are aligned
LONG = 2**28  # numbers of a sum. Longer ones, and scatters, go around at most 4 devices: more cost a GiB, or time
LARGE = 2**25  # numbers of a sum that is made in blocks, one after the other, if a plan has not room for one
AT_ONCE = 2**24  # the same on TPUs for a sum over more devices than a ring takes


def summed(
    work: Work,
    term: Term,
    dim: int,
    length: int,
    width: int,
    keep: Axes,
    dtype: Any,
    scatter: Names = (),
    wide: bool = True,
    zero: jax.Array | None = None,
) -> jax.Array:
    """The sum of f32 terms over all axes but `keep`, rounded to `dtype` behind the sum, or before it if not `wide`.

    Shares are cut of dimension `dim`; each device keeps its own if the axes `scatter` shard that dimension of the
    result. `zero` depends on what must be known before memory for the result is taken.
    """
    axes, rings = work.axes - keep, work.call.profile.rings
    given = term if wide else lambda *part: rounded(term(*part), dtype)
    names = tuple(n for n in jax.sharding.get_abstract_mesh().axis_names if n in (scatter or axes))
    n = lax.axis_size(names) if names else 1
    rest = tuple(sorted(axes - set(names)))

    def done(x: jax.Array) -> jax.Array:
        return rounded(lax.psum(x, rest) if rest else x, dtype) if names or rest else x.astype(dtype)

    def at_once(start: Index, size: int) -> jax.Array:
        if scatter:
            x = given(0, length, start, size)
            return done(lax.psum_scatter(x, scatter, scatter_dimension=dim, tiled=True))
        x = given(start, size, 0, width)
        return done(lax.psum(x, names) if names else x)

    fits = length % (2 * n * UNIT) == 0 and scatter == names if scatter else length >= 2 * n * LANES
    if n == 1 or n > (min(rings, 4) if scatter or length * width > LONG else rings) or not fits:
        count = -(-length * width // (AT_ONCE if rings else LARGE)) if n > 1 else 1
        return in_blocks(at_once, *((1 - dim, width) if scatter else (dim, length)), count, 2 if rings else 1)
    # halves of a scatter are joined by rows; each product of a fused plan computes the rows of dx that it multiplies
    uncut = scatter or work.plan.fused
    blocks = 1 if uncut or length < 8 * n * LANES or length * width < LARGE else work.plan.ring_blocks
    # A product for half a share reads the operand of the other half too, so the longer side is cut.
    cut = 0 if uncut or length % (n * blocks * UNIT) or length >= n * blocks * width else width // 2 // LANES * LANES
    pieces = n * blocks * (1 if cut else 2)
    size = -(-length // (pieces * UNIT)) * UNIT
    spare = 0 if cut or blocks > 1 else pieces * size - length  # rows of the last share that lie in both halves
    sides = ((0, cut), (cut, width - cut)) if cut else ((0, width), (0, width))
    me = vary(lax.axis_index(names), work.axes - set(rest))
    # where each device's share starts, in pieces, from this device's own share on
    shares = [x * (pieces // n) for x in (me, *(lax.rem(me + k, n) for k in range(1, n)))]

    def block(b: Index, out: jax.Array) -> jax.Array:
        def start(share: Index, half: int) -> Index:
            return start_of(share + (blocks + b if half and not cut else b), size, length)

        part: Callable[[Index, int], jax.Array] = lambda i, half: given(start(i, half), size, *sides[half])  # noqa: E731
        halves = [done(x) for x in ring_sum(part, shares, names, not work.plan.fused)]
        if scatter:
            return jnp.concatenate(halves, dim)
        # a start that a term also used would be computed outside the term's branch, where XLA forgets how it is aligned
        places, last = lax.optimization_barrier(shares), pieces - pieces // n
        rows = slice_of(halves[1], 0, spare, dim) if spare else out
        for k in range(n):
            for half, step in enumerate((1, -1)):
                at = start(places[-k * step % n], half), sides[half][0]
                out = lax.dynamic_update_slice(
                    out, halves[half], at if dim == 0 else at[::-1], allow_negative_indices=False
                )
            rows = jnp.where(places[k] == last, slice_of(halves[1], 0, spare, dim), rows) if spare else rows
            halves = [_onward(x, names, step) for x, step in zip(halves, (1, -1), strict=True)] if k < n - 1 else halves
        # of what both halves of the last share hold, every device keeps the second's: sums in another order differ
        return put_slice(out, rows, length - size, dim) if spare else out

    shape = (length, width) if dim == 0 else (width, length)
    out = vary(lax.empty(shape, dtype) if zero is None else jnp.full(shape, zero, dtype), work.axes - set(rest))
    return unvary(block(0, out) if blocks == 1 else lax.fori_loop(0, blocks, block, out), () if scatter else names)


def start_of(i: Index, size: int, length: int) -> Index:
    """Where the i-th of blocks starts, of which the last one may overlap the one before it."""
    unit = math.gcd(size, length - size)  # a factor of all starts, which tells XLA how they are aligned
    return unit * lax.min(i * (size // unit), (length - size) // unit)


def in_blocks(part: Callable[[Index, int], jax.Array], dim: int, length: int, count: int, most: int = 1) -> jax.Array:
    """The array of which part(start, size) is a block along `dim`, made in about `count` blocks."""
    size = -(-length // (count * LANES)) * LANES
    if size >= length:
        return part(0, length)
    count = -(-length // size)
    like = jax.eval_shape(lambda: part(0, size))
    shape = (length, like.shape[1]) if dim == 0 else (like.shape[0], length)

    def block(b: Index, out: jax.Array) -> jax.Array:
        start = start_of(b, size, length)
        return put_slice(out, part(start, size), start, dim)

    out = vary(jnp.zeros(shape, like.dtype), frozenset(like.manual_axis_type.varying))
    return lax.fori_loop(0, count, block, out, unroll=count <= most)  # without a loop sums are beside the next block


def ring_sum(term: Callable[..., jax.Array], shares: list[jax.Array], names: Names, both: bool) -> list[jax.Array]:
    """The two halves of this device's share of the sum over devices of term(share, half); one goes around each way.

    A term of the second half waits for the first one's sum, so that fewer messages are in memory at once. With `both`
    the first half waits too: faster, except where terms compute the gradients of logits.
    """
    n, totals = len(shares), [term(shares[-step], half) for half, step in enumerate((1, -1))]
    for k in range(2, n + 1):
        for half, step in enumerate((1, -1)):
            wait = (totals[1 - half][0, 0] > jnp.inf).astype(jnp.int32) if half or both else 0  # 0, as XLA cannot know
            totals[half] = _onward(totals[half], names, step) + term(shares[-k * step % n] + wait, half)
    return totals


def _onward(x: jax.Array, names: Names, step: int) -> jax.Array:
    n = lax.axis_size(names)
    return lax.ppermute(x, names, [(i, (i + step) % n) for i in range(n)])
