"""The two walks over tiles that find gradients.

one_pass    chunk of tokens by all columns: numbers, statistics, losses, and the gradient of the products; the
            chunks of a group fill one array, which two products multiply
second      block of columns by all tokens: the gradients from the numbers that the sweep left
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import reductions
from jaxppo.head.border import (
    Axes,
    Index,
    back,
    from_bits,
    put_slice,
    rounded,
    slice_of,
    to_bits,
    unless,
    whole_parameter,
)
from jaxppo.head.call import HeadCall, Names
from jaxppo.head.reductions import Columns, Sums, Tokens
from jaxppo.head.ring import Term, summed
from jaxppo.head.sweep import Work, loop, read, references_of, write
from jaxppo.head.tile import Features, Parameters, of_feature, of_parameter, products
from jaxppo.sharding import vary, varying

PRODUCTS = 4  # on accelerators products of a group that follows a mask have so many sizes: a quarter of it, a half, ...


def gradient_of_products(work: Work, x: jax.Array, sums: Callable[[jax.Array], Any], of_sums: Any) -> jax.Array:
    """The gradient of a tile's products, in the dtype of products: JAX differentiates the sums over its columns."""
    _, pull = jax.vjp(sums, x)
    of_sums = jax.tree.map(lambda g: vary(g, varying(x)), of_sums)
    found: jax.Array = pull(of_sums)[0]
    return found.astype(work.dtype)


def tile_sums(work: Work, peaks: dict[str, jax.Array], tokens: Tokens, columns: Columns, x: jax.Array) -> Sums:
    """The sums of a tile through which a gradient flows, from its products."""
    z = work.to_logits(tokens, columns)(x)
    return reductions.sums_of(work.call.asked, z, peaks, tokens, columns, differentiated=True)


def one_pass(work: Work, loss: Callable[..., jax.Array], per_token: Any) -> tuple[Any, Features, Parameters]:
    """Losses and statistics of all tokens, in order, and gradients: of features in order, of parameters summed."""
    call, C, G, V = work.call, work.plan.chunk, work.plan.group, work.window.total
    groups, per_token = work.size // G, work.order.put(per_token, work.size)
    _, parameters, columns = work.block(0, V)
    references, chunks = references_of(work, V), G // C
    # XLA for GPUs adds a product to a total in one kernel, but not a product in a branch: several groups are whole
    follows = work.order.places is not None and (groups == 1 or call.profile.rings or not call.profile.whole)

    def chunk(g: Index, j: Index, carry: Any) -> Any:
        results, dx_all = carry
        at = g * G + j * C
        (tokens, features), of_tokens = work.read(at, C), read(per_token, at, C)
        found, x = work.numbers(tokens, features, parameters, columns, read(references, at, C))
        found, counts = work.over_devices(found), work.counts(at, C)

        def losses_of(sums: Sums) -> Any:
            stats = reductions.finish(call.asked, found, tokens, call.vocab_size, sums)
            return unless(counts, (loss(stats, of_tokens), stats))

        losses, pull, stats = jax.vjp(losses_of, reductions.differentiated(call.asked, found.sums), has_aux=True)
        of_sums = unless(counts, pull(jnp.ones_like(losses))[0])
        dx = gradient_of_products(work, x, partial(tile_sums, work, found.peaks, tokens, columns), of_sums)
        return write(results, work.vary_results((losses, stats)), at), put_slice(dx_all, work.vary(dx), j * C)

    def group(g: Index, carry: Any) -> Any:
        results, dfeatures, totals = carry
        dx = work.vary(lax.empty((G, V), work.dtype))
        dx = to_bits(dx) if call.profile.upcast else dx
        step = -(-chunks // PRODUCTS) if follows and call.profile.whole else chunks  # XLA for CPUs would copy dx
        turns: Index = chunks
        written: Index = -(-chunks // step)
        if follows:  # products have whole steps, so their last chunks are computed too
            written = jnp.clip(-(-(work.turns(C) - g * chunks) // step), 0, written)
            turns = jnp.minimum(written * step, chunks)
        results, dx = loop(turns, partial(chunk, g), (results, dx))
        dx = lax.optimization_barrier(from_bits(dx, work.dtype))
        done = Done(work, parameters, columns, dx, work.read(g * G, G)[1], written, step * C)
        dfeatures = write(dfeatures, tuple(map(done.of_feature, range(len(dfeatures)))), g * G)
        if groups == 1:
            return results, dfeatures, tuple(map(done.of_parameter, range(len(parameters))))
        return results, dfeatures, tuple(done.added(k, total) for k, total in enumerate(totals))

    shapes = jax.eval_shape(lambda: chunk_shapes(work))
    results = work.vary_results(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    dfeatures = tuple(map(partial(empty_rows, work), work.features, work.given.features))
    if groups == 1:
        results, dfeatures, found = group(0, (results, dfeatures, ()))
    else:
        totals = work.vary(tuple(jnp.zeros(p.shape, jnp.float32) for p in parameters))
        results, dfeatures, totals = lax.fori_loop(0, work.turns(G), group, (results, dfeatures, totals))
        terms = (partial(matrix_part, x, call.v_dim) for x in totals)
        found = tuple(parameter_sum(work, k, columns, term) for k, term in enumerate(terms))
    return results, dfeatures, tuple(in_place(work, k, x) for k, x in enumerate(found))


def empty_rows(work: Work, x: jax.Array, primal: jax.Array) -> jax.Array:
    """Zeros for the gradients of all tokens: summed over devices already, or f32 if a scatter follows."""
    if work.call.sequence_parallel:
        return work.vary(jnp.zeros(x.shape, jnp.float32))
    return vary(jnp.zeros(x.shape, primal.dtype), varying(primal))


def chunk_shapes(work: Work) -> Any:
    """Losses and statistics of all tokens, for their shapes."""
    z = jnp.zeros((work.size, work.window.total), jnp.float32)
    _, columns = work.window.block(0, work.window.total)
    found = work.over_devices(work.vary(reductions.reduced(work.call.asked, z, work.tokens, columns)))
    stats = reductions.finish(work.call.asked, found, work.tokens, work.call.vocab_size)
    return stats.log_probs, stats


class Done(NamedTuple):
    """The gradients of products of a group of tokens, whose first `written` steps are written."""

    work: Work
    parameters: Parameters
    columns: Columns
    dx: jax.Array  # [G, V]
    features: Features  # [G, f]
    written: Index
    step: int

    def of_written(self, product: Callable[[int], jax.Array]) -> jax.Array:
        """product(n) of the first n tokens, those that are written."""
        G = self.dx.shape[0]
        if isinstance(self.written, int):
            return self.apart(lambda: product(G))
        counts = range(0, G + self.step, self.step)
        found: jax.Array = lax.switch(self.written, [partial(product, min(n, G)) for n in counts])
        return found

    def apart(self, product: Callable[[], jax.Array]) -> jax.Array:
        """product(), on TPUs in a branch that is always taken: beside the loop XLA would copy all of dx to a layout."""
        if not self.work.call.profile.rings:
            return product()
        like = jax.eval_shape(product)
        zeros = self.work.vary(jnp.zeros(like.shape, like.dtype))
        found: jax.Array = lax.cond(lax.optimization_barrier(jnp.asarray(True)), product, lambda: zeros)
        return found

    def of_feature(self, k: int) -> jax.Array:
        """The gradient of the group's features, summed over devices unless a scatter does that later."""
        work, G, p = self.work, self.dx.shape[0], self.parameters[k]

        def term(start: Index, size: int, first: Index, width: int) -> jax.Array:
            if size == G:
                return self.of_written(lambda n: pad_rows(of_feature(work.call, k, self.dx[:n], p), G))

            def product() -> jax.Array:
                part = slice_of(p, first, width, 1 - work.call.v_dim)
                return of_feature(work.call, k, slice_of(self.dx, start, size), part)

            if isinstance(self.written, int):
                return self.apart(product)
            end, zeros = self.written * self.step, work.vary(jnp.zeros((size, width), jnp.float32))
            found: jax.Array = lax.cond(start < end, product, lambda: zeros)
            if self.step % size == 0 and G % size == 0:  # no part has rows on both sides of the end
                return found
            return jnp.where((start + jnp.arange(size) < end)[:, None], found, 0)

        return feature_sum(work, k, term, G)

    def parameter_term(self, k: int, dtype: Any = jnp.float32) -> Term:
        """The gradient of a part of a parameter."""

        def term(start: Index, size: int, first: Index, width: int) -> jax.Array:
            call, dx, f = self.work.call, self.dx, self.features[k]
            return self.of_written(lambda n: parameter_part(call, k, dx, f, n, start, size, first, width, dtype))

        return term

    def of_parameter(self, k: int) -> jax.Array:
        work, primal = self.work, self.work.given.parameters[k]
        final = not summed_over(work, k) and not work.call.gathered_v  # else f32, which is rounded behind the sum
        return parameter_sum(work, k, self.columns, self.parameter_term(k, primal.dtype if final else jnp.float32))

    def added(self, k: int, total: jax.Array) -> jax.Array:
        """`total` and the f32 gradient of a parameter. CPUs add some columns at a time, and never hold the second."""
        term, V, v, f = self.parameter_term(k), self.dx.shape[1], self.work.call.v_dim, self.features[k].shape[1]
        B = V if self.work.call.profile.whole else min(V, self.work.call.profile.columns)

        def add(start: Index, size: int, total: jax.Array) -> jax.Array:
            return put_slice(total, slice_of(total, start, size, v) + term(start, size, 0, f), start, v)

        total = loop(V // B, lambda i, total: add(i * B, B, total), total)
        return add(V - V % B, V % B, total) if V % B else total


def pad_rows(x: jax.Array, count: int) -> jax.Array:
    return x if x.shape[0] == count else jnp.pad(x, ((0, count - x.shape[0]), (0, 0)))


def parameter_part(
    call: HeadCall,
    k: int,
    dx: jax.Array,
    f: jax.Array,
    n: int,
    start: Index,
    size: int,
    first: Index,
    width: int,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """The gradient of `size` columns of parameter k, of their `width` features from `first` on, by n tokens."""
    return of_parameter(call, k, matrix_part(dx, 0, 0, n, start, size), matrix_part(f, 0, 0, n, first, width), dtype)


def matrix_part(x: jax.Array, dim: int, start: Index, size: int, first: Index, width: int) -> jax.Array:
    """A part of a matrix, `size` of dimension `dim`. XLA for TPUs would copy what lies between two slices."""
    at, shape = ((start, first), (size, width)) if dim == 0 else ((first, start), (width, size))
    return x if shape == x.shape else lax.dynamic_slice(x, at, shape, allow_negative_indices=False)


def feature_sum(work: Work, k: int, term: Term, count: int, zero: jax.Array | None = None) -> jax.Array:
    """Gradients of `count` rows of features, summed over the axes that the features lack, unless a scatter follows."""
    primal = work.given.features[k]
    if work.call.sequence_parallel:
        return term(0, count, 0, primal.shape[2])
    return summed(work.call, term, 0, count, primal.shape[2], work.axes - varying(primal), primal.dtype, zero=zero)


def summed_over(work: Work, k: int) -> Axes:
    """The mesh axes over which the gradient of a parameter is summed, or scattered; of a window not the tensor axes."""
    call, primal = work.call, work.given.parameters[k]
    keep = varying(primal) | (set(call.axes.tensor) if call.shared else set())
    return work.axes - keep | (set(call.h_names) if k == 0 else set())


def parameter_sum(work: Work, k: int, columns: Columns, term: Term) -> jax.Array:
    """The gradient of some columns of a parameter as the device holds them, summed over devices, in its dtype.

    A share of a ring is of columns, since a share of the features reads all of dx; unless FSDP shards the features.
    Windows of one tensor axis differ: their sum over it follows, when all of them are in place.
    """
    call, primal = work.call, work.given.parameters[k]
    keep = varying(primal) | (set(call.axes.tensor) if call.shared else set())
    wide, v = call.sum_dtype == "float32", call.v_dim
    h_names: Names = call.h_names if k == 0 else ()
    length, width = columns.ids.shape[0], work.features[k].shape[1]
    if not call.gathered_v:
        if h_names:
            by_features: Term = lambda start, size, first, width: term(first, width, start, size)  # noqa: E731
            return summed(call, by_features, 1 - v, width, length, work.axes - keep, primal.dtype, h_names, wide)
        return summed(call, term, v, length, width, work.axes - keep, primal.dtype, wide=wide)
    total, pieces = term(0, length, 0, width), work.window.bases.shape[0]
    total = total if wide else rounded(total, primal.dtype)
    if call.shared and not work.window.each:  # a window of all pieces together
        held, length = list(total.shape), pieces * primal.shape[v]
        held[v] = length
        total = put_slice(vary(jnp.zeros(held, total.dtype), varying(total)), total, work.window.start, v)
    shape = list(primal.shape)
    shape[v] = length // pieces
    like = vary(jnp.zeros(shape, total.dtype), keep)
    return rounded(back(whole_parameter(call, k, work.axes), like, total), primal.dtype)


def in_place(work: Work, k: int, found: jax.Array) -> jax.Array:
    """The gradient of a window's columns, of all that the device holds; each column is in one device's window."""
    primal, v = work.given.parameters[k], work.call.v_dim
    if not work.call.shared:
        return found
    if found.shape[v] < primal.shape[v]:
        found = put_slice(vary(jnp.zeros(primal.shape, primal.dtype), varying(found)), found, work.window.start, v)
    names = tuple(sorted(varying(found) - varying(primal)))
    return lax.psum(found, names) if names else found


def second(
    work: Work, counts: jax.Array, known: Any, sums_at: Callable[..., tuple[Callable[[jax.Array], Any], Any]]
) -> tuple[Features, Parameters]:
    """The f32 gradients of features in order, and those of parameters, a finished block of columns at a time.

    sums_at(i, tokens, columns, part) returns the sums of a tile in block i as a function of its products,
    and their cotangents; `part` is the tokens' part of `known`, arrays of tokens in order.
    """
    call, B, v, C = work.call, work.plan.columns, work.call.v_dim, work.plan.group
    given, B = work.given, work.width(B)
    blocks, alone = -(-work.window.total // B), work.size == C
    if alone:  # a copy; several tiles do without it, since XLA makes the selection a part of their products
        work = work._replace(features=unless(counts, work.features))

    def block(i: Index, carry: Any) -> Any:
        dfeatures, dparameters = carry
        i = blocks - 1 - i  # the last one first: in the columns that it shares with the one before it holds zeros
        start, parameters, columns = work.block(i, B)

        def tile(j: Index, carry: Any) -> Any:
            dfeatures, totals = carry
            tokens, part, drows = read((work.tokens, known, dfeatures), j * C, C)
            features = work.features if alone else unless(*read((counts, work.features), j * C, C))
            dx = gradient_of_products(work, products(call, features, parameters), *sums_at(i, tokens, columns, part))
            dx = lax.optimization_barrier(dx) if call.profile.whole else dx
            pairs = enumerate(zip(drows, parameters, strict=True))
            drows = tuple(d + of_feature(call, k, dx, p) for k, (d, p) in pairs)
            dfeatures = work.vary(write(dfeatures, drows, j * C))
            if totals is None:
                return dfeatures, tuple(partial(parameter_part, call, k, dx, f, C) for k, f in enumerate(features))
            terms = (of_parameter(call, k, dx, f) for k, f in enumerate(features))
            return dfeatures, work.vary(tuple(map(jnp.add, totals, terms)))

        if alone:  # a ring's products are computed beside its messages
            dfeatures, terms = tile(0, (dfeatures, None))
        else:
            zeros = work.vary(tuple(jnp.zeros(p.shape, jnp.float32) for p in parameters))
            dfeatures, totals = lax.fori_loop(0, work.turns(C), tile, (dfeatures, zeros))
            terms = tuple(partial(matrix_part, x, v) for x in totals)
        sums = (parameter_sum(work, k, columns, term) for k, term in enumerate(terms))
        return dfeatures, tuple(put_slice(out, x, start, v) for out, x in zip(dparameters, sums, strict=True))

    def empty(p: jax.Array) -> jax.Array:
        out = vary(jnp.zeros(p.shape, p.dtype), varying(p) | (set(call.axes.tensor) if call.shared else set()))
        return to_bits(out) if call.profile.upcast else out

    dfeatures = work.vary(tuple(jnp.zeros(x.shape, jnp.float32) for x in work.features))
    dfeatures, filled = loop(blocks, block, (dfeatures, tuple(map(empty, given.parameters))))
    found = (from_bits(d, p.dtype) for d, p in zip(filled, given.parameters, strict=True))
    dparameters = tuple(in_place(work, k, x) for k, x in enumerate(found))

    def rows_summed(k: int, x: jax.Array) -> jax.Array:
        zero, _ = lax.optimization_barrier((jnp.float32(0), x[:1, :1]))  # known after the loop
        return feature_sum(work, k, partial(matrix_part, x, 0), work.size, zero)

    return tuple(rows_summed(k, x) for k, x in enumerate(dfeatures)), dparameters
