"""One device's part of a call, and the walk over its tiles that finds the statistics of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import border, reductions
from jaxppo.head.border import Axes, Index, Local, Order, Tree, Window, put_slice, rows_at, slice_of, unless
from jaxppo.head.call import HeadCall, Names, Tokens
from jaxppo.head.plan import Plan
from jaxppo.head.reductions import Columns, Reduced
from jaxppo.head.tile import LOW, Features, Parameters, dot, logits, products, scaled
from jaxppo.sharding import note, vary, varying, wider_dtype

Block = tuple[Index, Parameters, Columns]
References = tuple[jax.Array, jax.Array] | None  # f32[N'], the targets' logits that a device holds, and all of them


class Work(NamedTuple):
    """One device's part of a call: tokens in order, padded to whole tiles, and its columns."""

    call: HeadCall
    plan: Plan
    axes: Axes
    size: int  # N', the number of tokens with padding
    dtype: Any  # in which products are multiplied
    order: Order
    places: jax.Array | None  # i32[N'], of each token's row of features; None if features are in order
    features: Features  # [N', f], or [N, f] in the order given
    tokens: Tokens  # [N', ...]
    given: Local
    window: Window
    width: int  # of a block of columns
    blocks: int
    whole: Parameters | None  # the parameters of all columns held, None if they are gathered block by block

    @classmethod
    def of(cls, call: HeadCall, plan: Plan, given: Local) -> Work:
        axes = border.axes_of(call, given)
        features = tuple(border.whole_features(call, axes, x) for x in given.features)
        N = features[0].shape[0]
        alone = plan.chunk >= N and not call.deterministic  # a single chunk keeps tokens in place
        by_block = plan.by_block and bool(call.h_names or call.gathered_v)
        order = Order.of(call, None if alone else given.counts, N, axes if plan.one_pass or by_block else Axes())
        least = 2 if call.deterministic else 1  # a loop of one turn would be compiled as another program
        size = plan.group * max(least, -(-N // plan.group))
        places, tokens = None, order.put(given.tokens, size)
        if plan.one_pass and plan.group < size and order.places is not None:  # a copy of all would take memory
            places = jnp.concatenate([order.places, vary(jnp.arange(N, size, dtype=jnp.int32), varying(order.places))])
        else:
            features = order.put(features, size)
        kernel, stored = given.parameters[0], not call.profile.whole
        own, dtype = kernel.shape[call.v_dim], wider_dtype(features[0].dtype, kernel.dtype)
        window = Window.of(call.axes, call.v_names, own, call.vocab_size, stored, by_block)
        pieces = window.bases.shape[0] if by_block else 1  # blocks that are gathered one by one have columns of each
        width = min(window.total, max(128, plan.columns // pieces) if pieces > 1 else plan.columns)
        blocks, whole = -(-window.total // width), None
        if not by_block:
            whole = tuple(border.whole_parameter(call, k, axes, p) for k, p in enumerate(given.parameters))
        return cls(call, plan, axes, size, dtype, order, places, features, tokens, given, window, width, blocks, whole)

    def vary(self, tree: Tree, equal: Names = ()) -> Tree:
        """A loop's carry must vary over all axes from the start, but for those along which its results are equal."""
        return jax.tree.map(lambda x: vary(x, self.axes - set(equal)), tree)

    def block(self, i: Index, size: int) -> Block:
        """The place of block i in what the device holds, its parameters and its columns."""
        call, (start, columns) = self.call, self.window.block(i, size)
        held = self.given.parameters if self.whole is None else self.whole
        parts = [slice_of(p, start, size, call.v_dim, call.profile.upcast) for p in held]
        if self.whole is None:
            parts = [border.whole_parameter(call, k, self.axes, p) for k, p in enumerate(parts)]
        if columns.valid is not None:  # padding may hold NaN
            exist = jnp.expand_dims(columns.ids < call.vocab_size, 1 - call.v_dim)
            parts = [jnp.where(exist, p, 0) for p in parts]
        return start, tuple(parts), columns

    def numbers(
        self, at: Index, of: tuple[Tokens, Features], parameters: Parameters, columns: Columns, references: References
    ) -> tuple[Reduced, jax.Array]:
        """The numbers of some tokens, from `at` on, relative to references if there are any, and the products."""
        (tokens, features), asked = of, self.call.asked
        # XLA for TPUs is slower if it cuts these rows within the product, or if the branch below reads them too
        x = products(self.call, lax.optimization_barrier(features), parameters)
        reference = None if references is None else references[1]
        z = logits(self.call.transform, x, tokens.temperature, columns.valid)
        found = self.vary(reductions.reduced(asked, z, tokens, columns, reference))
        if references is None:
            return found, x
        own, z_y = references
        found.sums["z_y"] = jnp.where(own == LOW, 0, own)  # known already: XLA leaves the other one out
        far = ~(found.sums["s"] <= reductions.FARTHEST) | (z_y <= LOW / 2)

        def exactly() -> Reduced:  # in products of their own, some tokens at a time: the chunk's logits exist once
            C, n = x.shape[0], min(x.shape[0], 128, -(-x.shape[0] // 64) * 8)

            def part(j: Index, total: Reduced) -> Reduced:
                start = jnp.minimum(j * n, C - n)  # the last part computes some tokens of the one before once more
                some, its = self.read(at + start, n)
                z = logits(self.call.transform, products(self.call, its, parameters), some.temperature, columns.valid)
                return write(total, self.vary(reductions.reduced(asked, z, some, columns)), start)

            again = loop(-(-C // n), part, self.vary(reductions.nothing(found, C)))
            return jax.tree.map(lambda x, y: jnp.where(far, x, y), again, found)  # no token changes another's bits

        with note("rarely: sums of tokens far from their maximum"):
            return lax.cond(far.any(), exactly, lambda: found), x

    def turns(self, size: int) -> Index:
        """How many tiles of that many tokens have one that counts; the most is there for `audit` to read."""
        turns = -(-self.order.most // size)
        return turns if isinstance(turns, int) else jnp.minimum(turns, -(-self.size // size))

    def read(self, start: Index, size: int) -> tuple[Tokens, Features]:
        """Tokens and their features, 0 where tokens do not count: they may hold NaN."""
        tokens, rows = read((self.tokens, self.places), start, size)
        if rows is None:
            features = read(self.features, start, size)
        else:
            features = jax.tree.map(partial(rows_at, jnp.minimum(rows, self.order.tokens - 1)), self.features)
        return tokens, features if self.given.counts is None else unless(self.counts(start, size), features)

    def counts(self, start: Index, size: int) -> jax.Array | None:
        """bool[size], the tokens that count; None for all."""
        if self.order.places is None and self.given.counts is not None:
            return slice_of(self.order.put(self.given.counts, self.size), start, size)
        if isinstance(self.order.counted, int) and self.order.counted == self.size:
            return None
        return start + jnp.arange(size, dtype=jnp.int32) < self.order.counted


def loop(turns: Index, body: Callable[[Index, Tree], Tree], carry: Tree) -> Tree:
    return body(0, carry) if isinstance(turns, int) and turns == 1 else lax.fori_loop(0, turns, body, carry)


def read(tree: Tree, start: Index, size: int) -> Tree:
    return jax.tree.map(lambda x: slice_of(x, start, size), tree)


def write(tree: Tree, part: Tree, start: Index) -> Tree:
    return jax.tree.map(lambda x, new: put_slice(x, new, start), tree, part)


def walk(work: Work, tile: Callable[[Index, Index, Tree], Tree], totals: Tree) -> Tree:
    """Loops over all tiles: what `totals` hold of a chunk's tokens becomes tile(block, chunk, it)."""
    C, blocks, turns = work.plan.chunk, work.blocks, work.turns(work.plan.chunk)

    def chunk(j: Index, totals: Tree, start: Index = 0, count: int = blocks) -> Tree:
        part = loop(count, lambda i, part: tile(start + i, j, part), read(totals, j * C, C))
        return write(totals, part, j * C)

    if work.whole is None:
        return loop(blocks, lambda i, t: loop(turns, lambda j, t: chunk(j, t, i, 1), t), totals)
    return lax.fori_loop(0, turns, chunk, totals) if work.call.deterministic else loop(turns, chunk, totals)


def sweep(work: Work) -> Reduced:
    """The numbers of all tokens over the whole vocabulary, in order: chunks of tokens by blocks of columns, merged."""
    call, C, B, blocks = work.call, work.plan.chunk, work.width, work.blocks
    parts = border.parts_of(call, work.window.own * work.window.bases.shape[0])
    turns, references = work.turns(C), references_of(work, B)
    # made once, since masking its padding copies the kernel; but the bits of deterministic calls would depend on tp
    only = work.block(0, B) if blocks == 1 and not call.deterministic else None

    def tile(i: Index, j: Index) -> Reduced:
        _, parameters, columns = only or work.block(i, B)
        return work.numbers(j * C, work.read(j * C, C), parameters, columns, read(references, j * C, C))[0]

    start = work.vary(reductions.nothing(jax.eval_shape(lambda: tile(0, 0)), work.size))
    if parts:

        def part(i: Index) -> Reduced:
            return lax.fori_loop(0, turns, lambda j, found: write(found, tile(i, j), j * C), start)

        with note(f"{parts * call.axes.size(call.axes.tensor)} parts whatever the tensor axis"):
            names = tuple(n for n in call.v_names if n in call.axes.tensor) or call.axes.tensor
            # XLA would leave out a loop of one turn, and the rest is another program with other bits: it gets a number
            # of turns that it does not know
            n = jnp.minimum(lax.optimization_barrier(jnp.int32(parts)), parts)
            like = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (parts, *x.shape)), start)
            found = lax.fori_loop(0, n, lambda i, f: write(f, jax.tree.map(lambda x: x[None], part(i)), i), like)
            return reductions.over_parts(found, names)

    def merged(i: Index, j: Index, found: Reduced) -> Reduced:
        return tile(i, j) if blocks == 1 else work.vary(reductions.merge(found, tile(i, j)))

    return reductions.over_devices(walk(work, merged, start), call.axes)


def references_of(work: Work, size: int) -> References:
    """The references of all tokens, with one collective: later each device has its own number of chunks."""
    call, (_, parameters, columns) = work.call, work.block(0, size)
    if not work.plan.references or columns.apart or columns.ids.shape[0] < work.window.total:
        return None
    H, V, (places, inside) = work.features[0].shape[1], columns.ids.shape[0], columns.places(work.tokens.targets)
    C, parts, blocks = work.plan.chunk, 1, 1
    if call.v_dim == 1 and H % 128 == 0 and call.profile.rings:
        # XLA for TPUs copies a kernel [H, V] to gather columns: 128 features at a time, in a quarter of a tile's bytes
        C, parts, blocks = work.size, H // 128, -(-1024 * V // call.profile.tile)
    B, names = -(-V // blocks), call.axes.tensor

    def add(first: Index, width: int, k: int, total: jax.Array) -> jax.Array:
        p = slice_of(parameters[k], first, width, 1 - call.v_dim)
        of_k = work._replace(features=(slice_of(work.features[k], first, width, 1),))

        def turn(i: Index, total: jax.Array) -> jax.Array:  # of a chunk and all columns, or all tokens and a block
            at, block, start = (i * C, 0, 0) if blocks == 1 else (0, i, jnp.minimum(i * B, V - B))
            (_, (f,)), (of_tokens, old) = of_k.read(at, C), read((places, total), at, C)
            of_targets = jnp.take(slice_of(p, start, B, call.v_dim), of_tokens - start, call.v_dim, mode="clip")
            x = dot(call, f, of_targets, (1, 1 - call.v_dim), (0, call.v_dim))
            return write(total, old + jnp.where(of_tokens // B == block, scaled(call.scales[k], x), 0), at)

        return loop(work.turns(C) if blocks == 1 else blocks, turn, total)

    x = loop(parts, lambda i, x: add(i * (H // parts), H // parts, 0, x), work.vary(jnp.zeros(work.size, jnp.float32)))
    for k, p in enumerate(parameters[1:], 1):
        x = add(0, p.shape[1 - call.v_dim], k, x)
    own = work.vary(jnp.where(inside, logits(call.transform, x[:, None], work.tokens.temperature, None)[:, 0], LOW))
    return own, work.vary(lax.pmax(own, names)) if names else own
