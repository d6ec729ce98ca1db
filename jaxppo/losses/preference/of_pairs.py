"""Losses of samples and pairs as losses of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Aggregation, needed
from jaxppo.base.metrics import Terms, means
from jaxppo.batch.pairs import Pairs
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.token_loss import Asks, Stats, Step, TokenLoss
from jaxppo.sharding import Segments


class OfPairs(TokenLoss[Stats]):
    """A loss of samples or pairs: each of a sample's loss tokens gets the sample's loss.

    The mean over samples of the mean over their tokens is then the mean over samples. It is also the mean over pairs,
    since both samples of a pair have the pair's loss.
    """

    @property
    def aggregation(self) -> Aggregation:  # type: ignore[override]
        return "sequence_mean_token_mean"

    @property
    def aggregation_norm(self) -> float | None:  # type: ignore[override]
        return None

    @property
    def asks(self) -> Asks:
        return Asks("none")

    @property
    def token_local(self) -> bool:
        return False


def check_pairs(batch: RolloutBatch, paired: bool) -> None:
    """Raises where a batch lacks the rewards or groups of its pairs, or has loss weights."""
    needed("batch.rewards", batch.rewards, "f32[R, S], higher for what was chosen; see samples_of_pairs")
    if paired:
        needed("batch.group_ids", batch.group_ids, "i32[R, S], one id for both samples of a pair")
    if batch.loss_weights is not None:
        raise ValueError(
            "batch.loss_weights: got an array, expected None: a loss of whole samples is not one of tokens"
        )


def sample_terms(
    step: Step,
    chosen: Bool[Array, "R S"],
    of_sides: Mapping[str, Float[Array, "R S"]],
    of_pairs: Mapping[str, Float[Array, "R S"]],
) -> Terms:
    """The terms of means over samples: of the chosen ones and of the rejected ones, and of all."""
    spread, weights = step.segments.spread, step.weights
    is_chosen = spread(chosen.astype(jnp.float32))
    by_side = {"chosen": weights * is_chosen, "rejected": weights * (1 - is_chosen)}
    return means({name: spread(x) for name, x in of_pairs.items()}, weights) | {
        f"{side}_{name}": (spread(x), its, "mean") for name, x in of_sides.items() for side, its in by_side.items()
    }


def to_tokens(losses: Float[Array, "R S"], x: Float[Array, "R S"], segments: Segments) -> Float[Array, "R T"]:
    """The loss of each sample at its positions.

    It adds 0 * x, the array that the loss is a function of: where weights are NaN, the gradient is then NaN for samples
    without a pair too.
    """
    return segments.spread(losses + 0 * x)


def reads_of_pairs(batch: RolloutBatch) -> dict[str, Array | None]:
    """The arrays that say what a pair is, and which sample of it was chosen."""
    return {"pair_ids": batch.group_ids, "sample_rewards": batch.rewards}


def pairs_of(batch: RolloutBatch, segments: Segments, tokens: Float[Array, "R S"]) -> tuple[Pairs, Bool[Array, "R S"]]:
    """The step's pairs, and which of this device's samples were chosen; `tokens` are the loss tokens of each."""
    rewards = needed("batch.rewards", batch.rewards, "f32[R, S]")
    pairs = Pairs.of(segments.axes, needed("batch.group_ids", batch.group_ids, "i32[R, S]"), rewards, tokens)
    return pairs, rewards == pairs.to_both(pairs.of_chosen(rewards))


def compared(rewards: Float[Array, "R S"], pairs: Pairs) -> dict[str, Float[Array, "R S"]]:
    """For each sample, the reward margin of its pair, and whether the chosen sample has the higher reward."""
    ahead = pairs.of_chosen(rewards) - pairs.of_rejected(rewards)
    return {
        "reward_margin": pairs.to_both(ahead),
        "accuracy": pairs.to_both((ahead > 0).astype(jnp.float32)),
    }
