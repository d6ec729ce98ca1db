"""The pod planner on described TPUs, and its one-line errors."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import without_gpu_plugin

from examples.planner import plan_pod, pod_head
from examples.planner.described_gpu import NO_SEARCH
from examples.planner.pod_sizes import HEADS, MODELS, HeadSizes, ModelSizes
from examples.planner.pod_step import GIB, TrainStep, refused_bytes
from sharding import make_parallel_mesh

ROOT = Path(__file__).parents[2]
SMALL = ["--hidden-size", "256", "--vocab-size", "32768", "--tokens", "2048"]


def test_both_plain_versions_are_the_same_statistics():
    logits = 3 * jax.random.normal(jax.random.key(0), (2, 5, 300))
    targets = 7 * jnp.arange(10).reshape(2, 5)
    plain, best = (
        stats(logits, targets) for stats in (pod_head.plain_stats, pod_head.best_plain_stats)
    )
    for x, y in zip(plain, best, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@functools.cache
def planned():
    """A step of a small head on emulated devices, and its plan."""
    step = pod_head.Step(HeadSizes(32, 4096), 64, jnp.float32, make_parallel_mesh("cp=4,tp=2"))
    return step, pod_head.plan(step)


def test_plan_on_emulated_devices():
    step, found = planned()
    products = 2 * 64 * 32 * 4096 // 2
    assert found["plain"].flops.low == found["one pass"].flops.high == 3 * products
    assert found["two passes"].flops.high == 4 * products
    assert (
        found["plain"].output_bytes
        == found["one pass"].output_bytes
        == found["two passes"].output_bytes
    )
    assert {c.axes for c in found["one pass"].collectives} == {("cp",), ("tp",)}
    assert step.cost(step.forward).flops.high == products


def test_a_version_that_does_not_fit_is_told_in_words():
    _, fits = planned()
    found = fits | {"plain": "does not fit: its temporaries take 42.73 GiB of the device's 16 GiB"}
    lines = pod_head.table(found).splitlines()
    assert all(line.endswith(" does not fit") for line in lines[1:7])
    assert lines[-1] == "plain: does not fit: its temporaries take 42.73 GiB of the device's 16 GiB"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (
            "for HLO temporaries (42.73G) exceeds available HBM (15.75G). HLO module: jit__lambda.",
            int(42.73 * GIB),
        ),
        ("for HLO temporaries (1.5T) exceeds available HBM (15.75G).", 1536 * GIB),
        ("for something else", None),
    ],
)
def test_why_the_tpu_compiler_refused_a_program(text, size):
    start = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory"
        " required "
    )
    assert refused_bytes(jax.errors.JaxRuntimeError(start + text)) == size


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--memory", "4", "40"]])
def test_a_head_that_fits_where_plain_jax_does_not(options, capsys):
    arguments = ["--hidden-size", "128", "--vocab-size", "1048576", "--tokens", "8192"]
    assert plan_pod.main([*arguments, "--mesh", "dp=4", "--topology", "v5e:2x2", *options]) == 0
    out = capsys.readouterr().out
    assert (
        "plain: does not fit: its temporaries take 33.00 GiB of the device's 16 GiB" in out
    ) == (not options)
    assert "one pass, " in out


def test_vocabulary_that_the_tensor_axis_does_not_divide():
    sizes = HeadSizes(32, 4095, tied=True)
    mesh = make_parallel_mesh("cp=4,tp=2")
    found = pod_head.plan(pod_head.Step(sizes, 64, jnp.float32, mesh))
    assert found["plain"].flops.low == 3 * 2 * 64 * 32 * 4095
    assert found["two passes"].flops.high == 4 * 2 * 64 * 32 * 2048


@pytest.mark.nightly
def test_table_on_a_described_pod(capsys):
    assert (
        plan_pod.main([*SMALL, "--tokens", "8192", "--mesh", "dp=2,tp=2", "--topology", "v5e:2x2"])
        == 0
    )
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line}
    one, two, plain = (float(rows["temporaries"][i]) for i in (1, 3, 5))
    assert two < one < plain
    assert all(float(rows["computing"][i]) > 0 for i in (1, 3, 5))
    assert "all-reduce over dp" in out


def test_table_on_described_gpus(capsys):
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs takes the extra gpu-aot")
    assert (
        plan_pod.main([*SMALL, "--tokens", "8192", "--mesh", "dp=2,tp=4", "--topology", "h100:8"])
        == 0
    )
    out = capsys.readouterr().out
    assert "links" not in out
    [computing] = [line.split() for line in out.splitlines() if line.startswith("computing")]
    assert all(float(computing[i]) > 0 for i in (1, 3, 5))


def test_a_search_takes_tpus(capsys):
    assert plan_pod.main(["--search", "--model", "qwen3-8b", "--topology", "h100:8"]) == 2
    assert "topology: got 'h100:8', expected TPUs" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_curve_over_budgets(capsys):
    arguments = [
        *SMALL,
        "--mesh",
        "dp=2,tp=2",
        "--topology",
        "v5e:2x2",
        "--memory",
        "0.0001",
        "0.01",
        "0.5",
    ]
    assert plan_pod.main(arguments) == 0
    head, least, two, one = capsys.readouterr().out.splitlines()[3:]
    assert head.startswith("memory given")
    assert "memory: got 107374 bytes, expected at least" in least
    assert "two passes: one pass does not fit the memory" in two
    assert "one pass, 2048 tokens x 16384 columns" in one
    assert float(two.split()[2]) <= 0.01 < float(one.split()[2]) <= 0.5


@pytest.mark.nightly
def test_what_a_step_holds_on_emulated_devices():
    """The parts are the shards' bytes, and the step runs: its loss is that of one device."""
    sizes = ModelSizes(32, 128, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_size=64)
    step = TrainStep(sizes, 8, make_parallel_mesh("fsdp=2,cp=2,tp=2"))
    found = pod_head.plan_train(step)
    names, held = zip(*found.parts.items(), strict=True)
    by_hand = 4 * (
        2 * 32 * 128 // 4
        + 2 * 32 * (3 * 64 + 2 * 4 * 8 + 2 * 2 * 8) // 4
        + 2 * (2 * 32 + 2 * 8)
        + 32
    )
    assert held[:3] == (by_hand, 2 * by_hand, 8 * 4 * 7 + 4)
    assert names[3].startswith("activations")
    assert held[3] == found.step.temp_bytes > 0
    assert found.needed == sum(held)
    assert found.fits is None
    assert "in all" in str(found)
    assert "memory unknown" in str(found)


def loss_of_a_step(step):
    """The loss of a step on numbers that depend on the sizes only."""
    rng = np.random.default_rng(0)
    batch = step.batch

    def put(like, a):
        return jax.device_put(np.asarray(a, like.dtype).reshape(like.shape), like.sharding)

    params = {
        name: put(x, 0.3 * rng.normal(size=x.shape)) for name, x in sorted(step.params.items())
    }
    x, tokens, targets = rng.normal(size=(2, 16)), *rng.integers(0, 128, (2, 2, 16))
    ids = np.ones((2, 16))
    sample_ids = np.array([[0], [1]])
    if step.trees:  # without a branch
        sample_ids = np.array([[0, -1], [1, -1]])
    given = {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": ids,
        "positions": np.cumsum(ids, 1) - 1,
    }
    given |= {
        "loss_mask": ids * (x > 0),
        "sample_ids": sample_ids,
        "advantages": x,
        "old_log_probs": -np.abs(x),
    }
    given |= {"parents": np.zeros((2, 2))} if step.trees else {}
    given = {name: put(getattr(batch, name), a) for name, a in given.items()}
    moments = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return float(
        step.jitted(params, moments, dataclasses.replace(batch, **given, real_last_targets=True))[2]
    )


@pytest.mark.nightly
def test_a_step_on_a_mesh_has_one_devices_loss():
    sizes = ModelSizes(32, 128, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_size=64)
    whole = TrainStep(sizes, 16, make_parallel_mesh("dp=1", devices=jax.devices()[:1]), rows=2)
    parts = TrainStep(sizes, 8, make_parallel_mesh("fsdp=2,cp=2,tp=2"))
    mesh = make_parallel_mesh("cp=2,tp=2", devices=jax.devices()[:4])
    in_turn = TrainStep(sizes, 8, mesh, micro_batches=2, trees=True)
    for other in (parts, in_turn):
        # products of bf16
        assert loss_of_a_step(other) == pytest.approx(loss_of_a_step(whole), rel=1e-2)


V5P = ("fsdp=16,cp=4,tp=8", "v5p:8x8x8")
V6E = ("fsdp=16,cp=2,tp=8", "v6e:16x16")


@pytest.mark.nightly
@pytest.mark.parametrize(("mesh", "topology"), [V5P, V6E])
def test_a_whole_step_of_a_qwen3_8b_fits_a_pod(mesh, topology):
    parallel = pod_head.described_mesh(mesh, topology)
    found = pod_head.plan_train(TrainStep(MODELS["qwen3-8b"], 4096, parallel))
    assert found.fits
    assert found.loss.temp_bytes < found.step.temp_bytes
    # the loss is a small part of the step's time
    assert 0 < found.loss.time.compute < 0.2 * found.step.time.compute


@pytest.mark.nightly
def test_a_whole_step_of_a_qwen3_8b_fits_a_gpu_host():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs takes the extra gpu-aot")
    step = TrainStep(MODELS["qwen3-8b"], 4096, pod_head.described_mesh("fsdp=4,tp=2", "h100:8"))
    memory = step.jitted.lower(*step.arguments).compile(NO_SEARCH).memory_analysis()
    held = sum(step.bytes_held.values())
    assert memory.argument_size_in_bytes == pytest.approx(held, rel=1e-3)
    assert held + memory.temp_size_in_bytes < 80 * GIB


@pytest.mark.nightly
def test_a_model_that_does_not_fit(capsys):
    arguments = ["--train", "--model", "qwen3-8b", "--mesh", "fsdp=2,tp=2", "--topology", "v5e:2x2"]
    assert plan_pod.main(arguments) == 1
    assert "GiB of 16 GiB: it does not fit" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_losses_memory_and_collectives_are_flat_from_8_to_512_chips():
    """On 512 chips a chip holds and sums the same arrays as on 128, and no more memory than on
    8.
    """
    found = []
    sums = []
    for mesh, topology in (
        ("cp=2,tp=4", "2x2x2"),
        ("dp=8,cp=2,tp=4", "4x4x4"),
        ("dp=64,cp=2,tp=4", "8x8x8"),
    ):
        parallel = pod_head.described_mesh(mesh, f"v5p:{topology}")
        step = pod_head.Step(HEADS["qwen3-8b"], 4096, jnp.dtype(jnp.bfloat16), parallel)
        found.append(step.cost(step.one_pass))
        large = [c for c in found[-1].collectives if c.bytes > 2**16]
        sums.append(Counter((c.op, c.axes, c.bytes, c.in_loop) for c in large))
        assert not any(c.in_loop for c in large)
        # a device sends an array once to a neighbour, and twice to sum it
        sent = sum(c.bytes * (2 if c.op == "all-reduce" else 1) for c in large)
        assert 0 < sent <= 2 * 4 * 4096 * (4096 + 151936 // 4)  # dhidden and dkernel in f32
    assert sums[1] == sums[2]
    for a in found[1:]:
        assert a.temp_bytes < found[0].temp_bytes + 0.01 * GIB


@pytest.mark.nightly
def test_a_large_head_on_many_chips(capsys):
    assert (
        plan_pod.main(
            ["--model", "qwen3-8b", "--mesh", "dp=8,cp=8,tp=8", "--topology", "v5p:8x8x8"]
        )
        == 0
    )
    rows = {
        line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines() if line
    }
    assert float(rows["temporaries"][3]) < 0.27 < 0.8 < float(rows["temporaries"][5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--mesh", "dp=3", "--topology", "v5e:2x2"],
            "plan_pod: mesh: got sizes 3=3 in 'dp=3', expected 4 devices",
        ),
        (["--mesh", "xx=4", "--topology", "v5e:2x2"], "plan_pod: mesh: got axis 'xx'"),
        (
            ["--topology", "v99:2x2"],
            "plan_pod: topology: got 'v99:2x2', expected one like v5p:8x8x8",
        ),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert plan_pod.main([*SMALL, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


BAD = {
    "--topology": (
        "v5p:0x2x4",
        "v5p:-2x2x4",
        "v5p",
        ":2x2",
        "v5p:9999x9999x9999",
        "v5p:2x2x4 ",
        "",
    ),
    "--tokens": ("-5", "0", "1.5", "x", "4294967296", "²", "9" * 5000),
    "--rows": ("0",),
    "--hidden-size": ("-1",),
    "--vocab-size": ("1e5",),
    "--memory": ("-1", "0", "nan", "inf", "1e300", "a"),
}


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in BAD.items() for value in values]
)
def test_a_bad_value_is_named_beside_its_flag(flag, value, capsys):
    """Libtpu ends the process with SIGFPE where a topology has a size of 0."""
    with pytest.raises(SystemExit) as stopped:
        plan_pod.main([*SMALL, f"{flag}={value}"])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"plan_pod: error: argument {flag}: got {value!r}, expected ")


def ran(*arguments):
    """The command in a process of its own, which knows nothing of the tests' environment."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TPU", "ALLOW", "LIBTPU"))
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=kept, capture_output=True, text=True, cwd=ROOT, check=False)


def test_help_is_quick_and_describes_every_flag():
    """No module that takes long to import is read for it."""
    code = "import sys; from examples.planner.plan_pod import parse\n"
    code += (
        "try: parse(['--help'])\nfinally: sys.exit(bool({'jax', 'numpy', 'libtpu'} &"
        " set(sys.modules)))"
    )
    found = ran("-c", code)
    assert found.returncode == 0, found.stderr
    described = re.findall(r"^  (--[\w-]+)(.*(?:\n {4,}.*)*)", found.stdout, re.MULTILINE)
    assert len(described) == 18
    for flag, rest in described:
        assert re.search(r"(  |\n +)[A-Za-z]", rest), flag
    assert found.stderr == ""


@pytest.mark.nightly
def test_nothing_of_libtpu_is_printed(tmp_path, monkeypatch):
    """Nor of a compilation cache, which cannot hold programs for devices that are not there."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    mesh = ("--mesh", "dp=2,tp=2", "--topology", "v5e:2x2", "--memory", "0.5")
    for _ in range(2):
        found = ran("-m", "examples.planner.plan_pod", *SMALL, *mesh)
        assert found.returncode == 0
        assert without_gpu_plugin(found.stderr) == ""
        assert "unknown" not in found.stdout


def test_a_missing_plugin_for_gpus_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax_cuda12_plugin", None)
    assert plan_pod.main([*SMALL, "--mesh", "tp=8", "--topology", "h100:8"]) == 2
    missing = "jax-cuda12-plugin is missing, expected `pip install jax-cuda12-plugin`"
    assert capsys.readouterr().err == f"plan_pod: {missing}\n"


def test_missing_libtpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert plan_pod.main(SMALL) == 2
    assert capsys.readouterr().err == "plan_pod: libtpu is missing, expected `pip install libtpu`\n"


@pytest.mark.parametrize(
    "arguments", [[], ["--model", "gpt2", "--hidden-size", "8"], ["--hidden-size", "8"]]
)
def test_one_way_to_name_the_sizes(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan_pod.main(arguments)
    assert stopped.value.code == 2
    assert "expected --model, or" in capsys.readouterr().err
