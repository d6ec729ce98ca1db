"""Forward passes without a backward: the old, reference and teacher log-probs of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import check_arrays
from jaxppo.head.head import TokenStats


def compute_log_probs(
    apply: Callable[[Any, RolloutBatch], TokenStats], params: Any, micro_batches: RolloutBatch
) -> TokenStats:
    """Computes the statistics of micro-batches one after another, and keeps nothing for a backward. Call it under jit.

    Args:
      apply: takes params and one micro-batch `[R, T]`, returns its `TokenStats`; see `log_probs_from_hidden`.
      params: the parameters of the model that scores.
      micro_batches: `[K, R, T]`, or one batch `[R, T]`.

    Returns:
      `TokenStats`, f32 `[K, R, T]` or `[R, T]` each.

    Raises:
      TypeError: apply does not return `TokenStats`.
      ValueError: apply's log-probs have another shape than its micro-batch.

    Example:
      >>> import jax.numpy as jnp
      >>> ids, one = jnp.ones((2, 1, 3), int), jnp.zeros((2, 1, 1), int)
      >>> batches = RolloutBatch(ids, ids, ids, ids, ids * 1.0, one)
      >>> score = lambda params, batch: TokenStats(params * batch.targets)
      >>> compute_log_probs(score, -2.0, batches).log_probs.shape
      (2, 1, 3)
    """
    if not callable(apply):
        raise TypeError(f"apply: got {type(apply).__name__}, expected a function that returns TokenStats")
    check_arrays(micro_batches, stacked=True, prefix="micro_batches.")
    params = lax.stop_gradient(params)

    def score(batch: RolloutBatch) -> TokenStats:
        stats = apply(params, batch)
        if not isinstance(stats, TokenStats):
            raise TypeError(f"apply: got {type(stats).__name__}, expected a function that returns TokenStats")
        if stats.log_probs.shape != batch.loss_mask.shape:
            raise ValueError(
                f"apply: got log-probs of shape {stats.log_probs.shape}, expected the batch's, {batch.loss_mask.shape}"
            )
        return lax.stop_gradient(stats)

    return lax.map(score, micro_batches) if micro_batches.loss_mask.ndim == 3 else score(micro_batches)
