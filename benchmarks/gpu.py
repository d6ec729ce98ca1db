"""Published sizes on a GPU: every version that fits it, one pass by its memory, two passes by their tiles.

Published for the second case on an H100: three products at 650 TFLOP/s take about 100 ms, full logits 133 ms in 25 GiB.
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
    "tile": (75 * 2**20, 300 * 2**20),
}


@contextlib.contextmanager
def tiled(**fields: Any) -> Iterator[None]:
    """Within, programs are made for every device with these fields of its profile."""
    profiles = {kind: dataclasses.replace(profile, **fields) for kind, profile in plan.PROFILES.items()}
    jax.clear_caches()  # programs are kept by what was asked for, which a profile is not part of
    with mock.patch.object(plan, "PROFILES", profiles):
        yield
    jax.clear_caches()


def one_passes(case: Case) -> dict[str, Step]:
    """By the memory they may take; two passes where that is too little."""
    return {f"jaxppo in {mib} MiB": versions.our_policy_loss(case, mib) for mib in MEMORIES}


def cuts() -> Iterator[tuple[str, dict[str, int]]]:
    """Names and fields of profiles for two passes."""
    for values in itertools.product(*TILES.values()):
        fields = dict(zip(TILES, values, strict=True))
        yield ", ".join(f"{name} {value}" for name, value in fields.items()), fields


def check(parser: argparse.ArgumentParser) -> None:
    """Ends the command where there is no GPU; PyTorch is to find memory beside JAX."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != "gpu":
        parser.error(f"gpu: expected a GPU, got {jax.default_backend()}; CUDA's wheels are pip install 'jax[cuda12]'")
