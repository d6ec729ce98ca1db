"""Cotangents in the type of their primals, and what may become of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.tokens import even_block
from jaxppo.sharding import vary, varying, wider_dtype


@dataclasses.dataclass(frozen=True)
class Summing:
    """How gradients are summed over devices; static.

    Args:
      dtype: "float32", rounded after the sum, or "parameter", before it.
      shared: of a bf16 gradient each device sums its share of H in f32, rounds it, and sends it to all the others.
    """

    dtype: str = "float32"
    shared: bool = False


def as_primal(
    cotangent: jax.Array,
    primal: jax.Array,
    summing: Summing = Summing(),
    keep: frozenset[str] | None = None,
    blocks: int = 0,
) -> jax.Array:
    """A cotangent in its primal's dtype and varying axes, summed over the axes that the primal lacks.

    Args:
      cotangent: f32, or of the primal's dtype.
      primal: what it is the gradient of.
      summing: how.
      keep: the axes over which it is not summed, by default those of the primal.
      blocks: the dimension of a matrix in which it may be a block of the whole; devices share it along the other.
    """
    keep = varying(primal) if keep is None else keep
    extra = tuple(sorted(varying(cotangent) - keep))
    if summing.dtype != "float32" or not extra:
        cotangent = cotangent.astype(primal.dtype)
    narrows = bool(extra) and cotangent.dtype == jnp.float32 and primal.dtype == jnp.bfloat16
    sharers = _sharers(cotangent.shape, 1 - blocks, extra) if narrows and summing.shared else ()
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
    """As many axes as can share a matrix along `dim` in multiples of 128, the lanes of a TPU.

    Of other shares, and over all devices of a mesh, XLA for TPUs makes whole sums, to slice them.
    """
    sharers: tuple[str, ...] = ()
    for name in names if len(shape) == 2 else ():
        count = math.prod(map(lax.axis_size, (*sharers, name)))
        if shape[dim] % (128 * count) == 0 and count < jax.sharding.get_abstract_mesh().size:
            sharers = (*sharers, name)
    return sharers


def psum_in_blocks(x: jax.Array, primal: jax.Array, dim: int, size: int, summing: Summing) -> jax.Array:
    """`as_primal`, block by block of `size` along `dim`, so that the sum needs no second array of x's size."""
    size = size if varying(x) - varying(primal) else x.shape[dim]
    part = lambda start, size: lax.dynamic_slice_in_dim(x, start, size, dim)  # noqa: E731
    return sum_in_blocks(part, primal, dim, size, summing)


def sum_in_blocks(
    part: Callable[[Any, int], jax.Array], primal: jax.Array, dim: int, size: int, summing: Summing
) -> jax.Array:
    """`psum_in_blocks` for a cotangent that is made block by block: part(start, size)."""
    length = primal.shape[dim]
    size = even_block(length, size, 128)
    if size >= length:
        return as_primal(part(0, length), primal, summing, blocks=dim)

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(i * size, length - size)
        found = as_primal(part(start, size), primal, summing, blocks=dim)
        return lax.dynamic_update_slice_in_dim(out, found, start, dim)

    return lax.fori_loop(0, -(-length // size), block, unwritten(primal, dim))


def unwritten(primal: jax.Array, dim: int) -> jax.Array:
    """An array of the primal's shape, for blocks along `dim` to be written in until all of it is.

    Nothing fills it first where blocks are of whole rows. Of columns it starts with zeros: XLA lays out an empty array
    as it likes, and on a TPU v6e that was a layout from which it transposed all of dkernel in the end.
    """
    fill = lax.empty if dim == 0 else jnp.zeros
    return vary(fill(primal.shape, primal.dtype), varying(primal))


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


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def low_rank(hidden: jax.Array, a: jax.Array, tokens: int | None) -> jax.Array:
    """hidden @ a in the dtype of a, `[R, T, r]`; rows without a cotangent may hold anything, NaN included.

    With `tokens` in blocks of so many, at least two, so that the bits of a row do not depend on how many there are.
    """
    if tokens is None:
        return _low(hidden, a).astype(a.dtype)
    rows = hidden.reshape(-1, hidden.shape[2])
    blocks = max(2, -(-rows.shape[0] // tokens))
    padded = jnp.pad(rows, ((0, blocks * tokens - rows.shape[0]), (0, 0))).reshape(blocks, 1, tokens, -1)
    found = lax.map(lambda x: _low(x, a).astype(a.dtype), padded)
    return found.reshape(-1, a.shape[1])[: rows.shape[0]].reshape(*hidden.shape[:2], -1)


def _low(hidden: jax.Array, a: jax.Array) -> jax.Array:
    dtype = wider_dtype(hidden.dtype, a.dtype)
    return jnp.einsum("bth,hr->btr", hidden.astype(dtype), a.astype(dtype), preferred_element_type=jnp.float32)


def _low_forward(hidden: jax.Array, a: jax.Array, tokens: int | None) -> Any:
    return low_rank(hidden, a, tokens), (hidden, a)


def _low_backward(tokens: int | None, saved: Any, g: jax.Array) -> Any:
    hidden, a = saved
    counts = (g != 0).any(axis=-1, keepdims=True)
    rows = jnp.where(counts, hidden, 0)
    dtype = wider_dtype(hidden.dtype, a.dtype)
    dhidden = jnp.einsum("btr,hr->bth", g.astype(dtype), a.astype(dtype), preferred_element_type=jnp.float32)
    da = jnp.einsum("bth,btr->hr", rows.astype(dtype), g.astype(dtype), preferred_element_type=jnp.float32)
    return as_primal(jnp.where(counts, dhidden, 0), hidden), as_primal(da, a)


low_rank.defvjp(_low_forward, _low_backward)
