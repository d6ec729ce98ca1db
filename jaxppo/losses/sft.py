"""Supervised fine-tuning: the mean negative log-likelihood of the targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Self, Unpack

from jaxtyping import Array, Float, Int

from jaxppo._arrays import (
    Aggregation,
    Coefficient,
    as_coefficient,
    check_aggregation,
    check_field,
    is_zero,
    masked,
    needed,
)
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.head.checks import as_logit_stats
from jaxppo.head.head import Head
from jaxppo.head.prepare import HeadOptions, prepare_head
from jaxppo.head.types import LogitStat, TokenStats
from jaxppo.losses.token_loss import Constants, Reads, Step, TokenLoss, loss_of_hidden, loss_of_stats
from jaxppo.metrics import Metrics, Terms, means
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes
from jaxppo.validation import check_stats, checked


def sft_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    *,
    label_smoothing: Coefficient = 0.0,
    z_loss: Coefficient = 0.0,
    aggregation: Aggregation = "token_mean",
    aggregation_norm: float | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The negative log-likelihood of the targets: loss = sum over tokens of weight_t * l_t.

        l_t = (1 - label_smoothing) * -log_prob_t + label_smoothing * (log_z_t - mean_logit_t) + z_loss * log_z_t^2

    log_z is the log-sum-exp of the logits, and log_z - mean_logit the mean of -log p over the vocabulary. Columns whose
    logit is -inf, as under a bias of -inf, are left out of that mean, and their gradient is 0.

    Differentiable in `stats`. Positions with loss mask 0 may hold anything, NaN included.

    Args:
      stats: `f32[R, T]` log-probs of the targets, see `log_probs_from_hidden`; made with
        `logit_stats=("log_z", "mean_logit")` for label smoothing, with ("log_z",) for a z-loss.
      batch: `[R, T]`; only its sequences, loss mask and loss weights are read.
      label_smoothing: the share of a uniform target, in [0, 1); a number or a traced schedule.
      z_loss: the coefficient of log_z^2, a number or a traced schedule.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches), `nll` (the mean of -log_prob over
      tokens, nats), where stats has them `entropy`, `log_z` and `accuracy` (how often no token is likelier than the
      target), and `broken_rules` (see `policy_loss`).

    Raises:
      TypeError: stats that are no `TokenStats`.
      ValueError: an unknown aggregation, shapes that differ, options out of range, logit statistics that stats
        lacks, a normalizer that does not fit (see `policy_loss`).

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> loss, metrics = sft_loss(TokenStats(jnp.array([[-1.0, -2.0, jnp.nan]])), batch)
      >>> float(loss), float(metrics["nll"].value)
      (1.5, 1.5)

    Label smoothing: Szegedy et al. 2015, https://arxiv.org/abs/1512.00567; z-loss: Chowdhery et al. 2022, PaLM,
    https://arxiv.org/abs/2204.02311
    """
    batch = checked(batch)
    loss = SFTTokenLoss(label_smoothing, z_loss, aggregation, aggregation_norm).with_coefficients()
    how = f"log_probs_from_hidden(..., logit_stats={loss.logit_stats}) or from logits"
    how += f", for label_smoothing={label_smoothing}, z_loss={z_loss}"
    check_stats(stats, batch.loss_mask.shape, *loss.logit_stats, how=how)
    return loss_of_stats("sft_loss", loss, stats, batch, parallel, normalizer)


def sft_loss_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    batch: RolloutBatch,
    *,
    label_smoothing: Coefficient = 0.0,
    z_loss: Coefficient = 0.0,
    logit_stats: Sequence[LogitStat] = (),
    aggregation: Aggregation = "token_mean",
    aggregation_norm: float | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    temperature: float | Array = 1.0,
    adapter_ids: Int[Array, " R"] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """`sft_loss` after `log_probs_from_hidden`, in one pass where `policy_loss_from_hidden` would take one.

    Args:
      hidden: `[R, T, H]`, see `log_probs_from_hidden`.
      head: a `Head`, or its bare kernel `[H, V]`.
      batch: `[R, T]`; only its sequences, targets, loss mask and loss weights are read.
      label_smoothing: see `sft_loss`.
      z_loss: see `sft_loss`.
      logit_stats: "log_z" and "accuracy", for these metrics. Label smoothing and a z-loss bring "log_z" anyway.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.
      temperature: see `log_probs_from_hidden`.
      adapter_ids: `i32[R]`, which of several adapters of the head each row has, -1 for none; see `LoRA`. A row whose id
        belongs to no adapter gives NaN.
      **options: see `HeadOptions`.

    Returns:
      The scalar f32 loss, and the metrics of `sft_loss`.

    Raises:
      TypeError, ValueError: as `log_probs_from_hidden` and `sft_loss` do.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> loss, _ = sft_loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch)
      >>> round(float(loss), 4)
      1.3863
    """
    batch = checked(batch)
    loss = SFTTokenLoss(label_smoothing, z_loss, aggregation, aggregation_norm).with_coefficients()
    prepared = prepare_head(
        hidden,
        head,
        batch.targets,
        parallel=parallel,
        temperature=temperature,
        entropy=loss.entropy,
        logit_stats=(*as_logit_stats(logit_stats), *loss.logit_stats),
        where=batch.loss_mask > 0,
        adapter_ids=adapter_ids,
        options=options,
    )
    return loss_of_hidden("sft_loss_from_hidden", loss, prepared, batch, parallel, normalizer, None)


@dataclasses.dataclass(frozen=True)
class SFTTokenLoss(TokenLoss):
    """The negative log-likelihood of a token."""

    label_smoothing: Coefficient = 0.0
    z_loss: Coefficient = 0.0
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None

    def __post_init__(self) -> None:
        check_field(self, "label_smoothing", least=0, below=1)
        check_field(self, "z_loss", least=0)
        check_aggregation(self)

    def with_coefficients(self) -> Self:
        """With the coefficients in the form that traced code takes."""
        smoothing, z_loss = as_coefficient(self.label_smoothing), as_coefficient(self.z_loss)
        return dataclasses.replace(self, label_smoothing=smoothing, z_loss=z_loss)

    @property
    def token_local(self) -> bool:
        return True

    @property
    def logit_stats(self) -> tuple[LogitStat, ...]:
        if not is_zero(self.label_smoothing):
            return "log_z", "mean_logit"
        return () if is_zero(self.z_loss) else ("log_z",)

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, given: Any, segments: Segments) -> Reads:
        if stats is None:
            return {}
        return {name: getattr(stats, name) for name in ("log_probs", *self.logit_stats)}

    def per_token(
        self, stats: TokenStats, batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        select = partial(masked, mask=batch.loss_mask)
        losses = -select(stats.log_probs)
        if not is_zero(self.label_smoothing):
            uniform = select(needed("stats.log_z", stats.log_z)) - select(needed("stats.mean_logit", stats.mean_logit))
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * uniform
        if not is_zero(self.z_loss):
            losses = losses + self.z_loss * select(needed("stats.log_z", stats.log_z)) ** 2
        return losses

    def terms(self, stats: TokenStats, step: Step, constants: Constants) -> Terms:
        found = {"nll": -stats.log_probs, "entropy": stats.entropy, "log_z": stats.log_z, "accuracy": stats.accuracy}
        return means({name: x for name, x in found.items() if x is not None}, step.batch.loss_mask)
