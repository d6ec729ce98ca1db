"""Gradients of features and parameters, by one of three schedules of tiles; the plan names the schedule.

Each schedule takes a walk and the set of gradients that are asked for. `by_vocabulary` is given the residuals and
cotangents of all tokens. `late` and `by_tile` take a chunk of tokens at a time and call `begin` for its residuals and
cotangents. In one pass `begin` computes the chunk's loss too, and the schedule returns results beside the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.gradient_sums import as_primal
from jaxppo.head.ring import Part, block_of
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
from jaxppo.head.types import Block, Chunk, Features, Index, NeedsGrad, Parameters, Plan
from jaxppo.head.vocabulary_blocks import SUMMED_COLUMNS, each
from jaxppo.head.walk import Walk
from jaxppo.sharding import vary_like, varying


class Known(NamedTuple):
    """What a schedule needs for the gradients of one chunk."""

    results: Any  # losses and statistics of the tokens, f32[C] each; None in the second pass
    residuals: Any
    cotangents: Cotangents
    products: jax.Array | None = None  # f32 [blocks, C, B], kept from the forward; None: computed again


Begin = Callable[[Chunk, Slots], Known]
Gradients = tuple[Features, Parameters]
Leaves = TypeVar("Leaves", Features, Parameters)


def needed(like: Leaves, tree: Leaves) -> Leaves:
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
        cotangents = restrict_counts(cotangents, slots.counts)
        return slots, chunk, as_factor(call, walk.rows(slots), cotangents.counts), residuals, cotangents

    only = of_slots(tokens.slots(0)) if tokens.blocks == 1 else None

    def of_block(i: Index, carry: Any) -> Any:
        dfeatures, dparameters = carry
        block = walk.block(i)

        def add(slots: Slots, carry: Any) -> Any:
            dfeatures, total = carry
            dfeatures, found = _add_tile(walk, block, of_slots(slots), dfeatures, parameters)
            whole = None if found.kernel is None else found.kernel(0, block.column_ids.shape[1], 0, H)
            return dfeatures, walk.vary(jax.tree.map(jnp.add, total, found._replace(kernel=whole)))

        if only is not None:
            dfeatures, found = _add_tile(walk, block, only, dfeatures, parameters)
        else:
            shapes = needed(needs.parameters, block.parameters._replace(bias=block.column_ids[0]))
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


def _add_tile(
    walk: Walk, block: Block, tile: Any, dfeatures: Features, parameters: Parameters
) -> tuple[Features, Parameters]:
    """dhidden with what the tile adds, and the gradients of the block, that of its kernel as a `Part`."""
    call, tokens = walk.call, walk.tokens
    slots, chunk, factor, residuals, cotangents = tile
    dz, of_bias = walk.dlogits(chunk, block, residuals, cotangents)
    # without it XLA for accelerators computes dz again inside each product; on CPUs it would only cost memory
    dz = lax.optimization_barrier(dz) if call.profile.whole else dz
    found = feature_gradients(call, dz, block.parameters, dfeatures)
    dfeatures = tokens.write(dfeatures, jax.tree.map(jnp.add, tokens.read(dfeatures, slots), found), slots)
    kernel = None if parameters.kernel is None else partial(kernel_product, call, tokens.size, dz, factor.hidden)
    of_block = parameter_gradients(call, dz, factor, parameters._replace(kernel=None))
    return walk.vary(dfeatures), of_block._replace(kernel=kernel, bias=None if parameters.bias is None else of_bias)


def by_tile(walk: Walk, needs: NeedsGrad, begin: Begin, results: Any) -> tuple[Any, Features, Parameters]:
    """The outer loop is over chunks of tokens, the inner over blocks; dkernel is accumulated and summed at the end."""
    call, tokens, vocabulary = walk.call, walk.tokens, walk.vocabulary
    primals = needed(needs.features, walk.inputs.features)
    parameters = needed(needs.parameters, vocabulary.given)

    def of_block(chunk: Chunk, known: Known, factor: Features, i: Index, carry: Any) -> Any:
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
    call, vocabulary = walk.call, walk.vocabulary
    groups = walk.tokens.grouped(plan.group // walk.tokens.size)
    primals = needed(needs.features, walk.inputs.features)
    parameters = needed(needs.parameters, vocabulary.given)
    # one group's product is summed over devices as it is made, with no array of the kernel's shape in f32
    direct = groups.blocks == 1 and plan.direct and parameters.kernel is not None
    rest = parameters._replace(kernel=None) if direct else parameters
    # what no f32 sum follows is rounded in its product: XLA makes one kernel of that
    summed = call.sum_dtype == "float32" and (call.h_names or walk.axes - varying(vocabulary.given.kernel))
    dtype = jnp.float32 if summed else vocabulary.given.kernel.dtype

    def of_group(slots: Slots, carry: Any) -> Any:
        results, dfeatures, total = carry
        results, dz, chunks, factor, dbias = _fill(walk, groups, slots, begin, results)
        if groups.blocks > 1:  # without it XLA computes dz again inside each product
            dz = lax.optimization_barrier(dz)
        of_hidden, of_kernel = _late_products(walk, dz, chunks, factor, dtype)

        def of_rest(n: int) -> tuple[Features, Parameters]:
            rows = feature_gradients(call, dz[:n], walk.block(0).parameters, primals._replace(hidden=None))
            columns = parameter_gradients(call, dz[:n], first_of_factor(call, factor, n), rest)
            return jax.tree.map(partial(_padded, groups.size), rows), columns

        drows, found = _of_written(chunks, walk.tokens.size, groups.size, of_rest)
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


def _late_products(walk: Walk, dz: jax.Array, chunks: Index, factor: Features, dtype: Any) -> tuple[Part, Part]:
    """dhidden of a group in f32 and dkernel in `dtype`, from dlogits of which so many chunks are written."""
    call, kernel, count, size = walk.call, walk.block(0).parameters.kernel, dz.shape[0], walk.tokens.size

    def of_hidden(start: Index, rows: int, first: Index, width: int) -> jax.Array:
        def product(n: int) -> jax.Array:
            return hidden_product(call, dz, kernel, start, min(n, rows), first, width)

        if rows == count:
            found: jax.Array = _of_written(chunks, size, count, lambda n: _padded(rows, product(n)))
            return found
        return _if_written(chunks, size, start, lambda: product(rows))

    def of_kernel(*block: Any) -> jax.Array:
        def product(n: int) -> jax.Array:
            return kernel_product(call, n, dz, factor.hidden, *block).astype(dtype)

        found: jax.Array = _of_written(chunks, size, count, product)
        return found

    return of_hidden, of_kernel


def _of_written(chunks: Index, size: int, count: int, product: Callable[[int], Any]) -> Any:
    """product(n) of the first n of `count` rows: those of the `chunks` of `size` rows that are written."""
    if isinstance(chunks, int):
        return product(count)
    return lax.switch(chunks, [partial(product, n) for n in range(0, count + 1, size)])


def _fill(
    walk: Walk, groups: TokenBlocks, slots: Slots, begin: Begin, results: Any
) -> tuple[Any, jax.Array, Index, Features, jax.Array | None]:
    """Computes a group's chunks and writes their dlogits into one array `[G, V]`.

    Returns results, dlogits, the number of chunks that are written, what `as_factor` returns, and dbias.
    """
    tokens, size = walk.tokens, walk.tokens.size
    chunks, block, rows = groups.size // size, walk.block(0), groups.take(walk.features, slots)

    def of_chunk(k: Index, carry: Any) -> Any:
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

    columns = block.column_ids.shape[1]
    dtype = product_dtype(walk.inputs.features.hidden, walk.inputs.parameters.kernel)
    dbias = None if block.parameters.bias is None else walk.zeros(columns)
    empty = walk.vary((lax.empty((groups.size, columns), dtype), jnp.zeros(groups.size, bool)))
    start = results, *empty, dbias
    turns = chunks if tokens.order is None or chunks == 1 else jnp.clip(tokens.turns - slots.start // size, 0, chunks)
    results, dz, counts, dbias = of_chunk(0, start) if chunks == 1 else lax.fori_loop(0, turns, of_chunk, start)
    return results, dz, turns, as_factor(walk.call, rows, counts), dbias


def _if_written(chunks: Index, size: int, start: Index, product: Callable[[], jax.Array]) -> jax.Array:
    """product(), of rows from `start` on; zeros if none of them is written: the first `chunks` of `size` rows are."""
    if isinstance(chunks, int):
        return product()
    like = jax.eval_shape(product)
    return lax.cond(start < chunks * size, product, lambda: vary_like(jnp.zeros(like.shape, like.dtype), like))


def _padded(count: int, x: jax.Array) -> jax.Array:
    """x with rows added to make it `count`; they are not initialized."""
    whole = vary_like(lax.empty((count, x.shape[1]), x.dtype), x)
    return lax.dynamic_update_slice_in_dim(whole, x, 0, 0) if whole.shape != x.shape else x


def restrict_counts(cotangents: Cotangents, counts: jax.Array | None) -> Cotangents:
    """The cotangents, where only tokens count that count in `counts` too."""
    return cotangents if counts is None else cotangents._replace(counts=cotangents.counts & counts)
