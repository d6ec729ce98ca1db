"""Shared code of the readers of other systems' configurations: their values by key, and errors that
name the key.

A key is translated, or has a remark in `Translation.elsewhere`, or is refused by name: a value
without an equivalent here is an error.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from jaxppo.base.arrays import is_number


def by_name(reasons: Mapping[str, str], section: str = "") -> dict[str, str]:
    """Turns {reason: "name name"} into {name: reason}, with the section before each name."""
    return {section + name: reason for reason, names in reasons.items() for name in names.split()}


def about(key: str, elsewhere: Mapping[str, str]) -> str | None:
    """The remark on a key.

    A name that ends in "." stands for a section, one that ends in "_" for a prefix.
    """
    if elsewhere.get(key):
        return elsewhere[key]
    prefixes = [name for name in elsewhere if name[-1] in "._" and f"{key}.".startswith(name)]
    if not prefixes:
        return None
    return elsewhere[max(prefixes, key=len)]


class Options:
    """The values of a configuration by key, with the other system's defaults for missing keys.

    Args:
      configured: the values that the user configured.
      defaults: the system's, of the keys that are translated.
      elsewhere: remarks on the keys that are not translated.
      system: its name and version.
      others: the remark on keys that the system does not have; if it is None, they are an error.
    """

    def __init__(
        self,
        configured: Mapping[str, Any],
        defaults: Mapping[str, Any],
        elsewhere: Mapping[str, str],
        system: str,
        others: str | None = None,
    ) -> None:
        self.configured = configured
        self.values = {**defaults, **configured}
        self.elsewhere: dict[str, str] = {}
        unknown = []
        for key in configured:
            if key in defaults:
                remark = elsewhere.get(key)
            else:
                remark = about(key, elsewhere) or others
                if remark is None:
                    unknown.append(_with_nearest(key, defaults))
            if remark is not None:
                self.elsewhere[key] = remark
        if unknown:
            raise ValueError(
                f"config: got unknown keys {', '.join(unknown)}, expected those of {system}"
            )

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def refuse(self, key: str, expected: str) -> NoReturn:
        raise ValueError(f"{key}: got {self[key]!r}, expected {expected}")

    def check(self, key: str, good: bool, expected: str) -> None:
        if not good:
            self.refuse(key, expected)

    def number(self, key: str, above: float | None = None) -> float:
        """A finite number, or a string that spells one, as YAML reads 1e-3."""
        value = self[key]
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)
        expected = "a finite number"
        if above is not None:
            expected = f"a number above {above}"
        self.check(key, is_number(value) and (above is None or value > above), expected)
        return float(value)

    def number_or(self, key: str, default: float | None, above: float | None = None) -> Any:
        """A number, or the default for None."""
        if self[key] is None:
            return default
        return self.number(key, above)

    def count(self, key: str) -> int | None:
        """A whole number, or None."""
        if self[key] is None:
            return None
        value = self.number(key)
        self.check(key, value >= 1 and value == int(value), "a whole number above 0, or None")
        return int(value)

    def batching(
        self, row_length: int | None, dynamic: str, tokens: str, samples: str
    ) -> dict[str, int]:
        """`row_length`, the longest sample, and `max_tokens` of a micro-batch, by the keys that
        say so.
        """
        if self.flag(dynamic):
            max_tokens = self.count(tokens)
        else:
            max_tokens = (self.count(samples) or 0) * (row_length or 0)
        batching = {}
        if row_length:
            batching["row_length"] = row_length
        if max_tokens:
            batching["max_tokens"] = max_tokens
        return batching

    def flag(self, key: str) -> bool:
        self.check(key, isinstance(self[key], bool), "True or False")
        return bool(self[key])

    def choice(self, key: str, choices: Collection[str], why: str = "") -> str:
        expected = f"one of {', '.join(choices)}"
        if why:
            expected += f"; {why}"
        self.check(key, isinstance(self[key], str) and self[key] in choices, expected)
        return str(self[key])


def _with_nearest(key: str, defaults: Mapping[str, Any]) -> str:
    """An unknown key, with the known one that the user may have meant."""
    nearest = difflib.get_close_matches(key, defaults, 1)
    if nearest:
        return f"{key} (did you mean {nearest[0]}?)"
    return key
