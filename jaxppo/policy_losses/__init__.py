"""The published policy losses: each is a frozen dataclass of hyperparameters with a `__call__`,
see `PolicyLoss`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxppo.base.arrays import check
from jaxppo.base.option_names import same_here
from jaxppo.policy_losses.asymmetric import ASPO
from jaxppo.policy_losses.base import PolicyLoss
from jaxppo.policy_losses.by_token import (
    CISPO,
    DPPO,
    DRO,
    PPO,
    SAPO,
    BySign,
    ProbabilityMask,
    Reinforce,
)
from jaxppo.policy_losses.covariances import ClipCov, KLCov
from jaxppo.policy_losses.sequences import GMPO, GSPO, VESPO

__all__ = ["BY_NAME", "PolicyLoss", "by_name"]
__all__ += ["ASPO", "CISPO", "DPPO", "DRO", "PPO", "SAPO", "BySign", "ProbabilityMask", "Reinforce"]
__all__ += ["GMPO", "GSPO", "VESPO", "ClipCov", "KLCov"]

BY_NAME: dict[str, type[PolicyLoss]] = {
    "aspo": ASPO,
    "by_sign": BySign,
    "cispo": CISPO,
    "clip_cov": ClipCov,
    "dppo": DPPO,
    "dro": DRO,
    "gmpo": GMPO,
    "gspo": GSPO,
    "kl_cov": KLCov,
    "ppo": PPO,
    "probability_mask": ProbabilityMask,
    "reinforce": Reinforce,
    "sapo": SAPO,
    "vespo": VESPO,
}


def by_name(name: str, **hyperparameters: Any) -> PolicyLoss:
    """The published loss of that name, for command lines and configuration files.

    Args:
      name: one of `BY_NAME`.
      **hyperparameters: fields of its class.

    Raises:
      ValueError: an unknown name, a hyperparameter that the loss lacks or that is out of its range.

    Example:
      >>> by_name("ppo", clip_high=0.28).clip_high
      0.28
    """
    check(
        "name",
        repr(name),
        isinstance(name, str) and name in BY_NAME,
        f"one of {', '.join(BY_NAME)}",
    )
    fields = [field.name for field in dataclasses.fields(BY_NAME[name])]  # type: ignore[arg-type]
    for option, value in hyperparameters.items():
        expected = (
            same_here(option, value, fields) or f"one of {', '.join(fields) or 'no hyperparameter'}"
        )
        check(option, f"it with {name!r}", option in fields, expected)
    return BY_NAME[name](**hyperparameters)
