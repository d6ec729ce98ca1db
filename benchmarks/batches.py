"""Times the host: how many samples per second are packed, made into a batch and checked.

No device takes part.

    python -m benchmarks.batches
    python -m benchmarks.batches --before FOLDER      # times another checkout and this one in turns

Samples of 2000 tokens, a quarter of them the prompt, with four per-token fields: advantages and
three kinds of log-probs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

PACKED = 100_000  # samples to pack; only their lengths matter


def timed(fn: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def measure(count: int, tokens: int) -> dict[str, float]:
    """Times each step once: samples per second, and for packing the seconds of `PACKED` samples."""
    from jaxppo import RolloutBatch, Sample
    from jaxppo.sharding import pack

    rng = np.random.default_rng(0)
    prompt = tokens // 4

    def sample(i: int) -> Sample:
        fields = rng.normal(size=(4, tokens - prompt)).astype(np.float32)
        names = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
        log_probs = dict(zip(names, -np.abs(fields[1:]), strict=True))
        ids = rng.integers(0, 1000, tokens).astype(np.int32)
        return Sample(ids, response_start=prompt, advantages=fields[0], sample_id=i, **log_probs)

    samples = [sample(i) for i in range(count)]
    held = []
    make = timed(lambda: held.append(RolloutBatch.from_samples(samples, row_length=4 * tokens)))
    check = timed(lambda: held[0].validate(1000))
    lengths = rng.integers(16, 4096, PACKED)
    sequences = [np.zeros(n, np.int32) for n in lengths]
    packed = timed(lambda: pack(sequences, row_length=8192))
    return {"from_samples": count / make, "validate": count / check, "pack": packed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="the folder of another checkout")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="one turn of this checkout, as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.samples, args.tokens)))
        return
    from benchmarks.turns import in_processes

    options = [f"--samples={args.samples}", f"--tokens={args.tokens}"]
    best = {
        name: {
            step: (min if step == "pack" else max)(turn[step] for turn in turns)
            for step in turns[0]
        }
        for name, turns in in_processes(__file__, options, args.before, args.turns).items()
    }
    print(f"best of {args.turns} turns, {args.samples} samples of {args.tokens} tokens")
    for name, found in best.items():
        speeds = ", ".join(
            f"{step} {found[step]:,.0f} samples/s" for step in ("from_samples", "validate")
        )
        print(f"{name:>7}: {speeds}, pack {found['pack']:.2f} s for {PACKED:,} samples")


if __name__ == "__main__":
    main()
