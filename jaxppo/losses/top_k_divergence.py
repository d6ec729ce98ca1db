"""Distillation from a teacher of whom only the top-k is known: K ids at each position, and their
log-probs.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import (
    KINDS,
    MAX_LOG_PROB,
    MAX_SAMPLED,
    Aggregation,
    check,
    check_alike,
    check_array,
    check_choice,
    check_number,
    is_number,
    is_zero,
    needed,
    sound,
)
from jaxppo.base.kl import k3, kl_divergence
from jaxppo.base.metrics import Terms, means
from jaxppo.base.pytree import PyTree
from jaxppo.batch.extras import check_name, extra_of
from jaxppo.batch.reads import at_most_one, at_most_zero, was_above_one
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import TokenStats
from jaxppo.head.token_arguments import as_id_sets
from jaxppo.losses.token_loss import Asks, Losses, Reads, TokenLoss, WeighedBatch, for_each
from jaxppo.policy.unusable import Unusable, UnusableRule, check_rule
from jaxppo.sharding import Segments

TopKDivergence = Literal[
    "forward_kl",
    "reverse_kl",
    "mixed_kl",
    "jensen_shannon",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "adaptive_kl",
]
Tail = Literal["bucket", "renormalise", "leave_out"]
# the last is read from a token that was drawn
TailOfLoss = Literal["bucket", "renormalise", "leave_out", "sampled"]
PerId = Float[Array, "R T K"]


def top_k_divergence(
    log_probs: Float[Array, "*batch K"],
    teacher_log_probs: Float[Array, "*batch K"],
    ids: Int[Array, "*batch K"] | None = None,
    *,
    divergence: TopKDivergence = "forward_kl",
    beta: float | Array = 0.5,
    tail: Tail = "bucket",
) -> Float[Array, "*batch"]:
    """The divergence of a student p from a teacher q if only K of the teacher's log-probs are
    known.

        forward_kl       sum q log(q / p)
        reverse_kl       sum p log(p / q)
        mixed_kl         beta forward_kl + (1 - beta) reverse_kl
        jensen_shannon   beta KL(q || m) + (1 - beta) KL(p || m),   m = beta q + (1 - beta) p
        skewed_forward_kl   KL(q || beta q + (1 - beta) p)
        skewed_reverse_kl   KL(p || beta p + (1 - beta) q)
        adaptive_kl      g forward_kl + (1 - g) reverse_kl, with g = sum |q - p| over the head / sum |q - p| over all;
                         the head are the tokens but the least likely of q, those with together at most beta

    The sums are over the K ids. The other tokens, the tail,

        bucket           are one more term, with 1 - sum p and 1 - sum q:    at least 0, at most the full divergence
        renormalise      are dropped: p / sum p and q / sum q replace p, q:  at least 0
        leave_out        are dropped: the sums are over the raw p and q:     may be below 0

    As beta goes to 0 or 1 "jensen_shannon" tends to 0, not to one of the two KLs: use "forward_kl"
    and "reverse_kl" in place of TRL's alpha = 0 and 1. A bucket holds at least 1e-7, as f32
    resolves no less.

    Args:
      log_probs: `f32[..., K]`, the student's, over the whole vocabulary; `stats.id_log_probs`.
      teacher_log_probs: `[..., K]`, the teacher's of the same ids, over the whole vocabulary, at
        the student's temperature, in any float dtype; -inf is a probability of 0. Constants. As
        bf16 rounds them they may be up to 0.125 above 0, and so may the log of their mass: both are
        then capped at 0.
      ids: `i32[..., K]`, read only for -1, which marks an empty slot without mass; None if no slot
        is empty.
      divergence: one of the seven above.
      beta: for "mixed_kl" and "adaptive_kl" in [0, 1], for "jensen_shannon" and the skewed ones in
        (0, 1); "forward_kl" and "reverse_kl" do not read it. ROLL has 0.1 for the skewed ones, 0.5
        for the adaptive one.
      tail: one of the three above.

    Returns:
      `f32[...]`, nats; 0 where there is no id. NaN where a log-prob of the teacher is beyond these
      bounds, or one of the student's above 0 by more than rounding, as probabilities are; or, with
      "bucket", where the K ids have more mass, as duplicate ids may.

    Raises:
      TypeError, ValueError: arrays that are no log-probs or differ in shape, options out of range.

    Example:
      >>> p, q = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.4, 0.4]))
      >>> [round(float(top_k_divergence(p, q, tail=tail)), 4) for tail in ("bucket", "renormalise", "leave_out")]
      [0.1069, 0.1015, 0.188]

    The bucket: TRL 1.16, by default, and https://github.com/volcengine/verl/pull/7855.
    Renormalised: NeMo-RL. Left out:
    verl. Forward and reverse: Agarwal et al. 2023, GKD, https://arxiv.org/abs/2306.13649. Skewed:
    Ko et al. 2024, DistiLLM, https://arxiv.org/abs/2402.03898; adaptive: Wu et al. 2024,
    https://arxiv.org/abs/2404.02657; both in ROLL
    """
    beta = checked_options(divergence, beta)
    check_choice("tail", tail, Tail)
    arrays = {"log_probs": log_probs, "teacher_log_probs": teacher_log_probs}
    check_alike(arrays if ids is None else {**arrays, "ids": ids})
    check("log_probs", f"shape {log_probs.shape}", any(log_probs.shape[-1:]), "[..., K]")
    has_id = jnp.ones(log_probs.shape, bool) if ids is None else jnp.asarray(ids) != -1
    return _divergence(log_probs, teacher_log_probs, has_id, divergence, beta, tail)


def _divergence(
    log_probs: Float[Array, "*batch K"],
    teacher_log_probs: Float[Array, "*batch K"],
    has_id: Bool[Array, "*batch K"],
    divergence: TopKDivergence,
    beta: float | Array,
    tail: Tail,
) -> Float[Array, "*batch"]:
    """See `top_k_divergence`; beta is a checked number, or one for each position, `[..., 1]`."""
    both = _sound_log_probs(log_probs, teacher_log_probs, has_id)
    log_p, log_q = (with_tail(x, has_id, tail) for x in both)
    there = (
        jnp.concatenate([has_id, jnp.ones_like(has_id[..., :1])], axis=-1)
        if tail == "bucket"
        else has_id
    )
    kl = partial(_kl_terms, closed=tail != "leave_out")

    def mixture(log_a: Array, log_b: Array) -> Array:
        return jnp.logaddexp(log_a + jnp.log(beta), log_b + jnp.log1p(-beta))

    if divergence == "skewed_forward_kl":
        by_id = kl(log_q, mixture(log_q, log_p))
    elif divergence == "skewed_reverse_kl":
        by_id = kl(log_p, mixture(log_p, log_q))
    elif divergence == "jensen_shannon":
        log_m = mixture(log_q, log_p)
        by_id = beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    else:
        share = {"forward_kl": 1, "reverse_kl": 0}.get(divergence, beta)
        if divergence == "adaptive_kl":
            share = lax.stop_gradient(_head_share(jnp.exp(log_p), jnp.exp(log_q), there, beta))
        by_id = jnp.float32(0)
        for weight, log_a, log_b in ((share, log_q, log_p), (1 - share, log_p, log_q)):
            if not is_zero(weight):
                # a term with share 0 is left out, since an infinite divergence times 0 is NaN
                off = jnp.asarray(weight) == 0
                by_id = by_id + weight * kl(*(jnp.where(off, 0, x) for x in (log_a, log_b)))
    return jnp.where(there, by_id, 0).sum(axis=-1)


def _sound_log_probs(
    log_probs: Float[Array, "*batch K"],
    teacher_log_probs: Float[Array, "*batch K"],
    has_id: Bool[Array, "*batch K"],
) -> tuple[Float[Array, "*batch K"], Float[Array, "*batch K"]]:
    """Both in f32, the teacher's constant and of a mass of at most 1; NaN where one cannot be a
    log-prob.
    """
    log_p = jnp.where(has_id, sound("log_probs", log_probs), 0).astype(jnp.float32)
    log_q = lax.stop_gradient(teacher_log_probs.astype(jnp.float32))
    return log_p, at_most_one(jnp.where(log_q <= MAX_SAMPLED, log_q, jnp.nan), has_id)


def checked_options(divergence: TopKDivergence, beta: float | Array) -> float | Array:
    """The checked beta, NaN where it is an array out of its range."""
    check_choice("divergence", divergence, TopKDivergence)
    if divergence == "jensen_shannon" and is_number(beta) and beta in (0, 1):
        expected = (
            "a number in (0, 1), or 'forward_kl' or 'reverse_kl', since the mixture tends to 0"
            " there"
        )
        raise ValueError(f"beta: got {beta} with divergence='jensen_shannon', expected {expected}")
    if divergence == "jensen_shannon" or divergence.startswith("skewed"):
        return check_number("beta", beta, above=0, below=1)
    return check_number("beta", beta, least=0, most=1)


def with_tail(
    log_p: Float[Array, "*batch K"], has_id: Bool[Array, "*batch K"], tail: Tail
) -> Float[Array, "..."]:
    """The log-probs to compare, with the bucket last; 0 in empty slots."""
    largest = lax.stop_gradient(jnp.where(has_id, log_p, -jnp.inf).max(axis=-1, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    own = jnp.where(has_id, log_p, largest)
    sums = jnp.where(has_id, jnp.exp(own - largest), 0).sum(axis=-1, keepdims=True)
    if tail == "renormalise":
        own = own - largest - jnp.log(jnp.where(sums == 0, 1, sums))
    own = jnp.where(has_id, own, 0)
    if tail != "bucket":
        return own
    mass = sums * jnp.exp(largest)
    rest = jnp.log1p(-jnp.minimum(mass, 1 - 1e-7))  # f32 can tell no smaller tail
    rest = jnp.where(mass <= 1 + MAX_LOG_PROB, rest, jnp.nan)
    return jnp.concatenate([own, rest], axis=-1)


def _kl_terms(
    log_a: Float[Array, "..."], log_b: Float[Array, "..."], closed: bool
) -> Float[Array, "..."]:
    """a log(a / b) - a + b, each at least 0; the sum is that of a log(a / b) where a and b have the
    same mass.

    That is a (exp(d) - 1 - d), d = log(b / a), where the two are near each other. Where a is 0 it
    is b.
    """
    a = jnp.exp(log_a)
    b = jnp.exp(log_b)
    none = a == 0
    d = jnp.where(none, 0, log_b - jnp.where(none, 0, log_a))
    if not closed:
        return -a * d
    near = d < 1
    far = b - a - a * jnp.where(near, 0, d)
    return jnp.where(none, b, jnp.where(near, a * k3(jnp.where(near, d, 0)), far))


def _head_share(
    p: Float[Array, "*batch K"],
    q: Float[Array, "*batch K"],
    there: Bool[Array, "*batch K"],
    beta: float | Array,
) -> Float[Array, "*batch 1"]:
    """The share of |q - p| outside the least likely tokens of q, which have at most beta
    together.
    """
    gap = jnp.where(there, jnp.abs(q - p), 0)
    q = jnp.where(there, q, 0)
    order = jnp.argsort(q, axis=-1)
    least = jnp.cumsum(jnp.take_along_axis(q, order, axis=-1), axis=-1) <= beta
    head = jnp.where(least, 0, jnp.take_along_axis(gap, order, axis=-1)).sum(axis=-1, keepdims=True)
    whole = gap.sum(axis=-1, keepdims=True)
    return head / jnp.where(whole == 0, 1, whole)


def _of_ids_alone(log_p: PerId, log_q: PerId, has_id: Bool[Array, "R T K"]) -> Float[Array, "R T"]:
    """The sum over the ids of p log(p / q) - p + q: reverse KL of masses that need not be 1, at
    least 0.
    """
    log_p, log_q = (
        with_tail(x, has_id, "leave_out") for x in _sound_log_probs(log_p, log_q, has_id)
    )
    return jnp.where(has_id, _kl_terms(log_p, log_q, closed=True), 0).sum(axis=-1)


class OfIds(TokenLoss[TokenStats]):
    """A loss of several ids at each position, which are two extras of the batch: the ids, and
    another's log-probs.
    """

    ids: str
    log_probs: str
    rule: ClassVar[str] = "teacher_log_probs"  # the name of the rule for these log-probs
    # whom the statistics and these log-probs are of
    sides: ClassVar[tuple[str, str]] = ("student", "teacher")

    @property
    def asks(self) -> Asks:
        return Asks("none", ids=self.ids, extras=(self.ids, self.log_probs))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("ids", self.ids)
        check_name("log_probs", self.log_probs)

    def check(self, batch: RolloutBatch) -> None:
        what = f"batch.extras[{self.ids!r}]"
        ids = extra_of(batch, self.ids, f"i32[R, T, K] for {self}")
        check_array(what, ids, kind=KINDS["ids"])
        as_id_sets(what, ids, batch.loss_mask.shape)
        what = f"batch.extras[{self.log_probs!r}]"
        log_probs = extra_of(batch, self.log_probs, f"f32[R, T, K] for {self}")
        kind = KINDS["teacher_log_probs"]
        check_array(what, log_probs, ids.shape, f"that of {self.ids!r}", kind)

    def check_stats(self, stats: PyTree, batch: RolloutBatch) -> None:
        super().check_stats(stats, batch)
        how = "f32[R, T, K]: log_probs_from_hidden(..., ids=ids)"
        own = needed("stats.id_log_probs", stats.id_log_probs, how).shape
        shape = batch.extras[self.ids].shape
        check("stats.id_log_probs", f"shape {own}", own == shape, f"that of {self.ids!r}, {shape}")

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        arrays = {"ids": batch.extras[self.ids], self.rule: batch.extras[self.log_probs]}
        if stats is not None:
            arrays["id_log_probs"] = stats.id_log_probs
            if stats.ids is not None:
                arrays["ids_of_stats"] = stats.ids
        left_out = self.left_out(stats, batch)
        if left_out is not None:
            arrays[self.rule] = jnp.where(
                left_out[..., None], -jnp.inf, batch.extras[self.log_probs]
            )
        return arrays

    def of_ids(
        self, stats: TokenStats, batch: RolloutBatch
    ) -> tuple[Int[Array, "R T K"], PerId, PerId]:
        """The ids, -1 where the mask is 0 too, their log-probs in the statistics and the
        other's; 0 without an id.
        """
        ids = jnp.where(batch.loss_mask[..., None] > 0, batch.extras[self.ids], -1)
        own = needed("stats.id_log_probs", stats.id_log_probs, "f32[R, T, K]")
        other = batch.extras[self.log_probs]
        own = jnp.where(ids == -1, 0, own.astype(jnp.float32))
        other = jnp.where(ids == -1, 0, other.astype(jnp.float32))
        return ids, own, other

    def metrics(self, stats: TokenStats, weighed: WeighedBatch, constants: PyTree) -> Terms:
        """The probability of all ids together, of both sides, and at how many tokens rounding
        made it too large.
        """
        ids, *log_probs = self.of_ids(stats, weighed.batch)
        masses = (jnp.where(ids == -1, 0, jnp.exp(x)).sum(axis=-1) for x in log_probs)
        masses_of_sides = means(
            {f"{side}_mass": x for side, x in zip(self.sides, masses, strict=True)},
            weighed.batch.loss_mask,
        )
        capped = was_above_one(log_probs[1], ids != -1)
        return masses_of_sides | {
            f"{self.sides[1]}_capped": (capped, weighed.batch.loss_mask, "sum")
        }


@dataclasses.dataclass(frozen=True)
class TopKDistillation(OfIds):
    """`top_k_divergence` from a teacher's top-k over tokens: loss = sum over tokens of weight_t *
    D_t.

    `loss_from_stats` takes statistics with these ids, from `log_probs_from_hidden(..., ids=)` or
    from logits. Different rows may have different teachers.

    With `tail="sampled"` the drawn token y, the target, stands for all tokens that are not among
    the ids. With p of the student and q of the teacher,

        D_t = sum over the ids of (p log(p / q) - p + q) + [y is no id] (q_y / p_y - 1 + log(p_y / q_y))

    and the gradient of the second term is log(p_y / q_y) grad log p_y. Over tokens that the student
    itself draws, D_t and its gradient are on average those of KL(p | q) over the whole vocabulary.
    D_t is at least 0. Where student and teacher agree, value and gradient are 0 for every drawn
    token. Over tokens of an older policy the tail is biased; the other tails, and
    `distillation.distillation_loss`, do not depend on the drawn token.

    The metrics are `loss` (adds up over micro-batches), `divergence`, `teacher_mass` and
    `student_mass` (of the ids; means over tokens), `teacher_capped` (see docs/metrics.md) and
    `broken_rules` (see `policy_loss`).

    Args:
      divergence, beta: see `top_k_divergence`.
      tail: see `top_k_divergence`; or "sampled", for "reverse_kl".
      aggregation, aggregation_norm: the denominators, see `token_weights`.
      ids: the name of the extra of the batch that holds the ids of a teacher's top-k, or of the
        student's own, `i32[R, T, K]`, -1 padded. They may be anything where this loss has no token.
        Parts that compare ids share them.
      log_probs: the name of the extra that holds the teacher's log-probs of these ids, see
        `top_k_divergence`.
      target_log_probs: the name of the extra that holds the teacher's log-probs of the targets,
        `[R, T]`, also of those that are ids; read for the tail "sampled" alone.
      unusable: "nan", or `Unusable("weight_0")`: a token for which a log-prob of the teacher is NaN
        or inf has no loss, and the metric `unusable_tokens` counts it. It stays in the
        denominators. With the tail "sampled" that of the target must be finite, and the student's
        not -inf.

    Raises:
      ValueError: an option out of its range, another divergence than "reverse_kl" with the tail
        "sampled", another rule for unusable tokens.

    Example:
      >>> from jaxppo.batch.extras import Extra
      >>> teacher = {"teacher_ids": Extra([[2, 0], [3, -1]], fill=-1), "teacher_log_probs": np.log([[0.5, 0.5]] * 2)}
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1, extras=teacher)], row_length=3)
      >>> loss = TopKDistillation(tail="renormalise")
      >>> round(float(loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch, loss)[0]), 6)
      0.0

    The tail "sampled": the terms of the ids are those of MOPD, https://arxiv.org/abs/2606.30406.
    NeMo-RL's open https://github.com/NVIDIA-NeMo/RL/pull/3608 has 1 + log(p / q) in both gradients:
    the same on average, with noise also where student and teacher agree.
    """

    divergence: TopKDivergence = "forward_kl"
    beta: float | Array = 0.5
    tail: TailOfLoss = "bucket"
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None
    ids: str = "teacher_ids"
    log_probs: str = "teacher_log_probs"
    target_log_probs: str = "teacher_target_log_probs"
    unusable: UnusableRule = "nan"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("target_log_probs", self.target_log_probs)
        check_choice("tail", self.tail, TailOfLoss)
        object.__setattr__(self, "beta", checked_options(self.divergence, self.beta))
        if self.tail == "sampled":
            expected = "'reverse_kl' with tail='sampled', whose tokens the student has drawn"
            check("divergence", repr(self.divergence), self.divergence == "reverse_kl", expected)
        check_rule(self.unusable)
        good = self.unusable in ("nan", Unusable("weight_0"))
        expected = (
            "'nan' or Unusable('weight_0'): there is no ratio, and denominators do not depend on"
            " the teacher"
        )
        check("unusable", repr(self.unusable), good, expected)

    @property
    def asks(self) -> Asks:
        names: tuple[str, ...] = (self.ids, self.log_probs)
        if self.tail == "sampled":
            names = (*names, self.target_log_probs)
        return Asks("none", ids=self.ids, extras=names)

    def check(self, batch: RolloutBatch) -> None:
        super().check(batch)
        if self.tail != "sampled":
            return
        expected = f"f32[R, T], the teacher's log-probs of the targets, for {self}"
        log_probs = extra_of(batch, self.target_log_probs, expected)
        what = f"batch.extras[{self.target_log_probs!r}]"
        kind = KINDS["teacher_log_probs"]
        check_array(what, log_probs, batch.loss_mask.shape, "the batch's", kind)

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        arrays = {**super().reads(stats, batch, segments)}
        if self.tail != "sampled":
            return arrays
        target_log_probs = {"teacher_target_log_probs": batch.extras[self.target_log_probs]}
        if stats is not None:
            target_log_probs["log_probs"] = stats.log_probs
        left_out = self.left_out(stats, batch)
        if left_out is not None:
            target_log_probs = {
                name: jnp.where(left_out, 0, x) for name, x in target_log_probs.items()
            }
        return arrays | target_log_probs

    def left_out(self, stats: TokenStats | None, batch: RolloutBatch) -> Bool[Array, "R T"] | None:
        """The loss tokens that lack a log-prob: of an id -inf is one, of a probability of 0."""
        if self.unusable == "nan":
            return None
        has_id = batch.extras[self.ids] != -1
        lacks = (has_id & ~(batch.extras[self.log_probs] < jnp.inf)).any(axis=-1)
        if self.tail == "sampled":
            lacks = lacks | ~jnp.isfinite(batch.extras[self.target_log_probs])
            if stats is not None:
                lacks = lacks | jnp.isneginf(stats.log_probs)
        return (batch.loss_mask > 0) & lacks

    def terms(
        self, stats: TokenStats, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        ids, log_p, log_q = self.of_ids(stats, batch)
        has_id = ids != -1
        if self.tail == "sampled":
            divergences = _of_ids_alone(log_p, log_q, has_id) + self._of_drawn_token(
                stats, batch, ids
            )
        else:
            divergences = _divergence(
                log_p, log_q, has_id, self.divergence, for_each(self.beta), self.tail
            )
        return {"divergence": divergences}

    def _of_drawn_token(
        self, stats: TokenStats, batch: RolloutBatch, ids: Int[Array, "R T K"]
    ) -> Float[Array, "R T"]:
        """What the target adds where it is none of the ids: it stands for all tokens that are
        none.
        """
        teachers = at_most_zero(batch.extras[self.target_log_probs].astype(jnp.float32))
        is_id = (ids == batch.targets[..., None]).any(axis=-1)
        return jnp.where(is_id, 0, kl_divergence(stats.log_probs, teachers, "k3+"))

    def metrics(self, stats: TokenStats, weighed: WeighedBatch, constants: PyTree) -> Terms:
        terms = self.terms(stats, weighed.batch, constants, weighed.segments)
        return super().metrics(stats, weighed, constants) | means(terms, weighed.batch.loss_mask)
