"""One process with 8 devices and two processes with 4 each: both give the numbers of one device."""

import functools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import processes
import pytest
from programs import xla_flags

from jaxppo import RolloutBatch
from sharding import make_parallel_mesh, multihost
from sharding.testing import assert_trees_close

WATCHDOG_S = 120


@functools.cache
def printed(count, mesh, layout, *event):
    """The last line of each process. A process that hangs is killed, and fails the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(processes.__file__)
    env = os.environ | {
        "PYTHONPATH": str(script.parents[2]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(),
    }
    start = [sys.executable, str(script)]
    running = [
        subprocess.Popen(
            [*start, str(rank), str(count), str(port), mesh, layout, *event],
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
        raise AssertionError(
            f"{count} processes on {mesh} with {layout} did not end in {WATCHDOG_S} s"
        ) from None
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [text.splitlines()[-1] for text, _ in outputs]


# They share every row. They show how bad batches are refused too, so that two processes less
# start.
SHARE_ROWS = (2, "cp=4,tp=2", "zigzag_per_segment")


def run(*case):
    """What each process printed."""
    event = ["refusals"] if case == SHARE_ROWS else []
    return [json.loads(line) for line in printed(*case, *event)]


def on_one_device():
    batch = RolloutBatch.from_samples(processes.samples(), row_length=64)
    loss, metrics, gradients = jax.jit(lambda *args: processes.step(None, *args))(
        processes.TABLE, processes.KERNEL, batch
    )
    of_branches = RolloutBatch.from_samples(processes.branches(), row_length=64)
    own, slopes = jax.jit(lambda *args: processes.step_of_branches(None, *args))(
        processes.TABLE, processes.KERNEL, of_branches
    )
    return {
        "loss": loss,
        "metrics": metrics,
        "gradients": list(gradients),
        "branches": [own, *slopes],
    }


@pytest.mark.parametrize(
    ("count", "mesh", "layout"),
    [
        pytest.param(1, "dp=2,cp=4", "contiguous", marks=pytest.mark.nightly),
        # each process has rows of its own
        pytest.param(2, "dp=2,cp=4", "zigzag", marks=pytest.mark.nightly),
        SHARE_ROWS,
        pytest.param(2, "cp=8", "striped", marks=pytest.mark.nightly),
        pytest.param(2, "dp=4,tp=2", "contiguous", marks=pytest.mark.nightly),
    ],
)
def test_processes_end_with_the_numbers_of_one_device(count, mesh, layout):
    expected = jax.tree.map(np.asarray, on_one_device())
    results = run(count, mesh, layout)
    for got in (result["numbers"] for result in results):
        largest, of_blind = got.pop("packing")
        assert largest < 1e-5
        assert of_blind.startswith(
            "hidden_fn: got hidden states of a sample that depend on what is packed beside it"
        )
        assert got.pop("rows") % make_parallel_mesh(mesh).data_size == 0
        got |= {
            name: [np.asarray(x, np.float32) for x in got[name]]
            for name in ("gradients", "branches")
        }
        got = jax.tree.map(np.float32, got, is_leaf=lambda x: isinstance(x, float))
        assert_trees_close(
            got, expected, rtol=1e-5, atol=1e-6, context=f"{count} processes on {mesh}"
        )


REFUSALS = {
    "rows": (
        r"ValueError: pack: got {.*'rows': 1.0.* on process 0 and {.*'rows': 2.0.* on process 1"
    ),
    "buckets": (
        r"ValueError: pack: got {.*'buckets': \[2.0\]} on process 0 and .*'buckets': \[2.0, 4.0\]}"
        r" on process 1"
    ),
    "none": r"ValueError: samples: got none, expected at least one \(on process 1, host .+\)",
    "kind": r"TypeError: samples\[6\]: got str, expected Sample \(on process 1, host",
    "long": r"ValueError: sequences: got 70 tokens .* in sequence 0, .* \(on process 1, host",
    "same id": r"ValueError: sample_id: got 11 for samples 0 and 1, .* \(on process 1, host",
    "ids of hosts": (
        r"ValueError: sample_id: got 0 on several hosts, expected one of its own for each sample"
    ),
    "value": r"ValueError: advantages: got None in sample 0, .* \(on process 1, host",
    "values": (
        r"ValueError: samples: got \['advantages', .* on process 0 and \['loss_mask', .* on"
        r" process 1"
    ),
    "group": "ValueError: group_id: got 2 for different prompts on several hosts",
    "twin": r"ValueError: twin: got a response of 0 tokens in sample 0, .* \(on process 1, host",
    "no twin": (
        r"ValueError: samples: got \['advantages', .* on process 0 and .*'twin.advantages', .* on"
        r" process 1"
    ),
    # of a name that is not UTF-8
    "bytes": r"ValueError: file: got no\\udcff \(on process 1, host ",
    "other rows": (
        r"ValueError: batch: got other rewards on process 1 than on process 0.* both hold data"
        r" shards \[0\]"
    ),
}


def test_what_is_bad_on_one_process_is_raised_on_both():
    """Both raise the same text, and both go on: no process waits for another, and packing waits
    for no device.
    """
    first, second = run(*SHARE_ROWS)
    del first["numbers"], second["numbers"]
    assert first == second
    assert first["while devices work"] == [2, 64, True]
    assert first["with a twin"] == [2, 64, 2, 64, True]
    refusals = first["refusals"]
    assert refusals.keys() == REFUSALS.keys()
    for name, pattern in REFUSALS.items():
        assert re.match(pattern, refusals[name]), refusals[name]


def test_to_global_on_one_host():
    parallel = make_parallel_mesh("dp=4,cp=2")
    batch = RolloutBatch.from_samples(
        processes.samples(), row_length=16, parallel=parallel, micro_batches=2
    )
    placed = multihost.to_global(batch, batch.specs(parallel), parallel)
    jax.tree.map(np.testing.assert_array_equal, placed, batch)
    assert placed.tokens.sharding.spec == batch.specs(parallel).tokens
    assert placed.values is None
    with pytest.raises(ValueError, match="tree: got 3 rows on this host, expected a multiple of 4"):
        multihost.to_global(np.zeros((3, 16)), parallel.tokens_spec, parallel)
