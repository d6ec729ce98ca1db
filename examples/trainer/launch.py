"""A run in many processes on this machine, started here. Nothing here imports JAX."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from examples.trainer.arguments import TRY_AGAIN

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_POLL_S = 0.1
# a killed process frees its memory before it counts as ended; one that misses it may end sooner
_SETTLE_S = 2.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _with_parent() -> None:
    """In a process that is started: it gets SIGTERM when the launcher ends, however that ends;
    on Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_stopped(child: subprocess.Popen[bytes]) -> bool:
    """Whether a process that was started here, and has not ended, is stopped by a signal."""
    return os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def is_launcher(args: argparse.Namespace) -> bool:
    """Whether this process starts the processes of the run, and is none of them."""
    return args.processes > 1 and args.process_id is None


def start(module: str, arguments: Sequence[str], args: argparse.Namespace) -> int:
    """Runs the module as `args.processes` processes on this machine, and passes signals on to them.

    If one ends with an error, it is named and the others are killed: they wait for it.

    Returns:
      0, or an exit code. If a signal ended a process, it is 128 plus the signal's number, since the
      others then fail because that process is gone. Otherwise it is the exit code of the first
      process that failed. It is 2 where one refused an argument or a file and JAX aborted another
      for want of it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        module,
        *arguments,
        "--coordinator",
        f"127.0.0.1:{port}",
        "--process-id",
    ]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    # each in its own process group: a terminal then sends Ctrl-C to this process alone, which
    # passes it on once
    running = [
        subprocess.Popen(
            [*command, str(i)], env=environment, process_group=0, preexec_fn=_with_parent
        )
        for i in range(args.processes)
    ]

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in running:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    named = ", ".join(str(process.pid) for process in running)
    print(f"{args.processes} processes at 127.0.0.1:{port}, their ids {named}", file=sys.stderr)
    try:
        while True:
            ended = [process.poll() for process in running]
            if any(code not in (None, 0, TRY_AGAIN) for code in ended):
                return _blame(running, ended)
            if None not in ended:
                return max(code for code in ended if code is not None)
            time.sleep(_POLL_S)
    finally:
        for process in running:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _blame(running: Sequence[subprocess.Popen[bytes]], ended: Sequence[int | None]) -> int:
    """Names the process that failed, or that the others waited for; returns the exit code of the
    run.

    That is one that a signal ended, if there is one. But JAX aborts a process that waits for one
    that is gone, so one that refused an argument or a file (exit code 2) is named before one that
    was aborted. Where several had ended with the same exit code before the first look at them,
    nothing tells which was first: all are named.

    Args:
      running: the processes.
      ended: what each had ended with at the first look, None where it had not.
    """
    time.sleep(_SETTLE_S)
    statuses = {i: process.poll() or 0 for i, process in enumerate(running)}
    rank = {2: 1, -signal.SIGABRT: 2}
    failed = min(
        statuses, key=lambda i: (rank.get(statuses[i], 0 if statuses[i] < 0 else 3), not ended[i])
    )
    status = statuses[failed]
    how = f"exit code {status}" if status > 0 else signal.Signals(-status).name
    alike = [i for i, code in enumerate(ended) if code == status > 0] or [failed]
    whose = f"process {failed}" if len(alike) == 1 else f"processes {', '.join(map(str, alike))}"
    rest = "the others are ended"
    for i, process in enumerate(running):
        # JAX ends the others, which have done nothing wrong
        if process.poll() is None and _is_stopped(process):
            rest = f"process {i} (pid {process.pid}) is stopped and was not heard of"
    print(f"{whose} of {len(running)} ended with {how}; {rest}", file=sys.stderr)
    return status if status > 0 else 128 - status
