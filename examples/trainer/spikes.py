"""Saves the batches of steps whose loss stands out, so that such a step can be run again."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import zipfile
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxppo import ParallelMesh, RolloutBatch
from jaxppo.batch.rollout_batch import check_arrays
from jaxppo.sharding import multihost

EXTRA = "extras."  # stands before the names of extras in a file
MOST_SETTINGS = 2**16  # bytes


class Spikes:
    """Saves the batch of each step whose loss is not finite, or stands out among those of the last
    steps.

    Args:
      folder: of the files, `step_N.npz`.
      deviations: a loss stands out at so many standard deviations from the mean of the last steps;
        None for no files.
      window: how many of the last steps are compared; nothing stands out among fewer than four.
    """

    def __init__(self, folder: Path, deviations: float | None, window: int = 32):
        self.folder = folder
        self.deviations = deviations
        self._losses: deque[float] = deque(maxlen=window)

    def look(self, step: int, loss: float, batch: RolloutBatch) -> Path | None:
        """Takes a step's loss; returns the file if it saved one."""
        if self.deviations is None:
            return None
        spike = not math.isfinite(loss)
        if not spike and len(self._losses) >= 4:
            mean = statistics.fmean(self._losses)
            deviation = statistics.pstdev(self._losses)
            spike = abs(loss - mean) > self.deviations * deviation
        if math.isfinite(loss):
            self._losses.append(loss)
        if not spike:
            return None
        path = self.folder / f"step_{step}.npz"
        batch = multihost.whole(batch)  # every process calls this, since all have the same losses
        if jax.process_index() == 0:
            self.folder.mkdir(exist_ok=True)
            save_batch(path, batch)
        return path


def save_batch(path: Path, batch: RolloutBatch) -> None:
    """Writes all of a batch, ids and extras included."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    fields |= {EXTRA + name: x for name, x in fields.pop("extras").items()}
    arrays = {
        name: np.asarray(x)
        for name, x in jax.device_get(fields).items()
        if isinstance(x, jax.Array | np.ndarray)
    }
    # numpy does not know bfloat16
    dtypes = {name: x.dtype.name for name, x in arrays.items() if x.dtype.kind == "V"}
    arrays |= {name: arrays[name].view(np.uint16) for name in dtypes}
    static = {name: x for name, x in fields.items() if name not in arrays and x is not None}
    np.savez_compressed(path, static=np.array(json.dumps(static | {"dtypes": dtypes})), **arrays)


def load_batch(path: Path, parallel: ParallelMesh, *, most_bytes: int = 2**32) -> RolloutBatch:
    """The batch of a file, placed on the mesh: what `Learner.grpo_step` takes, with the state
    before that step.

    Args:
      most_bytes: of all arrays together, uncompressed. Headers say what they take, and are read
        before any array.

    Raises:
      ValueError: no such file, a pipe or a device, one that is larger, or the batch was packed for
        another context layout.
    """
    try:
        if not Path(path).is_file():  # opening a pipe would wait for whoever writes to it
            raise ValueError("it is no file")
        check_sizes(path, most_bytes)
        with np.load(path, allow_pickle=False) as file:  # so that loading a file cannot run code
            found: dict[str, Any] = dict(file)
        static = json.loads(str(found.pop("static")))
        for name, dtype in static.pop("dtypes", {}).items():
            found[name] = found[name].view(np.dtype(dtype))
        extras = {
            name.removeprefix(EXTRA): found.pop(name) for name in [*found] if name.startswith(EXTRA)
        }
        batch = RolloutBatch(**found | static, extras=extras)
        check_arrays(batch, stacked=True)
    except Exception as error:  # of a stranger's file, whatever reads it raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"path: got {path}, expected a batch that save_batch wrote ({reason})"
        ) from error
    batch.check_layout(parallel)
    return batch.put(parallel)


def check_sizes(path: Path, most_bytes: int) -> None:
    """Raises where the arrays of an npz file are none of a batch, differ from the tokens in
    shape, or are too large.
    """
    names = {field.name for field in dataclasses.fields(RolloutBatch)}
    shapes: dict[str, tuple[int, ...]] = {}
    total = 0
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if name != "static" and name not in names and not name.startswith(EXTRA):
                raise ValueError(f"an array {name!r}")
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shapes[name], _, dtype = read(file)
            size = math.prod(shapes[name]) * dtype.itemsize
            total += max(size, entry.file_size)
            limit = MOST_SETTINGS if name == "static" else most_bytes
            if size > limit or total > most_bytes:
                raise ValueError(
                    f"{max(size, total)} bytes up to {name!r}, of at most {min(limit, most_bytes)}"
                )
    rows = shapes["tokens"]
    for name, shape in shapes.items():
        of_tokens = name in ("targets", "segment_ids", "positions", "loss_mask") or name.startswith(
            EXTRA
        )
        if of_tokens and shape[: len(rows)] != rows:
            raise ValueError(f"{name!r} of shape {shape} beside tokens of {rows}")
