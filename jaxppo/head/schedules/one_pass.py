"""The head and a token-local loss in one pass: gradients are computed while a chunk's logits are at hand.

Where the loss of a token depends on its own log-prob and entropy only, its cotangents are known as soon as its logits
are, and the backward need not compute them again: three matrix products instead of four.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import softmax
from jaxppo.head.schedules.needs import saved, to_save, values_and_needs
from jaxppo.head.schedules.tokens_first import tokens_first
from jaxppo.head.schedules.two_pass import evaluate
from jaxppo.head.schedules.walk import Chunk, Inputs, Rule, Walk, cotangents_of, of_tokens
from jaxppo.head.tiles import OnePassTiles
from jaxppo.sharding import note, vary, varying

# ((log_prob, entropy, of_logits) f32[n] each, per_token, shared) -> f32[n], weights included
TokenLoss = Callable[[tuple[Any, Any, Any], Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class OnePass:
    """The static part of one call: the head, its tiles and the loss."""

    rule: Rule
    tiles: OnePassTiles
    token_loss: TokenLoss


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def one_pass_loss(static: OnePass, inputs: Inputs, per_token: Any, shared: Any) -> Any:
    """The weighted losses of all devices' tokens, summed, and this one's statistics (not differentiable).

    Args:
      static: the head and the loss.
      inputs: the head's arrays.
      per_token: arrays `[N, ...]` that the loss reads; constants of differentiation.
      shared: arrays that it reads whole; constants of differentiation.
    """
    stats = evaluate(static.rule, inputs)[0]
    return _total(static, static.token_loss(stats, per_token, shared)), stats


def _total(static: OnePass, losses: jax.Array) -> jax.Array:
    """Summed here, so that its cotangent is one number for all devices: gradients are already summed over them."""
    axes = static.rule.columns.axes
    return axes.psum(vary(losses.sum(), axes.tokens), axes.tokens)


def _forward(static: OnePass, inputs: Any, per_token: Any, shared: Any) -> Any:
    inputs, needs = values_and_needs(inputs)
    is_primal = lambda x: hasattr(x, "perturbed")  # noqa: E731
    per_token, shared = jax.tree.map(lambda x: x.value, (per_token, shared), is_leaf=is_primal)
    tiles = static.tiles
    with note(f"one pass, {tiles}"):
        walk = Walk(static.rule, inputs, tiles.group, once=True, equal=True)
        begin = partial(_statistics_and_loss, walk, static, shared)
        N = inputs.targets.shape[0]
        zeros = jnp.zeros(N, jnp.float32)
        rule = static.rule
        of_logits = (zeros,) * 3 if rule.logit_stats else None
        results = zeros, (zeros, zeros if rule.entropy != "none" else None, of_logits)
        (losses, stats), *gradients = tokens_first(walk, needs, per_token, results, begin, tiles.chunks)
    return (_total(static, losses), stats), (to_save(gradients), inputs)


def _statistics_and_loss(walk: Walk, static: OnePass, shared: Any, chunk: Chunk, per_token: Any) -> Any:
    """A chunk's losses and statistics, its residuals and cotangents, and its products."""
    rule, empty = walk.rule, walk.empty_sums(chunk.targets.shape[0])

    def block(sums: Any, i: Any) -> Any:
        return walk.sums(chunk, walk.block(i), sums, empty, True)

    if walk.vocabulary.blocks == 1:
        sums, z = block(empty, 0)
        z = z[None]
    else:
        sums, z = lax.scan(block, empty, jnp.arange(walk.vocabulary.blocks, dtype=jnp.int32))
    stats, residuals = walk.finish(softmax.combine(sums, rule.columns.axes), chunk.targets)
    counted = lambda x: x if chunk.fresh is None else jnp.where(chunk.fresh, x, 0)  # noqa: E731
    losses, vjp = jax.vjp(lambda stats: counted(static.token_loss(stats, per_token, shared)), stats)
    return (losses, jax.tree.map(counted, stats)), residuals, of_tokens(vjp(jnp.ones_like(losses))[0], rule, None), z


def _backward(static: OnePass, left: Any, of_results: Any) -> Any:
    gradients, inputs = saved(left[0]), left[1]
    c = of_results[0]
    scale = lambda x: vary((x.astype(jnp.float32) * c).astype(x.dtype), varying(x))  # noqa: E731
    return cotangents_of(inputs, *jax.tree.map(scale, gradients)), None, None


one_pass_loss.defvjp(_forward, _backward, symbolic_zeros=True)
