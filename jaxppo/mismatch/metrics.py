"""Metrics of the difference between the sampler's and the trainer's log-probs."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo._arrays import check_f32, masked
from jaxppo.batch import RolloutBatch
from jaxppo.kl import MAX_LOG_RATIO, k3
from jaxppo.metrics import Composite, Metric, Metrics, Term, deviation, effective_share, reduce_metrics
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
    loss-carrying tokens. Over tokens too, with r = exp(d) and, as shares, (sum r)^2 / (N sum r^2):

        token_mult_prob_error = mean exp(|d|)      reverse_k3_kl = mean exp(-d) - 1 + d, of KL(trainer || sampler)
        jensen_shannon = mean of 0.5 k3 of trainer and of sampler, each to m = (trainer + sampler) / 2
        weight_std, weight_min, weight_max of r, which importance weights bound      effective_sample_size
        sequence_effective_sample_size: over sequences, of exp(D) in place of r

    The tokens are drawn by the sampler, so of the divergences by k3 only `k3_kl` is unbiased.

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

    Names and conventions: verl's rollout correction, https://verl.readthedocs.io/en/latest/algo/rollout_corr.html;
    token_mult_prob_error and the divergence of Jensen and Shannon: NeMo-RL
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
    found: Metrics = shard_call(
        "mismatch_metrics", _per_shard, parallel, args, lambda p: ([p.tokens_spec, batch.specs(p)], P())
    )
    return found


def _per_shard(axes: ShardAxes, trainer: jax.Array, batch: RolloutBatch) -> Metrics:
    mask = (batch.loss_mask > 0).astype(jnp.float32)
    assert batch.rollout_log_probs is not None  # mismatch_metrics sees to it
    trainer, rollout = masked(trainer, mask), masked(batch.rollout_log_probs, mask)
    d = trainer - rollout
    bounded = partial(jnp.clip, min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO)  # so that exp of it is finite
    by_token = {
        "kl": -d,
        "k3_kl": k3(d),
        "log_prob_abs_diff": jnp.abs(d),
        "chi2_token": jnp.expm1(2 * bounded(d)),
        "token_mult_prob_error": jnp.exp(bounded(jnp.abs(d))),
        "reverse_k3_kl": k3(-d),
        "jensen_shannon": _jensen_shannon(bounded(d)),
    }
    weight = jnp.exp(bounded(d))
    terms: dict[str, Term] = {name: (x, mask, "mean") for name, x in by_token.items()}
    terms |= {"weight_min": (weight, mask, "min"), "weight_max": (weight, mask, "max")}
    terms |= {"off": (weight - 1, mask, "mean"), "off_squared": ((weight - 1) ** 2, mask, "mean")}
    terms |= {"first": (weight, mask, "mean"), "second": (weight**2, mask, "mean")}
    reduced = reduce_metrics(axes, terms)
    found: Metrics = {
        "weight_std": Composite(_moments(reduced, "off", "off_squared"), deviation),
        "effective_sample_size": Composite(_moments(reduced, "first", "second"), effective_share),
        **reduced,
    }
    segments = batch.segments(axes)
    count = segments.sum(mask)
    log_ppl = {name: -segments.mean(x, mask) for name, x in (("trainer", trainer), ("rollout", rollout))}
    gap = log_ppl["trainer"] - log_ppl["rollout"]
    by_sequence = {f"{name}_log_ppl": x for name, x in log_ppl.items()}
    by_sequence |= {f"{name}_ppl": jnp.exp(x) for name, x in log_ppl.items()}
    by_sequence |= {"log_ppl_diff": gap, "log_ppl_abs_diff": jnp.abs(gap), "ppl_ratio": jnp.exp(bounded(gap))}
    of_sequence = jnp.exp(bounded(segments.sum(d)))
    by_sequence["chi2_sequence"] = jnp.expm1(2 * bounded(segments.sum(d)))
    by_sequence |= {"first": of_sequence, "second": of_sequence**2}

    rows = dataclasses.replace(axes, context=(), fsdp=())  # per-sequence values are the same on all context shards
    valid = (count > 0).astype(jnp.float32)
    terms = {name: (x, valid, "mean") for name, x in by_sequence.items()}
    terms |= {"log_ppl_diff_max": (gap, valid, "max"), "log_ppl_diff_min": (gap, valid, "min")}
    reduced = reduce_metrics(rows, terms)
    found["sequence_effective_sample_size"] = Composite(_moments(reduced, "first", "second"), effective_share)
    return {**found, **reduced}


def _jensen_shannon(d: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """0.5 k3(p, m) + 0.5 k3(q, m) with m = (p + q) / 2 and log p - log q = d, k3(a, b) = a / b - 1 - log(a / b).

    p / m and q / m add up to 2, so only their logarithms are left: log cosh(d / 2), computed without cancellation.
    """
    return jnp.log1p(2 * jnp.sinh(d / 4) ** 2)


def _moments(reduced: dict[str, Metric], first: str, second: str) -> dict[str, Metric]:
    """Removes two metrics from `reduced` and returns them as the parts of `deviation` and `effective_share`."""
    return {"first": reduced.pop(first), "second": reduced.pop(second)}
