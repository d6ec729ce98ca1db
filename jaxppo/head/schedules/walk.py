"""One device's tokens before its part of the vocabulary, cut into tiles; what all schedules share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import softmax
from jaxppo.head.columns import Columns, Vocabulary
from jaxppo.head.ops.tile import Block, Features, Form, Op, Parameters, Tile
from jaxppo.head.softmax import Cotangents, Residuals, Sums
from jaxppo.head.tiles import Budget, Cut
from jaxppo.head.tokens import Slots, Tokens
from jaxppo.head.varying import first_order
from jaxppo.sharding import vary, varying, wider_dtype


class Inputs(NamedTuple):
    """The arrays of one device, N tokens."""

    features: Features  # [N, H] and [N, r]; the device's part of them where they are sharded over the tensor axis
    parameters: Parameters
    targets: Any  # i32[N]
    nucleus_ids: Any  # i32[N, K]
    where: Any  # bool[N]
    temperature: Any  # a scalar, or [N]; None for 1


@dataclasses.dataclass(frozen=True)
class Rule:
    """The static part of one call.

    Args:
      form: how logits come of products.
      columns: how the parameters lie on the mesh.
      op: the arithmetic of a tile.
      entropy: "none", "metric" or "bonus".
      logit_stats: log_z, mean logit and accuracy are asked for.
      parts: how many devices of the tensor axis share the hidden states by position.
      budget: what tiles are chosen by.
    """

    form: Form
    columns: Columns
    op: Op
    entropy: str
    logit_stats: bool
    parts: int
    budget: Budget


def cotangents_of(inputs: Inputs, features: Any, parameters: Any) -> Inputs:
    """What a rule's backward returns: these gradients, which cannot be differentiated again, and none of the rest."""
    once = partial(first_order, "a loss from hidden states")
    features, parameters = jax.tree.map(once, (features, parameters))
    return Inputs(features, parameters, None, None, None, jax.tree.map(jnp.zeros_like, inputs.temperature))


class Chunk(NamedTuple):
    """What is known of some tokens before any block of the vocabulary."""

    rows: Features
    targets: Any
    nucleus_ids: Any
    temperature: Any  # f32[C], or None where it is no token's own
    fresh: Any  # bool[C], or None for all
    teacher: Any = None  # the same tokens before another head


class Walk:
    """One device's tokens against its blocks of the vocabulary.

    Args:
      rule: static.
      inputs: the arrays.
      cut: tokens and columns of a tile.
      once: gather the parameters over FSDP axes once, rather than each block.
      equal: every device takes as many turns over tokens.
      compact: bring all tokens that count to the front at once, rather than each block's.
    """

    def __init__(
        self, rule: Rule, inputs: Inputs, cut: Cut, *, once: bool = False, equal: bool = False, compact: bool = False
    ):
        self.rule, self.inputs, self.compact = rule, inputs, compact
        self.summing = dataclasses.replace(rule.columns.summing, dtype="float32")  # of gradients of the features
        self.axes = frozenset().union(*map(varying, jax.tree.leaves(inputs)), rule.columns.axes.tensor)
        self.vocabulary = Vocabulary(rule.columns, inputs.parameters, cut.columns, once)
        self.count = inputs.features.hidden.shape[0] * rule.parts
        parts, self.features = rule.parts, inputs.features
        if compact and parts > 1:
            parts, self.features = 1, self.gather(self.features)
        self.part = rule.columns.axes.index(rule.columns.axes.tensor) if parts > 1 else 0
        equal_over = self.axes if equal else frozenset()
        follow = rule.budget.follow_mask
        self.tokens = Tokens(inputs.where, self.count, cut.tokens, parts, equal_over, follow)
        per_token = (
            inputs.targets,
            inputs.nucleus_ids,
            inputs.temperature if getattr(inputs.temperature, "ndim", 0) else None,
        )
        if compact:
            self.features, per_token = self.tokens.to_slots((self.features, per_token))
        self.per_token = per_token

    def gather(self, features: Any) -> Any:
        """The features of all parts of the tokens."""
        return jax.tree.map(lambda x: lax.all_gather(x, self.rule.columns.axes.tensor, tiled=True), features)

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """The sum over devices of the gradient of what `gather` gives, the device's own part of it."""
        return lax.psum_scatter(gradient, self.rule.columns.axes.tensor, scatter_dimension=0, tiled=True)

    def vary(self, tree: Any) -> Any:
        """Loop carries vary over all axes from the start."""
        return jax.tree.map(lambda x: vary(x, self.axes), tree)

    def zeros(self, *shape: int) -> jax.Array:
        return vary(jnp.zeros(shape, jnp.float32), self.axes)

    def take(self, x: Any, slots: Slots) -> Any:
        """The slots of arrays `[N, ...]` that lie as this walk's: compacted or not."""
        return self.tokens.read(x, slots) if self.compact else self.tokens.take(x, slots)

    def chunk(self, slots: Slots) -> Chunk:
        """The tokens in the slots."""
        if self.compact:
            rows = self.tokens.read(self.features, slots)
        else:
            rows = self.tokens.take_own(self.features, slots, self.part)
            rows = self.gather(rows) if self.tokens.parts > 1 else rows
        targets, nucleus_ids, temperature = self.take(self.per_token, slots)
        return Chunk(rows, targets, nucleus_ids, temperature, slots.fresh)

    def block(self, i: Any) -> Block:
        return self.vocabulary.block(i)

    def tile(self, chunk: Chunk, block: Block) -> Tile:
        """The chunk before the block."""
        nucleus = None
        if chunk.nucleus_ids is not None:
            ids = jnp.concatenate([chunk.nucleus_ids, chunk.targets[:, None]], axis=1)
            places, inside = self.vocabulary.place_of(ids, block)
            C, B = ids.shape[0], block.columns.shape[0]
            empty = self.vary(jnp.zeros((C, B), bool))
            rows = jnp.arange(C, dtype=jnp.int32)[:, None]
            nucleus = empty.at[rows, jnp.where(inside, places, B)].set(True, mode="drop")
        temperature = self.inputs.temperature if chunk.temperature is None else chunk.temperature
        place = None if chunk.targets is None else self.vocabulary.place_of(chunk.targets, block)
        return Tile(chunk.rows, block, chunk.targets, place, temperature, nucleus, chunk.fresh)

    def sums(self, chunk: Chunk, block: Block, before: Any, empty: Sums, keep: bool) -> tuple[Sums, Any]:
        """The softmax sums of the chunk up to this block, `before` those of the blocks before; products to keep."""
        found, z = self.rule.op.forward(self.rule.form, self.tile(chunk, block), empty, keep)
        return self.vary(found if self.vocabulary.blocks == 1 else softmax.merge(before, found)), z

    def empty_sums(self, count: int) -> Sums:
        """The sums that the call asks for, of `count` tokens and no logits."""
        rule, nucleus = self.rule, self.inputs.nucleus_ids is not None
        # the same sums with an entropy and without, where the same bits are promised
        with_entropy = rule.entropy != "none" or rule.budget.deterministic
        full = with_entropy or rule.logit_stats or not nucleus
        options = {"full": full, "entropy": with_entropy, "nucleus": nucleus, "logit_stats": rule.logit_stats}
        return self.vary(softmax.empty_sums(count, **options))

    def finish(self, sums: Sums, targets: jax.Array) -> tuple[Any, Residuals]:
        """(log_prob, entropy, of_logits) of tokens from their sums over the whole vocabulary, and the residuals."""
        vocab_size = self.rule.form.vocab_size
        exists = (targets >= 0) & (targets < vocab_size)
        log_probs, entropy, residuals = softmax.finish(sums, exists)
        if self.rule.entropy == "none" and entropy is not None:
            # used in a way that changes nothing, or the compiler would leave it out
            log_probs, entropy = jnp.where(jnp.isnan(entropy), jnp.nan, log_probs), None
        out = (log_probs, entropy, softmax.logit_stats(sums, residuals))
        if self.rule.entropy != "bonus":
            residuals = residuals.without_entropy(self.inputs.nucleus_ids is not None and not self.rule.logit_stats)
        return out, residuals

    def dlogits(
        self, chunk: Chunk, block: Any, residuals: Any, cotangents: Any, z: Any, of_bias: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """d loss / d (hidden @ kernel) as products take it, `[C, B]`, and its f32 sum over the tokens; see `Op`."""
        tile, dtype = self.tile(chunk, block), self.factor_dtype()
        return self.rule.op.dlogits(self.rule.form, tile, residuals, cotangents, z, dtype, of_bias)

    def over_blocks(self, body: Callable[[Any, Any], Any], carry: Any, last_first: bool = False) -> Any:
        """`carry = body(i, carry)` over the blocks of the vocabulary."""
        blocks = self.vocabulary.blocks
        turn = (lambda i, carry: body(blocks - 1 - i, carry)) if last_first else body
        return body(0, carry) if blocks == 1 else lax.fori_loop(0, blocks, turn, carry)

    def over_tiles(
        self, body: Callable[[bool, Any, Any, Slots, Any, Any], Any], carry: Any, vocabulary_first: bool, kept: int = 0
    ) -> Any:
        """`carry = body(keep, i, block, slots, chunk, carry)` over all tiles, the outer loop over one or the other.

        With the vocabulary first, `keep` says whether the block of tokens is among the first `kept`.
        """

        def vocabulary_block(i: Any, carry: Any) -> Any:
            block = self.block(i)
            turn = lambda keep, slots, c: body(keep, i, block, slots, self.chunk(slots), c)  # noqa: E731
            carry = self.tokens.loop(partial(turn, True), carry, 0, kept)
            return self.tokens.loop(partial(turn, False), carry, kept)

        def token_block(slots: Slots, carry: Any) -> Any:
            chunk = self.chunk(slots)
            return self.over_blocks(lambda i, c: body(False, i, self.block(i), slots, chunk, c), carry)

        if vocabulary_first:
            return self.over_blocks(vocabulary_block, carry)
        return self.tokens.loop(token_block, carry)

    def factor_dtype(self) -> Any:
        """The dtype in which gradients of logits are multiplied: that of their product."""
        return wider_dtype(self.features.hidden.dtype, self.inputs.parameters.kernel.dtype)


def counted(rows: Features, counts: jax.Array) -> Features:
    """0 in rows that do not count: one may hold NaN, and 0 * NaN is NaN."""
    return jax.tree.map(lambda x: jnp.where(counts[:, None], x, 0), rows)


def of_tokens(found: tuple[Any, Any, Any], rule: Rule, fresh: Any) -> Cotangents:
    """Cotangents of (log_prob, entropy, of_logits), those that the rule has, counted among the fresh tokens."""
    log_prob, entropy, of_logits = found
    entropy = entropy if rule.entropy == "bonus" else None
    return Cotangents.of(log_prob, entropy, of_logits, True if fresh is None else fresh)
