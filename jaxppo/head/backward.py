"""Gradients of features and parameters, by one of three schedules of tiles; the plan names the schedule.

Each schedule takes a walk and the set of gradients that are asked for. `by_vocabulary` is given the residuals and
cotangents of all tokens. `late` and `by_tile` take a chunk of tokens at a time and call `begin` for its residuals and
cotangents. In one pass `begin` computes the chunk's loss too, and the schedule returns results beside the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.gradient_sums import as_primal
from jaxppo.head.ring import block_of
from jaxppo.head.softmax import Cotangents
from jaxppo.head.tile import (
    as_factor,
    feature_gradients,
    first_of_factor,
    hidden_product,
    kernel_product,
    parameter_gradients,
    product_dtype,
)
from jaxppo.head.token_blocks import Slots, TokenBlocks
from jaxppo.head.types import Block, Chunk, Features, NeedsGrad, Parameters, Plan
from jaxppo.head.vocabulary_blocks import SUMMED_COLUMNS, each
from jaxppo.head.walk import Walk
from jaxppo.sharding import vary_like, varying


class Known(NamedTuple):
    """What the gradient of a chunk is computed from."""

    results: Any  # losses and statistics of the tokens, f32[C] each; None in the second pass
    residuals: Any
    cotangents: Cotangents
    products: Any = None  # f32 [blocks, C, B], kept from the forward; None: computed again


Begin = Callable[[Chunk, Slots], Known]
Gradients = tuple[Features, Parameters]


def needed(like: Any, tree: Any) -> Any:
    """`tree`, a `Features` or `Parameters`, with None in the fields whose gradient is not asked for."""
    return type(tree)(*(x if need else None for need, x in zip(like, tree, strict=True)))


def by_vocabulary(walk: Walk, needs: NeedsGrad, known: Any) -> Gradients:
    """Finishes one block of dkernel at a time, its sum over devices included, and accumulates dhidden in f32.

    `known` holds the residuals and cotangents of all tokens, f32[N] each.
    """
    call, tokens, vocabulary = walk.call, walk.tokens, walk.vocabulary
    features, parameters = needed(needs.features, walk.features), needed(needs.parameters, vocabulary.given)
    known, H = tokens.to_slots(known), walk.features.hidden.shape[1]

    def of_slots(slots: Slots) -> Any:
        chunk, (residuals, cotangents) = walk.chunk(slots), tokens.read(known, slots)
        cotangents = among(cotangents, slots.counts)
        return slots, chunk, as_factor(call, walk.rows(slots), cotangents.counts), residuals, cotangents

    def of_tile(block: Block, tile: Any, dfeatures: Features) -> tuple[Features, Parameters]:
        """dhidden with what the tile adds, and the gradients of the block, that of its kernel as a `Part`."""
        slots, chunk, factor, residuals, cotangents = tile
        dz, of_bias = walk.dlogits(chunk, block, residuals, cotangents)
        # without it XLA for accelerators computes dz again inside each product; on CPUs it would only cost memory
        dz = lax.optimization_barrier(dz) if call.profile.whole else dz
        found = feature_gradients(call, dz, block.parameters, features)
        dfeatures = tokens.write(dfeatures, jax.tree.map(jnp.add, tokens.read(dfeatures, slots), found), slots)
        kernel = None if parameters.kernel is None else partial(kernel_product, call, tokens.size, dz, factor.hidden)
        of_block = parameter_gradients(call, dz, factor, parameters._replace(kernel=None))
        return walk.vary(dfeatures), of_block._replace(kernel=kernel, bias=None if parameters.bias is None else of_bias)

    only = of_slots(tokens.slots(0)) if tokens.blocks == 1 else None

    def of_block(i: Any, carry: Any) -> Any:
        dfeatures, dparameters = carry
        block = walk.block(i)

        def add(slots: Slots, carry: Any) -> Any:
            dfeatures, total = carry
            dfeatures, found = of_tile(block, of_slots(slots), dfeatures)
            whole = None if found.kernel is None else found.kernel(0, block.columns.shape[1], 0, H)
            return dfeatures, walk.vary(jax.tree.map(jnp.add, total, found._replace(kernel=whole)))

        if only is not None:
            dfeatures, found = of_tile(block, only, dfeatures)
        else:
            shapes = needed(needs.parameters, block.parameters._replace(bias=block.columns[0]))
            zeros = jax.tree.map(lambda x: walk.zeros(*x.shape), shapes)
            dfeatures, found = tokens.loop(add, (dfeatures, zeros))
            kernel = None if found.kernel is None else partial(block_of, found.kernel, call.v_dim)
            found = found._replace(kernel=kernel)
        at_once = vocabulary.size if only is not None else SUMMED_COLUMNS
        return dfeatures, each(partial(vocabulary.put_summed, walk.axes, at_once, i), dparameters, found, parameters)

    start = jax.tree.map(lambda x: walk.zeros(*x.shape), features), jax.tree.map(vocabulary.empty, parameters)
    dfeatures, dparameters = vocabulary.over_blocks(of_block, start)
    primals = needed(needs.features, walk.inputs.features)
    return walk.slots_to_features(dfeatures, primals), jax.tree.map(as_primal, dparameters, parameters)


def by_tile(walk: Walk, needs: NeedsGrad, begin: Begin, results: Any) -> tuple[Any, Features, Parameters]:
    """The outer loop is over chunks of tokens, the inner over blocks; dkernel is accumulated and summed at the end."""
    call, tokens, vocabulary = walk.call, walk.tokens, walk.vocabulary
    primals = needed(needs.features, walk.inputs.features)
    parameters = needed(needs.parameters, vocabulary.given)

    def of_block(chunk: Chunk, known: Known, factor: Features, i: Any, carry: Any) -> Any:
        drows, total = carry
        block = walk.block(i)
        x = None if known.products is None else known.products[i]
        dz, of_bias = walk.dlogits(chunk, block, known.residuals, known.cotangents, x)
        dz = lax.optimization_barrier(dz) if call.profile.whole else dz
        drows = jax.tree.map(jnp.add, drows, feature_gradients(call, dz, block.parameters, primals))
        of_block = parameter_gradients(call, dz, factor, parameters)
        of_block = of_block._replace(bias=None if parameters.bias is None else of_bias)
        return walk.vary((drows, jax.tree.map(partial(vocabulary.add, i), total, of_block)))

    def of_slots(slots: Slots, carry: Any) -> Any:
        results, dfeatures, total = carry
        chunk = walk.chunk(slots)
        known = begin(chunk, slots)
        factor = as_factor(call, chunk.rows, known.cotangents.counts)
        drows = jax.tree.map(lambda x: walk.zeros(tokens.size, x.shape[-1]), primals)
        drows, total = vocabulary.over_blocks(partial(of_block, chunk, known, factor), (drows, total))
        results = tokens.write(results, walk.vary_results(known.results), slots)
        return results, walk.put_features(tokens, dfeatures, drows, primals, slots), total

    zeros = jax.tree.map(lambda x: walk.zeros(*x.shape), needed(needs.parameters, vocabulary.held))
    start = results, walk.features_start(primals), zeros
    results, dfeatures, total = tokens.loop(of_slots, start)
    dparameters = each(vocabulary.summed, total, parameters)
    return tokens.to_tokens(results), walk.finish_features(dfeatures, primals), dparameters


def late(walk: Walk, plan: Plan, needs: NeedsGrad, begin: Begin, results: Any) -> tuple[Any, Features, Parameters]:
    """Chunks of tokens fill an array of dlogits in place; dhidden and dkernel are one product each after the loop.

    A chunk meets the device's whole part of the vocabulary. Where the memory cannot hold all dlogits there are several
    groups of chunks, and dkernel is accumulated in f32. Where the work follows a mask, chunks without a token that
    counts are never written, and the products leave them out.
    """
    call, vocabulary, block = walk.call, walk.vocabulary, walk.block(0)
    groups = walk.tokens.grouped(plan.group // walk.tokens.size)
    primals = needed(needs.features, walk.inputs.features)
    parameters = needed(needs.parameters, vocabulary.given)
    # one group's product is summed over devices as it is made, with no array of the kernel's shape in f32
    direct = groups.blocks == 1 and vocabulary.owns and parameters.kernel is not None
    rest = parameters._replace(kernel=None) if direct else parameters
    # what no f32 sum follows is rounded in its product: XLA makes one kernel of that
    summed = call.sum_dtype == "float32" and (call.h_names or walk.axes - varying(vocabulary.given.kernel))
    dtype = jnp.float32 if summed else vocabulary.given.kernel.dtype

    def of_group(slots: Slots, carry: Any) -> Any:
        results, dfeatures, total = carry
        results, dz, chunks, factor, dbias = _fill(walk, groups, slots, begin, results)
        if groups.blocks > 1:  # without it XLA computes dz again inside each product
            dz = lax.optimization_barrier(dz)
        written = partial(_of_written, chunks, walk.tokens.size, groups.size)

        def of_hidden(start: Any, size: int, first: Any, width: int) -> jax.Array:
            def product(n: int) -> jax.Array:
                return hidden_product(call, dz, block.parameters.kernel, start, min(n, size), first, width)

            if size == groups.size:
                return written(lambda n: _padded(size, product(n)))
            return _if_written(chunks, walk.tokens.size, start, lambda: product(size))

        def of_kernel(*block: Any) -> jax.Array:
            def product(n: int) -> jax.Array:
                return kernel_product(call, n, dz, factor.hidden, *block).astype(dtype)

            return written(product)

        def of_rest(n: int) -> tuple[Features, Parameters]:
            rows = feature_gradients(call, dz[:n], block.parameters, primals._replace(hidden=None))
            columns = parameter_gradients(call, dz[:n], first_of_factor(call, factor, n), rest)
            return jax.tree.map(partial(_padded, groups.size), rows), columns

        drows, found = written(of_rest)
        drows = drows._replace(hidden=None if primals.hidden is None else of_hidden)
        dfeatures = walk.put_features(groups, dfeatures, drows, primals, slots)
        found = found._replace(bias=None if total.bias is None else dbias)
        if not direct:
            return results, dfeatures, jax.tree.map(partial(vocabulary.add, 0), total, found)
        kernel = vocabulary.sum(True, of_kernel, parameters.kernel, walk.axes)
        return results, dfeatures, found._replace(kernel=kernel)

    zeros = jax.tree.map(lambda x: walk.zeros(*x.shape), needed(needs.parameters, vocabulary.held))
    zeros = zeros._replace(kernel=None) if direct else zeros
    results, dfeatures, total = groups.loop(of_group, (results, walk.features_start(primals), zeros))
    dparameters = each(vocabulary.summed, total._replace(kernel=None) if direct else total, rest)
    dparameters = dparameters._replace(kernel=total.kernel) if direct else dparameters
    return walk.tokens.to_tokens(results), walk.finish_features(dfeatures, primals), dparameters


def _of_written(chunks: Any, size: int, count: int, product: Callable[[int], Any]) -> Any:
    """product(n) of the n rows that are written, of `count`; `chunks` of them, a number or an array, are full."""
    if isinstance(chunks, int):
        return product(count)
    return lax.switch(chunks, [partial(product, n) for n in range(0, count + 1, size)])


def _fill(
    walk: Walk, groups: TokenBlocks, slots: Slots, begin: Begin, results: Any
) -> tuple[Any, jax.Array, Any, Features, Any]:
    """The results and dlogits `[G, V]` of a group, the number of chunks that are written, features as
    `parameter_gradients` takes them, and dbias.
    """
    tokens, size = walk.tokens, walk.tokens.size
    chunks, block, rows = groups.size // size, walk.block(0), groups.take(walk.features, slots)

    def of_chunk(k: Any, carry: Any) -> Any:
        results, dz_all, counts, dbias = carry
        own = tokens.slots(slots.start // size + k)
        chunk = walk.chunk(own, jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, k * size, size), rows))
        known = begin(chunk, own)
        x = None if known.products is None else known.products[0]
        dz, of_bias = walk.dlogits(chunk, block, known.residuals, known.cotangents, x)
        results = tokens.write(results, walk.vary_results(known.results), own)
        if chunks == 1:
            return results, dz, known.cotangents.counts, of_bias
        given, new = (dz_all, counts), (dz, known.cotangents.counts)
        put = jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, k * size, 0), given, new)
        return results, *walk.vary((*put, None if of_bias is None else dbias + of_bias))

    columns = block.columns.shape[1]
    dtype = product_dtype(walk.inputs.features.hidden, walk.inputs.parameters.kernel)
    dbias = None if block.parameters.bias is None else walk.zeros(columns)
    empty = walk.vary((lax.empty((groups.size, columns), dtype), jnp.zeros(groups.size, bool)))
    start = results, *empty, dbias
    turns = chunks if tokens.order is None or chunks == 1 else jnp.clip(tokens.turns - slots.start // size, 0, chunks)
    results, dz, counts, dbias = of_chunk(0, start) if chunks == 1 else lax.fori_loop(0, turns, of_chunk, start)
    return results, dz, turns, as_factor(walk.call, rows, counts), dbias


def _if_written(chunks: Any, size: int, start: Any, product: Callable[[], jax.Array]) -> jax.Array:
    """product() of rows from `start` on, zeros where none of them is written; `chunks` of `size` rows are."""
    if isinstance(chunks, int):
        return product()
    like = jax.eval_shape(product)
    return lax.cond(start < chunks * size, product, lambda: vary_like(jnp.zeros(like.shape, like.dtype), like))


def _padded(count: int, x: jax.Array) -> jax.Array:
    """`count` rows: x first, then anything."""
    whole = vary_like(lax.empty((count, x.shape[1]), x.dtype), x)
    return lax.dynamic_update_slice_in_dim(whole, x, 0, 0) if whole.shape != x.shape else x


def among(cotangents: Cotangents, counts: Any) -> Cotangents:
    """The cotangents, counted only for tokens that count in `counts` too."""
    return cotangents if counts is None else cotangents._replace(counts=cotangents.counts & counts)
