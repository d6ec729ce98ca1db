"""Trains a small transformer on verifiable tasks: a short supervised start, then GRPO, on any mesh
of devices.

python -m examples.trainer.train_grpo --out runs/grpo

grpo_run.py holds what a run does, and imports JAX; this file starts and ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from examples.trainer import launch
from examples.trainer.arguments import parse


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if launch.is_launcher(args):
        return launch.start(
            "examples.trainer.train_grpo", sys.argv[1:] if argv is None else argv, args
        )
    try:
        from examples.trainer import grpo_run, processes

        processes.join(args)
        with processes.one_speaks():
            return processes.leave(grpo_run.one_process(args))
    except KeyboardInterrupt:
        print("train_grpo.py: stopped before the run began, or after it was saved", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
