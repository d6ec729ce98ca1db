"""The schedule of gradients whose products wait for the dlogits of many tokens: the one pass of accelerators.

A chunk of tokens is computed in all columns of the device at once. The chunks of a group fill an array of dlogits in
place, and dhidden and dkernel are one product each after the loop. If a group is a single chunk, `Plan.fused` leaves
the array out: the f32 logits stay in memory, and each product computes the dlogits that it takes. XLA for TPUs makes
that a part of the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.backward import Begin, Known, needed
from jaxppo.head.slices import put_slice, slice_of, submatrix
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
from jaxppo.head.types import Chunk, Features, Index, NeedsGrad, Parameters, Plan, Submatrix
from jaxppo.head.vocabulary_blocks import each
from jaxppo.head.walk import Walk
from jaxppo.sharding import vary_like, varying


def late(walk: Walk, plan: Plan, needs: NeedsGrad, begin: Begin, results: Any) -> tuple[Any, Features, Parameters]:
    """The results of tokens and the gradients that are asked for, a group of chunks at a time.

    If the memory cannot hold all dlogits, there are several groups, and dkernel is accumulated in f32. If the work
    follows a mask, chunks without a token that counts are never written, and the products leave them out.
    """
    call, vocabulary = walk.call, walk.vocabulary
    groups = walk.tokens.grouped(plan.group // walk.tokens.size)
    primals = needed(needs.features, walk.inputs.features)
    parameters = needed(needs.parameters, vocabulary.given)
    # the product of a single group is summed over devices as it is made, without an f32 array of the kernel's shape
    direct = groups.blocks == 1 and plan.direct and parameters.kernel is not None
    rest = parameters._replace(kernel=None) if direct else parameters

    def of_group(slots: Slots, carry: Any) -> Any:
        results, dfeatures, total = carry
        results, group = _fill(walk, plan, groups, slots, begin, results)

        def of_rest(n: int) -> tuple[Features, Parameters]:
            first = group.dlogits(0, n, 0, vocabulary.window)
            rows = feature_gradients(call, first, walk.block(0).parameters, primals._replace(hidden=None))
            columns = parameter_gradients(call, first, first_of_factor(call, group.factor, n), rest)
            # added here, where XLA makes the sum a part of the product
            columns = jax.tree.map(partial(vocabulary.add, 0), total._replace(bias=None), columns)
            return jax.tree.map(partial(_padded, groups.size), rows), columns

        drows, found = group.of_written(of_rest)
        hidden = None if primals.hidden is None else _traced_once(partial(_of_hidden, walk, plan, group))
        drows = drows._replace(hidden=hidden)
        dfeatures = walk.put_features(groups, dfeatures, drows, primals, slots, by_rows=plan.fused)
        if total.bias is not None and group.dbias is not None:
            found = found._replace(bias=vocabulary.add(0, total.bias, group.dbias))
        if not direct:
            return results, dfeatures, found
        kernel = _traced_once(partial(_of_kernel, walk, plan, group))
        summed = vocabulary.sum(True, kernel, parameters.kernel, walk.axes, by_rows=plan.fused)
        return results, dfeatures, found._replace(kernel=summed)

    zeros = jax.tree.map(lambda x: walk.zeros(*x.shape), needed(needs.parameters, vocabulary.held))
    zeros = zeros._replace(kernel=None) if direct else zeros
    results, dfeatures, total = groups.loop(of_group, (results, walk.features_start(primals), zeros))
    dparameters = each(vocabulary.summed, total._replace(kernel=None) if direct else total, rest)
    dparameters = dparameters._replace(kernel=total.kernel) if direct else dparameters
    return walk.tokens.to_tokens(results), walk.finish_features(dfeatures, primals), dparameters


# Rings ask a `Submatrix` for many parts of one size. All of them share one trace.
_traced_once = partial(jax.jit, static_argnums=(1, 3))

# A group that follows a mask has products of at most this many sizes: of a quarter of its tokens, of a half, and so on.
MOST_PRODUCTS = 4


class _Group(NamedTuple):
    """The dlogits of a group of tokens, and what else their products need."""

    dlogits: Submatrix
    tokens: int
    step: int  # a product has a multiple of this many tokens, or all of the group
    steps: Index  # the number of steps that are written; no token in the other steps counts
    factor: Features  # what `as_factor` returns
    dbias: jax.Array | None

    def of_written(self, product: Callable[[int], Any]) -> Any:
        """product(n) of the first n tokens, which are those that are written."""
        if isinstance(self.steps, int):
            return product(self.tokens)
        counts = [min(n, self.tokens) for n in range(0, self.tokens + self.step, self.step)]
        return lax.switch(self.steps, [partial(product, n) for n in counts])

    def if_written(self, start: Index, product: Callable[[], jax.Array]) -> jax.Array:
        """product() of tokens from `start` on, or zeros if none of them is written."""
        if isinstance(self.steps, int):
            return product()
        like = jax.eval_shape(product)
        zeros = partial(jnp.zeros, like.shape, like.dtype)
        return lax.cond(start < self.steps * self.step, product, lambda: vary_like(zeros(), like))


def _of_hidden(walk: Walk, plan: Plan, group: _Group, start: Index, rows: int, first: Index, width: int) -> jax.Array:
    """A part of a group's dhidden, f32."""
    kernel = walk.block(0).parameters.kernel

    def product(n: int) -> jax.Array:
        return _apart(plan, hidden_product(walk.call, group.dlogits, kernel, start, min(n, rows), first, width))

    if rows < group.tokens:
        return group.if_written(start, lambda: product(rows))
    found: jax.Array = group.of_written(lambda n: _padded(rows, product(n)))
    return found


def _of_kernel(walk: Walk, plan: Plan, group: _Group, *block: Any) -> jax.Array:
    """A part of a group's dkernel, in f32. If no f32 sum follows, the product itself is rounded: one kernel of XLA."""
    call, kernel = walk.call, walk.vocabulary.given.kernel
    summed = call.sum_dtype == "float32" and (call.h_names or walk.axes - varying(kernel))
    dtype = jnp.float32 if summed else kernel.dtype

    def product(n: int) -> jax.Array:
        return _apart(plan, kernel_product(call, n, group.dlogits, group.factor.hidden, *block).astype(dtype))

    found: jax.Array = group.of_written(product)
    return found


def _apart(plan: Plan, product: jax.Array) -> jax.Array:
    """Separates a product that computes its dlogits from an addition behind it: XLA would compute them again there."""
    return lax.optimization_barrier(product) if plan.fused else product


def _fill(walk: Walk, plan: Plan, groups: TokenBlocks, slots: Slots, begin: Begin, results: Any) -> tuple[Any, _Group]:
    """Computes a group's chunks. Their dlogits fill one array `[G, V]`; those of a single chunk may stay apart."""
    tokens, size, block = walk.tokens, walk.tokens.size, walk.block(0)
    chunks, rows = groups.size // size, groups.take(walk.features, slots)
    together = -(-chunks // MOST_PRODUCTS)  # the chunks of a step
    group = partial(_Group, tokens=groups.size, step=together * size)
    separate = lax.optimization_barrier if groups.blocks > 1 else lambda dz: dz  # else products compute it again

    def begun(k: Index, results: Any) -> tuple[Any, Chunk, Known, jax.Array | None]:
        own = tokens.slots(slots.start // size + k)
        chunk = walk.chunk(own, jax.tree.map(lambda x: slice_of(x, k * size, size), rows))
        known = begin(chunk, own)
        x = None if known.products is None else known.products[0]
        return tokens.write(results, walk.vary_results(known.results), own), chunk, known, x

    if chunks == 1:
        results, chunk, known, x = begun(0, results)
        of_tokens = known.residuals, known.cotangents
        dz, dbias = walk.dlogits(chunk, block, *of_tokens, x)
        part: Submatrix = partial(submatrix, separate(dz), 0)
        if plan.fused and x is not None:
            part = walk.dlogits_by_part(chunk, *of_tokens, x)
        return results, group(part, steps=1, factor=as_factor(walk.call, rows, known.cotangents.counts), dbias=dbias)

    def put_chunk(k: Index, carry: Any) -> Any:
        results, dz_all, counts, dbias = carry
        results, chunk, known, x = begun(k, results)
        dz, of_bias = walk.dlogits(chunk, block, known.residuals, known.cotangents, x)
        given, new = (dz_all, counts), (dz, known.cotangents.counts)
        put = jax.tree.map(lambda x, new: put_slice(x, new, k * size), given, new)
        return results, *walk.vary((*put, None if of_bias is None else dbias + of_bias))

    columns = block.column_ids.shape[1]
    dtype = product_dtype(walk.inputs.features.hidden, walk.inputs.parameters.kernel)
    dbias = None if block.parameters.bias is None else walk.zeros(columns)
    empty = walk.vary((lax.empty((groups.size, columns), dtype), jnp.zeros(groups.size, bool)))
    steps: Index = -(-chunks // together)
    turns: Index = chunks
    if tokens.order is not None:  # a product has whole steps, so their last chunks are written even if none counts
        with_tokens = jnp.clip(tokens.turns - slots.start // size, 0, chunks)
        steps = (with_tokens + together - 1) // together
        turns = jnp.clip(steps * together, 0, chunks)
    results, dz, counts, dbias = lax.fori_loop(0, turns, put_chunk, (results, *empty, dbias))
    part, factor = partial(submatrix, separate(dz), 0), as_factor(walk.call, rows, counts)
    return results, group(part, steps=steps, factor=factor, dbias=dbias)


def _padded(count: int, x: jax.Array) -> jax.Array:
    """x with rows added up to `count`; the added rows are not initialized."""
    whole = vary_like(lax.empty((count, x.shape[1]), x.dtype), x)
    return put_slice(whole, x, 0) if whole.shape != x.shape else x
