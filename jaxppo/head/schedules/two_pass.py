"""Two passes: statistics first, whatever is made of them, and then gradients from logits that are computed again."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import softmax, tiles
from jaxppo.head.ops.tile import Features, Parameters, as_factor, feature_gradients, parameter_gradients
from jaxppo.head.schedules.kept import Kept
from jaxppo.head.schedules.needs import NeedsGrad, saved, to_save, values_and_needs
from jaxppo.head.schedules.tokens_first import tokens_first
from jaxppo.head.schedules.walk import Inputs, Rule, Walk, cotangents_of, counted, of_tokens
from jaxppo.head.tokens import Slots
from jaxppo.head.varying import as_primal, psum_in_blocks
from jaxppo.sharding import note

SUMMED_TOKENS = 1024  # of dhidden, at a time


def evaluate(rule: Rule, inputs: Inputs, needs: NeedsGrad | None = None) -> tuple[Any, softmax.Residuals, Any]:
    """(log_prob, entropy, of_logits) and residuals, f32[N] each, and the memory of the logits that are kept."""
    plan = tiles.two_passes(rule, inputs, needs)
    walk = Walk(
        rule, inputs, plan.forward, once=not plan.forward_vocabulary_first, compact=plan.forward_vocabulary_first
    )
    tokens, empty = walk.tokens, walk.empty_sums(walk.tokens.block)
    kept = Kept(walk, plan.kept)

    def tile(keep: bool, i: Any, block: Any, slots: Slots, chunk: Any, carry: Any) -> Any:
        sums, memory = carry
        found, z = walk.sums(chunk, block, tokens.read(sums, slots), empty, keep)
        memory = kept.write(memory, z, slots, block, i) if keep else memory
        return tokens.write(sums, found, slots), memory

    start = walk.empty_sums(tokens.count), kept.empty()
    with note(f"forward, {plan.forward}"):
        sums, memory = walk.over_tiles(tile, start, plan.forward_vocabulary_first, kept.blocks)
    sums = tokens.to_tokens(softmax.combine(sums, rule.columns.axes))
    out, residuals = walk.finish(sums, inputs.targets)
    if inputs.where is not None:  # residuals too: of a sum of nothing they are NaN, at which jax_debug_nans would stop
        out, residuals = jax.tree.map(lambda x: jnp.where(inputs.where, x, 0), (out, residuals))
    return out, residuals, memory


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_stats(rule: Rule, inputs: Inputs) -> Any:
    """Log-probs, entropy and logit statistics `f32[N]` of one device's tokens."""
    return evaluate(rule, inputs)[0]


def _forward(rule: Rule, inputs: Any) -> Any:
    inputs, needs = values_and_needs(inputs)
    out, residuals, memory = evaluate(rule, inputs, needs)
    return out, (inputs, to_save((residuals, memory, needs)))


def _backward(rule: Rule, left: Any, of_results: Any) -> Any:
    inputs, (residuals, memory, needs) = left[0], saved(left[1])
    zeros = jnp.zeros(inputs.targets.shape, jnp.float32)
    is_zero = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)  # noqa: E731
    of_results = jax.tree.map(lambda x: zeros if is_zero(x) else x, of_results, is_leaf=is_zero)
    cotangents = of_tokens(of_results, rule, inputs.where)
    walk = lambda cut, **how: Walk(rule, inputs, cut, **how)  # noqa: E731
    return (cotangents_of(inputs, *gradients(walk, rule, inputs, needs, (residuals, cotangents), memory)),)


token_stats.defvjp(_forward, _backward, symbolic_zeros=True)


def gradients(
    walk_of: Any, rule: Rule, inputs: Inputs, needs: NeedsGrad, known: Any, memory: Any = None
) -> tuple[Features, Parameters]:
    """The gradients that are asked for.

    Args:
      walk_of: the walk, by its cut and its order.
      rule: static.
      inputs: the arrays.
      needs: which gradients.
      known: (residuals, cotangents) of tokens, f32[N] each.
      memory: of kept logits; None where there are none.
    """
    plan = tiles.two_passes(rule, inputs, needs)
    with note(f"gradients, {plan.backward}"):
        if plan.vocabulary_first:
            kept = 0 if memory is None else plan.kept
            return _vocabulary_first(walk_of(plan.backward.group, compact=True), needs, known, memory, kept)
        walk = walk_of(plan.backward.group, once=True, equal=True)
        _, features, parameters = tokens_first(walk, needs, known, None, _known, plan.backward.chunks)
        return features, parameters


def _known(chunk: Any, known: Any) -> Any:
    residuals, cotangents = known
    return None, residuals, _among(cotangents, chunk.fresh), None


def _among(cotangents: Any, fresh: Any) -> Any:
    return cotangents if fresh is None else cotangents._replace(counts=cotangents.counts & fresh)


def _vocabulary_first(walk: Walk, needs: NeedsGrad, known: Any, memory: Any, keeps: int) -> tuple[Features, Parameters]:
    """Gradients with dhidden accumulated in f32, each block of dkernel finished, devices' sums included, in turn."""
    form, tokens, vocabulary = walk.rule.form, walk.tokens, walk.vocabulary
    features = needs.of(needs.features, walk.features)
    parameters = needs.of(needs.parameters, walk.inputs.parameters)
    kept = Kept(walk, keeps)
    last_first = memory is None  # what is kept has to be read before it is written over
    known = tokens.to_slots(known)

    def of_slots(slots: Slots) -> Any:
        residuals, cotangents = tokens.read(known, slots)
        cotangents = _among(cotangents, slots.fresh)
        chunk = walk.chunk(slots)
        return chunk, as_factor(form, counted(chunk.rows, cotangents.counts)), residuals, cotangents

    once = of_slots(tokens.slots(0)) if tokens.most == 1 else None

    def vocabulary_block(i: Any, carry: Any) -> Any:
        block = walk.block(i)
        dfeatures, dparameters = carry

        def token_block(keeps: bool, slots: Slots, carry: Any) -> Any:
            dfeatures, dblock = carry
            chunk, factor, residuals, cotangents = of_slots(slots) if once is None else once
            z = kept.read(dparameters.kernel, slots, i) if keeps else None
            dz, of_bias = walk.dlogits(chunk, block, residuals, cotangents, z, parameters.bias is not None)
            # or XLA for accelerators computes it again inside each product; on CPUs it would only cost memory
            product = lax.optimization_barrier(dz) if walk.rule.budget.profile.whole else dz
            found = feature_gradients(form, product, block, features)
            dfeatures = jax.tree.map(lambda total, new: tokens.add(total, new, slots), dfeatures, found)
            of_block = parameter_gradients(form, product, factor, parameters)
            of_block = of_block._replace(bias=of_bias)
            return walk.vary((dfeatures, jax.tree.map(jnp.add, dblock, of_block)))

        shapes = needs.of(needs.parameters, block.parameters)
        zeros = jax.tree.map(lambda x: walk.zeros(*x.shape), shapes)
        carry = tokens.loop(partial(token_block, True), (dfeatures, zeros), 0, kept.blocks)
        dfeatures, dblock = tokens.loop(partial(token_block, False), carry, kept.blocks)
        return dfeatures, dparameters.each(partial(vocabulary.put_summed, i, last_first), dblock, parameters)

    dparameters = jax.tree.map(vocabulary.empty, parameters)
    dparameters = dparameters if memory is None else dparameters._replace(kernel=memory)
    start = jax.tree.map(lambda x: walk.zeros(*x.shape), features), dparameters
    dfeatures, dparameters = walk.over_blocks(vocabulary_block, start, last_first)
    primals = needs.of(needs.features, walk.inputs.features)
    dfeatures = jax.tree.map(partial(_feature_cotangent, walk), dfeatures, primals)
    return dfeatures, jax.tree.map(vocabulary.finish, dparameters, parameters)


def _feature_cotangent(walk: Walk, gradient: jax.Array, primal: jax.Array) -> jax.Array:
    """The f32 sum over devices, of tokens in slots, in the dtype, order and sharding of the features."""
    if walk.rule.parts > 1:
        return as_primal(walk.scatter(walk.tokens.to_tokens(gradient)), primal, walk.summing)
    if walk.tokens.order is None:
        return psum_in_blocks(gradient, primal, 0, SUMMED_TOKENS, walk.summing)
    return walk.tokens.to_tokens(psum_in_blocks(gradient, primal, 0, SUMMED_TOKENS, walk.summing))
