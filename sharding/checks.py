"""Checks of static arguments."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def check_flag(name: str, value: object) -> None:
    """Raises unless the value is True or False: any text, "no" included, would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, expected True or False")


def check_int(name: str, value: SupportsIndex, least: int) -> int:
    """The value as an int. Raises where it is no integer, traced, or below `least`."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, expected a static integer of at least {least}")
    try:
        number = operator.index(value)
    except TypeError:  # JAX's errors about traced values are TypeErrors too
        raise TypeError(
            f"{name}: got {value!r}, expected a static integer of at least {least}"
        ) from None
    if number < least:
        raise ValueError(f"{name}: got {value}, expected at least {least}")
    return number
