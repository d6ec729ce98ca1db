"""The output of a run: a progress bar, metrics.jsonl, samples.jsonl, settings.json, reward.png; on
request, a page.

python -m examples.trainer.report runs/grpo    # report.html and tokens.html, for a browser, and events for TensorBoard
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
import matplotlib
import numpy as np
from matplotlib import pyplot
from tqdm import tqdm

import jaxppo
from examples.trainer.files import read_text
from jaxppo import ParallelMesh

_MEAN_OF = 5  # steps, which a mean in the plot is of
_HELD_OUT = "held_out_accuracy"
_PLOTTED = {"reward": "reward", "kl": "KL to the SFT model (nats)", "entropy": "entropy (nats)"}


class Report:
    """Writes each step's numbers to `folder/metrics.jsonl` and onto a progress bar, both open
    within a with block.

    A few samples of each step go to `folder/samples.jsonl`, and what the loss does with their
    tokens to `folder/tokens.jsonl`.

    Args:
      folder: where the files go.
      steps: the number of GRPO steps of the whole run.
      start: the step to go on from. Records of later steps are dropped, and so are lines that a
        sudden end cut off. 0 starts new files.
      settings: what the run was started with; written to settings.json.
      explains: whether tokens are explained. If not, no tokens.jsonl is made; one that is there is
        cut like the others.
    """

    def __init__(
        self, folder: Path, steps: int, start: int, settings: Mapping[str, Any], explains: bool
    ):
        self.folder = folder
        self.records = _records_until(folder / "metrics.jsonl", start)
        names = ["samples.jsonl"] + ["tokens.jsonl"] * (
            explains or (folder / "tokens.jsonl").is_file()
        )
        replace(folder / "metrics.jsonl", "".join(map(_line, self.records)))
        for name in names:
            replace(folder / name, "".join(map(_line, _records_until(folder / name, start))))
        replace(folder / "settings.json", json.dumps(settings, indent=1, default=str))
        self._file = (folder / "metrics.jsonl").open("a")
        self._beside = [(folder / name).open("a") for name in names]
        self._bar = tqdm(total=steps, initial=start, desc="grpo", unit="step", dynamic_ncols=True)

    def add(
        self,
        step: int,
        metrics: Mapping[str, Any],
        samples: Sequence[Mapping[str, Any]],
        tokens: Sequence[Mapping[str, Any]],
    ) -> None:
        """Takes the numbers of one step, the samples to keep, and the records of samples whose
        tokens are explained.

        A number that is not finite becomes null in the file, since JSON has no NaN.
        """
        numbers = {name: float(value) for name, value in metrics.items()}
        self.records.append(
            {"step": step} | {n: x if math.isfinite(x) else None for n, x in numbers.items()}
        )
        lines = ([{"step": step, "samples": samples}], tokens)
        for file, some in zip(self._beside, lines, strict=False):
            _append(file, some)
        _append(self._file, self.records[-1:])
        shown = {name: f"{numbers[name]:.3f}" for name in ("reward", "loss", "entropy")}
        self._bar.set_postfix(
            shown | {"tokens/s": f"{numbers['tokens_per_second']:.0f}"}, refresh=False
        )
        self._bar.update(step - self._bar.n)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()
        with contextlib.suppress(OSError):  # a line that could not be written, as `add` told
            for file in (self._file, *self._beside):
                file.close()

    def draw(self) -> None:
        """Draws the curves."""
        matplotlib.use("agg")
        shown = {
            name: label
            for name, label in _PLOTTED.items()
            if any(name in record for record in self.records)
        }
        size = (7, 1 + 2 * len(shown))
        figure, axes = pyplot.subplots(
            max(len(shown), 1), sharex=True, squeeze=False, figsize=size, layout="constrained"
        )
        for axis, (name, label) in zip(axes[:, 0], shown.items(), strict=False):
            self._curve(
                axis, name, f"each step; dark: mean of {_MEAN_OF}" if name == "reward" else ""
            )
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        axes[-1, 0].set_xlabel("GRPO step")
        beside = self.folder / "reward.new.png"
        beside.unlink(missing_ok=True)  # a link or a pipe of that name
        figure.savefig(beside, dpi=120)
        os.replace(beside, self.folder / "reward.png")
        pyplot.close(figure)

    def _curve(self, axis: Any, name: str, label: str) -> None:
        """The values of a name; with a label also their running mean, and the accuracy on
        held-out questions.
        """
        found = [
            (r["step"], math.nan if r[name] is None else r[name]) for r in self.records if name in r
        ]
        steps, values = np.array(found).T
        axis.plot(steps, values, color="C0", alpha=0.4 if label else 1.0, label=label)
        if not label:
            return
        if len(values) >= _MEAN_OF:
            mean = np.convolve(values, np.ones(_MEAN_OF) / _MEAN_OF, mode="valid")
            axis.plot(steps[_MEAN_OF - 1 :], mean, color="C0")
        held_out = [(r["step"], r[_HELD_OUT]) for r in self.records if r.get(_HELD_OUT) is not None]
        if held_out:
            axis.plot(
                *np.array(held_out).T,
                "o-",
                color="C1",
                markersize=4,
                label="accuracy on held-out questions",
            )
        axis.legend(fontsize="small")


def settings_of(parallel: ParallelMesh, arguments: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """What a run was started with: arguments, sizes of the model, the mesh, versions."""
    devices = parallel.mesh.devices.ravel()
    mesh = {
        "axes": dict(parallel.mesh.shape),
        "devices": [device.id for device in devices],
        "roles": {role: getattr(parallel, role) for role in ("data", "context", "tensor", "fsdp")},
        "context layout": parallel.context_layout,
        "kind of device": devices[0].device_kind,
        "processes": jax.process_count(),
    }
    versions = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxppo": jaxppo.__version__,
    }
    return {
        "mesh": mesh,
        "arguments": dict(arguments),
        "model": dataclasses.asdict(model),
        "versions": versions,
    }


def memory_gib() -> float:
    """The most that a device of this process has held so far; that of the process if devices do
    not say.
    """
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()
    ]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return float(max(peaks) or host) / 2**30


def _append(file: TextIO, records: Sequence[Mapping[str, Any]]) -> None:
    try:
        file.write("".join(map(_line, records)))
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from error


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def replace(path: Path, text: str) -> None:
    """Replaces a file at once: a reader finds the old text or the new one."""
    beside = path.with_name(f"{path.name}.new")
    beside.unlink(missing_ok=True)  # a link of that name would lead out of the folder
    beside.write_text(text, encoding="utf-8", errors="replace")
    os.replace(beside, path)


def _records_until(path: Path, step: int) -> list[dict[str, Any]]:
    return (
        [record for record in read_records(path) if record["step"] <= step]
        if step and path.is_file()
        else []
    )


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, without lines that are not valid."""
    for line in read_text(path, errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # the second of `[[[[...`
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def write_events(records: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Writes every number for TensorBoard, and removes the events of an older report."""
    from tensorboardX import SummaryWriter

    if folder.is_symlink():
        raise ValueError(
            f"run: got {folder}, a link, expected a folder of the run or nothing there"
        )
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    with SummaryWriter(str(folder)) as writer:
        for record in records:
            for name, value in record.items():
                if name != "step":
                    writer.add_scalar(name, value, record["step"])


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the page and the events of a run, which may still go on."""
    from examples.trainer.report_page import load_run, page, title_of
    from examples.trainer.tokens_page import load_tokens, tokens_page

    parser = argparse.ArgumentParser(
        prog="examples.trainer.report", description="A look at a run of train_grpo."
    )
    parser.add_argument("run", type=Path, help="the --out folder of the run")
    parser.add_argument(
        "--beside", type=Path, help="that of another run, whose curves are drawn dotted"
    )
    args = parser.parse_args(argv)
    folder = args.run
    try:
        run = load_run(folder)
        beside = load_run(args.beside) if args.beside else None
        tokens = load_tokens(folder)
        if tokens is None:
            (folder / "tokens.html").unlink(missing_ok=True)  # of an older run
        else:
            replace(folder / "tokens.html", tokens_page(title_of(run), tokens))
        replace(folder / "report.html", page(run, beside, tokens is not None))
        write_events(run.numbers, folder / "tensorboard")
    except (ValueError, OSError) as error:
        print(f"examples.trainer.report: error: {error}", file=sys.stderr)
        return 2
    print(f"{folder / 'report.html'}; tensorboard --logdir {folder / 'tensorboard'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
