"""Times and temporaries of compiled steps, measured in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Key = TypeVar("Key")  # of a run


def compile_step(step: Callable[[Any], Any], data: Any) -> Any:
    """The step for arrays of these shapes; `data` may be `ShapeDtypeStruct`s."""
    return jax.jit(step).lower(data).compile()


def temporaries(compiled: Any) -> int:
    """Bytes of temporaries, without arguments and results, as the compiler laid them out."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def fits(compiled: Any, share: float = 0.9) -> bool:
    """Whether the program fits a share of the device's memory; True if the device does not say
    how much it has.
    """
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    sizes = compiled.memory_analysis()
    held = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return limit is None or held <= share * limit


def in_turns(runs: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, float]:
    """The median seconds of each run. A round has each run once, in a random order.

    A run changes caches and memory pages for the next one, so no run may always follow the same
    other one.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for turn in range(-1, rounds):  # the first round warms up
        for name in order.sample(list(runs), len(runs)):
            before = time.perf_counter()
            jax.block_until_ready(runs[name]())
            if turn >= 0:
                seconds[name].append(time.perf_counter() - before)
    return {name: statistics.median(values) for name, values in seconds.items()}


def difference(got: Any, expected: Any) -> float:
    """The largest difference of any gradient, divided by its largest value."""

    return max(map(_difference, jax.tree.leaves(got), jax.tree.leaves(expected)))


def _difference(a: Any, b: Any) -> float:
    """On the device, since gradients of a head are gigabytes."""
    a = jnp.asarray(a)
    b = jnp.asarray(b)
    apart = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()
    return float(apart / jnp.abs(b).max().astype(jnp.float32))


def peaks(rounds: int, size: int = 8192, elements: int = 2**28) -> dict[str, float]:
    """Measures the accelerator: FLOP/s of a square bf16 product, bytes/s of a copy (read and
    written).
    """
    # products of ones take less power and time
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    x = jnp.ones(elements, jnp.float32)
    product = jax.jit(lambda a: a @ a)
    copy = jax.jit(lambda x: x + 1)
    seconds = in_turns({"product": lambda: product(a), "copy": lambda: copy(x)}, rounds)
    return {
        "flops_per_second": 2 * size**3 / seconds["product"],
        "bytes_per_second": 2 * x.nbytes / seconds["copy"],
    }
