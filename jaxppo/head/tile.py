"""Logits of a tile, some tokens by some columns: an elementwise map of a sum of products, of
features and parameters.

Hidden states and kernel are one product, hidden @ a and b of an adapter a second one, ones and a
bias a third one. Of a quantised head the first product is that of rounded numbers, see
`quantized.py`. Features are `[C, f]`. Parameters are `[f, B]` or `[B, f]`: dimension `call.v_dim`
is the vocabulary's, since to turn a kernel round would copy it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.call import HeadCall
from jaxppo.head.head import Transform
from jaxppo.head.quantized import QuantizedArray, quantized_product
from jaxppo.sharding import wider_dtype

# arrays; of a quantised head the first ones are QuantizedArrays
Features = tuple[Any, ...]  # [N, f] each, hidden states first
Parameters = tuple[Any, ...]  # [f, V] or [V, f] each, the kernel first
# the logit of a column that does not exist: finite, so that no 0 * inf is in any gradient
LOW = -1e30


def dot(
    call: HeadCall,
    left: jax.Array,
    right: jax.Array,
    contracted: tuple[int, int],
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Every product of a head: in the wider of both dtypes, with f32 sums, which it rounds to
    `dtype`.
    """
    operands = wider_dtype(left.dtype, right.dtype)
    if call.profile.upcast and operands == jnp.bfloat16:
        operands = wider_dtype(jnp.float32)  # exact, and the faster product of XLA for CPUs
    precision = call.precision
    if precision is None and operands == jnp.float32:
        precision = "highest"  # accelerators would multiply f32 in one bf16 or TF32 pass
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    left = left.astype(operands)
    right = right.astype(operands)
    return lax.dot_general(left, right, dims, precision=precision, preferred_element_type=dtype)


def raw_logits(call: HeadCall, features: Features, parameters: Parameters) -> jax.Array:
    """The sum of all products, f32 `[C, B]`: logits before their scale, soft-cap and
    temperature.
    """
    terms = []
    for feature, parameter, scale in zip(features, parameters, call.scales, strict=True):
        if isinstance(parameter, QuantizedArray):
            product = quantized_product(
                feature, parameter, 1 - call.v_dim, call.profile.upcast, call.precision
            )
        else:
            product = dot(call, feature, parameter, (1, 1 - call.v_dim))
        terms.append(scaled(scale, product))
    return functools.reduce(jnp.add, terms)


def feature_gradient(call: HeadCall, k: int, d_raw: jax.Array, parameter: Any) -> jax.Array:
    """The f32 gradient of the features of product k, `[C, f]`, from `[C, B]`, that of raw
    logits.
    """
    if isinstance(parameter, QuantizedArray):
        parameter = parameter.dequantized(d_raw.dtype)
    return scaled(call.scales[k], dot(call, d_raw, parameter, (1, call.v_dim)))


def parameter_gradient(
    call: HeadCall, k: int, d_raw: jax.Array, features: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
    """The gradient of the parameter of product k, in its layout."""
    scale = call.scales[k]
    same = d_raw.dtype == features.dtype == dtype
    if not (call.profile.rounding_products and same and scale == 1):
        dtype = jnp.float32
    if call.v_dim == 1:
        return scaled(scale, dot(call, features, d_raw, (0, 0), dtype))
    return scaled(scale, dot(call, d_raw, features, (0, 0), dtype))


def scaled(scale: float, array: jax.Array) -> jax.Array:
    if scale == 1:
        return array
    return scale * array


def rounded(array: jax.Array, dtype: Any) -> jax.Array:
    """The array in this dtype.

    XLA for TPUs would move a mere conversion before a sum over devices, and sum in bf16.
    """
    if array.dtype == jnp.float32 and dtype == jnp.bfloat16:
        array = as_bfloat16(array)
    return array.astype(dtype)


def logits(
    transform: Transform, raw: jax.Array, temperature: jax.Array | None, valid: jax.Array | None
) -> jax.Array:
    """The elementwise map from raw logits to logits.

    JAX differentiates it. Columns that do not exist hold `LOW`.
    """
    if transform.dtype == "bfloat16":
        raw = as_bfloat16(raw)
    z = scaled(transform.scale, raw)
    if transform.softcap is not None:
        z = softcap(transform.softcap, z)
    if temperature is not None:
        z = z / temperature[:, None]
    if valid is not None:
        z = jnp.where(valid[None], z, LOW)
    return z


@jax.custom_jvp
def as_bfloat16(array: jax.Array) -> jax.Array:
    """The array rounded; its gradient ignores the rounding. XLA would leave out a cast and back."""
    return lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)


as_bfloat16.defjvp(lambda primals, tangents: (as_bfloat16(*primals), tangents[0]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def softcap(cap: float, z: jax.Array) -> jax.Array:
    return cap * jnp.tanh(z / cap)


@softcap.defjvp
def _slope(
    cap: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (z,) = primals
    (dz,) = tangents
    e = jnp.exp(-2 * jnp.abs(z / cap))  # 1 - tanh^2 would be rounding error where tanh is nearly 1
    return softcap(cap, z), dz * (4 * e / (1 + e) ** 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def low_rank(call: HeadCall, hidden: jax.Array, lora_a: jax.Array) -> jax.Array:
    """hidden @ a in the dtype of a, `[R, T, r]`: the features of an adapter.

    Hidden states may be NaN at tokens without a cotangent, and 0 times it would be NaN in the
    gradient of a.
    """
    return _low_rank(call, hidden, lora_a)


def _low_rank_forward(call: HeadCall, hidden: jax.Array, lora_a: jax.Array) -> Any:
    return _low_rank(call, hidden, lora_a), (hidden, lora_a)


def _low_rank_backward(call: HeadCall, saved: Any, dlow: jax.Array) -> Any:
    hidden, lora_a = saved
    has_cotangent = (dlow != 0).any(-1, keepdims=True)
    _, pull = jax.vjp(
        functools.partial(_low_rank, call), jnp.where(has_cotangent, hidden, 0), lora_a
    )
    return pull(dlow)


low_rank.defvjp(_low_rank_forward, _low_rank_backward)


def _low_rank(call: HeadCall, hidden: jax.Array, lora_a: jax.Array) -> jax.Array:
    if not call.deterministic:
        return dot(call, hidden, lora_a, (2, 0)).astype(lora_a.dtype)
    # in at least two chunks of equally many tokens: the bits of a token do not depend on the number
    # of tokens
    rows = hidden.reshape(-1, hidden.shape[2])
    size = call.profile.fixed_chunk
    chunks = max(2, -(-rows.shape[0] // size))
    padded = jnp.pad(rows, ((0, chunks * size - rows.shape[0]), (0, 0)))
    by_chunk = padded.reshape(chunks, size, -1)
    low = lax.map(lambda chunk: dot(call, chunk, lora_a, (1, 0)).astype(lora_a.dtype), by_chunk)
    return low.reshape(-1, lora_a.shape[1])[: rows.shape[0]].reshape(*hidden.shape[:2], -1)


def low_rank_by_row(
    call: HeadCall, hidden: jax.Array, lora_a: jax.Array, lora_b: jax.Array, adapter_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The features `[R, T, A r]` of rows that use one of A adapters each, NaN for an unknown
    one; and b `[A r, V]`.
    """
    count, features, rank = lora_a.shape
    side_by_side = lora_a.transpose(1, 0, 2).reshape(features, count * rank)
    low = low_rank(call, hidden, side_by_side)
    ids = adapter_ids[:, None, None]
    # of each column of `low`
    adapter = jnp.arange(count * rank, dtype=jnp.int32)[None, None] // rank
    unknown = (ids < -1) | (ids >= count)
    # for the id -1 all columns are 0
    elsewhere = jnp.where(unknown, jnp.nan, 0.0).astype(low.dtype)
    return jnp.where(adapter == ids, low, elsewhere), lora_b.reshape(count * rank, lora_b.shape[2])
