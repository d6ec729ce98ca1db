"""The pytest plugin, in separate pytest runs: what it catches, what it refuses, and that it is
inactive by default.
"""

from pathlib import Path

import jax
import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]

# A mean over masked tokens and a shift, and each with a mistake that no single device shows.
FUNCTIONS = """
import jax, jax.numpy as jnp, pytest
from jax.sharding import PartitionSpec as P
from jaxppo.sharding import redistribute, shift_left
from sharding import ShardAxes, shard_call

def mean(axes, x, mask):
    total, count = (x * mask).sum(), mask.sum()
    return axes.psum(total, axes.tokens) / axes.psum(count, axes.tokens)

def mean_of_means(axes, x, mask):
    part = (x * mask).sum() / mask.sum()
    return jax.lax.pmean(part, axes.tokens) if axes.tokens else part

def rows_mean(parallel, x, mask, fn=mean):
    return shard_call("rows_mean", fn, parallel, {"x": x, "mask": mask}, lambda p: ([p.tokens_spec] * 2, P()))

def local_mean(parallel, x, mask):
    return rows_mean(parallel, x, mask, mean_of_means)

def missing_psum(parallel, x, mask):
    \"\"\"Over data alone; check_vma=False, where JAX itself does not see it.\"\"\"
    axes = ShardAxes() if parallel is None else parallel.axes
    def sums(x, mask):
        return axes.psum((x * mask).sum(), axes.data) / axes.psum(mask.sum(), axes.data)
    if parallel is None:
        return sums(x, mask)
    specs = (parallel.tokens_spec,) * 2
    return jax.shard_map(sums, mesh=parallel.mesh, in_specs=specs, out_specs=P(), check_vma=False)(x, mask)

def shift(parallel, x, by=shift_left):
    ids = jnp.ones(x.shape, "int32")
    to = lambda x, ids, source, target: redistribute(x, parallel, source, target, segment_ids=ids, num_segments=1)
    layout = parallel.context_layout if parallel else "contiguous"
    inside = to(ids, ids, "contiguous", layout)
    return to(by(to(x, ids, "contiguous", layout), parallel, inside), inside, layout, "contiguous")

def whole(x, parallel, ids):
    return shift_left(x, parallel, segment_ids=ids, num_segments=1)

def local(x, parallel, ids):
    def fn(axes, x):
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))
    return shard_call("local", fn, parallel, {"x": x}, lambda p: ([p.tokens_spec], p.tokens_spec))

X = jnp.arange(1.0, 129).reshape(8, 16)
MASK = jnp.where(X < 30, 1.0, X % 4 == 0)
"""
TESTS = """
from functions import *

@pytest.mark.parametrize("fn", [rows_mean, local_mean, missing_psum], ids=lambda fn: fn.__name__)
def test_mean(parallel_mesh, assert_mesh_invariant, fn):
    assert_mesh_invariant(fn, X, MASK, meshes=[parallel_mesh])

@pytest.mark.parametrize("by", [whole, local], ids=lambda fn: fn.__name__)
def test_shift(parallel_mesh, assert_mesh_invariant, by):
    assert_mesh_invariant(lambda parallel, x: shift(parallel, x, by), X, meshes=[parallel_mesh])

def test_by_default_over_every_factoring(assert_mesh_invariant):
    assert_mesh_invariant(rows_mean, X, MASK)
    with pytest.raises(AssertionError, match="cp=2"):
        assert_mesh_invariant(missing_psum, X, MASK)

@pytest.mark.parametrize("parallel_mesh", ["dp=2,cp=2", ("cp=4", "zigzag")], indirect=True)
def test_chosen(parallel_mesh):
    assert parallel_mesh.mesh.size == 4 and parallel_mesh.context_layout in ("contiguous", "zigzag")

def test_layouts(context_layout, request):
    assert request.node.name == f"test_layouts[{context_layout}]"
"""


@pytest.fixture
def inner(pytester, monkeypatch):
    """Runs pytest in another process, with the plugin, also where an older installation does not
    bring it.

    With a configuration of its own, or pytest takes that of a folder above the temporary ones.
    """
    pytester.makeini("[pytest]")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return lambda *args: pytester.runpytest_subprocess(
        "-p", "pytest_jaxppo", "-p", "no:cacheprovider", *args
    )


def failed(result):
    return {
        line.split()[1].partition("::")[2] for line in result.outlines if line.startswith("FAILED")
    }


def sizes(case):
    """dp, cp, tp and the layout of a test's name."""
    mesh, _, layout = case[case.index("dp=") :].rstrip("]").partition("-")
    return (*(int(size[3:]) for size in mesh.split(",")), layout.partition("-")[0])


@pytest.mark.nightly
def test_what_one_device_does_not_show_is_found_on_meshes(pytester, inner):
    pytester.makepyfile(functions=FUNCTIONS, test_it=TESTS)
    result = inner("--emulated-devices", "4", "--mesh-cases", "pairwise", "-vrf", "-n", "1")
    ran = [line for line in result.outlines if " PASSED " in line or " FAILED " in line]
    cases = {sizes(line.rstrip()) for line in ran if "test_mean" in line}
    assert {case[3] for case in cases if case[1] > 1} == {
        "contiguous",
        "zigzag",
        "zigzag_per_segment",
        "striped",
    }
    found = {
        name: {sizes(case) for case in failed(result) if name in case}
        for name in ("local_mean", "missing_psum")
    }
    assert found["local_mean"] == {case for case in cases if case[0] * case[1] > 1}
    assert found["missing_psum"] == {case for case in cases if case[1] > 1}
    shifts = {case for case in failed(result) if case.startswith("test_shift")}
    assert {sizes(case) for case in shifts} == {case for case in cases if case[1] > 1}
    assert all("local" in case for case in shifts)
    assert len(failed(result)) == sum(map(len, found.values())) + len(shifts)
    assert len(ran) == 5 * len(cases) + 7
    result.stdout.fnmatch_lines(["*AssertionError: mesh *cp*differ, most at*expected*"])


def test_the_configuration_says_it_too_and_the_sample_is_pairwise(pytester, inner):
    pytester.makeini("[pytest]\nemulated_devices = 8\nmesh_cases = pairwise")
    pytester.makepyfile("def test_it(parallel_mesh):\n    print('case', parallel_mesh)")
    result = inner("--collect-only", "-q")
    cases = [line for line in result.outlines if "dp=" in line]

    def here(*options):
        """Cases only, in this process, whose devices are enough and have started."""
        assert jax.device_count() == 8
        options = (
            "--collect-only",
            "-q",
            "-p",
            "pytest_jaxppo",
            "-p",
            "no:cacheprovider",
            *options,
        )
        return pytester.runpytest_inprocess(*options)

    def pairs(case):
        traits = [x if isinstance(x, str) else x > 1 for x in sizes(case)]
        return {(i, j, traits[i], traits[j]) for i in range(4) for j in range(i)}

    every = [line for line in here("--mesh-cases", "all").outlines if "dp=" in line]
    assert len(every) == 28
    assert set.union(*map(pairs, cases)) == set.union(*map(pairs, every))
    assert len(cases) < 10
    assert "dp=1,cp=1,tp=2-contiguous" in here("--emulated-devices", "2").stdout.str()


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [2, 4])
def test_devices_that_jax_has_already(pytester, inner, devices):
    """Devices of another plugin, started before any conftest.py: enough are taken, fewer are
    refused.
    """
    started = (
        f"import jax\njax.config.update('jax_num_cpu_devices', {devices})\nassert"
        f" jax.device_count() == {devices}"
    )
    pytester.makepyfile(
        starts=started,
        test_it="def test_it(parallel_mesh):\n    assert parallel_mesh.mesh.size == 3",
    )
    pytester.syspathinsert()
    result = inner("-p", "starts", "--emulated-devices", "3")
    if devices == 4:
        result.assert_outcomes(passed=6)
    else:
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(
            ["*emulated_devices: got 3, expected at most 2, the devices that JAX had started*"]
        )


@pytest.mark.nightly
def test_a_conftest_that_sets_fewer(pytester, inner):
    pytester.makeconftest("import jax\njax.config.update('jax_num_cpu_devices', 2)")
    pytester.makepyfile("def test_it(assert_mesh_invariant):\n    pass")
    result = inner("--emulated-devices", "4")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*emulated_devices: got 4, expected at most 2, *"])


@pytest.mark.nightly
def test_the_devices_that_are_there(pytester, inner):
    pytester.makeconftest("import jax\njax.config.update('jax_num_cpu_devices', 2)")
    pytester.makepyfile("def test_it(parallel_mesh):\n    assert parallel_mesh.mesh.size == 2")
    inner("--emulated-devices", "0").assert_outcomes(passed=6)


UNUSED = """
import sys

def test_nothing_of_ours_or_of_jax_is_loaded():
    assert [name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "jaxppo", "sharding")] == []
"""


@pytest.mark.nightly
def test_the_packing_of_a_model_needs_no_devices(pytester):
    pytester.makepyfile("""
        import jax.numpy as jnp, pytest

        def model(table, batch):
            return table[batch.tokens]

        def blind(table, batch):
            return jnp.cumsum(table[batch.tokens], axis=1)

        @pytest.mark.parametrize("fn", [model, blind], ids=lambda fn: fn.__name__)
        def test_mine(assert_packing_invariant, fn):
            assert_packing_invariant(fn, jnp.arange(20.0).reshape(10, 2), vocab_size=10)
    """)
    result = pytester.runpytest_subprocess("-p", "pytest_jaxppo", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*depend on what is packed beside it (*"])


def test_nobody_asked(pytester, inner):
    pytester.makepyfile(
        UNUSED + "\ndef test_it(parallel_mesh): pass\ndef test_that(assert_mesh_invariant): pass"
    )
    result = inner()
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        ["emulated_devices: got none, expected a number of devices: emulated_devices in*"]
    )


@pytest.mark.nightly
def test_a_users_own_fixtures_and_options_are_theirs(pytester, inner):
    pytester.makeconftest(
        "import pytest\n@pytest.fixture(params=[3, 4])\ndef parallel_mesh(request): return"
        " request.param"
    )
    pytester.makepyfile("def test_it(parallel_mesh):\n    assert parallel_mesh in (3, 4)")
    inner("--emulated-devices", "2").assert_outcomes(passed=2)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("ini", "error"),
    [
        ("emulated_devices = many", "emulated_devices: got 'many', expected a number of devices*"),
        (
            "emulated_devices = 2\nmesh_cases = some",
            "mesh_cases: got 'some', expected 'all' or 'pairwise'",
        ),
    ],
)
def test_bad_configuration(pytester, inner, ini, error):
    pytester.makeini(f"[pytest]\n{ini}")
    result = inner()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{error}"])
