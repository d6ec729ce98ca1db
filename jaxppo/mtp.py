"""Multi-token prediction: depth k of a model predicts the token k places after the one that the model predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo._sharding import ParallelMesh, ShardAxes, shift_left
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.log_probs import log_probs_from_hidden
from jaxppo.metrics import Metric, Metrics
from jaxppo.sft import sft_loss


def mtp_loss(
    hidden: Float[Array, "K R T H"] | Sequence[Float[Array, "R T H"]],
    kernel: Float[Array, "H V"] | Sequence[Float[Array, "H V"]],
    batch: RolloutBatch,
    *,
    coef: float | Array = 0.1,
    stop_trunk: bool = False,
    stop_head: bool = False,
    aggregation: str = "token_mean",
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizers: Sequence[Normalizer] | None = None,
    **head: Any,
) -> tuple[Float[Array, ""], Metrics]:
    """coef / K * sum over depths k = 1..K of the mean negative log-likelihood of the targets k places further on.

    At depth k, position t predicts `targets[t + k]` where that is in the same sequence, with the loss mask of t + k.
    Targets and masks cross shard borders by `sharding.shift_left`. DeepSeek-V3, https://arxiv.org/abs/2412.19437
    section 2.2.

    Args:
      hidden: for each depth the `[R, T, H]` states that its predictions are read from, as `log_probs_from_hidden`
        takes them.
      kernel: the head's `[H, V]`, the same array as the main loss's, or one for each depth.
      batch: `[R, T]`; its targets, loss mask and sequences count.
      coef: of the sum.
      stop_trunk: no gradient into `hidden`: only heads learn. (A module between trunk and head that is to learn where
        the trunk is not stops its own input.)
      stop_head: no gradient into `kernel`.
      aggregation: the denominators of a depth, see `sft_loss`.
      parallel: the mesh; rows sharded over data, positions over context in its layout.
      normalizers: `mtp_normalizers` of the whole step where the batch is one of its micro-batches.
      **head: of `log_probs_from_hidden`: kernel_layout, logit_softcap, vocab_size, specs and so on; `keep_logits` is
        False, since there are several heads.

    Returns:
      The scalar f32 loss, and metrics: `mtp_loss` (adds up over micro-batches) and for each depth k
      `mtp_{k}_nll` and `mtp_{k}_accuracy` (means over its tokens). All devices have them.

    Raises:
      ValueError: no depth, or other numbers of kernels or normalizers than depths.

    Example:
      >>> ids, one = jnp.array([[1, 1, 1, 1]]), jnp.array([[0]])
      >>> batch = RolloutBatch(ids, jnp.array([[1, 2, 3, 0]]), ids, ids, jnp.array([[1.0, 1, 1, 0]]), one, one, one)
      >>> loss, metrics = mtp_loss(jnp.zeros((1, 1, 4, 2)), jnp.zeros((2, 8)), batch, coef=0.5)
      >>> round(float(loss), 4), float(metrics["mtp_1_nll"].count)  # half of log 8; 2 and 3 are predicted
      (1.0397, 2.0)
    """
    depths = len(hidden)
    kernels: list[Any] = [kernel] * depths if getattr(kernel, "ndim", 0) == 2 else list(kernel)
    _check_depths(depths, kernel=kernels, normalizers=normalizers)
    head = {"keep_logits": False} | head
    total = jnp.float32(0)
    metrics: Metrics = {}
    for k in range(1, depths + 1):
        states = lax.stop_gradient(hidden[k - 1]) if stop_trunk else hidden[k - 1]
        weights = lax.stop_gradient(kernels[k - 1]) if stop_head else kernels[k - 1]
        shifted = shift_targets(batch, k, parallel)
        counted = shifted.loss_mask > 0
        stats = log_probs_from_hidden(
            states, weights, shifted.targets, parallel=parallel, where=counted, moments=True, **head
        )
        normalizer = None if normalizers is None else normalizers[k - 1]
        loss, found = sft_loss(stats, shifted, aggregation=aggregation, parallel=parallel, normalizer=normalizer)
        total += loss
        metrics |= {f"mtp_{k}_{name}": found[name] for name in ("nll", "accuracy")}
    total *= coef / depths
    return total, metrics | {"mtp_loss": Metric(lax.stop_gradient(total), jnp.float32(1), "sum")}


def mtp_normalizers(
    micro_batches: RolloutBatch,
    depths: int,
    *,
    aggregation: str = "token_mean",
    parallel: ParallelMesh | ShardAxes | None = None,
) -> list[Normalizer]:
    """The denominators of each depth over a whole step: those of its shifted masks.

    Args:
      micro_batches: a batch, or the step's micro-batches stacked: `[K, R, T]`.
      depths: how many.
      aggregation: that of `mtp_loss`.
      parallel: the mesh.

    Returns:
      A `Normalizer` for each depth, stacked like the micro-batches.

    Example:
      >>> ids, one = jnp.array([[1, 1, 1, 1]]), jnp.array([[0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.array([[1.0, 1, 1, 0]]), one, one, one)
      >>> [float(n.tokens) for n in mtp_normalizers(batch, 2)]
      [2.0, 1.0]
    """
    shifted = [shift_targets(micro_batches, k, parallel) for k in range(1, depths + 1)]
    return [Normalizer.from_batches(batch, aggregation, parallel=parallel) for batch in shifted]


def shift_targets(batch: RolloutBatch, by: int, parallel: ParallelMesh | ShardAxes | None = None) -> RolloutBatch:
    """The batch whose targets and loss mask at t are those of t + `by`, and 0 where that leaves the sequence.

    Args:
      batch: `[R, T]`, or micro-batches `[K, R, T]`.
      by: how many positions.
      parallel: the mesh.

    Example:
      >>> ids, one = jnp.array([[1, 1, 2, 2]]), jnp.array([[0, 1]])
      >>> batch = RolloutBatch(ids, jnp.array([[5, 6, 7, 8]]), ids, ids, ids * 1.0, one, one, one)
      >>> shift_targets(batch, 1).targets
      Array([[6, 0, 8, 0]], dtype=int32)
    """

    def shift(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        *moving, segment_ids = arrays
        return tuple(shift_left(moving, parallel, by, 0, segment_ids, batch.num_segments))

    arrays = tuple(jnp.asarray(x) for x in (batch.targets, batch.loss_mask, batch.segment_ids))
    targets, loss_mask = lax.map(shift, arrays) if arrays[0].ndim == 3 else shift(arrays)
    return dataclasses.replace(batch, targets=targets, loss_mask=loss_mask)


def _check_depths(depths: int, **lists: Any) -> None:
    if depths == 0:
        raise ValueError("hidden: got no depths, expected at least one")
    for name, value in lists.items():
        if value is not None and len(value) != depths:
            raise ValueError(f"{name}: got {len(value)}, expected {depths}, one for each depth of hidden")
