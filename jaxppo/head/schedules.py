"""The three walks over tiles: statistics alone, one pass, and the second of two passes.

sweep       chunk of tokens by block of columns; the numbers of blocks merge
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
    Local,
    Order,
    Tree,
    Window,
    axes_of,
    back,
    from_bits,
    parts_of,
    put_slice,
    rounded,
    slice_of,
    to_bits,
    unless,
    whole_features,
    whole_parameter,
    without_padding,
)
from jaxppo.head.call import HeadCall, Names
from jaxppo.head.plan import Plan
from jaxppo.head.reductions import Columns, Reduced, Sums, Tokens
from jaxppo.head.ring import first_order, summed
from jaxppo.head.tile import LOW, Features, Parameters, logits, of_feature, of_parameter, products
from jaxppo.sharding import note, vary, varying, wider_dtype

PRODUCTS = 4  # products of a group that follows a mask have one of so many sizes: a quarter of its tokens, a half, ...


class Work(NamedTuple):
    """One device's part of a call: tokens in order, padded to whole tiles, and its columns."""

    call: HeadCall
    plan: Plan
    axes: Axes
    order: Order
    features: Features  # [N', f]
    tokens: Tokens  # [N', ...]
    given: Local
    window: Window
    whole: Parameters | None  # the parameters of all columns held, None if they are gathered block by block

    @classmethod
    def of(cls, call: HeadCall, plan: Plan, given: Local, *, by_block: bool = False) -> Work:
        axes, N = axes_of(call, given), given.size(call)
        alone = plan.passes == 2 and plan.group >= N and plan.chunk >= N  # a single tile keeps tokens in place
        order = Order.of(
            call,
            None if alone and not call.deterministic else given.counts,
            N,
            axes if plan.passes == 1 else frozenset(),
        )
        tile = plan.group if plan.passes == 1 or plan.group % plan.chunk == 0 else plan.chunk
        least = 2 if call.deterministic else 1  # a loop of one turn would be compiled as another program
        size = tile * max(least, -(-N // tile))
        features, tokens = order.put((tuple(whole_features(call, axes)(x) for x in given.features), given.tokens), size)
        by_block = by_block and bool(call.h_names or call.gathered_v)
        window = Window.of(call, given.parameters[0].shape[call.v_dim], by_block)
        whole = None if by_block else tuple(whole_parameter(call, k, axes)(p) for k, p in enumerate(given.parameters))
        return cls(call, plan, axes, order, features, tokens, given, window, whole)

    @property
    def size(self) -> int:
        """N', the number of tokens with padding."""
        return self.features[0].shape[0]

    @property
    def dtype(self) -> Any:
        """The dtype in which products are multiplied."""
        return wider_dtype(self.features[0].dtype, self.given.parameters[0].dtype)

    def vary(self, tree: Tree) -> Tree:
        """A loop's carry must vary over all axes from the start."""
        return jax.tree.map(lambda x: vary(x, self.axes), tree)

    def vary_results(self, tree: Tree) -> Tree:
        """Results of tokens are equal along the tensor axis."""
        return jax.tree.map(lambda x: vary(x, self.axes - set(self.call.axes.tensor)), tree)

    def block(self, i: Index, size: int) -> tuple[Index, Parameters, Columns]:
        """The place of block i in what the device holds, its parameters and its columns."""
        call, (start, columns) = self.call, self.window.block(i, size)
        held = self.given.parameters if self.whole is None else self.whole
        parts = (slice_of(p, start, size, call.v_dim, call.profile.upcast) for p in held)
        if self.whole is None:
            parts = (whole_parameter(call, k, self.axes)(p) for k, p in enumerate(parts))
        return start, tuple(without_padding(call, columns, p) for p in parts), columns

    def to_logits(self, tokens: Tokens, columns: Columns) -> Callable[[jax.Array], jax.Array]:
        return partial(logits, self.call.transform, temperature=tokens.temperature, valid=columns.valid)

    def numbers(
        self, tokens: Tokens, features: Features, parameters: Parameters, columns: Columns
    ) -> tuple[Reduced, jax.Array]:
        """The numbers of a tile, and its products."""
        asked, x = self.call.asked, products(self.call, features, parameters)
        to_logits = self.to_logits(tokens, columns)
        if not self.has_references(columns):
            return self.vary(reductions.reduced(asked, to_logits(x), tokens, columns)), x
        own, z_y = self.target_logits(tokens, features, parameters, columns)
        found = self.vary(reductions.reduced(asked, to_logits(x), tokens, columns, z_y))
        found.sums["z_y"] = self.vary(own)  # known already: XLA leaves the other one out
        far = ~(found.sums["s"] <= reductions.FARTHEST) | (z_y <= LOW / 2)

        def exactly() -> Reduced:  # in products of their own, an eighth at a time: the chunk's logits exist once
            given, C = lax.optimization_barrier((tokens, features)), x.shape[0]
            n = C // 8 if C % 64 == 0 else C

            def part(j: Index, total: Reduced) -> Reduced:
                some, its = read(given, j * n, n)
                z = self.to_logits(some, columns)(products(self.call, its, parameters))
                return write(total, self.vary(reductions.reduced(asked, z, some, columns)), j * n)

            again = loop(C // n, part, self.vary(reductions.nothing(found)))
            return jax.tree.map(lambda x, y: jnp.where(far, x, y), again, found)  # no token changes another's bits

        with note("rarely: sums of tokens far from their maximum"):
            return lax.cond(far.any(), exactly, lambda: found), x

    def has_references(self, columns: Columns) -> bool:
        """Whether sums are relative to the target's logit, which is known before the product: sums become part of it.

        The operands must be bf16, since it costs accuracy. Ids and nuclei read the logits again anyway.
        """
        call, tokens = self.call, self.tokens
        alone = tokens.targets is not None and tokens.nucleus is None and tokens.ids is None
        plain = alone and not call.asked.top_k and not call.deterministic and not columns.apart
        all_columns = columns.ids.shape[0] == self.window.total
        return call.profile.whole and plain and all_columns and self.dtype == jnp.bfloat16

    def target_logits(
        self, tokens: Tokens, features: Features, parameters: Parameters, columns: Columns
    ) -> tuple[jax.Array, jax.Array]:
        """The targets' logits: of those that this device holds, 0 for the others, and of all devices."""
        place, inside = columns.places(tokens.targets)
        x = jnp.float32(0)
        for f, p, scale in zip(features, parameters, self.call.scales, strict=True):
            rows = jnp.moveaxis(p, self.call.v_dim, 0).at[place].get(mode="promise_in_bounds")
            dtype = wider_dtype(f.dtype, rows.dtype)
            x = x + scale * jnp.einsum(
                "ch,ch->c", f.astype(dtype), rows.astype(dtype), preferred_element_type=jnp.float32
            )
        z = logits(self.call.transform, x[:, None], tokens.temperature, None)[:, 0]
        z, names = self.vary(jnp.where(inside, z, LOW)), self.call.axes.tensor
        return jnp.where(inside, z, 0), self.vary(lax.pmax(z, names)) if names else z

    def over_devices(self, found: Reduced) -> Reduced:
        return reductions.over_devices(found, self.call.axes)

    def width(self, columns: int) -> int:
        """The size of blocks of about so many columns, which are of all pieces if blocks are gathered one by one."""
        pieces = self.window.bases.shape[0] if self.window.each else 1
        return min(self.window.total, max(128, columns // pieces) if pieces > 1 else columns)

    def turns(self, size: int) -> Index:
        """How many tiles of that many tokens have one that counts."""
        return -(-self.order.counted // size)

    def counts(self, start: Index, size: int) -> jax.Array | None:
        """bool[size], the tokens that count; None for all."""
        if isinstance(self.order.counted, int) and self.order.counted == self.size:
            return None
        return start + jnp.arange(size, dtype=jnp.int32) < self.order.counted


def loop(turns: Index, body: Callable[[Index, Tree], Tree], carry: Tree) -> Tree:
    if isinstance(turns, int) and turns == 1:
        return body(0, carry)
    found: Tree = lax.fori_loop(0, turns, body, carry)
    return found


def read(tree: Tree, start: Index, size: int) -> Tree:
    return jax.tree.map(lambda x: slice_of(x, start, size), tree)


def write(tree: Tree, part: Tree, start: Index) -> Tree:
    return jax.tree.map(lambda x, new: put_slice(x, new, start), tree, part)


def sweep(work: Work) -> Reduced:
    """The numbers of all tokens over the whole vocabulary, in order."""
    call, (C, B) = work.call, (work.plan.chunk, work.plan.columns)
    parts = parts_of(call, work.window.own * work.window.bases.shape[0])
    B = work.width(B)
    blocks = -(-work.window.total // B)

    def tile(i: Index, j: Index) -> Reduced:
        _, parameters, columns = work.block(i, B)
        return work.numbers(*read((work.tokens, work.features), j * C, C), parameters, columns)[0]

    shapes = jax.eval_shape(lambda: tile(0, 0))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((work.size, *x.shape[1:]), x.dtype), shapes)
    start, turns = work.vary(reductions.nothing(like)), work.turns(C)
    if parts:

        def part(i: Index) -> Reduced:
            return lax.fori_loop(0, turns, lambda j, found: write(found, tile(i, j), j * C), start)

        with note(f"{parts * call.axes.size(call.axes.tensor)} parts whatever the tensor axis"):
            names = tuple(n for n in call.v_names if n in call.axes.tensor) or call.axes.tensor
            return reductions.over_parts(lax.map(part, jnp.arange(parts, dtype=jnp.int32)), names)

    def merged(i: Index, j: Index, found: Reduced) -> Reduced:
        return reductions.merge(found, tile(i, j))

    def chunk(j: Index, found: Reduced) -> Reduced:
        first = tile(0, j)
        sums = first if blocks == 1 else lax.fori_loop(1, blocks, lambda i, s: work.vary(merged(i, j, s)), first)
        return write(found, sums, j * C)

    def block(i: Index, found: Reduced) -> Reduced:
        def chunk(j: Index, found: Reduced) -> Reduced:
            return write(found, work.vary(merged(i, j, read(found, j * C, C))), j * C)

        return loop(turns, chunk, found)

    if work.whole is None:
        return work.over_devices(loop(blocks, block, start))
    return work.over_devices(lax.fori_loop(0, turns, chunk, start) if call.deterministic else loop(turns, chunk, start))


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
    call, C, G, V, v = work.call, work.plan.chunk, work.plan.group, work.window.total, work.call.v_dim
    groups, per_token = work.size // G, work.order.put(per_token, work.size)
    _, parameters, columns = work.block(0, V)

    def chunk(g: Index, j: Index, carry: Any) -> Any:
        results, dx_all = carry
        at = g * G + j * C
        tokens, features, of_tokens = read((work.tokens, work.features, per_token), at, C)
        found, x = work.numbers(tokens, features, parameters, columns)
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
        turns: Index = G // C
        step = -(-turns // PRODUCTS) if work.order.places is not None else turns
        written: Index = -(-turns // step)
        if work.order.places is not None:  # products have whole steps, so their last chunks are computed too
            written = jnp.clip(-(-(work.turns(C) - g * turns) // step), 0, written)
            turns = jnp.minimum(written * step, turns)
        results, dx = loop(turns, partial(chunk, g), (results, dx))
        done = Done(
            work,
            parameters,
            lax.optimization_barrier(from_bits(dx, work.dtype)),
            read(work.features, g * G, G),
            written,
            step * C,
        )
        dfeatures = write(dfeatures, tuple(map(done.of_feature, range(len(dfeatures)))), g * G)
        if groups == 1:
            return results, dfeatures, tuple(map(done.of_parameter, range(len(parameters))))
        terms = (done.parameter_term(k)(0, V) for k in range(len(parameters)))
        return results, dfeatures, tuple(map(jnp.add, totals, terms))

    shapes = jax.eval_shape(lambda: chunk_shapes(work))
    results = work.vary_results(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    dfeatures = tuple(map(partial(empty_rows, work), work.features, work.given.features))
    if groups == 1:
        results, dfeatures, found = group(0, (results, dfeatures, ()))
    else:
        totals = work.vary(tuple(jnp.zeros(p.shape, jnp.float32) for p in parameters))
        results, dfeatures, totals = lax.fori_loop(0, work.turns(G), group, (results, dfeatures, totals))
        found = tuple(
            parameter_sum(work, k, columns, partial(part_of, x, v), partial(part_of, x, 1 - v))
            for k, x in enumerate(totals)
        )
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
    dx: jax.Array  # [G, V]
    features: Features  # [G, f]
    written: Index
    step: int

    def of_written(self, product: Callable[[int], jax.Array]) -> jax.Array:
        """product(n) of the first n tokens, those that are written."""
        G = self.dx.shape[0]
        if isinstance(self.written, int):
            return product(G)
        counts = range(0, G + self.step, self.step)
        found: jax.Array = lax.switch(self.written, [partial(product, min(n, G)) for n in counts])
        return found

    def of_feature(self, k: int) -> jax.Array:
        """The gradient of the group's features, summed over devices unless a scatter does that later."""
        work, G, p = self.work, self.dx.shape[0], self.parameters[k]

        def term(start: Index, size: int) -> jax.Array:
            if size == G:
                return self.of_written(lambda n: pad_rows(of_feature(work.call, k, self.dx[:n], p), G))

            def product() -> jax.Array:
                return of_feature(work.call, k, slice_of(self.dx, start, size), p)

            if isinstance(self.written, int):
                return product()
            zeros = work.vary(jnp.zeros((size, self.features[k].shape[1]), jnp.float32))
            found: jax.Array = lax.cond(start < self.written * self.step, product, lambda: zeros)
            return found

        return feature_sum(work, k, term, G)

    def parameter_term(self, k: int) -> Callable[[Index, int], jax.Array]:
        """The f32 gradient of some columns of a parameter: reads these columns of dx alone."""

        def term(start: Index, size: int) -> jax.Array:
            def product(n: int) -> jax.Array:
                f = self.features[k][:n]
                dx = (
                    self.dx[:n]
                    if size == self.dx.shape[1]
                    else lax.dynamic_slice(self.dx, (jnp.zeros_like(start), start), (n, size))
                )
                return of_parameter(self.work.call, k, dx, f)

            return self.of_written(product)

        return term

    def by_features(self, k: int) -> Callable[[Index, int], jax.Array]:
        """The f32 gradient of some features of a parameter."""

        def term(start: Index, size: int) -> jax.Array:
            def product(n: int) -> jax.Array:
                return of_parameter(self.work.call, k, self.dx[:n], slice_of(self.features[k][:n], start, size, 1))

            return self.of_written(product)

        return term

    def of_parameter(self, k: int) -> jax.Array:
        columns = self.work.block(0, self.work.window.total)[2]
        return parameter_sum(self.work, k, columns, self.parameter_term(k), self.by_features(k))


def pad_rows(x: jax.Array, count: int) -> jax.Array:
    return x if x.shape[0] == count else jnp.pad(x, ((0, count - x.shape[0]), (0, 0)))


def part_of(x: jax.Array, dim: int, start: Index, size: int) -> jax.Array:
    """The term of a matrix that exists already."""
    return slice_of(x, start, size, dim)


def feature_sum(work: Work, k: int, term: Callable[[Index, int], jax.Array], count: int) -> jax.Array:
    """Gradients of `count` rows of features, summed over the axes that the features lack, unless a scatter follows."""
    primal = work.given.features[k]
    if work.call.sequence_parallel:
        return term(0, count)
    return summed(work.call, term, 0, count, work.axes - varying(primal), primal.dtype)


def parameter_sum(
    work: Work,
    k: int,
    columns: Columns,
    term: Callable[[Index, int], jax.Array],
    by_features: Callable[[Index, int], jax.Array],
) -> jax.Array:
    """The gradient of some columns of a parameter as the device holds them, summed over devices, in its dtype.

    A share of a ring is of columns, since a share of the features reads all of dx; unless FSDP shards the features.
    Windows of one tensor axis differ: their sum over it follows, when all of them are in place.
    """
    call, primal = work.call, work.given.parameters[k]
    keep = varying(primal) | (set(call.axes.tensor) if call.shared else set())
    wide, v = call.sum_dtype == "float32", call.v_dim
    h_names: Names = call.h_names if k == 0 else ()
    length = columns.ids.shape[0]
    if not call.gathered_v:
        if h_names:
            width = primal.shape[1 - v] * lax.axis_size(h_names)
            return summed(call, by_features, 1 - v, width, work.axes - keep, primal.dtype, h_names, wide)
        return summed(call, term, v, length, work.axes - keep, primal.dtype, wide=wide)
    total = term(0, length)
    total = total if wide else rounded(total, primal.dtype)
    shape = list(primal.shape)
    shape[v] = length // work.window.bases.shape[0]
    like = vary(jnp.zeros(shape, total.dtype), keep)
    return first_order(rounded(back(whole_parameter(call, k, work.axes), like, total), primal.dtype))


def in_place(work: Work, k: int, found: jax.Array) -> jax.Array:
    """The gradient of a window's columns, of all that the device holds; each column is in one device's window."""
    primal, v = work.given.parameters[k], work.call.v_dim
    if not work.call.shared:
        return found
    if found.shape[v] < primal.shape[v]:
        found = put_slice(vary(jnp.zeros(primal.shape, primal.dtype), varying(found)), found, work.window.start, v)
    names = tuple(sorted(varying(found) - varying(primal)))
    return first_order(lax.psum(found, names) if names else found)


def second(
    work: Work, known: Any, sums_at: Callable[..., tuple[Callable[[jax.Array], Any], Any]]
) -> tuple[Features, Parameters]:
    """The f32 gradients of features in order, and those of parameters, a finished block of columns at a time.

    sums_at(i, tokens, columns, part) returns the sums of a tile in block i as a function of its products,
    and their cotangents; `part` is the tokens' part of `known`, arrays of tokens in order.
    """
    call, B, v, C = work.call, work.plan.wide, work.call.v_dim, work.plan.group
    given, B = work.given, work.width(B)
    blocks = -(-work.window.total // B)

    def block(i: Index, carry: Any) -> Any:
        dfeatures, dparameters = carry
        i = blocks - 1 - i  # the last one first: in the columns that it shares with the one before it holds zeros
        start, parameters, columns = work.block(i, B)

        def tile(j: Index, carry: Any) -> Any:
            dfeatures, totals = carry
            tokens, features, part, drows = read((work.tokens, work.features, known, dfeatures), j * C, C)
            x = products(call, features, parameters)
            dx = gradient_of_products(work, x, *sums_at(i, tokens, columns, part))
            dx = lax.optimization_barrier(dx) if call.profile.whole else dx
            drows = tuple(
                d + of_feature(call, k, dx, p) for k, (d, p) in enumerate(zip(drows, parameters, strict=True))
            )
            found = tuple(of_parameter(call, k, dx, f) for k, f in enumerate(features))
            totals = found if totals is None else tuple(map(jnp.add, totals, found))
            return work.vary((write(dfeatures, drows, j * C), totals))

        if work.size == C and work.order.places is None:
            dfeatures, totals = tile(0, (dfeatures, None))
        else:
            zeros = work.vary(tuple(jnp.zeros(p.shape, jnp.float32) for p in parameters))
            dfeatures, totals = lax.fori_loop(0, work.turns(C), tile, (dfeatures, zeros))
        done = []
        for k, (out, total) in enumerate(zip(dparameters, totals, strict=True)):
            found = parameter_sum(work, k, columns, partial(part_of, total, v), partial(part_of, total, 1 - v))
            done.append(put_slice(out, found, start, v))
        return dfeatures, tuple(done)

    def empty(p: jax.Array) -> jax.Array:
        out = vary(jnp.zeros(p.shape, p.dtype), varying(p) | (set(call.axes.tensor) if call.shared else set()))
        return to_bits(out) if call.profile.upcast else out

    dfeatures = work.vary(tuple(jnp.zeros(x.shape, jnp.float32) for x in work.features))
    dfeatures, filled = loop(blocks, block, (dfeatures, tuple(map(empty, given.parameters))))
    found = (from_bits(d, p.dtype) for d, p in zip(filled, given.parameters, strict=True))
    dparameters = tuple(in_place(work, k, x) for k, x in enumerate(found))
    return tuple(feature_sum(work, k, partial(part_of, x, 0), work.size) for k, x in enumerate(dfeatures)), dparameters
