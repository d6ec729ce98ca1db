"""Sums cotangents over mesh axes and casts them to the primal's dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.token_blocks import even_size
from jaxppo.head.types import SumDtype
from jaxppo.sharding import vary, varying


def as_primal(
    cotangent: jax.Array,
    primal: jax.Array,
    sum_dtype: SumDtype = "float32",
    *,
    shared: bool = False,
    keep: frozenset[str] | None = None,
    blocks: int = 0,
) -> jax.Array:
    """A cotangent in its primal's dtype and varying axes, summed over the axes that the primal lacks.

    Args:
      cotangent: f32, or the primal's dtype.
      primal: the array whose gradient the cotangent is.
      sum_dtype: "float32" rounds after the sum, "parameter" before it.
      shared: for a bf16 primal, each device sums one share in f32, rounds it, and sends it to all others.
      keep: the axes that are not summed over, by default those of the primal.
      blocks: the dimension of a matrix along which the cotangent may be one block of the whole. Shares are cut along
        the other dimension.
    """
    keep = varying(primal) if keep is None else keep
    extra = tuple(sorted(varying(cotangent) - keep))
    if sum_dtype != "float32" or not extra:
        cotangent = cotangent.astype(primal.dtype)
    narrows = bool(extra) and cotangent.dtype == jnp.float32 and primal.dtype == jnp.bfloat16
    sharers = _sharers(cotangent.shape, 1 - blocks, extra) if narrows and shared else ()
    rest = tuple(name for name in extra if name not in sharers)
    if sharers:
        # each device rounds its share of the sum before all of it is sent: 4 + 2 bytes a number rather than 4 + 4
        cotangent = lax.psum_scatter(cotangent, sharers, scatter_dimension=1 - blocks, tiled=True)
    if rest:
        cotangent = lax.psum(cotangent, rest)
    if narrows:
        # rounded before it is converted: else XLA for TPU sums in bf16, as the conversion is all it sees of the result
        cotangent = lax.reduce_precision(cotangent, exponent_bits=8, mantissa_bits=7)
    cotangent = cotangent.astype(primal.dtype)
    if sharers:
        cotangent = lax.all_gather(cotangent, sharers, axis=1 - blocks, tiled=True, to="invarying")
    return vary(cotangent, keep)


def _sharers(shape: tuple[int, ...], dim: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes whose devices can share a matrix along `dim`, in shares that are multiples of a TPU's 128 lanes.

    For other shares, and for shares over all devices of a mesh, XLA for TPUs computes the whole sum and slices it.
    """
    sharers: tuple[str, ...] = ()
    for name in names if len(shape) == 2 else ():
        count = math.prod(map(lax.axis_size, (*sharers, name)))
        if shape[dim] % (128 * count) == 0 and count < jax.sharding.get_abstract_mesh().size:
            sharers = (*sharers, name)
    return sharers


def sum_in_blocks(part: Callable[[Any, int], jax.Array], primal: jax.Array, dim: int, size: int, **how: Any) -> Any:
    """`as_primal` of a cotangent that `part(start, size)` computes, one block along `dim` at a time."""
    length = primal.shape[dim]
    size = even_size(length, size, 128)
    if size >= length:
        return as_primal(part(0, length), primal, **how, blocks=dim)

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(i * size, length - size)
        found = as_primal(part(start, size), primal, **how, blocks=dim)
        return lax.dynamic_update_slice_in_dim(out, found, start, dim)

    return lax.fori_loop(0, -(-length // size), block, unwritten(primal, dim))


def psum_in_blocks(x: jax.Array, primal: jax.Array, dim: int, size: int, **how: Any) -> jax.Array:
    """`as_primal` of x, one block of `size` along `dim` at a time: the sum needs no second array of the size of x."""
    size = size if varying(x) - varying(primal) else x.shape[dim]
    return sum_in_blocks(lambda start, n: lax.dynamic_slice_in_dim(x, start, n, dim), primal, dim, size, **how)


def unwritten(primal: jax.Array, dim: int) -> jax.Array:
    """An array of the primal's shape that blocks along `dim` will overwrite completely.

    For blocks of rows it is uninitialized. For blocks of columns it starts as zeros: XLA chooses the memory layout of
    an uninitialized array, and on a TPU v6e it chose one from which it had to transpose all of dkernel.
    """
    fill = lax.empty if dim == 0 else jnp.zeros
    return vary(fill(primal.shape, primal.dtype), varying(primal))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def first_order(name: str, x: jax.Array) -> jax.Array:
    """x, a gradient that cannot be differentiated again: trying to raises NotImplementedError."""
    return x


@first_order.defjvp
def _second_order(name: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"second derivatives of {name}: not implemented, since they would keep every block of logits; "
        "log_probs_from_logits has them"
    )
