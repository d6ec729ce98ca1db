"""Stops a run between two steps: on Ctrl-C, or on SIGTERM, which schedulers send before they take a
machine.

JAX's own service of that kind needs a coordinator, which a run of one process has not, and knows
SIGTERM alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def signals() -> Iterator[list[str]]:
    """Yields the names of SIGTERM and SIGINT as they come within the block; a second SIGINT ends
    the process at once.

    A thread counts the SIGINTs: Python's own handlers would wait for the main thread, say for a
    long compilation.
    """
    asked: list[str] = []
    mine, theirs = socket.socketpair()
    theirs.setblocking(False)

    def count() -> None:
        interrupts = 0
        with mine:
            while found := mine.recv(64):
                before = interrupts
                interrupts = interrupts + found.count(signal.SIGINT)
                if interrupts > 1:
                    # no file that a run resumes from is half-written: each is renamed into place
                    # when it is whole
                    os._exit(128 + signal.SIGINT)
                if interrupts > before:
                    with contextlib.suppress(OSError, ValueError):
                        print(
                            "stops after this step and saves; Ctrl-C again ends it at once",
                            file=sys.stderr,
                        )

    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=count, daemon=True).start()
    both = (signal.SIGINT, signal.SIGTERM)
    handlers = [
        signal.signal(number, lambda n, _: asked.append(signal.Signals(n).name)) for number in both
    ]
    try:
        yield asked
    finally:
        for number, handler in zip(both, handlers, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        theirs.close()  # this ends the thread
