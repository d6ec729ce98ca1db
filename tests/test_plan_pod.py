"""The pod planner on described TPUs, and its one-line errors."""

import sys

import jax.numpy as jnp
import pytest

from examples import plan_pod
from sharding import make_parallel_mesh

SMALL = ["--hidden-size", "256", "--vocab-size", "32768", "--tokens", "2048"]


def test_plan_on_emulated_devices():
    step = plan_pod.Step(plan_pod.HeadSizes(32, 4096), 64, jnp.float32, make_parallel_mesh("cp=4,tp=2"))
    found = plan_pod.plan(step)
    products = 2 * 64 * 32 * 4096 // 2
    assert found["plain"].flops.low == found["one pass"].flops.high == 3 * products
    assert found["two passes"].flops.high == 4 * products
    assert found["plain"].output_bytes == found["one pass"].output_bytes == found["two passes"].output_bytes
    assert {c.axes for c in found["one pass"].collectives} == {("cp",), ("tp",)}
    assert step.cost(step.forward).flops.high == products


def test_vocabulary_that_the_tensor_axis_does_not_divide():
    sizes, mesh = plan_pod.HeadSizes(32, 4095, tied=True), make_parallel_mesh("cp=4,tp=2")
    found = plan_pod.plan(plan_pod.Step(sizes, 64, jnp.float32, mesh))
    assert found["plain"].flops.low == 3 * 2 * 64 * 32 * 4095
    assert found["two passes"].flops.high == 4 * 2 * 64 * 32 * 2048


def test_table_on_a_described_pod(capsys):
    assert plan_pod.main([*SMALL, "--tokens", "8192", "--mesh", "dp=2,tp=2", "--topology", "v5e:2x2"]) == 0
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line}
    one, two, plain = (float(rows["temporaries"][i]) for i in (1, 3, 5))
    assert two < one < plain
    assert all(float(rows["computing"][i]) > 0 for i in (1, 3, 5))
    assert "all-reduce over dp" in out


def test_the_curve_over_budgets(capsys):
    arguments = [*SMALL, "--mesh", "dp=2,tp=2", "--topology", "v5e:2x2", "--memory", "0.0001", "0.01", "0.5"]
    assert plan_pod.main(arguments) == 0
    head, least, two, one = capsys.readouterr().out.splitlines()[3:]
    assert head.startswith("memory given")
    assert "memory: got 107374 bytes, expected at least" in least
    assert "two passes: one pass does not fit the memory" in two
    assert "one pass, 2048 tokens x 16384 columns" in one
    assert float(two.split()[2]) <= 0.01 < float(one.split()[2]) <= 0.5


@pytest.mark.nightly
def test_a_large_head_on_many_chips(capsys):
    assert plan_pod.main(["--model", "qwen3-8b", "--mesh", "dp=8,cp=8,tp=8", "--topology", "v5p:8x8x8"]) == 0
    rows = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert float(rows["temporaries"][3]) < 0.27 < 0.8 < float(rows["temporaries"][5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "dp=3", "--topology", "v5e:2x2"], "plan_pod: mesh: got sizes 3=3 in 'dp=3', expected 4 devices"),
        (["--mesh", "xx=4", "--topology", "v5e:2x2"], "plan_pod: mesh: got axis 'xx'"),
        (["--topology", "v99:2x2"], "plan_pod: topology: got 'v99:2x2', expected one like v5p:8x8x8"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert plan_pod.main([*SMALL, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_missing_libtpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert plan_pod.main(SMALL) == 2
    assert capsys.readouterr().err == "plan_pod: libtpu is missing, expected `pip install libtpu`\n"


@pytest.mark.parametrize("arguments", [[], ["--model", "gpt2", "--hidden-size", "8"], ["--hidden-size", "8"]])
def test_one_way_to_name_the_sizes(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan_pod.main(arguments)
    assert stopped.value.code == 2
    assert "expected --model, or" in capsys.readouterr().err
