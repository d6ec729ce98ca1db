"""The result of translating another system's configuration."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.options import Reading


@dataclasses.dataclass(frozen=True)
class Translation:
    """The translation of another system's configuration.

    Args:
      config: the policy loss.
      head: keyword arguments of `log_probs_from_hidden`, `log_probs_from_logits` and `policy_loss_from_hidden`.
      batching: keyword arguments of `RolloutBatch.from_samples`, as far as the configuration has them.
      elsewhere: the given keys that are about something else, each with a remark on its subject.
    """

    config: PolicyLossConfig
    head: dict[str, Any]
    batching: dict[str, int]
    elsewhere: dict[str, str]

    @classmethod
    def of(cls, found: Reading) -> Self:
        """Makes a translation from the result of a reader."""
        return cls(PolicyLossConfig(**found.policy), found.head, found.batching, found.elsewhere)
