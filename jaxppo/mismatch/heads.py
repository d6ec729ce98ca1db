"""Two heads compared at each token without gradients: divergences, the likeliest token, and what rounding explains."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.border import Index, unless
from jaxppo.head.call import Asked, Inputs
from jaxppo.head.divergence import (
    DivergenceCall,
    Known,
    exact_log_p,
    local_pair,
    maximum_and_log_s,
    over_tiles,
    sums_of_terms,
    works_of,
)
from jaxppo.head.reductions import Columns
from jaxppo.head.sweep import Work, loop, sweep
from jaxppo.head.tile import LOW
from jaxppo.sharding import vary

F32_UNIT = 2.0**-24


class Comparison(NamedTuple):
    """Student p compared with teacher q at each token: KL(p || q), KL(q || p), and more; f32 `[R, T]` each."""

    reverse_kl: jax.Array
    forward_kl: jax.Array
    total_variation: jax.Array
    same_top: jax.Array  # 1 if the same token is likeliest in both, the first of equally likely ones; else 0
    logit_error: jax.Array  # the scale of the error that rounding makes in a logit, see `_logit_error`


def comparison_of_tokens(call: DivergenceCall, unit: float, inputs: Inputs, teacher: Inputs) -> Comparison:
    """Per-shard: each token's comparison, without gradients. `unit` is the relative rounding of both heads' inputs."""
    call, *pair = local_pair(call, inputs, teacher)
    student, teacher_call = (dataclasses.replace(c, asked=Asked(top_k=1)) for c in (call.student, call.teacher))
    call = DivergenceCall(student, teacher_call, ("reverse_kl", "forward_kl", "total_variation"), 0.5)
    one, two = works_of(call, *pair)
    found, axes = [sweep(work) for work in (one, two)], one.call.axes
    known: Any = one.vary(tuple(map(maximum_and_log_s, found)))

    def add(totals: Any, columns: Columns, z: jax.Array, teacher_z: jax.Array, known: Known) -> Any:
        sums, magnitudes = totals
        logs = map(exact_log_p, (z, teacher_z), known)
        largest = tuple(jnp.where((x <= LOW / 2) | ~jnp.isfinite(x), 0, jnp.abs(x)).max(1) for x in (z, teacher_z))
        sums = jax.tree.map(jnp.add, sums, sums_of_terms(call, columns, *logs))
        return sums, jax.tree.map(jnp.maximum, magnitudes, largest)

    zeros = jnp.zeros(one.size, jnp.float32)
    sums, magnitudes = over_tiles(one, two, known, add, one.vary(((zeros,) * 3, (zeros,) * 2)))
    sums, magnitudes = (vary(jnp.stack(x), axes.tensor) for x in (sums, magnitudes))
    if axes.tensor:
        sums, magnitudes = lax.psum(sums, axes.tensor), lax.pmax(magnitudes, axes.tensor)
    ids, its = (x.top[1] for x in found if x.top is not None)
    same = (ids == its)[:, 0].astype(jnp.float32)
    sums, same, magnitudes = one.order.take_back((sums.T, same, magnitudes.T))
    errors = (_logit_error(w, x, unit, m) for w, x, m in zip((one, two), (inputs, teacher), magnitudes.T, strict=True))
    reverse, forward, variation = sums.T
    result = Comparison(reverse, forward, variation, same, jnp.maximum(*errors))
    return jax.tree.map(lambda x: unless(pair[0].counts, x).reshape(inputs.hidden.shape[0], -1), result)


def _logit_error(work: Work, inputs: Inputs, unit: float, magnitude: jax.Array) -> jax.Array:
    """The scale s, f32[N], of the error e of any logit of a token: P(|e| > t s) <= 2 exp(-t^2 / 2).

    e is a sum of independent and bounded errors of mean 0. They come from two roundings of each entry of the hidden
    state h and of the kernel's column w, each by u (`unit`) relative, and from the f32 sum of H terms. h^2 and w^2 are
    squares by entry. Since sum_k h_k^2 w_k^2 <= |h^2| |w^2|:

        s^2 = (4 u^2 |h^2| |w^2| + (4 * 2^-24)^2 |h|^2 |w|^2) (scale / temperature)^2 + 2 v^2 max |z|^2

    w is the column with the largest norm. An adapter adds a term with its own features and columns. v is 2^-8 if the
    head rounds its logits to bf16, else 2^-24.
    """
    call, counts = work.call, work.given.counts
    terms = len(work.features) - (inputs.bias is not None)  # the kernel's, and an adapter's
    names = call.axes.tensor

    def largest(i: Index, norms: Any) -> Any:
        _, parameters, columns = work.block(i, work.width)
        valid = True if columns.valid is None else columns.valid
        found = [_norms(x, 1 - call.v_dim, valid) for x in parameters[:terms]]
        return work.vary(jax.tree.map(lambda a, b: jnp.maximum(a, b.max()), norms, found))

    norms = loop(work.blocks, largest, work.vary([(jnp.float32(0), jnp.float32(0))] * terms))
    of_columns = jnp.stack([jnp.stack(pair) for pair in norms])
    of_columns = lax.pmax(vary(of_columns, names), names) if names else of_columns
    rows = work.order.take_back(work.features[:terms])
    total = jnp.zeros_like(magnitude)
    for x, (squares, fourths), weight in zip(rows, of_columns, call.scales, strict=False):
        of_rows = jnp.stack(_norms(x, 1, True if counts is None else counts))
        # rows are the same on all devices of a tensor axis, but their type does not say so
        of_rows = lax.pmax(of_rows, names) if names else of_rows
        of_f32 = (4 * F32_UNIT) ** 2 * of_rows[0] * squares
        total += weight**2 * (4 * unit**2 * jnp.sqrt(of_rows[1] * fourths) + of_f32)
    total *= call.transform.scale**2
    if work.given.tokens.temperature is not None:
        total /= work.given.tokens.temperature**2
    of_logits = 2.0**-8 if call.transform.dtype == "bfloat16" else F32_UNIT
    return jnp.sqrt(total + 2 * (of_logits * magnitude) ** 2)


def _norms(x: jax.Array, dim: int, counts: jax.Array | bool) -> tuple[jax.Array, jax.Array]:
    """The sums along a dimension of squares and of fourth powers, 0 where `counts` is False."""
    square = jnp.square(x.astype(jnp.float32))
    sums = square.sum(axis=dim), jnp.square(square).sum(axis=dim)
    return jnp.where(counts, sums[0], 0), jnp.where(counts, sums[1], 0)
