"""What a run shows: a progress bar, `metrics.jsonl` and `reward.png`."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from tqdm import tqdm

_PLOTTED = {"reward": "reward", "kl": "KL to the SFT model (nats)", "entropy": "entropy (nats)"}


class Report:
    """Writes each step's numbers to `folder/metrics.jsonl` and onto a progress bar, both open within a with block.

    Args:
      folder: where the files go.
      steps: the number of GRPO steps of the whole run.
      start: the step to go on from; what the file says of later ones is dropped, and so are lines that a sudden end
        left torn. 0 starts a new file.
    """

    def __init__(self, folder: Path, steps: int, start: int):
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        path, beside = folder / "metrics.jsonl", folder / "metrics.jsonl.new"
        if start and path.exists():
            self.records = [record for record in _records(path) if record["step"] <= start]
        beside.unlink(missing_ok=True)  # a link there would lead out of the folder
        with beside.open("w") as file:
            file.writelines(map(_line, self.records))
        os.replace(beside, path)  # whoever looks finds the old lines or the new ones
        self._file = path.open("a")
        self._bar = tqdm(total=steps, initial=start, desc="grpo", unit="step", dynamic_ncols=True)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the numbers of one step; one that is not finite is null in the file, since JSON has no NaN."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self.records.append({"step": step} | {n: x if math.isfinite(x) else None for n, x in numbers.items()})
        self._file.write(_line(self.records[-1]))
        self._file.flush()
        shown = {name: f"{numbers[name]:.3f}" for name in ("reward", "loss", "entropy")}
        self._bar.set_postfix(shown | {"tokens/s": f"{numbers['tokens_per_second']:.0f}"}, refresh=False)
        self._bar.update(step - self._bar.n)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()
        self._file.close()

    def draw(self) -> None:
        """Draws the curves."""
        matplotlib.use("agg")
        figure, axes = pyplot.subplots(len(_PLOTTED), sharex=True, figsize=(7, 7), layout="constrained")
        steps = [record["step"] for record in self.records]
        for axis, (name, label) in zip(axes, _PLOTTED.items(), strict=True):
            values = [record.get(name) for record in self.records]
            axis.plot(steps, [math.nan if value is None else value for value in values])
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        axes[-1].set_xlabel("GRPO step")
        figure.savefig(self.folder / "reward.png", dpi=120)
        pyplot.close(figure)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, without the lines that are none."""
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record
