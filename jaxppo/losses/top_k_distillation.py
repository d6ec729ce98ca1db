"""Distillation from a teacher's top-k: only its ids and their log-probs at each position are known."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxppo._arrays import Aggregation, check_aggregation, check_array, needed
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.head.checks import as_id_sets
from jaxppo.head.head import Head
from jaxppo.head.prepare import HeadOptions, prepare_head
from jaxppo.head.types import Entropy, TokenStats
from jaxppo.losses.token_loss import Constants, Reads, Step, TokenLoss, loss_of_hidden, loss_of_stats
from jaxppo.losses.top_k_divergence import Tail, TopKDivergence, checked_options, top_k_divergence
from jaxppo.metrics import Metrics, Terms, means
from jaxppo.reads import was_above_one
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes
from jaxppo.validation import check_stats, checked


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
      teacher_log_probs: `[R, T, K]`, of these ids, in any float dtype; different rows may have different teachers. See
        `top_k_divergence`.
      batch: `[R, T]`; only its sequences, loss mask and loss weights are read.
      divergence: see `top_k_divergence`.
      beta: see `top_k_divergence`.
      tail: see `top_k_divergence`.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches), `divergence`, `teacher_mass` and
      `student_mass` (of the ids; means over tokens), `teacher_capped`, the number of tokens at which rounding brought a
      log-prob of the teacher above 0, or its mass above 1, and `broken_rules` (see `policy_loss`).

    Raises:
      TypeError, ValueError: as `top_k_divergence`; statistics without log-probs of ids; an unknown aggregation.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> ids = jnp.array([[[2, 0], [3, -1], [-1, -1]]])
      >>> stats = log_probs_from_logits(jnp.zeros((1, 3, 4)), batch.targets, ids=ids, where=batch.loss_mask > 0)
      >>> loss, _ = top_k_distillation_loss(stats, ids, jnp.log(jnp.full((1, 3, 2), 0.25)), batch)
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
      batch: `[R, T]`; only its sequences, targets, loss mask and loss weights are read.
      divergence: see `top_k_divergence`.
      beta: see `top_k_divergence`.
      tail: see `top_k_divergence`.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.
      temperature: divides the student's logits; the teacher's log-probs must be at the same temperature.
      **options: see `HeadOptions`.

    Returns:
      The scalar f32 loss, and the metrics of `top_k_distillation_loss`.

    Raises:
      TypeError, ValueError: as `log_probs_from_hidden` and `top_k_distillation_loss` do.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> teacher = jnp.array([[[2, 0], [3, -1], [-1, -1]]]), jnp.log(jnp.full((1, 3, 2), 0.5))
      >>> states = jnp.ones((1, 3, 2)), jnp.zeros((2, 4))
      >>> loss, _ = top_k_distillation_loss_from_hidden(*states, *teacher, batch, tail="renormalise")
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
    check_stats(stats, batch.loss_mask.shape)
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
    check_array(name, log_probs, ids.shape, "that of ids")
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
        object.__setattr__(self, "beta", checked_options(self.divergence, self.beta, self.tail))
        check_aggregation(self)

    @property
    def token_local(self) -> bool:
        return True

    @property
    def entropy(self) -> Entropy:
        return "none"

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, given: Any, segments: Segments) -> Reads:
        return reads_of_ids(stats, given, "teacher_log_probs")

    def per_token(
        self, stats: TokenStats, batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        ids, log_p, log_q = of_ids(stats, constants, batch.loss_mask)
        return top_k_divergence(log_p, log_q, ids, divergence=self.divergence, beta=self.beta, tail=self.tail)

    def terms(self, stats: TokenStats, step: Step, constants: Constants) -> Terms:
        mask = step.batch.loss_mask
        ids, log_p, log_q = of_ids(stats, constants, mask)
        masses = {"teacher_mass": mass(log_q, ids), "student_mass": mass(log_p, ids)}
        found = means({"divergence": self.per_token(stats, step.batch, constants, step.segments), **masses}, mask)
        return found | {"teacher_capped": (was_above_one(log_q, ids != -1), mask, "sum")}


def of_ids(
    stats: TokenStats, constants: Constants, mask: Float[Array, "R T"]
) -> tuple[Int[Array, "R T K"], Float[Array, "R T K"], Float[Array, "R T K"]]:
    """The ids, -1 where the mask is 0 too, and their log-probs in the statistics and in a call; 0 without an id."""
    ids, given = constants[1]
    ids = jnp.where(mask[..., None] > 0, ids, -1)
    own, given = (jnp.where(ids == -1, 0, x.astype(jnp.float32)) for x in (own_log_probs(stats), given))
    return ids, own, given


def reads_of_ids(stats: TokenStats | None, given: tuple[Array, Array], name: str) -> Reads:
    """What a loss of ids reads: the ids and log-probs of the call, which are called `name`, and of the statistics."""
    found: dict[str, Array | None] = {"ids": given[0], name: given[1]}
    if stats is None:
        return found
    return found | {"ids_of_stats": stats.ids, "id_log_probs": stats.id_log_probs}


def own_log_probs(stats: TokenStats) -> Float[Array, "R T K"]:
    """The log-probs of ids that statistics hold."""
    return needed("stats.id_log_probs", stats.id_log_probs, "f32[R, T, K]: log_probs_from_hidden(..., ids=ids)")


def mass(log_probs: Float[Array, "R T K"], ids: Int[Array, "R T K"]) -> Float[Array, "R T"]:
    """The probability of all ids together."""
    return jnp.where(ids == -1, 0, jnp.exp(log_probs)).sum(axis=-1)
