"""The gradient rules of the head, per device: statistics of tokens, and a loss of tokens reduced
to one number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.base.pytree import PyTree
from jaxppo.head import statistics
from jaxppo.head.blocks import SumsAt, second_pass
from jaxppo.head.call import HeadCall, Inputs
from jaxppo.head.door import Local, enter
from jaxppo.head.eighths import sweep_in_eighths
from jaxppo.head.groups import one_pass_in_groups
from jaxppo.head.head import TokenStats
from jaxppo.head.late import late_products
from jaxppo.head.order import Index, where_counts
from jaxppo.head.sizes import Sizes, block_of_second, chunk_of_forward, chunk_of_one_pass
from jaxppo.head.statistics import Reduced
from jaxppo.head.tile import LOW
from jaxppo.head.walk import Chunk, Work, one_pass, sweep, tile_sums
from jaxppo.sharding import ShardAxes, note, vary, varying

# (statistics f32[n], arrays [n, ...] of these tokens, `shared` arrays that are read whole) ->
# weighted losses f32[n], 0 where tokens do not count
WeightedLosses = Callable[..., jax.Array]
LossAndStats = tuple[jax.Array, TokenStats]  # the sum of losses, and statistics
QUARTERS = 4  # of the tokens: the second pass walks whole ones, so that few products are compiled


def stats_of_inputs(axes: ShardAxes, call: HeadCall, inputs: Inputs) -> TokenStats:
    """Per-shard: the statistics of the device's tokens, `[R, T]` each."""
    return in_rows(inputs.tokens.targets.shape, token_stats(call, enter(call, inputs)))


def in_rows(shape: tuple[int, ...], stats: PyTree) -> PyTree:
    """Arrays `[N, ...]` of tokens as `[R, T, ...]`."""
    return jax.tree.map(lambda array: array.reshape(*shape, *array.shape[1:]), stats)


def reduce_tokens(
    call: HeadCall, inputs: Inputs, token_loss: WeightedLosses, per_token: Any, shared: Any
) -> LossAndStats:
    """Per-shard: the sum of all devices' token losses, and this device's statistics without
    gradients.

    `token_loss` is hashable, and the loss of a token depends on that token alone. It reads the
    arrays `[R, T, ...]` of `per_token` by token and those of `shared` whole; no gradient flows to
    them.
    """
    local = enter(call, inputs)
    per_token = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), per_token)
    sizes = chunk_of_one_pass(call, local)
    reason = "one pass does not fit the memory"
    if call.deterministic:
        reason = "deterministic"
    elif any(
        array.dtype == jnp.float16 for array in jax.tree.leaves((local.features, local.parameters))
    ):
        sizes = None
        # one pass would round gradients to f16 before a loss scale multiplies them
        reason = "float16"
    if sizes is not None:
        total, stats = loss_in_one_pass(call, sizes, token_loss, local, per_token, shared)
    else:
        with note(f"two passes: {reason}"):
            stats = token_stats(call, local)
        total = over_tokens(call, token_loss(stats, per_token, shared=shared))
    return total, in_rows(inputs.tokens.targets.shape, lax.stop_gradient(stats))


def over_tokens(call: HeadCall, losses: jax.Array) -> jax.Array:
    """The sum over all devices, so that its cotangent is one number for all: gradients are
    already summed over them.
    """
    return call.axes.psum(vary(losses.sum(), call.axes.tokens), call.axes.tokens)


# Two passes: the statistics, whose gradients need the raw logits again.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_stats(call: HeadCall, local: Local) -> TokenStats:
    """The statistics of one device's tokens, f32[N] each."""
    return _stats_and_numbers(call, local)[0]


def _stats_and_numbers(call: HeadCall, local: Local) -> tuple[TokenStats, Reduced]:
    if call.deterministic and call.asked.entropy == "none":
        return _without_entropy(
            *_stats_and_numbers(_asking(call, "metric"), local)
        )  # the same sums, and so the same bits
    work = Work.of(call, local, chunk_of_forward(call, local))
    with note(
        f"forward, {work.chunk} tokens x {work.columns.width // max(1, call.eighths)} columns"
    ):
        if call.eighths:
            reduced = sweep_in_eighths(work)
        else:
            reduced = statistics.over_devices(sweep(work), call.axes)
    reduced = work.order.take_back(reduced)
    # 0 / 0 of tokens that do not count would stop jax_debug_nans
    reduced = reduced._replace(sums=where_counts(local.counts, reduced.sums, 1))
    stats = statistics.stats_of_numbers(call.asked, reduced, local.tokens, call.vocab_size)
    return where_counts(local.counts, stats), reduced


def _asking(call: HeadCall, entropy: Any) -> HeadCall:
    return dataclasses.replace(call, asked=dataclasses.replace(call.asked, entropy=entropy))


def _without_entropy(stats: TokenStats, reduced: Reduced) -> tuple[TokenStats, Reduced]:
    # A use of the entropy, without which the compiler would leave it out. It is NaN only where the
    # whole distribution is; with a nucleus the log-prob alone might be a number.
    log_probs = jnp.where(jnp.isnan(stats.entropy), jnp.nan, stats.log_probs)
    stats = dataclasses.replace(stats, log_probs=log_probs, entropy=None, entropy_mode="none")  # type: ignore[arg-type]
    return stats, reduced


def _token_stats_forward(call: HeadCall, local: Local) -> Any:
    stats, reduced = _stats_and_numbers(call, jax.tree.map(refuse_second_derivatives, local))
    return stats, (local, statistics.left_for_gradients(call.asked, reduced))


def _token_stats_backward(
    call: HeadCall, saved: tuple[Local, Reduced], dstats: TokenStats
) -> tuple[Local]:
    local, reduced = saved
    asked, has_cotangent, dsums = statistics.cotangents(
        call.asked, reduced, local.tokens, call.vocab_size, dstats
    )
    call = dataclasses.replace(call, asked=asked)
    if local.counts is not None:
        has_cotangent &= local.counts
    # hidden states may be NaN at tokens without a cotangent; a peak far above all logits makes
    # exponentials 0
    peaks = where_counts(has_cotangent, reduced.peaks, -LOW)
    return (
        gradients(
            call, local, has_cotangent, (peaks, where_counts(has_cotangent, dsums)), _sums_at
        ),
    )


def _sums_at(block: Work, start: Index, i: Index, chunk: Chunk, by_token: Any) -> Any:
    """The sums of a tile and their cotangents; see `SumsAt`."""
    peaks, dsums = by_token
    return partial(tile_sums, block, peaks, chunk.tokens), dsums


token_stats.defvjp(_token_stats_forward, _token_stats_backward)


def gradients(
    call: HeadCall, local: Local, has_cotangent: jax.Array, by_token: Any, sums_at: SumsAt
) -> Local:
    """The cotangents of `local` by a second pass. `has_cotangent` is bool[N].

    `by_token` are arrays `[N, ...]`, of which `sums_at` gets those of a chunk's tokens.
    """
    local, by_token = jax.tree.map(refuse_second_derivatives, (local, by_token))
    chunk, width = block_of_second(call, local)
    masked = local.counts is not None
    work = Work.of(call, local._replace(counts=has_cotangent), chunk, parts=QUARTERS, follow=masked)
    by_token = work.vary(work.order.put(by_token, work.rows))
    with note(f"gradients, {chunk} tokens x {width} columns"):
        return second_pass(work, local, width, by_token, sums_at)


@jax.custom_jvp
def refuse_second_derivatives(array: jax.Array) -> jax.Array:
    """The array, from which gradients follow that cannot be differentiated again: an attempt
    raises.
    """
    return array


@refuse_second_derivatives.defjvp
def _second_order(primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError(
        "second derivatives of a loss from hidden states: not implemented, since they would keep"
        " every block of logits; for a small vocabulary log_probs_from_logits has them in reverse"
        " mode, as jax.grad of a jax.grad"
    )


# One pass: the loss, whose gradients are computed with it.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def loss_in_one_pass(
    call: HeadCall,
    sizes: tuple[int, int],
    token_loss: WeightedLosses,
    local: Local,
    per_token: Any,
    shared: Any,
) -> LossAndStats:
    """The sum of all devices' losses, and this device's statistics (not differentiable), f32[N]
    each.
    """
    stats, _ = _stats_and_numbers(call, local)
    return over_tokens(call, token_loss(stats, per_token, shared=shared)), stats


def _one_pass_forward(
    call: HeadCall,
    sizes: tuple[int, int],
    token_loss: WeightedLosses,
    local: Local,
    per_token: Any,
    shared: Any,
) -> Any:
    local, per_token, shared = jax.tree.map(refuse_second_derivatives, (local, per_token, shared))
    chunk, group = sizes
    groups = -(-Sizes.of(call, local).N // group)
    work = Work.of(
        call, local, chunk, group=group, parts=call.profile.parts * groups, together=True
    )
    per_token = work.order.put(per_token, work.rows)

    loss = partial(token_loss, shared=shared)
    text = f"one pass, {chunk} tokens x {work.columns.width} columns"
    if groups > 1:
        text += f", groups of {group} tokens"
    with note(text):
        if groups > 1:
            results, cotangents = one_pass_in_groups(work, local, loss, per_token, group)
        else:
            results, d_raw = one_pass(work, loss, per_token)
            # without a barrier XLA for TPUs computes them in both products that read them
            d_raw = lax.optimization_barrier(d_raw)
            cotangents = late_products(work, local, d_raw)
    each, stats = work.order.take_back(results)
    return (over_tokens(call, each), stats), cotangents


def _one_pass_backward(
    call: HeadCall,
    sizes: tuple[int, int],
    token_loss: WeightedLosses,
    cotangents: Local,
    dresults: Any,
) -> Any:
    factor = dresults[0]

    def times_factor(array: jax.Array) -> jax.Array:
        return vary((array.astype(jnp.float32) * factor).astype(array.dtype), varying(array))

    return jax.tree.map(times_factor, cotangents), None, None


loss_in_one_pass.defvjp(_one_pass_forward, _one_pass_backward)
