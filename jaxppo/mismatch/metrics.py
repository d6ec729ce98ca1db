"""Metrics of the difference between the sampler's and the trainer's log-probs, and of where in a
row it lies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import check_array, needed
from jaxppo.base.kl import MAX_LOG_RATIO, k3
from jaxppo.base.metrics import (
    CompositeTerm,
    Metrics,
    Terms,
    deviation,
    effective_share,
    means,
    moments,
    reduce_metrics,
)
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import LOG_PROBS, SAMPLED
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, shard_call

__all__ = ["mismatch_metrics", "packing_metrics"]

MAX_LOG_PPL = 64.0  # so that a sum of perplexities is finite in f32


def mismatch_metrics(
    batch: RolloutBatch,
    trainer_log_probs: Float[Array, "R T"] | None = None,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Metrics:
    """Compares the trainer's log-probs with the sampler's, over tokens and over sequences.

    With d = trainer - sampler log-prob of a token, D the sum of d over a sequence, and for a
    sequence L = -(mean log-prob), its log-perplexity; d, D and differences of L are within [-20,
    20], and L at most 64, where exp is taken of them:

        kl = mean -d                 k3_kl = mean exp(d) - 1 - d      log_prob_abs_diff = mean |d|
        chi2_token = mean exp(2d) - 1                                 chi2_sequence = mean exp(2D) - 1
        trainer_log_ppl, rollout_log_ppl = mean L                     trainer_ppl, rollout_ppl = mean exp(L)
        log_ppl_diff = mean (L_trainer - L_rollout), and its abs, max, min          ppl_ratio = mean exp of it

    The first two lines are means over tokens (chi2_sequence over sequences), the others over
    sequences with loss tokens. These are over tokens too, with r = exp(d) and effective sample
    sizes as shares, (sum r)^2 / (N sum r^2):

        token_mult_prob_error = mean exp(|d|)      reverse_k3_kl = mean exp(-d) - 1 + d, of KL(trainer || sampler)
        jensen_shannon = mean of 0.5 k3 of trainer and of sampler, each to m = (trainer + sampler) / 2
        weight_std, weight_min, weight_max of r, before any bound      effective_sample_size
        sequence_effective_sample_size: over sequences, of exp(D) in place of r

    The sampler draws the tokens, so `k3_kl` is the only unbiased one of the divergences that use
    k3.

    Args:
      batch: `[R, T]`; needs `rollout_log_probs`, and `old_log_probs` unless others are given. A
        sampler's log-prob above 0 counts as 0, as in a loss.
      trainer_log_probs: `f32[R, T]`, in place of `batch.old_log_probs`.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      Metrics by the names above; NaN where a log-prob or the mask of a loss token breaks a rule of
      a loss.

    Raises:
      ValueError: log-probs that are absent or of another shape.

    Example:
      >>> ids, one, mask = jnp.array([[1, 1]]), jnp.array([[0]]), jnp.ones((1, 2))
      >>> batch = RolloutBatch(ids, ids, ids, ids, mask, one, old_log_probs=-mask, rollout_log_probs=-mask)
      >>> float(mismatch_metrics(batch)["trainer_log_ppl"].value)
      1.0

    Names and conventions: verl's rollout correction,
    https://verl.readthedocs.io/en/latest/algo/rollout_corr.html; token_mult_prob_error and the
    divergence of Jensen and Shannon: NeMo-RL
    """
    return _compare("mismatch_metrics", _per_shard, batch, trainer_log_probs, parallel)


def packing_metrics(
    batch: RolloutBatch,
    trainer_log_probs: Float[Array, "R T"] | None = None,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Metrics:
    """Compares the trainer's log-probs with the sampler's by the place of a sample in its row:
    first, or behind others.

    An engine computes each sample alone. A model that attends across the samples of a row is right
    about the first of them, which sees no other, and wrong about the rest. The metrics of a loss do
    not show it.

        first_in_row_abs_diff  = mean |trainer - sampler| over the loss tokens before which their row holds nothing else
        behind_others_abs_diff = the same mean over all other loss tokens

    With shared prefixes, a row holds nothing else before the tokens of its first sample, prompt
    included.

    Args:
      batch, trainer_log_probs, parallel: see `mismatch_metrics`.

    Returns:
      Metrics by the names above, 0 where there is no such token; NaN as those of
      `mismatch_metrics`.

    Raises:
      ValueError: log-probs that are absent or of another shape.

    Example:
      >>> from jaxppo.mismatch import packing_metrics
      >>> two = [Sample([5, 6], 1, rollout_log_probs=[-1.0], old_log_probs=[x]) for x in (-1.0, -3.0)]
      >>> found = finalize_metrics(packing_metrics(RolloutBatch.from_samples(two, row_length=4)))
      >>> {name: float(x) for name, x in found.items()}
      {'behind_others_abs_diff': 2.0, 'first_in_row_abs_diff': 0.0}
    """
    return _compare("packing_metrics", _by_place, batch, trainer_log_probs, parallel)


def _compare(
    reader: str,
    per_shard: Callable[[ShardAxes, jax.Array, RolloutBatch], Metrics],
    batch: RolloutBatch,
    trainer_log_probs: Float[Array, "R T"] | None,
    parallel: ParallelMesh | ShardAxes | None,
) -> Metrics:
    batch = checked(batch, reader=reader)
    expected = "f32[R, T] to compare sampler and trainer"
    needed("batch.rollout_log_probs", batch.rollout_log_probs, expected)
    if trainer_log_probs is None:
        trainer_log_probs = needed("batch.old_log_probs", batch.old_log_probs, expected)
    check_array("trainer_log_probs", trainer_log_probs, batch.loss_mask.shape, "the batch's [R, T]")
    args = {"trainer_log_probs": trainer_log_probs, "batch": batch}

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [p.tokens_spec, batch.specs(p)], P()

    return shard_call(reader, per_shard, parallel, args, specs)


def _by_place(axes: ShardAxes, trainer: jax.Array, batch: RolloutBatch) -> Metrics:
    tokens = LossTokens.of(batch)
    trainer, rollout = _both(tokens, trainer, batch)
    apart = jnp.abs(trainer - rollout)
    alone = batch.segments(axes).spread(_first_in_row(batch)) * tokens.mask
    terms: Terms = {
        "first_in_row_abs_diff": (apart, alone, "mean"),
        "behind_others_abs_diff": (apart, tokens.mask - alone, "mean"),
    }
    return reduce_metrics(axes, terms)


def _first_in_row(batch: RolloutBatch) -> Float[Array, "R S"]:
    """1 for the segments before which a row holds only what they continue, else 0."""
    before = jnp.broadcast_to(
        jnp.arange(batch.num_segments, dtype=jnp.int32), batch.sample_ids.shape
    )
    if batch.parents is None:
        return (before == 0).astype(jnp.float32)
    continues = batch.parents == before
    return jnp.cumprod(continues.astype(jnp.float32), axis=-1)


def _both(
    tokens: LossTokens, trainer: jax.Array, batch: RolloutBatch
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """The log-probs of trainer and sampler at loss tokens."""
    trainer = tokens.read(LOG_PROBS, trainer, impossible=True)
    rollout = tokens.read(SAMPLED, batch.rollout_log_probs, impossible=True)
    return trainer, rollout


def _per_shard(axes: ShardAxes, trainer: jax.Array, batch: RolloutBatch) -> Metrics:
    tokens = LossTokens.of(batch)
    mask = tokens.mask
    trainer, rollout = _both(tokens, trainer, batch)
    # all context shards have the same sequence values
    data_axes = dataclasses.replace(axes, context=(), fsdp=())
    sequence_terms = _sequence_terms(trainer, rollout, mask, batch.segments(axes))
    token_metrics = reduce_metrics(axes, _token_terms(trainer - rollout, mask))
    return token_metrics | reduce_metrics(data_axes, sequence_terms)


def _token_terms(d: Float[Array, "R T"], mask: Float[Array, "R T"]) -> Terms:
    bounded = _bounded(d)
    weight = jnp.exp(bounded)
    by_token = {
        "kl": -d,
        "k3_kl": k3(d),
        "log_prob_abs_diff": jnp.abs(d),
        "chi2_token": jnp.expm1(2 * bounded),
        "token_mult_prob_error": jnp.exp(jnp.abs(bounded)),
        "reverse_k3_kl": k3(-d),
        # p / m and q / m add up to 2: only their logarithms are left, log cosh(d / 2), without
        # cancellation
        "jensen_shannon": jnp.log1p(2 * jnp.sinh(bounded / 4) ** 2),
    }
    return means(by_token, mask) | {
        "weight_min": (weight, mask, "min"),
        "weight_max": (weight, mask, "max"),
        "weight_std": CompositeTerm(moments(weight - 1, mask), deviation),
        "effective_sample_size": CompositeTerm(moments(weight, mask), effective_share),
    }


def _sequence_terms(
    trainer: Float[Array, "R T"],
    rollout: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segments: Segments,
) -> Terms:
    counts = (segments.sum(mask) > 0).astype(jnp.float32)
    trainer_log_ppl = -segments.mean(trainer, mask)
    rollout_log_ppl = -segments.mean(rollout, mask)
    gap = trainer_log_ppl - rollout_log_ppl
    total = _bounded(segments.sum(trainer - rollout))
    by_sequence = {
        "trainer_log_ppl": trainer_log_ppl,
        "rollout_log_ppl": rollout_log_ppl,
        "trainer_ppl": jnp.exp(jnp.minimum(trainer_log_ppl, MAX_LOG_PPL)),
        "rollout_ppl": jnp.exp(jnp.minimum(rollout_log_ppl, MAX_LOG_PPL)),
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": jnp.abs(gap),
        "ppl_ratio": jnp.exp(_bounded(gap)),
        "chi2_sequence": jnp.expm1(2 * total),
    }
    return means(by_sequence, counts) | {
        "log_ppl_diff_max": (gap, counts, "max"),
        "log_ppl_diff_min": (gap, counts, "min"),
        "sequence_effective_sample_size": CompositeTerm(
            moments(jnp.exp(total), counts), effective_share
        ),
    }


def _bounded(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x within [-20, 20], so that exp of it is finite."""
    return jnp.clip(x, -MAX_LOG_RATIO, MAX_LOG_RATIO)
