"""Checkpoints of a whole training state, by Orbax's CheckpointManager, with the digests of their
files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from examples.trainer.files import read_bytes
from examples.trainer.learner import TrainState
from jaxppo.sharding import multihost

FORMAT = 4  # the version of what is saved: raise it if an older program could not load it
SUMS = "SHA256SUMS"  # in the format of the program sha256sum
# Orbax writes these two at last, and loading needs neither
_UNREAD = ("_CHECKPOINT_METADATA", "commit_success.txt")
_WHOLE = "expected a whole checkpoint"


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**53


def _is_share(x: Any) -> bool:
    return x is None or (isinstance(x, float | int) and not isinstance(x, bool) and 0 <= x <= 1)


# what else a run remembers, and what each may be
NOTES: dict[str, Callable[[Any], bool]] = {
    "accuracy_after_sft": _is_share,
    "sft_done": _is_count,
    "position": _is_count,
}


def _quiet_writers() -> None:
    """Keeps Orbax's threads from printing tracebacks: `save` raises their first error, and the
    rest repeat it.
    """
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)

    def hook(unraisable: Any) -> None:
        # TensorStore's threads call a loop that ended at the first error, and Python tells what it
        # answers
        if str(unraisable.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


class Checkpoints:
    """The newest two checkpoints under `folder`.

    Orbax writes them while the run goes on; each is visible when whole.

    A checkpoint is a folder: the arrays, a file of JSON with what else the run remembers, and the
    digests of both, which must fit every byte when it is loaded.

    Args:
      folder: made if it does not exist.
      identity: what a checkpoint must have been saved with to be loaded: the model's sizes, the
        task, the seed.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder = folder.absolute()
        self.identity = json.loads(json.dumps(identity))  # as it will be read back
        self._writing = 0  # the step of the newest save
        _quiet_writers()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            cleanup_tmp_directories=True,  # of a run that ended while it saved
            # reads nothing of a checkpoint before its digests are compared
            lightweight_initialize=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(self, state: TrainState, step: int, notes: dict[str, Any]) -> None:
        """Begins to save the state after `step` steps, with what else the run wants to remember;
        once for each step.

        Raises:
          OSError: this checkpoint or the one before could not be written; older ones are still
            there.
        """
        if step in self._manager.all_steps():
            return
        self.wait()
        self._writing = step
        info = {"format": FORMAT, "step": step, "identity": self.identity, "notes": notes}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), info=ocp.args.JsonSave(info))
        self._attempt(lambda: self._manager.save(step, args=items, force=True))

    def wait(self) -> None:
        """Returns when all that was saved is on disk; raises OSError as `save` does."""
        self._attempt(self._manager.wait_until_finished)

    def _attempt(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # the writer of arrays raises several kinds
            kept = ", ".join(str(step) for step in steps_in(self.folder)) or "none"
            raise OSError(
                f"checkpoint {self._writing}: could not be written to {self.folder}"
                f" ({_reason(error)}); those there: {kept}"
            ) from error

    def _seal(self) -> None:
        """Writes the digests, in the first process, when all files are written and before the
        checkpoint is visible.
        """
        (folder,) = self.folder.glob("*.orbax-checkpoint-tmp")
        lines = "".join(f"{_digest(folder / name)}  {name}\n" for name in _files(folder))
        (folder / SUMS).write_text(f"{lines}# {hashlib.sha256(lines.encode()).hexdigest()}\n")

    def load(
        self, like: TrainState, step: int | None = None
    ) -> tuple[TrainState, int, dict[str, Any]]:
        """Loads a state, placed as `like` is, which may be on another mesh; returns it with its
        step and notes.

        Args:
          like: a state of the same shapes.
          step: which one; checkpoints after it are deleted. The newest by default.

        Raises:
          ValueError: there is none, a byte of it is not as it was written, or it is of another
            model, run, step or format.
        """
        steps = steps_in(self.folder)
        if not steps:
            raise ValueError(f"--resume: got no checkpoint in {self.folder}, expected one")
        if step is not None and step not in steps:
            raise ValueError(
                f"--resume: got {step}, expected one of the checkpoints"
                f" {', '.join(map(str, steps))}"
            )
        if step is None:
            step = steps[-1]
        try:
            notes = self._check(step)
            try:
                placed = ocp.args.Composite(state=ocp.args.StandardRestore(like))
                state = self._manager.restore(step, args=placed)["state"]
            except Exception as error:  # readers of an unknown file raise several kinds
                raise ValueError(
                    f"got {self.folder / str(step)}, {_WHOLE} ({_reason(error)})"
                ) from error
            if (found := int(jax.device_get(state.step))) != step:
                raise ValueError(
                    f"got {self.folder / str(step)} with the arrays of step {found}, expected"
                    f" {step}"
                )
        except ValueError as error:
            before = [s for s in steps if s < step]
            offer = (
                f"--resume {before[-1]} goes on from the one before"
                if before
                else "there is none before it"
            )
            raise ValueError(f"--resume: {error}; {offer}") from error
        for later in steps[steps.index(step) + 1 :]:
            self._manager.delete(later)
        return state, step, notes

    def _check(self, step: int) -> dict[str, Any]:
        """The notes of a checkpoint; raises ValueError unless it is whole, and of this run."""
        folder = self.folder / str(step)
        _check_regular(folder)
        has_sums = (folder / SUMS).is_file()  # a newer format may have its digests elsewhere
        if has_sums:
            check_sums(folder)
        try:
            info = self._manager.restore(
                step, args=ocp.args.Composite(info=ocp.args.JsonRestore())
            )["info"]
        except Exception:  # of a stranger's folder, as above
            info = {}
        if not isinstance(info, dict):
            info = {}
        _check_format(folder, info.get("format"), has_sums)
        if not _is_count(found := info.get("step")) or found != step:
            raise ValueError(
                f"got {folder}, a copy of the checkpoint of step {found}, expected that of {step}"
            )
        identity = info.get("identity")
        notes = info.get("notes")
        if not isinstance(identity, dict) or not isinstance(notes, dict):
            raise ValueError(f"got {folder} without the identity and the notes of a run, {_WHOLE}")
        for name, expected in self.identity.items():
            if (found := identity.get(name)) != expected:
                raise ValueError(
                    f"got a checkpoint of another model or run, {name}={found}, expected"
                    f" {expected}, in {folder}"
                )
        for name, fits in NOTES.items():
            if not fits(found := notes.get(name, "nothing")):
                raise ValueError(f"got {folder} with {name} {found!r}, {_WHOLE}")
        return {name: notes[name] for name in NOTES}


def _check_regular(folder: Path) -> None:
    """Raises ValueError where a folder holds something else than files and folders."""
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"got {path}, a link, expected a checkpoint whose files lie in it")
        if not path.is_file() and not path.is_dir():  # such as a pipe, which would block
            raise ValueError(f"got {path}, no regular file, {_WHOLE}")


def _check_format(folder: Path, found: Any, has_sums: bool) -> None:
    """Raises ValueError unless a checkpoint has this program's format, and digests."""
    if _is_count(found) and found > FORMAT:
        newer = "a newer program wrote it"
        raise ValueError(
            f"got a checkpoint of a newer format, {found}, in {folder}, expected {FORMAT}: {newer}"
        )
    if not _is_count(found) or found != FORMAT or not has_sums:
        raise ValueError(f"got {folder}, {_WHOLE} of format {FORMAT}, with {SUMS}")


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in their order."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def _files(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name not in (SUMS, *_UNREAD))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sums(folder: Path) -> None:
    """Raises ValueError where a byte of the checkpoint is not as it was written; all processes
    must call this.
    """
    path = folder / SUMS
    *lines, last = read_bytes(path).splitlines(keepends=True) or [b""]
    if last != f"# {hashlib.sha256(b''.join(lines)).hexdigest()}\n".encode():
        raise ValueError(f"got {path}, whose bytes are not those that were written, {_WHOLE}")
    written = {}
    for line in lines:
        digest, _, name = line.decode(errors="replace").removesuffix("\n").partition("  ")
        written[name] = digest
    names = _files(folder)
    if odd := sorted({*written} ^ {*names}):
        how = "a file that is not of it" if odd[0] in names else "nothing there"
        raise ValueError(f"got {folder / odd[0]}, {how}, {_WHOLE}")
    # each process reads its share of the files
    mine = names[jax.process_index() :: jax.process_count()]
    spoilt = next((name for name in mine if _digest(folder / name) != written[name]), "")
    for name in multihost.exchange("digests of a checkpoint", spoilt.encode()):
        if name:
            raise ValueError(
                f"got {folder / name.decode()}, whose bytes are not those that were written,"
                f" {_WHOLE}"
            )


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]
