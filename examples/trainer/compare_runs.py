"""Draws the reward curves of several runs of train_grpo.py in one picture.

python -m examples.trainer.compare_runs runs/ppo runs/gspo --out curves.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot

WINDOW = 10  # each point of a curve is the mean over so many steps


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="the --out folders of runs")
    parser.add_argument("--out", type=Path, default=Path("reward_curves.png"))
    args = parser.parse_args(argv)
    matplotlib.use("agg")
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run in args.runs:
        try:
            lines = (run / "metrics.jsonl").read_text().splitlines()
        except OSError as error:
            print(f"compare_runs: error: {error}", file=sys.stderr)
            return 2
        rewards = np.array([json.loads(line)["reward"] for line in lines])
        if len(rewards) < WINDOW:
            print(f"compare_runs: error: {run}: got {len(rewards)} steps, expected {WINDOW} or more", file=sys.stderr)
            return 2
        means = np.convolve(rewards, np.ones(WINDOW) / WINDOW, mode="valid")
        axis.plot(np.arange(WINDOW, len(rewards) + 1), means, label=run.name)
    axis.set(xlabel="GRPO step", ylabel=f"reward, mean of {WINDOW} steps")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(args.out, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
