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
from jaxppo.head.slices import submatrix
from jaxppo.head.softmax import Cotangents
from jaxppo.head.tile import (
    as_factor,
    feature_gradients,
    kernel_product,
    parameter_gradients,
)
from jaxppo.head.token_blocks import Slots
from jaxppo.head.types import Block, Chunk, Features, Index, NeedsGrad, Parameters
from jaxppo.head.vocabulary_blocks import SUMMED_COLUMNS, each
from jaxppo.head.walk import Walk


class Known(NamedTuple):
    """What a schedule needs for the gradients of one chunk."""

    results: Any  # the losses and statistics of the tokens, f32[C] each; None in the second pass
    residuals: Any
    cotangents: Cotangents
    products: jax.Array | None = None  # f32 [blocks, C, B], kept from the forward; if None they are computed again


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
            kernel = None if found.kernel is None else partial(submatrix, found.kernel, call.v_dim)
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
    """Adds the tile's part to dhidden, and finds the gradients of the block; that of its kernel is a `Submatrix`."""
    call, tokens = walk.call, walk.tokens
    slots, chunk, factor, residuals, cotangents = tile
    dz, of_bias = walk.dlogits(chunk, block, residuals, cotangents)
    # without a barrier XLA for accelerators computes dz again inside each product; on CPUs it would only cost memory
    dz = lax.optimization_barrier(dz) if call.profile.whole else dz
    found = feature_gradients(call, dz, block.parameters, dfeatures)
    dfeatures = tokens.write(dfeatures, jax.tree.map(jnp.add, tokens.read(dfeatures, slots), found), slots)
    kernel = None
    if parameters.kernel is not None:
        kernel = partial(kernel_product, call, tokens.size, partial(submatrix, dz, 0), factor.hidden)
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


def restrict_counts(cotangents: Cotangents, counts: jax.Array | None) -> Cotangents:
    """The cotangents, whose own `counts` become False where the given `counts` are False."""
    return cotangents if counts is None else cotangents._replace(counts=cotangents.counts & counts)
