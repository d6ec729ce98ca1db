"""What the readers of other systems' configurations share: their result, and errors that name the key."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from jaxppo._arrays import is_number
from jaxppo.config import PolicyLossConfig


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


class Options:
    """The values of a configuration by key, another system's own defaults where none was given."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.given, self.defaults = given, defaults

    def __getitem__(self, key: str) -> Any:
        return self.given[key] if key in self.given else self.defaults[key]

    def refuse(self, key: str, expected: str) -> NoReturn:
        raise ValueError(f"{key}: got {self[key]!r}, expected {expected}")

    def number(self, key: str) -> float:
        """A number, or a string that spells one, as YAML reads 1e-3."""
        value = self[key]
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                self.refuse(key, "a number")
        if not is_number(value):
            self.refuse(key, "a finite number")
        return float(value)

    def count(self, key: str) -> int | None:
        """A whole number, or None."""
        if self[key] is None:
            return None
        value = self.number(key)
        if value < 1 or value != int(value):
            self.refuse(key, "a whole number above 0, or None")
        return int(value)

    def flag(self, key: str) -> bool:
        if not isinstance(self[key], bool):
            self.refuse(key, "True or False")
        return bool(self[key])

    def choice(self, key: str, choices: Collection[str], why: str = "") -> str:
        if not isinstance(self[key], str) or self[key] not in choices:
            self.refuse(key, f"one of {', '.join(choices)}{why and '; '}{why}")
        return str(self[key])


def sort_keys(
    given: Collection[str], known: Collection[str], elsewhere: Callable[[str], str | None], system: str
) -> dict[str, str]:
    """What the keys that are not translated are about.

    Args:
      given: the keys of a configuration.
      known: those that are translated.
      elsewhere: what another key is about, None for a key that the system has not.
      system: its name and version, for the error.

    Raises:
      ValueError: lists the keys that the system has not.
    """
    reasons = {key: elsewhere(key) for key in given if key not in known}
    unknown = [key for key, reason in reasons.items() if reason is None]
    if unknown:
        like = {key: difflib.get_close_matches(key, known, 1) for key in unknown}
        shown = [f"{key} (did you mean {like[key][0]}?)" if like[key] else key for key in unknown]
        raise ValueError(f"config: got unknown keys {', '.join(shown)}, expected those of {system}")
    return {key: reason for key, reason in reasons.items() if reason is not None}
