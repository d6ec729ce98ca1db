"""The example: bad arguments, a run that stops and goes on, every loss, and the same numbers on
every mesh.
"""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_runs
from tiny_runs import records

from examples.trainer import arguments, compare_runs, processes, report
from examples.trainer.arguments import parse, parser
from examples.trainer.grpo_run import grpo_step, set_up, supervised
from examples.trainer.tasks import TASKS
from examples.trainer.train_grpo import main
from jaxppo.policy_losses import BY_NAME
from sharding.axes import LAYOUTS
from sharding.testing import factorings

pytestmark = pytest.mark.usefixtures("kept_programs")
TINY = [*tiny_runs.USUAL, "--sft-steps", "24"]
RUN = [*TINY, "--steps", "3", "--checkpoint-every", "2", "--evaluate-every", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of three steps on dp=2,cp=2,tp=2."""
    folder = tmp_path_factory.mktemp("run")
    assert main([*RUN, "--out", str(folder)]) == 0
    return folder


def few_steps(folder, *options):
    args = parse([*TINY, "--out", str(folder), *options])
    run = set_up(args)
    supervised(run, args)
    return run, [grpo_step(run, args) for _ in range(3)]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "dp=2,xp=4"], "mesh: got axis 'xp', expected one of"),
        (["--mesh", "dp=2,cp=2"], "mesh: got sizes 2*2=4 in 'dp=2,cp=2', expected 8 devices"),
        (
            ["--mesh", "dp=8", "--prompts", "3", "--samples", "3"],
            "prompts * samples: got 9, expected a multiple of",
        ),
        (
            ["--out", "/dev/null/runs"],
            "--out: got /dev/null/runs, expected a folder that can be written to",
        ),
        (["--loss", "pop"], "argument --loss: invalid choice: 'pop'"),
        (["--task", "chess"], "--task: got 'chess', expected one of spell_backward, chain_sum"),
        (["--context-layout", "spiral"], "argument --context-layout: invalid choice: 'spiral'"),
        (["--steps", "-1"], "argument --steps: got '-1', expected an integer of at least 0"),
        (
            ["--entropy-coef", "nan"],
            "argument --entropy-coef: got 'nan', expected a finite number of at least 0",
        ),
        (
            ["--learning-rate", "0"],
            "argument --learning-rate: got '0', expected a finite number above 0",
        ),
        (
            ["--learning-rate", "inf"],
            "argument --learning-rate: got 'inf', expected a finite number above 0",
        ),
        (
            ["--kl-coef", "-1"],
            "argument --kl-coef: got '-1', expected a finite number of at least 0",
        ),
        (["--resume", "--overwrite"], "argument --overwrite: not allowed with argument --resume"),
        (["--resume"], "--resume: got no checkpoint in"),
    ],
)
def test_bad_arguments_end_in_one_line_and_exit_code_2(tmp_path, capsys, options, message):
    try:
        code = main([*TINY, "--out", str(tmp_path), *options])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("train_grpo.py: error: ")
    assert message in errors[0]


@pytest.mark.parametrize(
    "flag", [a for a in parser()._actions if a.type not in (None, Path)], ids=lambda a: a.dest
)
def test_no_number_is_out_of_its_range(flag, capsys):
    for text in ("-1", "-0.5", "nan", "inf", "1e999", "", "x", "²"):
        with pytest.raises(SystemExit) as stopped:
            parse([flag.option_strings[0], text])
        assert stopped.value.code == 2
        assert (
            f"argument {flag.option_strings[0]}: got {text!r}, expected" in capsys.readouterr().err
        )


def test_every_flag_is_described():
    assert [action.dest for action in parser()._actions if not action.help] == []


def test_flags_offer_what_the_packages_have():
    assert list(arguments.LOSSES) == sorted(BY_NAME)
    assert list(arguments.LAYOUTS) == list(LAYOUTS)


HELP = """
import sys
from examples.trainer import train_grpo
try:
    train_grpo.main(["--help"])
except SystemExit:
    print(*{"jax", "numpy", "matplotlib", "reasoning_gym"} & set(sys.modules), file=sys.stderr)
"""


def test_help_imports_nothing_large():
    done = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert "--kl-coef" in done.stdout
    assert done.stderr == "\n"


def files_of(folder):
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_run_is_deleted_only_where_that_is_asked_for(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "spikes").mkdir()
    before = files_of(tmp_path)
    assert main([*RUN, "--out", str(tmp_path)]) == 2
    message = (
        f"--out: got {tmp_path}, where a run is (checkpoints 2, 3), expected --resume, to go on"
        " from it, or "
    )
    assert message in capsys.readouterr().err
    assert files_of(tmp_path) == before
    shutil.rmtree(tmp_path / "checkpoints")
    assert main([*RUN, "--out", str(tmp_path)]) == 2
    assert "where a run is (no checkpoint yet), expected" in capsys.readouterr().err
    assert main([*RUN, "--out", str(tmp_path), "--overwrite", "--steps", "0"]) == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["0"]
    assert records(tmp_path) == []
    assert ((tmp_path / "samples.jsonl").read_text(), (tmp_path / "tokens.jsonl").read_text()) == (
        "",
        "",
    )
    assert not (tmp_path / "spikes").exists()


def test_two_runs_do_not_share_a_folder(finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    with processes.alone_in(tmp_path):
        before = files_of(tmp_path)
        for option in ("--resume", "--overwrite"):
            assert main([*RUN, "--out", str(tmp_path), option]) == 2
            whose = (
                f"another run goes on, of process {os.getpid()} on host {socket.gethostname()},"
                " since "
            )
            assert f"--out: got {tmp_path}, where {whose}" in capsys.readouterr().err
        assert files_of(tmp_path) == before
    with processes.alone_in(tmp_path):
        pass


def test_a_link_in_the_place_of_a_lock_is_refused(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "mine")
    assert main([*RUN, "--out", str(tmp_path / "run")]) == 2
    assert f"links: '{tmp_path / 'run' / 'lock'}')" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "mine"


def test_samples_of_each_step_are_kept(finished):
    lines = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert len(line["samples"]) == 4
        for sample in line["samples"]:
            assert sample["prompt"].startswith("Find the Greatest Common Divisor")
            numbers = [int(x) for x in re.findall(r"\d+", sample["prompt"].split(":")[-1])]
            right = sample["completion"].strip() == str(math.gcd(*numbers))
            assert (sample["reward"] == 1) == right


def test_a_resumed_run_repeats_the_next_step(finished, tmp_path):
    whole = records(finished)
    assert [line["step"] for line in whole] == [1, 2, 3]
    assert (finished / "reward.png").stat().st_size > 0
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "3")  # as if stopped after the checkpoint of step 2
    assert main([*RUN, "--out", str(tmp_path), "--resume"]) == 0
    assert records(tmp_path) == whole
    for name in ("samples.jsonl", "tokens.jsonl"):
        assert (tmp_path / name).read_text() == (finished / name).read_text(), name


def test_a_page_is_made_of_a_run(finished):
    assert report.main([str(finished)]) == 0
    page = (finished / "report.html").read_text()
    assert "3 steps, 1 to 3" in page
    assert page.count("not recorded in this run") == 0
    for name in (
        "entropy_p80",
        "entropy_from_2",
        "mismatch_reverse_k3_kl",
        "mismatch_weight_max",
        "pass_some",
    ):
        assert f"<th>{name}</th>" in page
    assert page.count('aria-label="Held-out accuracy"') == 1
    assert "<th>task</th><td>gcd</td>" in page
    assert page.count("<pre>Find the Greatest Common Divisor") == 12
    assert "hold the same part of the parameters, of 2" in page


def test_held_out_accuracy_is_measured_now_and_then(finished):
    assert [line.get("held_out_accuracy", -1) >= 0 for line in records(finished)] == [
        False,
        True,
        False,
    ]


def test_no_number_is_known_before(finished, tmp_path):
    """The ratios of the first update are 1: those of the last one are reported, if there are
    others.
    """
    names = {
        name for line in records(finished) for name in line if "ratio" in name or "clip" in name
    }
    assert {name.removesuffix("_last_update") for name in names} >= {
        "ratio_mean",
        "ratio_max",
        "clip_fraction",
    }
    assert all(name.endswith("_last_update") for name in names)
    args = parse([*tiny_runs.ONE_UPDATE, "--sft-steps", "0", "--out", str(tmp_path)])
    of_one_update = grpo_step(set_up(args), args)
    assert not {name for name in of_one_update if "ratio" in name or "clip" in name}


def test_a_checkpoint_of_another_model_is_refused(finished, capsys):
    assert main([*RUN, "--out", str(finished), "--resume", "--width", "24"]) == 2
    assert (
        "--resume: got a checkpoint of another model or run, width=16, expected 24"
        in capsys.readouterr().err
    )


def check_same_numbers(finished, tmp_path, mesh, layout, *options):
    run, steps = few_steps(tmp_path, "--mesh", mesh, "--context-layout", layout, *options)
    kernel = run.state.params["blocks"][0]["up"]["kernel"][...]
    parts = run.learner.parallel.tensor_size
    assert kernel.sharding.shard_shape(kernel.shape) == (kernel.shape[0], kernel.shape[1] // parts)
    for got, want in zip(steps, records(finished), strict=True):
        assert abs(want["pg_loss"]) > 1e-3
        for name in ("reward", "loss", "entropy", "kl", "gradient_norm"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
        assert got["mismatch_log_prob_abs_diff"] < 1e-5


def test_losses_do_not_depend_on_mesh_and_layout(finished, tmp_path):
    check_same_numbers(finished, tmp_path, "dp=1,cp=4,tp=2", "zigzag")


@pytest.mark.nightly
def test_losses_do_not_depend_on_shared_prompts(finished, tmp_path):
    check_same_numbers(finished, tmp_path, "dp=2,cp=2,tp=2", "zigzag", "--share-prefixes")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", factorings(8))
def test_losses_do_not_depend_on_any_mesh_and_layout(finished, tmp_path, mesh, layout):
    check_same_numbers(finished, tmp_path, mesh, layout)


def check_finite(tmp_path, loss, task="gcd"):
    run, steps = few_steps(tmp_path, "--loss", loss, "--kl-coef", "0.01", "--task", task)
    assert all(np.isfinite(value) for step in steps for value in step.values())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.state.params))
    assert steps[0]["gradient_norm"] > 0


@pytest.mark.nightly
def test_a_loss_with_a_step_wide_mask_runs_without_nan(tmp_path):
    check_finite(tmp_path, "clip_cov")


@pytest.mark.nightly
@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_runs_without_nan(tmp_path, task):
    check_finite(tmp_path, "ppo", task)


@pytest.mark.nightly
@pytest.mark.parametrize("loss", sorted(BY_NAME))
def test_every_registered_loss_runs_without_nan(tmp_path, loss):
    check_finite(tmp_path, loss)


def test_curves_of_runs_are_drawn(tmp_path, capsys):
    for name, steps in (("long", 12), ("short", 3)):
        (tmp_path / name).mkdir()
        lines = (json.dumps({"step": i, "reward": i / steps}) for i in range(steps))
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    picture = tmp_path / "curves.png"

    def draw(*names):
        return compare_runs.main([*(str(tmp_path / n) for n in names), "--out", str(picture)])

    assert (draw("long", "short"), draw("long", "absent")) == (2, 2)
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].endswith("got short with 3 rewards, expected 10 or more")
    assert "absent" in errors[1]
    assert not picture.exists()
    assert draw("long") == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
