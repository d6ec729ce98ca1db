"""What a run shows: a progress bar, `metrics.jsonl` and `reward.png`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from tqdm import tqdm

_PLOTTED = {"reward": "reward", "kl": "KL to the SFT model (nats)", "entropy": "entropy (nats)"}


class Report:
    """Writes each step's numbers to `folder/metrics.jsonl` and onto a progress bar.

    Args:
      folder: where the files go.
      steps: the number of GRPO steps of the whole run.
      start: the step to go on from; what the file says of later ones is dropped. 0 starts a new file.
    """

    def __init__(self, folder: Path, steps: int, start: int):
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        path = folder / "metrics.jsonl"
        if start:
            records = [json.loads(line) for line in path.read_text().splitlines()]
            self.records = [record for record in records if record["step"] <= start]
        self._file = path.open("w")
        for record in self.records:
            self._write(record)
        self._bar = tqdm(total=steps, initial=start, desc="grpo", unit="step", dynamic_ncols=True)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the numbers of one step."""
        record = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        self.records.append(record)
        self._write(record)
        shown = {name: f"{record[name]:.3f}" for name in ("reward", "loss", "entropy")}
        self._bar.set_postfix(shown | {"tokens/s": f"{record['tokens_per_second']:.0f}"}, refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Ends the bar and the file, and draws the curves."""
        self._bar.close()
        self._file.close()
        matplotlib.use("agg")
        figure, axes = pyplot.subplots(len(_PLOTTED), sharex=True, figsize=(7, 7), layout="constrained")
        steps = [record["step"] for record in self.records]
        for axis, (name, label) in zip(axes, _PLOTTED.items(), strict=True):
            axis.plot(steps, [record[name] for record in self.records])
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        axes[-1].set_xlabel("GRPO step")
        figure.savefig(self.folder / "reward.png", dpi=120)
        pyplot.close(figure)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
