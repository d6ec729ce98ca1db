"""ORPO: supervised learning of the chosen response, and odds in place of a reference."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxppo.base.arrays import Coefficient, check_field
from jaxppo.losses.preference.base import Numbers, PairLoss, Responses, mean_log_prob

_MOST = -1e-6  # a mean log-prob of 0 has infinite odds


@dataclasses.dataclass(frozen=True)
class ORPO(PairLoss):
    """The chosen response's mean negative log-likelihood, less beta log sigmoid(log odds - the rejected one's).

        log odds = m - log(1 - exp(m)), m the mean log-prob of a response's loss tokens

    The likelihood is over the loss tokens, that is the response, as in the paper. TRL takes the mean over all tokens of
    a micro-batch, prompts included.

    Args:
      beta: the coefficient of the odds; the paper's lambda.
      nll_coef: see `PairLoss`.
      nll: see `PairLoss`.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> from jaxppo.losses import preference
      >>> preference.ORPO().nll_coef
      1.0

    Hong et al. 2024, https://arxiv.org/abs/2403.07691
    """

    reference: ClassVar[bool] = False
    beta: Coefficient = 0.1
    nll_coef: Coefficient = dataclasses.field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "beta", least=0)

    def reward(self, x: Responses) -> Numbers:
        return self.beta * mean_log_prob(x)

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        return -self.beta * jax.nn.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(x: Responses) -> Numbers:
    mean = jnp.minimum(mean_log_prob(x), _MOST)
    return mean - jnp.log(-jnp.expm1(mean))
