"""Distillation from a teacher's top-k: only its ids and their log-probs at each position are known."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import KINDS, Aggregation, check_aggregation, check_array, needed
from jaxppo.base.metrics import Terms, means
from jaxppo.batch.extras import check_name, extra_of
from jaxppo.batch.reads import was_above_one
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import as_id_sets
from jaxppo.head.head import TokenStats
from jaxppo.losses.token_loss import Asks, Losses, Reads, Step, TokenLoss
from jaxppo.losses.top_k_divergence import Tail, TopKDivergence, checked_options, top_k_divergence
from jaxppo.sharding import Segments


class OfIds(TokenLoss[TokenStats]):
    """A loss of several ids at each position, which are two extras of the batch: the ids, and another's log-probs."""

    ids: str
    log_probs: str
    rule: ClassVar[str] = "teacher_log_probs"  # the name of the rule for these log-probs

    @property
    def asks(self) -> Asks:
        return Asks("none", ids=self.ids, extras=(self.ids, self.log_probs))

    def check_names(self) -> None:
        """Raises unless both names may be those of extras."""
        check_name("ids", self.ids)
        check_name("log_probs", self.log_probs)

    def check(self, batch: RolloutBatch) -> None:
        ids = extra_of(batch, self.ids, f"i32[R, T, K] for {self}")
        check_array(f"batch.extras[{self.ids!r}]", ids, kind=KINDS["ids"])
        ids = as_id_sets(f"batch.extras[{self.ids!r}]", ids, batch.loss_mask.shape)
        given = extra_of(batch, self.log_probs, f"f32[R, T, K] for {self}")
        of = f"that of {self.ids!r}"
        check_array(f"batch.extras[{self.log_probs!r}]", given, ids.shape, of, KINDS["teacher_log_probs"])

    def check_stats(self, stats: Any, batch: RolloutBatch) -> None:
        super().check_stats(stats, batch)
        own, shape = own_log_probs(stats), batch.extras[self.ids].shape
        if own.shape != shape:
            raise ValueError(f"stats.id_log_probs: got shape {own.shape}, expected that of {self.ids!r}, {shape}")

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        found = {"ids": batch.extras[self.ids], self.rule: batch.extras[self.log_probs]}
        if stats is None:
            return found
        return found | {"ids_of_stats": stats.ids, "id_log_probs": stats.id_log_probs}

    def seen(self, stats: TokenStats, mask: Float[Array, "R T"]) -> TokenStats:
        return stats  # `of_ids` masks them

    def of_ids(
        self, stats: TokenStats, batch: RolloutBatch
    ) -> tuple[Int[Array, "R T K"], Float[Array, "R T K"], Float[Array, "R T K"]]:
        """The ids, -1 where the mask is 0 too, their log-probs in the statistics and the other's; 0 without an id."""
        ids = jnp.where(batch.loss_mask[..., None] > 0, batch.extras[self.ids], -1)
        log_probs = own_log_probs(stats), batch.extras[self.log_probs]
        own, given = (jnp.where(ids == -1, 0, x.astype(jnp.float32)) for x in log_probs)
        return ids, own, given


@dataclasses.dataclass(frozen=True)
class TopKDistillation(OfIds):
    """`top_k_divergence` from a teacher's top-k over tokens: loss = sum over tokens of weight_t * D_t.

    `loss_from_stats` takes statistics with these ids, from `log_probs_from_hidden(..., ids=)` or from logits. The
    teacher's log-probs must be at the student's temperature. Different rows may have different teachers.

    The metrics are `loss` (adds up over micro-batches), `divergence`, `teacher_mass` and `student_mass` (of the ids;
    means over tokens), `teacher_capped`, the number of tokens at which rounding brought a log-prob of the teacher above
    0, or its mass above 1, and `broken_rules` (see `policy_loss`).

    Args:
      divergence: see `top_k_divergence`.
      beta: see `top_k_divergence`.
      tail: see `top_k_divergence`.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      ids: the name of the extra of the batch that holds the ids of a teacher's top-k, or of the student's own,
        `i32[R, T, K]`, -1 padded. They may be anything where this loss has no token. Parts that compare ids share them.
      log_probs: the name of the extra that holds the teacher's log-probs of these ids, in any float dtype.

    Raises:
      ValueError: an option out of its range.

    Example:
      >>> from jaxppo.losses import TopKDistillation, loss_from_hidden
      >>> from jaxppo.batch.extras import Extra
      >>> teacher = {"teacher_ids": Extra([[2, 0], [3, -1]], fill=-1), "teacher_log_probs": np.log([[0.5, 0.5]] * 2)}
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1, extras=teacher)], row_length=3)
      >>> loss = TopKDistillation(tail="renormalise")
      >>> round(float(loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch, loss)[0]), 6)
      0.0
    """

    divergence: TopKDivergence = "forward_kl"
    beta: float | Array = 0.5
    tail: Tail = "bucket"
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None
    ids: str = "teacher_ids"
    log_probs: str = "teacher_log_probs"

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", checked_options(self.divergence, self.beta, self.tail))
        self.check_names()
        check_aggregation(self)

    def terms(self, stats: TokenStats, batch: RolloutBatch, constants: Any, segments: Segments) -> Losses:
        ids, log_p, log_q = self.of_ids(stats, batch)
        options: dict[str, Any] = {"divergence": self.divergence, "beta": self.beta, "tail": self.tail}
        return {"divergence": top_k_divergence(log_p, log_q, ids, **options)}

    def metrics(self, stats: TokenStats, step: Step, constants: Any) -> Terms:
        ids, log_p, log_q = self.of_ids(stats, step.batch)
        masses = {"teacher_mass": mass(log_q, ids), "student_mass": mass(log_p, ids)}
        found = means({**self.terms(stats, step.batch, constants, step.segments), **masses}, step.batch.loss_mask)
        return found | {"teacher_capped": (was_above_one(log_q, ids != -1), step.batch.loss_mask, "sum")}


def own_log_probs(stats: TokenStats) -> Float[Array, "R T K"]:
    """The log-probs of ids that statistics hold."""
    return needed("stats.id_log_probs", stats.id_log_probs, "f32[R, T, K]: log_probs_from_hidden(..., ids=ids)")


def mass(log_probs: Float[Array, "R T K"], ids: Int[Array, "R T K"]) -> Float[Array, "R T"]:
    """The probability of all ids together."""
    return jnp.where(ids == -1, 0, jnp.exp(log_probs)).sum(axis=-1)
