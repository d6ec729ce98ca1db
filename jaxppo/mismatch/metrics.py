"""Metrics of how far the sampler's log-probs are from the trainer's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo._arrays import check_f32, masked
from jaxppo.batch import RolloutBatch
from jaxppo.kl import MAX_LOG_RATIO, k3
from jaxppo.metrics import Metric, Metrics, reduce_metric
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call
from jaxppo.validation import checked

__all__ = ["mismatch_metrics"]


def mismatch_metrics(
    batch: RolloutBatch,
    trainer_log_probs: Float[Array, "R T"] | None = None,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Metrics:
    """Compares the trainer's log-probs with the sampler's, over tokens and over sequences.

    With d = trainer - sampler log-prob of a token, D the sum of d over a sequence, and for a sequence
    L = -(mean log-prob), its log-perplexity; d, D and differences of L are within [-20, 20] where exp is taken of them:

        kl = mean -d                 k3_kl = mean exp(d) - 1 - d      log_prob_abs_diff = mean |d|
        chi2_token = mean exp(2d) - 1                                 chi2_sequence = mean exp(2D) - 1
        trainer_log_ppl, rollout_log_ppl = mean L                     trainer_ppl, rollout_ppl = mean exp(L)
        log_ppl_diff = mean (L_trainer - L_rollout), and its abs, max, min          ppl_ratio = mean exp of it

    The first two lines are means over tokens (chi2_sequence over sequences), the others over sequences that have
    loss-carrying tokens.

    Args:
      batch: `[R, T]`; needs `rollout_log_probs`, and `old_log_probs` unless others are given.
      trainer_log_probs: `f32[R, T]`, in place of `batch.old_log_probs`.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      Metrics by the names above.

    Raises:
      ValueError: log-probs that are absent or of another shape.

    Example:
      >>> ids, one, mask = jnp.array([[1, 1]]), jnp.array([[0]]), jnp.ones((1, 2))
      >>> batch = RolloutBatch(ids, ids, ids, ids, mask, one, old_log_probs=-mask, rollout_log_probs=-mask)
      >>> float(mismatch_metrics(batch)["trainer_log_ppl"].value)
      1.0

    Names and conventions: verl's rollout correction, https://verl.readthedocs.io/en/latest/algo/rollout_corr.html
    """
    batch = checked(batch)
    trainer = batch.old_log_probs if trainer_log_probs is None else trainer_log_probs
    for name, x in (("old_log_probs", trainer), ("rollout_log_probs", batch.rollout_log_probs)):
        if x is None:
            raise ValueError(f"batch.{name}: got None, expected f32[R, T] to compare sampler and trainer")
        if x.shape != batch.loss_mask.shape or x.ndim != 2:
            raise ValueError(f"{name}: got shape {x.shape}, expected the batch's [R, T], {batch.loss_mask.shape}")
        check_f32(name, x)

    args = {"trainer_log_probs": trainer, "batch": batch}
    specs = lambda p: ([p.tokens_spec, batch.specs(p)], P())  # noqa: E731
    found: Metrics = shard_call("mismatch_metrics", _per_shard, parallel, args, specs)
    return found


def _per_shard(axes: ShardAxes, trainer: jax.Array, batch: RolloutBatch) -> Metrics:
    mask = (batch.loss_mask > 0).astype(jnp.float32)
    assert batch.rollout_log_probs is not None  # mismatch_metrics sees to it
    trainer, rollout = masked(trainer, mask), masked(batch.rollout_log_probs, mask)
    d = trainer - rollout
    bounded = lambda x: jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO)  # noqa: E731  so that exp of it is finite
    by_token = {
        "kl": -d,
        "k3_kl": k3(d),
        "log_prob_abs_diff": jnp.abs(d),
        "chi2_token": jnp.expm1(2 * bounded(d)),
    }
    found: Metrics = {name: reduce_metric(axes, x, mask, "mean") for name, x in by_token.items()}
    segments = batch.segments(axes)
    count = segments.sum(mask)
    log_ppl = {name: -segments.mean(x, mask) for name, x in (("trainer", trainer), ("rollout", rollout))}
    gap = log_ppl["trainer"] - log_ppl["rollout"]
    by_sequence = {f"{name}_log_ppl": x for name, x in log_ppl.items()}
    by_sequence |= {f"{name}_ppl": jnp.exp(x) for name, x in log_ppl.items()}
    by_sequence |= {"log_ppl_diff": gap, "log_ppl_abs_diff": jnp.abs(gap), "ppl_ratio": jnp.exp(bounded(gap))}
    by_sequence["chi2_sequence"] = jnp.expm1(2 * bounded(segments.sum(d)))

    rows = dataclasses.replace(axes, context=(), fsdp=())  # per-sequence values are the same on all context shards
    valid = (count > 0).astype(jnp.float32)
    reduce = lambda x, how: reduce_metric(rows, x, valid, how)  # noqa: E731
    found |= {name: reduce(x, "mean") for name, x in by_sequence.items()}
    extremes: dict[str, Metric] = {"log_ppl_diff_max": reduce(gap, "max"), "log_ppl_diff_min": reduce(gap, "min")}
    return found | extremes
