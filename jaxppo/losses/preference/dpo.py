"""Losses of the difference of two responses' log-ratios to a reference."""

from __future__ import annotations

import dataclasses

from jaxppo.base.arrays import Coefficient, check_field, check_flag
from jaxppo.losses.preference.base import (
    Numbers,
    PairLoss,
    Responses,
    check_label_smoothing,
    log_ratio_of,
    preferred,
)


@dataclasses.dataclass(frozen=True)
class DPO(PairLoss):
    """Direct preference optimisation: -log sigmoid(beta D), D the chosen response's log-ratio less the rejected one's.

    The log-ratio of a response is the sum over its loss tokens of log_prob - ref_log_prob. With `label_smoothing` e it
    is cDPO, -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D); with means in place of the sums, length-normalised
    DPO, TRL's "sigmoid_norm".

    Args:
      beta: the strength of the pull to the reference.
      label_smoothing: the probability that a label is wrong, at most 0.5.
      length_normalised: use the means of log-ratios in place of their sums.
      nll_coef: see `PairLoss`; 1 is RPO's, TRL's `rpo_alpha`.
      nll: see `PairLoss`.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> from jaxppo.losses import preference
      >>> preference.DPO(beta=0.2, label_smoothing=0.1).label_smoothing
      0.1

    Rafailov et al. 2023, https://arxiv.org/abs/2305.18290; cDPO: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf
    """

    beta: Coefficient = 0.1
    label_smoothing: Coefficient = 0.0
    length_normalised: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "beta", least=0)
        check_label_smoothing(self)
        check_flag("length_normalised", self.length_normalised)

    def reward(self, x: Responses) -> Numbers:
        return self.beta * log_ratio_of(x, self.length_normalised)

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        return preferred(self.reward(chosen) - self.reward(rejected), self.label_smoothing)


@dataclasses.dataclass(frozen=True)
class IPO(PairLoss):
    """Identity preference optimisation: (D - 1 / (2 beta))^2, with D as in `DPO`, but of means by default, as in TRL.

    It aims at a fixed difference D rather than the largest one. prime-rl's policy loss "ipo" is another loss.

    Args:
      beta: a larger one keeps the policy nearer to the reference; the paper's tau.
      length_normalised: use the means of log-ratios; False takes the paper's sums.
      nll_coef: see `PairLoss`.
      nll: see `PairLoss`.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> from jaxppo.losses import preference
      >>> preference.IPO().length_normalised
      True

    Azar et al. 2023, https://arxiv.org/abs/2310.12036
    """

    beta: Coefficient = 0.1
    length_normalised: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "beta", above=0)
        check_flag("length_normalised", self.length_normalised)

    def reward(self, x: Responses) -> Numbers:
        return self.beta * log_ratio_of(x, self.length_normalised)

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        better, worse = (log_ratio_of(x, self.length_normalised) for x in (chosen, rejected))
        return (better - worse - 1 / (2 * self.beta)) ** 2
