"""The gradient rules of the head, per shard: statistics of tokens, and a loss of tokens reduced to one number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.asked import cotangents_of
from jaxppo.head.backward import Begin, Known, by_tile, by_vocabulary, restrict_counts
from jaxppo.head.forward import statistics
from jaxppo.head.gradient_sums import first_order
from jaxppo.head.late import late
from jaxppo.head.plan import plan_of
from jaxppo.head.prepare import on_device
from jaxppo.head.slices import Tree, put_slice
from jaxppo.head.softmax import Sums, merge_in_pairs
from jaxppo.head.token_blocks import Slots, zero_unless
from jaxppo.head.types import Chunk, Features, HeadCall, Index, Inputs, NeedsGrad, Parameters, Plan, TokenStats
from jaxppo.head.walk import Walk
from jaxppo.sharding import note, vary, varying

# (statistics f32[n], arrays [n, ...] of these tokens, arrays that are read whole) -> weighted losses f32[n]
TokenLoss = Callable[[TokenStats, Any, Any], jax.Array]
Sum = tuple[jax.Array, TokenStats]  # the sum of losses, and statistics


def stats_of_tokens(call: HeadCall, inputs: Inputs) -> TokenStats:
    """Per-shard: the statistics of the device's tokens, `[R, T]` each."""
    return in_rows(inputs.targets.shape, _token_stats(call, on_device(call, inputs)))


def in_rows(shape: tuple[int, ...], stats: Tree) -> Tree:
    """Arrays `[N, ...]` of tokens as `[R, T, ...]`."""
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), stats)


def reduce_tokens(
    call: HeadCall, inputs: Inputs, token_loss: TokenLoss, per_token: Any, shared: Any
) -> tuple[jax.Array, TokenStats]:
    """Per-shard: the sum of all devices' token losses, and this device's statistics without gradients.

    The function takes one pass if the memory has room for it and nothing is in f16, else two. The loss of a token must
    depend on that token alone.

    Args:
      call: the static part of the call.
      inputs: the arrays of the head, as the device holds them.
      token_loss: the loss of some tokens; hashable.
      per_token: arrays `[R, T, ...]` that `token_loss` reads; no gradient flows to them.
      shared: arrays that `token_loss` reads whole; no gradient flows to them either.
    """
    shape = inputs.targets.shape
    inputs = on_device(call, inputs)
    per_token = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), per_token)
    narrow = any(x.dtype == jnp.float16 for x in jax.tree.leaves((inputs.features, inputs.parameters)))
    # one pass would round gradients to f16 before a loss scale multiplies them
    plan = plan_of(call, inputs, token_loss=not narrow)
    if plan.passes == 2:
        with note("two passes: " + ("float16" if narrow else "one pass does not fit the memory")):
            stats = _token_stats(call, inputs)
        total = _total(call, token_loss(stats, per_token, shared))
    else:
        total, stats = _one_pass(call, plan, token_loss, inputs, per_token, shared)
    return total, in_rows(shape, lax.stop_gradient(stats))


def _total(call: HeadCall, losses: jax.Array) -> jax.Array:
    """The sum over all devices, so that its cotangent is one number for all: gradients are already summed over them."""
    return call.axes.psum(vary(losses.sum(), call.axes.tokens), call.axes.tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_stats(call: HeadCall, inputs: Inputs) -> TokenStats:
    """The statistics of one device's tokens, f32[N] each."""
    return statistics(call, plan_of(call, inputs), inputs)[0]


def _token_stats_forward(call: HeadCall, inputs: Any) -> tuple[TokenStats, Any]:
    inputs, needs = values_and_needs(inputs)
    stats, residuals = statistics(call, plan_of(call, inputs, needs=needs), inputs)
    return stats, (inputs, to_save((residuals, needs)))


def _token_stats_backward(call: HeadCall, left: Any, of_stats: TokenStats) -> tuple[Inputs]:
    inputs, (residuals, needs) = left[0], saved(left[1])
    cotangents = cotangents_of(dense(of_stats), call.asked, inputs.ids, inputs.counts, call.vocab_size)
    plan = plan_of(call, inputs, needs=needs)
    make = partial(Walk, call, inputs, plan.cut)
    return (cotangents_of_inputs(inputs, *gradients(plan, make, needs, (residuals, cotangents))),)


_token_stats.defvjp(_token_stats_forward, _token_stats_backward, symbolic_zeros=True)


def gradients(plan: Plan, make: Callable[..., Walk], needs: NeedsGrad, known: Any) -> tuple[Features, Parameters]:
    """The gradients that are asked for. `known` holds the residuals and cotangents of tokens, f32[N] each."""
    with note(f"gradients, {plan}"):
        if plan.backward == "by_vocabulary":
            return by_vocabulary(make(by_vocabulary=True), needs, known)
        walk = make(equal=True, multiple=max(1, plan.group // plan.cut.tokens))
        in_slots = walk.tokens.to_slots(known)

        def begin(chunk: Chunk, slots: Slots) -> Known:
            residuals, cotangents = walk.tokens.read(in_slots, slots)
            return Known(None, residuals, restrict_counts(cotangents, slots.counts))

        return by_chunks(plan, walk, needs, begin, None)[1:]


def by_chunks(plan: Plan, walk: Walk, needs: NeedsGrad, begin: Begin, results: Any) -> tuple[Any, Features, Parameters]:
    """The results of tokens and the gradients that are asked for, by the plan's schedule."""
    if plan.backward == "late":
        return late(walk, plan, needs, begin, results)
    return by_tile(walk, needs, begin, results)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _one_pass(call: HeadCall, plan: Plan, token_loss: TokenLoss, inputs: Inputs, per_token: Any, shared: Any) -> Sum:
    """The sum of all devices' losses, and this device's statistics (not differentiable), f32[N] each."""
    stats = statistics(call, plan_of(call, inputs), inputs)[0]
    return _total(call, token_loss(stats, per_token, shared)), stats


def _one_pass_forward(
    call: HeadCall, plan: Plan, token_loss: TokenLoss, inputs: Any, per_token: Any, shared: Any
) -> tuple[Sum, Any]:
    inputs, needs = values_and_needs(inputs)
    per_token, shared = values((per_token, shared))
    with note(f"one pass, {plan}"):
        walk = Walk(call, inputs, plan.cut, equal=True, multiple=max(1, plan.group // plan.cut.tokens))
        walk = walk.with_references()
        in_slots = walk.tokens.to_slots(per_token)

        def begin(chunk: Chunk, slots: Slots) -> Known:
            of_slots = walk.tokens.read(in_slots, slots)
            return _loss_of_chunk(walk, chunk, lambda stats: token_loss(stats, of_slots, shared))

        targets, _, ids, _ = walk.per_token
        like = jax.eval_shape(lambda: walk.finish(walk.empty_sums(walk.tokens.slots_count), targets, ids)[0])
        stats = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        results = walk.vary_results((stats.log_probs, stats))
        (losses, stats), *found = by_chunks(plan, walk, needs, begin, results)
    return (_total(call, losses), stats), (to_save(found), inputs)


def _loss_of_chunk(walk: Walk, chunk: Chunk, loss: Callable[[TokenStats], jax.Array]) -> Known:
    """A chunk's losses and statistics, its residuals and cotangents, and its products."""
    empty = walk.empty_sums(chunk.targets.shape[0])

    def block(sums: Sums, i: Index) -> tuple[Sums, jax.Array]:
        return walk.sums(chunk, walk.block(i), sums)

    def part(x: jax.Array, p: jax.Array) -> tuple[jax.Array, Sums]:
        of_part = walk.eighth(p)
        sums, new = of_part.sums(chunk, of_part.block(0), empty)
        return put_slice(x, walk.vary(new), p * new.shape[1], 1), sums

    if walk.vocabulary.eighths:  # on accelerators, where a chunk is computed in all columns at once
        x = walk.vary(lax.empty((chunk.targets.shape[0], walk.vocabulary.window), jnp.float32))
        x, each = lax.scan(part, x, jnp.arange(walk.vocabulary.eighths, dtype=jnp.int32))
        sums, x = merge_in_pairs(each), x[None]
    elif walk.vocabulary.blocks == 1:
        sums, x = block(empty, 0)
        x = x[None]
    else:
        sums, x = lax.scan(block, empty, jnp.arange(walk.vocabulary.blocks, dtype=jnp.int32))
    stats, residuals = walk.finish(sums, chunk.targets, chunk.ids)
    losses, vjp = jax.vjp(lambda stats: zero_unless(chunk.counts, loss(stats)), stats)
    of_stats, call = vjp(jnp.ones_like(losses))[0], walk.call
    cotangents = cotangents_of(of_stats, call.asked, chunk.ids, chunk.counts, call.vocab_size)
    return Known((losses, zero_unless(chunk.counts, stats)), residuals, cotangents, x)


def _one_pass_backward(
    call: HeadCall, plan: Plan, token_loss: TokenLoss, left: Any, of_results: Any
) -> tuple[Inputs, None, None]:
    found, inputs = saved(left[0]), left[1]
    c = of_results[0]
    scaled = jax.tree.map(lambda x: vary((x.astype(jnp.float32) * c).astype(x.dtype), varying(x)), found)
    return cotangents_of_inputs(inputs, *scaled), None, None


_one_pass.defvjp(_one_pass_forward, _one_pass_backward, symbolic_zeros=True)


def cotangents_of_inputs(inputs: Inputs, features: Features, parameters: Parameters) -> Inputs:
    """The result of a rule's backward: these gradients, which cannot be differentiated again, and None elsewhere."""
    once = partial(first_order, "a loss from hidden states")
    features, parameters = jax.tree.map(once, (features, parameters))
    zeros = jax.tree.map(jnp.zeros_like, inputs.temperature)
    return Inputs(features, parameters, None, None, None, None, None, zeros)


def dense(of_stats: Any) -> Any:
    """Cotangents of statistics, with arrays of zeros in place of symbolic zeros."""
    zero = jax.custom_derivatives.SymbolicZero
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32) if isinstance(x, zero) else x,
        of_stats,
        is_leaf=lambda x: isinstance(x, zero),
    )


def values(tree: Any) -> Any:
    """The arrays of a rule's arguments with `symbolic_zeros`."""
    return jax.tree.map(lambda x: x.value, tree, is_leaf=lambda x: hasattr(x, "perturbed"))


def values_and_needs(inputs: Any) -> tuple[Inputs, NeedsGrad]:
    """The arrays of a rule's `Inputs` with `symbolic_zeros`, and which gradients will be asked for."""
    needed = jax.tree.map(lambda x: x.perturbed or None, inputs, is_leaf=lambda x: hasattr(x, "perturbed"))
    return values(inputs), NeedsGrad(needed.features, needed.parameters)


# A forward saves None and True as empty arrays of these shapes.
_NONE, _TRUE = (0,) * 6, (0,) * 7


def to_save(tree: Any) -> Any:
    """The residuals of a forward, in a structure that does not depend on which gradients are asked for.

    A function under `jit` is traced once, but the forward of a rule in it is traced once for each set of gradients. JAX
    gives every backward the structure that the last of these forwards saved.
    """
    return jax.tree.map(
        lambda x: x if x is not None and x is not True else jnp.zeros(_NONE if x is None else _TRUE, jnp.float32),
        tree,
        is_leaf=lambda x: x is None,
    )


def saved(tree: Any) -> Any:
    """The inverse of `to_save`."""
    return jax.tree.map(lambda x: {_NONE: None, _TRUE: True}.get(x.shape, x), tree)
