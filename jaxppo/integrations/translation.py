"""Another system's configuration in the words of this package."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jaxppo.config import PolicyLossConfig
from jaxppo.integrations.options import Reading


@dataclasses.dataclass(frozen=True)
class Translation:
    """Another system's configuration in the words of this package.

    Args:
      config: the policy loss.
      head: keyword arguments of `log_probs_from_hidden`, `log_probs_from_logits` and `policy_loss_from_hidden`.
      batching: keyword arguments of `RolloutBatch.from_samples`, as far as the configuration says them.
      elsewhere: the keys that were given and that are about something else, each with what that is.
    """

    config: PolicyLossConfig
    head: dict[str, Any]
    batching: dict[str, int]
    elsewhere: dict[str, str]

    @classmethod
    def of(cls, found: Reading) -> Self:
        """What a reader found, its policy loss as a config."""
        return cls(PolicyLossConfig(**found.policy), found.head, found.batching, found.elsewhere)
