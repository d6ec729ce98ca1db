"""Reward models: a scalar head that learns which of two responses is better."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Coefficient, check_array
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.preference.base import Numbers, OfPairs, preferred
from jaxppo.losses.token_loss import Reads
from jaxppo.policy_losses.base import number
from jaxppo.sharding import Segments

Scores = Float[Array, "R T"]


@dataclasses.dataclass(frozen=True)
class BradleyTerry(OfPairs[Scores]):
    """-log sigmoid(s_chosen - s_rejected - margin (r_chosen - r_rejected)) + centring (s_chosen + s_rejected)^2.

    s are the reward model's scores. r are the batch's rewards, whose difference tells how much better one response is.
    The loss and its metrics are means as in `PreferenceLoss`: scores are the rewards, there are no log-probs, and a
    sample needs a loss token to count. `loss_from_stats` takes the output of the model's scalar head, `[R, T]`, as
    statistics; a sample's score stands at its last position.

    Args:
      margin: the coefficient of that difference; 0 uses only which response is better.
      centring: pulls the scores of a pair to a mean of 0, TRL's `center_rewards_coefficient`.

    Raises:
      ValueError: a number below 0.

    Example:
      >>> from jaxppo.losses import preference
      >>> samples = preference.samples_of_pairs([[1]], chosen=[[2, 3]], rejected=[[4]])
      >>> batch = RolloutBatch.from_samples(samples, row_length=5)
      >>> scores = jnp.array([[0.0, 0.0, 2.0, 0.0, 1.0]])
      >>> loss, metrics = loss_from_stats(scores, batch, preference.BradleyTerry())
      >>> round(float(loss), 4), float(metrics["accuracy"].value)
      (0.3133, 1.0)

    Bradley and Terry 1952, https://doi.org/10.2307/2334029; the margin: Touvron et al. 2023, Llama 2,
    https://arxiv.org/abs/2307.09288; centring: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244
    """

    of_head: ClassVar[bool] = False
    margin: Coefficient = number(0.0, least=0)
    centring: Coefficient = number(0.0, least=0)

    def __call__(self, chosen: Numbers, rejected: Numbers, distance: Numbers) -> Numbers:
        """The loss of each pair, from its two scores and the difference of its rewards."""
        return preferred(chosen - rejected - self.margin * distance) + self.centring * (chosen + rejected) ** 2

    def check_stats(self, stats: Any, batch: RolloutBatch) -> None:
        check_array("scores", stats, batch.loss_mask.shape, "the batch's [R, T]")

    def reads(self, stats: Scores | None, batch: RolloutBatch, segments: Segments) -> Reads:
        scores = None if stats is None else segments.spread(_scores(stats, batch, segments))
        return {**super().reads(stats, batch, segments), "scores": scores}

    def seen(self, stats: Scores, mask: Float[Array, "R T"]) -> Scores:
        return stats  # the last position of a sample may have no loss

    def of_batch(self, stats: Scores, batch: RolloutBatch, segments: Segments, tokens: Float[Array, "R S"]) -> _Scored:
        return _Scored(_scores(stats, batch, segments), batch.rewards)

    def of_samples(self, x: _Scored, chosen: Bool[Array, "R S"], pairs: Any) -> Float[Array, "R S"]:
        better, worse = (_Scored(*map(of, x)) for of in (pairs.of_chosen, pairs.of_rejected))
        return pairs.to_both(self(better.score, worse.score, better.reward - worse.reward))

    def sides(self, x: _Scored) -> dict[str, Float[Array, "R S"]]:
        return {"reward": x.score}


class _Scored(NamedTuple):
    score: Float[Array, "R S"]
    reward: Float[Array, "R S"]


def _scores(stats: Scores, batch: RolloutBatch, segments: Segments) -> Float[Array, "R S"]:
    """The score at the last position of each sequence."""
    inside, positions = (x.astype(jnp.float32) for x in (batch.segment_ids > 0, batch.positions))
    is_last = (inside > 0) & (positions == segments.spread(segments.max(positions, inside)))
    return segments.sum(jnp.where(is_last, stats.astype(jnp.float32), 0))
