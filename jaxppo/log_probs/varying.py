"""Cotangents in the type of their primals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo._sharding import vary, varying


def as_primal(cotangent: jax.Array, primal: jax.Array) -> jax.Array:
    """A cotangent in its primal's dtype and varying axes, summed as it is over the axes that the primal lacks."""
    return vary(psum_to(cotangent, varying(primal), primal.dtype), varying(primal))


def psum_to(x: jax.Array, axes: frozenset[str], dtype: Any) -> jax.Array:
    """x summed over the axes along which it varies beside `axes`, in its own dtype and then rounded to `dtype`."""
    extra = tuple(sorted(varying(x) - axes))
    if not extra:
        return x.astype(dtype)
    x = lax.psum(x, extra)
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    # rounded before it is converted: else XLA for TPU sums in bf16, as the conversion is all it sees of the result
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(dtype)


def psum_in_blocks(x: jax.Array, primal: jax.Array, dim: int, size: int) -> jax.Array:
    """`as_primal`, block by block of `size` along `dim`, so that the sum needs no second array of x's size."""
    length = x.shape[dim]
    size = min(size, length)
    if size == length or not varying(x) - varying(primal):
        return as_primal(x, primal)

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(i * size, length - size)
        part = as_primal(lax.dynamic_slice_in_dim(x, start, size, dim), primal)
        return lax.dynamic_update_slice_in_dim(out, part, start, dim)

    return lax.fori_loop(0, -(-length // size), block, vary(jnp.zeros(x.shape, primal.dtype), varying(primal)))
