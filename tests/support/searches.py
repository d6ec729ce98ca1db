"""Runs a check on random examples: always the same ones by day, new ones at night."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from typing import Any

import programs
from hypothesis import given, seed, settings
from hypothesis import strategies as st


def search(
    cell: str, of_examples: float, *strategies: st.SearchStrategy
) -> Callable[[Callable[..., None]], None]:
    """Runs the decorated check at once, on this share of the profile's examples, see conftest.

    Each cell of a test has its own seed. It is always the same by day, and depends on
    `--search-seed` at night. A few examples of one seed are much alike, so a test has many cells.
    """

    def run(check: Callable[..., None]) -> None:
        @functools.wraps(check)
        def example(**drawn: Any) -> None:
            programs.let_go()
            check(**drawn)

        count = max(1, round(settings().max_examples * of_examples))
        found = settings(max_examples=count)(given(*strategies)(example))
        own = cell if settings().derandomize else f"{os.environ['SEARCH_SEED']} {cell}"
        seed(zlib.crc32(own.encode()))(found)()

    return run
