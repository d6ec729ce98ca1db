"""Files that others wrote or changed: pipes, lines that are cut, checkpoints of odd contents
whose digests fit.
"""

import hashlib
import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from said import said_by

from examples.planner.plan_bounds import Work
from examples.planner.plan_compilers import Kept
from examples.planner.pod_sizes import MODELS
from examples.trainer import checkpoint, compare_runs, processes, report
from examples.trainer.checkpoint import FORMAT, SUMS, Checkpoints
from examples.trainer.learner import TrainState
from jaxppo.sharding import known_device

NOTES = {"accuracy_after_sft": 0.5, "sft_done": 2, "position": 40}


def state(step=1):
    return TrainState(
        {"w": jnp.arange(4.0)}, {"m": jnp.zeros(4)}, None, jnp.zeros(2, jnp.uint32), jnp.int32(step)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(folder, {"seed": 0})
    checkpoints.save(state(), 1, NOTES)
    checkpoints.wait()
    return folder


def sealed(folder, lines=None):
    """Gives a checkpoint the digests of what is in it, or other lines with their right digest."""
    if lines is None:
        names = sorted(
            line.split("  ", 1)[1] for line in (folder / SUMS).read_text().splitlines()[:-1]
        )
        lines = "".join(
            f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names
        ).encode()
    (folder / SUMS).write_bytes(lines + b"# " + hashlib.sha256(lines).hexdigest().encode() + b"\n")


INFO = {"format": FORMAT, "step": 1, "identity": {"seed": 0}, "notes": NOTES}
WHOLE = "expected a whole checkpoint"
CONTENTS = {
    "no object": ([], f"1, {WHOLE} of format {FORMAT}"),
    "a text": ("x", f"1, {WHOLE} of format {FORMAT}"),
    "nothing": (None, f"1, {WHOLE} of format {FORMAT}"),
    "no format": ({}, f"1, {WHOLE} of format {FORMAT}"),
    "a format of a list": (INFO | {"format": [4]}, f"1, {WHOLE} of format {FORMAT}"),
    "a format of another kind": (
        INFO | {"format": float(FORMAT)},
        f"1, {WHOLE} of format {FORMAT}",
    ),
    "no step": (
        {k: v for k, v in INFO.items() if k != "step"},
        "a copy of the checkpoint of step None, expected that",
    ),
    "a step of another kind": (
        INFO | {"step": True},
        "a copy of the checkpoint of step True, expected that of 1",
    ),
    "no identity": (
        {k: v for k, v in INFO.items() if k != "identity"},
        f"without the identity and the notes of a run, {WHOLE}",
    ),
    "an identity of a list": (
        INFO | {"identity": ["seed"]},
        f"without the identity and the notes of a run, {WHOLE}",
    ),
    "another identity": (
        INFO | {"identity": {"seed": 1}},
        "of another model or run, seed=1, expected 0, in",
    ),
    "no notes": (
        {k: v for k, v in INFO.items() if k != "notes"},
        f"without the identity and the notes of a run, {WHOLE}",
    ),
    "notes of a text": (
        INFO | {"notes": "x"},
        f"without the identity and the notes of a run, {WHOLE}",
    ),
    "a note too few": (
        INFO | {"notes": {"accuracy_after_sft": 0.5, "sft_done": 2}},
        f"1 with position 'nothing', {WHOLE}",
    ),
    "a position of a text": (
        INFO | {"notes": NOTES | {"position": "40"}},
        f"1 with position '40', {WHOLE}",
    ),
    "a position below 0": (
        INFO | {"notes": NOTES | {"position": -1}},
        f"1 with position -1, {WHOLE}",
    ),
    "a position that is none": (
        INFO | {"notes": NOTES | {"position": 1e30}},
        f"1 with position 1e+30, {WHOLE}",
    ),
    "steps that are true": (
        INFO | {"notes": NOTES | {"sft_done": True}},
        f"1 with sft_done True, {WHOLE}",
    ),
    "an accuracy of NaN": (
        INFO | {"notes": NOTES | {"accuracy_after_sft": float("nan")}},
        f"accuracy_after_sft nan, {WHOLE}",
    ),
    "an accuracy of a list": (
        INFO | {"notes": NOTES | {"accuracy_after_sft": []}},
        f"accuracy_after_sft [], {WHOLE}",
    ),
}


def refusal(folder, like=None):
    with pytest.raises(ValueError, match=r"^--resume: got ") as raised:
        Checkpoints(folder, {"seed": 0}).load(like or state())
    return str(raised.value)


@pytest.mark.parametrize("name", CONTENTS)
def test_odd_contents_with_right_digests_are_told_in_words(saved, tmp_path, name):
    content, message = CONTENTS[name]
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1" / "info" / "metadata").write_text(json.dumps(content))
    sealed(tmp_path / "1")
    assert message in refusal(tmp_path)


def test_the_same_contents_sealed_again_are_read(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1" / "info" / "metadata").write_text(json.dumps(INFO | {"more": 1}))
    sealed(tmp_path / "1")
    found, step, notes = Checkpoints(tmp_path, {"seed": 0}).load(state())
    assert (step, notes) == (1, NOTES)
    np.testing.assert_array_equal(found.params["w"], np.arange(4))


@pytest.mark.parametrize(
    "lines", [b"one word\n", b"\xff\xfe  info/metadata\n", b"\n\n", b"0  ../../outside\n", b""]
)
def test_odd_digests_with_a_right_digest_of_their_own(saved, tmp_path, lines):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    sealed(tmp_path / "1", lines)
    assert WHOLE in refusal(tmp_path)


# from readers that Orbax abandons
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_arrays_of_another_step_or_shape(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    checkpoints = Checkpoints(tmp_path / "other", {"seed": 0})
    checkpoints.save(state(7), 1, NOTES)
    checkpoints.wait()
    assert "1 with the arrays of step 7, expected 1" in refusal(tmp_path / "other")
    wide = TrainState(
        {"w": jnp.zeros(5)}, {"m": jnp.zeros(4)}, None, jnp.zeros(2, jnp.uint32), jnp.int32(1)
    )
    assert f"1, {WHOLE}" in refusal(tmp_path, wide)


def piped(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def a_run(folder, lines=()):
    folder.mkdir(exist_ok=True)
    records = [{"step": i, "reward": i / 30} for i in range(1, 31)]
    (folder / "metrics.jsonl").write_text("\n".join([*map(json.dumps, records), *lines]))
    return folder


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "settings.json", "samples.jsonl", "tokens.jsonl", "report.html.new"]
)
def test_pipes_in_a_run_are_not_waited_for(tmp_path, name, capsys):
    piped(a_run(tmp_path / "run") / name)
    assert report.main([str(tmp_path / "run")]) == (2 if name == "metrics.jsonl" else 0)
    assert (
        compare_runs.main([str(tmp_path / "run"), "--out", str(tmp_path / "x.png")])
        == (name == "metrics.jsonl") * 2
    )
    if name == "metrics.jsonl":
        errors = capsys.readouterr().err
        assert (
            errors.count("examples.trainer.report: error: ")
            == errors.count("compare_runs: error: ")
            == 1
        )


def test_a_pipe_in_a_checkpoint_is_not_waited_for(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    piped(tmp_path / "1" / "_CHECKPOINT_METADATA")  # which has no digest
    assert f"_CHECKPOINT_METADATA, no regular file, {WHOLE}" in refusal(tmp_path)


def test_a_pipe_as_the_lock_is_refused(tmp_path):
    piped(tmp_path / "lock")
    with pytest.raises(ValueError, match="not a regular file"), processes.alone_in(tmp_path):
        pass


def test_a_pipe_as_the_plans_of_a_search_is_refused(tmp_path):
    piped(tmp_path / "plans.jsonl")
    work = Work("qwen3-8b", MODELS["qwen3-8b"], "v5p:4x4x4", known_device("TPU v5"), 64, 128, 8192)
    with pytest.raises(OSError, match="not a regular file"), Kept(tmp_path, work):
        pass


def test_curves_of_a_run_that_was_killed(tmp_path, capsys):
    """The last line is cut, one is no record, a reward is null, and a step was run twice."""
    lines = [
        '{"step": 31, "reward": null}',
        '{"step": 30, "reward": 0.5}',
        "[]",
        '{"step": 32, "rew',
    ]
    run = a_run(tmp_path / "_run", lines)
    assert compare_runs.main([str(run), "--out", str(tmp_path / "x.png")]) == 0
    told = "compare_runs: _run: 2 lines of metrics.jsonl are no records"
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["absent/x.png", "x.strange"])
def test_a_picture_that_cannot_be_written_is_an_error(tmp_path, capsys, name):
    assert compare_runs.main([str(a_run(tmp_path / "run")), "--out", str(tmp_path / name)]) == 2
    (line,) = said_by("compare_runs", capsys)
    assert line.startswith("compare_runs: error: ")


assert {*NOTES} == {*checkpoint.NOTES}
