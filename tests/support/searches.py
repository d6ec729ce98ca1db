"""A search: random examples of a check, a fixed slice of them or as many new ones as the run asks for."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from typing import Any

import programs
from hypothesis import given, seed, settings
from hypothesis import strategies as st


def search(cell: str, of_examples: float, *strategies: st.SearchStrategy) -> Callable[[Callable[..., None]], None]:
    """Runs the decorated check at once, on this part of the profile's examples, see conftest.

    A cell has a seed of its own, the same for every slice, and by `--search-seed` for a night. Few examples of one
    seed are much alike, so a test has many cells.
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
