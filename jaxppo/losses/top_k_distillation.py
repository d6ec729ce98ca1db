"""Distillation from a teacher's top-k: only its ids and their log-probs at each position are known.

The tokens without one of the K ids are the tail of both distributions. The tail is one more bucket, is renormalised
away, or is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxppo._arrays import (
    Aggregation,
    check_aggregation,
    check_array,
    check_choice,
    check_floating,
    check_number,
    is_zero,
    needed,
)
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.head.checks import as_id_sets
from jaxppo.head.head import Head
from jaxppo.head.prepare import HeadOptions, prepare_head
from jaxppo.head.types import Entropy, TokenStats
from jaxppo.kl import k3
from jaxppo.losses.token_loss import Constants, Step, TokenLoss, loss_of_hidden, loss_of_stats
from jaxppo.metrics import Metrics, Terms, means
from jaxppo.rules import MAX_LOG_PROB
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes
from jaxppo.validation import checked

TopKDivergence = Literal["forward_kl", "reverse_kl", "mixed_kl", "jensen_shannon"]
Tail = Literal["bucket", "renormalise", "leave_out"]
LEAST_TAIL = 1e-7  # where the K ids have all the mass that f32 can tell


def top_k_divergence(
    log_probs: Float[Array, "*batch K"],
    teacher_log_probs: Float[Array, "*batch K"],
    ids: Int[Array, "*batch K"] | None = None,
    *,
    divergence: TopKDivergence = "forward_kl",
    beta: float | Array = 0.5,
    tail: Tail = "bucket",
) -> Float[Array, "*batch"]:
    """The divergence of a student p from a teacher q if only K of the teacher's log-probs are known.

        forward_kl       sum q log(q / p)
        reverse_kl       sum p log(p / q)
        mixed_kl         beta forward_kl + (1 - beta) reverse_kl
        jensen_shannon   beta KL(q || m) + (1 - beta) KL(p || m),   m = beta q + (1 - beta) p

    The sums are over the K ids. The other tokens, the tail,

        bucket           are one more term, with 1 - sum p and 1 - sum q:    at least 0, at most the full divergence
        renormalise      are dropped: p / sum p and q / sum q replace p, q:  at least 0
        leave_out        are dropped: the sums are over the raw p and q:     may be below 0

    The mixture is not continuous at its ends: as beta goes to 0 or 1 it tends to 0, not to one of the two KLs. So
    "jensen_shannon" refuses both; in place of TRL's alpha = 0 and 1, use "forward_kl" and "reverse_kl". A bucket holds
    at least 1e-7, since f32 cannot resolve less.

    Args:
      log_probs: `f32[..., K]`, the student's, over the whole vocabulary; `stats.id_log_probs`.
      teacher_log_probs: `[..., K]`, the teacher's of the same ids, over the whole vocabulary, at the student's
        temperature; -inf is a probability of 0. Constants.
      ids: `i32[..., K]`, read only for -1, which marks an empty slot without mass; None if no slot is empty.
      divergence: one of the four above.
      beta: for "mixed_kl" in [0, 1], for "jensen_shannon" in (0, 1); the others do not read it.
      tail: one of the three above.

    Returns:
      `f32[...]`, nats; 0 where there is no id. NaN where a log-prob of the teacher is above 0, or, with "bucket", where
      the K have more mass than 1, as ids that stand twice do.

    Raises:
      TypeError, ValueError: arrays that are no log-probs or differ in shape, options out of range.

    Example:
      >>> p, q = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.4, 0.4]))
      >>> [round(float(top_k_divergence(p, q, tail=tail)), 4) for tail in ("bucket", "renormalise", "leave_out")]
      [0.1069, 0.1015, 0.188]

    The bucket: TRL and https://github.com/volcengine/verl/pull/7855. Renormalised: NeMo-RL, the default of TRL. Left
    out: verl. Forward and reverse: Agarwal et al. 2023, GKD, https://arxiv.org/abs/2306.13649
    """
    _check_options(divergence, beta, tail)
    for name, x in (("log_probs", log_probs), ("teacher_log_probs", teacher_log_probs)):
        check_array(name, x, "floats")
        if x.shape != log_probs.shape or not x.ndim or not x.shape[-1]:
            raise ValueError(f"{name}: got shape {x.shape}, expected [..., K] as log_probs, {log_probs.shape}")
    if ids is not None:
        check_array("ids", ids, "integers")
        if ids.shape != log_probs.shape:
            raise ValueError(f"ids: got shape {ids.shape}, expected that of log_probs, {log_probs.shape}")
    there = jnp.ones(log_probs.shape, bool) if ids is None else jnp.asarray(ids) != -1
    log_q = lax.stop_gradient(teacher_log_probs.astype(jnp.float32))
    log_q = jnp.where(log_q <= MAX_LOG_PROB, log_q, jnp.nan)
    log_p, log_q = (with_tail(x.astype(jnp.float32), there, tail) for x in (log_probs, log_q))
    term = partial(_kl_terms, closed=tail != "leave_out")
    if divergence == "forward_kl":
        found = term(log_q, log_p)
    elif divergence == "reverse_kl":
        found = term(log_p, log_q)
    elif divergence == "mixed_kl":
        ways = (beta, log_q, log_p), (1 - beta, log_p, log_q)
        # a term with share 0 is left out, since an infinite divergence times 0 is NaN
        found = sum((share * term(*of) for share, *of in ways if not is_zero(share)), jnp.float32(0))
    else:
        log_m = jnp.logaddexp(log_q + jnp.log(beta), log_p + jnp.log1p(-beta))
        found = beta * term(log_q, log_m) + (1 - beta) * term(log_p, log_m)
    if tail == "bucket":
        there = jnp.concatenate([there, jnp.ones_like(there[..., :1])], axis=-1)
    return jnp.where(there, found, 0).sum(axis=-1)


def _check_options(divergence: TopKDivergence, beta: float | Array, tail: Tail) -> None:
    check_choice("divergence", divergence, TopKDivergence)
    check_choice("tail", tail, Tail)
    check_number("beta", beta, least=0, most=1)
    if divergence == "jensen_shannon" and not isinstance(beta, jax.Array) and beta in (0, 1):
        instead = "'forward_kl' or 'reverse_kl', since the mixture tends to 0 there"
        raise ValueError(
            f"beta: got {beta} with divergence='jensen_shannon', expected a number in (0, 1), or {instead}"
        )


def with_tail(log_p: Float[Array, "*batch K"], there: Bool[Array, "*batch K"], tail: Tail) -> Float[Array, "..."]:
    """The log-probs to compare, with the bucket last; 0 in empty slots."""
    largest = lax.stop_gradient(jnp.where(there, log_p, -jnp.inf).max(axis=-1, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    own = jnp.where(there, log_p, largest)
    sums = jnp.where(there, jnp.exp(own - largest), 0).sum(axis=-1, keepdims=True)
    if tail == "renormalise":
        own = own - largest - jnp.log(jnp.where(sums == 0, 1, sums))
    own = jnp.where(there, own, 0)
    if tail != "bucket":
        return own
    mass = sums * jnp.exp(largest)
    rest = jnp.log1p(-jnp.minimum(mass, 1 - LEAST_TAIL))
    rest = jnp.where(mass <= 1 + MAX_LOG_PROB, rest, jnp.nan)
    return jnp.concatenate([own, rest], axis=-1)


def _kl_terms(log_a: Float[Array, "..."], log_b: Float[Array, "..."], closed: bool) -> Float[Array, "..."]:
    """a log(a / b) - a + b, each at least 0; the sum is that of a log(a / b) where a and b have the same mass.

    That is a (exp(d) - 1 - d), d = log(b / a), where the two are near each other. Where a is 0 it is b.
    """
    a, b = jnp.exp(log_a), jnp.exp(log_b)
    none = a == 0
    d = jnp.where(none, 0, log_b - jnp.where(none, 0, log_a))
    if not closed:
        return -a * d
    near = d < 1
    far = b - a - a * jnp.where(near, 0, d)
    return jnp.where(none, b, jnp.where(near, a * k3(jnp.where(near, d, 0)), far))


def top_k_distillation_loss(
    stats: TokenStats,
    ids: Int[Array, "R T K"],
    teacher_log_probs: Float[Array, "R T K"],
    batch: RolloutBatch,
    *,
    divergence: TopKDivergence = "forward_kl",
    beta: float | Array = 0.5,
    tail: Tail = "bucket",
    aggregation: Aggregation = "token_mean",
    aggregation_norm: float | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """`top_k_divergence` over the loss-carrying tokens: loss = sum over tokens of weight_t * D_t.

    Differentiable in `stats`. Positions with loss mask 0 may hold anything, NaN included.

    Args:
      stats: of `log_probs_from_hidden(..., ids=ids)`, or from logits; its `id_log_probs` are read.
      ids: `i32[R, T, K]`, -1 padded, of a teacher's top-k or the student's own.
      teacher_log_probs: `[R, T, K]`, of these ids; rows of one batch may be of several teachers.
      batch: `[R, T]`; only its sequences and its loss mask are read.
      divergence: see `top_k_divergence`.
      beta: see `top_k_divergence`.
      tail: see `top_k_divergence`.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches), `divergence`, `teacher_mass` and
      `student_mass` (of the ids; means over tokens) and `broken_rules` (see `policy_loss`).

    Raises:
      TypeError, ValueError: as `top_k_divergence`; statistics without log-probs of ids; an unknown aggregation.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> ids = jnp.array([[[2, 0], [3, -1], [-1, -1]]])
      >>> stats = log_probs_from_logits(jnp.zeros((1, 3, 4)), batch.targets, ids=ids, where=batch.loss_mask > 0)
      >>> loss, _ = distillation.top_k_distillation_loss(stats, ids, jnp.log(jnp.full((1, 3, 2), 0.25)), batch)
      >>> float(loss)
      0.0
    """
    batch = checked(batch)
    loss = TopKLoss(divergence, beta, tail, aggregation, aggregation_norm)
    teacher = as_top_k(stats, ids, teacher_log_probs, batch)
    return loss_of_stats("top_k_distillation_loss", loss, stats, batch, parallel, normalizer, teacher)


def top_k_distillation_loss_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    ids: Int[Array, "R T K"],
    teacher_log_probs: Float[Array, "R T K"],
    batch: RolloutBatch,
    *,
    divergence: TopKDivergence = "forward_kl",
    beta: float | Array = 0.5,
    tail: Tail = "bucket",
    aggregation: Aggregation = "token_mean",
    aggregation_norm: float | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    temperature: float | Array = 1.0,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """`top_k_distillation_loss` after `log_probs_from_hidden`, in one pass where the memory has room for it.

    Args:
      hidden: `[R, T, H]`, the student's, see `log_probs_from_hidden`.
      head: the student's `Head`, or its bare kernel `[H, V]`.
      ids: `i32[R, T, K]`, -1 padded, of a teacher's top-k or the student's own.
      teacher_log_probs: `[R, T, K]`, of these ids.
      batch: `[R, T]`; only its sequences, targets and loss mask are read.
      divergence: see `top_k_divergence`.
      beta: see `top_k_divergence`.
      tail: see `top_k_divergence`.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.
      temperature: divides the student's logits; the teacher's log-probs are to be of the same.
      **options: see `HeadOptions`.

    Returns:
      The scalar f32 loss, and the metrics of `top_k_distillation_loss`.

    Raises:
      TypeError, ValueError: as `log_probs_from_hidden` and `top_k_distillation_loss` do.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> teacher = jnp.array([[[2, 0], [3, -1], [-1, -1]]]), jnp.log(jnp.full((1, 3, 2), 0.5))
      >>> states = jnp.ones((1, 3, 2)), jnp.zeros((2, 4))
      >>> loss, _ = distillation.top_k_distillation_loss_from_hidden(*states, *teacher, batch, tail="renormalise")
      >>> round(float(loss), 6)
      0.0
    """
    batch = checked(batch)
    loss = TopKLoss(divergence, beta, tail, aggregation, aggregation_norm)
    teacher = ids_and_log_probs(ids, teacher_log_probs, batch)
    prepared = prepare_head(
        hidden,
        head,
        batch.targets,
        parallel=parallel,
        temperature=temperature,
        entropy=loss.entropy,
        ids=teacher[0],
        where=batch.loss_mask > 0,
        options=options,
    )
    name = "top_k_distillation_loss_from_hidden"
    return loss_of_hidden(name, loss, prepared, batch, parallel, normalizer, teacher)


def as_top_k(
    stats: TokenStats,
    ids: Int[Array, "R T K"],
    log_probs: Float[Array, "R T K"],
    batch: RolloutBatch,
    name: str = "teacher_log_probs",
) -> tuple[Array, Array]:
    """Ids and log-probs `[R, T, K]` that belong to the log-probs of the statistics."""
    if not isinstance(stats, TokenStats):
        raise TypeError(f"stats: got {type(stats).__name__}, expected TokenStats")
    own = own_log_probs(stats)
    found = ids_and_log_probs(ids, log_probs, batch, name)
    if own.shape != found[0].shape:
        raise ValueError(f"stats.id_log_probs: got shape {own.shape}, expected that of ids, {ids.shape}")
    return found


def ids_and_log_probs(
    ids: Int[Array, "R T K"],
    log_probs: Float[Array, "R T K"],
    batch: RolloutBatch,
    name: str = "teacher_log_probs",
) -> tuple[Array, Array]:
    """Ids and log-probs `[R, T, K]`, checked; `name` is that of the log-probs in errors."""
    ids = as_id_sets("ids", ids, batch.loss_mask.shape)
    check_floating(name, log_probs, 3, "[R, T, K]")
    if log_probs.shape != ids.shape:
        raise ValueError(f"{name}: got shape {log_probs.shape}, expected that of ids, {ids.shape}")
    return ids, jnp.asarray(log_probs)


@dataclasses.dataclass(frozen=True)
class TopKLoss(TokenLoss):
    """The divergence itself; its constants are the ids and the teacher's log-probs."""

    divergence: TopKDivergence = "forward_kl"
    beta: float | Array = 0.5
    tail: Tail = "bucket"
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None

    def __post_init__(self) -> None:
        _check_options(self.divergence, self.beta, self.tail)
        check_aggregation(self.aggregation, self.aggregation_norm)

    @property
    def token_local(self) -> bool:
        return True

    @property
    def entropy(self) -> Entropy:
        return "none"

    def ruled(self, stats: TokenStats | None, batch: RolloutBatch) -> Mapping[str, Array | None]:
        return {"log_probs": None if stats is None else stats.log_probs}

    def per_token(
        self, stats: TokenStats, batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        ids, log_p, log_q = of_ids(stats, constants, batch.loss_mask)
        return top_k_divergence(log_p, log_q, ids, divergence=self.divergence, beta=self.beta, tail=self.tail)

    def terms(self, stats: TokenStats, step: Step, constants: Constants) -> Terms:
        mask = step.batch.loss_mask
        ids, log_p, log_q = of_ids(stats, constants, mask)
        masses = {"teacher_mass": mass(log_q, ids), "student_mass": mass(log_p, ids)}
        return means({"divergence": self.per_token(stats, step.batch, constants, step.segments), **masses}, mask)


def of_ids(
    stats: TokenStats, constants: Constants, mask: Float[Array, "R T"]
) -> tuple[Int[Array, "R T K"], Float[Array, "R T K"], Float[Array, "R T K"]]:
    """The ids, -1 where the mask is 0 too, and their log-probs in the statistics and in a call; 0 without an id."""
    ids, given = constants[1]
    ids = jnp.where(mask[..., None] > 0, ids, -1)
    own, given = (jnp.where(ids == -1, 0, x.astype(jnp.float32)) for x in (own_log_probs(stats), given))
    return ids, own, given


def own_log_probs(stats: TokenStats) -> Float[Array, "R T K"]:
    """The log-probs of ids that statistics hold."""
    return needed("stats.id_log_probs", stats.id_log_probs, "f32[R, T, K]: log_probs_from_hidden(..., ids=ids)")


def mass(log_probs: Float[Array, "R T K"], ids: Int[Array, "R T K"]) -> Float[Array, "R T"]:
    """The probability of all ids together."""
    return jnp.where(ids == -1, 0, jnp.exp(log_probs)).sum(axis=-1)


def check_top_k(
    ids: Int[Array | np.ndarray, "*batch K"], log_probs: Float[Array | np.ndarray, "*batch K"], vocab_size: int
) -> None:
    """Raises at the first invalid entry of a teacher's top-k; on the host, before a step.

    Ids are -1 or in `[0, vocab_size)`, none twice at a position; log-probs at most 0 and no NaN, where there is an id;
    their mass at most 1.

    Args:
      ids: `[..., K]`, of numpy or on a device.
      log_probs: `[..., K]`.
      vocab_size: V.

    Raises:
      ValueError: shapes that differ, or an entry, with its place.

    Example:
      >>> distillation.check_top_k(np.array([[5, 5]]), np.log([[0.5, 0.25]]), vocab_size=10)
      Traceback (most recent call last):
      ...
      ValueError: ids: got 5 at (0, 1), expected each id once at a position
    """
    ids, log_probs = np.asarray(ids), np.asarray(log_probs, np.float64)
    if ids.shape != log_probs.shape:
        raise ValueError(f"log_probs: got shape {log_probs.shape}, expected that of ids, {ids.shape}")
    there, order = ids != -1, np.argsort(ids, axis=-1, kind="stable")
    ordered = np.take_along_axis(ids, order, axis=-1)
    twice = np.zeros_like(there)
    again = np.concatenate([np.zeros_like(there[..., :1]), ordered[..., 1:] == ordered[..., :-1]], axis=-1)
    np.put_along_axis(twice, order, again, axis=-1)
    mass = np.where(there, np.exp(np.where(there, log_probs, 0)), 0).sum(axis=-1, keepdims=True)
    rules = (
        ("ids", ids, (ids < -1) | (ids >= vocab_size), f"-1 or 0 to {vocab_size - 1}"),
        ("ids", ids, twice & there, "each id once at a position"),
        ("log_probs", log_probs, there & ~(log_probs <= MAX_LOG_PROB), f"log-probs of at most {MAX_LOG_PROB}"),
        ("the mass of log_probs", mass, mass > 1 + MAX_LOG_PROB, "at most 1"),
    )
    for name, x, bad, expected in rules:
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"{name}: got {x[place]} at {place}, expected {expected}")
