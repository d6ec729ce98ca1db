"""Times how long JAX traces and lowers a head's loss and gradients, and how long XLA compiles them
for described TPUs.

    python -m benchmarks.compiling
    python -m benchmarks.compiling --before FOLDER      # times another checkout and this one in turns

A turn is a process of its own. It traces and lowers each version several times with empty caches,
keeps the fastest time of the process, and compiles once. No TPU is needed. Compiling uses all
cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

HEAD = "qwen3-8b"
TOKENS = 8192  # tokens on each device


def measure(topology: str, mesh: str, repeats: int, compiles: bool = True) -> dict[str, float]:
    """Seconds by version and stage, such as "two passes, trace"."""
    import jax
    import jax.numpy as jnp

    from examples.planner.pod_head import Step, best_plain_stats, described_mesh
    from examples.planner.pod_sizes import HEADS

    step = Step(HEADS[HEAD], TOKENS, jnp.bfloat16, described_mesh(mesh, topology))
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain JAX at its best": (step.plain, {"stats": best_plain_stats}),
        "one pass, a mask": (step.one_pass, {}),
        "one pass, no mask": (step.one_pass, {"follow_mask": False}),
        "two passes": (step.two_passes, {}),
        "forward": (step.forward, {}),
    }
    arguments = step.arguments
    found = dict[str, float]()
    for name, (loss, options) in ways.items():
        for _ in range(repeats):
            jax.clear_caches()
            gc.collect()  # else it may happen within a measurement
            begin = time.process_time()
            traced = step.program(loss, **options).trace(*arguments)
            middle = time.process_time()
            lowered = traced.lower()
            for stage, seconds in {
                "trace": middle - begin,
                "lower": time.process_time() - middle,
            }.items():
                found[f"{name}, {stage}"] = min(seconds, found.get(f"{name}, {stage}", seconds))
        if compiles:
            begin = time.perf_counter()
            lowered.compile()
            found[f"{name}, compile"] = time.perf_counter() - begin
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="the folder of another checkout")
    parser.add_argument("--tpu", default="v5p:2x2x4")
    parser.add_argument("--mesh", default="cp=4,tp=4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="one turn of this checkout, as JSON")
    args = parser.parse_args(arguments)
    if args.one:
        print(json.dumps(measure(args.tpu, args.mesh, args.repeats)))
        return
    from benchmarks.turns import in_processes

    options = [f"--tpu={args.tpu}", f"--mesh={args.mesh}", f"--repeats={args.repeats}"]
    found = in_processes(__file__, options, args.before, args.turns)
    best = {
        name: {key: min(turn[key] for turn in turns) for key in turns[0]}
        for name, turns in found.items()
    }
    print(
        f"{HEAD}, {TOKENS} tokens per device, {args.mesh} on {args.tpu}: least seconds of"
        f" {args.turns} processes"
    )
    print(f"{'':36}" + "".join(f"{name:>10}" for name in best))
    for key in best["now"]:
        print(f"{key:36}" + "".join(f"{seconds[key]:>10.2f}" for seconds in best.values()))


if __name__ == "__main__":
    main()
