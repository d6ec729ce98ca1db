"""Draws the reward curves of several runs of train_grpo.py in one picture.

python -m examples.trainer.compare_runs runs/ppo runs/gspo --out curves.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot

from examples.trainer.report_page import Run, load_run, plain

WINDOW = 10  # each point of a curve is the mean over so many steps


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="the --out folders of runs")
    parser.add_argument("--out", type=Path, default=Path("reward_curves.png"))
    args = parser.parse_args(argv)
    try:
        draw([load_run(folder) for folder in args.runs], args.out)
    except (ValueError, OSError) as error:
        print(f"compare_runs: error: {error}", file=sys.stderr)
        return 2
    return 0


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draws a curve for each run.

    Lines that are no records, such as one that a kill cut, are told of and left out.

    Raises:
      ValueError: a run has too few steps with a finite reward, or the picture's name has no known
        ending.
      OSError: the picture could not be written.
    """
    matplotlib.use("agg")
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run in runs:
        if run.left_out:
            print(
                f"compare_runs: {run.name}: {run.left_out} lines of metrics.jsonl are no records",
                file=sys.stderr,
            )
        found = np.array(
            [(record["step"], record["reward"]) for record in run.numbers if "reward" in record]
        )
        if len(found) < WINDOW:
            raise ValueError(
                f"runs: got {run.name} with {len(found)} rewards, expected {WINDOW} or more"
            )
        means = np.convolve(found[:, 1], np.ones(WINDOW) / WINDOW, mode="valid")
        axis.plot(found[WINDOW - 1 :, 0], means, label=plain(run.name))
    axis.set(xlabel="GRPO step", ylabel=f"reward, mean of {WINDOW} steps")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
