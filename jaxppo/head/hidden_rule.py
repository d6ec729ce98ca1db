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
from jaxppo.head import softmax
from jaxppo.head.columns import Block, Columns, Features, Parameters
from jaxppo.head.stored_logits import Stored
from jaxppo.head.tokens import Slots, TokenBlocks
from jaxppo.head.varying import as_primal, first_order, psum_in_blocks, psum_to


class Inputs(NamedTuple):
    """The arrays of one device. Tokens are flattened, but for the hidden states, N = R * T."""

    features: Features  # [R, T, H] and [R, T, r]; of T / tensor shards when sequence-sharded over the tensor axis
    parameters: Parameters
    targets: Any  # i32[N]
    nucleus_ids: Any  # i32[N, K]
    where: Any  # bool[N]
    temperature: Any  # a scalar, or [N]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is static about one call: the head, the kind of entropy, the tokens of a block."""

    head: Columns
    entropy: str
    block_tokens: int
    sequence_parallel: bool
    logit_stats: bool = False
    keep_logits: bool = False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NeedsGrad:
    """Which gradients are asked for, as fields that are not None; the others leave nothing in the program."""

    features: Features
    parameters: Parameters

    def of(self, like: Any, tree: Any) -> Any:
        """The fields of a `Features` or `Parameters` whose gradient is asked for, None for the others."""
        return type(tree)(*(x if needed else None for needed, x in zip(like, tree, strict=True)))


def device_axes(rule: Rule, inputs: Inputs) -> frozenset[str]:
    """The mesh axes along which devices have different work."""
    return frozenset().union(*map(varying, jax.tree.leaves(inputs)), rule.head.axes.tensor)


class Walk:
    """One device's tokens against its blocks of the vocabulary."""

    def __init__(self, rule: Rule, inputs: Inputs):
        self.rule, self.head, self.inputs = rule, rule.head, inputs
        self.axes = device_axes(rule, inputs)
        features = inputs.features
        if rule.sequence_parallel:
            features = jax.tree.map(
                lambda x: lax.all_gather(x, rule.head.axes.tensor, axis=1, tiled=True), inputs.features
            )
        self.features = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), features)
        self.tokens = TokenBlocks(inputs.where, self.features.hidden.shape[0], rule.block_tokens)
        self.kernel = inputs.parameters.kernel
        self.vocabulary_blocks = self.head.blocks(self.kernel.shape[self.head.v_dim])

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
        return self.head.block(self.inputs.parameters, i)

    def rows(self, slots: Slots, counts: jax.Array | None) -> Features:
        """Features of the slots, 0 where one does not count: it may hold NaN, and 0 * NaN is NaN."""
        rows = self.tokens.take(self.features, slots)
        return rows if counts is None else jax.tree.map(lambda x: jnp.where(counts[:, None], x, 0), rows)

    def temperature(self, slots: Slots) -> jax.Array:
        """A scalar, or that of each slot's token, `[block tokens, 1]`."""
        temperature = self.inputs.temperature
        return self.tokens.take(temperature, slots)[:, None] if temperature.ndim else temperature

    def targets(self, slots: Slots) -> jax.Array:
        return self.tokens.take(self.inputs.targets, slots)

    def nucleus(self, slots: Slots, block: Block) -> jax.Array | None:
        """bool `[block tokens, B]`: the columns that the sampler could draw, the target's included."""
        if self.inputs.nucleus_ids is None:
            return None
        ids = self.tokens.take((self.inputs.nucleus_ids, self.inputs.targets[:, None]), slots)
        places, inside = self.head.place_of(jnp.concatenate(ids, axis=1), block)
        B = block.columns.shape[0]
        empty = self.vary(jnp.zeros((places.shape[0], B), bool))
        return empty.at[jnp.arange(places.shape[0])[:, None], jnp.where(inside, places, B)].set(True, mode="drop")

    def empty_sums(self, count: int) -> softmax.Sums:
        """The sums that the call asks for, of `count` tokens and no logits."""
        rule, nucleus = self.rule, self.inputs.nucleus_ids is not None
        with_entropy = rule.entropy != "none"
        full = with_entropy or rule.logit_stats or not nucleus
        options = {"full": full, "entropy": with_entropy, "nucleus": nucleus, "logit_stats": rule.logit_stats}
        return self.vary(softmax.empty_sums(count, **options))

    def without_entropy(self, residuals: softmax.Residuals) -> softmax.Residuals:
        return residuals.without_entropy(self.inputs.nucleus_ids is not None and not self.rule.logit_stats)

    def logits(self, block: Block, slots: Slots, stored: jax.Array | None = None) -> jax.Array:
        """f32 `[block tokens, B]`, the first of them `stored` from before."""
        rows, temperature = self.tokens.take(self.features, slots), self.temperature(slots)
        if stored is None:
            return self.head.logits(rows, block, temperature)
        first = stored.shape[0]
        if first == self.tokens.block:
            return stored
        rest = jax.tree.map(lambda x: x[first:], rows)
        temperature = temperature[first:] if temperature.ndim else temperature
        return jnp.concatenate([stored, self.head.logits(rest, block, temperature)])

    def add_sums(self, sums: softmax.Sums, z: jax.Array, slots: Slots, block: Block) -> softmax.Sums:
        """The sums of the slots' tokens with those of a block of logits."""
        targets = self.targets(slots)
        place, here = self.head.place_of(targets, block)
        z_y = jnp.where(here, jnp.take_along_axis(z, place[:, None], axis=1)[:, 0], 0)
        is_target = targets[:, None] == block.columns
        of_block = softmax.block_sums(z, z_y, is_target, self.nucleus(slots, block), sums)
        return self.vary(softmax.merge(sums, of_block))

    def block_gradient(
        self, block: Block, slots: Slots, counts: jax.Array, residuals: Any, per_token: Any, stored: Any = None
    ) -> jax.Array:
        """d loss / d (hidden @ kernel), f32 `[block tokens, B]`, 0 where a slot does not count."""
        z = self.logits(block, slots, stored)
        is_target = self.targets(slots)[:, None] == block.columns
        residuals, nucleus = self.tokens.read(residuals, slots), self.nucleus(slots, block)
        g, e, of_logit_stats = self.tokens.take(per_token, slots)
        dz = softmax.dlogits(z, is_target, nucleus, residuals, g, e, of_logit_stats, self.head.vocab_size)
        return self.head.product_gradient(dz, z, counts, block, self.temperature(slots))


def evaluate(rule: Rule, inputs: Inputs, needs: NeedsGrad | None = None) -> tuple[Any, softmax.Residuals, Any]:
    """Log-probs, entropy and logit statistics `f32[N]`, the residuals in slot order, the memory of `stored_logits`."""
    walk = Walk(rule, inputs)
    head, tokens = walk.head, walk.tokens
    stored = stored_logits(walk, needs)

    def vocabulary_block(i: Any, carry: Any) -> Any:
        block = walk.block(i)

        def token_block(keep: Any, slots: Any, carry: Any) -> Any:
            sums, memory = carry
            z = walk.logits(block, slots)
            new = walk.add_sums(tokens.read(sums, slots), z, slots, block)
            return tokens.write(sums, new, slots), stored.write(memory, z, slots, block, head, i) if keep else memory

        return stored.loop(tokens, token_block, carry)

    start = walk.empty_sums(tokens.count), walk.zeros(*walk.kernel.shape) if stored.blocks else None
    sums, memory = lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, start)
    sums = softmax.combine(sums, head.axes)
    exists = (inputs.targets >= 0) & (inputs.targets < head.vocab_size)
    log_probs, entropy, residuals = softmax.finish(sums, tokens.to_slots(exists))
    out = tokens.to_tokens((log_probs, entropy, softmax.logit_stats(sums, residuals, head.vocab_size)))
    if inputs.where is not None:
        out = jax.tree.map(lambda x: jnp.where(inputs.where, x, 0), out)
    return out, residuals if rule.entropy == "bonus" else walk.without_entropy(residuals), memory


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_stats(rule: Rule, inputs: Inputs) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, ...] | None]:
    """Log-probs, entropy and logit statistics `f32[N]` of one device's tokens."""
    return evaluate(rule, inputs)[0]


def values_and_needs(inputs: Inputs) -> tuple[Inputs, NeedsGrad]:
    """Of a rule's forward with `symbolic_zeros`: the arrays, and which gradients will be asked for."""
    is_primal = lambda x: hasattr(x, "perturbed")  # noqa: E731
    needed = jax.tree.map(lambda x: x.perturbed or None, inputs, is_leaf=is_primal)
    inputs = jax.tree.map(lambda x: x.value, inputs, is_leaf=is_primal)
    return inputs, NeedsGrad(needed.features, needed.parameters)


def cotangents(inputs: Inputs, features: Any, parameters: Any) -> Inputs:
    """What a rule's backward returns: these gradients, which cannot be differentiated again, and none of the rest."""
    once = partial(first_order, "a loss from hidden states")
    features, parameters = jax.tree.map(once, (features, parameters))
    return Inputs(features, parameters, None, None, None, jnp.zeros_like(inputs.temperature))


def _forward(rule: Rule, inputs: Any) -> Any:
    inputs, needs = values_and_needs(inputs)
    out, residuals, memory = evaluate(rule, inputs, needs)
    return out, (inputs, residuals, memory, needs)


def _backward(rule: Rule, saved: Any, of_results: Any) -> Any:
    inputs, residuals, memory, needs = saved
    walk = Walk(rule, inputs)
    zeros = jnp.zeros(walk.tokens.count, jnp.float32)
    is_zero = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)  # noqa: E731
    g, e, of_logit_stats = jax.tree.map(lambda x: zeros if is_zero(x) else x, of_results, is_leaf=is_zero)
    per_token = (g, e if rule.entropy == "bonus" else None, of_logit_stats)
    return (cotangents(inputs, *gradients(walk, needs, residuals, per_token, memory)),)


token_stats.defvjp(_forward, _backward, symbolic_zeros=True)


def gradients(
    walk: Walk, needs: NeedsGrad, residuals: Any, per_token: Any, memory: jax.Array | None = None
) -> tuple[Features, Parameters]:
    """The gradients that are asked for, from `walk.block_gradient` of every block of tokens and vocabulary.

    Args:
      walk: the arrays.
      needs: which gradients.
      residuals: of `walk.block_gradient`, f32[N] in slot order.
      per_token: the cotangents of a token, a pytree of f32[N].
      memory: of `stored_logits`; None where there are none.
    """
    if _accumulates_kernel(walk, needs):
        return _tokens_outermost(walk, needs, residuals, per_token)
    return _vocabulary_outermost(walk, needs, residuals, per_token, memory)


def stored_logits(walk: Walk, needs: NeedsGrad | None) -> Stored:
    """Which logits the forward leaves in the memory of the kernel's gradient, if that is asked for.

    It has to be written a block of the vocabulary at a time, be f32, and belong to this device alone.
    """
    kernel = walk.kernel
    if needs is None or not needs.parameters.kernel or not walk.rule.keep_logits or _accumulates_kernel(walk, needs):
        return Stored()
    alone = all(lax.axis_size(name) == 1 for name in walk.axes - varying(kernel))
    if kernel.dtype != jnp.float32 or walk.head.gathers or not alone:
        return Stored()
    return Stored.of(walk.tokens, walk.features.hidden.shape[1])


def _accumulates_kernel(walk: Walk, needs: NeedsGrad) -> bool:
    """Whether the f32 accumulator is dkernel rather than dhidden: the smaller one, and none for a frozen head.

    With the tokens outermost each of them meets the whole kernel, so not for one that is gathered by block. dhidden is
    then summed over devices by block of tokens, so not where it is scattered by position, nor where a mask lets devices
    take a different number of blocks.
    """
    columns = walk.head.window(walk.kernel.shape[walk.head.v_dim])
    summed = walk.axes - varying(walk.inputs.features.hidden)
    if walk.head.gathers or walk.rule.sequence_parallel or (summed and walk.inputs.where is not None):
        return False
    return not any(needs.parameters) or columns < walk.tokens.count


def _counts(walk: Walk, slots: Slots, per_token: Any) -> jax.Array:
    """bool[block tokens]: the slots with a cotangent. The others may hold NaN."""
    counts = reduce(jnp.logical_or, [x != 0 for x in jax.tree.leaves(walk.tokens.take(per_token, slots))])
    return counts if slots.fresh is None else counts & slots.fresh


def _vocabulary_outermost(
    walk: Walk, needs: NeedsGrad, residuals: Any, per_token: Any, memory: jax.Array | None
) -> Any:
    """Gradients with dhidden accumulated in f32, each block of dkernel finished, devices' sums included, in turn."""
    head, tokens = walk.head, walk.tokens
    N = tokens.count
    features = needs.of(needs.features, walk.features)
    parameters = needs.of(needs.parameters, walk.inputs.parameters)
    stored = Stored() if memory is None else stored_logits(walk, needs)

    def factors(slots: Any) -> Any:
        counts = _counts(walk, slots, per_token)
        return counts, head.factor(walk.rows(slots, counts))

    once = factors(tokens.slots(0)) if tokens.order is None and tokens.most == 1 else None

    def vocabulary_block(i: Any, carry: Any) -> Any:
        block = walk.block(i)
        dfeatures, dparameters = carry

        def add(slots: Any, total: Any, new: Any) -> Any:
            new = tokens.read(total, slots) + new
            return new if tokens.block == N else lax.dynamic_update_slice_in_dim(total, new, slots.start, 0)

        def token_block(keeps: Any, slots: Any, carry: Any) -> Any:
            dfeatures, dblock = carry
            counts, factor = factors(slots) if once is None else once
            z = stored.read(dparameters.kernel, slots, head, i) if keeps else None
            dz = walk.block_gradient(block, slots, counts, residuals, per_token, z)
            new = head.feature_gradients(dz, block, features)
            dfeatures = jax.tree.map(partial(add, slots), dfeatures, new)
            dblock = jax.tree.map(jnp.add, dblock, head.parameter_gradients(dz, factor, parameters))
            return walk.vary((dfeatures, dblock))

        of_block = needs.of(needs.parameters, Parameters(block.kernel, block.bias, block.lora_b))
        zeros = jax.tree.map(lambda x: walk.zeros(*x.shape), of_block)
        dfeatures, dblock = stored.loop(tokens, token_block, (dfeatures, zeros))
        return dfeatures, dparameters.each(partial(head.set_block, i), dblock, parameters)

    dparameters = jax.tree.map(head.empty_gradient, parameters)
    dparameters = dparameters if memory is None else dparameters._replace(kernel=memory)
    start = jax.tree.map(lambda x: walk.zeros(*x.shape), features), dparameters
    dfeatures, dparameters = lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, start)
    primals = needs.of(needs.features, walk.inputs.features)
    dfeatures = jax.tree.map(partial(_feature_cotangent, walk), dfeatures, primals)
    return dfeatures, jax.tree.map(head.finish_gradient, dparameters, parameters)


def _tokens_outermost(walk: Walk, needs: NeedsGrad, residuals: Any, per_token: Any) -> Any:
    """Gradients with dkernel accumulated in f32, each block of dhidden finished, devices' sums included, in turn."""
    head, tokens = walk.head, walk.tokens
    primals = needs.of(needs.features, walk.inputs.features)
    parameters = needs.of(needs.parameters, walk.inputs.parameters)

    def token_block(slots: Any, carry: Any) -> Any:
        dfeatures, dparameters = carry
        counts = _counts(walk, slots, per_token)
        factor = head.factor(walk.rows(slots, counts))

        def vocabulary_block(i: Any, carry: Any) -> Any:
            drows, dparameters = carry
            block = walk.block(i)
            dz = walk.block_gradient(block, slots, counts, residuals, per_token)
            drows = jax.tree.map(jnp.add, drows, head.feature_gradients(dz, block, primals))
            dblock = head.parameter_gradients(dz, factor, parameters)
            return walk.vary((drows, dparameters.each(partial(head.accumulate, i), dblock)))

        drows = jax.tree.map(lambda x: walk.zeros(tokens.block, x.shape[-1]), primals)
        drows, dparameters = lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, (drows, dparameters))

        def put(total: Any, rows: Any, primal: Any) -> Any:
            return tokens.put(total, psum_to(rows, varying(primal), primal.dtype), slots)

        return jax.tree.map(put, dfeatures, drows, primals), dparameters

    empty = lambda x: vary(jnp.zeros((tokens.count, x.shape[-1]), x.dtype), varying(x))  # noqa: E731
    start = jax.tree.map(empty, primals), jax.tree.map(lambda x: walk.zeros(*x.shape), parameters)
    dfeatures, dparameters = tokens.loop(token_block, start)
    dfeatures = jax.tree.map(lambda x, primal: x.reshape(primal.shape), dfeatures, primals)
    return dfeatures, dparameters.each(head.reduce, parameters)


def _feature_cotangent(walk: Walk, dhidden: jax.Array, primal: jax.Array) -> jax.Array:
    """The f32 sum over devices, of tokens in slots, in the dtype, shape and sharding of the features."""
    tokens = walk.tokens
    if walk.rule.sequence_parallel:
        dhidden = tokens.to_tokens(dhidden).reshape(primal.shape[0], -1, primal.shape[2])
        dhidden = lax.psum_scatter(dhidden, walk.head.axes.tensor, scatter_dimension=1, tiled=True)
        return as_primal(dhidden, primal)
    if tokens.order is None or not varying(tokens.order) <= varying(primal):
        # in token order first, where the devices of the sum differ in that of their slots
        return psum_in_blocks(tokens.to_tokens(dhidden), primal, 0, tokens.block).reshape(primal.shape)

    def token_block(slots: Any, out: Any) -> Any:
        return tokens.put(out, as_primal(tokens.read(dhidden, slots), primal), slots)

    out = vary(jnp.zeros(dhidden.shape, primal.dtype), varying(primal))
    return tokens.loop_over_all(token_block, out).reshape(primal.shape)
