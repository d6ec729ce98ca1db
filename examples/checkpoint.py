"""Orbax checkpoints of a whole training state, and the refusal to load those of another model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from examples.learner import TrainState


class Checkpoints:
    """The newest two checkpoints under `folder`.

    Args:
      folder: made if it is not there; emptied unless `resume`.
      identity: what a checkpoint must have been saved with to be loaded: the model's sizes, the task, the seed.
      resume: keep what is there.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], resume: bool):
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        self.identity = identity
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, state: TrainState, notes: dict[str, Any]) -> None:
        """Saves the state as that of `state.step`, with whatever else the run wants to remember."""
        info = {"identity": self.identity, "notes": notes}
        arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(_plain(state)), info=ocp.args.JsonSave(info))
        self.manager.save(int(state.step), args=arguments)

    def load(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest state, placed as `like` is, and its notes.

        Raises:
          ValueError: there is none, or it is of another model.
        """
        step = self.manager.latest_step()
        if step is None:
            raise ValueError(f"--resume: got no checkpoint in {self.manager.directory}, expected one")
        info = self.manager.restore(step, args=ocp.args.Composite(info=ocp.args.JsonRestore())).info
        for name, expected in self.identity.items():
            if info["identity"].get(name) != expected:
                got = info["identity"].get(name)
                raise ValueError(
                    f"--resume: got a checkpoint of another model or run, {name}={got}, expected {expected}"
                )
        plain = _plain(like)
        restore = ocp.args.PyTreeRestore(plain, restore_args=ocp.checkpoint_utils.construct_restore_args(plain))
        state = self.manager.restore(step, args=ocp.args.Composite(state=restore)).state
        return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state)), info["notes"]


def _plain(state: TrainState) -> dict[str, jax.Array]:
    """The state's arrays by path: what is on disk does not depend on the classes that hold them."""
    leaves, _ = jax.tree.flatten_with_path(state)
    return {f"{i:04d}{jax.tree_util.keystr(path)}": leaf for i, (path, leaf) in enumerate(leaves)}
