"""What `translate` of verl, slime and miles returns."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxppo.policy.config import PolicyLossConfig


@dataclasses.dataclass(frozen=True)
class Translation:
    """The translation of another system's configuration.

    Args:
      config: the policy loss.
      head: the temperature of `log_probs_from_hidden`, `log_probs_from_logits` and
        `policy_loss_from_hidden`.
      batching: `row_length` and `max_tokens` of `RolloutBatch.from_samples`, as far as the
        configuration has them.
      elsewhere: the given keys that are about something else, each with a remark on its subject.
    """

    config: PolicyLossConfig
    head: dict[str, Any]
    batching: dict[str, int]
    elsewhere: dict[str, str]
