"""One device's tokens and its part of the vocabulary, cut into tiles: the code that all schedules share."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import softmax
from jaxppo.head.asked import answers, empty_sums
from jaxppo.head.gradient_sums import as_primal, sum_in_blocks
from jaxppo.head.plan import references
from jaxppo.head.slices import Tree, slice_of, submatrix
from jaxppo.head.softmax import Cotangents, Residuals, Sums
from jaxppo.head.tile import factor_and_bias, logits_of_rows, product_gradients, tile_sums
from jaxppo.head.token_blocks import Slots, TokenBlocks
from jaxppo.head.types import (
    Block,
    Chunk,
    Cut,
    Features,
    HeadCall,
    Index,
    Inputs,
    Parameters,
    Submatrix,
    Tile,
    TokenStats,
)
from jaxppo.head.vocabulary_blocks import VocabularyBlocks
from jaxppo.sharding import vary, varying

SUMMED_TOKENS = 1024  # the tokens that are summed at a time, of a dhidden that exists already


class Walk:
    """One device's tokens and its blocks of the vocabulary, for a schedule to loop over.

    Args:
      call: the static part of the call.
      inputs: the device's arrays.
      cut: tokens and columns of a tile.
      by_vocabulary: the loop over the vocabulary is the outer one: the features of all tokens that count are moved to
        the front at once, and a kernel is gathered a block at a time. Otherwise the features of a block of tokens are
        gathered when its turn comes.
      equal: all devices take the same number of turns over tokens.
      multiple: the number of blocks of tokens is a multiple of this.
    """

    def __init__(
        self,
        call: HeadCall,
        inputs: Inputs,
        cut: Cut,
        *,
        by_vocabulary: bool = False,
        equal: bool = False,
        multiple: int = 1,
    ):
        self.call, self.inputs, self.compact = call, inputs, by_vocabulary
        self.axes = frozenset().union(*map(varying, jax.tree.leaves(inputs)), call.axes.tensor)
        self.vocabulary = VocabularyBlocks(call, inputs.parameters, cut.columns, by_vocabulary)
        features = whole_features(call, inputs.features)
        self.count = features.hidden.shape[0]
        blocks = -(-self.count // cut.tokens)
        # a loop of one turn would be compiled as another program
        least = max(-(-blocks // multiple) * multiple, 2 if call.deterministic else 1)
        equal_over = self.axes if equal else frozenset()
        self.tokens = TokenBlocks(inputs.counts, self.count, cut.tokens, least, call.follow_mask, equal_over)
        per_token = inputs.targets, inputs.nucleus_ids, inputs.ids, inputs.temperature
        self.per_token = self.tokens.to_slots(per_token)
        in_place = self.tokens.order is None or by_vocabulary
        self.features = self.tokens.to_slots(features) if in_place else features
        self.references: jax.Array | None = None

    def vary(self, tree: Tree) -> Tree:
        """Makes a loop carry vary over all axes: it must do so from the start of the loop."""
        return jax.tree.map(lambda x: vary(x, self.axes), tree)

    def vary_results(self, tree: Tree) -> Tree:
        """Makes results of tokens vary over all axes but the tensor axis: along that axis they are equal."""
        return jax.tree.map(lambda x: vary(x, self.axes - set(self.call.axes.tensor)), tree)

    def zeros(self, *shape: int) -> jax.Array:
        return vary(jnp.zeros(shape, jnp.float32), self.axes)

    def rows(self, slots: Slots) -> Features:
        """The features of the tokens in the slots."""
        return (self.tokens.read if self.compact else self.tokens.take)(self.features, slots)

    def chunk(self, slots: Slots, rows: Features | None = None) -> Chunk:
        """The tokens in the slots."""
        targets, nucleus_ids, ids, temperature = self.tokens.read(self.per_token, slots)
        reference = None if self.references is None else self.tokens.read(self.references, slots)
        rows = self.rows(slots) if rows is None else rows
        return Chunk(rows, targets, nucleus_ids, ids, temperature, slots.counts, reference)

    def with_references(self) -> Walk:
        """This walk, with sums of exponentials relative to the target's logit if the plan allows it.

        The logit of a sampled token is nearly always near the largest logit. All devices of the tensor axis take the
        same target's logit, so no sum overflows unless the largest logit of the whole vocabulary is far above it.
        """
        if self.vocabulary.by_block or not references(self.call, self.inputs):
            return self

        def of_slots(slots: Slots, found: jax.Array) -> jax.Array:
            chunk = self.chunk(slots)
            parameters, inside = self.vocabulary.rows(chunk.targets)
            z = logits_of_rows(self.call, chunk.rows, chunk.temperature, parameters)
            z = jnp.where(inside & jnp.isfinite(z), z, -jnp.inf)
            return self.tokens.write(found, self.vary(z), slots)

        low = self.vary(jnp.full(self.tokens.slots_count, -jnp.inf, jnp.float32))
        found, tensor = self.tokens.loop(of_slots, low), self.call.axes.tensor
        self.references = self.vary(lax.pmax(found, tensor)) if tensor else found
        return self

    def block(self, i: Index) -> Block:
        return self.vocabulary.block(i)

    def eighth(self, p: Index) -> Walk:
        """This walk over part p of the device's columns alone, see `VocabularyBlocks.eighth`."""
        found = copy.copy(self)
        found.vocabulary = self.vocabulary.eighth(p)
        return found

    def sums(self, chunk: Chunk, block: Block, before: Sums) -> tuple[Sums, jax.Array]:
        """The chunk's softmax sums `before` this block merged with those of the block, and the block's products."""
        found, x = tile_sums(self.call, self.vocabulary.tile(chunk, block), before)
        return self.vary(found if self.vocabulary.blocks == 1 else softmax.merge(before, found)), x

    def empty_sums(self, count: int) -> Sums:
        """The sums that the call asks for, of `count` tokens and no logits."""
        call, nucleus = self.call, self.inputs.nucleus_ids is not None
        ids = 0 if self.inputs.ids is None else self.inputs.ids.shape[1]
        # a deterministic call has the same sums whether an entropy is asked for or not: it promises the same bits
        entropy = call.asked.entropy != "none" or call.deterministic
        return self.vary(empty_sums(count, call.asked, entropy=entropy, nucleus=nucleus, ids=ids))

    def finish(self, sums: Sums, targets: jax.Array, ids: jax.Array | None) -> tuple[TokenStats, Residuals]:
        """The statistics of tokens from their sums over the device's vocabulary, and what the backward needs."""
        order = (self.call.v_names or self.call.axes.tensor) if self.vocabulary.eighths else ()
        sums = softmax.combine(sums, self.call.axes, order)
        return answers(sums, self.call.asked, targets, ids, self.call.vocab_size)

    def dlogits(
        self, chunk: Chunk, block: Any, residuals: Any, cotangents: Cotangents, x: Any = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """d loss / d (hidden @ kernel) as products take it, `[C, B]`, and its f32 sum over the tokens."""
        tile = self.vocabulary.tile(chunk, block)
        return factor_and_bias(tile, product_gradients(self.call, tile, residuals, cotangents, x))

    def dlogits_by_part(self, chunk: Chunk, residuals: Residuals, cotangents: Cotangents, x: jax.Array) -> Submatrix:
        """`dlogits` of a chunk with products x over all columns; each part is computed when it is asked for."""
        block = self.block(0)

        def of_part(start: Index, size: int, first: Index, width: int) -> jax.Array:
            def rows(x: jax.Array) -> jax.Array:
                return slice_of(x, start, size)

            def columns(x: jax.Array, dim: int = 1) -> jax.Array:
                return slice_of(x, first, width, dim)

            kernel, bias, lora_b = block.parameters
            matrices = jax.tree.map(lambda x: columns(x, self.call.v_dim), Parameters(kernel, None, lora_b))
            valid = block.valid if block.valid is True else columns(block.valid)
            parameters = matrices._replace(bias=None if bias is None else columns(bias))
            part = Block(parameters, columns(block.column_ids), valid)
            tile = Tile(jax.tree.map(rows, chunk), part, None, None, None)
            known = jax.tree.map(rows, residuals), jax.tree.map(rows, cotangents)
            dz = product_gradients(self.call, tile, *known, submatrix(x, 0, start, size, first, width))
            return factor_and_bias(tile, dz)[0]

        return of_part

    def features_start(self, primals: Features) -> Features:
        """Zeros in token order, which `put_features` fills with gradients of rows."""

        rows = self.tokens.slots_count if self.tokens.order is None else self.count

        def start(x: jax.Array) -> jax.Array:
            dtype, axes = (jnp.float32, self.axes) if self.call.sequence_parallel else (x.dtype, varying(x))
            return vary(jnp.zeros((rows, x.shape[-1]), dtype), axes)

        return jax.tree.map(start, primals)

    def put_features(
        self,
        tokens: TokenBlocks,
        total: Features,
        drows: Features,
        primals: Features,
        slots: Slots,
        *,
        by_rows: bool = False,
    ) -> Features:
        """`total` with the gradients of the rows in the slots, summed over devices unless a later scatter does that.

        `drows` holds f32 arrays; for hidden states it may hold a `Submatrix`. `by_rows` is that of `RingSum`.
        """

        def put(total: jax.Array, drows: jax.Array | Submatrix, primal: jax.Array) -> jax.Array:
            if self.call.sequence_parallel:
                drows = drows(0, tokens.size, 0, primal.shape[-1]) if callable(drows) else drows
                return tokens.put(total, drows, slots)
            return tokens.put(total, self._summed_rows(drows, tokens.size, primal, by_rows), slots)

        return jax.tree.map(put, total, drows, primals)

    def _summed_rows(
        self, rows: jax.Array | Submatrix, count: int, primal: jax.Array, by_rows: bool = False
    ) -> jax.Array:
        """The gradients of `count` rows in the primal's dtype, summed over the axes that the primal lacks."""
        like = vary(jnp.zeros((count, primal.shape[-1]), primal.dtype), varying(primal))
        options: Any = {"rings": self.call.profile.rings, "by_rows": by_rows}
        if not callable(rows):
            return sum_in_blocks(partial(submatrix, rows, 0), like, 0, SUMMED_TOKENS, self.axes, **options)
        # half a block goes around at once. With a mask that is a quarter of the tokens, left out if none of them counts
        size = count if self.tokens.order is None else 2 * max(self.tokens.size, -(-count // 4))
        return sum_in_blocks(rows, like, 0, size, self.axes, **options)

    def finish_features(self, total: Features, primals: Features) -> Features:
        """The gradients that `put_features` stored, without padding, in the shape and sharding of the features."""
        return jax.tree.map(partial(self._feature_cotangent), jax.tree.map(lambda x: x[: self.count], total), primals)

    def slots_to_features(self, total: Features, primals: Features) -> Features:
        """From f32 gradients of rows in slot order, the gradients of the features."""
        if self.call.sequence_parallel:
            return jax.tree.map(self._feature_cotangent, self.tokens.to_tokens(total), primals)
        summed = jax.tree.map(lambda x, p: self._summed_rows(x, x.shape[0], p), total, primals)
        return jax.tree.map(self._feature_cotangent, self.tokens.to_tokens(summed), primals)

    def _feature_cotangent(self, gradient: jax.Array, primal: jax.Array) -> jax.Array:
        names = self.call.axes.tensor
        gradient = gradient.reshape(primal.shape[0], -1, primal.shape[2])
        if self.call.sequence_parallel:
            gradient = lax.psum_scatter(gradient, names, scatter_dimension=1, tiled=True)
        return as_primal(gradient, primal)


def whole_features(call: HeadCall, features: Features) -> Features:
    """The features of all tokens, `[N, H]` and `[N, r]`."""
    if call.sequence_parallel:
        features = jax.tree.map(lambda x: lax.all_gather(x, call.axes.tensor, axis=1, tiled=True), features)
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[2]), features)
