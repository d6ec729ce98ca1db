"""The example of the page "A training step": it learns, and a run that was killed goes on, on
another mesh.
"""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from programs import xla_flags

from examples import grpo
from jaxppo import (
    Head,
    ParallelMesh,
    RolloutBatch,
    Sample,
    assert_packing_invariant,
    make_parallel_mesh,
)

ROOT = Path(__file__).parents[2]
STEPS = 25


def killed_after(step, folder, mesh):
    """The metrics that a process on eight devices wrote until it was killed, once it had a
    checkpoint of a step.
    """
    environment = {**os.environ, "XLA_FLAGS": xla_flags(), "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "examples.grpo", mesh, str(folder)]
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while not (folder / str(step)).exists():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_run_that_was_killed_goes_on_on_another_mesh(tmp_path, monkeypatch):
    """With the losses of a run of one device that nothing stopped."""
    monkeypatch.setattr(grpo, "UPDATES", STEPS)
    one = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
    whole = list(grpo.train(one, tmp_path / "whole"))
    reward = [metrics["reward"] for metrics in whole]
    assert np.mean(reward[:4]) < 0.15
    assert np.mean(reward[-4:]) > 0.2

    before = killed_after(10, tmp_path / "killed", "dp=2,cp=2,tp=2")
    after = list(grpo.train(make_parallel_mesh("tp=2,dp=4"), tmp_path / "killed"))
    assert after[0]["step"] in (11, 21)  # checkpoints are of steps 0, 10 and 20
    assert after[-1]["step"] == STEPS - 1
    for metrics in before[:STEPS] + after:  # a killed run has written more lines than it has saved
        expected = whole[metrics["step"]]
        for name in ("reward", "loss", "kl", "entropy", "ppo_kl"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (
                metrics["step"],
                name,
            )


def test_every_parameter_has_its_place():
    """The kernels of model, reference and moments are divided, no array is on one device."""
    mesh = make_parallel_mesh("dp=2,cp=2,tp=2")
    create = partial(grpo.create, mesh)
    state = jax.jit(
        create,
        out_shardings=jax.tree.map(mesh.sharding, nnx.get_partition_spec(jax.eval_shape(create))),
    )()
    assert all(x.sharding.mesh == mesh.mesh for x in jax.tree.leaves(state))
    for tree in (
        state["model"],
        state["reference"],
        state["optimizer"][1][0].mu,
        state["optimizer"][1][0].nu,
    ):
        assert tree.head.kernel.get_value().sharding.spec == mesh.kernel_spec("hv")
        assert tree.up.kernel.get_value().sharding.spec[1] == "tp"


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_samples_do_not_see_each_other(mesh):
    parallel = make_parallel_mesh(mesh) if mesh else None
    model = grpo.Decoder(
        parallel or make_parallel_mesh("dp=1", devices=jax.devices()[:1]), nnx.Rngs(0)
    )
    hidden = jax.jit(lambda model, batch: grpo.hidden_and_head(model, batch)[0])
    assert_packing_invariant(hidden, model, vocab_size=grpo.VOCAB, parallel=parallel)


def test_a_blind_model_is_refused_before_the_first_step(tmp_path, monkeypatch):
    """It learned, and no metric showed it."""

    def blind(model, batch):
        causal = jnp.tril(jnp.ones((batch.tokens.shape[1],) * 2, bool))
        return model(batch.tokens, batch.positions, causal[None]), Head.of(model.head)

    monkeypatch.setattr(grpo, "hidden_and_head", blind)
    one = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
    with pytest.raises(
        AssertionError, match="hidden states of a sample that depend on what is packed beside it"
    ):
        next(grpo.train(one, tmp_path))


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_a_mesh_of_jax_make_mesh(kind):
    """Its axes are Explicit, where the model's products are ambiguous to JAX; troubleshooting.md
    has the error.
    """
    options = {} if kind == "Explicit" else {"axis_types": (jax.sharding.AxisType.Auto,) * 3}
    mesh = ParallelMesh(jax.make_mesh((2, 2, 2), ("dp", "cp", "tp"), **options))
    assert mesh.is_explicit == (kind == "Explicit")
    placed = jax.tree.map(
        mesh.sharding, nnx.get_partition_spec(jax.eval_shape(partial(grpo.create, mesh)))
    )
    state = jax.jit(partial(grpo.create, mesh), out_shardings=placed)()
    batch = RolloutBatch.from_samples([Sample([5, 6, 7], 1)] * 4, row_length=8, parallel=mesh).put(
        mesh
    )
    tokens = jax.device_put(jnp.ones((4, 8), jnp.int32), mesh.sharding(P()))

    def generated():
        return grpo.generate(state["model"], tokens, jax.random.key(0))

    def mask():
        return jax.jit(lambda batch: batch.paths.attends(batch.paths))(batch)

    def embedded():
        return jax.jit(lambda table, batch: table[batch.tokens])(jnp.ones((50, 8)), batch)

    def looked_up():
        table = jax.device_put(jnp.ones((48, 8)), mesh.sharding(mesh.kernel_spec("vh")))
        return jax.jit(lambda table, batch: table[batch.tokens])(table, batch)

    if kind == "Auto":
        assert looked_up().shape == (2, 8, 8)
        assert generated().shape == (4, 8)
        assert mask().shape == (2, 8, 8)
        assert embedded().shape == (2, 8, 8)
        return
    messages = (
        "ambiguous how the output should be sharded",
        "illegally sharded result",
        "is not found in mesh: ()",
    )
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages += ("could not be resolved unambiguously",)
    for call, message in zip((generated, mask, embedded, looked_up), messages, strict=True):
        assert f'"{message}"' in page
        with pytest.raises(Exception, match=re.escape(message)):
            call()
