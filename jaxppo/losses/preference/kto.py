"""KTO: single responses that are labelled good or bad, without pairs."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import Coefficient, needed
from jaxppo.base.metrics import reduce_metric
from jaxppo.base.pytree import PyTree
from jaxppo.base.ranks import total
from jaxppo.base.stacked import as_rows, check_whole_step
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import LOG_PROBS
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.head import TokenStats
from jaxppo.head.token_arguments import check_stats
from jaxppo.losses.preference.base import PreferenceLoss, Responses
from jaxppo.policy_losses.base import number
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call


@dataclasses.dataclass(frozen=True)
class KTO(PreferenceLoss):
    """Kahneman-Tversky optimisation: the mean of w (1 - sigmoid(beta (d - z))), with z - d for
    undesirable samples.

    d is the sum over a response's loss tokens of log_prob - ref_log_prob. Samples with a reward
    above 0 are desirable.

    Args:
      reference_point: z, see `kto_reference_point`; 0 is TRL's "apo_zero_unpaired".
      beta: how quickly gains and losses level off, above 0: at 0 the loss is a constant.
      desirable_weight, undesirable_weight: w of the desirable samples, and of the others.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> KTO(reference_point=0.3)
      KTO(reference_point=0.3, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)

    Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306
    """

    paired: ClassVar[bool] = False
    reference_point: Coefficient = number(least=0)
    beta: Coefficient = number(0.1, above=0)
    desirable_weight: Coefficient = number(1.0, least=0)
    undesirable_weight: Coefficient = number(1.0, least=0)

    def of_samples(self, x: Responses, batch: RolloutBatch, pairs: Any) -> Float[Array, "R S"]:
        gain = self.reward(x) - self.beta * self.reference_point
        good = self.desirable_weight * jax.nn.sigmoid(-gain)
        bad = self.undesirable_weight * jax.nn.sigmoid(gain)
        return jnp.where(batch.rewards > 0, good, bad)


def kto_reference_point(
    stats: TokenStats, mismatched: RolloutBatch, *, parallel: ParallelMesh | ShardAxes | None = None
) -> Float[Array, ""]:
    """The z of `KTO`: max(0, the mean over samples of the sum of log_prob - ref_log_prob), a
    constant.

    z is one number of the whole step, computed before it, with the log-probs of
    `compute_log_probs`.

    Args:
      stats: `f32[R, T]`, or `[K, R, T]`, of `mismatched`, under the policy.
      mismatched: the batch of `mismatched_samples`; needs `ref_log_probs`.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32[]`; NaN where no sample has a loss token, or a log-prob of one is not finite.

    Raises:
      TypeError: stats that are no `TokenStats`.
      ValueError: no reference log-probs, shapes that differ, one micro-batch of a step.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, ref_log_probs=[-2.0, -3.0])
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> float(kto_reference_point(TokenStats(jnp.array([[-1.5, -2.0, 0.0]])), batch))
      1.5
    """
    mismatched = checked(mismatched, stacked=True, prefix="mismatched.")
    check_whole_step("kto_reference_point", mismatched)
    check_stats(stats, mismatched.loss_mask.shape)
    needed("mismatched.ref_log_probs", mismatched.ref_log_probs, "f32[R, T], see compute_log_probs")
    args = {"stats": stats.log_probs, "mismatched": mismatched}

    def specs(p: ParallelMesh) -> tuple[PyTree, PyTree]:
        of_batch = mismatched.specs(p)
        return [of_batch.loss_mask, of_batch], P()

    return shard_call("kto_reference_point", _of_step, parallel, args, specs)


def _of_step(
    axes: ShardAxes, log_probs: Float[Array, "*K R T"], mismatched: RolloutBatch
) -> Float[Array, ""]:
    log_probs, batch = as_rows((log_probs, mismatched))
    tokens = LossTokens.of(batch)
    segments = batch.segments(axes)
    own, theirs = (tokens.read(LOG_PROBS, x) for x in (log_probs, batch.ref_log_probs))
    drift = segments.sum(own - theirs)
    # a sequence's sum is the same on all context shards
    rows = dataclasses.replace(axes, context=(), fsdp=())
    mean = reduce_metric(rows, drift, (segments.sum(tokens.mask) > 0).astype(jnp.float32))
    known = (mean.count > 0) & jnp.isfinite(mean.value + total(axes, tokens.unsound))
    return lax.stop_gradient(jnp.where(known, jnp.maximum(mean.value, 0), jnp.nan))
