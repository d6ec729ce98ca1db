"""Regression of a draft's features on the policy's: EAGLE's first loss."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo.base.arrays import Aggregation, Coefficient, check, check_floating, check_type
from jaxppo.base.metrics import Terms, means
from jaxppo.base.pytree import PyTree
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.token_loss import Asks, Losses, Reads, TokenLoss, WeighedBatch, for_each
from jaxppo.policy_losses.base import number
from jaxppo.sharding import Segments

__all__ = ["Features", "States"]


class States(NamedTuple):
    """The draft's features and the policy's, `[R, T, H]` each; the second are constants."""

    draft: Float[Array, "R T H"]
    policy: Float[Array, "R T H"]


@dataclasses.dataclass(frozen=True)
class Features(TokenLoss[States]):
    """Smooth L1 between a draft's features and the policy's: the mean over H of beta-smoothed
    |draft - policy|.

    An error e counts as e^2 / (2 beta) below beta, as |e| - beta / 2 beyond. `loss_from_stats`
    takes `States` as statistics; shift the policy's states first,
    `shift_left(hidden, parallel, 1, 0, segment_ids, num_segments)`, where the draft predicts the
    next position's. The published sum is this and 0.1 times the cross-entropy of `draft_loss`. The
    metric is `features`, the mean over tokens.

    Args:
      beta: where the square ends.
      aggregation, aggregation_norm: the denominators, see `token_weights`.

    Raises:
      ValueError: a beta that is not above 0.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2], response_start=1)], row_length=2)
      >>> states = States(jnp.array([[[0.5, 2.0], [0.0, 0.0]]]), jnp.zeros((1, 2, 2)))
      >>> float(loss_from_stats(states, batch, Features())[0])
      0.8125

    Li et al. 2024, EAGLE, https://arxiv.org/abs/2401.15077
    """

    of_head: ClassVar[bool] = False
    asks = Asks()
    beta: Coefficient = number(1.0, above=0)
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None

    def check_stats(self, stats: PyTree, batch: RolloutBatch) -> None:
        check_type("stats", stats, isinstance(stats, States), "contrib.features.States")
        shape = batch.loss_mask.shape
        for name, x in stats._asdict().items():
            check_floating(f"stats.{name}", x, 3, "[R, T, H]")
            good = x.shape == (*shape, stats.draft.shape[-1])
            check(f"stats.{name}", f"shape {x.shape}", good, f"{shape} and H, the same of both")

    def reads(self, stats: States | None, batch: RolloutBatch, segments: Segments) -> Reads:
        if stats is None:
            return {}
        return {"draft_states": stats.draft, "policy_states": stats.policy}

    def terms(
        self, stats: States, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        error = jnp.abs(stats.draft - lax.stop_gradient(stats.policy))
        beta = for_each(self.beta)
        inside = jnp.minimum(error, beta)
        return {"features": (inside * (error - inside / 2) / beta).mean(axis=-1)}

    def metrics(self, stats: States, weighed: WeighedBatch, constants: PyTree) -> Terms:
        return means(
            self.terms(stats, weighed.batch, constants, weighed.segments), weighed.batch.loss_mask
        )
