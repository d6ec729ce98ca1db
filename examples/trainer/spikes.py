"""Saves the batches of steps whose loss stands out, so that such a step can be run again."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxppo import ParallelMesh, RolloutBatch
from jaxppo.sharding import multihost


class Spikes:
    """Saves the batch of each step whose loss is not finite, or stands out among those of the last steps.

    Args:
      folder: of the files, `step_N.npz`.
      deviations: a loss stands out at so many standard deviations from the mean of the last steps; None for no files.
      window: how many of the last steps are compared; nothing stands out among fewer than four.
    """

    def __init__(self, folder: Path, deviations: float | None, window: int = 32):
        self.folder, self.deviations = folder, deviations
        self._losses: deque[float] = deque(maxlen=window)

    def look(self, step: int, loss: float, batch: RolloutBatch) -> Path | None:
        """Takes a step's loss; returns the file if it saved one."""
        if self.deviations is None:
            return None
        spike = not math.isfinite(loss)
        if not spike and len(self._losses) >= 4:
            mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
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
    """Writes all of a batch, ids included."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    arrays = {
        name: np.asarray(x) for name, x in jax.device_get(fields).items() if isinstance(x, jax.Array | np.ndarray)
    }
    static = {name: x for name, x in fields.items() if name not in arrays and x is not None}
    np.savez_compressed(path, static=np.array(json.dumps(static)), **arrays)


def load_batch(path: Path, parallel: ParallelMesh) -> RolloutBatch:
    """The batch of a file, placed on the mesh: what `Learner.grpo_step` takes, with the state before that step.

    Raises:
      ValueError: no such file, or the batch was packed for another context layout.
    """
    try:
        with np.load(path, allow_pickle=False) as file:  # so that loading a file cannot run code
            found: dict[str, Any] = dict(file)
        batch = RolloutBatch(**found | json.loads(str(found.pop("static"))))
    except Exception as error:  # of a stranger's file, whatever reads it raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"path: got {path}, expected a batch that save_batch wrote ({reason})") from error
    batch.check_layout(parallel)
    return batch.put(parallel)
