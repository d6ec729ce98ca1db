"""Corrupts a bit of a checkpoint."""

import contextlib
import re

import pytest

from examples.trainer.checkpoint import check_sums


def kinds(folder):
    """A file of each kind, by its name without its random part."""
    found = {
        re.sub(r"[0-9a-f]{16,}", "*", str(path.relative_to(folder))): path
        for path in files_in(folder)
    }
    assert len(found) > 5
    return list(found.values())


def files_in(folder):
    """The files of a checkpoint, but for the two that have no digest: nothing reads them."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [
        path
        for path in files
        if path not in {folder / "_CHECKPOINT_METADATA", folder / "commit_success.txt"}
    ]


@contextlib.contextmanager
def flipped(path, random):
    """Within the block, one bit of the file is flipped."""
    whole = path.read_bytes()
    spoilt = bytearray(whole)
    spoilt[random.integers(len(whole))] ^= 1 << random.integers(8)
    path.write_bytes(spoilt)
    yield
    path.write_bytes(whole)


def check_flips(folder, random, times):
    for path in kinds(folder):
        for _ in range(times if path.stat().st_size else 0):
            with (
                flipped(path, random),
                pytest.raises(ValueError, match=re.escape(f"got {path}, whose bytes are not")),
            ):
                check_sums(folder)
    check_sums(folder)
