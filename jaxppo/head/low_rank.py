"""hidden @ lora.a: the low-rank features of one adapter, or of the adapter that each row names."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.gradient_sums import as_primal
from jaxppo.sharding import wider_dtype

Pair = tuple[jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def low_rank(hidden: jax.Array, a: jax.Array, tokens: int | None) -> jax.Array:
    """hidden @ a in the dtype of a, `[R, T, r]`; positions with a cotangent of 0 may hold anything, NaN included.

    With `tokens` the product is computed in at least two blocks of that many tokens, so that the bits of a token do not
    depend on the number of tokens.
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


def _low_forward(hidden: jax.Array, a: jax.Array, tokens: int | None) -> tuple[jax.Array, Pair]:
    return low_rank(hidden, a, tokens), (hidden, a)


def _low_backward(tokens: int | None, saved: Pair, g: jax.Array) -> Pair:
    hidden, a = saved
    counts = (g != 0).any(axis=-1, keepdims=True)
    rows = jnp.where(counts, hidden, 0)
    dtype = wider_dtype(hidden.dtype, a.dtype)
    dhidden = jnp.einsum("btr,hr->bth", g.astype(dtype), a.astype(dtype), preferred_element_type=jnp.float32)
    da = jnp.einsum("bth,btr->hr", rows.astype(dtype), g.astype(dtype), preferred_element_type=jnp.float32)
    return as_primal(jnp.where(counts, dhidden, 0), hidden), as_primal(da, a)


low_rank.defvjp(_low_forward, _low_backward)


def low_rank_by_row(
    hidden: jax.Array, a: jax.Array, b: jax.Array, adapter_ids: jax.Array, tokens: int | None
) -> tuple[jax.Array, jax.Array]:
    """The low-rank features `[R, T, A r]` of rows that use one of A adapters each, and the matrix `[A r, V]` for them.

    A row's features stand in the columns of its adapter, and the other columns are 0. For the id -1 all columns are 0.
    For an id that names no adapter all columns are NaN.
    """
    count, _, rank = a.shape
    low = low_rank(hidden, a.transpose(1, 0, 2).reshape(a.shape[1], count * rank), tokens)
    ids = adapter_ids[:, None, None]
    columns = jnp.arange(count * rank, dtype=jnp.int32)[None, None] // rank
    unknown = (ids < -1) | (ids >= count)
    low = jnp.where(columns == ids, low, jnp.where(unknown, jnp.nan, 0.0).astype(low.dtype))
    return low, b.reshape(count * rank, b.shape[2])
