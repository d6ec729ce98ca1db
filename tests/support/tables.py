"""Tables of cases: all of them at night, a sample by day in which every two entries of a case
meet.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[tuple], by_day: Callable[[int, tuple], Any]) -> list:
    """The cases for `parametrize`. Those for which by_day(i, case) is False run at night only."""
    return [
        c if by_day(i, c) else pytest.param(*c, marks=pytest.mark.nightly)
        for i, c in enumerate(cases)
    ]
