"""Two passes whose first keeps its raw logits for the second, where the memory has room: f32
`[N', V]` of a device.

Their gradients then follow without the product of hidden states and kernel, and late products
multiply these.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxppo.head import statistics
from jaxppo.head.call import HeadCall, Inputs
from jaxppo.head.door import Local, enter
from jaxppo.head.gradient import in_rows, refuse_second_derivatives, token_stats
from jaxppo.head.head import TokenStats
from jaxppo.head.late import late_products
from jaxppo.head.order import Index, read, where_counts
from jaxppo.head.sizes import chunk_of_kept
from jaxppo.head.statistics import Numbers, Reduced
from jaxppo.head.walk import Work, gradient_of_raw, numbers_of_chunk, over_chunks, tile_sums
from jaxppo.sharding import ShardAxes, note


def stats_with_kept_logits(axes: ShardAxes, call: HeadCall, inputs: Inputs) -> TokenStats:
    """Per-shard: what `stats_of_inputs` returns.

    The logits wait for the gradients if the memory has room for them.
    """
    local = enter(call, inputs)
    chunk = chunk_of_kept(call, local)
    if chunk is None:
        stats = token_stats(call, local)
    else:
        stats = kept_stats(call, chunk, local)
    return in_rows(inputs.tokens.targets.shape, stats)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def kept_stats(call: HeadCall, chunk: int, local: Local) -> TokenStats:
    """The statistics of one device's tokens, f32[N] each.

    Nothing is kept if nobody asks for gradients.
    """
    return token_stats(call, local)


class ByToken(NamedTuple):
    """What the second walk reads of tokens beside their raw logits."""

    has_cotangent: jax.Array  # bool[N]
    peaks: Numbers
    dsums: Numbers  # the cotangents of sums


def _forward(call: HeadCall, chunk: int, local: Local) -> Any:
    local = jax.tree.map(refuse_second_derivatives, local)
    work = Work.of(call, local, chunk, parts=call.profile.parts)
    with note(f"kept logits, {chunk} tokens x {work.columns.width} columns"):
        reduced, kept = over_chunks(work, partial(numbers_of_chunk, work), lax.empty)
    # tokens that do not count have numbers, since 0 / 0 would stop jax_debug_nans
    reduced = statistics.over_devices(where_counts(work.counts, reduced, 1), call.axes)
    reduced = work.order.take_back(reduced)
    stats = statistics.stats_of_numbers(call.asked, reduced, local.tokens, call.vocab_size)
    return where_counts(local.counts, stats), (
        local,
        statistics.left_for_gradients(call.asked, reduced),
        kept,
    )


def _backward(
    call: HeadCall, chunk: int, saved: tuple[Local, Reduced, jax.Array], dstats: TokenStats
) -> tuple[Local]:
    local, reduced, kept = saved
    asked, has_cotangent, dsums = statistics.cotangents(
        call.asked, reduced, local.tokens, call.vocab_size, dstats
    )
    call = dataclasses.replace(call, asked=asked)
    if local.counts is not None:
        has_cotangent &= local.counts
    local, kept, dsums = jax.tree.map(refuse_second_derivatives, (local, kept, dsums))
    work = Work.of(call, local, chunk, parts=call.profile.parts)  # in the order of the first walk
    by_token = work.vary(work.order.put(ByToken(has_cotangent, reduced.peaks, dsums), work.rows))
    # tokens without a cotangent may hold NaN
    work = work._replace(features=where_counts(by_token.has_cotangent, work.features))
    d_raw = over_chunks(work, partial(_gradient_of_chunk, work, by_token, kept), lax.empty)
    return (late_products(work, local, lax.optimization_barrier(d_raw)),)


def _gradient_of_chunk(work: Work, by_token: ByToken, kept: jax.Array, i: Index) -> jax.Array:
    """The gradient of a chunk's raw logits, `[C, V]`."""
    tokens, by_token, raw = read((work.tokens, by_token, kept), i * work.chunk, work.chunk)
    sums_of_raw = partial(tile_sums, work, by_token.peaks, tokens)
    gradient = gradient_of_raw(work, raw, sums_of_raw, by_token.dsums)
    return work.vary(where_counts(by_token.has_cotangent, gradient))


kept_stats.defvjp(_forward, _backward)
