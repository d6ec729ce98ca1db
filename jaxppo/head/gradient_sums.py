"""Sums cotangents over mesh axes and casts them to the primal's dtype."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxppo.head.ring import LANES, RingSum, in_mesh_order, ring_size, rings_of
from jaxppo.head.slices import put_slice
from jaxppo.head.token_blocks import even_size
from jaxppo.head.types import Index, Names, Submatrix, SumDtype
from jaxppo.sharding import unvary, vary, varying


def as_primal(
    cotangent: jax.Array,
    primal: jax.Array,
    sum_dtype: SumDtype = "float32",
    *,
    keep: frozenset[str] | None = None,
    is_sum: bool = False,
) -> jax.Array:
    """A cotangent in its primal's dtype and varying axes, summed over the axes that the primal lacks.

    Args:
      cotangent: f32, or the primal's dtype.
      primal: the array whose gradient the cotangent is.
      sum_dtype: "float32" rounds after the sum, "parameter" before it.
      keep: the axes that are not summed over, by default those of the primal.
      is_sum: the cotangent is already a sum over other axes.
    """
    keep = varying(primal) if keep is None else keep
    extra = tuple(sorted(varying(cotangent) - keep))
    if extra:
        cotangent = lax.psum(cotangent if sum_dtype == "float32" else cotangent.astype(primal.dtype), extra)
    if (extra or is_sum) and cotangent.dtype == jnp.float32 and primal.dtype == jnp.bfloat16:
        # round before the conversion: XLA for TPUs would see that the sum is only converted to bf16, and sum in bf16
        cotangent = lax.reduce_precision(cotangent, exponent_bits=8, mantissa_bits=7)
    return vary(cotangent.astype(primal.dtype), keep)


def sum_in_blocks(
    part: Submatrix,
    primal: jax.Array,
    dim: int,
    size: int,
    axes: frozenset[str],
    *,
    length: int | None = None,
    sum_dtype: SumDtype = "float32",
    rings: bool = False,
    by_rows: bool = False,
    scatter: Names = (),
    keep: frozenset[str] = frozenset(),
    is_sum: bool = False,
) -> jax.Array:
    """`as_primal` of a matrix that `part` computes, one block along `dim` at a time.

    Args:
      part: f32 blocks of this device's term; blocks start anywhere along `dim`.
      primal: the matrix whose gradient it is.
      dim: the dimension that is cut into blocks.
      size: the largest size of a block along `dim`.
      axes: the mesh axes along which the terms vary.
      length: the size of the result along `dim`, by default that of the primal.
      sum_dtype: see `as_primal`.
      rings: sum by rings if devices can have equal shares.
      by_rows: see `RingSum`.
      scatter: axes that shard the primal's other dimension; each device keeps only its share of that dimension.
      keep: axes that are not summed over, in addition to those of the primal.
      is_sum: see `as_primal`; after a scatter it counts as true.
    """
    length = primal.shape[dim] if length is None else length
    keep = keep | varying(primal)
    width = primal.shape[1 - dim] * math.prod(map(lax.axis_size, scatter))
    names = in_mesh_order(scatter or axes - keep) if rings else ()
    if names and (not scatter or names == scatter):
        around = rings_of(names)
        rows = ring_size(length, size, around)
        # Shares are of rows if possible: they lie together in memory. A product for a share of the features would read
        # its other operand again for few features.
        equal = width % (16 * math.prod(map(lax.axis_size, names))) == 0
        across = bool(scatter) or (equal and (dim == 1 or not rows))
        rows = even_size(length, size, 2 * LANES) if across else rows
        if rows:
            finish = partial(as_primal, primal=primal, sum_dtype=sum_dtype, keep=keep | set(names))
            rounded = part if sum_dtype == "float32" else lambda *block: part(*block).astype(primal.dtype)
            how = across, not scatter, by_rows, finish
            found = RingSum(names, around, rounded, dim, length, width, rows, *how).sum()
            return found if scatter else unvary(first_order("a loss from hidden states", found), names)

    def summed(start: Index, size: int) -> jax.Array:
        found = part(start, size, 0, width)
        if scatter:
            found = found if sum_dtype == "float32" else found.astype(primal.dtype)
            found = lax.psum_scatter(found, scatter, scatter_dimension=1 - dim, tiled=True)
        return as_primal(found, primal, sum_dtype, keep=keep, is_sum=is_sum or bool(scatter))

    size = even_size(length, size if axes - keep or scatter else length, LANES)
    if size >= length:
        return summed(0, length)

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(i * size, length - size)
        return put_slice(out, summed(start, size), start, dim)

    shape = (length, primal.shape[1]) if dim == 0 else (primal.shape[0], length)
    return lax.fori_loop(0, -(-length // size), block, unwritten(shape, primal.dtype, keep, dim))


def unwritten(shape: tuple[int, ...], dtype: DTypeLike, axes: frozenset[str], dim: int) -> jax.Array:
    """An array that blocks along `dim` will overwrite completely.

    For blocks of rows it is uninitialized. For blocks of columns it starts as zeros: XLA chooses the memory layout of
    an uninitialized array, and on a TPU v6e it chose one from which it had to transpose all of dkernel.
    """
    return vary((lax.empty if dim == 0 else jnp.zeros)(shape, dtype), axes)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def first_order(name: str, x: jax.Array) -> jax.Array:
    """Returns x, a gradient that cannot be differentiated again: an attempt raises NotImplementedError."""
    return x


@first_order.defjvp
def _second_order(name: str, primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError(
        f"second derivatives of {name}: not implemented, since they would keep every block of logits; "
        "log_probs_from_logits has them"
    )
