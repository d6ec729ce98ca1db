"""A run in many processes: started here with emulated devices, one by one by hand, or found by JAX on a pod."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import jax

from jaxppo.sharding import multihost

HEARTBEAT_S = 30  # a process that is silent for so long is gone, and the others end
_POLL_S = 0.1
_SETTLE_S = 2.0  # a killed process frees its memory before it counts as ended; one that misses it may end sooner


def add_arguments(parser: argparse.ArgumentParser, at_least: Any) -> None:
    """The arguments that say which processes a run is made of; `at_least(n)` reads an integer."""
    add = parser.add_argument_group("processes").add_argument
    add("--processes", type=at_least(1), default=1, help="start so many on this machine, emulated devices shared out")
    add("--distributed", action="store_true", help="one of many processes; JAX finds them (TPU pod, Slurm, Open MPI)")
    add("--coordinator", metavar="HOST:PORT", help="of process 0, where nothing finds it; with the next one")
    add("--process-id", type=at_least(0), metavar="I", help="this is the I-th of --processes, which others start")
    add("--heartbeat-timeout", type=at_least(10), default=HEARTBEAT_S, help="seconds without a sign until others end")


def check_arguments(args: argparse.Namespace, devices: int) -> None:
    """Raises ValueError where the arguments do not fit together; `devices` are emulated in all."""
    if (args.coordinator is None) != (args.process_id is None):
        raise ValueError("--coordinator, --process-id: got one of them, expected both or neither")
    if args.distributed and (args.processes > 1 or args.process_id is not None):
        raise ValueError("--distributed: got --processes or --process-id beside it, expected JAX to find them")
    if args.process_id is not None and args.process_id >= args.processes:
        raise ValueError(f"--process-id: got {args.process_id}, expected 0 to {args.processes - 1}")
    if devices % args.processes:
        raise ValueError(f"--processes: got {args.processes}, expected a divisor of the {devices} emulated devices")


def is_launcher(args: argparse.Namespace) -> bool:
    """Whether this process is to start those of the run, rather than to be one."""
    return args.processes > 1 and args.process_id is None


def join(args: argparse.Namespace, devices: int) -> None:
    """Makes this process one of the run's, with its share of `devices` where they are emulated."""
    if not args.distributed:
        with contextlib.suppress(RuntimeError):  # devices exist already: those it will be
            jax.config.update("jax_num_cpu_devices", devices // args.processes)
    if args.distributed:
        multihost.start(heartbeat_timeout_s=args.heartbeat_timeout)
    else:
        multihost.start(args.coordinator, args.processes, args.process_id, args.heartbeat_timeout)


def is_first() -> bool:
    """Whether this process writes what all of them have found."""
    return jax.process_index() == 0


@contextlib.contextmanager
def one_speaks() -> Iterator[None]:
    """Within the block, what other processes than the first print goes nowhere."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if is_first() else nowhere):
        yield


def leave(code: int) -> int:
    """The exit code; a process that failed does not wait for the others, who would wait for it."""
    if code and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def start(module: str, arguments: Sequence[str], args: argparse.Namespace) -> int:
    """Runs the module as `args.processes` processes on this machine, and passes SIGTERM on to them.

    Where one ends badly, the others have the heartbeat timeout, and as long again, to end on their own; then they are
    killed.

    Returns:
      0, or the exit code of the one that ended badly: 128 and the signal's number where a signal ended one, since
      others fail for want of it; otherwise that of the first.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, *arguments, "--coordinator", f"127.0.0.1:{port}", "--process-id"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = [subprocess.Popen([*command, str(i)], env=environment) for i in range(args.processes)]

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in running:
            process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    named = ", ".join(str(process.pid) for process in running)
    print(f"{args.processes} processes at 127.0.0.1:{port}, their ids {named}", file=sys.stderr)
    code, deadline = 0, float("inf")
    try:
        while time.monotonic() < deadline:
            ended = [process.poll() for process in running]
            if any(ended) and code == 0:
                time.sleep(_SETTLE_S)
                statuses = {i: process.poll() or 0 for i, process in enumerate(running)}
                failed = min(statuses, key=lambda i: (statuses[i] >= 0, not ended[i]))
                status = statuses[failed]
                code = status if status > 0 else 128 - status
                deadline = time.monotonic() + 2 * args.heartbeat_timeout
                how = f"exit code {status}" if status > 0 else signal.Signals(-status).name
                print(f"process {failed} of {args.processes} ended with {how}; waiting for the rest", file=sys.stderr)
            if None not in ended:
                break
            time.sleep(_POLL_S)
    finally:
        for process in running:
            process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return code


class Lost(Exception):
    """What is said where a collective or an exchange failed, mostly for a process that is gone."""

    def __init__(self, error: Exception):
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        super().__init__(
            f"process {jax.process_index()} of {jax.process_count()}: got {reason!r}, expected all processes to go on; "
            "--resume goes on from the last checkpoint"
        )


class Silent:
    """Stands in for the report of a process that is not the first."""

    records: tuple[Any, ...] = ()

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def add(self, step: int, metrics: Any) -> None:
        pass

    def draw(self) -> None:
        pass
