"""The gradient rules of the head, per device: statistics of tokens, and a loss of tokens reduced to one number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import reductions
from jaxppo.head.border import Local, back, local, rounded, unless, whole_features
from jaxppo.head.call import HeadCall, Inputs
from jaxppo.head.head import TokenStats
from jaxppo.head.passes import one_pass, second, tile_sums
from jaxppo.head.plan import Plan, plan_of_one_pass, plan_of_second, plan_of_sweep
from jaxppo.head.reductions import Reduced
from jaxppo.head.sweep import Work, sweep
from jaxppo.head.tile import LOW, Features, Parameters
from jaxppo.sharding import ShardAxes, note, vary, varying

# (statistics f32[n], arrays [n, ...] of these tokens, arrays that are read whole) -> weighted losses f32[n]
TokenLoss = Callable[[TokenStats, Any, Any], jax.Array]
Sum = tuple[jax.Array, TokenStats]  # of losses, and statistics


def stats_of_tokens(axes: ShardAxes, call: HeadCall, inputs: Inputs) -> TokenStats:
    """Per-shard: the statistics of the device's tokens, `[R, T]` each."""
    return in_rows(inputs.tokens.targets.shape, statistics(call, local(call, inputs)))


def in_rows(shape: tuple[int, ...], stats: Any) -> Any:
    """Arrays `[N, ...]` of tokens as `[R, T, ...]`."""
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), stats)


def reduce_tokens(call: HeadCall, inputs: Inputs, token_loss: TokenLoss, per_token: Any, shared: Any) -> Sum:
    """Per-shard: the sum of all devices' token losses, and this device's statistics without gradients.

    `token_loss` is hashable, and the loss of a token depends on that token alone. It reads the arrays `[R, T, ...]` of
    `per_token` by token and those of `shared` whole; no gradient flows to them.
    """
    given = local(call, inputs)
    per_token = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), per_token)
    # one pass would round gradients to f16 before a loss scale multiplies them; a bias and its gradient are f32 here
    narrow = any(x.dtype == jnp.float16 for x in jax.tree.leaves((given.features, given.parameters)))
    plan = None if narrow else plan_of_one_pass(call, given)
    if plan is not None:
        total, stats = losses(call, plan, token_loss, given, per_token, shared)
    else:
        reason = "float16" if narrow else "deterministic" if call.deterministic else "one pass does not fit the memory"
        with note(f"two passes: {reason}"):
            stats = statistics(call, given)
        total = over_tokens(call, token_loss(stats, per_token, shared))
    return total, in_rows(inputs.tokens.targets.shape, lax.stop_gradient(stats))


def over_tokens(call: HeadCall, losses: jax.Array) -> jax.Array:
    """The sum over all devices, so that its cotangent is one number for all: gradients are already summed over them."""
    return call.axes.psum(vary(losses.sum(), call.axes.tokens), call.axes.tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def statistics(call: HeadCall, given: Local) -> TokenStats:
    """The statistics of one device's tokens, f32[N] each."""
    return _statistics(call, given)[0]


def _statistics(call: HeadCall, given: Local) -> tuple[TokenStats, Reduced]:
    plan, asked = plan_of_sweep(call, given), call.asked
    if call.deterministic and asked.entropy == "none":  # the same sums, and so bits, as with an entropy
        call = dataclasses.replace(call, asked=dataclasses.replace(asked, entropy="metric"))
    work = Work.of(call, plan, given)
    with note(f"forward, {plan}"):
        found = work.order.take_back(sweep(work))
    found = jax.tree.map(lambda x: vary(x, varying(given.tokens.targets)), found)  # they differ where targets do
    # log 0, of tokens that do not count, would stop jax_debug_nans
    found = found._replace(peaks=unless(given.counts, found.peaks), sums=unless(given.counts, found.sums, 1))
    stats = reductions.finish(call.asked, found, given.tokens, call.vocab_size)
    if call.asked != asked:  # a use that changes nothing, without which the compiler would leave the entropy out
        log_probs = jnp.where(jnp.isnan(stats.entropy), jnp.nan, stats.log_probs)
        without: dict[str, Any] = {"entropy": None, "entropy_mode": "none"}
        stats = dataclasses.replace(stats, log_probs=log_probs, **without)
    return unless(given.counts, stats), found


def _statistics_forward(call: HeadCall, given: Local) -> Any:
    stats, found = _statistics(call, jax.tree.map(once, given))
    return stats, (given, reductions.left_for_gradients(call.asked, found))


def _statistics_backward(call: HeadCall, saved: tuple[Local, Reduced], of_stats: TokenStats) -> tuple[Local]:
    given, found = saved
    asked, counts, of_sums = reductions.cotangents(call.asked, found, given.tokens, call.vocab_size, of_stats)
    counts = counts if given.counts is None else counts & given.counts

    def sums_at(work: Work, _: Any) -> Any:
        return lambda _, tokens, columns, part: (partial(tile_sums, work, part[0], tokens, columns), part[1])

    # tokens without a cotangent may hold NaN; a high peak makes exponentials 0
    known = unless(counts, found.peaks, -LOW), unless(counts, of_sums)
    return (second_pass(dataclasses.replace(call, asked=asked), given, counts, known, sums_at),)


def second_pass(call: HeadCall, given: Local, counts: jax.Array, known: Any, sums_at: Callable[..., Any]) -> Local:
    """The cotangents of `given`. `counts`, bool[N], are the tokens that have one; see `second` for the rest."""
    given, known = jax.tree.map(once, (given, known))
    work = Work.of(call, plan_of_second(call, given), given)
    work = work._replace(features=work.vary(work.features))
    counts, known = work.vary(work.order.put((counts, known), work.size))
    with note(f"gradients, {work.plan}"):
        found = second(work, counts, known, sums_at)
    return cotangents(work, *found)


def cotangents(work: Work, dfeatures: Features, dparameters: Parameters) -> Local:
    """What a rule returns for `Local`; gradients of features that are in order go back to their places."""
    call, given, features = work.call, work.given, []
    order = work.order if work.places is None else work.order._replace(inverse=None)
    for x, g in zip(given.features, order.take_back(dfeatures), strict=True):
        whole = partial(whole_features, call, work.axes)
        features.append(
            rounded(back(whole, x.shape, varying(x), g) if call.sequence_parallel else g.reshape(x.shape), x.dtype)
        )
    return Local(tuple(features), dparameters, None, None)


@jax.custom_jvp
def once(x: jax.Array) -> jax.Array:
    """x, from which gradients follow that cannot be differentiated again: an attempt raises NotImplementedError."""
    return x


@once.defjvp
def _second_order(primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError(
        "second derivatives of a loss from hidden states: not implemented, since they would keep every block of "
        "logits; log_probs_from_logits has them"
    )


statistics.defvjp(_statistics_forward, _statistics_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def losses(call: HeadCall, plan: Plan, token_loss: TokenLoss, given: Local, per_token: Any, shared: Any) -> Sum:
    """The sum of all devices' losses, and this device's statistics (not differentiable), f32[N] each."""
    stats = _statistics(call, given)[0]
    return over_tokens(call, token_loss(stats, per_token, shared)), stats


def _losses_forward(
    call: HeadCall, plan: Plan, token_loss: TokenLoss, given: Local, per_token: Any, shared: Any
) -> Any:
    given, per_token, shared = jax.tree.map(once, (given, per_token, shared))
    work = Work.of(call, plan, given)
    with note(f"one pass, {plan}"):
        results, *found = one_pass(work, lambda stats, of: token_loss(stats, of, shared), per_token)
    each, stats = work.order.take_back(results)
    return (over_tokens(call, each), stats), cotangents(work, *found)


def _losses_backward(call: HeadCall, plan: Plan, token_loss: TokenLoss, found: Local, of_results: Any) -> Any:
    c = of_results[0]
    scaled = jax.tree.map(lambda x: vary((x.astype(jnp.float32) * c).astype(x.dtype), varying(x)), found)
    return scaled, None, None


losses.defvjp(_losses_forward, _losses_backward)
