"""One pass in groups of chunks, for so many tokens that the gradients of all their logits do not
fit the memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import statistics
from jaxppo.head.door import Local
from jaxppo.head.head import TokenStats
from jaxppo.head.late import (
    cut_dim,
    feature_cotangent,
    feature_term,
    of_written,
    sum_features,
    sum_parameter,
)
from jaxppo.head.order import Index, Order, read, write
from jaxppo.head.quantized import QuantizedArray
from jaxppo.head.sums import stored
from jaxppo.head.tile import Parameters, parameter_gradient
from jaxppo.head.walk import ChunkLoss, Work, one_pass
from jaxppo.sharding import vary, varying


def one_pass_in_groups(
    work: Work, local: Local, loss: ChunkLoss, per_token: Any, group: int
) -> tuple[tuple[jax.Array, TokenStats], Local]:
    """What `one_pass` returns of all tokens, and the cotangents of `local`.

    The gradients of parameters of all groups add up in f32, and are summed over devices behind the
    last group.
    """
    call = work.call

    def one_group(g: Index, carry: Any) -> Any:
        results, dfeatures, totals = carry
        start = g * group
        group_work = _group_of(work, start, group)
        group_results, d_raw = one_pass(group_work, loss, read(per_token, start, group))
        # without a barrier XLA for TPUs computes them in both products that read them
        d_raw = lax.optimization_barrier(d_raw)
        gradients, totals = _products_of_group(group_work, local, totals, d_raw)
        return write(results, group_results, start), write(dfeatures, gradients, start), totals

    stats = statistics.zero_stats(call.asked, work.tokens, work.rows)
    results = work.vary((stats.log_probs, stats), results=True)
    dfeatures = tuple(_zero_dfeatures(work, k, primal) for k, primal in enumerate(local.features))
    totals = work.vary(tuple(map(_zero_total, work.parameters, local.parameters)))
    turns = -(-work.turns * work.chunk // group)
    if not isinstance(turns, int):
        # at most all groups, which tells `audit` how many turns there may be
        turns = jnp.minimum(turns, work.rows // group)
    results, dfeatures, totals = lax.fori_loop(0, turns, one_group, (results, dfeatures, totals))
    feature_cotangents = []
    for total, primal in zip(dfeatures, local.features, strict=True):
        feature_cotangents.append(feature_cotangent(work, total, primal))
    parameter_cotangents = []
    for k, primal in enumerate(local.parameters):
        parameter_cotangents.append(_total_cotangent(work, k, totals[k], primal))
    return results, Local(tuple(feature_cotangents), tuple(parameter_cotangents), None, None)


def _products_of_group(
    group_work: Work, local: Local, totals: Parameters, d_raw: jax.Array
) -> tuple[Any, Any]:
    """The gradients of a group's features, and the totals of those of parameters with the
    group's added.
    """
    gradients = []
    for k, primal in enumerate(local.features):
        gradients.append(
            sum_features(group_work, partial(feature_term, group_work, k, d_raw), primal)
        )
    added = []
    for k, total in enumerate(totals):
        if total is not None:
            total = of_written(group_work, partial(_add, group_work, k, total, d_raw))
        added.append(total)
    return tuple(gradients), tuple(added)


def _group_of(work: Work, start: Index, group: int) -> Work:
    """The work on the tokens of a group."""
    chunks = group // work.chunk
    chunks_of_part = min(work.chunks_of_part, chunks)
    turns = work.turns
    if not isinstance(turns, int):
        left = jnp.maximum(turns - start // work.chunk, 0)
        # at most all chunks, which tells `audit` how many turns there may be
        turns = jnp.minimum(-(-left // chunks_of_part) * chunks_of_part, chunks)
    else:
        turns = chunks
    counts, tokens, features = read((work.counts, work.tokens, work.features), start, group)
    return work._replace(
        rows=group,
        turns=turns,
        chunks_of_part=chunks_of_part,
        order=Order(group),
        counts=counts,
        tokens=tokens,
        features=features,
    )


def _add(work: Work, k: int, total: jax.Array, d_raw: jax.Array, rows: int) -> jax.Array:
    """The total with a group's gradient, in the product's own branch: XLA for GPUs adds as it
    multiplies.
    """
    features = work.features[k]
    if isinstance(features, QuantizedArray):
        features = features.dequantized(work.dtype)
    return total + parameter_gradient(work.call, k, d_raw[:rows], features[:rows])


def _zero_total(parameter: Any, primal: Any) -> jax.Array | None:
    """Zeros, in f32, for the gradients of a whole parameter.

    A kernel that is quantised already has none.
    """
    if isinstance(primal, QuantizedArray):
        return None
    return jnp.zeros(parameter.shape, jnp.float32)


def _total_cotangent(work: Work, k: int, total: jax.Array | None, primal: Any) -> jax.Array | None:
    """The gradient of parameter k from the total of all groups, summed over devices."""
    if total is None:
        return None
    dim = cut_dim(work, k)
    return sum_parameter(work, k, partial(stored, total, dim), primal, total.shape[dim])


def _zero_dfeatures(work: Work, k: int, primal: jax.Array) -> jax.Array:
    """Zeros `[N', f]` for what `sum_features` returns of all groups."""
    if work.call.sequence_parallel:
        return work.vary(jnp.zeros(work.features[k].shape, jnp.float32))
    return vary(jnp.zeros(work.features[k].shape, primal.dtype), varying(primal))
