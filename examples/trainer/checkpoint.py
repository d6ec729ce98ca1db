"""Orbax checkpoints of a whole training state; checkpoints that a run cannot continue from are refused."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from examples.trainer.learner import TrainState
from jaxppo.sharding import multihost

FORMAT = 3  # the version of what is saved: raise it if an older program could not load it
SUMS = "SHA256SUMS"  # in the format of the program sha256sum
_INFO, _STATE = "info.json", "state"
_KEPT = 2


class Checkpoints:
    """The newest two checkpoints under `folder`. A rename makes each visible at once, when it is whole.

    A checkpoint is a folder: the arrays in Orbax's layout, a file of JSON with what else the run remembers, and the
    digests of both, which must fit every byte when it is loaded.

    Args:
      folder: made if it does not exist.
      identity: what a checkpoint must have been saved with to be loaded: the model's sizes, the task, the seed.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder, self.identity = folder.absolute(), identity
        self._arrays = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        logging.getLogger("absl").addFilter(_not_of_a_thread)

        def clean() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.iterdir():
                if path.suffix in (".new", ".old"):  # left by a run that ended while it saved
                    shutil.rmtree(path)

        self._on_first(clean)

    def save(self, state: TrainState, step: int, notes: dict[str, Any]) -> None:
        """Saves the state after `step` steps, with whatever else the run wants to remember; once for each step.

        Raises:
          OSError: it could not be written; older checkpoints are still there.
        """
        if step in steps_in(self.folder):
            return
        new = self.folder / f"{step}.new"
        info = {"format": FORMAT, "step": step, "identity": self.identity, "notes": notes}
        try:
            self._on_first(lambda: new.mkdir())
            self._arrays.save(new / _STATE, args=ocp.args.PyTreeSave(_plain(state)))
            self._on_first(lambda: (new / _INFO).write_text(json.dumps(info, indent=1)))
            sums = _sums(new, _files(new))
            self._on_first(lambda: self._commit(new, step, sums))
        except Exception as error:  # the writer of arrays raises several kinds
            kept = ", ".join(map(str, steps_in(self.folder))) or "none"
            raise OSError(
                f"checkpoint {step}: could not be written to {self.folder} ({_reason(error)}); those there: {kept}"
            ) from error

    def _commit(self, new: Path, step: int, sums: dict[str, str]) -> None:
        lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
        (new / SUMS).write_text(f"{lines}# {_digest(lines.encode())}\n")
        os.replace(new, self.folder / str(step))
        for old in steps_in(self.folder)[:-_KEPT]:
            self._delete(old)

    def _delete(self, step: int) -> None:
        old = self.folder / f"{step}.old"
        os.replace(self.folder / str(step), old)  # a rename, so that half a checkpoint never stands there
        shutil.rmtree(old)

    def _on_first(self, act: Callable[[], Any]) -> None:
        """Process 0 calls `act`; all processes wait for it, and all raise what it raised."""
        problem = ""
        if jax.process_index() == 0:
            try:
                act()
            except OSError as error:
                problem = str(error)
        told = multihost.exchange("what the first process did", problem.encode(errors="backslashreplace"))
        if told[0]:
            raise OSError(told[0].decode())

    def load(self, like: TrainState, step: int | None = None) -> tuple[TrainState, int, dict[str, Any]]:
        """Loads a state, placed as `like` is, which may be on another mesh; returns it with its step and notes.

        Args:
          like: a state of the same shapes.
          step: which one; checkpoints after it are deleted. The newest by default.

        Raises:
          ValueError: there is none, a byte of it is not as it was written, or it is of another model, run, step or
            format.
        """
        steps = steps_in(self.folder)
        if not steps:
            raise ValueError(f"--resume: got no checkpoint in {self.folder}, expected one")
        if step is not None and step not in steps:
            raise ValueError(f"--resume: got {step}, expected one of the checkpoints {', '.join(map(str, steps))}")
        step = steps[-1] if step is None else step
        try:
            state, notes = self._read(self.folder / str(step), like)
        except ValueError as error:
            before = [s for s in steps if s < step]
            offer = f"--resume {before[-1]} goes on from the one before" if before else "there is none before it"
            raise ValueError(f"--resume: {error}; {offer}") from error
        for later in steps[steps.index(step) + 1 :]:
            self._on_first(lambda later=later: self._delete(later))  # type: ignore[misc]
        return state, step, notes

    def _read(self, folder: Path, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        for path in (folder, *folder.rglob("*")):
            if path.is_symlink():
                raise ValueError(f"got {path}, a link, expected a checkpoint whose files lie in it")
        if not (folder / SUMS).is_file() and (version := _read_info(folder).get("format")) != FORMAT:
            raise ValueError(_other_format(folder, version))  # its digests may be elsewhere
        check_sums(folder)
        info = _read_info(folder)
        if info.get("format") != FORMAT:
            raise ValueError(_other_format(folder, info.get("format")))
        identity, notes = info.get("identity"), info.get("notes")
        if not isinstance(identity, dict) or not isinstance(notes, dict):
            raise ValueError(f"got {folder / _INFO} without identity and notes, expected a whole checkpoint")
        if (found := info.get("step")) != int(folder.name):
            raise ValueError(f"got {folder}, a copy of the checkpoint of step {found}, expected that of {folder.name}")
        for name, expected in self.identity.items():
            if (found := identity.get(name)) != expected:
                raise ValueError(
                    f"got a checkpoint of another model or run, {name}={found}, expected {expected}, in {folder}"
                )
        plain = _plain(like)
        restore = ocp.args.PyTreeRestore(plain, restore_args=ocp.checkpoint_utils.construct_restore_args(plain))
        try:
            state = self._arrays.restore(folder / _STATE, args=restore)
        except Exception as error:  # readers of an unknown file raise several kinds
            raise ValueError(f"got {folder}, expected a whole checkpoint ({_reason(error)})") from error
        return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state)), notes


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in their order."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The digest of each file. Each process reads its share of the files, so all must call this."""
    names = json.loads(multihost.exchange("files of a checkpoint", json.dumps(names).encode())[0])
    mine = {}
    for name in names[jax.process_index() :: jax.process_count()]:
        with (folder / name).open("rb") as file:
            mine[name] = hashlib.file_digest(file, "sha256").hexdigest()
    found: dict[str, str] = {}
    for part in multihost.exchange("digests of a checkpoint", json.dumps(mine).encode()):
        found |= json.loads(part)
    return {name: found[name] for name in names}


def check_sums(folder: Path) -> None:
    """Raises ValueError where a byte of the checkpoint is not as it was written; all processes must call this."""
    path = folder / SUMS
    whole = "expected a whole checkpoint"
    if not path.is_file():
        raise ValueError(f"got {folder} without {SUMS}, {whole}")
    *lines, last = path.read_bytes().splitlines(keepends=True) or [b""]
    if last != f"# {_digest(b''.join(lines))}\n".encode():
        raise ValueError(f"got {path}, whose bytes are not those that were written, {whole}")
    written = dict(reversed(line.split("  ", 1)) for line in b"".join(lines).decode().splitlines())
    names = _files(folder)
    if odd := sorted({*written, SUMS} ^ set(names)):
        how = "a file that is not of it" if odd[0] in names else "nothing there"
        raise ValueError(f"got {folder / odd[0]}, {how}, {whole}")
    for name, digest in _sums(folder, sorted(written)).items():
        if digest != written[name]:
            raise ValueError(f"got {folder / name}, whose bytes are not those that were written, {whole}")


def _read_info(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / _INFO).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _other_format(folder: Path, found: Any) -> str:
    if isinstance(found, int) and found > FORMAT:
        return f"got a checkpoint of a newer format, {found}, in {folder}, expected {FORMAT}: a newer program wrote it"
    return f"got {folder}, expected a whole checkpoint of format {FORMAT}"


def _not_of_a_thread(record: logging.LogRecord) -> bool:
    """Drops what Orbax's threads log, a traceback each: `save` raises the first of their errors, in one line."""
    return "_SignalingThread" not in record.getMessage()


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


def _plain(state: TrainState) -> dict[str, jax.Array]:
    """The state's arrays by path: what is on disk does not depend on the classes that hold them."""
    leaves, _ = jax.tree.flatten_with_path(state)
    return {f"{i:04d}{jax.tree_util.keystr(path)}": leaf for i, (path, leaf) in enumerate(leaves)}
