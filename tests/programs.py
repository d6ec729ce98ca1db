"""Compiled programs that tests leave behind, let go before a process has too many."""

import contextlib
import gc
import time
from pathlib import Path

import jax

# Linux lets a process map 65,530 regions of memory. XLA for CPUs takes several for a program, and crashes without.
MOST_REGIONS = 30_000
SECONDS = 5.0  # between two looks
_looked = 0.0


def let_go() -> None:
    """Between tests or examples of a search."""
    global _looked
    if time.monotonic() - _looked < SECONDS:
        return
    _looked = time.monotonic()
    with contextlib.suppress(FileNotFoundError), Path("/proc/self/maps").open() as regions:  # Linux alone has it
        if sum(1 for _ in regions) > MOST_REGIONS:
            jax.clear_caches()
            gc.collect()
