"""Shared code of the readers of other systems' configurations: their result, and errors that name the key.

A key is translated, or has a remark in `Translation.elsewhere`, or is refused by name: a value without an equivalent
here is an error.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn

from jaxppo.base.arrays import is_number


class Reading(NamedTuple):
    """A `Translation` with the fields of its `PolicyLossConfig`, since that class calls the readers."""

    policy: dict[str, Any]
    head: dict[str, Any]
    batching: dict[str, int]
    elsewhere: dict[str, str]


def by_name(reasons: Mapping[str, str], section: str = "") -> dict[str, str]:
    """Turns {reason: "name name"} into {name: reason}, with the section before each name."""
    return {section + name: reason for reason, names in reasons.items() for name in names.split()}


def about(key: str, elsewhere: Mapping[str, str]) -> str | None:
    """The remark on a key. A name that ends in "." stands for a section, one that ends in "_" for a prefix."""
    begin = [name for name in elsewhere if name[-1] in "._" and f"{key}.".startswith(name)]
    return elsewhere.get(key) or (elsewhere[max(begin, key=len)] if begin else None)


class Options:
    """The values of a configuration by key, with the other system's defaults for missing keys.

    `elsewhere` has remarks on the keys that are not translated, and `others` is the remark on keys that the system does
    not have; if it is None, they are an error.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        elsewhere: Mapping[str, str],
        system: str,
        others: str | None = None,
    ) -> None:
        self.given, self.values = given, {**defaults, **given}
        reasons = {key: elsewhere.get(key) if key in defaults else about(key, elsewhere) or others for key in given}
        self.elsewhere = {key: reason for key, reason in reasons.items() if reason is not None}
        unknown = [key for key in given if key not in defaults and key not in self.elsewhere]
        if unknown:
            like = {key: difflib.get_close_matches(key, defaults, 1) for key in unknown}
            shown = [f"{key} (did you mean {like[key][0]}?)" if like[key] else key for key in unknown]
            raise ValueError(f"config: got unknown keys {', '.join(shown)}, expected those of {system}")

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def refuse(self, key: str, expected: str) -> NoReturn:
        raise ValueError(f"{key}: got {self[key]!r}, expected {expected}")

    def check(self, key: str, good: bool, expected: str) -> None:
        if not good:
            self.refuse(key, expected)

    def number(self, key: str, above: float = -math.inf) -> float:
        """A finite number, or a string that spells one, as YAML reads 1e-3."""
        value = self[key]
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)
        good = is_number(value) and value > above
        self.check(key, good, "a finite number" if math.isinf(above) else f"a number above {above}")
        return float(value)

    def number_or(self, key: str, default: float | None, above: float = -math.inf) -> Any:
        """A number, or the default for None."""
        return default if self[key] is None else self.number(key, above)

    def count(self, key: str) -> int | None:
        """A whole number, or None."""
        if self[key] is None:
            return None
        value = self.number(key)
        self.check(key, value >= 1 and value == int(value), "a whole number above 0, or None")
        return int(value)

    def batching(self, longest: int | None, dynamic: str, tokens: str, samples: str) -> dict[str, int]:
        """`row_length`, the longest sample, and `max_tokens` of a micro-batch, by the keys that say so."""
        most = self.count(tokens) if self.flag(dynamic) else (self.count(samples) or 0) * (longest or 0)
        return {name: x for name, x in (("row_length", longest), ("max_tokens", most)) if x}

    def flag(self, key: str) -> bool:
        self.check(key, isinstance(self[key], bool), "True or False")
        return bool(self[key])

    def choice(self, key: str, choices: Collection[str], why: str = "") -> str:
        good = isinstance(self[key], str) and self[key] in choices
        self.check(key, good, f"one of {', '.join(choices)}{why and '; '}{why}")
        return str(self[key])
