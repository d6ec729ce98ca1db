"""Stops a run between two steps: on Ctrl-C, or on SIGTERM, which schedulers send before they take a machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Preemption:
    """Within the block, SIGTERM and the first SIGINT set `asked`; a second SIGINT ends the process at once.

    A thread counts the SIGINTs: Python's own handlers would wait for the main thread, say for a long compilation.
    """

    def __init__(self) -> None:
        self.asked = ""
        """The name of the first signal that asked; empty before."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            self._mine, theirs = socket.socketpair()
            theirs.setblocking(False)
            self._theirs = theirs
            self._fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._count, args=(self._mine,), daemon=True).start()
            self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._fd)
            self._theirs.close()  # this ends the thread

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name

    def _count(self, signals: socket.socket) -> None:
        interrupts = 0
        with signals:
            while found := signals.recv(64):
                before, interrupts = interrupts, interrupts + found.count(signal.SIGINT)
                if interrupts > 1:
                    # no file that a run resumes from is half-written: each is renamed into place when it is whole
                    os._exit(128 + signal.SIGINT)
                if interrupts > before:
                    with contextlib.suppress(OSError, ValueError):
                        print("stops after this step and saves; Ctrl-C again ends it at once", file=sys.stderr)
