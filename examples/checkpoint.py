"""Orbax checkpoints of a whole training state, and the refusal to load what cannot be gone on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from examples.learner import TrainState
from jaxppo.sharding import multihost

FORMAT = 1  # of what is saved; to be raised where an older program could not go on from it


class Checkpoints:
    """The newest two checkpoints under `folder`. Each becomes visible whole, by a rename, or not at all.

    Args:
      folder: made if it is not there; emptied unless `resume`.
      identity: what a checkpoint must have been saved with to be loaded: the model's sizes, the task, the seed.
      resume: keep what is there.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], resume: bool):
        if not resume and jax.process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        multihost.exchange("an emptied folder", b"")
        self.identity = {"format": FORMAT, **identity}
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, state: TrainState, step: int, notes: dict[str, Any]) -> None:
        """Saves the state after `step` steps, with whatever else the run wants to remember; once for each step.

        Raises:
          OSError: it could not be written; older checkpoints are still there.
        """
        if step in self.manager.all_steps():
            return
        info = {"identity": self.identity, "notes": notes}
        arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(_plain(state)), info=ocp.args.JsonSave(info))
        try:
            self.manager.save(step, args=arguments)
        except Exception as error:  # the writer of arrays raises several kinds
            kept = ", ".join(map(str, sorted(self.manager.all_steps(read=True)))) or "none"
            raise OSError(
                f"checkpoint {step}: could not be written to {self.manager.directory} ({_reason(error)}); those there: "
                f"{kept}"
            ) from error

    def load(self, like: TrainState, step: int | None = None) -> tuple[TrainState, int, dict[str, Any]]:
        """A state, placed as `like` is on whatever mesh that is, its step and its notes.

        Args:
          like: a state of the same shapes.
          step: which one; checkpoints after it are deleted. The newest by default.

        Raises:
          ValueError: there is none, it cannot be read, or it is of another model, run or format.
        """
        steps = sorted(self.manager.all_steps())
        if not steps:
            raise ValueError(f"--resume: got no checkpoint in {self.manager.directory}, expected one")
        if step is not None and step not in steps:
            raise ValueError(f"--resume: got {step}, expected one of the checkpoints {', '.join(map(str, steps))}")
        step = steps[-1] if step is None else step
        before = [s for s in steps if s < step]
        offer = f"; --resume {before[-1]} goes on from the one before" if before else "; there is none before it"
        inside = Path(self.manager.directory) / str(step)
        for path in (inside, *inside.rglob("*")):
            if path.is_symlink():
                raise ValueError(f"--resume: got {path}, a link, expected a checkpoint whose files lie in it{offer}")
        try:
            info = self.manager.restore(step, args=ocp.args.Composite(info=ocp.args.JsonRestore())).info
            identity, notes = info["identity"], info["notes"]
            found = {name: identity.get(name) for name in self.identity}
            notes.keys()
        except Exception as error:  # of a file cut short or a stranger's, whatever reads it raises
            raise ValueError(self._unreadable(step, error) + offer) from error
        for name, expected in self.identity.items():
            if found[name] != expected:
                raise ValueError(
                    f"--resume: got a checkpoint of another model or run, {name}={found[name]}, expected {expected}, "
                    f"in {self.manager.directory / str(step)}{offer}"
                )
        plain = _plain(like)
        restore = ocp.args.PyTreeRestore(plain, restore_args=ocp.checkpoint_utils.construct_restore_args(plain))
        try:
            state = self.manager.restore(step, args=ocp.args.Composite(state=restore)).state
        except Exception as error:
            raise ValueError(self._unreadable(step, error) + offer) from error
        for later in steps[steps.index(step) + 1 :]:
            self.manager.delete(later)
        return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state)), step, notes

    def _unreadable(self, step: int, error: Exception) -> str:
        return f"--resume: got {self.manager.directory / str(step)}, expected a whole checkpoint ({_reason(error)})"


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


def _plain(state: TrainState) -> dict[str, jax.Array]:
    """The state's arrays by path: what is on disk does not depend on the classes that hold them."""
    leaves, _ = jax.tree.flatten_with_path(state)
    return {f"{i:04d}{jax.tree_util.keystr(path)}": leaf for i, (path, leaf) in enumerate(leaves)}
