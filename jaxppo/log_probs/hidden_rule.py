"""The custom gradient rule of the head: forward and backward as walks over blocks of vocabulary and tokens."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo._sharding import vary, varying
from jaxppo.log_probs import softmax
from jaxppo.log_probs.head import Block, Head, Weights
from jaxppo.log_probs.kept import Kept
from jaxppo.log_probs.tokens import Slots, TokenBlocks
from jaxppo.log_probs.varying import as_primal, psum_in_blocks, psum_to


class Inputs(NamedTuple):
    """The arrays of one device. Tokens are flattened, but for the hidden states, N = R * T."""

    hidden: Any  # [R, T, H], or [R, T / tensor shards, H] when sequence-sharded over the tensor axis
    kernel: Any
    bias: Any  # [V] or None
    targets: Any  # i32[N]
    keep_ids: Any  # i32[N, K]
    where: Any  # bool[N]
    temperature: Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is static about one call: the head, the kind of entropy, the tokens of a block."""

    head: Head
    entropy: str
    block_tokens: int
    sequence_parallel: bool
    moments: bool = False
    keep_logits: bool = False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Asked:
    """Which gradients are asked for; the others leave nothing in the program."""

    hidden: bool
    kernel: bool
    bias: bool

    def weights(self, kernel: Any, bias: Any) -> Weights:
        """The two, each None where its gradient is not asked for."""
        return Weights(kernel if self.kernel else None, bias if self.bias else None)


def device_axes(rule: Rule, inputs: Inputs) -> frozenset[str]:
    """The mesh axes along which devices have different work."""
    return frozenset().union(*map(varying, jax.tree.leaves(inputs)), rule.head.axes.tensor)


class Walk:
    """One device's tokens against its blocks of the vocabulary."""

    def __init__(self, rule: Rule, inputs: Inputs):
        self.rule, self.head, self.inputs = rule, rule.head, inputs
        self.axes = device_axes(rule, inputs)
        hidden = inputs.hidden
        if rule.sequence_parallel:
            hidden = lax.all_gather(hidden, rule.head.axes.tensor, axis=1, tiled=True)
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.tokens = TokenBlocks(inputs.where, self.hidden.shape[0], rule.block_tokens)
        self.vocabulary_blocks = self.head.blocks(inputs.kernel.shape[self.head.v_dim])

    def over(self, tokens: TokenBlocks) -> Walk:
        """The same with its tokens in other blocks."""
        walk = copy.copy(self)
        walk.tokens = tokens
        return walk

    def vary(self, tree: Any) -> Any:
        """Loop carries vary over all axes from the start."""
        return jax.tree.map(lambda x: vary(x, self.axes), tree)

    def zeros(self, *shape: int) -> jax.Array:
        return vary(jnp.zeros(shape, jnp.float32), self.axes)

    def block(self, i: Any) -> Block:
        return self.head.block(self.inputs.kernel, self.inputs.bias, i)

    def rows(self, slots: Slots, counts: jax.Array | None) -> jax.Array:
        """Hidden states of the slots, 0 where one does not count: it may hold NaN, and 0 * NaN is NaN."""
        hidden = self.tokens.take(self.hidden, slots)
        return hidden if counts is None else jnp.where(counts[:, None], hidden, 0)

    def targets(self, slots: Slots) -> jax.Array:
        return self.tokens.take(self.inputs.targets, slots)

    def keep(self, slots: Slots, block: Block) -> jax.Array | None:
        """bool `[block tokens, B]`: the columns that the sampler could draw, the target's included."""
        if self.inputs.keep_ids is None:
            return None
        ids = self.tokens.take((self.inputs.keep_ids, self.inputs.targets[:, None]), slots)
        places, inside = self.head.place_of(jnp.concatenate(ids, axis=1), block)
        B = block.columns.shape[0]
        empty = self.vary(jnp.zeros((places.shape[0], B), bool))
        return empty.at[jnp.arange(places.shape[0])[:, None], jnp.where(inside, places, B)].set(True, mode="drop")

    def empty_sums(self, count: int) -> softmax.Sums:
        """The sums that the call asks for, of `count` tokens and no logits."""
        rule, kept = self.rule, self.inputs.keep_ids is not None
        with_entropy = rule.entropy != "none"
        full = with_entropy or rule.moments or not kept
        return self.vary(softmax.empty_sums(count, full=full, entropy=with_entropy, kept=kept, moments=rule.moments))

    def without_entropy(self, residuals: softmax.Residuals) -> softmax.Residuals:
        return residuals.without_entropy(self.inputs.keep_ids is not None and not self.rule.moments)

    def logits(self, block: Block, slots: Slots, kept: jax.Array | None = None) -> jax.Array:
        """f32 `[block tokens, B]`, the first of them `kept` from before."""
        rows = self.tokens.take(self.hidden, slots)
        if kept is None:
            return self.head.logits(rows, block, self.inputs.temperature)
        rest = rows[kept.shape[0] :]
        if not rest.shape[0]:
            return kept
        return jnp.concatenate([kept, self.head.logits(rest, block, self.inputs.temperature)])

    def add_sums(self, sums: softmax.Sums, z: jax.Array, slots: Slots, block: Block) -> softmax.Sums:
        """The sums of the slots' tokens with those of a block of logits."""
        place, here = self.head.place_of(self.targets(slots), block)
        z_y = jnp.where(here, jnp.take_along_axis(z, place[:, None], axis=1)[:, 0], 0)
        return self.vary(softmax.merge(sums, softmax.block_sums(z, z_y, self.keep(slots, block), sums)))

    def block_gradient(
        self, block: Block, slots: Slots, counts: jax.Array, residuals: Any, per_token: Any, kept: Any = None
    ) -> jax.Array:
        """d loss / d (hidden @ kernel), f32 `[block tokens, B]`, 0 where a slot does not count."""
        z = self.logits(block, slots, kept)
        is_target = self.targets(slots)[:, None] == block.columns
        residuals, keep = self.tokens.read(residuals, slots), self.keep(slots, block)
        g, e, of_moments = self.tokens.take(per_token, slots)
        dz = softmax.dlogits(z, is_target, keep, residuals, g, e, of_moments, self.head.vocab_size)
        return self.head.product_gradient(dz, z, counts, block, self.inputs.temperature)


def evaluate(rule: Rule, inputs: Inputs, asked: Asked | None = None) -> tuple[Any, softmax.Residuals, Any]:
    """Log-probs, entropy and moments `f32[N]`, the residuals in slot order, and the memory of `kept_logits`."""
    walk = Walk(rule, inputs)
    head, tokens = walk.head, walk.tokens
    kept = kept_logits(walk, asked)

    def vocabulary_block(i, carry):
        block = walk.block(i)

        def token_block(keep, slots, carry):
            sums, memory = carry
            z = walk.logits(block, slots)
            new = walk.add_sums(tokens.read(sums, slots), z, slots, block)
            return tokens.write(sums, new, slots), kept.write(memory, z, slots, block, head, i) if keep else memory

        return kept.loop(tokens, token_block, carry)

    start = walk.empty_sums(tokens.count), walk.zeros(*inputs.kernel.shape) if kept.blocks else None
    sums, memory = lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, start)
    sums = softmax.combine(sums, head.axes)
    exists = (inputs.targets >= 0) & (inputs.targets < head.vocab_size)
    log_probs, entropy, residuals = softmax.finish(sums, tokens.to_slots(exists))
    out = tokens.to_tokens((log_probs, entropy, softmax.moments(sums, residuals, head.vocab_size)))
    if inputs.where is not None:
        out = jax.tree.map(lambda x: jnp.where(inputs.where, x, 0), out)
    return out, residuals if rule.entropy == "bonus" else walk.without_entropy(residuals), memory


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_stats(rule: Rule, inputs: Inputs) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, jax.Array] | None]:
    """Log-probs, entropy and moments `f32[N]` of one device's tokens."""
    return evaluate(rule, inputs)[0]


def values_and_asked(inputs: Inputs) -> tuple[Inputs, Asked]:
    """Of a rule's forward with `symbolic_zeros`: the arrays, and which gradients will be asked for."""
    is_primal = lambda x: hasattr(x, "perturbed")  # noqa: E731
    asked = jax.tree.map(lambda x: x.perturbed, inputs, is_leaf=is_primal)
    inputs = jax.tree.map(lambda x: x.value, inputs, is_leaf=is_primal)
    return inputs, Asked(asked.hidden, asked.kernel, bool(asked.bias))


def _forward(rule: Rule, inputs: Any):
    inputs, asked = values_and_asked(inputs)
    out, residuals, memory = evaluate(rule, inputs, asked)
    return out, (inputs, residuals, memory, asked)


def _backward(rule: Rule, saved: Any, cotangents: Any):
    inputs, residuals, memory, asked = saved
    walk = Walk(rule, inputs)
    zeros = jnp.zeros(walk.tokens.count, jnp.float32)
    is_zero = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)  # noqa: E731
    g, e, of_moments = jax.tree.map(lambda x: zeros if is_zero(x) else x, cotangents, is_leaf=is_zero)
    per_token = (g, e if rule.entropy == "bonus" else None, of_moments)
    dhidden, dweights = gradients(walk, asked, residuals, per_token, memory)
    return (Inputs(dhidden, dweights.kernel, dweights.bias, None, None, None, jnp.zeros_like(inputs.temperature)),)


token_stats.defvjp(_forward, _backward, symbolic_zeros=True)


def gradients(
    walk: Walk, asked: Asked, residuals: Any, per_token: Any, memory: jax.Array | None = None
) -> tuple[jax.Array | None, Weights]:
    """The gradients that are asked for, from `walk.block_gradient` of every block of tokens and vocabulary.

    Args:
      walk: the arrays.
      asked: which gradients.
      residuals: of `walk.block_gradient`, f32[N] in slot order.
      per_token: the cotangents of a token, a pytree of f32[N].
      memory: of `kept_logits`; None where there are none.
    """
    if _accumulates_kernel(walk, asked):
        return _tokens_outermost(walk, asked, residuals, per_token)
    return _vocabulary_outermost(walk, asked, residuals, per_token, memory)


def kept_logits(walk: Walk, asked: Asked | None) -> Kept:
    """Which logits the forward leaves in the memory of the kernel's gradient, if that is asked for.

    It has to be written a block of the vocabulary at a time, be f32, and belong to this device alone.
    """
    kernel = walk.inputs.kernel
    if asked is None or not asked.kernel or not walk.rule.keep_logits or _accumulates_kernel(walk, asked):
        return Kept()
    alone = all(lax.axis_size(name) == 1 for name in walk.axes - varying(kernel))
    if kernel.dtype != jnp.float32 or walk.head.gathers or not alone:
        return Kept()
    return Kept.of(walk.tokens, walk.hidden.shape[1])


def _accumulates_kernel(walk: Walk, asked: Asked) -> bool:
    """Whether the f32 accumulator is dkernel rather than dhidden: the smaller one, and none for a frozen head.

    With the tokens outermost each of them meets the whole kernel, so not for one that is gathered by block. dhidden is
    then summed over devices by block of tokens, so not where it is scattered by position, nor where a mask lets devices
    take a different number of blocks.
    """
    columns = walk.head.window(walk.inputs.kernel.shape[walk.head.v_dim])
    summed = walk.axes - varying(walk.inputs.hidden)
    if walk.head.gathers or walk.rule.sequence_parallel or (summed and walk.inputs.where is not None):
        return False
    return not (asked.kernel or asked.bias) or columns < walk.tokens.count


def _counts(walk: Walk, slots: Slots, per_token: Any) -> jax.Array:
    """bool[block tokens]: the slots with a cotangent. The others may hold NaN."""
    counts = reduce(jnp.logical_or, [x != 0 for x in jax.tree.leaves(walk.tokens.take(per_token, slots))])
    return counts if slots.fresh is None else counts & slots.fresh


def _vocabulary_outermost(walk: Walk, asked: Asked, residuals: Any, per_token: Any, memory: jax.Array | None):
    """Gradients with dhidden accumulated in f32, each block of dkernel finished, devices' sums included, in turn."""
    head, tokens = walk.head, walk.tokens
    N, H = walk.hidden.shape
    weights = asked.weights(walk.inputs.kernel, walk.inputs.bias)
    kept = Kept() if memory is None else kept_logits(walk, asked)

    def factors(slots):
        counts = _counts(walk, slots, per_token)
        return counts, head.factor(walk.rows(slots, counts))

    once = factors(tokens.slots(0)) if tokens.order is None and tokens.most == 1 else None

    def vocabulary_block(i, carry):
        block = walk.block(i)
        dhidden, dweights = carry

        def token_block(keeps, slots, carry):
            dhidden, dblock = carry
            counts, factor = factors(slots) if once is None else once
            z = kept.read(dweights.kernel, slots, head, i) if keeps else None
            dz = walk.block_gradient(block, slots, counts, residuals, per_token, z)
            if asked.hidden:
                new = tokens.read(dhidden, slots) + head.hidden_gradient(dz, block)
                dhidden = new if tokens.block == N else lax.dynamic_update_slice_in_dim(dhidden, new, slots.start, 0)
            dblock = jax.tree.map(jnp.add, dblock, head.weight_gradients(dz, factor, weights))
            return walk.vary((dhidden, dblock))

        zeros = jax.tree.map(lambda x: walk.zeros(*x.shape), asked.weights(block.kernel, block.bias))
        dhidden, dblock = kept.loop(tokens, token_block, (dhidden, zeros))
        return dhidden, jax.tree.map(partial(head.set_block, i), dweights, dblock, weights)

    dweights = jax.tree.map(head.empty_gradient, weights)
    dweights = dweights if memory is None else dweights._replace(kernel=memory)
    start = walk.zeros(N, H) if asked.hidden else None, dweights
    dhidden, dweights = lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, start)
    dhidden = _hidden_cotangent(walk, dhidden) if asked.hidden else None
    return dhidden, jax.tree.map(head.finish_gradient, dweights, weights)


def _tokens_outermost(walk: Walk, asked: Asked, residuals: Any, per_token: Any):
    """Gradients with dkernel accumulated in f32, each block of dhidden finished, devices' sums included, in turn."""
    head, primal = walk.head, walk.inputs.hidden
    weights = asked.weights(walk.inputs.kernel, walk.inputs.bias)
    tokens = walk.tokens

    def token_block(slots, carry):
        dhidden, dweights = carry
        counts = _counts(walk, slots, per_token)
        factor = head.factor(walk.rows(slots, counts))

        def vocabulary_block(i, carry):
            drows, dweights = carry
            block = walk.block(i)
            dz = walk.block_gradient(block, slots, counts, residuals, per_token)
            drows = drows + head.hidden_gradient(dz, block) if asked.hidden else None
            dblock = head.weight_gradients(dz, factor, weights)
            return walk.vary((drows, jax.tree.map(partial(head.accumulate, i), dweights, dblock)))

        drows = walk.zeros(tokens.block, walk.hidden.shape[1]) if asked.hidden else None
        drows, dweights = lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, (drows, dweights))
        if asked.hidden:
            drows = psum_to(drows, varying(primal), primal.dtype)
            dhidden = tokens.put(dhidden, drows, slots)
        return dhidden, dweights

    dhidden = vary(jnp.zeros(walk.hidden.shape, primal.dtype), varying(primal)) if asked.hidden else None
    start = dhidden, jax.tree.map(lambda x: walk.zeros(*x.shape), weights)
    dhidden, dweights = tokens.loop(token_block, start)
    dhidden = dhidden.reshape(primal.shape) if asked.hidden else None
    return dhidden, jax.tree.map(head.reduce, dweights, weights)


def _hidden_cotangent(walk: Walk, dhidden: jax.Array) -> jax.Array:
    """The f32 sum over devices, of tokens in slots, in the dtype, shape and sharding of the hidden states."""
    primal, tokens = walk.inputs.hidden, walk.tokens
    if walk.rule.sequence_parallel:
        dhidden = tokens.to_tokens(dhidden).reshape(primal.shape[0], -1, primal.shape[2])
        dhidden = lax.psum_scatter(dhidden, walk.head.axes.tensor, scatter_dimension=1, tiled=True)
        return as_primal(dhidden, primal)
    if tokens.order is None or not varying(tokens.order) <= varying(primal):
        # in token order first, where the devices of the sum differ in that of their slots
        return psum_in_blocks(tokens.to_tokens(dhidden), primal, 0, tokens.block).reshape(primal.shape)

    def token_block(slots, out):
        return tokens.put(out, as_primal(tokens.read(dhidden, slots), primal), slots)

    out = vary(jnp.zeros(dhidden.shape, primal.dtype), varying(primal))
    return tokens.loop_over_all(token_block, out).reshape(primal.shape)
