"""The head and a token-local loss in one pass: gradients are computed while a token block's logits are at hand.

Where the loss of a token depends on its own log-prob and entropy only, its cotangents are known as soon as its logits
are, and the backward need not compute them again: three matrix products instead of four. The logits of one block of
tokens, over the device's whole part of the vocabulary, are kept for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.log_probs import softmax
from jaxppo.log_probs.hidden_rule import Asked, Inputs, Rule, Walk, device_axes, evaluate, values_and_asked
from jaxppo.log_probs.tokens import even_block
from jaxppo.log_probs.varying import psum_to
from sharding import vary, varying

# A block of fewer tokens reads and writes the kernel's gradient too often to gain from the product that it saves.
MIN_TOKENS = 128
BLOCK_COLUMNS = 512

TokenLoss = Callable[[jax.Array, jax.Array | None, Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class OnePass:
    """What is static about one call.

    Args:
      rule: the head's.
      block_tokens: tokens of a block.
      block_columns: columns of a block of dkernel.
      token_loss: `(log_probs f32[n], entropy f32[n] | None, per_token, shared) -> f32[n]`, weights included.
    """

    rule: Rule
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
    if rule.head.gathers or rule.sequence_parallel or rule.moments:
        return None
    if inputs.where is not None and not varying(inputs.where) <= varying(inputs.hidden):
        return None
    kernel, H = inputs.kernel, inputs.hidden.shape[-1]
    columns = rule.head.window(kernel.shape[rule.head.v_dim])
    block_columns = min(columns, BLOCK_COLUMNS)
    in_result = kernel.dtype == jnp.float32 and device_axes(rule, inputs) <= varying(kernel)
    fixed = 5 * 4 * H * block_columns + (0 if in_result else 4 * kernel.size)
    mask = 0 if inputs.keep_ids is None else 1
    per_token = (4 + mask) * columns + 2 * 4 * block_columns + 3 * 4 * H
    N = inputs.targets.shape[0]
    tokens = (one_pass_bytes - fixed) // per_token
    if tokens < min(N, MIN_TOKENS):
        return None
    return OnePass(rule, even_block(N, min(tokens, N)), block_columns, token_loss)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def one_pass_loss(static: OnePass, inputs: Inputs, per_token: Any, shared: Any):
    """The weighted losses of all devices' tokens, summed, and this one's log-probs and entropies (not differentiable).

    Args:
      static: the head and the loss.
      inputs: the head's arrays.
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


def _forward(static: OnePass, inputs: Any, per_token: Any, shared: Any):
    inputs, asked = values_and_asked(inputs)
    is_primal = lambda x: hasattr(x, "perturbed")  # noqa: E731
    per_token, shared = jax.tree.map(lambda x: x.value, (per_token, shared), is_leaf=is_primal)
    out, gradients = _walk(static.walk(inputs), static, asked, per_token, shared)
    return out, (gradients, inputs.temperature)


def _backward(static: OnePass, saved: Any, cotangents: Any):
    gradients, temperature = saved
    c = cotangents[0]
    scale = lambda x: vary((x.astype(jnp.float32) * c).astype(x.dtype), varying(x))  # noqa: E731
    dhidden, dweights = jax.tree.map(scale, gradients)
    inputs = Inputs(dhidden, dweights.kernel, dweights.bias, None, None, None, jnp.zeros_like(temperature))
    return inputs, None, None


one_pass_loss.defvjp(_forward, _backward, symbolic_zeros=True)


def _walk(walk: Walk, static: OnePass, asked: Asked, per_token: Any, shared: Any):
    """Loss, log-probs and entropy, and the gradients of the loss."""
    head, inputs, primal = walk.head, walk.inputs, walk.inputs.hidden
    columns = inputs.kernel.shape[head.v_dim]
    # sums over devices sit in the loop over tokens, so every one of them has to take as many turns
    sums_in_loop = bool(head.axes.tensor or walk.axes - varying(primal))
    tokens = walk.tokens.equalized(walk.axes) if sums_in_loop else walk.tokens
    weights = asked.weights(inputs.kernel, inputs.bias)
    token_axes = walk.axes - set(head.axes.tensor)

    def token_block(slots, carry):
        loss, stats, dhidden, dweights, z = carry
        rows, targets = walk.rows(slots, slots.fresh), walk.targets(slots)

        def logits_block(i, carry):
            sums, z = carry
            block = walk.block(i)
            part = head.logits(rows, block, inputs.temperature)
            return walk.add_sums(sums, part, slots, block), head.set_part(i, z, part, columns)

        sums, z = lax.fori_loop(0, walk.vocabulary_blocks, logits_block, (walk.empty_sums(tokens.block), z))
        sums = softmax.combine(sums, head.axes)
        log_probs, entropy, residuals = softmax.finish(sums, (targets >= 0) & (targets < head.vocab_size))
        counted = lambda x: x if slots.fresh is None else jnp.where(slots.fresh, x, 0)  # noqa: E731
        rest = tokens.take(per_token, slots)
        losses, vjp = jax.vjp(lambda p, h: counted(static.token_loss(p, h, rest, shared)), log_probs, entropy)
        g, e = vjp(jnp.ones_like(losses))
        e = e if static.rule.entropy == "bonus" else None
        counts = (g != 0) if e is None else (g != 0) | (e != 0)
        rows = jnp.where(counts[:, None], rows, 0)
        factor = head.factor(rows)

        def vocabulary_block(i, carry):
            drows, dweights = carry
            block = walk.block(i)
            part = head.part(i, z, columns)
            is_target = targets[:, None] == block.columns
            dz = softmax.dlogits(part, is_target, walk.keep(slots, block), residuals, g, e, None, head.vocab_size)
            dz = head.product_gradient(dz, part, counts, block, inputs.temperature)
            drows = drows + head.hidden_gradient(dz, block) if asked.hidden else None
            dblock = head.weight_gradients(dz, factor, weights)
            return walk.vary((drows, jax.tree.map(partial(head.accumulate, i), dweights, dblock)))

        drows = walk.zeros(*rows.shape) if asked.hidden else None
        drows, dweights = lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, (drows, dweights))
        if asked.hidden:
            dhidden = tokens.put(dhidden, psum_to(drows, varying(primal), primal.dtype), slots)
        stats = tokens.write(stats, jax.tree.map(lambda x: vary(x, token_axes), (log_probs, entropy)), slots)
        return vary(loss + losses.sum(), token_axes), stats, dhidden, dweights, z

    zeros = lambda axes, *shape, dtype=jnp.float32: vary(jnp.zeros(shape, dtype), axes)  # noqa: E731
    N = tokens.count
    start = (
        zeros(token_axes),
        (zeros(token_axes, N), zeros(token_axes, N) if static.rule.entropy != "none" else None),
        zeros(varying(primal), *walk.hidden.shape, dtype=primal.dtype) if asked.hidden else None,
        jax.tree.map(lambda x: walk.zeros(*x.shape), weights),
        # of the block at hand; carried, since making it anew costs writing it once more
        walk.zeros(tokens.block, head.window(columns)),
    )
    loss, stats, dhidden, dweights, _ = tokens.loop(token_block, start)
    dhidden = dhidden.reshape(primal.shape) if asked.hidden else None
    dweights = jax.tree.map(head.reduce, dweights, weights)
    return (_total(static, loss), *tokens.to_tokens(stats)), (dhidden, dweights)
