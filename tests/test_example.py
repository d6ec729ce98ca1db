"""The example: bad arguments, a run that stops and goes on, every loss, and the same numbers on every mesh."""

import json
import shutil

import jax
import numpy as np
import pytest

from examples.train_grpo import grpo_step, main, parse, set_up, supervised
from jaxppo.policy_losses import POLICY_LOSSES
from sharding.mesh import LAYOUTS
from sharding.testing import factorings

TINY = ["--width", "16", "--layers", "1", "--prompts", "4", "--samples", "4", "--held-out", "16", "--sft-steps", "8"]


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def few_steps(tmp_path, *options, steps=2):
    args = parse([*TINY, "--out", str(tmp_path), *options])
    run = set_up(args)
    supervised(run, args)
    return run, [grpo_step(run, args) for _ in range(steps)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "dp=2,xp=4"], "mesh: got axis 'xp', expected one of"),
        (["--mesh", "dp=2,cp=2"], "mesh: got sizes 2*2=4 in 'dp=2,cp=2', expected 8 devices"),
        (["--mesh", "dp=8", "--prompts", "3", "--samples", "3"], "prompts * samples: got 9, expected a multiple of"),
        (["--out", "/dev/null/runs"], "--out: got /dev/null/runs, expected a folder that can be written to"),
        (["--loss", "pop"], "argument --loss: invalid choice: 'pop'"),
        (["--task", "chess"], "argument --task: invalid choice: 'chess'"),
        (["--context-layout", "spiral"], "argument --context-layout: invalid choice: 'spiral'"),
        (["--steps", "-1"], "argument --steps: got '-1', expected an integer of at least 0"),
        (["--entropy-coef", "nan"], "entropy_coef: got nan, expected a finite number"),
        (["--learning-rate", "0"], "argument --learning-rate: got '0', expected a number above 0"),
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


def test_a_resumed_run_repeats_the_next_step_and_refuses_another_model(tmp_path, capsys):
    options = [*TINY, "--out", str(tmp_path), "--steps", "4", "--checkpoint-every", "3"]
    assert main(options) == 0
    whole = records(tmp_path)
    assert [line["step"] for line in whole] == [1, 2, 3, 4]
    assert (tmp_path / "reward.png").stat().st_size > 0
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if the run had been stopped after its checkpoint of step 3
    assert main([*options, "--resume"]) == 0
    assert records(tmp_path) == whole
    capsys.readouterr()
    assert main([*options, "--resume", "--width", "24"]) == 2
    assert "--resume: got a checkpoint of another model, width=16, expected 24" in capsys.readouterr().err


@pytest.fixture(scope="module")
def on_eight_data_shards(tmp_path_factory):
    _, steps = few_steps(tmp_path_factory.mktemp("dp8"), "--mesh", "dp=8")
    assert max(step["reward"] for step in steps) > 0
    return steps


def check_same_numbers(tmp_path, expected, mesh, layout):
    run, steps = few_steps(tmp_path, "--mesh", mesh, "--context-layout", layout)
    kernel = run.state.params["blocks"][0]["up"]["kernel"][...]
    parts = run.learner.parallel.tensor_size
    assert kernel.sharding.shard_shape(kernel.shape) == (kernel.shape[0], kernel.shape[1] // parts)
    for got, want in zip(steps, expected, strict=True):
        assert got["reward"] == pytest.approx(want["reward"], abs=1e-6)
        for name in ("loss", "entropy", "kl", "gradient_norm"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
        assert got["mismatch_log_prob_abs_diff"] < 1e-5


@pytest.mark.parametrize(("mesh", "layout"), [("dp=1,cp=4,tp=2", "zigzag"), ("dp=2,cp=2,tp=2", "zigzag_per_segment")])
def test_losses_do_not_depend_on_mesh_and_layout(tmp_path, on_eight_data_shards, mesh, layout):
    check_same_numbers(tmp_path, on_eight_data_shards, mesh, layout)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", factorings(8))
def test_losses_do_not_depend_on_any_mesh_and_layout(tmp_path, on_eight_data_shards, mesh, layout):
    check_same_numbers(tmp_path, on_eight_data_shards, mesh, layout)


def check_loss(tmp_path, loss):
    run, steps = few_steps(tmp_path, "--loss", loss, "--kl-coef", "0.01", steps=3)
    assert all(np.isfinite(value) for step in steps for value in step.values())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.state.params))
    assert steps[0]["gradient_norm"] > 0


@pytest.mark.parametrize("loss", ["gspo", "clip_cov"])
def test_a_loss_runs_without_nan(tmp_path, loss):
    check_loss(tmp_path, loss)


@pytest.mark.nightly
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_every_registered_loss_runs_without_nan(tmp_path, loss):
    check_loss(tmp_path, loss)
