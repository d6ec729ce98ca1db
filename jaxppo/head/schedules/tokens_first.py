"""Gradients with the tokens outermost: chunk after chunk, each before the device's whole part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.columns import SUMMED_BYTES
from jaxppo.head.ops.tile import Features, Parameters, as_factor, feature_gradients, parameter_gradients
from jaxppo.head.schedules.needs import NeedsGrad
from jaxppo.head.schedules.walk import Chunk, Walk, counted
from jaxppo.head.tokens import Slots
from jaxppo.head.varying import as_primal, sum_in_blocks
from jaxppo.sharding import vary, varying

# (chunk, arrays of its tokens) -> (results of its tokens, residuals, cotangents, logits [blocks, C, B] or None)
Begin = Callable[[Chunk, Any], tuple[Any, Any, Any, Any]]


def tokens_first(
    walk: Walk, needs: NeedsGrad, per_token: Any, results: Any, begin: Begin, chunks: int = 1
) -> tuple[Any, Features, Parameters]:
    """The results of all tokens, and the gradients that are asked for.

    A chunk's part of dhidden is finished in turn, devices' sums included; dkernel is accumulated in f32 and summed at
    the end. Where a chunk meets the whole part of the vocabulary as one block, the gradients of several chunks' logits
    can wait for one product, so that dkernel is read and written once for all of them.

    Args:
      walk: the arrays, its tokens cut in groups of chunks.
      needs: which gradients.
      per_token: arrays `[N, ...]` that `begin` reads.
      results: arrays `[N]` to write the results of `begin` in.
      begin: what is known of a chunk before its gradient.
      chunks: how many a group has.
    """
    form, tokens, vocabulary = walk.rule.form, walk.tokens, walk.vocabulary
    primals = needs.of(needs.features, walk.inputs.features)
    parameters = needs.of(needs.parameters, walk.inputs.parameters)
    waits = vocabulary.blocks == 1
    # one group's product is summed over devices as it is made, with no array of the kernel's shape in f32
    direct = waits and tokens.most == 1 and vocabulary.whole

    def block_gradient(chunk: Chunk, known: Any, factor: Features, i: Any, carry: Any) -> Any:
        residuals, cotangents, z, place = known
        drows, total, products = carry
        block = walk.block(i)
        z = None if z is None else z[i]
        dz, of_bias = walk.dlogits(chunk, block, residuals, cotangents, z, parameters.bias is not None)
        if products is None:
            product = lax.optimization_barrier(dz)  # or XLA computes it again inside each product
        else:
            # the tokens last, as XLA for TPUs lays out logits whose columns are no multiple of 128
            products = lax.optimization_barrier(lax.dynamic_update_slice_in_dim(products, dz.T, place, 1))
            product = lax.dynamic_slice_in_dim(products, place, dz.shape[0], 1).T
        drows = jax.tree.map(jnp.add, drows, feature_gradients(form, product, block, primals))
        if not waits:
            of_block = parameter_gradients(form, product, factor, parameters)
            of_block = of_block._replace(bias=of_bias)
            total = total.each(partial(vocabulary.add, i), of_block)
        elif of_bias is not None:
            total = total._replace(bias=vocabulary.add(0, False, total.bias, of_bias))
        return *walk.vary((drows, total)), products if products is not None else product if waits else None

    def of_chunk(carry: Any, arrays: Any) -> Any:
        total, products = carry
        i, chunk, rest = arrays
        found, residuals, cotangents, z = begin(chunk, rest)
        factor, count = as_factor(form, counted(chunk.rows, cotangents.counts)), tokens.block // chunks
        drows = jax.tree.map(lambda x: walk.zeros(count, x.shape[-1]), primals)
        body = partial(block_gradient, chunk, (residuals, cotangents, z, i * count), factor)
        drows, total, products = walk.over_blocks(body, (drows, total, products))
        if tokens.parts > 1:
            drows = jax.tree.map(walk.scatter, drows)
        drows = jax.tree.map(partial(as_primal, summing=walk.summing), drows, primals)
        return (total, products), (found, drows, cotangents.counts)

    def of_group(slots: Slots, carry: Any) -> Any:
        results, dfeatures, total = carry
        group = walk.chunk(slots)
        arrays = group, walk.take(per_token, slots)
        if chunks == 1:
            (total, product), out = of_chunk((total, None), (0, *arrays))
        else:
            arrays = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), arrays)
            products = walk.vary(lax.empty((vocabulary.size, tokens.block), walk.factor_dtype()))
            (total, product), out = lax.scan(of_chunk, (total, products), (jnp.arange(chunks), *arrays))
            out = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)
            product = product.T
        found, drows, counts = out
        results = tokens.write(results, jax.tree.map(lambda x: vary(x, token_axes), found), slots)
        dfeatures = jax.tree.map(lambda x, rows: tokens.put_own(x, rows, slots, walk.part), dfeatures, drows)
        if waits:
            factor = as_factor(form, counted(group.rows, counts))
            if direct:
                return results, dfeatures, (total, product, factor)
            add = lambda is_kernel, x, new: x if new is None else vocabulary.add(0, is_kernel, x, new)  # noqa: E731
            total = total.each(add, parameter_gradients(form, product, factor, parameters))
        return results, dfeatures, total

    held = needs.of(needs.parameters, vocabulary.held)
    held = held._replace(kernel=None, lora_b=None) if direct else held
    token_axes = walk.axes - set(walk.rule.columns.axes.tensor)
    start = (
        jax.tree.map(lambda x: vary(x, token_axes), results),
        jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), varying(x)), primals),
        jax.tree.map(lambda x: walk.zeros(*x.shape), held),
    )
    results, dfeatures, total = tokens.loop(of_group, start)
    if direct:
        total, product, factor = total
        kernel = _product_by_blocks(walk, product, factor, parameters.kernel)
        lora_b = parameter_gradients(form, product, factor, parameters._replace(kernel=None)).lora_b
        total = total._replace(lora_b=lora_b)
        return tokens.to_tokens(results), dfeatures, total.each(vocabulary.summed, parameters)._replace(kernel=kernel)
    return tokens.to_tokens(results), dfeatures, total.each(vocabulary.summed, parameters)


def _product_by_blocks(walk: Walk, product: jax.Array, factor: Features, primal: jax.Array | None) -> Any:
    """dkernel, summed over devices a block of columns at a time: no array of its shape in f32."""
    if primal is None:
        return None
    form, columns = walk.rule.form, walk.rule.columns

    def part(start: Any, size: int) -> jax.Array:
        of_block = lax.dynamic_slice_in_dim(product, start, size, 1)
        return parameter_gradients(form, of_block, factor, Parameters(True, None, None)).kernel

    summed = walk.axes - varying(primal) and columns.summing.dtype == "float32"
    size = SUMMED_BYTES // (4 * primal.shape[1 - columns.v_dim]) if summed else primal.shape[columns.v_dim]
    return sum_in_blocks(part, primal, columns.v_dim, size, columns.summing)
