"""Cotangents in the type of their primals, and what may become of them."""

from __future__ import annotations

from functools import partial
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


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def first_order(name: str, x: jax.Array) -> jax.Array:
    """x, a gradient that cannot be differentiated again: whoever tries is told so, rather than given zeros."""
    return x


@first_order.defjvp
def _second_order(name: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"second derivatives of {name}: not implemented, since they would keep every block of logits; "
        "log_probs_from_logits has them"
    )


@jax.custom_vjp
def low_rank(hidden: jax.Array, a: jax.Array) -> jax.Array:
    """hidden @ a in the dtype of a, `[R, T, r]`; rows without a cotangent may hold anything, NaN included."""
    return _low(hidden, a).astype(a.dtype)


def _low(hidden: jax.Array, a: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(hidden.dtype, a.dtype)
    return jnp.einsum("bth,hr->btr", hidden.astype(dtype), a.astype(dtype), preferred_element_type=jnp.float32)


def _low_forward(hidden: jax.Array, a: jax.Array) -> Any:
    return low_rank(hidden, a), (hidden, a)


def _low_backward(saved: Any, g: jax.Array) -> Any:
    hidden, a = saved
    counts = (g != 0).any(axis=-1, keepdims=True)
    rows = jnp.where(counts, hidden, 0)
    dtype = jnp.promote_types(hidden.dtype, a.dtype)
    dhidden = jnp.einsum("btr,hr->bth", g.astype(dtype), a.astype(dtype), preferred_element_type=jnp.float32)
    da = jnp.einsum("bth,btr->hr", rows.astype(dtype), g.astype(dtype), preferred_element_type=jnp.float32)
    return as_primal(jnp.where(counts, dhidden, 0), hidden), as_primal(da, a)


low_rank.defvjp(_low_forward, _low_backward)
