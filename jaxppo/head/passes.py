"""The two walks over tiles that find gradients: `one_pass`, and `second`, which has the numbers that a sweep left."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import reductions
from jaxppo.head.border import Axes, Index, as_bits, back, put_slice, rounded, slice_of, unless, whole_parameter
from jaxppo.head.call import Tokens
from jaxppo.head.reductions import Columns, Numbers
from jaxppo.head.ring import LANES, Term, summed
from jaxppo.head.sweep import Block, Work, loop, read, references_of, write
from jaxppo.head.tile import Features, Parameters, logits, of_feature, of_parameter, products
from jaxppo.sharding import vary, varying

PRODUCTS = 4  # on accelerators products of a group that follows a mask have so many sizes: a quarter of it, a half, ...


def gradient_of_products(work: Work, x: jax.Array, sums: Callable[[jax.Array], Any], of_sums: Any) -> jax.Array:
    """The gradient of a tile's products, in the dtype of products: JAX differentiates the sums over its columns."""
    _, pull = jax.vjp(sums, x)
    return pull(jax.tree.map(lambda g: vary(g, varying(x)), of_sums))[0].astype(work.dtype)


def tile_sums(work: Work, peaks: Numbers, tokens: Tokens, columns: Columns, x: jax.Array) -> Numbers:
    """The sums of a tile through which a gradient flows, from its products."""
    z = logits(work.call.transform, x, tokens.temperature, columns.valid)
    return reductions.sums_of(work.call.asked, z, peaks, tokens, columns, differentiated=True)


def one_pass(work: Work, loss: Callable[..., jax.Array], per_token: Any) -> tuple[Any, Features, Parameters]:
    """Losses and statistics of all tokens in order, gradients of features for `cotangents`, of parameters summed."""
    call, C, G, V = work.call, work.plan.chunk, work.plan.group, work.window.total
    groups, per_token = work.size // G, work.order.put(per_token, work.size)
    _, parameters, columns = all_columns = work.block(0, V)
    references, chunks = references_of(work, V), G // C
    # XLA for GPUs adds a product to a total in one kernel, but not a product in a branch: several groups are whole
    follows = work.order.places is not None and (groups == 1 or call.profile.rings or not call.profile.whole)

    def chunk(g: Index, j: Index, carry: Any) -> Any:  # by all columns; those of a group fill dx for `last_products`
        results, dx_all = carry
        at = g * G + j * C
        (tokens, features), of_tokens = work.read(at, C), read(per_token, at, C)
        found, x = work.numbers(at, (tokens, features), parameters, columns, read(references, at, C))
        found, counts = reductions.over_devices(found, call.axes), work.counts(at, C)

        def losses_of(sums: Numbers) -> Any:
            stats = reductions.finish(call.asked, found, tokens, call.vocab_size, sums)
            return unless(counts, (loss(stats, of_tokens), stats))

        losses, pull, stats = jax.vjp(losses_of, reductions.differentiated(call.asked, found.sums), has_aux=True)
        of_sums = unless(counts, pull(jnp.ones_like(losses))[0])

        def dx(start: Index, size: int, first: Index, width: int) -> jax.Array:
            peaks, some, of_some = read((found.peaks, tokens, of_sums), start, size)
            ids, valid = jax.tree.map(lambda c: slice_of(c, first, width), (columns.ids, columns.valid))
            sums = partial(tile_sums, work, peaks, some, columns._replace(ids=ids, valid=valid))
            return gradient_of_products(work, matrix_part(x, 0, start, size, first, width), sums, of_some)

        results = write(results, work.vary((losses, stats), call.axes.tensor), at)
        return results, dx if work.plan.fused else put_slice(dx_all, work.vary(dx(0, C, 0, V)), j * C)

    def group(g: Index, carry: Any) -> Any:
        results, dfeatures, totals = carry
        dx: Any = work.vary(lax.empty((G, V), work.dtype))
        dx = as_bits(dx) if call.profile.upcast else dx
        step = -(-chunks // PRODUCTS) if follows and call.profile.whole else chunks  # XLA for CPUs would copy dx
        turns: Index = chunks
        written: Index = -(-chunks // step)
        if follows:  # products have whole steps, so their last chunks are computed too
            written = jnp.clip(-(-(work.turns(C) - g * chunks) // step), 0, written)
            turns = jnp.minimum(written * step, chunks)
        results, dx = loop(turns, partial(chunk, g), (results, dx))
        if not work.plan.fused:
            dx = partial(matrix_part, lax.optimization_barrier(as_bits(dx, work.dtype)), 0)
        last = work, all_columns, dx, work.read(g * G, G)[1], written, step * C
        of_group, found = last_products(*last, None if groups == 1 else totals)
        if work.places is None:
            return results, write(dfeatures, of_group, g * G), found
        at = slice_of(work.places, g * G, G)
        return results, jax.tree.map(lambda x, new: x.at[at].set(new, unique_indices=True), dfeatures, of_group), found

    stats = reductions.zero_stats(call.asked, work.tokens, work.size)
    results = work.vary((stats.log_probs, stats), call.axes.tensor)
    dfeatures = work.vary(tuple(jnp.zeros((work.size, x.shape[1]), jnp.float32) for x in work.features))
    if not call.sequence_parallel:  # else a scatter follows; these are summed over devices already
        pairs = zip(dfeatures, work.given.features, strict=True)
        dfeatures = tuple(vary(jnp.zeros(x.shape, primal.dtype), varying(primal)) for x, primal in pairs)
    if groups == 1:
        results, dfeatures, found = group(0, (results, dfeatures, ()))
    else:
        totals = work.vary(tuple(jnp.zeros(p.shape, jnp.float32) for p in parameters))
        results, dfeatures, totals = lax.fori_loop(0, work.turns(G), group, (results, dfeatures, totals))
        terms = (partial(matrix_part, x, call.v_dim) for x in totals)
        found = tuple(parameter_sum(work, k, columns, term) for k, term in enumerate(terms))
    return results, dfeatures, tuple(in_place(work, k, x) for k, x in enumerate(found))


def last_products(
    work: Work, block: Block, dx: Term, features: Features, written: Index, step: int, totals: Parameters | None
) -> tuple[Features, Parameters]:
    """The gradients of a group's features and of parameters, summed over devices, or added to `totals`, f32.

    dx(start, size, first, width) is a part of the gradient of products `[G, V]`: of tokens, whose first steps of so
    many are `written`, and columns.
    """
    call, G, V, v, whole = work.call, work.plan.group, work.window.total, work.call.v_dim, isinstance(written, int)
    _, parameters, columns = block
    counts = [G] if whole else [min(n, G) for n in range(0, G + step, step)]
    always = lax.optimization_barrier(jnp.asarray(True))

    def apart(product: Callable[[], jax.Array]) -> jax.Array:
        """product(), on TPUs in a branch that is always taken: beside the loop XLA would copy all of dx to a layout."""
        if work.plan.fused:  # XLA would compute dx in the addition behind it
            return lax.optimization_barrier(product())
        if not call.profile.rings:
            return product()
        return lax.cond(always, product, lambda: work.vary(jnp.zeros_like(jax.eval_shape(product))))

    def of_written(products: Sequence[Callable[..., jax.Array]], *at: Index) -> jax.Array:
        """The product of the tokens that are written, of those for each of `counts`."""
        return apart(partial(products[0], *at)) if whole else lax.switch(written, products, *at)

    def feature_term(k: int, start: Index, size: int, first: Index, width: int) -> jax.Array:
        if size == G:
            gradient = partial(of_feature, call, k, p=parameters[k])
            return of_written([lambda n=n: jnp.pad(gradient(dx(0, n, 0, V)), ((0, G - n), (0, 0))) for n in counts])

        def product() -> jax.Array:
            return of_feature(call, k, dx(start, size, 0, V), slice_of(parameters[k], first, width, 1 - v))

        if whole:
            return apart(product)
        end, zeros = written * step, work.vary(jnp.zeros((size, width), jnp.float32))
        found: jax.Array = lax.cond(start < end, product, lambda: zeros)
        if step % size == 0 and G % size == 0:  # no part has rows on both sides of the end
            return found
        return jnp.where((start + jnp.arange(size) < end)[:, None], found, 0)

    def parameter_term(k: int, dtype: Any, start: Index, size: int, first: Index, width: int) -> jax.Array:
        return of_written(products_of(k, dtype, size, width), start, first)

    @functools.cache  # JAX traces a function once, and most terms of a ring are equal but for their place
    def products_of(k: int, dtype: Any, size: int, width: int) -> Any:
        """Functions of a part's place, one for each of `counts`."""
        part = partial(matrix_part, features[k], 0)
        return [
            lambda start, first, n=n: of_parameter(call, k, dx(0, n, start, size), part(0, n, first, width), dtype)
            for n in counts
        ]

    dfeatures = tuple(feature_sum(work, k, partial(feature_term, k), G) for k in range(len(features)))
    if totals is not None:

        def added(k: int, n: int, total: jax.Array) -> jax.Array:  # in the product's branch, XLA adds as it multiplies
            width = 37 * LANES if work.plan.fused else V  # 4736; of wider parts XLA computes dlogits twice
            for start in range(0, V, width):
                old = slice_of(total, start, min(width, V - start), v)
                new = old + of_parameter(call, k, dx(0, n, start, old.shape[v]), features[k][:n])
                total = put_slice(total, lax.optimization_barrier(new) if work.plan.fused else new, start, v)
            return total

        return dfeatures, tuple(of_written([partial(added, k, n) for n in counts], x) for k, x in enumerate(totals))
    if call.h_names and call.profile.rings:  # dfeatures reads the gathered kernel last: its memory is to be free now
        always = ~(dfeatures[0][0, 0] > jnp.inf)  # true: XLA for TPUs keeps no order but that of what a result needs
        written = written if whole else jnp.where(always, written, 0)
    found = []
    for k, primal in enumerate(work.given.parameters):
        late = work.axes - kept(work, k) or (k == 0 and call.h_names) or call.gathered_v  # rounded behind the sum
        found.append(parameter_sum(work, k, columns, partial(parameter_term, k, jnp.float32 if late else primal.dtype)))
    return dfeatures, tuple(found)


def matrix_part(x: jax.Array, dim: int, start: Index, size: int, first: Index, width: int) -> jax.Array:
    """A part of a matrix, `size` of dimension `dim`. XLA for TPUs would copy what lies between two slices."""
    at, shape = ((start, first), (size, width)) if dim == 0 else ((first, start), (width, size))
    if isinstance(start, int) and isinstance(first, int):
        return x[at[0] : at[0] + shape[0], at[1] : at[1] + shape[1]]
    return lax.dynamic_slice(x, at, shape, allow_negative_indices=False)


def feature_sum(work: Work, k: int, term: Term, count: int, zero: jax.Array | None = None) -> jax.Array:
    """Gradients of `count` rows of features, summed over the axes that the features lack, unless a scatter follows."""
    primal = work.given.features[k]
    if work.call.sequence_parallel:
        return term(0, count, 0, primal.shape[2])
    return summed(work, term, 0, count, primal.shape[2], varying(primal), primal.dtype, zero=zero)


def kept(work: Work, k: int) -> Axes:
    """The mesh axes along which devices hold other columns or rows of a parameter, or work on another window of it."""
    return varying(work.given.parameters[k]) | (set(work.call.axes.tensor) if work.call.shared else set())


def parameter_sum(work: Work, k: int, columns: Columns, term: Term) -> jax.Array:
    """The gradient of some columns of a parameter as the device holds them, summed over devices, in its dtype.

    Windows of one tensor axis differ: their sum over it follows, when all of them are in place.
    """
    call, primal, keep = work.call, work.given.parameters[k], kept(work, k)
    wide, v, h_names = call.gradient_sum_dtype == "float32", call.v_dim, call.h_names if k == 0 else ()
    length, width = columns.ids.shape[0], work.features[k].shape[1]
    if not call.gathered_v:  # shares of a ring are of columns, since a share of the features reads all of dx
        if h_names:
            flipped: Term = lambda start, size, first, width: term(first, width, start, size)  # noqa: E731
            return summed(work, flipped, 1 - v, width, length, keep, primal.dtype, h_names, wide)
        return summed(work, term, v, length, width, keep, primal.dtype, wide=wide)
    total, pieces = term(0, length, 0, width), work.window.bases.shape[0]
    total = total if wide else rounded(total, primal.dtype)
    if call.shared and not work.window.each:  # a window of all pieces together
        held, length = list(total.shape), pieces * primal.shape[v]
        held[v] = length
        total = put_slice(vary(jnp.zeros(held, total.dtype), varying(total)), total, work.window.start, v)
    shape = list(primal.shape)
    shape[v] = length // pieces
    return rounded(back(partial(whole_parameter, call, k, work.axes), tuple(shape), keep, total), primal.dtype)


def in_place(work: Work, k: int, found: jax.Array) -> jax.Array:
    """The gradient of a window's columns, of all that the device holds; each column is in one device's window."""
    primal, v = work.given.parameters[k], work.call.v_dim
    if not work.call.shared:
        return found
    if found.shape[v] < primal.shape[v]:
        found = put_slice(vary(jnp.zeros(primal.shape, primal.dtype), varying(found)), found, work.window.start, v)
    names = tuple(sorted(varying(found) - varying(primal)))
    return lax.psum(found, names) if names else found


def second(work: Work, counts: jax.Array, known: Any, sums_at: Callable[..., Any]) -> tuple[Features, Parameters]:
    """The f32 gradients of features in order, and those of parameters, a finished block of columns at a time.

    sums_at(work, i)(start, tokens, columns, part) returns the sums of a tile in block i as a function of its products,
    and their cotangents; `part` is what `known`, arrays of tokens in order, hold of its tokens, from `start` on.
    """
    call, given, v, C, B, blocks = work.call, work.given, work.call.v_dim, work.plan.group, work.width, work.blocks
    alone = work.size == C
    if alone:  # a copy; several tiles do without it, since XLA makes the selection a part of their products
        work = work._replace(features=unless(counts, work.features))

    def term(k: int, dx: jax.Array, f: jax.Array, start: Index, size: int, first: Index, width: int) -> jax.Array:
        return of_parameter(call, k, slice_of(dx, start, size, 1), slice_of(f, first, width, 1))

    def block(i: Index, carry: Any) -> Any:
        dfeatures, dparameters = carry
        i = blocks - 1 - i  # the last one first: in the columns that it shares with the one before it holds zeros
        (start, parameters, columns), sums_of_tile = work.block(i, B), sums_at(work, i)

        def tile(j: Index, carry: Any) -> Any:
            dfeatures, totals = carry
            tokens, part, drows = read((work.tokens, known, dfeatures), j * C, C)
            features = work.features if alone else unless(*read((counts, work.features), j * C, C))
            sums, of_sums = sums_of_tile(j * C, tokens, columns, part)
            dx = gradient_of_products(work, products(call, features, parameters), sums, of_sums)
            dx = lax.optimization_barrier(dx) if call.profile.whole else dx  # else both products compute it
            pairs = enumerate(zip(drows, parameters, strict=True))
            drows = tuple(d + of_feature(call, k, dx, p) for k, (d, p) in pairs)
            dfeatures = work.vary(write(dfeatures, drows, j * C))
            if totals is None:
                return dfeatures, tuple(partial(term, k, dx, f) for k, f in enumerate(features))
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

    dfeatures = work.vary(tuple(jnp.zeros(x.shape, jnp.float32) for x in work.features))
    empty = tuple(vary(jnp.zeros(p.shape, p.dtype), kept(work, k)) for k, p in enumerate(given.parameters))
    dfeatures, filled = loop(blocks, block, (dfeatures, tuple(map(as_bits, empty)) if call.profile.upcast else empty))
    found = (as_bits(d, p.dtype) for d, p in zip(filled, given.parameters, strict=True))
    sums = []
    for k, x in enumerate(dfeatures):
        zero, _ = lax.optimization_barrier((jnp.float32(0), x[:1, :1]))  # known after the loop
        sums.append(feature_sum(work, k, partial(matrix_part, x, 0), work.size, zero))
    return tuple(sums), tuple(in_place(work, k, x) for k, x in enumerate(found))
