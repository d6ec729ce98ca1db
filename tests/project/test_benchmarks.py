"""The benchmark at toy sizes: every version computes the same, and what is written can be read.

No time is asserted.
"""

import dataclasses
import json
import re
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import float16_compiles

from benchmarks import (
    batches,
    compiling,
    head,
    peers,
    quantized,
    tables,
    trees,
    turns,
    versions,
)
from benchmarks.cases import Case, draw
from benchmarks.measure import compile_step, difference, fits, in_turns, peaks
from examples.planner.pod_sizes import HEADS, HeadSizes
from jaxppo import RolloutBatch, make_parallel_mesh
from jaxppo.head import Quantization

TIED = Case(140, HeadSizes(8, 50, tied=True, softcap=2.0), share=0.3)  # more than one chunk
PLAIN = Case(20, HeadSizes(8, 50), share=0.2)


def test_tied_and_soft_capped_versions_agree():
    records = {r["version"]: r for r in head.measured(TIED, 1, head.SWEPT)}
    assert set(records) == set(head.SWEPT)
    assert all(r["difference"] < 1e-5 for name, r in records.items() if name != versions.FLOOR)


def test_floor_is_three_products():
    hidden, kernel = (draw(TIED)[name] for name in ("hidden", "kernel"))
    dhidden, dkernel = jax.jit(versions.three_matmuls(TIED))(draw(TIED))
    z = hidden[0] @ kernel.T
    np.testing.assert_allclose(dhidden, z @ kernel, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dkernel, z.T @ hidden[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_mask_has_its_share(share):
    case = Case(37, HeadSizes(4, 10), share=share)
    assert draw(case)["part"].loss_mask.sum() == case.counted == max(1, round(37 * share))


def test_each_round_runs_every_version_once():
    ran = []
    runs = {name: lambda name=name: ran.append(name) or jnp.zeros(()) for name in "abc"}
    assert set(in_turns(runs, rounds=3)) == set("abc")
    rounds = ["".join(ran[i : i + 3]) for i in range(0, len(ran), 3)]  # and one more, to warm up
    assert len(rounds) == 4
    assert all(sorted(found) == ["a", "b", "c"] for found in rounds)
    assert len(set(rounds)) > 1


def test_tokamax_is_called_where_it_is_installed(monkeypatch):
    def loss(x, labels, weights, reduction, implementation):
        assert (reduction, implementation) == ("mean", "xla")
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ weights), labels[:, None], axis=1).mean()

    module = types.SimpleNamespace(linear_softmax_cross_entropy_loss=loss)
    monkeypatch.setattr(peers, "installed", lambda name: name == "tokamax")
    monkeypatch.setitem(sys.modules, "tokamax", module)
    monkeypatch.setitem(
        sys.modules, "absl", types.SimpleNamespace(flags=types.SimpleNamespace(FLAGS=Mock()))
    )
    data = draw(PLAIN)
    value, gradients = versions.groups(PLAIN)["log-probs"]["plain: log_softmax"](data)
    got, got_gradients = peers.jax_peers(PLAIN)["tokamax"](data)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    assert difference(got_gradients, gradients) < 1e-5
    assert peers.jax_peers(TIED) == {}


def test_an_accelerator_is_compared_with_what_it_reaches(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(head, "peaks", lambda rounds: peaks(rounds, size=16, elements=64))
    for record in head.measured(PLAIN, 1, {versions.FLOOR: "floor", "jaxppo": "entropy"}):
        assert record["tflops"] == pytest.approx(6 * 20 * 8 * 50 / record["seconds"] / 1e12)
        assert record["share_of_matmul_peak"] > 0
        assert record["share_of_copy_bandwidth"] > 0


def test_one_command_times_what_is_here_to_be_pasted(tmp_path, capsys, monkeypatch):
    """On a CPU too: versions and devices, the table, and the form that takes it, which is there."""
    monkeypatch.setattr(peers, "installed", lambda name: False)
    sizes = ["--tokens", "140", "--hidden-size", "4", "--vocab-size", "24", "--rounds", "1"]
    assert head.main(["--here", *sizes, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert jax.__version__ in text
    assert f"{jax.device_count()} x {jax.devices()[0].device_kind}" in text
    assert all(
        version in text for version in (versions.FLOOR, "jaxppo, one pass", "jaxppo, two passes")
    )
    form = Path(head.__file__).parents[1] / ".github/ISSUE_TEMPLATE/timing.yml"
    assert f"name: {head.FORM}\n" in form.read_text()
    assert repr(head.FORM) in text.splitlines()[-1]
    records = json.loads((tmp_path / "here.json").read_text())["records"]
    assert all(r["seconds"] > 0 and r["tokens"] == 140 for r in records)


def test_documented_tables_are_those_of_the_results(capsys):
    tables.main()
    pages = [
        Path(head.__file__).parents[1] / page for page in ("README.md", "docs/measurements.md")
    ]
    written = "\n".join(page.read_text() for page in pages)
    found = [
        line.split("|", 2)[2]
        for line in capsys.readouterr().out.splitlines()
        if re.match(r"\|.*\d", line)
    ]
    assert [cells for cells in found if cells not in written] == []


def test_versions_that_fit_no_memory_have_no_time(monkeypatch):
    data = draw(PLAIN)
    floor = {("floor", versions.FLOOR): compile_step(versions.three_matmuls(PLAIN), data)}
    monkeypatch.setattr(head, "fits", lambda compiled: compiled in floor.values())
    programs = floor | head.compiled_of({"entropy": {"jaxppo": versions.ours(PLAIN)}}, data)
    of_floor, ours = head.timed(PLAIN, data, programs, 1)
    assert of_floor["seconds"] > 0
    assert set(ours) == {"group", "version", "temporaries_mib"}


def test_what_fits(monkeypatch):
    compiled = compile_step(versions.three_matmuls(PLAIN), draw(PLAIN))
    assert fits(compiled)  # CPUs do not say what they have
    for limit, expected in ((1000, False), (10**9, True)):
        device = types.SimpleNamespace(memory_stats=lambda limit=limit: {"bytes_limit": limit})
        with monkeypatch.context() as patch:
            patch.setattr(jax, "devices", lambda: [device])  # noqa: B023
            assert fits(compiled) is expected


@pytest.mark.nightly
def test_command_writes_json_and_plots(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda name: False)
    sizes = (
        "--tokens 140 --hidden-size 4 --vocab-size 24 --sweep-tokens 8 --sweep-hidden-size 4"
        " --head-tokens 4"
    )
    sweeps = "--vocabularies 12 --token-counts 8 --heads gpt2 --head-scale 768 --rounds 1"
    assert head.main([*sizes.split(), *sweeps.split(), "--out", str(tmp_path)]) == 0
    found = {
        part: json.loads((tmp_path / f"{part}.json").read_text())
        for part in head.PARTS
        if part not in head.NAMED
    }
    assert {r["version"] for r in found["main"]["records"]} >= {
        versions.FLOOR,
        "jaxppo",
        "jaxppo, where",
        "optax",
    }
    for part in ("main", "vocabulary", "heads"):
        for record in found[part]["records"]:
            assert record["seconds"] > 0
            assert record["temporaries_mib"] >= 0
            assert (record["over_floor"] == 1) == (record["version"] == versions.FLOOR)
            assert record["group"] == "floor" or record["difference"] < 1e-5
    assert {r["vocab_size"] for r in found["vocabulary"]["records"]} == {12}
    assert {r["tokens"] for r in found["tokens"]["records"]} == {8}
    for name in ("time_over_vocabulary.png", "temporaries_over_tokens.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "with a mask of 20%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rounds 0", "rounds, share: got 0"),
        ("--share 0", "rounds, share: got 9"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        head.main(arguments.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_real_heads_have_the_published_sizes():
    sizes = {name: (h.hidden_size, h.vocab_size) for name, h in HEADS.items()}
    assert sizes["qwen3-8b"] == (4096, 151936)
    assert sizes["gpt2"] == (768, 50257)


@pytest.mark.nightly
def test_seconds_of_compiling_are_of_each_version_and_stage():
    found = compiling.measure("v5p:2x2x1", "cp=2,tp=2", repeats=1, compiles=False)
    versions = (
        "plain JAX at its best",
        "one pass, a mask",
        "one pass, no mask",
        "two passes",
        "forward",
    )
    assert set(found) == {f"{name}, {stage}" for name in versions for stage in ("trace", "lower")}
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.nightly
def test_samples_per_second():
    assert all(figure > 0 for figure in batches.measure(count=4, tokens=8).values())


def test_processes_take_turns(tmp_path):
    """Each imports from its own checkout, and prints its figures last."""
    other = tmp_path / "other"
    script = tmp_path / "script.py"
    module = other / "benchmarks" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.touch()
    script.write_text(
        "import benchmarks, json, sys\nprint('first', sys.argv)\nprint(json.dumps({'other':"
        f" benchmarks.__file__ == {str(module)!r}, 'options': len(sys.argv)}}))\n"
    )
    found = turns.in_processes(str(script), ["--size=1"], str(other), turns=2)
    assert found == {
        "before": [{"other": True, "options": 3}] * 2,
        "now": [{"other": False, "options": 3}] * 2,
    }
    assert set(turns.in_processes(str(script), [], None, turns=1)) == {"now"}


@pytest.mark.nightly
def test_trees_count_tokens_and_operations():
    """Four samples of 8 + 2 tokens are 40, or 7 + 4 * 3 as a tree.

    Rows of 20 hold two whole samples, or a tree.
    """
    config = dataclasses.replace(
        trees.MODEL, vocab_size=64, width=8, layers=1, heads=1, head_dim=8, mlp_width=8
    )
    cells = trees.row(trees.Step(8, 2, 4, 2), 20, config).strip("| ").split(" | ")
    assert cells[:7] == ["8:2", "4", "80", "38", "52%", "4", "2"]
    assert cells[-1] == "50%"


def test_trees_count_shared_responses():
    """By hand, of a search whole, with shared prompts, and as trees: 4 * (3 + 2 * 2), 2 + 4 * 5, 2
    + 2 * 2 + 4 * 3.

    It draws 2 * 2 + 4 * 2 tokens. Turns have 5, 8 and 11 tokens; as trees the last of them, and 1
    more for each other.
    """
    search = trees.responses_row(trees.Search(3, 2, 2, 2), 32).strip("| ").split(" | ")
    assert search[1:] == ["4", "28", "22", "18", "36%", "16", "12"]
    turns_of_agent = trees.responses_row(trees.Turns(3, 2, 1, 3), 32).strip("| ").split(" | ")
    assert turns_of_agent[1:] == ["3", "24", "17", "13", "46%", "6", "6"]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_dequantised_logits_have_the_numbers_of_a_head_of_8_bits(dtype):
    """Values and gradients."""
    if dtype != "int8" and not float16_compiles():  # e4m3 is converted by way of it
        pytest.skip("XLA converts no e4m3 for this processor")
    one = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
    step = quantized.QuantizedStep(HeadSizes(32, 96), 24, jnp.float32, one, Quantization(dtype))
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, 24, 32))
    kernel = jax.random.normal(keys[1], (32, 96))
    ids = jax.random.randint(keys[2], (1, 24), 0, 96)
    ones = jnp.ones((1, 24))
    last = jnp.arange(24) == 23
    batch = RolloutBatch(
        ids,
        ids,
        jnp.ones_like(ids),
        jnp.arange(24)[None],
        jnp.where(last, 0.0, ones),
        jnp.zeros((1, 1), int),
        advantages=ones,
        old_log_probs=-3 * ones,
    )
    for ours, plain in zip(
        jax.jit(step.forward)(hidden, kernel, batch),
        jax.jit(step.dequantized_forward)(hidden, kernel, batch),
        strict=True,
    ):
        np.testing.assert_allclose(ours, plain, atol=1e-4)  # of logits up to 25, in f32
    of_head, of_logits = (
        jax.jit(jax.grad(loss, (0, 1)))(hidden, kernel, batch)
        for loss in (step.one_pass, step.dequantized_loss)
    )
    for a, b in zip(of_head, of_logits, strict=True):
        assert jnp.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.nightly
def test_heads_on_described_gpus_are_no_slower_than_documented(tmp_path):
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs takes the extra gpu-aot")
    assert head.main(["--parts", "roofline", "--out", str(tmp_path)]) == 0
    kept = Path(__file__).parents[2] / "benchmarks/results"
    now, before = (
        json.loads((path / "roofline.json").read_text())["records"] for path in (tmp_path, kept)
    )
    for new, old in zip(now, before, strict=True):
        assert (new["head"], new["version"]) == (old["head"], old["version"])
        if "plain" not in new["version"]:
            assert new["compute_ms"] <= 1.02 * old["compute_ms"]
            assert new.get("temporaries_gib", 0) <= 1.02 * old.get("temporaries_gib", 0)
