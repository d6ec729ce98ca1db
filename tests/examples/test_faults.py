"""Runs of the example that are killed, run out of disk, find a bad checkpoint or are asked to
stop, and go on.
"""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from programs import without_gpu_plugin, xla_flags
from spoilt import check_flips, files_in, flipped
from tiny_runs import USUAL, records

from examples.trainer import grpo_run
from examples.trainer.arguments import parse
from examples.trainer.checkpoint import FORMAT, Checkpoints, check_sums, steps_in
from examples.trainer.grpo_run import set_up
from examples.trainer.train_grpo import main
from sharding.testing import factorings

pytestmark = pytest.mark.usefixtures("kept_programs")
RUN = [*USUAL, "--sft-steps", "6", "--steps", "3", "--checkpoint-every", "1"]
# other moments for kills each night, see conftest
RANDOM = np.random.default_rng(int(os.environ["SEARCH_SEED"]))
CHANGES = 109  # how often a run changes files and folders, see killed.py
MESSAGE = (
    "whose bytes are not those that were written, expected a whole checkpoint; --resume 2 goes on"
    " from the one before"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert main([*RUN, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def befallen(kept_programs, folder, event, number, *options):
    """Runs the example in a process of its own, in which the event happens."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": kept_programs,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment["XLA_FLAGS"] = xla_flags()
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    script = Path(__file__).parents[1] / "support" / "killed.py"
    command = [
        sys.executable,
        str(script),
        event,
        str(number),
        *RUN,
        "--out",
        str(folder),
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def goes_on(folder):
    """Resumes as a job script would: from the start if nothing was saved yet."""
    return main(
        [*RUN, "--out", str(folder), *["--resume"] * bool(steps_in(folder / "checkpoints"))]
    )


def check_kill(kept_programs, finished, folder, event, number, code=-9):
    done = befallen(kept_programs, folder, event, number)
    assert done.returncode == code, done.stderr
    for step in steps_in(folder / "checkpoints")[-2:]:  # older ones are deleted file by file
        check_sums(folder / "checkpoints" / str(step))
    assert goes_on(folder) == 0
    assert records(folder) == records(finished)
    for name in ("samples.jsonl", "tokens.jsonl"):
        assert (folder / name).read_text() == (finished / name).read_text(), name


@pytest.mark.nightly
def test_killed_in_a_save(kept_programs, finished, tmp_path):
    check_kill(kept_programs, finished, tmp_path, "file", 60)


@pytest.mark.nightly
def test_killed_in_a_line_of_metrics(kept_programs, finished, tmp_path):
    check_kill(kept_programs, finished, tmp_path, "line", 2)


@pytest.mark.nightly
@pytest.mark.parametrize("number", RANDOM.choice(range(1, CHANGES), 20, replace=False).tolist())
def test_killed_at_any_moment(kept_programs, finished, tmp_path, number):
    check_kill(kept_programs, finished, tmp_path, "file", number)


@pytest.mark.nightly
@pytest.mark.parametrize("number", RANDOM.choice(range(1, CHANGES), 5, replace=False).tolist())
def test_interrupted_twice_at_any_moment(kept_programs, finished, tmp_path, number):
    check_kill(kept_programs, finished, tmp_path, "twice", number, 130)


IN_C = """
import hashlib
from examples.trainer.preemption import signals
with signals():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # for half an hour
"""


def test_a_second_interrupt_ends_at_once_what_python_cannot_interrupt():
    command = [sys.executable, "-c", IN_C]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert (
                process.stderr.readline()
                == "stops after this step and saves; Ctrl-C again ends it at once\n"
            )
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()


def test_a_file_in_the_place_of_checkpoints_is_an_error(tmp_path, capsys):
    (tmp_path / "checkpoints").write_text("no folder")
    assert main([*RUN, "--out", str(tmp_path)]) == 1
    assert "train_grpo.py: error: " in capsys.readouterr().err.splitlines()[-1]


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from examples.trainer.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), {})
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
try:
    checkpoints.save([np.ones(4096) for _ in range(8)], 1, {})
    checkpoints.wait()
except OSError as error:
    print(error, file=sys.stderr)
"""


def test_a_full_disk_is_told_in_one_line(tmp_path):
    """Orbax's threads log a traceback each."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = without_gpu_plugin(done.stderr).splitlines()
    assert line.startswith("checkpoint 1: could not be written to")
    assert line.endswith("; those there: none")


@pytest.mark.nightly
@pytest.mark.parametrize("size", [0, 4096, 65536])
def test_a_full_disk_leaves_the_last_checkpoint(kept_programs, finished, tmp_path, size):
    done = befallen(kept_programs, tmp_path, "full", size)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (error,) = (line for line in done.stderr.splitlines() if "rror" in line)
    assert error.startswith("train_grpo.py: error: ")
    # whichever could not be written first
    assert re.search(
        r"(checkpoint 1: could not be written to .*; those there: 0|File too large: '.*\.jsonl')$",
        error,
    )
    assert steps_in(tmp_path / "checkpoints") == [0]
    assert goes_on(tmp_path) == 0
    assert records(tmp_path) == records(finished)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("step", "name"),
    [(2, "SIGTERM"), (2, "SIGINT"), pytest.param(0, "SIGTERM", marks=pytest.mark.nightly)],
)
def test_a_signal_saves_and_exits_0(finished, tmp_path, step, name, monkeypatch, capsys):
    """The signal comes in step 2, or in supervised training."""
    function = "grpo_step" if step else "answers"
    call = getattr(grpo_run, function)
    asked = []

    def terminated(*args):
        asked.append(args)
        if len(asked) == max(step, 1):
            os.kill(os.getpid(), signal.Signals[name])
        return call(*args)

    with monkeypatch.context() as changed:
        changed.setattr(grpo_run, function, terminated)
        assert main([*RUN, "--out", str(tmp_path), "--checkpoint-every", "9"]) == 0
    assert (
        f"stopped by {name} after step {step} of 3 and saved; --resume goes on"
        in capsys.readouterr().out
    )
    assert (tmp_path / "checkpoints" / str(step)).exists()
    assert main([*RUN, "--out", str(tmp_path), "--resume"]) == 0
    assert records(tmp_path) == records(finished)


@pytest.mark.every(4)
@pytest.mark.parametrize("text", [None, "", '{"step": 1, "rew', 'null\n{"step": "a"}\n[1]\n\x00\n'])
def test_metrics_that_are_torn_do_not_end_a_resume(copied, text):
    path = copied / "metrics.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.unlink()
    if text is not None:
        path.write_text(whole[0] + text)
    assert main([*RUN, "--out", str(copied), "--resume", "2"]) == 0
    found = [line["step"] for line in records(copied)]
    assert found == ([3] if text is None else [1, 3])


def test_metrics_are_never_cut_before_they_are_written(copied, monkeypatch):
    before = (copied / "metrics.jsonl").read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("examples.trainer.report.os.replace", full)
    assert main([*RUN, "--out", str(copied), "--resume"]) == 1
    assert (copied / "metrics.jsonl").read_text() == before


def resume_error(folder, capsys):
    assert main([*RUN, "--out", str(folder), "--resume"]) == 2
    return capsys.readouterr().err.splitlines()[-1]


# from readers that Orbax abandons
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_cut_short_is_named_and_the_one_before_offered(finished, tmp_path):
    run = set_up(parse([*RUN, "--out", str(finished), "--resume"]))
    for name in [path.relative_to(finished) for path in files_in(finished / "checkpoints" / "3")]:
        folder = tmp_path / str(name).replace("/", "_")
        shutil.copytree(finished, folder)
        os.truncate(folder / name, (folder / name).stat().st_size // 2)
        with pytest.raises(
            ValueError, match=re.escape(f"--resume: got {folder / name}, {MESSAGE}")
        ):
            Checkpoints(folder / "checkpoints", run.checkpoints.identity).load(run.state)


def test_a_flipped_bit_is_noticed_in_files_of_every_kind(finished):
    check_flips(finished / "checkpoints" / "3", np.random.default_rng(0), 4)


def test_a_flipped_bit_is_named_and_the_one_before_offered(copied, capsys):
    largest = max(files_in(copied / "checkpoints" / "3"), key=lambda path: path.stat().st_size)
    with flipped(largest, np.random.default_rng(0)):
        error = resume_error(copied, capsys)
    assert error == f"train_grpo.py: error: --resume: got {largest}, {MESSAGE}"


def test_files_without_a_digest_are_not_read(finished, copied):
    """Orbax writes two after the digests."""
    folder = copied / "checkpoints" / "3"
    for path in {path for path in folder.rglob("*") if path.is_file()} - {*files_in(folder)}:
        path.write_bytes(b"\0\xff")
    check_same_state(set_up(parse([*RUN, "--out", str(copied), "--resume"])), finished)


@pytest.mark.nightly
def test_a_bit_flipped_anywhere_is_named(copied, capsys):
    check_flips(copied / "checkpoints" / "3", RANDOM, 200)
    for path in RANDOM.choice(
        [path for path in files_in(copied / "checkpoints" / "3") if path.stat().st_size], 8
    ):
        with flipped(path, RANDOM):
            assert f"got {path}, {MESSAGE}" in resume_error(copied, capsys)


WHOLE = "expected a whole checkpoint"


def add_a_file(at):
    (at / "3/state/more").write_text("")


def remove_a_file(at):
    (at / "3/info/metadata").unlink()


def add_a_folder(at):
    shutil.copytree(at / "3/state", at / "7")


def put_an_older_one_there(at):
    shutil.rmtree(at / "3")
    shutil.copytree(at / "2", at / "3")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            add_a_file,
            f"3/state/more, a file that is not of it, {WHOLE}",
        ),
        (remove_a_file, f"3/info/metadata, nothing there, {WHOLE}"),
        (
            add_a_folder,
            f"7, {WHOLE} of format {FORMAT}, with SHA256SUMS",
        ),
        (
            put_an_older_one_there,
            "3, a copy of the checkpoint of step 2, expected that of 3",
        ),
    ],
    ids=["a_file_too_many", "one_too_few", "a_strangers_folder", "an_older_checkpoint"],
)
def test_what_stands_in_the_place_of_a_checkpoint_is_named(copied, capsys, spoil, told):
    at = copied / "checkpoints"
    spoil(at)
    before = steps_in(at)[-2]
    error = (
        f"train_grpo.py: error: --resume: got {at}/{told}; --resume {before} goes on from the one"
        " before"
    )
    assert resume_error(copied, capsys) == error


def check_same_arrays(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(g, w)


def check_same_state(run, folder, *options):
    whole = set_up(parse([*RUN, "--out", str(folder), "--resume", *options]))
    assert (run.step, run.position) == (whole.step, whole.position)
    check_same_arrays(run.state, whole.state)


@pytest.mark.nightly
def test_the_one_before_goes_on(finished, copied, capsys):
    shutil.rmtree(copied / "checkpoints" / "3" / "state" / "d")
    assert "; --resume 2 goes on from the one before" in resume_error(copied, capsys)
    assert main([*RUN, "--out", str(copied), "--resume", "2"]) == 0
    assert records(copied) == records(finished)
    check_same_state(set_up(parse([*RUN, "--out", str(copied), "--resume"])), finished)
    assert main([*RUN, "--out", str(copied), "--resume", "1"]) == 2
    assert "--resume: got 1, expected one of the checkpoints 2, 3" in capsys.readouterr().err


def test_a_run_goes_on_with_the_questions_that_it_held_out(copied, capsys):
    """With fewer held out, the others would be in the training stream."""
    assert main([*RUN, "--out", str(copied), "--resume", "--held-out", "8"]) == 2
    assert (
        "another model or run, held_out=16, expected 8, in"
        in capsys.readouterr().err.splitlines()[-1]
    )


def test_checkpoints_are_data(finished, copied, capsys):
    """Nothing is unpickled, and no link is followed out of the folder."""
    unpickled = []
    sys.addaudithook(
        lambda event, args: unpickled.append(args) if event == "pickle.find_class" else None
    )
    shutil.rmtree(copied / "checkpoints" / "3")
    (copied / "checkpoints" / "3").symlink_to(finished / "checkpoints" / "3")
    assert (
        "3, a link, expected a checkpoint whose files lie in it; --resume 2 goes on"
        in resume_error(copied, capsys)
    )
    (copied / "checkpoints" / "3").unlink()
    elsewhere = next((copied / "checkpoints" / "2" / "state").glob("_METADATA"))
    elsewhere.rename(copied / "outside")
    elsewhere.symlink_to(copied / "outside")
    assert "_METADATA, a link, expected" in resume_error(copied, capsys)
    elsewhere.unlink()
    elsewhere.write_bytes(pickle.dumps(Path("x")))
    assert "expected a whole checkpoint" in resume_error(copied, capsys)
    run = set_up(parse([*RUN, "--out", str(finished), "--resume"]))
    assert run.step == 3
    assert not unpickled


def test_a_newer_format_is_named(copied, capsys, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr("examples.trainer.checkpoint.FORMAT", FORMAT + 1)
        run = set_up(parse([*RUN, "--out", str(copied / "newer")]))
        run.step = 4
        run.save()
        run.checkpoints.wait()
    shutil.move(copied / "newer" / "checkpoints" / "4", copied / "checkpoints" / "4")
    message = (
        f"--resume: got a checkpoint of a newer format, {FORMAT + 1}, in"
        f" {copied / 'checkpoints' / '4'}, "
    )
    message += (
        f"expected {FORMAT}: a newer program wrote it; --resume 3 goes on from the one before"
    )
    assert message in resume_error(copied, capsys)
    # a newer one may keep its digests elsewhere
    (copied / "checkpoints" / "4" / "SHA256SUMS").unlink()
    assert message in resume_error(copied, capsys)


def check_restores(finished, mesh, devices=None):
    run = set_up(parse([*RUN, "--out", str(finished), "--resume", "--mesh", mesh]), devices)
    assert len(jax.tree.leaves(run.state)[0].sharding.device_set) == (
        8 if devices is None else len(devices)
    )
    check_same_state(run, finished)


def test_a_checkpoint_restores_on_another_mesh_and_on_one_device(finished):
    check_restores(finished, "dp=1,cp=1,tp=8")
    check_restores(finished, "dp=1", jax.devices()[:1])


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", factorings(8))
def test_a_checkpoint_of_any_mesh_restores_on_any_other(finished, tmp_path, mesh):
    check_restores(finished, mesh)
    run = set_up(parse([*RUN, "--out", str(tmp_path), "--mesh", mesh]))
    run.save()
    run.checkpoints.wait()
    for other in (*factorings(8), "dp=1"):
        devices = jax.devices()[:1] if other == "dp=1" else None
        again = set_up(parse([*RUN, "--out", str(tmp_path), "--mesh", other, "--resume"]), devices)
        check_same_arrays(again.state, run.state)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", factorings(8))
def test_a_resumed_run_has_the_same_bits_on_any_mesh(tmp_path, mesh):
    run = [*RUN, "--out", str(tmp_path), "--mesh", mesh]
    assert main(run) == 0
    whole = records(tmp_path)
    assert main([*run, "--resume", "2"]) == 0
    assert records(tmp_path) == whole


@pytest.mark.parametrize("rate", ["inf", "nan", "0", "-1", "fast"])
def test_learning_rates_that_train_nothing(rate, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["--learning-rate", rate])
    assert stopped.value.code == 2
    assert (
        f"argument --learning-rate: got {rate!r}, expected a finite number above 0"
        in capsys.readouterr().err
    )
