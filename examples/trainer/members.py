"""Tracks the processes of a run: each locks a file in its folder, and the kernel frees it when the process ends."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from jaxppo.sharding import multihost

_LAST_WORDS_S = 2.0  # a process that fails waits so long to see whether another is gone
_GRACE_S = 10.0  # this process has so long to report its own error, after another ended with one


class Members:
    """Within the block, this process holds its file in `folder`; no two runs hold files there at once.

    If another process of the run is killed, this one says which and ends at once: no collective waits for it.

    Args:
      folder: made if it is not there.
      process: this one's number in the run.
      count: the number of processes.

    Raises:
      ValueError: another run's process holds a file there, or the folder cannot be written to.
    """

    def __init__(self, folder: Path, process: int, count: int):
        self.folder, self.process, self.count = folder, process, count
        self.ended = ""  # the error that this process ended with, for the others to read
        self._file: Any = None
        self._seen: list[int] = []  # processes whose locks are visible; some file systems hide those of other hosts
        self._speaks = threading.Lock()

    def __enter__(self) -> Members:
        # process 0 first: while it holds its file, no other run begins here
        self._together(self._take if self.process == 0 else lambda: None)
        self._together(lambda: None if self.process == 0 else self._take())
        for other in range(self.count):
            if other != self.process:
                self._watch(other)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._write({**_me(), "ended": self.ended or (repr(error) if error else "")})
        with contextlib.suppress(OSError):  # what could not be written
            self._file.close()

    def _together(self, act: Any) -> None:
        """Calls `act`; if it raises on one process, all raise. It needs no mesh."""
        problem = ""
        try:
            act()
        except ValueError as error:
            problem = str(error)
        for found in multihost.exchange("the processes of a run", problem.encode(errors="backslashreplace")):
            if found:
                if self._file:
                    self._file.close()
                raise ValueError(found.decode())

    def _take(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / str(self.process)
            if path.is_symlink():  # this process would write over a file elsewhere
                raise ValueError(f"--out: got {path}, a link, expected no links there")
            self._file = path.open("a+")
            held = [self.folder / str(self.process)] if not _lock(self._file) else []
            # processes of an older run may live on after its process 0
            others = {path for path in self.folder.iterdir() if path.name.isdigit()} - {self.folder / str(self.process)}
            for path in sorted(others) if self.process == 0 else []:
                with path.open() as file:
                    held += [] if _lock(file, fcntl.LOCK_SH) else [path]
        except OSError as error:
            raise ValueError(
                f"--out: got {self.folder.parent}, expected a folder that can be written to, on a file system with "
                f"locks ({error.strerror})"
            ) from None
        if held:
            self._file.close()
            who = _read(held[0])
            raise ValueError(
                f"--out: got {self.folder.parent}, where the run of process {who.get('pid')} on host {who.get('host')} "
                f"goes on since {who.get('since')}, expected a folder that no other run writes to"
            )
        self._write(_me())

    def _write(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # such as a full disk: the lock is enough
            self._file.truncate(0)
            self._file.write(json.dumps(what))
            self._file.flush()

    def _watch(self, other: int) -> None:
        """Starts a thread that waits for the other's lock, if that is visible here."""
        file = (self.folder / str(other)).open()
        if _lock(file, fcntl.LOCK_SH):
            file.close()
        else:
            self._seen.append(other)
            threading.Thread(target=self._await, args=(other, file), daemon=True).start()

    def _await(self, other: int, file: Any) -> None:
        fcntl.flock(file, fcntl.LOCK_SH)
        file.close()
        ended = _read(self.folder / str(other)).get("ended")
        if ended is None:
            self._end()
        elif ended:
            time.sleep(_GRACE_S)
            self._end()

    def _end(self) -> NoReturn:
        # below the progress bar
        print(f"\ntrain_grpo.py: error: {self.missing()}", file=sys.stderr, flush=True)
        os._exit(1)

    def missing(self, wait: bool = False) -> str | None:
        """Names another process that is gone, with its error if it left one; None if all run. Only one thread returns.

        Args:
          wait: wait a moment for a process that is about to end.
        """
        deadline = time.monotonic() + (_LAST_WORDS_S if wait and self.count > 1 else 0)
        while not (found := self._gone()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if found:
            while not self._speaks.acquire(timeout=1):  # another thread has reported it and ends the process
                pass
        return found

    def _gone(self) -> str | None:
        silent, failed = [], []
        for other in self._seen:
            path = self.folder / str(other)
            with path.open() as file:
                if not _lock(file, fcntl.LOCK_SH):
                    continue
            who = _read(path)
            named = f"process {other} of {self.count} (pid {who.get('pid')} on host {who.get('host')})"
            if who.get("ended") is None:
                silent.append(f"{named} is gone")
            elif who["ended"]:
                failed.append(f"{named} ended with: {who['ended']}")
        first = next(iter(silent + failed), None)
        return first and f"{first}; --resume goes on from the last checkpoint"


def _lock(file: Any, how: int = fcntl.LOCK_EX) -> bool:
    """Takes the lock if it is free; whether it was."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _me() -> dict[str, Any]:
    since = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
