"""The search for plans: bounds by arithmetic, the order of the search, what is kept, and what is
printed and drawn.
"""

import dataclasses
import math
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.planner import plan_pod
from examples.planner.plan_bounds import Candidate, Work, bound, candidates, least_flops
from examples.planner.plan_compilers import KINDS, Found, Kept, compile_candidate
from examples.planner.plan_report import GIB, draw, limits, table, work_of
from examples.planner.plan_search import BEST, Search, run
from examples.planner.pod_sizes import MODELS, ModelSizes
from examples.planner.pod_step import TrainStep
from sharding import make_parallel_mesh
from sharding.audit.flops import count_flops
from sharding.devices import known_device
from sharding.testing import factorings

ROOT = Path(__file__).parents[2]
V5P, V6E, V5E = (known_device(kind) for kind in ("TPU v5", "TPU v6e", "TPU v5 lite"))
SMALL = ModelSizes(32, 128, layers=3, heads=4, kv_heads=2, head_dim=8, mlp_size=64)
TINY = Work("tiny", dataclasses.replace(SMALL, layers=2), "v5e:2x2", V5E, 4, 2, 64)

ONE_ROW = dataclasses.replace(TINY, rows=1)  # of which there are two plans


def qwen(topology, device, devices, rows, row_length, model="qwen3-8b"):
    return Work(model, MODELS[model], topology, device, devices, rows, row_length)


# What libtpu 0.0.52 found: GiB of a device, its milliseconds computing, and in collectives, those
# beside other work included.
COMPILED = [
    (qwen("v5p:8x8x8", V5P, 512, 16, 16384), Candidate(fsdp=16, cp=4, tp=8), 2.95, 558, 104),
    (qwen("v6e:16x16", V6E, 256, 16, 8192), Candidate(fsdp=16, cp=2, tp=8), 2.77, 276, 193),
    (qwen("v5p:4x4x4", V5P, 64, 16, 8192), Candidate(fsdp=16, tp=4), 5.84, 1379, 225),
]


@pytest.mark.parametrize(("work", "candidate", "gib", "compute", "collectives"), COMPILED)
def test_bounds_are_below_what_was_compiled(work, candidate, gib, compute, collectives):
    found = bound(work, candidate)
    assert 0.5 * gib < found.bytes / GIB < gib
    assert found.compute < compute
    assert found.collectives < collectives
    assert found.ms < compute + collectives
    assert 0.7 < found.expected / (compute + collectives) < 1.4


@st.composite
def plans(draw):
    """A small model, eight devices, and one of its plans."""
    heads, kv = draw(st.sampled_from([(2, 1), (4, 2), (8, 8)]))
    head_dim = draw(st.sampled_from([4, 8]))
    layers = draw(st.integers(1, 4))
    sizes = ModelSizes(32, 64, layers, heads, kv, head_dim, 48, tied=draw(st.booleans()))
    rows = draw(st.integers(1, 16))
    saved = draw(st.sampled_from([None, 0.3, 0.7]))
    work = Work("small", sizes, "none", V5P, 8, rows, 16, saved)
    return work, draw(st.sampled_from(list(candidates(work)) or [None]))


@given(plans())
def test_what_is_held_is_what_the_step_holds(drawn):
    work, c = drawn
    if c is None:
        return
    step = TrainStep(
        work.sizes,
        16 // c.cp,
        make_parallel_mesh(c.mesh),
        c.rows(work),
        c.micro_batches,
        trees=c.trees,
    )
    held = bound(work, c).held
    exact = sum(step.bytes_held.values())
    assert held <= exact <= held + 8 * 4 * c.micro_batches * c.rows(work)  # the numbers of segments
    rows = math.ceil(work.rows * (1 - work.saved)) if c.trees else work.rows
    assert step.rows * c.micro_batches * c.dp * c.fsdp >= rows


@pytest.mark.every(2)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_flops_are_those_of_the_traced_step(micro_batches):
    work = Work("small", SMALL, "none", V5P, 1, 4, 16)
    c = Candidate(micro_batches=micro_batches)
    parallel = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
    step = TrainStep(SMALL, 16, parallel, c.rows(work), micro_batches)
    assert count_flops(step.jitted.trace(*step.arguments).jaxpr).low == least_flops(work, c)


def test_candidates_are_the_meshes_that_divide_the_model():
    work = qwen("v5p:4x4x4", V5P, 64, 128, 8192)
    found = list(candidates(work))
    meshes = {(c.dp * c.fsdp, c.cp, c.tp) for c in found}
    expected = {
        tuple(int(part.split("=")[1]) for part in text.split(",")) for text in factorings(64)
    }
    assert meshes == {mesh for mesh in expected if mesh[2] <= 8}  # key heads
    assert len(found) == len(set(found)) == 350
    assert all(c.dp * c.fsdp * c.micro_batches * c.rows(work) == 128 for c in found)
    as_trees = [c for c in candidates(dataclasses.replace(work, saved=0.6)) if c.trees]
    assert {
        c.rows(dataclasses.replace(work, saved=0.6)) * 64 for c in as_trees if c.dp * c.fsdp == 64
    } == {64}


@pytest.mark.nightly
def test_every_layout_of_the_context_axis_lowers_to_one_program():
    """So that a search need not compile them: this attention multiplies whole rows, and its loss
    shifts nothing.
    """

    def lowered(layout):
        step = TrainStep(SMALL, 8, make_parallel_mesh("fsdp=2,cp=2,tp=2", context_layout=layout))
        return step.jitted.lower(*step.arguments).as_text()

    assert lowered("contiguous") == lowered("zigzag")


def found_of(search, c, ratio, needed=None):
    """A record that takes `ratio` of what is expected, and at least the bound."""
    b = search.bound(c)
    times = dict.fromkeys((*KINDS, "overlapped"), 0.0) | {"products": max(b.ms, b.expected * ratio)}
    return Found(c, b.bytes if needed is None else needed, times)


def finished(search, ratio_of):
    """The search when nothing is left to compile."""
    for _ in range(10_000):
        if not (todo := search.open()[0]):
            return search
        assert todo[0] not in search.found
        search.add(found_of(search, todo[0], ratio_of(todo[0])))
    raise AssertionError("the search does not end")


@given(st.floats(1.0, 3.0), st.integers(1, 32))
def test_a_search_whose_guesses_are_in_order_finds_the_best(ratio, rows):
    work = Work("small", SMALL, "none", V5P, 8, rows, 64)
    search = finished(Search(work), lambda c: ratio)
    every = sorted(found_of(search, c, ratio).ms for c in candidates(work))
    assert [f.ms for f in search.best] == pytest.approx(every[:BEST])


@given(st.randoms(use_true_random=False))
def test_nothing_that_a_bound_admits_is_dropped_without_a_word(random):
    work = Work("small", SMALL, "none", V5P, 8, 8, 64)
    search = Search(work)
    finished(search, lambda c: random.uniform(1, 2))
    left = set(candidates(work)) - set(search.found)
    unlikely = set(search.open()[1])
    assert all(search.bound(c).ms >= search.limit for c in left - unlikely)
    if unlikely:
        assert f"not compiled: {len(unlikely)} plans that are expected to be slower" in table(
            search
        )


def test_what_cannot_fit_is_not_compiled():
    work = qwen("v5e:2x2", V5E, 4, 4, 4096)
    assert Search(work).fitting == 0  # 23 GiB of parameters and moments a device at best
    large = qwen("v5e:8x8", V5E, 64, 64, 4096)
    search = Search(large)
    assert 0 < search.fitting < search.considered
    assert set(search.open()[0]) == {
        c for c in candidates(large) if bound(large, c).bytes <= 16 * GIB
    }


def test_the_heads_memory_is_tried_on_the_best_alone():
    work = Work("small", SMALL, "none", V5P, 8, 8, 64)
    search = finished(Search(work, [0.5, 2.0]), lambda c: 1 + c.tp + c.cp)
    tried = {dataclasses.replace(c, memory=None) for c in search.found if c.memory is not None}
    assert tried == {dataclasses.replace(f.candidate, memory=None) for f in search.best}
    assert BEST == len(tried) < len([c for c in search.found if c.memory is None])
    order = [c.memory is not None for c in search.found]
    assert order == sorted(order)


def a_search():
    """Two plans that fit, one that does not, one that the compiler refuses."""
    search = Search(TINY)
    first, second, third, fourth = search.open()[0][:4]
    times = {
        "products": 60.0,
        "elementwise": 20.0,
        "copies": 5.0,
        "kernels": 0.0,
        "collectives": 15.0,
    }
    search.add(Found(second, int(15.5 * GIB), times | {"overlapped": 3.0, "collectives": 90.0}))
    search.add(Found(first, 4 * GIB, times | {"overlapped": 3.0}))
    search.add(Found(third, 20 * GIB, {}, "out of memory"))
    search.add(Found(fourth, None, {}, "no such mesh"))
    return search


def test_the_table_says_what_limits_each_plan():
    search = a_search()
    assert [limits(search, f) for f in search.best] == [
        "compute (products) 60%",
        "sums over devices 51%, memory",
    ]
    head, counts, refused, left, empty, columns, *plans = table(search).splitlines()
    assert refused == "refused: no such mesh"
    assert head == "tiny, 2 rows of 64 tokens per step, v5e:2x2"
    assert counts == f"{search.considered} plans: 0 cannot fit, 4 compiled, 2 of which do not fit"
    assert left == f"the search is not finished: {search.considered - 4} plans may be faster"
    assert (empty, len(plans)) == ("", 4)
    assert columns.split()[:3] == ["ms", "/", "step"]
    assert plans[0] == str(search.best[0].candidate)
    assert plans[1].split()[:8] == ["100", "60", "20", "5", "15", "3", "4.0", "12.0"]


def test_a_picture_is_written(tmp_path):
    draw(a_search(), tmp_path / "plans.png")
    assert (tmp_path / "plans.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_kept_is_read_back_by_the_same_search_alone(tmp_path):
    found = list(a_search().found.values())
    with Kept(tmp_path, TINY) as cache:
        for each in found:
            cache.add(each)
    with (tmp_path / "plans.jsonl").open("a") as file:
        file.write('{"key": "cut sho')
    with Kept(tmp_path, TINY) as cache:
        assert list(cache.read()) == found
        cache.add(found[0])
    with Kept(tmp_path, dataclasses.replace(TINY, model="renamed")) as cache:
        assert list(cache.read()) == [*found, found[0]]
    for other in (dataclasses.replace(TINY, rows=5), dataclasses.replace(TINY, topology="v5e:2x4")):
        with Kept(tmp_path, other) as cache:
            assert list(cache.read()) == []


BAD = {
    "--trees": ("0", "1", "-0.5", "nan", "x"),
    "--search-minutes": ("0", "-1", "inf", "nan", "x"),
    "--step-tokens": ("0", "1e6"),
    "--row-length": ("0", "-8"),
    "--workers": ("0", "a"),
}


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in BAD.items() for value in values]
)
def test_a_bad_value_is_named_beside_its_flag(flag, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan_pod.main(["--search", "--model", "qwen3-8b", f"{flag}={value}"])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"plan_pod: error: argument {flag}: got {value!r}, expected ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt2"], "model: got gpt2, expected one of qwen3-0.6b"),
        (["--hidden-size=8", "--vocab-size=8"], "model: got None, expected one of"),
        (
            ["--model=qwen3-8b", "--step-tokens=100"],
            "--step-tokens: got 100, expected a multiple of the 8192",
        ),
        (["--model=qwen3-8b", "--train"], "--search: got --train beside it"),
    ],
)
def test_a_search_is_of_a_known_model_and_whole_rows(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan_pod.main(["--search", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e:2x2", "topology: got 'v5e:2x2', where no plan of"),
        ("v99:2x2", "topology: got 'v99:2x2', expected one like v5p:8x8x8"),
    ],
)
def test_a_topology_without_a_plan_is_one_line(topology, message, tmp_path, capsys):
    cache = ["--cache", str(tmp_path)]
    assert plan_pod.main(["--search", "--model", "qwen3-8b", "--topology", topology, *cache]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"plan_pod: {message}")
    assert err.count("\n") == 1


def test_the_command_prints_and_draws_what_was_kept(tmp_path, capsys):
    arguments = [
        "--search",
        "--model",
        "qwen3-0.6b",
        "--topology",
        "v5e:4x4",
        "--cache",
        str(tmp_path),
    ]
    arguments += ["--search-minutes", "1e-9"]
    work = work_of(plan_pod.parse(arguments))
    search = Search(work)
    with Kept(tmp_path, work) as cache:
        for c in search.open()[0][:6]:
            search.add(found_of(search, c, 1.5))
            cache.add(search.found[c])
    search.memories = (0.5, 2.0)
    assert plan_pod.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.lstrip().startswith(table(search))
    assert "6 compiled, 0 of which do not fit" in out
    assert (tmp_path / "qwen3-0.6b_v5e_4x4.png").exists()


def test_a_search_ends_with_its_minutes(tmp_path):
    """What is being compiled then is ended too."""
    search = Search(TINY)
    run(search, tmp_path, minutes=0.001, workers=2)
    assert not search.found
    assert (tmp_path / "plans.jsonl").read_text() == ""
    assert not multiprocessing.active_children()


SEARCH = """
import sys
from pathlib import Path
from examples.planner.plan_report import draw, table
from examples.planner.plan_search import Search, run
from test_plan_search import ONE_ROW
if __name__ == "__main__":
    search = Search(ONE_ROW, [0.001])
    run(search, Path(sys.argv[1]))
    print(table(search))
    draw(search, Path(sys.argv[1]) / "plans.png")
"""


@pytest.mark.nightly
def test_a_killed_search_goes_on_where_it_was(tmp_path):
    """Real compilations for four v5e chips: what was kept is not compiled again, and every bound
    holds.
    """
    script = tmp_path / "search.py"
    kept = tmp_path / "plans.jsonl"
    script.write_text(SEARCH)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent), *sys.path])
    }
    command = {
        "args": [sys.executable, str(script), str(tmp_path)],
        "env": environment,
        "cwd": ROOT,
    }
    with subprocess.Popen(**command) as first:
        while first.poll() is None and not (kept.exists() and kept.read_text()):
            time.sleep(0.1)
        first.kill()
    before = kept.read_text().splitlines()[0]
    out = subprocess.run(**command, check=True, capture_output=True, text=True).stdout
    search = Search(ONE_ROW, [0.001])
    with Kept(tmp_path, ONE_ROW) as cache:
        for found in cache.read():
            assert found.candidate not in search.found
            search.add(found)
    assert kept.read_text().startswith(f"{before}\n")
    assert not search.open()[0]
    assert table(search) == out.rstrip("\n")
    assert {dataclasses.replace(f.candidate, memory=None) for f in search.best} == set(
        candidates(ONE_ROW)
    )
    assert (tmp_path / "plans.png").exists()
    for found in search.found.values():
        least = search.bound(found.candidate)
        assert found.times, found.refused
        assert least.bytes <= found.needed
        assert least.compute <= found.ms
        assert least.collectives <= found.times["collectives"] + found.times["overlapped"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "c",
    [Candidate(cp=4), Candidate(fsdp=2, tp=2, trees=True), Candidate(cp=2, tp=2, micro_batches=2)],
)
def test_a_candidate_is_compiled_in_this_process(c):
    """The smallest plan for one described slice, with its times by kind."""
    found = Found(c, **compile_candidate(TINY, c))
    assert found.times, found.refused
    assert found.needed > bound(TINY, c).bytes
    assert found.ms > bound(TINY, c).ms
