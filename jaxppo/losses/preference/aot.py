"""AOT: the distribution of what is chosen shall lie above the other one, rank by rank."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Coefficient, check_choice, check_field, needed
from jaxppo.batch.pairs import Pairs
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.preference.base import (
    Numbers,
    PairLoss,
    Responses,
    check_label_smoothing,
    mean_log_prob,
    preferred,
)

Ranks = Literal["pairs", "responses"]


@dataclasses.dataclass(frozen=True)
class AOT(PairLoss):
    """Alignment by optimal transport: -log sigmoid(beta (a_(i) - b_(i))), the mean over ranks i of the step.

    Of "pairs", a are the policy's differences of log-probs, chosen less rejected, and b the reference's. Of
    "responses", a are the log-ratios of chosen responses and b those of rejected ones. Both are sorted over all pairs,
    so a step must be one micro-batch.

    Args:
      beta: the strength of the pull to the reference.
      label_smoothing: see `DPO`.
      ranks: what is sorted: "pairs" (TRL's "aot") or "responses" ("aot_unpaired").
      nll_coef: see `PairLoss`.
      nll: see `PairLoss`.

    Raises:
      ValueError: a number out of its range, an unknown `ranks`.

    Example:
      >>> from jaxppo.losses import preference
      >>> preference.AOT().ranks
      'pairs'

    Melnyk et al. 2024, https://arxiv.org/abs/2406.05882
    """

    beta: Coefficient = 0.1
    label_smoothing: Coefficient = 0.0
    ranks: Ranks = "pairs"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "beta", least=0)
        check_label_smoothing(self)
        check_choice("ranks", self.ranks, Ranks)

    def check(self, batch: RolloutBatch) -> None:
        super().check(batch)
        if (batch.micro_batches or 1) > 1:
            raise ValueError(f"batch: got one of {batch.micro_batches} micro-batches, expected a whole step for {self}")

    def reward(self, x: Responses) -> Numbers:
        return self.beta * x.log_ratio

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        return preferred(self.reward(chosen) - self.reward(rejected), self.label_smoothing)

    def of_samples(self, x: Responses, chosen: Bool[Array, "R S"], pairs: Pairs | None) -> Float[Array, "R S"]:
        pairs = needed("pairs", pairs, "the pairs of the step, since the loss is paired")
        better, worse = (Responses(*map(of, x)) for of in (pairs.of_chosen, pairs.of_rejected))
        there = better.tokens > 0  # a table has empty slots
        above, below = better.log_ratio, worse.log_ratio
        if self.ranks == "pairs":
            # of the policy, and of the reference, whose log-prob is log_prob - log_ratio
            above = better.log_prob - worse.log_prob
            below = above - (better.log_ratio - worse.log_ratio)
        order, other = (jnp.argsort(jnp.where(there, y, jnp.inf)) for y in (above, below))
        of_rank = (better._replace(log_ratio=above[order]), worse._replace(log_ratio=below[other]))
        losses = jnp.zeros_like(above).at[order].set(self(*of_rank))  # to the pair that has the rank in `above`
        tokens = jnp.maximum(better.tokens, 1)
        nll = -mean_log_prob(better._replace(tokens=tokens)) if self.nll == "token_mean" else -better.log_prob
        return pairs.to_both(jnp.where(there, losses + self.nll_coef * nll, 0))
