"""How runs start on pods: the JobSet manifest, the xpk command, exit codes, and one process that
owns all devices.
"""

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import processes
import pytest
from ruamel.yaml import YAML  # which comes with check-jsonschema
from tiny_runs import TINY, records

from examples.trainer import grpo_run
from examples.trainer.arguments import TRY_AGAIN, parse
from examples.trainer.train_grpo import main
from jaxppo import RolloutBatch, make_parallel_mesh
from jaxppo.sharding import multihost
from sharding.testing import assert_trees_close

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples/trainer/jobset.yaml"
SCHEMA = ROOT / "tests/support/jobset.schema.json"
RUN = [*TINY, "--sft-steps", "2", "--steps", "2"]


def checked(path):
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(SCHEMA), str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_manifest_fits_the_schema(tmp_path):
    """The fields that it uses, by a schema written here; what a cluster adds or admits is not
    known.
    """
    assert checked(MANIFEST).returncode == 0, checked(MANIFEST).stdout
    for old, new in (
        ("onJobFailureReasons", "onJobFailureReason"),
        ("maxRestarts: 50", "maxRestarts: many"),
    ):
        text = MANIFEST.read_text()
        assert old in text
        (tmp_path / "wrong.yaml").write_text(text.replace(old, new))
        assert checked(tmp_path / "wrong.yaml").returncode == 1


def mesh_size(args):
    return math.prod(int(size) for size in re.findall(r"=(\d+)", args.mesh))


def test_the_manifest_fits_the_program():
    spec = YAML(typ="safe").load(MANIFEST.read_text())["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    execute, python, dash_m, module, *flags = shlex.split(container["args"][0])
    assert (execute, python, dash_m, module) == (
        "exec",
        "python",
        "-m",
        "examples.trainer.train_grpo",
    )
    args = parse(flags)
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    hosts = job["parallelism"]
    assert hosts == job["completions"]
    assert mesh_size(args) == chips == hosts * container["resources"]["limits"]["google.com/tpu"]
    assert args.distributed
    assert args.restartable
    assert args.out.is_relative_to(container["volumeMounts"][0]["mountPath"])
    assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }
    with pytest.raises(SystemExit) as stopped:
        parse(["--loss", "pop"])
    assert stopped.value.code == 2


def test_the_xpk_line_fits_the_program():
    """xpk checks its own flags: xpk 1.16 accepted the command."""
    page = (ROOT / "docs/running.md").read_text().replace("\\\n", " ")
    words = shlex.split(re.search(r"^    (xpk workload create .*)$", page, re.MULTILINE)[1])
    options = dict(zip(words[3::2], words[4::2], strict=True))
    args = parse(shlex.split(options["--command"])[4:])
    # of which xpk counts cores, two a chip
    assert options["--tpu-type"] == f"v5p-{2 * mesh_size(args)}"
    assert args.distributed
    assert args.restartable
    assert {"1", str(TRY_AGAIN)} <= set(options["--restart-on-exit-codes"].split(","))
    assert "2" not in options["--restart-on-exit-codes"].split(",")


def test_the_page_lists_the_exit_codes():
    page = (ROOT / "docs/running.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == ["0", "1", "2", str(TRY_AGAIN), "130"]


def steps_of(folder):
    return [line["step"] for line in records(folder)]


@pytest.mark.nightly
def test_a_scheduler_starts_one_command_again_until_it_is_done(tmp_path, monkeypatch):
    """Told to stop before its first step, then after it; what an older start left without a
    checkpoint is deleted.
    """
    (tmp_path / "metrics.jsonl").write_text('{"step": 4711}\n')
    command = [*RUN, "--out", str(tmp_path), "--restartable"]

    def stops_at(step):
        def stops(run):
            run.asked[:] = ["SIGTERM"] if run.step >= step else []
            return bool(run.asked)

        return stops

    for step in (0, 1):
        monkeypatch.setattr(grpo_run.Run, "stops", stops_at(step))
        assert main(command) == TRY_AGAIN == 75
        assert steps_of(tmp_path) == list(range(1, step + 1))
    monkeypatch.undo()
    assert main(command) == 0
    assert steps_of(tmp_path) == [1, 2]
    assert main(command) == 0  # done, and stays done
    assert steps_of(tmp_path) == [1, 2]


class NoCoordinator:
    def __getattr__(self, name):
        raise AssertionError(f"a single controller asked for {name}")


@pytest.mark.nightly
def test_a_single_controller_needs_no_coordinator(monkeypatch):
    """One process that owns all devices, as under Pathways: batches, sums and results go by
    arrays alone.
    """
    monkeypatch.setattr(multihost, "coordinator", NoCoordinator)
    monkeypatch.setattr(jax.distributed, "initialize", NoCoordinator)
    multihost.start(num_processes=1)
    parallel = make_parallel_mesh("dp=4,cp=2")
    assert multihost.local_data_shards(parallel) == [0, 1, 2, 3]
    assert not multihost.spans_processes(parallel)
    assert multihost.agree((3, 4)) == (3, 4)
    multihost.check_equal("sizes", 3)
    found = {}
    for mesh in (None, parallel):
        batch = batch_on(mesh)
        found[mesh] = jax.jit(lambda *args, p=mesh: processes.step(p, *args))(
            processes.TABLE, processes.KERNEL, batch
        )
    for one, many in zip(
        jax.tree.leaves(found[None]), jax.tree.leaves(found[parallel]), strict=True
    ):
        assert_trees_close(many, one, rtol=1e-5, atol=1e-6)
    tokens = batch_on(parallel).tokens
    np.testing.assert_array_equal(multihost.whole(tokens), multihost.to_local(tokens, parallel))


def batch_on(parallel):
    batch = RolloutBatch.from_samples(processes.samples(), row_length=64, parallel=parallel)
    return batch if parallel is None else batch.put(parallel)
