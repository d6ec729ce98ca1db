"""Compares two heads at each token over the whole vocabulary, tile by tile; there are no gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.divergence import (
    DivergenceCall,
    PairBlock,
    PairChunk,
    PairWalk,
    log_sums,
    over_tiles,
    pair_on_device,
    terms,
)
from jaxppo.head.likeliest import merge_top, no_top, top_of_block, top_over_shards
from jaxppo.head.plan import plan_of
from jaxppo.head.token_blocks import Slots
from jaxppo.head.types import HeadCall, Index, Inputs
from jaxppo.head.walk import Walk, whole_features
from jaxppo.sharding import vary

F32_UNIT = 2.0**-24


class Comparison(NamedTuple):
    """Student p compared with teacher q at each token: KL(p || q), KL(q || p), and more; f32 `[R, T]` each."""

    reverse_kl: jax.Array
    forward_kl: jax.Array
    total_variation: jax.Array
    same_top: jax.Array
    """1 if the same token is likeliest in both, else 0. Among equally likely tokens the first counts."""
    logit_error: jax.Array
    """The scale of the error that rounding makes in a logit, see `_logit_error`."""


def comparison_of_tokens(call: DivergenceCall, unit: float, inputs: Inputs, teacher: Inputs) -> Comparison:
    """Per-shard: the comparison at each of the device's tokens; 0 at tokens that do not count.

    Args:
      call: the two heads; the field `divergences` is not used.
      unit: the relative rounding of hidden states and kernels, such as 2^-8 for bfloat16.
      inputs: the student's arrays.
      teacher: the teacher's arrays.
    """
    call, (inputs, teacher), shape = pair_on_device(call, inputs, teacher)
    plan = plan_of(call.student, inputs)
    walk = PairWalk(call, inputs, teacher, plan.forward, by_vocabulary=plan.forward_by_vocabulary)
    tokens, by_vocabulary = walk.tokens, plan.forward_by_vocabulary
    known = log_sums(walk, by_vocabulary)

    def add(chunk: PairChunk, block: PairBlock, slots: Slots, found: Any) -> Any:
        sums, tops, magnitudes = found
        _, z, teacher_z = walk.logits(chunk, block)
        log_p, log_q = walk.log_probs(z, teacher_z, block.student.valid, tokens.read(known, slots))
        each = [terms(kind, 0.5, log_p, log_q)[0] for kind in ("reverse_kl", "forward_kl")]
        each.append(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)) / 2)
        valid = block.student.valid
        sums = [total + jnp.where(valid, x, 0).sum(axis=1) for total, x in zip(sums, each, strict=True)]
        both = z, teacher_z
        tops = [merge_top(top, top_of_block(x, block.student.column_ids, 1)) for top, x in zip(tops, both, strict=True)]
        largest = [jnp.where(jnp.isfinite(x), jnp.abs(x), 0).max(axis=1) for x in both]
        return walk.vary((sums, tops, jax.tree.map(jnp.maximum, magnitudes, largest)))

    zeros, nothing = walk.zeros(tokens.slots_count), no_top(tokens.slots_count, 1)
    start = walk.vary(([zeros] * 3, [nothing] * 2, [zeros] * 2))
    sums, tops, magnitudes = over_tiles(walk, by_vocabulary, add, start)
    axes = call.student.axes
    sums, magnitudes = (vary(jnp.stack(x), axes.tensor) for x in (sums, magnitudes))
    if axes.tensor:
        sums, magnitudes = lax.psum(sums, axes.tensor), lax.pmax(magnitudes, axes.tensor)
        tops = [top_over_shards(top, axes) for top in tops]
    same = (tops[0][1] == tops[1][1])[:, 0].astype(jnp.float32)
    *sums, same, own, other = tokens.to_tokens((*sums, same, *magnitudes))
    errors = _logit_error(call.student, walk, unit, own), _logit_error(call.teacher, walk.teacher, unit, other)
    found = Comparison(sums[0], sums[1], sums[2], same, jnp.maximum(*errors))
    counts = inputs.counts
    return jax.tree.map(lambda x: (x if counts is None else jnp.where(counts, x, 0)).reshape(shape), found)


def _logit_error(call: HeadCall, walk: Walk, unit: float, magnitude: jax.Array) -> jax.Array:
    """The scale s, f32[N], of the error e of any logit of a token: P(|e| > t s) <= 2 exp(-t^2 / 2).

    e is a sum of independent and bounded errors of mean 0. They come from two roundings of each entry of the hidden
    state h and of the kernel's column w, each by u (`unit`) relative, and from the f32 sum of H terms. h^2 and w^2 are
    squares by entry. Since sum_k h_k^2 w_k^2 <= |h^2| |w^2|:

        s^2 = (4 u^2 |h^2| |w^2| + (4 * 2^-24)^2 |h|^2 |w|^2) (scale / temperature)^2 + 2 v^2 max |z|^2

    w is the column with the largest norm. An adapter adds a term with its own features and columns. v is 2^-8 if the
    head rounds its logits to bf16, else 2^-24.
    """

    def largest(i: Index, norms: Any) -> Any:
        block = walk.vocabulary.block(i)
        parts = block.parameters.kernel, block.parameters.lora_b
        valid = block.valid if block.valid is True else block.valid[0]
        found = [_norms(x, 1 - call.v_dim, valid) for x in parts if x is not None]
        return walk.vary(jax.tree.map(lambda a, b: jnp.maximum(a, b.max()), norms, found))

    features = [x for x in whole_features(call, walk.inputs.features) if x is not None]
    norms = walk.vocabulary.over_blocks(largest, walk.vary([(jnp.float32(0), jnp.float32(0))] * len(features)))
    names, counts = call.axes.tensor, walk.inputs.counts
    of_columns = jnp.stack([jnp.stack(pair) for pair in norms])
    of_columns = lax.pmax(vary(of_columns, names), names) if names else of_columns
    total = jnp.zeros_like(magnitude)
    weights = (1.0, call.lora_scale)[: len(features)]  # of the kernel's term and of an adapter's
    for x, (squares, fourths), weight in zip(features, of_columns, weights, strict=True):
        of_rows = jnp.stack(_norms(x, 1, True if counts is None else counts))
        # gathered rows are the same on all devices, but their type does not say so
        of_rows = lax.pmax(of_rows, names) if call.sequence_parallel else of_rows
        of_f32 = (4 * F32_UNIT) ** 2 * of_rows[0] * squares
        total += weight**2 * (4 * unit**2 * jnp.sqrt(of_rows[1] * fourths) + of_f32)
    total *= call.transform.scale**2
    if walk.inputs.temperature is not None:
        total /= walk.inputs.temperature**2
    of_logits = 2.0**-8 if call.transform.dtype == "bfloat16" else F32_UNIT
    return jnp.sqrt(total + 2 * (of_logits * magnitude) ** 2)


def _norms(x: jax.Array, dim: int, counts: jax.Array | bool) -> tuple[jax.Array, jax.Array]:
    """The sums along a dimension of squares and of fourth powers, 0 where `counts` is False."""
    square = jnp.square(x.astype(jnp.float32))
    sums = square.sum(axis=dim), jnp.square(square).sum(axis=dim)
    return jnp.where(counts, sums[0], 0), jnp.where(counts, sums[1], 0)
