"""What a process of a run of many does: it joins the others, the first one prints for all, and it leaves."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from examples.trainer.arguments import EMULATED_DEVICES, TRY_AGAIN
from jaxppo.sharding import multihost


def join(args: argparse.Namespace) -> None:
    """Joins this process to the run, with its share of the devices if they are emulated."""
    if not args.distributed:
        with contextlib.suppress(RuntimeError):  # JAX has made its devices already: the run takes those
            jax.config.update("jax_num_cpu_devices", EMULATED_DEVICES // args.processes)
    if args.distributed:
        multihost.start(heartbeat_timeout_s=args.heartbeat_timeout)
    else:
        multihost.start(args.coordinator, args.processes, args.process_id, args.heartbeat_timeout)


def is_first() -> bool:
    """Whether this is the process that writes files for all."""
    return jax.process_index() == 0


@contextlib.contextmanager
def one_speaks() -> Iterator[None]:
    """Within the block, only the first process prints."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if is_first() else nowhere):
        yield


def keep_logs(path: Path) -> None:
    """Sends what C++ libraries write to stderr into a file; Python's own stderr stays as it was.

    If process 0 dies, XLA ends the others with a page of stack frames, which would hide this program's own message.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    path.unlink(missing_ok=True)  # a link of that name would lead out of the folder
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)


def leave(code: int) -> int:
    """Leaves the run; returns the exit code. A process that failed does not wait for others, which wait for it."""
    if code not in (0, TRY_AGAIN) and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class Silent:
    """Stands in for the report of a process that is not the first."""

    records: tuple[Any, ...] = ()

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def add(self, step: int, metrics: Any, samples: Any) -> None:
        pass

    def draw(self) -> None:
        pass
