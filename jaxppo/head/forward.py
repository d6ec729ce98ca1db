"""Statistics of tokens, tile by tile."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxppo.head.plan import EIGHTHS
from jaxppo.head.softmax import Residuals, Sums, merge_in_pairs
from jaxppo.head.token_blocks import Slots, zero_unless
from jaxppo.head.types import HeadCall, Index, Inputs, Plan, TokenStats
from jaxppo.head.walk import Walk
from jaxppo.sharding import note


def statistics(call: HeadCall, plan: Plan, inputs: Inputs) -> tuple[TokenStats, Residuals]:
    """The statistics of each token and the residuals of the backward, f32[N] each, 0 where a token does not count."""
    walk = Walk(call, inputs, plan.forward, by_vocabulary=plan.forward_by_vocabulary)
    schedule = by_vocabulary if plan.forward_by_vocabulary else by_tokens
    eighths = jnp.arange(walk.vocabulary.eighths, dtype=jnp.int32) if walk.vocabulary.eighths else None
    with note(f"forward, {plan.forward}" + ("" if eighths is None else f", {EIGHTHS} parts whatever the tensor axis")):
        walk = walk.with_references()
        sums = (
            schedule(walk) if eighths is None else merge_in_pairs(lax.map(lambda p: schedule(walk.eighth(p)), eighths))
        )
    stats, residuals = walk.finish(walk.tokens.to_tokens(sums), inputs.targets, inputs.ids)
    # the residuals become 0 too: those of an empty sum are NaN, and jax_debug_nans would stop there
    return zero_unless(inputs.counts, (stats, residuals))


def by_vocabulary(walk: Walk) -> Sums:
    """The sums of all tokens in slot order. The outer loop is over blocks of columns, the inner one over tokens."""

    def of_block(i: Index, sums: Sums) -> Sums:
        block = walk.block(i)

        def of_slots(slots: Slots, sums: Sums) -> Sums:
            found, _ = walk.sums(walk.chunk(slots), block, walk.tokens.read(sums, slots))
            return walk.tokens.write(sums, found, slots)

        return walk.tokens.loop(of_slots, sums)

    return walk.vocabulary.over_blocks(of_block, walk.empty_sums(walk.tokens.slots_count))


def by_tokens(walk: Walk) -> Sums:
    """The sums of all tokens in slot order. The outer loop is over blocks of tokens, the inner one over columns."""

    def of_slots(slots: Slots, sums: Sums) -> Sums:
        chunk = walk.chunk(slots)
        empty = walk.empty_sums(walk.tokens.size)
        found = walk.vocabulary.over_blocks(lambda i, found: walk.sums(chunk, walk.block(i), found)[0], empty)
        return walk.tokens.write(sums, found, slots)

    return walk.tokens.loop(of_slots, walk.empty_sums(walk.tokens.slots_count))
