"""SIGTERM as schedulers send it before they take a machine back: a wish to stop, granted between two steps."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any


class Preemption:
    """Within the block, SIGTERM sets `asked` and does nothing else."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_: Any) -> None:
        self.asked = True
