"""A*-PO: the log-ratio of a whole response to the reference, regressed on its optimal advantage."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.base.arrays import Coefficient
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.preference.base import PreferenceLoss, Responses
from jaxppo.policy_losses.base import number

__all__ = ["A2PO"]


@dataclasses.dataclass(frozen=True)
class A2PO(PreferenceLoss):
    """A*-PO: the mean over samples of (beta d - A)^2, d the sum over a response's loss tokens of
    log-ratios.

    The log-ratios are log_prob - ref_log_prob. A is the optimal advantage r - V*, which the batch
    has in place of `rewards`. V* is the value of the prompt for the best policy within reach of the
    reference, estimated once from samples of the reference: docs/recipes.md has both. One sample of
    a prompt is enough, drawn by the policy itself.

    The metrics are those of `KTO`: the samples with A above 0 are the chosen ones, and beta d is
    their reward.

    Args:
      beta: multiplies the log-ratio, above 0; beta2 of the paper and of TRL.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> from jaxppo.contrib.a2po import A2PO
      >>> sample = Sample([1, 2, 3], response_start=1, reward=0.5, ref_log_probs=[-1.0, -3.0])
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> loss, _ = loss_from_stats(TokenStats(jnp.array([[-0.5, -1.5, 0.0]])), batch, A2PO(beta=0.1))
      >>> round(float(loss), 4)  # (0.1 * 2 - 0.5)^2
      0.09

    Brantley et al. 2025, Accelerating RL for LLM reasoning with optimal advantage regression,
    https://arxiv.org/abs/2505.20686; shipped by TRL 1.16 as `experimental.a2po`
    """

    paired: ClassVar[bool] = False
    beta: Coefficient = number(1e-3, above=0)

    def of_samples(self, x: Responses, batch: RolloutBatch, pairs: Any) -> Float[Array, "R S"]:
        # a sample that has loss and no finite reward breaks a rule
        advantages = jnp.where(jnp.isfinite(batch.rewards), batch.rewards, 0)
        return (self.reward(x) - advantages) ** 2
