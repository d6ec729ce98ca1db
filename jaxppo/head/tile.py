"""Logits of a tile, some tokens by some columns: an elementwise map of a sum of products, of features and parameters.

Hidden states and kernel are one product, hidden @ a and b of an adapter a second one, ones and a bias a third one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.call import HeadCall
from jaxppo.head.head import Transform
from jaxppo.sharding import wider_dtype

Features = tuple[jax.Array, ...]  # [N, f] each; of hidden states first
Parameters = tuple[jax.Array, ...]  # [f, V] each, or [V, f]; the kernel first
Dims = tuple[int, int]  # one of each array
LOW = -1e30  # the logit of a column that does not exist: finite, so that no 0 * inf is in any gradient


def dot(
    call: HeadCall, a: jax.Array, b: jax.Array, contract: Dims, batch: Dims | None = None, found: Any = jnp.float32
) -> jax.Array:
    """Every product of a head: in the wider of both dtypes, with f32 sums, which it rounds to the dtype `found`."""
    dtype = wider_dtype(a.dtype, b.dtype)
    if call.profile.upcast and dtype == jnp.bfloat16:  # exact, and the faster product of XLA for CPUs
        dtype = wider_dtype(jnp.float32)
    # without a precision accelerators multiply f32 in one bf16 or TF32 pass
    precision = call.precision or ("highest" if dtype == jnp.float32 else None)
    of_batch = ((), ()) if batch is None else ((batch[0],), (batch[1],))
    dims = (((contract[0],), (contract[1],)), of_batch)
    a, b = a.astype(dtype), b.astype(dtype)
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=found)


def products(call: HeadCall, features: Features, parameters: Parameters) -> jax.Array:
    """f32 `[C, B]`."""
    terms = zip(features, parameters, call.scales, strict=True)
    return functools.reduce(jnp.add, (scaled(scale, dot(call, f, p, (1, 1 - call.v_dim))) for f, p, scale in terms))


def of_feature(call: HeadCall, k: int, dx: jax.Array, p: jax.Array) -> jax.Array:
    """The f32 gradient of the features of product k, `[C, f]`, from that of the sum of products."""
    return scaled(call.scales[k], dot(call, dx, p, (1, call.v_dim)))


def of_parameter(call: HeadCall, k: int, dx: jax.Array, f: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """The gradient of the parameter of product k, in its layout."""
    profile, scale = call.profile, call.scales[k]
    # XLA for GPUs may write an f32 product to memory before it rounds it: a gradient of the kernel would exist twice
    alone = profile.whole and not profile.rings and scale == 1 and dx.dtype == f.dtype == dtype
    a, b = (f, dx) if call.v_dim == 1 else (dx, f)
    return scaled(scale, dot(call, a, b, (0, 0), found=dtype if alone else jnp.float32)).astype(dtype)


def scaled(scale: float, x: jax.Array) -> jax.Array:
    return x if scale == 1 else scale * x


def logits(t: Transform, x: jax.Array, temperature: jax.Array | None, valid: jax.Array | None) -> jax.Array:
    """The elementwise map from products to logits. JAX differentiates it. Columns that do not exist hold `LOW`."""
    x = as_bfloat16(x) if t.dtype == "bfloat16" else x
    x = scaled(t.scale, x)
    x = x if t.softcap is None else softcap(t.softcap, x)
    if temperature is not None:  # tokens that only fill a chunk have 0, and 0 / 0 would reach all parameters
        x = x / jnp.where(temperature == 0, 1, temperature)[:, None]
    return x if valid is None else jnp.where(valid[None], x, LOW)


@jax.custom_jvp
def as_bfloat16(x: jax.Array) -> jax.Array:
    """x rounded; its gradient ignores the rounding. XLA would leave out a cast and back."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


as_bfloat16.defjvp(lambda x, dx: (as_bfloat16(*x), dx[0]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def softcap(cap: float, x: jax.Array) -> jax.Array:
    return cap * jnp.tanh(x / cap)


@softcap.defjvp
def _slope(cap: float, x: tuple[jax.Array], dx: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    e = jnp.exp(-2 * jnp.abs(x[0] / cap))  # 1 - tanh^2 would be rounding error where tanh is nearly 1
    return softcap(cap, x[0]), dx[0] * (4 * e / (1 + e) ** 2)


def low_rank(call: HeadCall, hidden: jax.Array, a: jax.Array) -> jax.Array:
    """hidden @ a in the dtype of a, `[R, T, r]`: the features of an adapter."""
    if not call.deterministic:
        return dot(call, hidden, a, (2, 0)).astype(a.dtype)
    # in at least two blocks of equally many tokens: the bits of a token do not depend on the number of tokens
    rows, tokens = hidden.reshape(-1, hidden.shape[2]), call.fixed_chunk
    blocks = max(2, -(-rows.shape[0] // tokens))
    padded = jnp.pad(rows, ((0, blocks * tokens - rows.shape[0]), (0, 0))).reshape(blocks, tokens, -1)
    found = lax.map(lambda x: dot(call, x, a, (1, 0)).astype(a.dtype), padded)
    return found.reshape(-1, a.shape[1])[: rows.shape[0]].reshape(*hidden.shape[:2], -1)


def low_rank_by_row(
    call: HeadCall, hidden: jax.Array, a: jax.Array, b: jax.Array, adapter_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The features `[R, T, A r]` of rows that use one of A adapters each, NaN for an unknown one; and b `[A r, V]`."""
    count, _, rank = a.shape
    low = low_rank(call, hidden, a.transpose(1, 0, 2).reshape(a.shape[1], count * rank))
    ids = adapter_ids[:, None, None]
    columns = jnp.arange(count * rank, dtype=jnp.int32)[None, None] // rank
    unknown = (ids < -1) | (ids >= count)
    # the columns of other adapters are 0, for the id -1 all are
    low = jnp.where(columns == ids, low, jnp.where(unknown, jnp.nan, 0.0).astype(low.dtype))
    return low, b.reshape(count * rank, b.shape[2])
