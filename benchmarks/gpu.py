"""Heads of published sizes on a GPU: all versions that fit it, one pass with several budgets of memory, two passes
with several tiles.

Figures for the second case were published for an H100: three products at 650 TFLOP/s take about 100 ms, and a version
with full logits takes 133 ms in 25 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

from benchmarks import versions
from benchmarks.cases import Case
from benchmarks.versions import Step
from examples.pod_sizes import HeadSizes
from jaxppo.head import plan

CASES = (
    Case(8192, HeadSizes(4096, 131072), "bfloat16"),
    Case(32768, HeadSizes(2560, 128256), "bfloat16"),
)
MEMORIES = (256, 512, 1024, 2048, 4096, 8192)  # MiB
TILES = {
    "columns": (1024, 2048, 4096, 8192),
    "wide": (2048, 8192),
    "tokens": (512, 1024, 2048),
    "references": (75 * 2**20, 304 * 2**20),
}


@contextlib.contextmanager
def tiled(**fields: Any) -> Iterator[None]:
    """Within the block, programs are compiled with these fields changed in the profile of each device."""
    profiles = {kind: dataclasses.replace(profile, **fields) for kind, profile in plan.PROFILES.items()}
    jax.clear_caches()  # the cache of programs does not know of profiles
    with mock.patch.object(plan, "PROFILES", profiles):
        yield
    jax.clear_caches()


def one_passes(case: Case) -> dict[str, Step]:
    """One pass for each budget of memory; it becomes two passes if the budget is too small."""
    return {f"jaxppo in {mib} MiB": versions.our_policy_loss(case, mib) for mib in MEMORIES}


def cuts() -> Iterator[tuple[str, dict[str, int]]]:
    """The names of the tiles for two passes, with the fields of profiles that set them."""
    for values in itertools.product(*TILES.values()):
        fields = dict(zip(TILES, values, strict=True))
        yield ", ".join(f"{name} {value}" for name, value in fields.items()), fields


def check(parser: argparse.ArgumentParser) -> None:
    """Ends the command if there is no GPU; leaves GPU memory to PyTorch."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != "gpu":
        parser.error(f"gpu: expected a GPU, got {jax.default_backend()}; CUDA's wheels are pip install 'jax[cuda12]'")
