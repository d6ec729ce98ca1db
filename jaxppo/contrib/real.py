"""REAL: the rewards of a group are labels, and the loss tells its good samples from its bad
ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Coefficient, needed
from jaxppo.base.by_id import ById
from jaxppo.base.metrics import Terms, means
from jaxppo.base.pytree import PyTree
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import TokenStats
from jaxppo.losses.preference.base import Numbers, OfPairs
from jaxppo.losses.token_loss import Losses, Reads, WeighedBatch
from jaxppo.policy_losses.base import number
from jaxppo.sharding import Segments

__all__ = ["REAL"]

PerSample = Float[Array, "R S"]


class Labelled(NamedTuple):
    """The samples of a step as `REAL` sees them.

    Args:
      log_ratio: the mean over a sample's loss tokens of log_prob - old_log_prob.
      loss: the loss of the sample's group.
      one_sided: 1 where the group has no good or no bad sample, else 0.
    """

    log_ratio: PerSample
    loss: PerSample
    one_sided: PerSample


@dataclasses.dataclass(frozen=True)
class REAL(OfPairs[TokenStats]):
    """Rewards as labels: a classifier's loss of each group, whose scores are the samples'
    log-ratios.

    With s the mean over a sample's loss tokens of log_prob - old_log_prob, the loss of a group is

        log(1 + sum over its good samples of exp(-s / tau)) + log(1 + sum over its bad samples of exp(s / tau))

    A sample with a reward above 0 is good. Where rewards are no labels, give the batch
    `advantages.dr_grpo` of them in their place: then those above the mean of their group are good.
    A group without good or without bad samples has a loss of 0, as in ms-swift. No sample's pull is
    above 1 / tau, and a good one pulls more the less likely it became.

    The loss is the mean over the groups of the step. A group counts as one rollout: give the batch
    `group_ids` as its `rollout_ids`, with `Normalizer.of` after that. All samples of a group must
    be in one micro-batch, as `preference.micro_batches_of_pairs` packs them; the loss is NaN where
    they are not. From hidden states it takes two passes.

    The metrics are `loss` (adds up over micro-batches), `chosen_log_ratio` and `rejected_log_ratio`
    (means of s over good and bad samples), `one_sided` (the share of groups with a loss of 0) and
    `broken_rules` (see `policy_loss`).

    Args:
      tau: the temperature of the scores, above 0.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> from jaxppo.contrib.real import REAL
      >>> values = {"old_log_probs": [-1.0], "group_id": 7, "rollout_id": 7}
      >>> samples = [Sample([1, 2], response_start=1, reward=r, **values) for r in (1.0, 0.0)]
      >>> batch = RolloutBatch.from_samples(samples, row_length=4)
      >>> loss, _ = loss_from_stats(TokenStats(jnp.array([[-1.0, 0.0, -1.0, 0.0]])), batch, REAL())
      >>> round(float(loss), 4)  # 2 log 2
      1.3863

    2026, Rewards as labels, https://arxiv.org/abs/2602.05630; shipped by ms-swift 4.6 as
    `loss_type="real"`
    """

    aggregation = "rollout_mean"
    paired: ClassVar[bool] = False
    tau: Coefficient = number(0.5, above=0)

    def check(self, batch: RolloutBatch) -> None:
        super().check(batch)
        needed("batch.old_log_probs", batch.old_log_probs, f"f32[R, T] for {self}")
        needed("batch.group_ids", batch.group_ids, "i32[R, S], one id for the samples of a prompt")
        needed(
            "batch.rollout_ids",
            batch.rollout_ids,
            "i32[R, S], the group_ids: a group counts as one rollout",
        )

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        reads = {**super().reads(stats, batch, segments), "old_log_probs": batch.old_log_probs}
        if stats is not None:
            reads["log_probs"] = stats.log_probs
        return reads

    def constants(self, stats: TokenStats | None, weighed: WeighedBatch) -> Float[Array, "R T"]:
        """1 where this batch has all loss tokens of a sample's group, and NaN where others are
        elsewhere.
        """
        segments = weighed.segments
        tokens = segments.sum(weighed.batch.loss_mask)
        groups = _groups(weighed.batch, segments, tokens)
        here = groups.sum(groups.gather(tokens))[groups.own]
        is_whole = (tokens == 0) | (here == weighed.normalizer.denominators)
        return segments.spread(jnp.where(is_whole, jnp.float32(1), jnp.nan))

    def terms(
        self, stats: TokenStats, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        terms = super().terms(stats, batch, constants, segments)
        return {"real": terms["preference"] * constants}

    def of_batch(
        self, stats: TokenStats, batch: RolloutBatch, segments: Segments, tokens: Numbers
    ) -> Labelled:
        log_ratio = segments.mean(stats.log_probs - batch.old_log_probs, batch.loss_mask)
        groups = _groups(batch, segments, tokens)
        good = batch.rewards > 0
        of_good, number_good = _log_one_plus(groups, -log_ratio / self.tau, good)
        of_bad, number_bad = _log_one_plus(groups, log_ratio / self.tau, ~good)
        one_sided = (number_good == 0) | (number_bad == 0)
        losses = jnp.where(one_sided, 0, of_good + of_bad)
        return Labelled(log_ratio, losses[groups.own], one_sided[groups.own].astype(jnp.float32))

    def of_samples(self, x: Labelled, batch: RolloutBatch, pairs: Any) -> PerSample:
        return x.loss

    def sides(self, x: Labelled) -> dict[str, PerSample]:
        return {"log_ratio": x.log_ratio}

    def metrics(self, stats: TokenStats, weighed: WeighedBatch, constants: PyTree) -> Terms:
        tokens = weighed.segments.sum(weighed.batch.loss_mask)
        x = self.of_batch(stats, weighed.batch, weighed.segments, tokens)
        one_sided = means({"one_sided": weighed.segments.spread(x.one_sided)}, weighed.weights)
        return super().metrics(stats, weighed, constants) | one_sided


def _groups(batch: RolloutBatch, segments: Segments, tokens: Numbers) -> ById:
    """The samples with loss tokens by group, over all data shards."""
    group_ids: Any = batch.group_ids
    return ById.of(segments.axes, jnp.where(tokens > 0, group_ids, -1))


def _log_one_plus(groups: ById, x: PerSample, side: Bool[Array, "R S"]) -> tuple[Numbers, Numbers]:
    """By group, log(1 + the sum of exp(x) over its samples of this side), and how many these
    are.
    """
    x = groups.gather(x)
    belongs = groups.gather(side.astype(jnp.float32)) > 0
    # the largest exponent is taken out of the sum, and the 1 has the exponent 0
    largest = groups.max(lax.stop_gradient(jnp.where(belongs, x, 0)))
    largest = jnp.maximum(largest, 0)
    shifted = jnp.where(belongs, x - largest[groups.all], -jnp.inf)
    count = groups.sum(belongs.astype(jnp.float32))
    return largest + jnp.log(jnp.exp(-largest) + groups.sum(jnp.exp(shifted))), count
