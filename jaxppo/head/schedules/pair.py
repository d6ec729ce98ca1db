"""The custom gradient rule of a divergence between two heads: both vocabularies walked together, tile by tile."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.head import softmax, tiles
from jaxppo.head.ops import xla
from jaxppo.head.ops.tile import Block, as_row
from jaxppo.head.schedules.needs import saved, to_save, values_and_needs
from jaxppo.head.schedules.two_pass import gradients
from jaxppo.head.schedules.walk import Chunk, Inputs, Rule, Walk, cotangents_of, of_tokens
from jaxppo.head.tokens import Slots
from jaxppo.kl import k3
from jaxppo.sharding import vary


@dataclasses.dataclass(frozen=True)
class DivergenceRule:
    """The static part: the two heads, whose blocks hold the same columns, and the divergence."""

    student: Rule
    teacher: Rule
    divergence: str
    beta: float


class LogSums(NamedTuple):
    """For a token, f32[N] each: the student's and the teacher's m and log s, and the sum of h (see `terms`)."""

    m: Array
    log_s: Array
    teacher_m: Array
    teacher_log_s: Array
    h: Array


def terms(
    divergence: str, beta: float, log_p: Float[Array, "..."], log_q: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """What each column of student p and teacher q adds to the divergence D, and h = d D / d log p with p unconstrained.

    Through the softmax, d D / d z_j = h_j - p_j * sum(h). No column adds less than 0: that of KL(a || b) adds
    a log(a / b) - a + b, where -a + b is 0 in the sum over all columns, and rounding is of the size of what it adds.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    weighted = lambda weight, log: jnp.where(weight == 0, 0, weight * log)  # noqa: E731  so that NaN stays
    if divergence == "reverse_kl":
        return _kl_term(p, log_p, q, log_q), weighted(p, log_p - log_q)
    if divergence == "forward_kl":
        return _kl_term(q, log_q, p, log_p), -q
    log_mixture = jnp.logaddexp(log_q + jnp.log(beta), log_p + jnp.log1p(-beta))
    mixture = jnp.exp(log_mixture)
    value = beta * _kl_term(q, log_q, mixture, log_mixture) + (1 - beta) * _kl_term(p, log_p, mixture, log_mixture)
    return value, (1 - beta) * weighted(p, log_p - log_mixture)


def _kl_term(
    a: Float[Array, "..."], log_a: Float[Array, "..."], b: Float[Array, "..."], log_b: Float[Array, "..."]
) -> Float[Array, "..."]:
    """a log(a / b) - a + b, at least 0; a (exp(d) - 1 - d), d = log(b / a), where the two are near each other."""
    d = log_b - log_a
    return jnp.where(a == 0, b, jnp.where(d < 1, a * k3(d), b - a - a * d))


class PairWalk(Walk):
    """One device's tokens against its blocks of both vocabularies; gradients are the student's."""

    def __init__(self, rule: DivergenceRule, inputs: Inputs, teacher: Inputs, cut: tiles.Cut, **how: bool):
        super().__init__(rule.student, inputs, cut, **how)
        self.pair, self.teacher = rule, Walk(rule.teacher, teacher, cut, **how)
        self.axes = self.axes | self.teacher.axes

    def chunk(self, slots: Slots) -> Chunk:
        return super().chunk(slots)._replace(teacher=self.teacher.chunk(slots))

    def block(self, i: Any) -> Block:
        return super().block(i)._replace(teacher=self.teacher.block(i))

    def logits(self, chunk: Chunk, block: Block) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The student's products, and the student's and the teacher's logits; f32 `[C, B]`."""
        student = self.rule.form, self.tile(chunk, block)
        teacher = self.teacher.rule.form, self.teacher.tile(chunk.teacher, block.teacher)
        x = xla.products(*student)
        return x, xla.logits(*student, x), xla.logits(*teacher, xla.products(*teacher))

    def terms(self, z: jax.Array, teacher_z: jax.Array, valid: jax.Array, sums: LogSums) -> tuple[Any, Any, Any]:
        """`terms` and the student's log p of a block, 0 and -inf in columns that do not exist."""
        column = lambda x: x[:, None]  # noqa: E731
        valid = as_row(valid)
        log_p = (z - column(sums.m)) - column(sums.log_s)
        log_q = (teacher_z - column(sums.teacher_m)) - column(sums.teacher_log_s)
        found = terms(self.pair.divergence, self.pair.beta, log_p, jnp.where(valid, log_q, 0))
        value, h = (jnp.where(valid, x, 0) for x in found)
        return value, h, log_p

    def dlogits(
        self, chunk: Chunk, block: Any, residuals: Any, cotangents: Any, z: Any, of_bias: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        x, z, teacher_z = self.logits(chunk, block)
        _, h, log_p = self.terms(z, teacher_z, block.valid, residuals)
        dz = cotangents.log_prob[:, None] * (h - jnp.exp(log_p) * residuals.h[:, None])
        dz = xla.of_products(self.rule.form, self.tile(chunk, block), dz, x, cotangents.counts)
        return dz.astype(self.factor_dtype()), dz.sum(axis=0) if of_bias else None


def evaluate(rule: DivergenceRule, inputs: Inputs, teacher: Inputs) -> tuple[jax.Array, LogSums]:
    """The divergence and the residuals, f32[N] each: one walk for the sums, one for the divergence."""
    plan = tiles.two_passes(rule.student, inputs, None)
    first = plan.forward_vocabulary_first
    walk = PairWalk(rule, inputs, teacher, plan.forward, once=not first, compact=first)
    tokens, axes = walk.tokens, rule.student.columns.axes

    def add_sums(keep: bool, i: Any, block: Block, slots: Slots, chunk: Chunk, sums: Any) -> Any:
        both = tuple(
            softmax.merge(old, softmax.block_sums(z, walk.zeros(z.shape[0]), jnp.zeros((), bool), None, old))
            for z, old in zip(walk.logits(chunk, block)[1:], tokens.read(sums, slots), strict=True)
        )
        return tokens.write(sums, walk.vary(both), slots)

    empty = walk.vary(softmax.empty_sums(tokens.count, full=True, entropy=False, nucleus=False))
    both = walk.over_tiles(add_sums, (empty, empty), first)
    both = softmax.combine(jax.tree.map(lambda *x: jnp.concatenate(x), *both), axes)
    (m, teacher_m), (log_s, teacher_log_s) = jnp.split(both.m, 2), jnp.split(jnp.log(both.s), 2)
    zeros = walk.zeros(tokens.count)
    known = LogSums(m, log_s, teacher_m, teacher_log_s, zeros)

    def add_terms(keep: bool, i: Any, block: Block, slots: Slots, chunk: Chunk, sums: Any) -> Any:
        found = walk.terms(*walk.logits(chunk, block)[1:], block.valid, tokens.read(known, slots))[:2]
        new = jax.tree.map(lambda total, x: total + x.sum(axis=1), tokens.read(sums, slots), found)
        return tokens.write(sums, walk.vary(new), slots)

    sums = jnp.stack(walk.over_tiles(add_terms, (zeros, zeros), first))
    value, h = axes.psum(vary(sums, axes.tensor), axes.tensor)
    value, residuals = tokens.to_tokens((value, known._replace(h=h)))
    return value if inputs.where is None else jnp.where(inputs.where, value, 0), residuals


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_divergence(rule: DivergenceRule, inputs: Inputs, teacher: Inputs) -> jax.Array:
    """The divergence `f32[N]` of one device's tokens; no gradient flows to the teacher."""
    return evaluate(rule, inputs, teacher)[0]


def _forward(rule: DivergenceRule, inputs: Any, teacher: Any) -> Any:
    inputs, needs = values_and_needs(inputs)
    teacher, _ = values_and_needs(teacher)
    out, residuals = evaluate(rule, inputs, teacher)
    return out, (inputs, teacher, to_save((residuals, needs)))


def _backward(rule: DivergenceRule, left: Any, g: Any) -> Any:
    inputs, teacher, (residuals, needs) = left[0], left[1], saved(left[2])
    g = jnp.zeros(residuals.m.shape, jnp.float32) if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
    known = residuals, of_tokens((g, None, None), rule.student, inputs.where)
    walk = lambda cut, **how: PairWalk(rule, inputs, teacher, cut, **how)  # noqa: E731
    none: Any = Inputs(*[None] * 6)  # type: ignore[arg-type]
    return cotangents_of(inputs, *gradients(walk, rule.student, inputs, needs, known)), none


token_divergence.defvjp(_forward, _backward, symbolic_zeros=True)
