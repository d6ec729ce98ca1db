"""Two heads at each token, tile by tile over both vocabularies at once: divergences with gradients, comparisons."""

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
from jaxppo.head.border import Index, Local, local, unless
from jaxppo.head.call import HeadCall, Inputs, Tokens
from jaxppo.head.gradient import once, second_pass
from jaxppo.head.plan import plan_of_second, plan_of_sweep
from jaxppo.head.reductions import Columns, Reduced
from jaxppo.head.sweep import Block, Work, read, sweep, walk
from jaxppo.head.tile import LOW, logits, products
from jaxppo.sharding import ShardAxes, vary

OfHead = tuple[jax.Array, jax.Array]  # m and log s, f32[N]
Known = tuple[OfHead, OfHead]  # of student and teacher


@dataclasses.dataclass(frozen=True)
class DivergenceCall:
    """The static part of a call: two heads whose blocks hold the same columns, and the divergences, see `terms`."""

    student: HeadCall
    teacher: HeadCall
    divergences: tuple[str, ...]
    beta: float


def terms(divergence: str, beta: float, log_p: Float[Array, "..."], log_q: Float[Array, "..."]) -> Float[Array, "..."]:
    """The term of each column in the divergence of student p and teacher q; no term is below 0.

    A column's term of KL(a || b) is a log(a / b) - a + b: the part -a + b is 0 in the sum over all columns, and keeps
    the rounding error of a term as small as the term. "cross_entropy" is -q log p. Any other name means
    beta KL(q || mixture) + (1 - beta) KL(p || mixture), with the mixture beta q + (1 - beta) p.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if divergence == "reverse_kl":
        return _kl_term(p, log_p, q, log_q)
    if divergence == "cross_entropy":
        return jnp.where(q == 0, 0, -q * log_p)  # a weight of NaN stays NaN
    if divergence == "total_variation":
        return (magnitude(p - q) + p - q) / 2  # max(p - q, 0): right also where q has columns that p lacks
    if divergence == "forward_kl":
        return _kl_term(q, log_q, p, log_p)
    log_mixture = jnp.logaddexp(log_q + jnp.log(beta), log_p + jnp.log1p(-beta))
    mixture = jnp.exp(log_mixture)
    return beta * _kl_term(q, log_q, mixture, log_mixture) + (1 - beta) * _kl_term(p, log_p, mixture, log_mixture)


def _kl_term(a: jax.Array, log_a: jax.Array, b: jax.Array, log_b: jax.Array) -> jax.Array:
    """a log(a / b) - a + b, at least 0. With d = log(b / a) below 1 it is computed as a (exp(d) - 1 - d)."""
    d = log_b - log_a
    return jnp.where(a == 0, b, jnp.where(d < 1, a * k3(jnp.minimum(d, 1)), b - a - a * d))


def divergences_of_tokens(
    axes: ShardAxes, call: DivergenceCall, inputs: Inputs, teacher: Inputs, log_z: Float[Array, "R T"] | None = None
) -> tuple[Float[Array, "R T"], ...]:
    """Per-shard: the divergences of the device's tokens. `log_z` is that of a teacher whose head lacks some columns."""
    call, given, other = local_pair(call, inputs, teacher)
    whole = lax.stop_gradient((other, None if log_z is None else log_z.reshape(-1)))
    return tuple(x.reshape(inputs.hidden.shape[0], -1) for x in _divergences(call, given, *whole))


def local_pair(call: DivergenceCall, inputs: Inputs, teacher: Inputs) -> tuple[DivergenceCall, Local, Local]:
    """Both heads' arrays. If one's hidden states are sharded by position over the tensor axis they are gathered."""
    calls, arrays = [call.student, call.teacher], [inputs, teacher]
    if call.student.sequence_parallel != call.teacher.sequence_parallel:
        k = 0 if call.student.sequence_parallel else 1
        hidden = lax.all_gather(arrays[k].hidden, calls[k].axes.tensor, axis=1, tiled=True)
        calls[k], arrays[k] = dataclasses.replace(calls[k], sequence_parallel=False), arrays[k]._replace(hidden=hidden)
    call = dataclasses.replace(call, student=calls[0], teacher=calls[1])
    return call, local(calls[0], arrays[0]), local(calls[1], arrays[1])


def works_of(call: DivergenceCall, given: Local, other: Local) -> tuple[Work, Work]:
    plan, calls = plan_of_sweep(call.student, given), (call.student, call.teacher)
    plan = plan._replace(by_block=plan.by_block and all(c.h_names or c.gathered_v for c in calls))
    one, two = (Work.of(c, plan, x) for c, x in zip(calls, (given, other), strict=True))
    axes = one.axes | two.axes
    return one._replace(axes=axes), two._replace(axes=axes)


def _logits(work: Work, x: jax.Array, tokens: Tokens, columns: Columns) -> jax.Array:
    """Logits, of columns that a head excludes `LOW`, which keeps slopes finite; NaN stays."""
    z = logits(work.call.transform, x, tokens.temperature, columns.valid)
    return jnp.where(z < LOW, LOW, z)


def _log_p(z: jax.Array, known: OfHead) -> jax.Array:
    return (z - known[0][:, None]) - known[1][:, None]


def exact_log_p(z: jax.Array, known: OfHead) -> jax.Array:
    """log p, of columns that a head excludes -inf."""
    return jnp.where(z <= LOW / 2, -jnp.inf, _log_p(z, known))


def sums_of_terms(call: DivergenceCall, columns: Columns, log_p: jax.Array, log_q: jax.Array) -> tuple[jax.Array, ...]:
    """The sums of the terms of each divergence over some columns."""
    each = (terms(kind, call.beta, log_p, log_q) for kind in call.divergences)
    return tuple((x if columns.valid is None else jnp.where(columns.valid[None], x, 0)).sum(1) for x in each)


def over_tiles(one: Work, two: Work, known: Known, add: Callable[..., Any], totals: Any) -> Any:
    """Loops over all tiles: values of tokens in `totals` become add(values, columns, z, teacher's z, known)."""
    C, B = one.plan.chunk, one.width

    def tile(i: Index, j: Index, part: Any) -> Any:
        z = []
        for work in (one, two):
            tokens, features = work.read(j * C, C)
            _, parameters, columns = work.block(i, B)
            z.append(_logits(work, products(work.call, features, parameters), tokens, columns))
        return one.vary(add(part, columns, *z, read(known, j * C, C)))

    return walk(one, tile, totals)


def _evaluate(
    call: DivergenceCall, given: Local, other: Local, log_z: jax.Array | None
) -> tuple[tuple[jax.Array, ...], Any]:
    """Divergences by a sweep for both softmaxes, and a walk for the sums of their terms and slopes by log s.

    The backward needs no more: JAX differentiates the terms in each tile.
    """
    one, two = works_of(call, given, other)
    own = maximum_and_log_s(sweep(one))
    if log_z is None:
        its = maximum_and_log_s(sweep(two))
    else:
        log_z = two.order.put(unless(given.counts, log_z), two.size)
        its = log_z, jnp.zeros_like(log_z)
    known: Known = one.vary((own, its))

    def add(total: Any, columns: Columns, z: jax.Array, teacher_z: jax.Array, known: Known) -> Any:
        (m, log_s), its = known

        def shifted(log_s: jax.Array) -> tuple[jax.Array, ...]:
            return sums_of_terms(call, columns, _log_p(z, (m, log_s)), _log_p(teacher_z, its))

        _, slopes = jax.jvp(shifted, (log_s,), (jnp.ones_like(log_s),))
        sums = sums_of_terms(call, columns, exact_log_p(z, known[0]), exact_log_p(teacher_z, its))
        return jax.tree.map(jnp.add, total, (sums, slopes))

    total = over_tiles(one, two, known, add, one.vary(((jnp.zeros_like(own[1]),) * len(call.divergences),) * 2))
    axes = call.student.axes
    parts = axes.psum(vary(jnp.stack(jax.tree.leaves(total)), axes.tensor), axes.tensor)
    parts, known = one.order.take_back((parts.T, known))
    # equal on the devices of a tensor axis, which their type does not say
    out, count = tuple(unless(given.counts, x) for x in parts.T), len(call.divergences)
    return out[:count], (out[count:], known)


def maximum_and_log_s(found: Reduced) -> OfHead:
    return found.peaks["m"], jnp.log(jnp.where(found.sums["s"] == 0, 1, found.sums["s"]))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergences(call: DivergenceCall, given: Local, other: Local, log_z: jax.Array | None) -> tuple[jax.Array, ...]:
    """The divergences of one device's tokens, f32[N] each."""
    return _evaluate(call, given, other, log_z)[0]


def _forward(call: DivergenceCall, given: Local, other: Local, log_z: jax.Array | None) -> Any:
    out, left = _evaluate(call, *jax.tree.map(once, (given, other, log_z)))
    return out, (given, other, left)


def _backward(call: DivergenceCall, saved: Any, g: tuple[jax.Array, ...]) -> tuple[Local, None, None]:
    given, other, (slopes, known) = saved
    counts = jnp.stack([x != 0 for x in g]).any(0)
    counts = counts if given.counts is None else counts & given.counts
    of_s = sum(a * b for a, b in zip(g, slopes, strict=True)) / jnp.exp(known[0][1])
    of = unless(counts, (g, of_s))
    peaks, teacher = (unless(counts, known[0][0], -LOW), unless(counts, known[0][1])), unless(counts, known[1])
    two = Work.of(call.teacher, plan_of_second(call.student, given), other)

    def of_tile(work: Work, block: Block, start: Index, tokens: Tokens, columns: Columns, part: Any) -> Any:
        (_, parameters, its_columns), (counts, own, its, of) = block, part
        its_tokens, features = read((two.tokens, two.features), start, work.plan.group)
        y = products(call.teacher, unless(counts, features), parameters)
        log_q = _log_p(_logits(two, y, its_tokens, its_columns), its)

        def sums(x: jax.Array) -> Any:
            z = _logits(work, x, tokens, columns)
            return sums_of_terms(call, columns, _log_p(z, own), log_q), jnp.exp(z - own[0][:, None]).sum(1)

        return sums, of

    def sums_at(work: Work, i: Index) -> Any:
        return partial(of_tile, work, two.block(i, work.width))  # gathered here: devices have as many blocks, not tiles

    return second_pass(call.student, given, counts, (counts, peaks, teacher, of), sums_at), None, None


_divergences.defvjp(_forward, _backward)
