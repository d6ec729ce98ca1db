"""SimPO: mean log-probs and a margin in place of a reference."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxppo.base.arrays import Coefficient, check_field
from jaxppo.losses.preference.base import (
    Numbers,
    PairLoss,
    Responses,
    check_label_smoothing,
    mean_log_prob,
    preferred,
)


@dataclasses.dataclass(frozen=True)
class SimPO(PairLoss):
    """-log sigmoid(beta (mean log-prob of the chosen response - that of the rejected one) - margin), no reference.

    Args:
      beta: multiplies the difference.
      margin: by how much the chosen response is to be ahead; the paper's gamma.
      label_smoothing: see `DPO`.
      nll_coef: see `PairLoss`; TRL calls it CPO-SimPO's `cpo_alpha`.
      nll: see `PairLoss`.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> from jaxppo.losses import preference
      >>> preference.SimPO().reference
      False

    Meng et al. 2024, https://arxiv.org/abs/2405.14734
    """

    reference: ClassVar[bool] = False
    beta: Coefficient = 2.0
    margin: Coefficient = 0.5
    label_smoothing: Coefficient = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "beta", least=0)
        check_field(self, "margin", least=0)
        check_label_smoothing(self)

    def reward(self, x: Responses) -> Numbers:
        return self.beta * mean_log_prob(x)

    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        return preferred(self.reward(chosen) - self.reward(rejected) - self.margin, self.label_smoothing)
