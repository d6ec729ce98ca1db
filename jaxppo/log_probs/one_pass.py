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
from jaxppo.log_probs import softmax
from jaxppo.log_probs.head import Weights
from jaxppo.log_probs.hidden_rule import Asked, Inputs, Rule, Walk, device_axes, evaluate, values_and_asked
from jaxppo.log_probs.kept import Kept
from jaxppo.log_probs.tokens import Slots, even_block
from jaxppo.log_probs.varying import psum_to

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
    if rule.head.gathers or rule.sequence_parallel or rule.moments:
        return None
    if not varying(inputs.where) <= varying(inputs.hidden):
        return None
    kernel, H = inputs.kernel, inputs.hidden.shape[-1]
    columns = rule.head.window(kernel.shape[rule.head.v_dim])
    block_columns = min(columns, BLOCK_COLUMNS)
    in_result = kernel.dtype == jnp.float32 and device_axes(rule, inputs) <= varying(kernel)
    fixed = 5 * 4 * H * block_columns + (0 if in_result else 4 * kernel.size)
    mask = 0 if inputs.keep_ids is None else 1
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
def one_pass_loss(static: OnePass, inputs: Inputs, per_token: Any, shared: Any):
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
    primal = walk.inputs.hidden
    weights = asked.weights(walk.inputs.kernel, walk.inputs.bias)
    # sums over devices sit in the loop over tokens, so every one of them has to take as many turns
    sums_in_loop = bool(walk.head.axes.tensor or walk.axes - varying(primal))
    first, rest = walk.tokens.divided(
        static.first_tokens if asked.kernel else 0, walk.axes if sums_in_loop else frozenset()
    )
    of_block = partial(_token_block, static=static, asked=asked, per_token=per_token, shared=shared)

    token_axes = walk.axes - set(walk.head.axes.tensor)
    zeros = lambda axes, *shape, dtype=jnp.float32: vary(jnp.zeros(shape, dtype), axes)  # noqa: E731
    N = walk.tokens.count
    start = _Results(
        zeros(token_axes),
        (zeros(token_axes, N), zeros(token_axes, N) if static.rule.entropy != "none" else None),
        zeros(varying(primal), *walk.hidden.shape, dtype=primal.dtype) if asked.hidden else None,
        jax.tree.map(lambda x: walk.zeros(*x.shape), weights),
    )
    with note(f"one pass, a first block of {first.block} tokens"):
        out, _ = first.loop(partial(of_block, walk.over(first)), (start, None))
    # Of the block at hand; carried, since making it anew costs writing it once more. What it holds at first is never
    # read, and made from the gradient so far, so that it does not exist beside the first block's arrays.
    shape = rest.block, walk.head.window(walk.inputs.kernel.shape[walk.head.v_dim])
    z = walk.vary(jnp.broadcast_to(out.dweights.kernel[0, 0] if asked.kernel else 0.0, shape))
    out, _ = rest.loop(partial(of_block, walk.over(rest)), (out, z))
    dhidden = out.dhidden.reshape(primal.shape) if asked.hidden else None
    dweights = jax.tree.map(walk.head.reduce, out.dweights, weights)
    return (_total(static, out.loss), *rest.to_tokens(out.stats)), (dhidden, dweights)


class _Results(NamedTuple):
    """Of the blocks of tokens so far."""

    loss: jax.Array
    stats: Any  # log-probs and entropies, in slot order
    dhidden: Any
    dweights: Weights


def _token_block(walk: Walk, slots: Slots, carry: tuple[_Results, Any], static, asked, per_token, shared):
    """The results and the memory of the logits after a block of tokens; where that is None, dkernel's is taken."""
    (loss, stats, dhidden, dweights), z = carry
    head, tokens, primal = walk.head, walk.tokens, walk.inputs.hidden
    columns = walk.inputs.kernel.shape[head.v_dim]
    kept = Kept(1, tokens.block) if z is None else None
    token_axes = walk.axes - set(head.axes.tensor)
    rows, targets = walk.rows(slots, slots.fresh), walk.targets(slots)

    def logits_block(i, carry):
        sums, memory = carry
        block = walk.block(i)
        part = head.logits(rows, block, walk.inputs.temperature)
        sums = walk.add_sums(sums, part, slots, block)
        if kept is None:
            return sums, head.set_part(i, memory, part, columns)
        return sums, kept.write(memory, part, slots, block, head, i)

    memory = dweights.kernel if z is None else z
    start = walk.empty_sums(tokens.block), memory
    sums, memory = lax.fori_loop(0, walk.vocabulary_blocks, logits_block, start)
    if z is None:
        dweights = dweights._replace(kernel=memory)
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
    rows = jnp.where(counts[:, None], rows, 0)
    factor = head.factor(rows)

    def vocabulary_block(i, carry):
        drows, dweights = carry
        block = walk.block(i)
        part = head.part(i, z, columns) if kept is None else kept.read(dweights.kernel, slots, head, i)
        is_target = targets[:, None] == block.columns
        dz = softmax.dlogits(part, is_target, walk.keep(slots, block), residuals, g, e, None, head.vocab_size)
        dz = head.product_gradient(dz, part, counts, block, walk.inputs.temperature)
        drows = drows + head.hidden_gradient(dz, block) if asked.hidden else None
        dblock = head.weight_gradients(dz, factor, dweights)
        new = jax.tree.map(partial(head.accumulate if kept is None else head.set, i), dweights, dblock)
        return walk.vary((drows, new))

    drows = walk.zeros(*rows.shape) if asked.hidden else None
    drows, dweights = lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, (drows, dweights))
    if asked.hidden:
        dhidden = tokens.put(dhidden, psum_to(drows, varying(primal), primal.dtype), slots)
    stats = tokens.write(stats, jax.tree.map(lambda x: vary(x, token_axes), (log_probs, entropy)), slots)
    return _Results(vary(loss + losses.sum(), token_axes), stats, dhidden, dweights), z
