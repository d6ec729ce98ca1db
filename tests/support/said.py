"""What a program printed on stderr, without what libraries and their threads print there beside
it.
"""

from __future__ import annotations

import pytest


def said_by(program: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr that begin with the program's name."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith(f"{program}: ")]
