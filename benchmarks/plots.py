"""The two plots of the sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

Records = list[dict[str, Any]]


def time_over_vocabulary(records: Records, folder: Path) -> None:
    """Plots times, divided by that of the three matrix products."""
    _lines(
        records,
        "vocab_size",
        "over_floor",
        "vocabulary",
        "time / three matmuls",
        folder / "time_over_vocabulary.png",
    )


def temporaries_over_tokens(records: Records, folder: Path) -> None:
    """Plots the temporaries of the compiled module."""
    path = folder / "temporaries_over_tokens.png"
    _lines(records, "tokens", "temporaries_mib", "tokens", "temporaries (MiB)", path, log=True)


def _lines(
    records: Records, x: str, y: str, x_label: str, y_label: str, path: Path, log: bool = False
) -> None:
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for version in dict.fromkeys(record["version"] for record in records):
        points = [(record[x], record[y]) for record in records if record["version"] == version]
        axis.plot(*zip(*points, strict=True), marker="o", label=version)
    axis.set_xscale("log", base=2)
    if log:
        axis.set_yscale("log", base=2)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
