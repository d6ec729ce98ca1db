"""What a process of a run of many does: it joins the others, the first one prints for all, and
it leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import errno
import fcntl
import os
import socket
import stat
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
        # JAX has made its devices already: the run takes those
        with contextlib.suppress(RuntimeError):
            jax.config.update(
                "jax_num_cpu_devices", (args.devices or EMULATED_DEVICES) // args.processes
            )
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
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(sys.stdout if is_first() else nowhere),
    ):
        yield


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within the block, no other run writes to the folder: the first process locks a file there.

    The kernel frees the lock when that process ends, in whatever way.

    Raises:
      ValueError: another run holds the lock, or the folder cannot be written to; on all processes.
    """
    problem = ""
    with contextlib.ExitStack() as held:
        if is_first():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                # through a link this process would write over a file elsewhere
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                held.callback(os.close, lock)
                if not stat.S_ISREG(os.fstat(lock).st_mode):  # to read a pipe would wait
                    raise OSError(errno.EINVAL, "not a regular file", str(folder / "lock"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(lock, 0)
                since = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
                with contextlib.suppress(OSError):  # such as a full disk: the lock is enough
                    os.write(
                        lock,
                        f"process {os.getpid()} on host {socket.gethostname()}, since {since}".encode(),
                    )
            except BlockingIOError:
                whose = os.read(lock, 1000).decode(errors="replace")
                problem = (
                    f"--out: got {folder}, where another run goes on, of {whose}, expected a folder"
                    " of its own"
                )
            except OSError as error:
                expected = "expected a folder that can be written to, on a file system with locks"
                problem = f"--out: got {folder}, {expected} ({error})"
        if found := multihost.exchange(
            "the lock of a run", problem.encode(errors="backslashreplace")
        )[0]:
            raise ValueError(found.decode())
        yield


def leave(code: int) -> int:
    """Leaves the run; returns the exit code.

    A process that failed does not wait for others, which wait for it.
    """
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

    def add(self, step: int, metrics: Any, samples: Any, tokens: Any) -> None:
        pass

    def draw(self) -> None:
        pass
