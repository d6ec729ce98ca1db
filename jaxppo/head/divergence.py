"""The divergence of two heads at each token, tile by tile over both vocabularies at once, with its gradient rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.base.kl import k3
from jaxppo.head import softmax, tile
from jaxppo.head.asked import empty_sums
from jaxppo.head.plan import plan_of
from jaxppo.head.prepare import on_device, whole
from jaxppo.head.softmax import Cotangents, Sums
from jaxppo.head.token_blocks import Slots
from jaxppo.head.types import Block, Chunk, Cut, Features, HeadCall, Index, Inputs, Parameters
from jaxppo.head.vjp import (
    cotangents_of_inputs,
    dense,
    gradients,
    saved,
    to_save,
    values,
    values_and_needs,
)
from jaxppo.head.walk import Walk
from jaxppo.sharding import vary


@dataclasses.dataclass(frozen=True)
class DivergenceCall:
    """The static part of a call: two heads whose blocks hold the same columns, and the divergences, see `terms`."""

    student: HeadCall
    teacher: HeadCall
    divergences: tuple[str, ...]
    beta: float


class LogSums(NamedTuple):
    """m and log s of student and teacher, and for each divergence the sum of h (see `terms`); f32[N] each."""

    m: Array
    log_s: Array
    teacher_m: Array
    teacher_log_s: Array
    h: tuple[Array, ...]


# the terms and the slopes h of each divergence, and the student's log p
Terms = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], jax.Array]


class PairChunk(NamedTuple):
    """The same tokens for both heads; the rows are the student's."""

    rows: Features
    student: Chunk
    teacher: Chunk


class PairBlock(NamedTuple):
    """The same columns of both heads; the parameters are the student's."""

    parameters: Parameters
    column_ids: jax.Array
    student: Block
    teacher: Block


def divergences_of_tokens(call: DivergenceCall, inputs: Inputs, teacher: Inputs) -> tuple[Float[Array, "R T"], ...]:
    """Per-shard: the divergences of the device's tokens; no gradient flows to the teacher."""
    call, arrays, shape = pair_on_device(call, inputs, teacher)
    return tuple(x.reshape(shape) for x in _token_divergences(call, *arrays))


def pair_on_device(
    call: DivergenceCall, inputs: Inputs, teacher: Inputs
) -> tuple[DivergenceCall, tuple[Inputs, Inputs], tuple[int, int]]:
    """Per-shard: both heads' arrays as schedules take them, of the same positions, and the shape of their tokens."""
    calls = call.student, call.teacher
    if calls[0].sequence_parallel != calls[1].sequence_parallel:
        (student, inputs), (other, teacher) = whole(calls[0], inputs), whole(calls[1], teacher)
        call = dataclasses.replace(call, student=student, teacher=other)
    R = inputs.features.hidden.shape[0]
    return call, (on_device(call.student, inputs), on_device(call.teacher, teacher)), (R, -1)


def terms(
    divergence: str, beta: float, log_p: Float[Array, "..."], log_q: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The term of each column in the divergence D of student p and teacher q, and h = dD / d log p, p unconstrained.

    Through the softmax, d D / d z_j = h_j - p_j * sum(h). No term is below 0. A column's term of KL(a || b) is
    a log(a / b) - a + b: the part -a + b is 0 in the sum over all columns, and keeps the rounding error of a term as
    small as the term. "total_variation" has slope 0 where p equals q. "cross_entropy" is -q log p. Any other name means
    beta KL(q || mixture) + (1 - beta) KL(p || mixture), with the mixture beta q + (1 - beta) p.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)

    def weighted(weight: jax.Array, log: jax.Array) -> jax.Array:
        return jnp.where(weight == 0, 0, weight * log)  # a weight of NaN stays NaN

    if divergence == "reverse_kl":
        return _kl_term(p, log_p, q, log_q), weighted(p, log_p - log_q)
    if divergence == "cross_entropy":
        return weighted(q, -log_p), -q
    if divergence == "total_variation":
        return jnp.abs(p - q) / 2, p * jnp.sign(p - q) / 2
    if divergence == "forward_kl":
        return _kl_term(q, log_q, p, log_p), -q
    log_mixture = jnp.logaddexp(log_q + jnp.log(beta), log_p + jnp.log1p(-beta))
    mixture = jnp.exp(log_mixture)
    value = beta * _kl_term(q, log_q, mixture, log_mixture) + (1 - beta) * _kl_term(p, log_p, mixture, log_mixture)
    return value, (1 - beta) * weighted(p, log_p - log_mixture)


def _kl_term(
    a: Float[Array, "..."], log_a: Float[Array, "..."], b: Float[Array, "..."], log_b: Float[Array, "..."]
) -> Float[Array, "..."]:
    """a log(a / b) - a + b, at least 0. With d = log(b / a) below 1 it is computed as a (exp(d) - 1 - d)."""
    d = log_b - log_a
    return jnp.where(a == 0, b, jnp.where(d < 1, a * k3(d), b - a - a * d))


class PairWalk(Walk):
    """One device's tokens against its blocks of both vocabularies; gradients are the student's."""

    def __init__(self, pair: DivergenceCall, inputs: Inputs, teacher: Inputs, cut: Cut, **how: Any):
        super().__init__(pair.student, inputs, cut, **how)
        self.pair, self.teacher = pair, Walk(pair.teacher, teacher, cut, **how)
        self.axes = self.axes | self.teacher.axes

    def chunk(self, slots: Slots, rows: Features | None = None) -> Any:
        student = super().chunk(slots, rows)
        return PairChunk(student.rows, student, self.teacher.chunk(slots))

    def block(self, i: Index) -> Any:
        student = super().block(i)
        return PairBlock(student.parameters, student.column_ids, student, self.teacher.block(i))

    def logits(self, chunk: PairChunk, block: PairBlock) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The student's products, and the student's and the teacher's logits; f32 `[C, B]`."""
        student = self.pair.student, chunk.student, block.student
        teacher = self.pair.teacher, chunk.teacher, block.teacher
        x, y = (tile.products(call, c.rows, b.parameters) for call, c, b in (student, teacher))
        return x, tile.logits(*student, x), tile.logits(*teacher, y)

    def terms(self, z: jax.Array, teacher_z: jax.Array, valid: jax.Array | bool, sums: LogSums) -> Terms:
        """`terms` of each divergence and the student's log p of a block; 0 and -inf in columns that do not exist."""
        log_p, log_q = self.log_probs(z, teacher_z, valid, sums)
        each = [terms(kind, self.pair.beta, log_p, log_q) for kind in self.pair.divergences]
        found = [tuple(jnp.where(valid, x, 0) for x in parts) for parts in zip(*each, strict=True)]
        return found[0], found[1], log_p

    def log_probs(
        self, z: jax.Array, teacher_z: jax.Array, valid: jax.Array | bool, sums: LogSums
    ) -> tuple[jax.Array, jax.Array]:
        """log p and log q of a block. In columns that do not exist they are -inf and 0."""
        log_p = (z - sums.m[:, None]) - sums.log_s[:, None]
        log_q = (teacher_z - sums.teacher_m[:, None]) - sums.teacher_log_s[:, None]
        return log_p, jnp.where(valid, log_q, 0)

    def dlogits(
        self, chunk: Any, block: Any, residuals: Any, cotangents: Cotangents, x: Any = None
    ) -> tuple[jax.Array, jax.Array | None]:
        x, z, teacher_z = self.logits(chunk, block)
        _, each, log_p = self.terms(z, teacher_z, block.student.valid, residuals)
        slopes = (h - jnp.exp(log_p) * of_token[:, None] for h, of_token in zip(each, residuals.h, strict=True))
        dz = sum(g[:, None] * slope for g, slope in zip(cotangents.log_prob, slopes, strict=True))
        before = self.vocabulary.tile(chunk.student, block.student)
        dz = tile.of_products(self.call, before, dz, x, cotangents.counts)
        return tile.factor_and_bias(before, dz)


def evaluate(call: DivergenceCall, inputs: Inputs, teacher: Inputs) -> tuple[tuple[jax.Array, ...], LogSums]:
    """The divergences and the residuals, f32[N] each. One walk finds the softmax sums, a second one all divergences."""
    plan = plan_of(call.student, inputs)
    walk = PairWalk(call, inputs, teacher, plan.forward, by_vocabulary=plan.forward_by_vocabulary)
    tokens, axes = walk.tokens, call.student.axes
    known, zeros = log_sums(walk, plan.forward_by_vocabulary), walk.zeros(tokens.slots_count)

    def add_terms(chunk: PairChunk, block: PairBlock, slots: Slots, sums: Any) -> Any:
        found = walk.terms(*walk.logits(chunk, block)[1:], block.student.valid, tokens.read(known, slots))[:2]
        return walk.vary(jax.tree.map(lambda total, x: total + x.sum(axis=1), sums, found))

    count = len(call.divergences)
    nothing = ((zeros,) * count, (zeros,) * count)
    parts = jax.tree.leaves(over_tiles(walk, plan.forward_by_vocabulary, add_terms, nothing))
    sums = tuple(axes.psum(vary(jnp.stack(parts), axes.tensor), axes.tensor))
    found, residuals = tokens.to_tokens((sums[:count], known._replace(h=sums[count:])))
    return tuple(x if inputs.counts is None else jnp.where(inputs.counts, x, 0) for x in found), residuals


def log_sums(walk: PairWalk, by_vocabulary: bool) -> LogSums:
    """m and log s of both softmaxes over the whole vocabulary, in slot order. h is still empty."""
    tokens = walk.tokens

    def add_sums(chunk: PairChunk, block: PairBlock, slots: Slots, sums: tuple[Sums, Sums]) -> Any:
        nothing, no_target = jnp.zeros(tokens.size, jnp.float32), jnp.zeros((1, 1), bool)
        pairs = zip(walk.logits(chunk, block)[1:], sums, strict=True)
        both = tuple(softmax.merge(s, softmax.block_sums(z, nothing, no_target, None, s)) for z, s in pairs)
        return walk.vary(both)

    empty = walk.vary(empty_sums(tokens.slots_count, walk.call.asked))
    both = over_tiles(walk, by_vocabulary, add_sums, (empty, empty))
    both = softmax.combine(jax.tree.map(lambda *x: jnp.concatenate(x), *both), walk.call.axes)
    (m, teacher_m), (log_s, teacher_log_s) = jnp.split(both.m, 2), jnp.split(jnp.log(both.s), 2)
    return LogSums(m, log_s, teacher_m, teacher_log_s, ())


def over_tiles(walk: Walk, by_vocabulary: bool, body: Callable[..., Any], totals: Any) -> Any:
    """Loops over all tiles: old values in the tile's slots of `totals` become body(chunk, block, slots, old values)."""
    tokens, over_blocks = walk.tokens, walk.vocabulary.over_blocks

    def of_block(i: Index, totals: Any) -> Any:
        block = walk.block(i)

        def add(slots: Slots, totals: Any) -> Any:
            return tokens.write(totals, body(walk.chunk(slots), block, slots, tokens.read(totals, slots)), slots)

        return tokens.loop(add, totals)

    def of_slots(slots: Slots, totals: Any) -> Any:
        chunk = walk.chunk(slots)
        part = over_blocks(lambda i, part: body(chunk, walk.block(i), slots, part), tokens.read(totals, slots))
        return tokens.write(totals, part, slots)

    return over_blocks(of_block, totals) if by_vocabulary else tokens.loop(of_slots, totals)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_divergences(call: DivergenceCall, inputs: Inputs, teacher: Inputs) -> tuple[jax.Array, ...]:
    """The divergences of one device's tokens, f32[N] each."""
    return evaluate(call, inputs, teacher)[0]


def _forward(call: DivergenceCall, inputs: Any, teacher: Any) -> Any:
    (inputs, needs), teacher = values_and_needs(inputs), values(teacher)
    out, residuals = evaluate(call, inputs, teacher)
    return out, (inputs, teacher, to_save((residuals, needs)))


def _backward(call: DivergenceCall, left: Any, g: Any) -> Any:
    inputs, teacher, (residuals, needs) = left[0], left[1], saved(left[2])
    each = dense(g)  # one per divergence
    counts = reduce(jnp.logical_or, [x != 0 for x in each])
    counts = counts if inputs.counts is None else counts & inputs.counts
    cotangents = Cotangents(each, None, None, None, counts)
    plan = plan_of(call.student, inputs, needs=needs)
    make = partial(PairWalk, call, inputs, teacher, plan.cut)
    nothing: Any = [None] * len(Inputs._fields)
    none = Inputs(*nothing)
    return cotangents_of_inputs(inputs, *gradients(plan, make, needs, (residuals, cotangents))), none


_token_divergences.defvjp(_forward, _backward, symbolic_zeros=True)
