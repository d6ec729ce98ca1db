"""Multi-token prediction: depth k of a model predicts the token k places after the one that the model predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo._arrays import Aggregation, check_count, check_flag, check_number
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.head.api import log_probs_from_hidden
from jaxppo.head.head import Head
from jaxppo.head.prepare import HeadOptions
from jaxppo.losses.compute import loss_of_stats
from jaxppo.losses.sft import SFT
from jaxppo.metrics import Metric, Metrics
from jaxppo.sharding import ParallelMesh, ShardAxes, shift_left
from jaxppo.validation import checked

__all__ = ["mtp_loss", "mtp_normalizers", "shift_targets"]

States = Float[Array, "K R T H"] | Sequence[Float[Array, "R T H"]]  # the states of each depth
Heads = Head | Float[Array, "H V"] | Sequence[Head | Float[Array, "H V"]]  # one head, or one for each depth


def mtp_loss(
    hidden: States,
    head: Heads,
    batch: RolloutBatch,
    *,
    coef: float | Array = 0.1,
    stop_trunk: bool = False,
    stop_head: bool = False,
    aggregation: Aggregation = "token_mean",
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizers: Sequence[Normalizer] | None = None,
    temperature: float | Array = 1.0,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """coef / K * sum over depths k = 1..K of the mean negative log-likelihood of the targets k places later.

    At depth k, position t predicts `targets[t + k]` where that is in the same sequence, with the loss mask of t + k.
    Targets and masks cross shard borders by `jaxppo.sharding.shift_left`. DeepSeek-V3, https://arxiv.org/abs/2412.19437
    section 2.2.

    Args:
      hidden: for each depth the `[R, T, H]` states that its predictions are read from, as `log_probs_from_hidden`
        takes them.
      head: the main loss's `Head` or bare kernel `[H, V]`, or one for each depth, in a list or
        stacked.
      batch: `[R, T]`; only its sequences, targets, loss mask and loss weights are read.
      coef: the factor of the sum.
      stop_trunk: no gradient into `hidden`: only heads learn. (To train a module between trunk and head but not the
        trunk, stop the gradient at that module's input instead.)
      stop_head: no gradient into `head`.
      aggregation: the denominators of a depth, see `SFT`.
      parallel: the mesh; rows sharded over data, positions over context in its layout.
      normalizers: `mtp_normalizers` of the whole step where the batch is one of its micro-batches.
      temperature: see `log_probs_from_hidden`. An `[R, T]` array belongs to the predicted tokens: depth k reads it at
        t + k, like `targets`.
      **options: see `HeadOptions`.

    Returns:
      The scalar f32 loss, and metrics: `mtp_loss` (adds up over micro-batches) and for each depth k
      `mtp_{k}_nll` and `mtp_{k}_accuracy` (means over its tokens) and `mtp_{k}_broken_rules` (see `policy_loss`). All
      devices have them.

    Raises:
      ValueError: no depth; a number of heads or normalizers that is not the number of depths; more depths than shared
        prefixes were packed for, see `RolloutBatch.from_samples`.

    Example:
      >>> ids, places, mask = jnp.array([[1, 1, 1, 1]]), jnp.arange(4)[None], jnp.array([[1.0, 1, 1, 0]])
      >>> batch = RolloutBatch(ids, jnp.array([[1, 2, 3, 0]]), ids, places, mask, jnp.array([[0]]))
      >>> loss, metrics = mtp_loss(jnp.zeros((1, 1, 4, 2)), jnp.zeros((2, 8)), batch, coef=0.5)
      >>> round(float(loss), 4), float(metrics["mtp_1_nll"].count)  # half of log 8; 2 and 3 are predicted
      (1.0397, 2.0)
    """
    batch = checked(batch)
    check_number("coef", coef)
    check_flag("stop_trunk", stop_trunk)
    check_flag("stop_head", stop_head)
    heads = heads_of(hidden, head, normalizers)
    depths, of_tokens = len(heads), SFT(aggregation=aggregation)
    total = jnp.float32(0)
    metrics: Metrics = {}
    for k in range(1, depths + 1):
        states = lax.stop_gradient(hidden[k - 1]) if stop_trunk else hidden[k - 1]
        shifted = shift_targets(batch, k, parallel)
        stats = log_probs_from_hidden(
            states,
            lax.stop_gradient(heads[k - 1]) if stop_head else heads[k - 1],
            shifted.targets,
            parallel=parallel,
            temperature=shift_temperature(temperature, batch, k, parallel),
            where=shifted.loss_mask > 0,
            logit_stats=("accuracy",),
            **options,
        )
        normalizer = None if normalizers is None else normalizers[k - 1]
        loss, found = loss_of_stats("mtp_loss", of_tokens, stats, shifted, parallel, normalizer, numbers={"coef": coef})
        total += loss
        metrics |= {f"mtp_{k}_{name}": found[name] for name in ("nll", "accuracy", "broken_rules")}
    total *= lax.stop_gradient(coef) / depths
    return total, metrics | {"mtp_loss": Metric(lax.stop_gradient(total), jnp.float32(1), "sum")}


def mtp_normalizers(
    micro_batches: RolloutBatch,
    depths: int,
    *,
    aggregation: Aggregation = "token_mean",
    parallel: ParallelMesh | ShardAxes | None = None,
) -> list[Normalizer]:
    """The denominators of each depth over a whole step: those of its shifted masks.

    Args:
      micro_batches: a batch, or the step's micro-batches stacked: `[K, R, T]`.
      depths: the number of depths.
      aggregation: that of `mtp_loss`.
      parallel: the mesh.

    Returns:
      A `Normalizer` for each depth, stacked like the micro-batches.

    Example:
      >>> ids, one = jnp.array([[1, 1, 1, 1]]), jnp.array([[0]])
      >>> batch = RolloutBatch(ids, ids, ids, jnp.arange(4)[None], jnp.array([[1.0, 1, 1, 0]]), one)
      >>> [float(n.tokens) for n in mtp_normalizers(batch, 2)]
      [2.0, 1.0]
    """
    check_count("depths", depths, least=1)
    micro_batches = checked(micro_batches, stacked=True, prefix="micro_batches.")
    shifted = [shift_targets(micro_batches, k, parallel) for k in range(1, depths + 1)]
    return [Normalizer.of(SFT(aggregation=aggregation), batch, parallel=parallel) for batch in shifted]


def shift_targets(batch: RolloutBatch, by: int, parallel: ParallelMesh | ShardAxes | None = None) -> RolloutBatch:
    """The batch whose targets and loss mask at t are those of t + `by`, and 0 where that leaves the sequence.

    If positions skip numbers (padding inside a sequence, see `RolloutBatch.from_padded`), t + `by` is not the token
    `by` places later: the mask, and therefore the loss, is NaN there. The mask is also NaN if the batch's own mask is
    set on padding or at the last position of a sequence, an error that no rule could find after the shift.

    Args:
      batch: `[R, T]`, or micro-batches `[K, R, T]`.
      by: how many positions.
      parallel: the mesh.

    Returns:
      The batch.

    Raises:
      ValueError: rows in another context layout than the mesh's; a shift by more than the branches of shared prefixes
        were packed for.

    Example:
      >>> ids, one = jnp.array([[1, 1, 2, 2]]), jnp.array([[0, 1]])
      >>> batch = RolloutBatch(ids, jnp.array([[5, 6, 7, 8]]), ids, jnp.array([[0, 1, 0, 1]]), ids * 1.0, one)
      >>> shift_targets(batch, 1).targets
      Array([[6, 0, 8, 0]], dtype=int32)
    """
    check_count("by", by)
    extras, batch = batch.extras if isinstance(batch, RolloutBatch) else {}, checked(batch, stacked=True)
    batch.check_layout(parallel)
    if batch.parents is not None and by > batch.mtp_depths:
        raise ValueError(
            f"depths: got {by} for a batch with shared prefixes, expected at most {batch.mtp_depths}: "
            "RolloutBatch.from_samples(..., share_prefixes=True, mtp_depths=)"
        )

    def shift(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        targets, loss_mask, positions, segment_ids, *weights = arrays
        moving: dict[str, Array | list[Array]] = {"targets": targets, "loss_mask": loss_mask.astype(jnp.float32)}
        moving |= {"positions": positions, "loss_weights": weights}
        moved = shift_left(moving, parallel, by, 0, segment_ids, batch.num_segments)
        gap = (moved["loss_mask"] > 0) & (moved["positions"] != positions + by)
        inner = segment_ids > 0  # without the last position of each sequence, see below
        if not batch.real_last_targets:
            inner = shift_left(inner, parallel, 1, False, segment_ids, batch.num_segments)
        unsound = (loss_mask != 0) & ~inner
        return moved["targets"], jnp.where(gap | unsound, jnp.nan, moved["loss_mask"]), *moved["loss_weights"]

    given = (batch.targets, batch.loss_mask, batch.positions, batch.segment_ids, batch.loss_weights)
    arrays = tuple(jnp.asarray(x) for x in given if x is not None)
    targets, loss_mask, *weights = lax.map(shift, arrays) if arrays[0].ndim == 3 else shift(arrays)
    weight = weights[0] if weights else None
    return dataclasses.replace(batch, targets=targets, loss_mask=loss_mask, loss_weights=weight, extras=extras)


def shift_temperature(
    temperature: float | Array, batch: RolloutBatch, by: int, parallel: ParallelMesh | ShardAxes | None
) -> float | Array:
    """The temperature of each token `by` places later. A number, and what the head will refuse, stays unchanged."""
    if getattr(temperature, "shape", ()) != batch.loss_mask.shape:
        return temperature
    return shift_left(jnp.asarray(temperature), parallel, by, 1, batch.segment_ids, batch.num_segments)


def heads_of(
    hidden: States, head: Any, normalizers: Sequence[Normalizer] | None, losses: int | None = None
) -> list[Any]:
    """The head of each depth. Raises unless there are as many heads as depths, and as many normalizers as losses.

    Args:
      hidden: states of each depth.
      head: one for all depths, or one for each.
      normalizers: None or one for each loss.
      losses: how many; by default one for each depth.
    """
    if not hasattr(hidden, "__len__"):
        raise TypeError(f"hidden: got {type(hidden).__name__}, expected the states of each depth")
    if normalizers is not None and (isinstance(normalizers, str) or not isinstance(normalizers, Sequence)):
        raise TypeError(
            f"normalizers: got {type(normalizers).__name__}, expected a list with one for each depth, or None"
        )
    depths = len(hidden)
    several = isinstance(head, (list, tuple)) or getattr(head, "ndim", 0) == 3
    heads = [*head] if several else [head] * depths
    if depths == 0:
        raise ValueError("hidden: got no depths, expected at least one")
    for name, given, count in (("head", heads, depths), ("normalizers", normalizers, losses or depths)):
        if given is not None and len(given) != count:
            raise ValueError(f"{name}: got {len(given)}, expected {count} for the {depths} depths of hidden")
    return heads
