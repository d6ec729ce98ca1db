"""The example as several processes: the same numbers as one, a process that is killed, arguments
that do not fit.
"""

import contextlib
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
from programs import xla_flags
from spoilt import check_flips, files_in, flipped
from tiny_runs import TINY, records

from examples.trainer import launch
from examples.trainer.arguments import TRY_AGAIN, parse
from examples.trainer.checkpoint import steps_in
from examples.trainer.grpo_run import set_up
from examples.trainer.model_folder import read_json
from examples.trainer.train_grpo import main

WATCHDOG_S = 300  # ends a hang; long, for a busy machine
SAME = ("loss", "pg_loss", "entropy", "gradient_norm", "reward", "accuracy")


def started(folder, *options):
    """The launcher of two processes, its messages in a file beside the run's."""
    command = [sys.executable, "-m", "examples.trainer.train_grpo", *TINY, *options]
    command += ["--out", str(folder), "--processes", "2"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = xla_flags(quick=True)
    with (folder / "said").open("w") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said, cwd=root)


def check_same_run(folder, whole, step, options, rtol, atol):
    """Raises if the losses up to a step, or the parameters after it, are not those of one process.

    Sums over devices have another order, and Adam turns a rounding error in a small gradient into
    part of a step.
    """
    for got, want in zip(records(folder)[:step], records(whole), strict=True):
        for name in SAME:
            assert got[name] == pytest.approx(want[name], rel=2e-5, abs=1e-6), (got["step"], name)
    state, expected = (
        set_up(parse([*TINY, *options, "--out", str(at), "--resume", str(step)])).state.params
        for at in (folder, whole)
    )
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def pids(folder):
    return [
        int(pid)
        for pid in re.search(r"their ids (\d+), (\d+)", (folder / "said").read_text()).groups()
    ]


def wait_for(done, folder, launcher):
    """Returns once `done()`."""
    began = time.monotonic()
    while not done():
        assert launcher.poll() is None, (folder / "said").read_text()
        assert time.monotonic() < began + WATCHDOG_S
        time.sleep(0.1)


def check_kill(folder, options, step, victim, after_s=0):
    """Kills one of two processes once there is a checkpoint of a step.

    The launcher names it, and ends the other.
    """
    launcher = started(folder, *options, "--steps", "100000")
    try:
        wait_for(lambda: step in steps_in(folder / "checkpoints"), folder, launcher)
        time.sleep(after_s)
        os.kill(pids(folder)[victim], signal.SIGKILL)
        assert launcher.wait(timeout=WATCHDOG_S) == 128 + signal.SIGKILL
    finally:
        launcher.terminate()
        launcher.wait()
    assert (
        f"process {victim} of 2 ended with SIGKILL; the others are ended\n"
        in (folder / "said").read_text()
    )


@pytest.mark.nightly
def test_two_processes_have_one_runs_numbers_and_end_when_one_is_killed(tmp_path):
    options = ["--mesh", "dp=8", "--sft-steps", "0", "--updates", "1", "--checkpoint-every", "3"]
    both = tmp_path / "both"
    whole = tmp_path / "whole"
    both.mkdir()
    check_kill(both, options, 3, 1)
    check_flips(both / "checkpoints" / "3", np.random.default_rng(0), 1)
    assert main([*TINY, *options, "--steps", "3", "--out", str(whole)]) == 0
    check_same_run(both, whole, 3, options, 1e-4, 1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_is_killed_at_any_moment(tmp_path, victim):
    after_s = np.random.default_rng(int(os.environ["SEARCH_SEED"]) + victim).uniform(0, 3)
    check_kill(tmp_path, ["--sft-steps", "0", "--checkpoint-every", "1"], 1, victim, after_s)
    # both refuse a checkpoint with a bit that is not as it was written
    newest = tmp_path / "checkpoints" / str(max(steps_in(tmp_path / "checkpoints")))
    largest = max(files_in(newest), key=lambda path: path.stat().st_size)
    with flipped(largest, np.random.default_rng(0)):
        assert started(tmp_path, "--resume").wait(timeout=WATCHDOG_S) == 2
    said = (tmp_path / "said").read_text()
    assert f"error: --resume: got {largest}, whose bytes are not those that were written" in said


ONE_IS_KILLED = """
import os, signal, sys, time
if sys.argv[-1] == "0":
    sys.exit(1)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_exit_code_is_of_the_process_that_was_killed(tmp_path, monkeypatch, capfd):
    """Also if another process, which failed because of it, ended before."""
    (tmp_path / "one_is_killed.py").write_text(ONE_IS_KILLED)
    monkeypatch.syspath_prepend(str(tmp_path))
    args = types.SimpleNamespace(processes=2)
    assert launch.start("one_is_killed", [], args) == 128 + signal.SIGKILL
    assert "process 1 of 2 ended with SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ends", "seen", "said", "code"),
    [
        ([1, 1], [1, 1], "processes 0, 1 of 2 ended with exit code 1", 1),
        ([1, 1], [None, 1], "process 1 of 2 ended with exit code 1", 1),
        ([2, -signal.SIGABRT], [2, -signal.SIGABRT], "process 0 of 2 ended with exit code 2", 2),
        (
            [1, -signal.SIGABRT],
            [1, None],
            "process 1 of 2 ended with SIGABRT",
            128 + signal.SIGABRT,
        ),
        (
            [2, -signal.SIGKILL],
            [2, None],
            "process 1 of 2 ended with SIGKILL",
            128 + signal.SIGKILL,
        ),
    ],
)
def test_who_is_named_where_several_have_ended(ends, seen, said, code, monkeypatch, capfd):
    """JAX aborts process 1 where process 0, which holds the coordinator, has refused what both
    were given.
    """
    monkeypatch.setattr(launch, "_SETTLE_S", 0)
    program = (
        "import os, sys; n = int(sys.argv[1]); os.kill(os.getpid(), -n) if n < 0 else sys.exit(n)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program, str(int(end))]) for end in ends]
    assert [process.wait() for process in both] == ends
    assert launch._blame(both, seen) == code
    assert capfd.readouterr().err == f"{said}; the others are ended\n"


ONE_IS_STOPPED = """
import os, signal, sys, time
if sys.argv[-1] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
os.abort()  # as JAX does, when it does not hear of another
"""


def test_a_process_that_is_stopped_is_named_and_not_the_one_that_waited_for_it(
    tmp_path, monkeypatch, capfd
):
    (tmp_path / "one_is_stopped.py").write_text(ONE_IS_STOPPED)
    monkeypatch.syspath_prepend(str(tmp_path))
    args = types.SimpleNamespace(processes=2)
    assert launch.start("one_is_stopped", [], args) == 128 + signal.SIGABRT
    said = capfd.readouterr().err
    ids = re.search(r"their ids (\d+), (\d+)", said).groups()
    assert (
        f"process 0 of 2 ended with SIGABRT; process 1 (pid {ids[1]}) is stopped and was not heard"
        " of\n" in said
    )


LAUNCHES = """
import types
from examples.trainer import launch
launch.start("one_waits", [], types.SimpleNamespace(processes=2))
"""
ONE_WAITS = """
import os, signal
os.write(1, b"%d\\n" % os.getpid())  # at once: print may write the end of a line later, and two share the pipe
signal.pause()
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that its parent is gone"
)
def test_a_launcher_that_is_killed_leaves_no_process(tmp_path):
    (tmp_path / "one_waits.py").write_text(ONE_WAITS)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    }
    command = [sys.executable, "-c", LAUNCHES]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as one:
        waiting = []
        try:
            waiting += [int(one.stdout.readline()) for _ in range(2)]
            one.kill()
            one.communicate(timeout=30)  # the pipes close when no process holds them open
        finally:
            one.kill()
            for pid in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_pipe_in_a_models_folder_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"--model: got .*{name}, expected a file"):
        read_json(tmp_path / name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_stops_both_after_the_same_step(tmp_path, name):
    """SIGTERM to one process of a scheduler's, Ctrl-C to the one that started them."""
    again = ["--restartable"] * (name == "SIGTERM")
    launcher = started(
        tmp_path,
        "--mesh",
        "dp=8",
        "--sft-steps",
        "0",
        "--steps",
        "100000",
        "--checkpoint-every",
        "99999",
        *again,
    )
    try:
        wait_for(lambda: len(records(tmp_path)) >= 2, tmp_path, launcher)
        os.kill(pids(tmp_path)[1] if name == "SIGTERM" else launcher.pid, signal.Signals[name])
        assert launcher.wait(timeout=WATCHDOG_S) == (TRY_AGAIN if again else 0)
    finally:
        launcher.terminate()
        launcher.wait()
    done = len(records(tmp_path))
    assert (
        f"stopped by {name} after step {done} of 100000 and saved"
        in (tmp_path / "said").read_text()
    )
    assert (tmp_path / "checkpoints" / str(done)).exists()


@pytest.mark.nightly
# with rows of their own, with shared rows
@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "cp=4,tp=2"])
def test_twenty_steps_of_two_processes(tmp_path, mesh):
    options = ["--mesh", mesh, "--context-layout", "zigzag", "--steps", "20", "--sft-steps", "20"]
    options += ["--learning-rate", "0.003"]
    both = tmp_path / "both"
    whole = tmp_path / "whole"
    both.mkdir()
    assert started(both, *options).wait(timeout=4 * WATCHDOG_S) == 0, (both / "said").read_text()
    assert main([*TINY, *options, "--out", str(whole)]) == 0
    check_same_run(both, whole, 20, options, 1e-3, 1e-5)


ONE_FAILS = """
import sys
from examples.trainer import train_grpo
from examples.trainer.checkpoint import Checkpoints

def full(*_):
    raise OSError("checkpoint 0: no space")

if sys.argv[-1] == "1":
    Checkpoints.save = full
sys.exit(train_grpo.main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_a_process_that_fails_is_named_with_its_error(tmp_path, monkeypatch, capfd):
    (tmp_path / "one_fails.py").write_text(ONE_FAILS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", xla_flags(quick=True))
    arguments = [*TINY, "--sft-steps", "0", "--processes", "2", "--out", str(tmp_path / "run")]
    assert launch.start("one_fails", arguments, types.SimpleNamespace(processes=2)) == 1
    said = capfd.readouterr().err
    assert "train_grpo.py: error: checkpoint 0: no space\n" in said
    # where the machine is busy, process 0 has ended for want of process 1 before the launcher looks
    assert re.search(
        r"^process(es 0,)? 1 of 2 ended with exit code 1; the others are ended$", said, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "3"], "--processes: got 3, expected a divisor of the 8 emulated devices"),
        (
            ["--process-id", "1"],
            "--coordinator, --process-id: got one of them, expected both or neither",
        ),
        (
            ["--coordinator", "here:1", "--process-id", "2", "--processes", "2"],
            "--process-id: got 2, expected 0 to 1",
        ),
        (
            ["--distributed", "--processes", "2"],
            "--distributed: got --processes or --process-id beside it",
        ),
        (
            ["--heartbeat-timeout", "1"],
            "--heartbeat-timeout: got '1', expected an integer of at least 10",
        ),
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
