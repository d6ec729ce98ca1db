"""Reads files that others may have put there: a pipe in the place of a file is refused, and not
waited for.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
      OSError: it cannot be read, or it is no regular file.
    """
    # without O_NONBLOCK, to open a pipe waits for somebody who writes to it
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    """The text of a regular file in UTF-8; raises as `read_bytes` does, and UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8", errors)
