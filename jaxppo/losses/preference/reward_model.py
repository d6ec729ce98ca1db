"""The loss of a reward model on pairs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo._arrays import Coefficient, check_array, check_field, needed
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.losses.preference.base import Numbers, preferred
from jaxppo.losses.preference.loss import (
    OfPairs,
    check_pairs,
    compared,
    pairs_of,
    reads_of_pairs,
    sample_terms,
    to_tokens,
)
from jaxppo.losses.token_loss import Constants, Reads, Step, loss_of_stats
from jaxppo.metrics import Metrics, Terms
from jaxppo.pairs import Pairs
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes
from jaxppo.validation import checked


@dataclasses.dataclass(frozen=True)
class BradleyTerry:
    """-log sigmoid(s_chosen - s_rejected - margin (r_chosen - r_rejected)) + centring (s_chosen + s_rejected)^2.

    s are the reward model's scores. r are the batch's rewards, whose difference tells how much better one response is.

    Args:
      margin: the coefficient of that difference; 0 uses only which response is better.
      centring: pulls the scores of a pair to a mean of 0, TRL's `center_rewards_coefficient`.

    Raises:
      ValueError: a number below 0.

    Example:
      >>> from jaxppo.losses import preference
      >>> preference.BradleyTerry(margin=1.0)
      BradleyTerry(margin=1.0, centring=0.0)

    Bradley and Terry 1952, https://doi.org/10.2307/2334029; the margin: Touvron et al. 2023, Llama 2,
    https://arxiv.org/abs/2307.09288; centring: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244
    """

    margin: Coefficient = 0.0
    centring: Coefficient = 0.0

    def __post_init__(self) -> None:
        check_field(self, "margin", least=0)
        check_field(self, "centring", least=0)

    def __call__(self, chosen: Numbers, rejected: Numbers, distance: Numbers) -> Numbers:
        """The loss of each pair, from its two scores and the difference of its rewards."""
        return preferred(chosen - rejected - self.margin * distance) + self.centring * (chosen + rejected) ** 2


def reward_model_loss(
    scores: Float[Array, "R T"],
    batch: RolloutBatch,
    loss: BradleyTerry | None = None,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The mean of a `BradleyTerry` loss over the step's pairs; a sample's score stands at its last position.

    Args:
      scores: `[R, T]`, the output of the model's scalar head; only the last position of each sequence is read.
      batch: `[R, T]`, pairs as in `preference_loss`; a sample needs a loss token to count.
      loss: by default `BradleyTerry()`.
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: see `preference_loss`.

    Returns:
      The scalar f32 loss, and the metrics `loss`, `chosen_reward` and `rejected_reward` (mean scores), `reward_margin`,
      `accuracy` and `broken_rules`, as `preference_loss` has them.

    Raises:
      TypeError: scores that are no floating-point array, another loss.
      ValueError: an array that the batch lacks, shapes that differ, a normalizer that does not fit (see `policy_loss`).

    Example:
      >>> from jaxppo.losses import preference
      >>> samples = preference.samples_of_pairs([[1]], chosen=[[2, 3]], rejected=[[4]])
      >>> batch = RolloutBatch.from_samples(samples, row_length=5)
      >>> loss, metrics = preference.reward_model_loss(jnp.array([[0.0, 0.0, 2.0, 0.0, 1.0]]), batch)
      >>> round(float(loss), 4), float(metrics["accuracy"].value)
      (0.3133, 1.0)
    """
    batch = checked(batch)
    loss = BradleyTerry() if loss is None else loss
    if not isinstance(loss, BradleyTerry):
        raise TypeError(f"loss: got {type(loss).__name__}, expected BradleyTerry")
    check_pairs(batch, paired=True)
    check_array("scores", scores)
    if scores.shape != batch.loss_mask.shape:
        raise ValueError(f"scores: got shape {scores.shape}, expected the batch's [R, T], {batch.loss_mask.shape}")
    return loss_of_stats("reward_model_loss", RewardModelLoss(loss), scores, batch, parallel, normalizer)


@dataclasses.dataclass(frozen=True)
class RewardModelLoss(OfPairs):
    """A reward model's loss by sample."""

    loss: BradleyTerry

    def reads(self, stats: Float[Array, "R T"] | None, batch: RolloutBatch, given: Any, segments: Segments) -> Reads:
        scores = None if stats is None else segments.spread(_scores(stats, batch, segments))
        return {**reads_of_pairs(batch), "scores": scores}

    def per_token(
        self, stats: Float[Array, "R T"], batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        scores, pairs, _ = self._read(stats, batch, segments)
        rewards = needed("batch.rewards", batch.rewards, "f32[R, S]")
        scored, given = ((pairs.of_chosen(x), pairs.of_rejected(x)) for x in (scores, rewards))
        return to_tokens(pairs.to_both(self.loss(*scored, given[0] - given[1])), scores, segments)

    def terms(self, stats: Float[Array, "R T"], step: Step, constants: Constants) -> Terms:
        scores, pairs, chosen = self._read(stats, step.batch, step.segments)
        return sample_terms(step, chosen, {"reward": scores}, compared(scores, pairs))

    def _read(
        self, stats: Float[Array, "R T"], batch: RolloutBatch, segments: Segments
    ) -> tuple[Float[Array, "R S"], Pairs, Bool[Array, "R S"]]:
        """The score of each sample, the step's pairs, and which samples were chosen."""
        return _scores(stats, batch, segments), *pairs_of(batch, segments, segments.sum(batch.loss_mask))


def _scores(stats: Float[Array, "R T"], batch: RolloutBatch, segments: Segments) -> Float[Array, "R S"]:
    """The score at the last position of each sequence."""
    inside = (batch.segment_ids > 0).astype(jnp.float32)
    positions = batch.positions.astype(jnp.float32)
    is_last = (inside > 0) & (positions == segments.spread(segments.max(positions, inside)))
    return segments.sum(jnp.where(is_last, stats.astype(jnp.float32), 0))
