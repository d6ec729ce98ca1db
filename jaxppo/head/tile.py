"""The arithmetic of a tile in plain XLA: products, logits and their gradient. No mesh, no collective."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxppo.head import softmax
from jaxppo.head.slices import submatrix
from jaxppo.head.softmax import Cotangents, Residuals, Sums
from jaxppo.head.token_blocks import Slots, TokenBlocks
from jaxppo.head.types import Block, Chunk, Features, HeadCall, Index, Parameters, Submatrix, Tile, Transform
from jaxppo.sharding import note, vary_like, wider_dtype


def dot(call: HeadCall, a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """A product with an f32 result, contracting dimension dims[0] of a with dims[1] of b."""
    return _product(call, a, b, (((dims[0],), (dims[1],)), ((), ())))


def _product(call: HeadCall, a: jax.Array, b: jax.Array, numbers: lax.DotDimensionNumbers) -> jax.Array:
    """Every product of a head: in the wider dtype, in the precision that was asked for, with an f32 result."""
    dtype = product_dtype(a, b)
    # without a precision accelerators multiply f32 in one bf16 or TF32 pass
    precision = call.precision or ("highest" if dtype == jnp.float32 else None)
    return lax.dot_general(
        a.astype(dtype), b.astype(dtype), numbers, precision=precision, preferred_element_type=jnp.float32
    )


def product_dtype(a: jax.Array, b: jax.Array) -> np.dtype[Any]:
    """The dtype in which two arrays are multiplied."""
    return wider_dtype(a.dtype, b.dtype)


def transformed(transform: Transform, x: jax.Array) -> jax.Array:
    """The logits of products before the temperature, elementwise in f32."""
    x = _scaled(transform, x)
    return x if transform.softcap is None else transform.softcap * jnp.tanh(x / transform.softcap)


def _scaled(transform: Transform, x: jax.Array) -> jax.Array:
    if transform.dtype == "bfloat16":  # a cast and back would be left out by XLA
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x if transform.scale == 1 else transform.scale * x


def products(call: HeadCall, rows: Features, parameters: Parameters) -> jax.Array:
    """hidden @ kernel + bias + LoRA, f32 `[C, B]`."""
    x = dot(call, rows.hidden, parameters.kernel, (1, 1 - call.v_dim))
    if parameters.lora_b is not None:
        x = x + call.lora_scale * dot(call, rows.low, parameters.lora_b, (1, 1 - call.v_dim))
    return x if parameters.bias is None else x + parameters.bias


def tempered(chunk: Chunk, x: jax.Array) -> jax.Array:
    """x `[C, B]` over the temperature."""
    return x if chunk.temperature is None else x / chunk.temperature[:, None]


def logits(call: HeadCall, chunk: Chunk, block: Block, x: jax.Array) -> jax.Array:
    """f32 logits `[C, B]` of products x, -inf in columns that are not the block's own."""
    return jnp.where(block.valid, tempered(chunk, transformed(call.transform, x)), -jnp.inf)


def is_target(tile: Tile) -> jax.Array:
    """One-hot of the target, `[C, B]`."""
    return (tile.chunk.targets[:, None] == tile.block.column_ids) & tile.block.valid


def of_products(call: HeadCall, tile: Tile, dz: jax.Array, x: jax.Array, counts: jax.Array) -> jax.Array:
    """The gradient of products x from that of their logits; 0 in rows that do not count and in masked columns.

    The slope 1 - tanh(y)^2 of a soft-cap is computed as 4 e^-2|y| / (1 + e^-2|y|)^2. The difference would be only
    rounding error if tanh(y) is nearly 1.
    """
    transform, dz = call.transform, tempered(tile.chunk, dz)
    if transform.softcap is not None:
        e = jnp.exp(-2 * jnp.abs(_scaled(transform, x) / transform.softcap))
        dz = dz * (4 * e / (1 + e) ** 2)
    dz = dz if transform.scale == 1 else transform.scale * dz
    return jnp.where(counts[:, None] & tile.block.valid & (x != -jnp.inf), dz, 0)


def product_gradients(
    call: HeadCall, tile: Tile, residuals: Residuals, cotangents: Cotangents, x: jax.Array | None = None
) -> jax.Array:
    """d loss / d (hidden @ kernel), f32 `[C, B]`. The products x are computed if they are None."""
    x = products(call, tile.chunk.rows, tile.block.parameters) if x is None else x
    z = logits(call, tile.chunk, tile.block, x)
    dz = softmax.dlogits(z, is_target(tile), tile.nucleus, residuals, cotangents, tile.ids)
    return of_products(call, tile, dz, x, cotangents.counts)


def logits_of_rows(call: HeadCall, rows: Features, temperature: jax.Array | None, parameters: Parameters) -> jax.Array:
    """f32[C], one logit for each of C tokens, each with a row of its own of a kernel `[V, H]`."""
    inner = partial(_product, call, numbers=(((1,), (1,)), ((0,), (0,))))
    x = inner(rows.hidden, parameters.kernel)
    x = x if parameters.lora_b is None else x + call.lora_scale * inner(rows.low, parameters.lora_b)
    x = transformed(call.transform, x if parameters.bias is None else x + parameters.bias.astype(jnp.float32))
    return x if temperature is None else x / temperature


# A reference far below the maximum costs accuracy: at a distance of 16, 2e-6 in a log-prob and 4e-6 in an entropy.
# A sum of exponentials above this number may have one farther away, and is computed again.
FARTHEST = math.exp(16)
FEW = 128  # the tokens that are computed again at once


def _sums(call: HeadCall, tile: Tile, like: Sums) -> tuple[Sums, jax.Array]:
    x = products(call, tile.chunk.rows, tile.block.parameters)
    z, hot = logits(call, tile.chunk, tile.block, x), is_target(tile)
    z_y = softmax.target_logits(z, hot, *tile.place)
    return softmax.block_sums(z, z_y, hot, tile.nucleus, like, tile.chunk.reference, tile.ids, tile.block.column_ids), x


def _exactly(call: HeadCall, tile: Tile, sums: Sums, far: jax.Array) -> Sums:
    """The sums, those of `far` tokens relative to their maximum, a few tokens at a time in products of their own."""
    tokens = TokenBlocks(far, far.shape[0], min(FEW, far.shape[0]))
    known = tile.chunk._replace(reference=None), tile.place

    def of_slots(slots: Slots, found: Sums) -> Sums:
        chunk, place = tokens.take(known, slots)
        again, _ = _sums(call, Tile(chunk, tile.block, place, None, None), sums)
        return tokens.write(found, jax.tree.map(vary_like, again, sums), slots)

    found = tokens.to_tokens(tokens.loop(of_slots, tokens.to_slots(softmax.no_sums(sums))))
    return jax.tree.map(lambda new, old: jnp.where(far, new, old), found, sums)


def tile_sums(call: HeadCall, tile: Tile, like: Sums) -> tuple[Sums, jax.Array]:
    """The softmax sums of the tile that `like` has, and its f32 products hidden @ kernel + bias + LoRA."""
    sums, x = _sums(call, tile, like)
    if (reference := tile.chunk.reference) is None:
        return sums, x
    sums = jax.tree.map(vary_like, sums, like)
    far = ~(sums.s <= FARTHEST) | (reference == -jnp.inf)
    far = far if tile.chunk.counts is None else far & tile.chunk.counts
    with note("rarely: sums of tokens far from their maximum"):
        return lax.cond(far.any(), lambda: _exactly(call, tile, sums, far), lambda: sums), x


def factor_and_bias(tile: Tile, dz: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """A gradient of products, in the dtype in which it is multiplied, and the gradient of the bias, if there is one."""
    dbias = None if tile.block.parameters.bias is None else dz.sum(axis=0)
    return dz.astype(product_dtype(tile.chunk.rows.hidden, tile.block.parameters.kernel)), dbias


def feature_gradients(call: HeadCall, dz: jax.Array, parameters: Parameters, needs: Features) -> Features:
    """The f32 gradients of features, `[C, H]` and `[C, r]`, in the fields where `needs` is not None."""
    hidden = None if needs.hidden is None else dot(call, dz, parameters.kernel, (1, call.v_dim))
    low = None if needs.low is None else call.lora_scale * dot(call, dz, parameters.lora_b, (1, call.v_dim))
    return Features(hidden, low)


def hidden_product(
    call: HeadCall, dz: Submatrix, kernel: jax.Array, start: Index, size: int, first: Index, width: int
) -> jax.Array:
    """The f32 gradient of hidden states, of `size` tokens from `start` on and `width` features from `first` on."""
    columns = kernel.shape[call.v_dim]
    return dot(
        call, dz(start, size, 0, columns), submatrix(kernel, call.v_dim, 0, columns, first, width), (1, call.v_dim)
    )


def kernel_product(
    call: HeadCall, tokens: int, dz: Submatrix, factor: jax.Array, start: Index, size: int, first: Index, width: int
) -> jax.Array:
    """The f32 gradient of a part of the kernel: `size` columns from `start` on, `width` features from `first` on.

    It is summed over the first `tokens`. Each factor is cut in both dimensions by one slice: XLA fuses that into the
    product, and would copy the result of two slices.
    """
    of_tokens = 1 if _transposes(call, factor) else 0
    return _outer(call, dz(0, tokens, start, size), submatrix(factor, of_tokens, 0, tokens, first, width))


def parameter_gradients(call: HeadCall, dz: jax.Array, factor: Features, needs: Parameters) -> Parameters:
    """f32 gradients of the block's kernel and lora_b, in their layout, in the fields where `needs` is not None."""
    kernel = None if needs.kernel is None else _outer(call, dz, factor.hidden)
    return Parameters(kernel, None, None if needs.lora_b is None else call.lora_scale * _outer(call, dz, factor.low))


def _outer(call: HeadCall, dz: jax.Array, factor: jax.Array) -> jax.Array:
    if call.layout == "vh":
        return dot(call, dz, factor, (0, 0))
    return dot(call, factor, dz, (1 if _transposes(call, factor) else 0, 0))


def as_factor(call: HeadCall, rows: Features, counts: jax.Array) -> Features:
    """Features in the form that `parameter_gradients` takes. Make them outside a loop over the vocabulary.

    Rows that do not count are set to 0: they may hold NaN, and 0 * NaN is NaN. In f32 with "hv" the rows are
    transposed: XLA for CPUs takes 10% to 33% longer for a product whose left factor is contracted along its rows. In
    bf16 XLA for CPUs cannot run the product if its factor is transposed by layout.
    """
    rows = jax.tree.map(lambda x: jnp.where(counts[:, None], x, 0), rows)
    return jax.tree.map(lambda x: x.T if _transposes(call, x) else x, rows)


def first_of_factor(call: HeadCall, factor: Features, count: int) -> Features:
    """The part of `as_factor`'s result for the first `count` tokens."""
    return jax.tree.map(lambda x: x[:, :count] if _transposes(call, x) else x[:count], factor)


def _transposes(call: HeadCall, rows: jax.Array) -> bool:
    return call.layout == "hv" and rows.dtype == jnp.float32
