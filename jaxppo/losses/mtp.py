"""Multi-token prediction: depth k of a model predicts the token k places after the one that the
model predicts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo.base.arrays import Aggregation, check, check_count, check_type, needed
from jaxppo.base.metrics import Metric, Metrics
from jaxppo.base.pytree import PyTree
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.api import log_probs_from_hidden
from jaxppo.head.call import HeadOptions
from jaxppo.head.head import Head
from jaxppo.losses.doors import from_stats
from jaxppo.losses.sft import SFT
from jaxppo.losses.token_loss import TokenLoss
from jaxppo.policy_losses.base import check_fields, number
from jaxppo.sharding import ParallelMesh, ShardAxes, shift_left
from jaxppo.step.aggregation import Normalizer, Parallel

__all__ = ["MTP", "mtp_loss", "shift_targets"]

States = Float[Array, "K R T H"] | Sequence[Float[Array, "R T H"]]  # the states of each depth
# one head, or one for each depth
Heads = Head | Float[Array, "H V"] | Sequence[Head | Float[Array, "H V"]]


@dataclasses.dataclass(frozen=True)
class OfDepths:
    """The options of a loss of several depths of a model."""

    aggregation_norm: ClassVar[None] = None
    depths: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.depths is not None:
            check_count("depths", self.depths, least=1)

    @property
    def losses(self) -> int:
        """How many losses with denominators of their own there are."""
        return needed("depths", self.depths, "a number, for the denominators of each depth")

    def shifted(self, batch: RolloutBatch, k: int, parallel: Parallel) -> RolloutBatch:
        """The batch as depth k reads it."""
        return shift_targets(batch, k, parallel)

    def depth_batches(self, micro_batches: RolloutBatch, parallel: Parallel) -> list[RolloutBatch]:
        """The batch of each of these losses, for `Normalizer.of`."""
        return [self.shifted(micro_batches, k, parallel) for k in range(1, self.losses + 1)]


@dataclasses.dataclass(frozen=True)
class MTP(OfDepths):
    """The options of `mtp_loss`.

    Args:
      depths: the number of depths, needed by `Normalizer.of` alone; by default as many as the
        loss's `hidden` has.
      coef: the factor of the sum.
      aggregation: the denominators of a depth, those of `token_weights`: "token_mean" and others.

    Raises:
      TypeError, ValueError: an option of another type or out of its range.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3, 4], response_start=1)], row_length=4)
      >>> [float(n.tokens) for n in Normalizer.of(MTP(depths=2), batch)]
      [2.0, 1.0]
    """

    coef: float | Array = number(0.1)
    aggregation: Aggregation = "token_mean"


def mtp_loss(
    hidden: States,
    head: Heads,
    batch: RolloutBatch,
    loss: MTP | None = None,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizers: Sequence[Normalizer] | None = None,
    temperature: float | Array = 1.0,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """coef / K * sum over depths k = 1..K of the mean negative log-likelihood of the targets k
    places later.

    At depth k, position t predicts `targets[t + k]` where that is in the same sequence, with the
    loss mask of t + k.

    Args:
      hidden: for each depth the `[R, T, H]` states that its predictions are read from.
        `jax.lax.stop_gradient` of them keeps this loss from the trunk, and of `head` from the head.
      head: the main loss's `Head` or bare kernel `[H, V]`, or one for each depth, in a list or
        stacked.
      batch: `[R, T]`; only its sequences, targets, loss mask and loss weights are read.
      loss: by default `MTP()`.
      parallel: the mesh; rows sharded over data, positions over context in its layout.
      normalizers: `Normalizer.of(loss, micro_batches)` of the whole step, if the batch is one of
        its micro-batches.
      temperature: see `log_probs_from_hidden`; an `[R, T]` array is that of the predicted tokens,
        read at t + k.
      **options: see `HeadOptions`.

    Returns:
      The scalar f32 loss, and metrics: `mtp_loss` (adds up over micro-batches) and for each depth k
      `mtp_{k}_nll` and `mtp_{k}_accuracy` (means over its tokens) and `mtp_{k}_broken_rules` (see
      `policy_loss`).

    Raises:
      TypeError, ValueError: no depth; a number of heads or normalizers that is not the number of
        depths; more depths than shared prefixes were packed for, see `RolloutBatch.from_samples`.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3, 4], response_start=1)], row_length=4)
      >>> loss, metrics = mtp_loss(jnp.zeros((1, 1, 4, 2)), jnp.zeros((2, 8)), batch, MTP(coef=0.5))
      >>> round(float(loss), 4), float(metrics["mtp_1_nll"].count)  # half of log 8; 3 and 4 are predicted
      (1.0397, 2.0)

    DeepSeek-V3, section 2.2, https://arxiv.org/abs/2412.19437
    """
    batch = checked(batch, reader="mtp_loss")
    if loss is None:
        loss = MTP()
    check_type("loss", loss, isinstance(loss, MTP), "MTP")
    depths = []
    for k, depth_head in enumerate(heads_of(hidden, head, normalizers, loss), 1):
        shifted = shift_targets(batch, k, parallel)
        stats = log_probs_from_hidden(
            hidden[k - 1],
            depth_head,
            shifted.targets,
            temperature=shift_temperature(temperature, batch, k, parallel),
            where=shifted.loss_mask > 0,
            parallel=parallel,
            logit_stats=("accuracy",),
            **options,
        )
        depths.append((stats, shifted))
    names = ("nll", "accuracy", "broken_rules")
    token_loss = SFT(aggregation=loss.aggregation)
    return sum_of_depths(
        "mtp", names, token_loss, depths, {"coef": loss.coef}, parallel, normalizers
    )


def sum_of_depths(
    prefix: str,
    names: Sequence[str],
    loss: TokenLoss[Any],
    depths: Sequence[tuple[PyTree, RolloutBatch]],
    numbers: Mapping[str, float | Array],
    parallel: Parallel,
    normalizers: Sequence[Normalizer] | None,
    decay: float = 1.0,
) -> tuple[Float[Array, ""], Metrics]:
    """coef times the mean over depths, which weigh decay^(k - 1), of a loss of their statistics;
    and named metrics.
    """
    total = jnp.float32(0)
    metrics: Metrics = {}
    for k, (stats, batch) in enumerate(depths):
        normalizer = None
        if normalizers is not None:
            normalizer = normalizers[k]
        value, metrics_of_depth = from_stats(
            f"{prefix}_loss", stats, batch, loss, parallel, normalizer, numbers=numbers
        )
        total += decay**k * value
        metrics |= {f"{prefix}_{k + 1}_{name}": metrics_of_depth[name] for name in names}
    total *= lax.stop_gradient(numbers["coef"]) / sum(decay**k for k in range(len(depths)))
    return total, metrics | {
        f"{prefix}_loss": Metric(lax.stop_gradient(total), jnp.float32(1), "sum")
    }


def shift_targets(
    batch: RolloutBatch, by: int, parallel: ParallelMesh | ShardAxes | None = None
) -> RolloutBatch:
    """The batch whose targets and loss mask at t are those of t + `by`, and 0 where that leaves the
    sequence.

    The mask, and therefore the loss, is NaN where positions skip numbers (padding inside a
    sequence, see `RolloutBatch.from_padded`), and if the batch's own mask is set on padding or at
    the last position of a sequence, an error that no rule could find after the shift.

    Args:
      batch, parallel: `[R, T]`, or micro-batches `[K, R, T]`; the mesh.
      by: how many positions.

    Raises:
      ValueError: rows in another context layout than the mesh's; a shift that shared prefixes were
        not packed for.

    Example:
      >>> ids, one = jnp.array([[1, 1, 2, 2]]), jnp.array([[0, 1]])
      >>> batch = RolloutBatch(ids, jnp.array([[5, 6, 7, 8]]), ids, jnp.array([[0, 1, 0, 1]]), ids * 1.0, one)
      >>> shift_targets(batch, 1).targets
      Array([[6, 0, 8, 0]], dtype=int32)
    """
    check_count("by", by)
    extras: Mapping[str, Array] = {}
    if isinstance(batch, RolloutBatch):
        extras = batch.extras
    batch = checked(batch, stacked=True)
    batch.check_layout(parallel)
    expected = (
        f"at most {batch.mtp_depths}: RolloutBatch.from_samples(..., share_prefixes=True,"
        " mtp_depths=)"
    )
    good = batch.parents is None or by <= batch.mtp_depths
    check("depths", f"{by} for a batch with shared prefixes", good, expected)

    def shift(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        targets, loss_mask, positions, segment_ids, weights = arrays
        moving = (targets, loss_mask.astype(jnp.float32), positions, weights)
        targets, mask, later, weights = shift_left(
            moving, parallel, by, 0, segment_ids, batch.num_segments
        )
        inner = segment_ids > 0
        if not batch.real_last_targets:
            inner = shift_left(inner, parallel, 1, False, segment_ids, batch.num_segments)
        gap = (mask > 0) & (later != positions + by)
        unsound = (loss_mask != 0) & ~inner
        return targets, jnp.where(gap | unsound, jnp.nan, mask), weights

    arrays = jax.tree.map(
        jnp.asarray,
        (batch.targets, batch.loss_mask, batch.positions, batch.segment_ids, batch.loss_weights),
    )
    if batch.targets.ndim == 3:
        targets, mask, weights = lax.map(shift, arrays)
    else:
        targets, mask, weights = shift(arrays)
    return dataclasses.replace(
        batch, targets=targets, loss_mask=mask, loss_weights=weights, extras=extras
    )


def shift_temperature(
    temperature: float | Array, batch: RolloutBatch, by: int, parallel: Parallel
) -> float | Array:
    """The temperature of each token `by` places later.

    A number, and what the head will refuse, stays unchanged.
    """
    if getattr(temperature, "shape", ()) != batch.loss_mask.shape:
        return temperature
    return shift_left(
        jnp.asarray(temperature), parallel, by, 1, batch.segment_ids, batch.num_segments
    )


def heads_of(
    hidden: States, head: Any, normalizers: Sequence[Normalizer] | None, loss: OfDepths
) -> list[Any]:
    """The head of each depth.

    Raises unless there are as many heads as depths, and as many normalizers as losses.
    """
    # an array of no dimension has no length
    several = hasattr(hidden, "__len__") and getattr(hidden, "ndim", 1) > 0
    check_type("hidden", hidden, several, "the states of each depth")
    good = normalizers is None or (
        isinstance(normalizers, Sequence) and not isinstance(normalizers, str)
    )
    check_type("normalizers", normalizers, good, "a list with one for each depth, or None")
    for k, normalizer in enumerate(normalizers or ()):
        check_type(
            f"normalizers[{k}]", normalizer, isinstance(normalizer, Normalizer), "Normalizer"
        )
    depths = len(hidden)
    check("hidden", "no depths", depths > 0, "at least one")
    check(
        "hidden",
        f"{depths} depths",
        loss.depths in (None, depths),
        f"{loss.depths}, those of {loss}",
    )
    several = isinstance(head, (list, tuple)) or getattr(head, "ndim", 0) == 3
    heads = [*head] if several else [head] * depths
    losses = dataclasses.replace(loss, depths=depths).losses
    expected = f"for the {depths} depths of hidden"
    check("head", len(heads), len(heads) == depths, f"{depths} {expected}")
    if normalizers is not None:
        good = len(normalizers) == losses
        check("normalizers", len(normalizers), good, f"{losses} {expected}")
    return heads
