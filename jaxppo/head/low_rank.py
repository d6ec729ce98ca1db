"""hidden @ lora.a: the low-rank features of one adapter, or of the adapter that each row names."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.gradient_sums import as_primal
from jaxppo.head.tile import dot
from jaxppo.head.types import HeadCall

Pair = tuple[jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def low_rank(call: HeadCall, hidden: jax.Array, a: jax.Array) -> jax.Array:
    """hidden @ a in the dtype of a, `[R, T, r]`; positions with a cotangent of 0 may hold anything, NaN included.

    In a deterministic call the product is computed in at least two blocks of equally many tokens, so that the bits of a
    token do not depend on the number of tokens.
    """
    if not call.deterministic:
        return dot(call, hidden, a, (2, 0)).astype(a.dtype)
    tokens = call.profile.deterministic
    rows = hidden.reshape(-1, hidden.shape[2])
    blocks = max(2, -(-rows.shape[0] // tokens))
    padded = jnp.pad(rows, ((0, blocks * tokens - rows.shape[0]), (0, 0))).reshape(blocks, tokens, -1)
    found = lax.map(lambda x: dot(call, x, a, (1, 0)).astype(a.dtype), padded)
    return found.reshape(-1, a.shape[1])[: rows.shape[0]].reshape(*hidden.shape[:2], -1)


def _low_forward(call: HeadCall, hidden: jax.Array, a: jax.Array) -> tuple[jax.Array, Pair]:
    return low_rank(call, hidden, a), (hidden, a)


def _low_backward(call: HeadCall, saved: Pair, g: jax.Array) -> Pair:
    hidden, a = saved
    counts = (g != 0).any(axis=-1, keepdims=True)
    rows = jnp.where(counts, hidden, 0)
    dhidden = dot(call, g, a, (2, 1))
    da = dot(call, rows.reshape(-1, rows.shape[2]), g.reshape(-1, g.shape[2]), (0, 0))
    return as_primal(jnp.where(counts, dhidden, 0), hidden), as_primal(da, a)


low_rank.defvjp(_low_forward, _low_backward)


def low_rank_by_row(
    call: HeadCall, hidden: jax.Array, a: jax.Array, b: jax.Array, adapter_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The low-rank features `[R, T, A r]` of rows that use one of A adapters each, and the matrix `[A r, V]` for them.

    A row's features stand in the columns of its adapter, and the other columns are 0. For the id -1 all columns are 0.
    For an id that names no adapter all columns are NaN.
    """
    count, _, rank = a.shape
    low = low_rank(call, hidden, a.transpose(1, 0, 2).reshape(a.shape[1], count * rank))
    ids = adapter_ids[:, None, None]
    columns = jnp.arange(count * rank, dtype=jnp.int32)[None, None] // rank
    unknown = (ids < -1) | (ids >= count)
    low = jnp.where(columns == ids, low, jnp.where(unknown, jnp.nan, 0.0).astype(low.dtype))
    return low, b.reshape(count * rank, b.shape[2])
