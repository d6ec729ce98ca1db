"""Two heads at each token, tile by tile over both vocabularies at once: divergences with
gradients, comparisons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo.base.kl import k3, magnitude
from jaxppo.head.call import HeadCall, Inputs
from jaxppo.head.columns import Columns
from jaxppo.head.door import Local, all_positions, enter, vary_with_f32_sum
from jaxppo.head.gradient import gradients, refuse_second_derivatives
from jaxppo.head.order import Index, Tree, read, where_counts
from jaxppo.head.sizes import block_of_second, chunk_of_forward
from jaxppo.head.statistics import Reduced, over_devices
from jaxppo.head.tile import LOW, raw_logits
from jaxppo.head.walk import Chunk, Work, over_chunks, sweep
from jaxppo.sharding import ShardAxes, vary, varying

Softmax = tuple[jax.Array, jax.Array]  # m and log s of tokens, f32[N]
Softmaxes = tuple[Softmax, Softmax]  # of student and teacher


@dataclasses.dataclass(frozen=True)
class DivergenceCall:
    """The static part of a call: two heads whose blocks hold the same columns, and the
    divergences, see `terms_of`.
    """

    student: HeadCall
    teacher: HeadCall
    divergences: tuple[str, ...]
    beta: float


def terms_of(
    divergence: str, beta: float, log_p: Float[Array, "..."], log_q: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The term of each column in the divergence of student p and teacher q; no term is below 0.

    A column's term of KL(a || b) is a log(a / b) - a + b: the part -a + b is 0 in the sum over all
    columns, and keeps the rounding error of a term as small as the term. "cross_entropy" is -q log
    p. Any other name means beta KL(q || mixture) + (1 - beta) KL(p || mixture), with the mixture
    beta q + (1 - beta) p.
    """
    p = jnp.exp(log_p)
    q = jnp.exp(log_q)
    if divergence == "reverse_kl":
        return _kl_term(p, log_p, q, log_q)
    if divergence == "cross_entropy":
        return jnp.where(q == 0, 0, -q * log_p)  # a weight of NaN stays NaN
    if divergence == "total_variation":
        # max(p - q, 0): right also where q has columns that p lacks
        return (magnitude(p - q) + p - q) / 2
    if divergence == "forward_kl":
        return _kl_term(q, log_q, p, log_p)
    log_mixture = jnp.logaddexp(log_q + jnp.log(beta), log_p + jnp.log1p(-beta))
    mixture = jnp.exp(log_mixture)
    of_teacher = _kl_term(q, log_q, mixture, log_mixture)
    of_student = _kl_term(p, log_p, mixture, log_mixture)
    return beta * of_teacher + (1 - beta) * of_student


def _kl_term(
    first: jax.Array, log_first: jax.Array, second: jax.Array, log_second: jax.Array
) -> jax.Array:
    """a log(a / b) - a + b of the first a and the second b, at least 0.

    With d = log(b / a) below 1 it is computed as a (exp(d) - 1 - d).
    """
    d = log_second - log_first
    near = first * k3(jnp.minimum(d, 1))
    far = second - first - first * d
    return jnp.where(first == 0, second, jnp.where(d < 1, near, far))


def divergences_of_tokens(
    axes: ShardAxes,
    call: DivergenceCall,
    inputs: Inputs,
    teacher: Inputs,
    log_z: Float[Array, "R T"] | None = None,
) -> tuple[Float[Array, "R T"], ...]:
    """Per-shard: the divergences of the device's tokens.

    `log_z` is that of a teacher whose head lacks some columns.
    """
    call, local, teacher_local = local_pair(call, inputs, teacher)
    if log_z is not None:
        log_z = log_z.reshape(-1)
    constants = lax.stop_gradient((teacher_local, log_z))
    each = _divergences(call, local, *constants)
    return tuple(divergence.reshape(inputs.hidden.shape[0], -1) for divergence in each)


def local_pair(
    call: DivergenceCall, inputs: Inputs, teacher: Inputs
) -> tuple[DivergenceCall, Local, Local]:
    """Both heads' arrays.

    If one's hidden states are sharded by position over the tensor axis they are gathered.
    """
    student_call = call.student
    teacher_call = call.teacher
    if student_call.sequence_parallel != teacher_call.sequence_parallel:
        student_call, inputs = _whole_rows(student_call, inputs)
        teacher_call, teacher = _whole_rows(teacher_call, teacher)
    call = dataclasses.replace(call, student=student_call, teacher=teacher_call)
    local = enter(student_call, inputs)
    teacher_local = enter(teacher_call, teacher)
    # a divergence differs between devices wherever either model's hidden states do
    names = varying(local.features, teacher_local.features)
    features = tuple(
        vary_with_f32_sum(feature, names - varying(feature)) for feature in local.features
    )
    local = local._replace(features=features)
    return call, local, teacher_local


def _whole_rows(call: HeadCall, inputs: Inputs) -> tuple[HeadCall, Inputs]:
    if not call.sequence_parallel:
        return call, inputs
    hidden = all_positions(inputs.hidden, call.axes.tensor)
    return dataclasses.replace(call, sequence_parallel=False), inputs._replace(hidden=hidden)


def works_of(call: DivergenceCall, local: Local, teacher_local: Local) -> tuple[Work, Work]:
    """The work on both heads, in the same chunks and order."""
    chunk = chunk_of_forward(call.student, local)
    student = Work.of(call.student, local, chunk)
    teacher = Work.of(call.teacher, teacher_local, chunk)
    mesh_axes = student.mesh_axes | teacher.mesh_axes
    return student._replace(mesh_axes=mesh_axes), teacher._replace(mesh_axes=mesh_axes)


def finite_logits(work: Work, chunk: Chunk) -> jax.Array:
    """f32[C, V], of columns that a head excludes `LOW`, which keeps slopes finite; NaN stays."""
    return _finite(
        work.logits(raw_logits(work.call, chunk.features, work.parameters), chunk.tokens)
    )


def _finite(z: jax.Array) -> jax.Array:
    return jnp.where(z < LOW, LOW, z)


def _log_p(z: jax.Array, softmax: Softmax) -> jax.Array:
    return (z - softmax[0][:, None]) - softmax[1][:, None]


def exact_log_p(z: jax.Array, softmax: Softmax) -> jax.Array:
    """log p, of columns that a head excludes -inf."""
    return jnp.where(z <= LOW / 2, -jnp.inf, _log_p(z, softmax))


def sums_of_terms(
    call: DivergenceCall, columns: Columns, log_p: jax.Array, log_q: jax.Array
) -> tuple[jax.Array, ...]:
    """The sums of the terms of each divergence over some columns."""
    sums = []
    for divergence in call.divergences:
        each = terms_of(divergence, call.beta, log_p, log_q)
        if columns.valid is not None:
            each = jnp.where(columns.valid[None], each, 0)
        sums.append(each.sum(1))
    return tuple(sums)


def compared(
    student: Work,
    teacher: Work,
    softmaxes: Softmaxes,
    of_logits: Callable[[jax.Array, jax.Array, Softmaxes], Tree],
) -> Tree:
    """of_logits(z, teacher's z, softmaxes) of each chunk, as arrays `[N', ...]` of all tokens in
    order.
    """

    def of_chunk(i: Index) -> Tree:
        z = finite_logits(student, student.read(i))
        teacher_z = finite_logits(teacher, teacher.read(i))
        return student.vary(
            of_logits(z, teacher_z, read(softmaxes, i * student.chunk, student.chunk))
        )

    return over_chunks(student, of_chunk)


def softmax_of(reduced: Reduced) -> Softmax:
    """m and log s of the numbers over the whole vocabulary."""
    return reduced.peaks["m"], jnp.log(jnp.where(reduced.sums["s"] == 0, 1, reduced.sums["s"]))


def _evaluate(
    call: DivergenceCall, local: Local, teacher_local: Local, log_z: jax.Array | None
) -> tuple[tuple[jax.Array, ...], Any]:
    """Divergences by a sweep for both softmaxes, and a walk for the sums of their terms and slopes
    by log s.

    The backward needs no more: JAX differentiates the terms in each tile.
    """
    student, teacher = works_of(call, local, teacher_local)
    axes = call.student.axes
    student_softmax = softmax_of(over_devices(sweep(student), axes))
    if log_z is None:
        teacher_softmax = softmax_of(over_devices(sweep(teacher), axes))
    else:
        log_z = teacher.order.put(where_counts(local.counts, log_z), teacher.rows)
        teacher_softmax = (log_z, jnp.zeros_like(log_z))
    # they vary by type along the tensor axes, though they are equal there
    softmaxes: Softmaxes = student.vary((student_softmax, teacher_softmax))

    def sums_and_slopes(z: jax.Array, teacher_z: jax.Array, softmaxes: Softmaxes) -> Any:
        (m, log_s), teacher_softmax = softmaxes

        def shifted(log_s: jax.Array) -> tuple[jax.Array, ...]:
            return sums_of_terms(
                call, student.columns, _log_p(z, (m, log_s)), _log_p(teacher_z, teacher_softmax)
            )

        _, slopes = jax.jvp(shifted, (log_s,), (jnp.ones_like(log_s),))
        log_p = exact_log_p(z, softmaxes[0])
        log_q = exact_log_p(teacher_z, teacher_softmax)
        return sums_of_terms(call, student.columns, log_p, log_q), slopes

    shard_sums = compared(student, teacher, softmaxes, sums_and_slopes)
    sums = axes.psum(vary(jnp.stack(jax.tree.leaves(shard_sums)), axes.tensor), axes.tensor)
    # a head that excludes all columns has no distribution
    has_columns = (student_softmax[0] > LOW / 2) & (teacher_softmax[0] > LOW / 2)
    sums = jnp.where(has_columns[None], sums, jnp.nan)
    sums, softmaxes = student.order.take_back((sums.T, softmaxes))
    sums_and_slopes_of_tokens = tuple(where_counts(local.counts, column) for column in sums.T)
    count = len(call.divergences)
    return sums_and_slopes_of_tokens[:count], (sums_and_slopes_of_tokens[count:], softmaxes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergences(
    call: DivergenceCall, local: Local, teacher_local: Local, log_z: jax.Array | None
) -> tuple[jax.Array, ...]:
    """The divergences of one device's tokens, f32[N] each."""
    return _evaluate(call, local, teacher_local, log_z)[0]


def _forward(
    call: DivergenceCall, local: Local, teacher_local: Local, log_z: jax.Array | None
) -> Any:
    divergences, left = _evaluate(
        call, *jax.tree.map(refuse_second_derivatives, (local, teacher_local, log_z))
    )
    return divergences, (local, teacher_local, left)


def _backward(
    call: DivergenceCall, saved: Any, cotangents: tuple[jax.Array, ...]
) -> tuple[Local, None, None]:
    local, teacher_local, (slopes, softmaxes) = saved
    has_cotangent = jnp.stack([cotangent != 0 for cotangent in cotangents]).any(0)
    if local.counts is not None:
        has_cotangent &= local.counts
    (m, log_s), teacher_softmax = softmaxes
    # d log s = ds / s, and ds is the sum of the exponentials' own slopes
    ds = sum(
        cotangent * slope for cotangent, slope in zip(cotangents, slopes, strict=True)
    ) / jnp.exp(log_s)
    student_softmax = (where_counts(has_cotangent, m, -LOW), where_counts(has_cotangent, log_s))
    by_token = (
        student_softmax,
        where_counts(has_cotangent, teacher_softmax),
        where_counts(has_cotangent, (cotangents, ds)),
    )
    chunk, _ = block_of_second(call.student, local)
    follow = local.counts is not None
    teacher = Work.of(
        call.teacher, teacher_local._replace(counts=has_cotangent), chunk, follow=follow
    )
    return (
        gradients(call.student, local, has_cotangent, by_token, partial(_sums_at, call, teacher)),
        None,
        None,
    )


def _sums_at(
    call: DivergenceCall,
    teacher: Work,
    block: Work,
    start: Index,
    i: Index,
    chunk: Chunk,
    by_token: Any,
) -> Any:
    """The sums of terms of a tile, and of the student's exponentials, with their cotangents; see
    `SumsAt`.
    """
    student_softmax, teacher_softmax, dsums = by_token
    columns = block.columns
    parameters = read(teacher.parameters, start, columns.width, call.teacher.v_dim)
    teacher_block = teacher._replace(parameters=parameters, columns=columns)
    log_q = _log_p(finite_logits(teacher_block, teacher.read(i)), teacher_softmax)

    def sums_of(raw: jax.Array) -> Any:
        z = _finite(block.logits(raw, chunk.tokens))
        exponentials = jnp.exp(z - student_softmax[0][:, None])
        return sums_of_terms(call, columns, _log_p(z, student_softmax), log_q), exponentials.sum(1)

    return sums_of, dsums


_divergences.defvjp(_forward, _backward)
