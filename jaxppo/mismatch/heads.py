"""Two heads compared at each token without gradients: divergences, the likeliest token, and what
rounding explains.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.call import Asked, Inputs
from jaxppo.head.divergence import (
    DivergenceCall,
    Softmaxes,
    compared,
    exact_log_p,
    local_pair,
    softmax_of,
    sums_of_terms,
    works_of,
)
from jaxppo.head.door import Local
from jaxppo.head.order import where_counts
from jaxppo.head.quantized import QuantizedArray
from jaxppo.head.statistics import over_devices
from jaxppo.head.tile import LOW
from jaxppo.head.walk import Work, sweep
from jaxppo.sharding import vary

F32_UNIT = 2.0**-24


class Comparison(NamedTuple):
    """Student p compared with teacher q at each token: KL(p || q), KL(q || p), and more; f32
    `[R, T]` each.
    """

    reverse_kl: jax.Array
    forward_kl: jax.Array
    total_variation: jax.Array
    # 1 if the same token is likeliest in both, the first of equally likely ones; else 0
    same_top: jax.Array
    # the scale of the error that rounding makes in a logit, see `_logit_error`
    logit_error: jax.Array


def comparison_of_tokens(
    call: DivergenceCall, unit: float, inputs: Inputs, teacher: Inputs
) -> Comparison:
    """Per-shard: each token's comparison, without gradients.

    `unit` is the relative rounding of both heads' inputs.
    """
    call, local, teacher_local = local_pair(call, inputs, teacher)
    student_call = dataclasses.replace(call.student, asked=Asked(top_k=1))
    teacher_call = dataclasses.replace(call.teacher, asked=Asked(top_k=1))
    call = DivergenceCall(
        student_call, teacher_call, ("reverse_kl", "forward_kl", "total_variation"), 0.5
    )
    one, two = works_of(call, local, teacher_local)
    axes = student_call.axes
    of_student = over_devices(sweep(one), axes)
    of_teacher = over_devices(sweep(two), axes)
    softmaxes: Softmaxes = one.vary((softmax_of(of_student), softmax_of(of_teacher)))

    def of_logits(
        z: jax.Array, teacher_z: jax.Array, softmaxes: Softmaxes
    ) -> tuple[jax.Array, jax.Array]:
        log_p = exact_log_p(z, softmaxes[0])
        log_q = exact_log_p(teacher_z, softmaxes[1])
        sums = jnp.stack(sums_of_terms(call, one.columns, log_p, log_q), axis=1)
        return sums, jnp.stack([_largest(z), _largest(teacher_z)], axis=1)

    sums, magnitudes = compared(one, two, softmaxes, of_logits)  # f32[N', 3] and f32[N', 2]
    if axes.tensor:
        sums = lax.psum(sums, axes.tensor)
        magnitudes = lax.pmax(magnitudes, axes.tensor)
    assert of_student.top is not None
    assert of_teacher.top is not None
    same_top = (of_student.top[1] == of_teacher.top[1])[:, 0].astype(jnp.float32)
    sums, same_top, magnitudes = one.order.take_back((sums, same_top, magnitudes))
    student_error = _logit_error(one, local, inputs.bias is not None, unit, magnitudes[:, 0])
    teacher_error = _logit_error(
        two, teacher_local, teacher.bias is not None, unit, magnitudes[:, 1]
    )
    error = jnp.maximum(student_error, teacher_error)
    comparison = Comparison(sums[:, 0], sums[:, 1], sums[:, 2], same_top, error)
    rows = inputs.hidden.shape[0]
    return jax.tree.map(
        lambda array: where_counts(local.counts, array).reshape(rows, -1), comparison
    )


def _largest(z: jax.Array) -> jax.Array:
    """The largest magnitude of a token's finite logits."""
    excluded = (z <= LOW / 2) | ~jnp.isfinite(z)
    return jnp.where(excluded, 0, jnp.abs(z)).max(1)


def _logit_error(
    work: Work, local: Local, has_bias: bool, unit: float, magnitude: jax.Array
) -> jax.Array:
    """The scale s, f32[N], of the error e of any logit of a token: P(|e| > t s) <= 2 exp(-t^2 / 2).

    e is a sum of independent and bounded errors of mean 0. They come from two roundings of each
    entry of the hidden state h and of the kernel's column w, each by u (`unit`) relative, and from
    the f32 sum of H terms. h^2 and w^2 are squares by entry. Since sum_k h_k^2 w_k^2 <= |h^2|
    |w^2|:

        s^2 = (4 u^2 |h^2| |w^2| + (4 * 2^-24)^2 |h|^2 |w|^2) (scale / temperature)^2 + 2 v^2 max |z|^2

    w is the column with the largest norm. An adapter adds a term with its own features and columns.
    v is 2^-8 if the head rounds its logits to bf16, else 2^-24.
    """
    call = work.call
    terms = len(work.features) - has_bias  # the kernel's, and an adapter's
    names = call.axes.tensor
    counts: jax.Array | bool = True
    if local.counts is not None:
        counts = local.counts
    rows = work.order.take_back(work.features[:terms])
    total = jnp.zeros_like(magnitude)
    for k, x in enumerate(rows):
        of_columns = jnp.stack(
            [norm.max() for norm in _norms(work.parameters[k], 1 - call.v_dim, True)]
        )
        of_rows = jnp.stack(_norms(x, 1, counts))  # f32[2, N]
        if names:
            # rows are the same on all devices of a tensor axis, but their type does not say so
            of_columns = lax.pmax(vary(of_columns, names), names)
            of_rows = lax.pmax(vary(of_rows, names), names)
        squares, fourths = of_columns
        of_f32 = (4 * F32_UNIT) ** 2 * of_rows[0] * squares
        of_inputs = 4 * unit**2 * jnp.sqrt(of_rows[1] * fourths)
        total += call.scales[k] ** 2 * (of_inputs + of_f32)
    total *= call.transform.scale**2
    if local.tokens.temperature is not None:
        total /= local.tokens.temperature**2
    of_logits = F32_UNIT
    if call.transform.dtype == "bfloat16":
        of_logits = 2.0**-8
    return jnp.sqrt(total + 2 * (of_logits * magnitude) ** 2)


def _norms(x: Any, dim: int, counts: jax.Array | bool) -> tuple[jax.Array, jax.Array]:
    """The sums along a dimension of squares and of fourth powers, 0 where `counts` is False."""
    if isinstance(x, QuantizedArray):
        x = x.dequantized(jnp.float32)
    square = jnp.square(x.astype(jnp.float32))
    sums = square.sum(axis=dim), jnp.square(square).sum(axis=dim)
    return jnp.where(counts, sums[0], 0), jnp.where(counts, sums[1], 0)
