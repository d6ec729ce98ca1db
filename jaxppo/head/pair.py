"""The custom gradient rule of a divergence between two heads: both vocabularies walked together, block by block."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo._sharding import vary
from jaxppo.head import softmax
from jaxppo.head.columns import Block
from jaxppo.head.hidden_rule import Inputs, Rule, Walk, cotangents, gradients, values_and_needs
from jaxppo.head.tokens import Slots


@dataclasses.dataclass(frozen=True)
class DivergenceRule:
    """What is static: the two heads, whose blocks hold the same columns, and the divergence."""

    student: Rule
    teacher: Rule
    divergence: str
    beta: float


class LogSums(NamedTuple):
    """Of a token, f32[N] each: the student's and the teacher's m and log s, and the sum of h (see `terms`)."""

    m: Array
    log_s: Array
    teacher_m: Array
    teacher_log_s: Array
    h: Array


class PairBlock(NamedTuple):
    """A block of the student's vocabulary, and the same columns of the teacher's."""

    kernel: jax.Array
    bias: Any
    lora_b: Any
    columns: jax.Array
    valid: jax.Array
    teacher: Block


def terms(
    divergence: str, beta: float, log_p: Float[Array, "..."], log_q: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """What each column of student p and teacher q adds to the divergence D, and h = d D / d log p with p unconstrained.

    Through the softmax, d D / d z_j = h_j - p_j * sum(h).
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    weighted = lambda weight, log: jnp.where(weight > 0, weight * log, 0)  # noqa: E731
    if divergence == "reverse_kl":
        value = weighted(p, log_p - log_q)
        return value, value
    if divergence == "forward_kl":
        return weighted(q, log_q - log_p), -q
    log_mixture = jnp.logaddexp(log_q + jnp.log(beta), log_p + jnp.log1p(-beta))
    h = (1 - beta) * weighted(p, log_p - log_mixture)
    return h + beta * weighted(q, log_q - log_mixture), h


class PairWalk(Walk):
    """One device's tokens against its blocks of both vocabularies; gradients are the student's."""

    def __init__(self, rule: DivergenceRule, inputs: Inputs, teacher: Inputs):
        super().__init__(rule.student, inputs)
        self.pair, self.teacher = rule, Walk(rule.teacher, teacher)
        self.axes = self.axes | self.teacher.axes

    def block(self, i: Any) -> PairBlock:  # type: ignore[override]
        return PairBlock(*super().block(i), teacher=self.teacher.block(i))

    def pair_logits(self, block: PairBlock, slots: Slots) -> tuple[Any, Any]:
        """The student's and the teacher's f32 logits `[block tokens, B]`."""
        rows, teacher_rows = self.tokens.take((self.features, self.teacher.features), slots)
        temperature = self.temperature(slots)
        z = self.head.logits(rows, block, temperature)  # type: ignore[arg-type]
        return z, self.teacher.head.logits(teacher_rows, block.teacher, temperature)

    def terms(self, z: jax.Array, teacher_z: jax.Array, valid: jax.Array, sums: LogSums) -> tuple[Any, Any, Any]:
        """`terms` and the student's log p of a block, 0 and -inf in columns that do not exist."""
        column = lambda x: x[:, None]  # noqa: E731
        log_p = (z - column(sums.m)) - column(sums.log_s)
        log_q = (teacher_z - column(sums.teacher_m)) - column(sums.teacher_log_s)
        found = terms(self.pair.divergence, self.pair.beta, log_p, jnp.where(valid, log_q, 0))
        value, h = (jnp.where(valid, x, 0) for x in found)
        return value, h, log_p

    def block_gradient(
        self, block: Any, slots: Slots, counts: Any, residuals: Any, per_token: Any, stored: None = None
    ) -> Any:
        z, teacher_z = self.pair_logits(block, slots)
        sums = self.tokens.read(residuals, slots)
        _, h, log_p = self.terms(z, teacher_z, block.valid, sums)
        g = self.tokens.take(per_token, slots)
        dz = g[:, None] * (h - jnp.exp(log_p) * sums.h[:, None])
        return self.head.product_gradient(dz, z, counts, block, self.temperature(slots))


def evaluate(rule: DivergenceRule, inputs: Inputs, teacher: Inputs) -> tuple[jax.Array, LogSums]:
    """The divergence `f32[N]`, and the residuals in slot order: one walk for the sums, one for the divergence."""
    walk = PairWalk(rule, inputs, teacher)
    tokens = walk.tokens

    def over_blocks(token_step: Any, start: Any) -> Any:
        def vocabulary_block(i: Any, carry: Any) -> Any:
            block = walk.block(i)

            def token_block(slots: Slots, carry: Any) -> Any:
                z, teacher_z = walk.pair_logits(block, slots)
                new = token_step(z, teacher_z, block, slots, tokens.read(carry, slots))
                return tokens.write(carry, walk.vary(new), slots)

            return tokens.loop(token_block, carry)

        return lax.fori_loop(0, walk.vocabulary_blocks, vocabulary_block, walk.vary(start))

    def add_sums(z: Any, teacher_z: Any, block: PairBlock, slots: Slots, old: Any) -> Any:
        return tuple(
            softmax.merge(sums, softmax.block_sums(x, 0 * sums.z_y, block.valid, None, sums))
            for x, sums in zip((z, teacher_z), old, strict=True)
        )

    empty = softmax.empty_sums(tokens.count, full=True, entropy=False, nucleus=False)
    both = jax.tree.map(lambda *x: jnp.concatenate(x), *over_blocks(add_sums, (empty, empty)))
    both = softmax.combine(both, walk.head.axes)
    (m, teacher_m), (log_s, teacher_log_s) = jnp.split(both.m, 2), jnp.split(jnp.log(both.s), 2)
    zeros = walk.zeros(tokens.count)
    known = LogSums(m, log_s, teacher_m, teacher_log_s, zeros)

    def add_terms(z: Any, teacher_z: Any, block: PairBlock, slots: Slots, old: Any) -> Any:
        found = walk.terms(z, teacher_z, block.valid, tokens.read(known, slots))
        return jax.tree.map(lambda total, x: total + x.sum(axis=1), old, found[:2])

    sums = jnp.stack(over_blocks(add_terms, (zeros, zeros)))
    value, h = walk.head.axes.psum(vary(sums, walk.head.axes.tensor), walk.head.axes.tensor)
    value = tokens.to_tokens(value)
    return value if inputs.where is None else jnp.where(inputs.where, value, 0), known._replace(h=h)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_divergence(rule: DivergenceRule, inputs: Inputs, teacher: Inputs) -> jax.Array:
    """The divergence `f32[N]` of one device's tokens; no gradient flows to the teacher."""
    return evaluate(rule, inputs, teacher)[0]


def _forward(rule: DivergenceRule, inputs: Any, teacher: Any) -> Any:
    inputs, needs = values_and_needs(inputs)
    teacher, _ = values_and_needs(teacher)
    out, residuals = evaluate(rule, inputs, teacher)
    return out, (inputs, teacher, residuals, needs)


def _backward(rule: DivergenceRule, saved: Any, g: Any) -> Any:
    inputs, teacher, residuals, needs = saved
    walk = PairWalk(rule, inputs, teacher)
    g = jnp.zeros(walk.tokens.count, jnp.float32) if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
    none: Any = Inputs(*[None] * 6)  # type: ignore[arg-type]
    return cotangents(inputs, *gradients(walk, needs, residuals, g)), none


token_divergence.defvjp(_forward, _backward, symbolic_zeros=True)
