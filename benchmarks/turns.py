"""Runs a benchmark in processes of its own, for this checkout and another one in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

Figures = dict[str, float]


def in_processes(
    script: str, arguments: Sequence[str], before: str | None, turns: int
) -> dict[str, list[Figures]]:
    """The figures of each turn, by "before" and "now": the JSON that `script --one` prints last.

    Args:
      script: the path of the script. It imports what it measures from the checkout whose turn it
        is.
      arguments: more arguments of the script.
      before: the folder of another checkout; None for this one alone.
      turns: how often each checkout is measured.

    Raises:
      subprocess.CalledProcessError: the script failed; its errors are on the terminal.
    """
    folders = {"before": before, "now": str(Path(__file__).parents[1])}
    found: dict[str, list[Figures]] = {
        name: [] for name, folder in folders.items() if folder is not None
    }
    for _ in range(turns):
        for name, figures in found.items():
            environment = {**os.environ, "PYTHONPATH": str(folders[name]), "JAX_PLATFORMS": "cpu"}
            command = [sys.executable, script, "--one", *arguments]
            printed = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
            figures.append(json.loads(printed.splitlines()[-1]))
    return found
