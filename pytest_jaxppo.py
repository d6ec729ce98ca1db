"""A pytest plugin: emulated devices, meshes to run a test on, and assertions that numbers do not
depend on the mesh or on the packing.

The plugin is installed with jaxppo, and enters a run only where it is named: on the command line
(`pytest -p pytest_jaxppo --emulated-devices 8`) or in the configuration,

    [tool.pytest.ini_options]
    addopts = "-p pytest_jaxppo"
    emulated_devices = 8     # 0: the devices that are there, such as those of a TPU
    mesh_cases = "pairwise"  # or "all", the default

The CPU then appears as that many devices, even to the first conftest.py. Tests may ask for

- `parallel_mesh`: a `ParallelMesh`. The test runs once for every way to write the number as dp x cp
  x tp. If cp is above 1, it runs for every context layout too. With "pairwise" it runs for a sample
  of these cases. A case has four traits: whether dp is 1, whether cp is 1, whether tp is 1, and the
  layout. Any two traits that occur together in some case do so in the sample. To run on a single
  mesh:
  `@pytest.mark.parametrize("parallel_mesh", ["dp=2,cp=4"], indirect=True)`, or
  `[("dp=2,cp=4", "zigzag")]`.
- `context_layout`: the name of a context layout; the test runs for each.
- `assert_mesh_invariant`: `jaxppo.sharding.testing.assert_mesh_invariant`, over every dp x cp x tp
  of JAX's devices unless `meshes=` names others.
- `assert_packing_invariant`: `jaxppo.assert_packing_invariant`, for the model in front of a loss.
  It needs no devices and no option:

    def test_my_model(assert_packing_invariant):
        assert_packing_invariant(my_hidden_states, params, vocab_size=1000)     # my_hidden_states(params, batch)

This example fails if the loss is summed over the data axes alone, if it is a mean of the shards'
means, or if it shifts values only within a shard:

    def test_my_loss(parallel_mesh, assert_mesh_invariant):
        assert_mesh_invariant(my_loss, tokens, meshes=[parallel_mesh])     # my_loss(parallel, tokens)

This is a module of its own because importing `jaxppo` imports JAX, before `--emulated-devices` has
been read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jaxppo import ParallelMesh

Case = tuple[str, str]  # a mesh, such as "dp=2,cp=2,tp=2", and a context layout


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("jaxppo", "jaxppo: tests on meshes of devices")
    count = "devices that the CPU appears as; 0: the devices that are there"
    cases = "what parallel_mesh runs over: all (the default) or pairwise"
    group.addoption("--emulated-devices", type=int, metavar="N", help=count)
    group.addoption("--mesh-cases", choices=("all", "pairwise"), help=cases)
    parser.addini("emulated_devices", count)
    parser.addini("mesh_cases", cases, default="all")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Emulates the devices before a conftest.py can start JAX."""
    if count := _asked(early_config):
        _emulate(count)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    count = _asked(config)
    if count == 0:
        import jax

        count = jax.device_count()
    sample = config.known_args_namespace.mesh_cases or config.getini("mesh_cases")
    if sample not in ("all", "pairwise"):
        raise pytest.UsageError(f"mesh_cases: got {sample!r}, expected 'all' or 'pairwise'")
    config.pluginmanager.register(_fixtures(count, sample), "pytest_jaxppo fixtures")


def _asked(config: pytest.Config) -> int | None:
    """The number of devices that was asked for, or None."""
    value = config.known_args_namespace.emulated_devices
    value = config.getini("emulated_devices") if value is None else value
    if value in (None, ""):
        return None
    if not str(value).isdigit():
        raise pytest.UsageError(
            f"emulated_devices: got {value!r}, expected a number of devices, or 0 for those there"
        )
    return int(value)


def _emulate(count: int) -> None:
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has started already, so its devices must be enough
        if message := _too_few(count):
            raise pytest.UsageError(message) from None


def _too_few(count: int) -> str | None:
    """Starts JAX, and returns the error message if it has fewer devices."""
    import jax

    if jax.device_count() >= count:
        return None
    return (
        f"emulated_devices: got {count}, expected at most {jax.device_count()}, the devices that"
        " JAX had started with before; let no plugin or conftest.py use JAX, or set its number of"
        " devices, ahead of that"
    )


def _fixtures(count: int | None, sample: str) -> object:
    """A plugin with the fixtures. The cases that they run for are known only now."""
    layouts, cases = ([], []) if count is None else _layouts_and_cases(count, sample)

    def mesh(case: str | Case) -> ParallelMesh:
        if count is None:
            expected = (
                "a number of devices: emulated_devices in pytest's configuration or"
                " --emulated-devices"
            )
            pytest.fail(f"emulated_devices: got none, expected {expected}", pytrace=False)
        if message := _too_few(count):
            pytest.fail(message, pytrace=False)
        import jax

        from jaxppo import make_parallel_mesh

        description, layout = (case, "contiguous") if isinstance(case, str) else case
        return make_parallel_mesh(description, context_layout=layout, devices=jax.devices()[:count])

    class Fixtures:
        @pytest.fixture(
            params=cases or [("", "")],
            ids=lambda case: case if isinstance(case, str) else "-".join(case),
        )
        def parallel_mesh(self, request: pytest.FixtureRequest) -> ParallelMesh:
            """A ParallelMesh: all factorings of the emulated devices as dp x cp x tp, in all
            context layouts.
            """
            return mesh(request.param)

        @pytest.fixture(params=layouts or [""])
        def context_layout(self, request: pytest.FixtureRequest) -> str:
            """The name of a context layout: each of them."""
            mesh(f"dp={count}")
            return str(request.param)

        @pytest.fixture
        def assert_mesh_invariant(self) -> Callable[..., Any]:
            """jaxppo.sharding.testing.assert_mesh_invariant, by default over all factorings of
            JAX's devices.
            """
            from jaxppo.sharding.testing import assert_mesh_invariant

            mesh(f"dp={count}")
            return assert_mesh_invariant

        @pytest.fixture
        def assert_packing_invariant(self) -> Callable[..., Any]:
            """jaxppo.assert_packing_invariant: a model keeps packed samples apart."""
            from jaxppo import assert_packing_invariant

            return assert_packing_invariant

    return Fixtures()


def _layouts_and_cases(count: int, sample: str) -> tuple[list[str], list[Case]]:
    from jaxppo.sharding import LAYOUTS
    from jaxppo.sharding.testing import factorings

    layouts = list(LAYOUTS)
    cases = [
        (mesh, name)
        for mesh in factorings(count)
        for name in (layouts if "cp=1," not in mesh else layouts[:1])
    ]
    return layouts, cases if sample == "all" else list(_pairwise(cases))


def _pairwise(cases: list[Case]) -> Iterator[Case]:
    """Few cases, greedily chosen, with every pair of traits that occurs in any case."""
    pairs = {case: frozenset(combinations(_traits(*case), 2)) for case in cases}
    missing = frozenset().union(*pairs.values())
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        yield best


def _traits(mesh: str, layout: str) -> list[str]:
    """For each of dp, cp and tp whether it is 1, and the layout."""
    return [size if size.endswith("=1") else size[:2] for size in mesh.split(",")] + [layout]
