"""What happens at import."""

import ast
import contextlib
import functools
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code, *paths):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=paths[0]
    )


DOOR = """
import jaxppo, sharding, sys
from jaxppo.sharding import multihost, testing
from jaxppo.sharding.testing import factorings

assert all(getattr(jaxppo.sharding, name) is getattr(sharding, name) for name in sharding.__all__)
assert multihost is sharding.multihost is jaxppo.sharding.multihost
assert factorings is testing.factorings is sys.modules["sharding.testing"].factorings
assert all(getattr(testing, name).__doc__ for name in testing.__all__) and not hasattr(testing, "factoring")
import jaxppo.sharding.multihost
assert jaxppo.sharding.multihost is multihost
assert not [name for name in sys.modules if name.startswith("jaxppo_sharding")]
"""

# A project with a module of that name; `order` says which it imports first.
FOREIGN = """
{order}
import sys
from jaxppo.sharding import multihost
from jaxppo.sharding.testing import factorings

assert sys.modules["sharding"] is sharding and sharding.mine == 1
parallel = jaxppo.make_parallel_mesh("dp=1")
assert jaxppo.batch.rollout_batch.ParallelMesh is jaxppo.ParallelMesh is jaxppo.sharding.ParallelMesh is type(parallel)
assert {{type(parallel).__module__, factorings.__module__, multihost.__name__}} == {{
    "jaxppo_sharding.mesh", "jaxppo_sharding.testing", "jaxppo_sharding.multihost"
}}
samples = [jaxppo.Sample([1, 2, 3], response_start=1)]
assert jaxppo.RolloutBatch.from_samples(samples, row_length=4, parallel=parallel).tokens.shape == (1, 4)
"""


def test_the_door_gives_the_one_copy():
    done = python(DOOR, ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("sharding.py", "import jaxppo, sharding"),
        ("sharding/__init__.py", "import sharding, jaxppo"),
    ],
)
def test_a_project_may_have_a_module_named_sharding(tmp_path, name, order):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine: int = 1\n")
    done = python(FOREIGN.format(order=order), tmp_path, ROOT)
    assert done.returncode == 0, done.stderr


# Importing jaxppo loads next to nothing. A first loss loads no other losses, no readers of compiled
# programs, of configurations and of engines, and not Pallas.
LATE = """
import jaxppo, sys

def loaded(*within):
    return sorted(name for name in sys.modules if name.startswith(within))

print(loaded("jaxppo", "sharding"))
from jaxppo import PPO, Head, PolicyLossConfig, RolloutBatch, Sample, accumulate_gradients, finalize_metrics
from jaxppo import policy_loss_from_hidden
others = [name for name in loaded("jaxppo.") if name in [f"jaxppo.{name}" for name in jaxppo.__all__]]
within = "sharding.audit.", "jaxppo.integrations", "jaxppo.batch.prefixes", "jaxppo.batch.engines", "jaxppo.losses."
within += "jax.extend", "jax._src.pallas"
print(others + loaded(*within))
"""
HAS_ALL = """
import jaxppo, numpy, sharding, sys

assert {*jaxppo.__all__} <= {*dir(jaxppo)} and {*jaxppo.sharding.__all__} <= {*dir(jaxppo.sharding)}
assert jaxppo.advantages.grpo
assert jaxppo.step.entropy.__name__ == "jaxppo.step.entropy"  # a module that is in no list
assert not hasattr(jaxppo, "losse") and not hasattr(jaxppo, "__main__")
assert not hasattr(jaxppo.sharding, "sys_") and not hasattr(sharding, "Audi")
jaxppo.sharding.audit(lambda x: x @ x, numpy.ones((2, 2)))
from jaxppo.integrations import miles, slime, verl
assert verl.config_of({}) == jaxppo.presets.verl_default()
assert slime.config_of({}) == miles.config_of({}) == jaxppo.presets.slime_default()
from sharding.audit import audit, hlo
import sharding.audit.trips
assert sharding.audit is jaxppo.sharding.audit is audit  # the function, and not the folder that it lies in
"""


def test_what_is_used_late_is_loaded_late():
    done = python(LATE, ROOT)
    assert done.returncode == 0, done.stderr
    at_once = ["jaxppo", *(f"jaxppo.base{name}" for name in ("", ".late", ".modules", ".stacked"))]
    there = [f"jaxppo.{name}" for name in ("policy_losses", "sharding")]
    of_policies = "compute doors hooks parts policy_tokens token_loss unusable_tokens"
    losses = [f"jaxppo.losses.{name}" for name in of_policies.split()]
    assert done.stdout == f"{at_once}\n{there + losses}\n"


def test_what_loads_late_is_there():
    done = python(HAS_ALL, ROOT)
    assert done.returncode == 0, done.stderr


def test_a_type_checker_sees_what_a_program_gets():
    import jaxppo

    tree = ast.parse(Path(jaxppo.__file__).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    places = {alias.name: node.module for node in typed.body for alias in node.names}
    assert set(places) == set(jaxppo.__all__)
    for name, module in places.items():
        assert getattr(jaxppo, name) is pkgutil.resolve_name(f"{module}.{name}"), name


# Names that are first used while JAX traces, after a patch of JAX that lasts as long as the call.
IN_A_TRACE = """
import jax, jaxppo, jax.numpy as jnp
from flax import nnx

layer, product = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jax.lax.dot_general

@jax.jit
@jax.grad
def loss(hidden):
    jax.lax.dot_general = lambda *args, **options: product(*args, **options)
    try:
        return jaxppo.log_probs_from_hidden(hidden, jaxppo.Head.of(layer), jnp.zeros((1, 3), int)).log_probs.sum()
    finally:
        jax.lax.dot_general = product

hidden = jnp.ones((1, 3, 4))
assert (first := loss(hidden)).any() and (first == loss(hidden)).all()
jax.clear_caches()
assert (first == loss(hidden)).all()
"""


def test_names_may_be_used_first_in_a_trace():
    pytest.importorskip("flax")
    done = python(IN_A_TRACE, ROOT)
    assert done.returncode == 0, done.stderr


# What each import loads beyond those before it.
ADDED = """
import sys

def packages():
    return {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names

import jax, jaxtyping, numpy
needed = packages()
import sharding
of_sharding = packages()
from jaxppo import *
print(*of_sharding - needed)
print(*packages() - needed)
"""


@functools.cache
def added():
    """The packages that sharding loads beyond what both need, and those of all of jaxppo too."""
    done = python(ADDED, ROOT)
    assert done.returncode == 0, done.stderr
    return [{*line.split()} for line in done.stdout.splitlines()]


def test_sharding_knows_nothing_of_jaxppo():
    assert added()[0] == {"sharding"}


def test_all_is_the_table_of_contents():
    import jaxppo

    assert len(set(jaxppo.__all__)) == len(jaxppo.__all__) < 40
    assert "metrics" not in jaxppo.__all__  # what everyone calls a loss's second result
    for name in jaxppo.__all__:
        assert getattr(jaxppo, name).__doc__, name
    assert jaxppo.__version__[0].isdigit()


def test_modules_are_where_their_names_say():
    """So that `import jaxppo.NAME` and `from jaxppo.NAME import ...` work, as pages write them."""
    import jaxppo

    modules = {name: x for name in jaxppo.__all__ if inspect.ismodule(x := getattr(jaxppo, name))}
    assert {name: x.__name__ for name, x in modules.items()} == {
        name: f"jaxppo.{name}" for name in modules
    }
    done = python("\n".join(f"import jaxppo.{name}" for name in modules), ROOT)
    assert done.returncode == 0, done.stderr


def written_paths():
    """What pages, docstrings and examples write as jaxppo.a.b, a module of jaxppo first."""
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst")]
    places += [
        *(ROOT / "docs").glob("*.ipynb"),
        *(ROOT / "jaxppo").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]
    text = "\n".join(place.read_text() for place in places)
    return sorted({*re.findall(r"(?<![\w/.-])jaxppo(?:\.[A-Za-z]\w*)+", text)})


def test_paths_that_pages_write_can_be_imported():
    paths = written_paths()
    assert len(paths) > 200
    for path in paths:
        parts = path.split(".")
        found = None
        depth = 0
        with contextlib.suppress(ModuleNotFoundError):
            for depth in range(1, len(parts) + 1):
                found = importlib.import_module(".".join(parts[:depth]))
            depth += 1
        for name in parts[depth - 1 :]:
            found = getattr(found, name)
            assert not inspect.ismodule(found), f"{path} is a module at {found.__name__}"


def test_it_imports_what_it_asks_for_and_no_framework():
    """Where flax, optax and the like are installed, too."""
    assert added()[1] == {"jaxppo", "sharding"}
