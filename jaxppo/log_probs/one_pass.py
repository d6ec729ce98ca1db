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
from jaxppo.log_probs.hidden_rule import Asked, Inputs, Rule, Walk, evaluate, values_and_asked
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

    The f32 gradient of the kernel is accumulated in the result where the kernel is f32, else beside it. A kernel that
    is gathered by block, or hidden states sharded by position, have no one pass.
    """
    if rule.head.gathers or rule.sequence_parallel or rule.moments:
        return None
    kernel, H = inputs.kernel, inputs.hidden.shape[-1]
    columns = rule.head.window(kernel.shape[rule.head.v_dim])
    block_columns = min(columns, BLOCK_COLUMNS)
    fixed = 3 * 4 * H * block_columns + (0 if kernel.dtype == jnp.float32 else 4 * kernel.size)
    mask = 0 if inputs.keep_ids is None else 1
    per_token = (4 + mask) * columns + 4 * block_columns + 3 * 4 * H
    N = inputs.targets.shape[0]
    tokens = (one_pass_bytes - fixed) // per_token // 32 * 32
    if tokens < min(N, MIN_TOKENS):
        return None
    return OnePass(rule, min(tokens, N), block_columns, token_loss)


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
    inputs, primal = walk.inputs, walk.inputs.hidden
    whole = dataclasses.replace(walk.head, block_columns=walk.head.window(inputs.kernel.shape[walk.head.v_dim]))
    # sums over devices sit in the loop over tokens, so every one of them has to take as many turns
    sums = bool(whole.axes.tensor or walk.axes - varying(primal))
    tokens = walk.tokens.equalized(walk.axes) if sums else walk.tokens
    weights = asked.weights(inputs.kernel, inputs.bias)
    block = whole.block(inputs.kernel, inputs.bias, 0)
    token_axes = walk.axes - set(whole.axes.tensor)
    with_entropy, kept = static.rule.entropy != "none", inputs.keep_ids is not None
    like = softmax.empty_sums(0, full=with_entropy or not kept, entropy=with_entropy, kept=kept)

    def token_block(slots, carry):
        loss, stats, dhidden, dweights = carry
        rows, targets = walk.rows(slots, slots.fresh), walk.targets(slots)
        z, slope = whole.logits(rows, block, inputs.temperature)
        place, here = whole.place_of(targets, block)
        z_y = jnp.where(here, jnp.take_along_axis(z, place[:, None], axis=1)[:, 0], 0)
        keep = walk.keep(slots, block)
        sums = softmax.combine(softmax.block_sums(z, z_y, keep, like), whole.axes)
        log_probs, entropy, residuals = softmax.finish(sums, (targets >= 0) & (targets < whole.vocab_size))
        counted = lambda x: x if slots.fresh is None else jnp.where(slots.fresh, x, 0)  # noqa: E731
        rest = tokens.take(per_token, slots)
        losses, vjp = jax.vjp(lambda p, h: counted(static.token_loss(p, h, rest, shared)), log_probs, entropy)
        g, e = vjp(jnp.ones_like(losses))
        e = e if static.rule.entropy == "bonus" else None
        counts = (g != 0) if e is None else (g != 0) | (e != 0)
        rows = jnp.where(counts[:, None], rows, 0)
        is_target = targets[:, None] == block.columns
        dz = softmax.dlogits(z, is_target, keep, residuals, g, e, None, whole.vocab_size) / inputs.temperature
        dz = dz if slope is None else dz * slope
        dz = jnp.where(counts[:, None] & block.valid, dz, 0)
        if asked.hidden:
            drows = psum_to(whole.hidden_gradient(dz, block), varying(primal), primal.dtype)
            dhidden = tokens.write(dhidden, drows, slots)
        dweights = _add_weight_gradients(walk, weights, dweights, dz, rows)
        stats = tokens.write(stats, jax.tree.map(lambda x: vary(x, token_axes), (log_probs, entropy)), slots)
        return vary(loss + losses.sum(), token_axes), stats, dhidden, dweights

    zeros = lambda axes, *shape, dtype=jnp.float32: vary(jnp.zeros(shape, dtype), axes)  # noqa: E731
    N = tokens.count
    start = (
        zeros(token_axes),
        (zeros(token_axes, N), zeros(token_axes, N) if with_entropy else None),
        zeros(varying(primal), *walk.hidden.shape, dtype=primal.dtype) if asked.hidden else None,
        jax.tree.map(lambda x: walk.zeros(*x.shape), weights),
    )
    loss, stats, dhidden, dweights = tokens.loop(token_block, start)
    dhidden = tokens.to_tokens(dhidden).reshape(primal.shape) if asked.hidden else None
    dweights = jax.tree.map(walk.head.reduce, dweights, weights)
    return (_total(static, loss), *tokens.to_tokens(stats)), (dhidden, dweights)


def _add_weight_gradients(walk: Walk, weights: Any, total: Any, dz: jax.Array, rows: jax.Array) -> Any:
    """The accumulated gradients plus those of a block of tokens, a block of columns at a time."""
    head = walk.head
    columns = walk.inputs.kernel.shape[head.v_dim]

    def block(i, total):
        gradients = head.weight_gradients(head.part(i, dz, columns), rows, weights)
        return walk.vary(jax.tree.map(partial(head.accumulate, i), total, gradients))

    return lax.fori_loop(0, walk.vocabulary_blocks, block, total) if jax.tree.leaves(weights) else total
