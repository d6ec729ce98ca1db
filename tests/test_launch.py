"""The example as several processes: one run's numbers, one that is killed, arguments that do not fit together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from programs import QUICK

from examples import launch
from examples.train_grpo import main, parse, set_up

TINY = ["--width", "16", "--layers", "1", "--prompts", "4", "--samples", "4", "--held-out", "16", "--task", "gcd"]
HEARTBEAT_S = 10
WATCHDOG_S = 300  # against a hang, on a machine that does much else
SAME = ("loss", "pg_loss", "entropy", "kl", "gradient_norm", "reward", "accuracy")


def started(folder, *options):
    """The launcher of two processes, its messages in a file beside the run's."""
    command = [sys.executable, "-m", "examples.train_grpo", *TINY, *options, "--out", str(folder), "--processes", "2"]
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = QUICK
    with (folder / "said").open("w") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said, cwd=root)


def records(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_same_run(folder, whole, step, options, rtol, atol):
    """Raises where the losses up to a step, or the parameters after it, are not those of one process.

    Sums over devices are taken in another order, and Adam makes a rounding error of a small gradient a step's share.
    """
    for got, want in zip(records(folder)[:step], records(whole), strict=True):
        for name in SAME:
            assert got[name] == pytest.approx(want[name], rel=2e-5, abs=1e-6), (got["step"], name)
    state, expected = (
        set_up(parse([*TINY, *options, "--out", str(at), "--resume", str(step)])).state.params for at in (folder, whole)
    )
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def pid_of_second(folder):
    return int(re.search(r"their ids \d+, (\d+)", (folder / "said").read_text())[1])


def wait_for(count, folder, launcher):
    """Returns once so many steps are done."""
    began = time.monotonic()
    while len(records(folder)) < count:
        assert launcher.poll() is None, (folder / "said").read_text()
        assert time.monotonic() < began + WATCHDOG_S
        time.sleep(0.1)


def test_two_processes_have_one_runs_numbers_and_end_when_one_is_killed(tmp_path):
    options = ["--mesh", "dp=8", "--sft-steps", "0", "--updates", "1", "--checkpoint-every", "3"]
    both, whole = tmp_path / "both", tmp_path / "whole"
    both.mkdir()
    launcher = started(both, *options, "--steps", "100000", "--heartbeat-timeout", str(HEARTBEAT_S))
    try:
        wait_for(4, both, launcher)  # so that the checkpoint of step 3 is whole
        os.kill(pid_of_second(both), signal.SIGKILL)
        # the launcher itself ends what has not ended after two heartbeat timeouts
        assert launcher.wait(timeout=WATCHDOG_S) == 128 + signal.SIGKILL
    finally:
        launcher.terminate()
        launcher.wait()
    said = (both / "said").read_text()
    assert "process 1 of 2 ended with SIGKILL; waiting for the rest" in said
    assert "another task died" in said or "expected all processes to go on" in said
    assert main([*TINY, *options, "--steps", "3", "--out", str(whole)]) == 0
    check_same_run(both, whole, 3, options, 1e-4, 1e-6)


ONE_IS_KILLED = """
import os, signal, sys, time
if sys.argv[-1] == "0":
    sys.exit(1)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_exit_code_is_of_the_process_that_was_killed(tmp_path, monkeypatch, capfd):
    """Though another, which missed it, was gone before."""
    (tmp_path / "one_is_killed.py").write_text(ONE_IS_KILLED)
    monkeypatch.syspath_prepend(str(tmp_path))
    args = types.SimpleNamespace(processes=2, heartbeat_timeout=10)
    assert launch.start("one_is_killed", [], args) == 128 + signal.SIGKILL
    assert "process 1 of 2 ended with SIGKILL" in capfd.readouterr().err


@pytest.mark.nightly
def test_sigterm_to_one_process_stops_both_after_the_same_step(tmp_path):
    launcher = started(
        tmp_path, "--mesh", "dp=8", "--sft-steps", "0", "--steps", "100000", "--checkpoint-every", "99999"
    )
    try:
        wait_for(2, tmp_path, launcher)
        os.kill(pid_of_second(tmp_path), signal.SIGTERM)
        assert launcher.wait(timeout=WATCHDOG_S) == 0
    finally:
        launcher.terminate()
        launcher.wait()
    done = len(records(tmp_path))
    assert f"stopped by SIGTERM after step {done} of 100000 and saved" in (tmp_path / "said").read_text()
    assert (tmp_path / "checkpoints" / str(done)).exists()


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "cp=4,tp=2"])  # with rows of their own, with shared rows
def test_twenty_steps_of_two_processes(tmp_path, mesh):
    options = ["--mesh", mesh, "--context-layout", "zigzag", "--steps", "20", "--sft-steps", "20"]
    options += ["--learning-rate", "0.003"]
    both, whole = tmp_path / "both", tmp_path / "whole"
    both.mkdir()
    assert started(both, *options).wait(timeout=4 * WATCHDOG_S) == 0, (both / "said").read_text()
    assert main([*TINY, *options, "--out", str(whole)]) == 0
    check_same_run(both, whole, 20, options, 1e-3, 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "3"], "--processes: got 3, expected a divisor of the 8 emulated devices"),
        (["--process-id", "1"], "--coordinator, --process-id: got one of them, expected both or neither"),
        (["--coordinator", "here:1", "--process-id", "2", "--processes", "2"], "--process-id: got 2, expected 0 to 1"),
        (["--distributed", "--processes", "2"], "--distributed: got --processes or --process-id beside it"),
        (["--heartbeat-timeout", "1"], "--heartbeat-timeout: got '1', expected an integer of at least 10"),
    ],
)
def test_processes_that_do_not_fit_together(options, message, capsys):
    try:
        code = main([*TINY, *options])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]
