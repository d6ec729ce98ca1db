"""The head and a token-local loss in one pass: gradients are computed while a token block's logits are at hand.

Where the loss of a token depends on its own log-prob and entropy only, its cotangents are known as soon as its logits
are, and the backward need not compute them again: three matrix products instead of four. The logits of one block of
tokens, over the device's whole part of the vocabulary, are kept for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo._sharding import note, vary, varying
from jaxppo.head import softmax
from jaxppo.head.columns import Features, Parameters
from jaxppo.head.hidden_rule import (
    Inputs,
    NeedsGrad,
    Rule,
    Walk,
    cotangents,
    device_axes,
    evaluate,
    values_and_needs,
)
from jaxppo.head.stored_logits import Stored
from jaxppo.head.tokens import Slots, even_block
from jaxppo.head.varying import psum_to

# A block of fewer tokens reads and writes the kernel's gradient too often to gain from the product that it saves.
MIN_TOKENS = 128
BLOCK_COLUMNS = 512

TokenLoss = Callable[[jax.Array, jax.Array | None, Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class OnePass:
    """What is static about one call.

    Args:
      rule: the head's.
      first_tokens: as many as have room for their logits in the kernel's gradient; 0 where that is no gain.
      block_tokens: of a block of the others.
      block_columns: columns of a block of dkernel.
      token_loss: `(log_probs f32[n], entropy f32[n] | None, per_token, shared) -> f32[n]`, weights included.
    """

    rule: Rule
    first_tokens: int
    block_tokens: int
    block_columns: int
    token_loss: TokenLoss

    def walk(self, inputs: Inputs) -> Walk:
        head = dataclasses.replace(self.rule.head, block_columns=self.block_columns)
        return Walk(dataclasses.replace(self.rule, head=head, block_tokens=self.block_tokens), inputs)


def one_pass_of(rule: Rule, inputs: Inputs, token_loss: TokenLoss, one_pass_bytes: int) -> OnePass | None:
    """The call whose temporaries, beside the results, fit `one_pass_bytes`; None where none does.

    The f32 gradient of the kernel is accumulated in the result where the kernel is f32 and no devices' gradients are
    summed, else beside it. A kernel that is gathered by block, or hidden states sharded by position, have no one pass,
    nor have hidden states that devices with masks of their own share, since their blocks hold different tokens.
    """
    if rule.head.gathers or rule.sequence_parallel or rule.logit_stats:
        return None
    if not varying(inputs.where) <= varying(inputs.features.hidden):
        return None
    kernel, H = inputs.parameters.kernel, inputs.features.hidden.shape[-1]
    columns = rule.head.window(kernel.shape[rule.head.v_dim])
    block_columns = min(columns, BLOCK_COLUMNS)
    in_result = kernel.dtype == jnp.float32 and device_axes(rule, inputs) <= varying(kernel)
    fixed = 5 * 4 * H * block_columns + (0 if in_result else 4 * kernel.size)
    mask = 0 if inputs.nucleus_ids is None else 1
    per_token = mask * columns + 2 * 4 * block_columns + 3 * 4 * H
    N = inputs.targets.shape[0]
    most = (one_pass_bytes - fixed) // (4 * columns + per_token)
    if most < min(N, MIN_TOKENS):
        return None
    first = min(H, N, (one_pass_bytes - fixed) // per_token) // 8 * 8
    first = first if first > most else 0
    # even blocks of what the first leaves, since the last one computes again what it overlaps
    others = N - first if N - first > most else N
    return OnePass(rule, first, even_block(others, most), block_columns, token_loss)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def one_pass_loss(static: OnePass, inputs: Inputs, per_token: Any, shared: Any) -> Any:
    """The weighted losses of all devices' tokens, summed, and this one's log-probs and entropies (not differentiable).

    Args:
      static: the head and the loss.
      inputs: the head's arrays, a mask among them.
      per_token: arrays `[N, ...]` that the loss reads; constants of differentiation.
      shared: arrays that it reads whole; likewise.
    """
    log_probs, entropy, _ = evaluate(static.rule, inputs)[0]
    losses = static.token_loss(log_probs, entropy, per_token, shared)
    return _total(static, losses.sum()), log_probs, entropy


def _total(static: OnePass, loss: jax.Array) -> jax.Array:
    """Summed here, so that its cotangent is one number for all devices: gradients are already summed over them."""
    axes = static.rule.head.axes
    return axes.psum(vary(loss, axes.tokens), axes.tokens)


def _forward(static: OnePass, inputs: Any, per_token: Any, shared: Any) -> Any:
    inputs, needs = values_and_needs(inputs)
    is_primal = lambda x: hasattr(x, "perturbed")  # noqa: E731
    per_token, shared = jax.tree.map(lambda x: x.value, (per_token, shared), is_leaf=is_primal)
    out, gradients = _walk(static.walk(inputs), static, needs, per_token, shared)
    return out, (gradients, inputs)


def _backward(static: OnePass, saved: Any, of_results: Any) -> Any:
    gradients, inputs = saved
    c = of_results[0]
    scale = lambda x: vary((x.astype(jnp.float32) * c).astype(x.dtype), varying(x))  # noqa: E731
    return cotangents(inputs, *jax.tree.map(scale, gradients)), None, None


one_pass_loss.defvjp(_forward, _backward, symbolic_zeros=True)


def _walk(walk: Walk, static: OnePass, needs: NeedsGrad, per_token: Any, shared: Any) -> Any:
    """Loss, log-probs and entropy, and the gradients of the loss."""
    primals = needs.of(needs.features, walk.inputs.features)
    parameters = needs.of(needs.parameters, walk.inputs.parameters)
    # sums over devices sit in the loop over tokens, so every one of them has to take as many turns
    sums_in_loop = bool(walk.head.axes.tensor or walk.axes - varying(walk.inputs.features.hidden))
    first, rest = walk.tokens.divided(
        static.first_tokens if parameters.kernel is not None else 0, walk.axes if sums_in_loop else frozenset()
    )
    of_block = partial(_token_block, static=static, primals=primals, per_token=per_token, shared=shared)

    token_axes = walk.axes - set(walk.head.axes.tensor)
    zeros = lambda axes, *shape, dtype=jnp.float32: vary(jnp.zeros(shape, dtype), axes)  # noqa: E731
    N = walk.tokens.count
    start = _Results(
        zeros(token_axes),
        (zeros(token_axes, N), zeros(token_axes, N) if static.rule.entropy != "none" else None),
        jax.tree.map(lambda x: zeros(varying(x), N, x.shape[-1], dtype=x.dtype), primals),
        jax.tree.map(lambda x: walk.zeros(*x.shape), parameters),
    )
    with note(f"one pass, a first block of {first.block} tokens"):
        out, _ = first.loop(partial(of_block, walk.over(first)), (start, None))
    # Of the block at hand; carried, since making it anew costs writing it once more. What it holds at first is never
    # read, and made from the gradient so far, so that it does not exist beside the first block's arrays.
    shape = rest.block, walk.head.window(walk.kernel.shape[walk.head.v_dim])
    filler = 0.0 if parameters.kernel is None else out.dparameters.kernel[0, 0]
    z = walk.vary(jnp.broadcast_to(jnp.asarray(filler, jnp.float32), shape))
    out, _ = rest.loop(partial(of_block, walk.over(rest)), (out, z))
    dfeatures = jax.tree.map(lambda x, primal: x.reshape(primal.shape), out.dfeatures, primals)
    dparameters = out.dparameters.each(walk.head.reduce, parameters)
    return (_total(static, out.loss), *rest.to_tokens(out.stats)), (dfeatures, dparameters)


class _Results(NamedTuple):
    """Of the blocks of tokens so far."""

    loss: jax.Array
    stats: Any  # log-probs and entropies, in slot order
    dfeatures: Features
    dparameters: Parameters


def _token_block(
    walk: Walk, slots: Slots, carry: tuple[_Results, Any], static: Any, primals: Any, per_token: Any, shared: Any
) -> Any:
    """The results and the memory of the logits after a block of tokens; where that is None, dkernel's is taken."""
    (loss, stats, dfeatures, dparameters), z = carry
    head, tokens = walk.head, walk.tokens
    columns = walk.kernel.shape[head.v_dim]
    stored = Stored(1, tokens.block) if z is None else None
    token_axes = walk.axes - set(head.axes.tensor)
    rows, targets, temperature = walk.rows(slots, slots.fresh), walk.targets(slots), walk.temperature(slots)

    def logits_block(i: Any, carry: Any) -> Any:
        sums, memory = carry
        block = walk.block(i)
        part = head.logits(rows, block, temperature)
        sums = walk.add_sums(sums, part, slots, block)
        if stored is None:
            return sums, head.set_part(i, memory, part, columns)
        return sums, stored.write(memory, part, slots, block, head, i)

    memory = dparameters.kernel if z is None else z
    start = walk.empty_sums(tokens.block), memory
    sums, memory = lax.fori_loop(0, walk.vocabulary_blocks, logits_block, start)
    if z is None:
        dparameters = dparameters._replace(kernel=memory)
    else:
        z = memory
    sums = softmax.combine(sums, head.axes)
    log_probs, entropy, residuals = softmax.finish(sums, (targets >= 0) & (targets < head.vocab_size))
    counted = lambda x: x if slots.fresh is None else jnp.where(slots.fresh, x, 0)  # noqa: E731
    rest = tokens.take(per_token, slots)
    losses, vjp = jax.vjp(lambda p, h: counted(static.token_loss(p, h, rest, shared)), log_probs, entropy)
    g, e = vjp(jnp.ones_like(losses))
    e = e if static.rule.entropy == "bonus" else None
    counts = (g != 0) if e is None else (g != 0) | (e != 0)
    rows = jax.tree.map(lambda x: jnp.where(counts[:, None], x, 0), rows)
    factor = head.factor(rows)

    def vocabulary_block(i: Any, carry: Any) -> Any:
        drows, dparameters = carry
        block = walk.block(i)
        part = head.part(i, z, columns) if stored is None else stored.read(dparameters.kernel, slots, head, i)
        is_target = targets[:, None] == block.columns
        dz = softmax.dlogits(part, is_target, walk.nucleus(slots, block), residuals, g, e, None, head.vocab_size)
        dz = head.product_gradient(dz, part, counts, block, temperature)
        drows = jax.tree.map(jnp.add, drows, head.feature_gradients(dz, block, primals))
        dblock = head.parameter_gradients(dz, factor, dparameters)
        put = head.accumulate if stored is None else head.set
        return walk.vary((drows, dparameters.each(partial(put, i), dblock)))

    drows = jax.tree.map(lambda x: walk.zeros(tokens.block, x.shape[-1]), primals)
    drows, dparameters = lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, (drows, dparameters))

    def put(total: Any, rows: Any, primal: Any) -> Any:
        return tokens.put(total, psum_to(rows, varying(primal), primal.dtype), slots)

    dfeatures = jax.tree.map(put, dfeatures, drows, primals)
    stats = tokens.write(stats, jax.tree.map(lambda x: vary(x, token_axes), (log_probs, entropy)), slots)
    return _Results(vary(loss + losses.sum(), token_axes), stats, dfeatures, dparameters), z
