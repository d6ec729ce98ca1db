"""One process with 8 devices, and two with 4 each, come to the end with the numbers of one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import processes
import pytest

from jaxppo import RolloutBatch
from sharding import make_parallel_mesh, multihost
from sharding.testing import assert_trees_close

WATCHDOG_S = 120


def run(count, mesh, layout, rows=()):
    """What each process printed, given its number of rows; a hang of any is killed, and a failure."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(processes.__file__)
    env = os.environ | {"PYTHONPATH": str(script.parent.parent), "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    start = [sys.executable, str(script)]
    running = [
        subprocess.Popen(
            [*start, str(rank), str(count), str(port), mesh, layout, *map(str, rows[rank : rank + 1])],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=WATCHDOG_S) for process in running]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{count} processes on {mesh} with {layout} did not end in {WATCHDOG_S} s") from None
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(text.splitlines()[-1]) for text, _ in outputs]


def on_one_device():
    batch = RolloutBatch.from_samples(processes.samples(), row_length=64)
    loss, metrics, gradients = jax.jit(lambda *args: processes.step(None, *args))(
        processes.TABLE, processes.KERNEL, batch
    )
    return {"loss": loss, "metrics": metrics, "gradients": list(gradients)}


@pytest.mark.parametrize(
    ("count", "mesh", "layout"),
    [
        (1, "dp=2,cp=4", "contiguous"),
        (2, "dp=2,cp=4", "zigzag"),  # each process has rows of its own
        (2, "cp=4,tp=2", "zigzag_per_segment"),  # the processes share every row
        pytest.param(2, "cp=8", "striped", marks=pytest.mark.nightly),
        pytest.param(2, "dp=4,tp=2", "contiguous", marks=pytest.mark.nightly),
    ],
)
def test_processes_end_with_the_numbers_of_one_device(count, mesh, layout):
    expected = jax.tree.map(np.asarray, on_one_device())
    results = run(count, mesh, layout)
    for got in results:
        assert got.pop("rows") % make_parallel_mesh(mesh).data_size == 0
        got = {**got, "gradients": [np.asarray(g, np.float32) for g in got["gradients"]]}
        got = jax.tree.map(np.float32, got, is_leaf=lambda x: isinstance(x, float))
        assert_trees_close(got, expected, rtol=1e-5, atol=1e-6, context=f"{count} processes on {mesh}")


def test_hosts_whose_sizes_differ():
    """Each of them says so; a collective of the two would hang, or mix their rows."""
    for got in run(2, "dp=2,cp=4", "contiguous", rows=(1, 2)):
        assert "batch: got {'tokens': (1, 64)" in got
        assert "on process 0 and {'tokens': (2, 64)" in got
        assert got.endswith("on process 1, expected the same")


def test_to_global_on_one_host():
    parallel = make_parallel_mesh("dp=4,cp=2")
    batch = RolloutBatch.from_samples(processes.samples(), row_length=16, parallel=parallel, micro_batches=2)
    placed = multihost.to_global(batch, batch.specs(parallel), parallel)
    jax.tree.map(np.testing.assert_array_equal, placed, batch)
    assert placed.tokens.sharding.spec == batch.specs(parallel).tokens
    assert placed.values is None
    with pytest.raises(ValueError, match="tree: got 3 rows on this host, expected a multiple of 4"):
        multihost.to_global(np.zeros((3, 16)), parallel.tokens_spec, parallel)
