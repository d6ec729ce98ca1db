"""Checks of static arguments."""

from __future__ import annotations

import operator
from typing import Any


def check_int(name: str, value: Any, least: int) -> int:
    """The value as an int; raises unless it is an integer, not traced, and large enough."""
    try:
        number = operator.index(value)
    except TypeError:  # JAX's own errors about traced values among them
        raise TypeError(f"{name}: got {value!r}, expected a static integer of at least {least}") from None
    if number < least:
        raise ValueError(f"{name}: got {value}, expected at least {least}")
    return number
