"""jaxppo as installed, from a wheel and editable: with nothing but what it asks for, and beside another `sharding`."""

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from installed import KINDS, ROOT, pytest_in, requirements, run, succeed, with_jaxppo

NAMES = ["sharding.py", "sharding/__init__.py"]

# What both a script and a test of such a project do; `order` says which it imports first.
FOREIGN = """
{order}
import sys

def test_both():
    assert sharding.mine == 1, sharding
    assert sys.modules["sharding"] is sharding
    parallel = jaxppo.make_parallel_mesh("dp=1")
    assert jaxppo.batch.ParallelMesh is jaxppo.ParallelMesh is type(parallel)
    assert type(parallel).__module__ == "jaxppo_sharding.mesh"
    samples = [jaxppo.Sample([1, 2, 3], response_start=1)]
    for _ in range(2):
        assert jaxppo.RolloutBatch.from_samples(samples, row_length=4, parallel=parallel).tokens.shape == (1, 4)

test_both()
print("fine")
"""
ORDERS = ["import jaxppo, sharding", "import sharding, jaxppo"]


@pytest.fixture(scope="module", params=KINDS)
def python(request, built, tmp_path_factory):
    return with_jaxppo(tmp_path_factory.mktemp("env") / "venv", built[1], request.param, "pytest")


def test_the_wheel_holds_both_packages_a_pytest_plugin_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
    sources = {str(path.relative_to(ROOT)) for name in ("jaxppo", "sharding") for path in ROOT.glob(f"{name}/**/*.py")}
    typed = {"jaxppo/py.typed", "sharding/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == sources | typed | {"pytest_jaxppo.py"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert sorted(requirements(built[1])) == ["jax", "jaxtyping", "numpy"]


def test_the_sdist_holds_the_tests_and_what_they_compare_with(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py", "tests/golden/verl.npz"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "runs/"))]


def test_smoke(python, tmp_path):
    for name in ("smoke.py", "typed_user.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    assert succeed(python, "smoke.py", cwd=tmp_path) == "fine\n"


def test_one_copy_of_every_class_outside_the_tree(python, tmp_path):
    code = """
import jaxppo, sharding, sys
from pathlib import Path
print(Path(sharding.__file__).parent.parent == Path(jaxppo.__file__).parent.parent)
print(all(getattr(jaxppo._sharding, name) is getattr(sharding, name) for name in sharding.__all__))
print([name for name in sys.modules if name.startswith("jaxppo_sharding")])
"""
    assert succeed(python, "-c", code, cwd=tmp_path) == "True\nTrue\n[]\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_project_may_have_a_module_named_sharding(python, tmp_path, name):
    project(tmp_path, name)
    for i, order in enumerate(ORDERS):
        (tmp_path / f"test_{i}.py").write_text(FOREIGN.format(order=order))
        assert succeed(python, f"test_{i}.py", cwd=tmp_path) == "fine\n"


def test_the_pytest_plugin_is_there_and_loads_nothing_until_asked(python, tmp_path):
    (tmp_path / "test_0.py").write_text("import sys\ndef test_it():\n    assert not {'jax', 'jaxppo'} & {*sys.modules}")
    assert "1 passed" in pytest_in(tmp_path, python, "test_0.py")
    (tmp_path / "test_1.py").write_text("def test_it(parallel_mesh):\n    assert parallel_mesh.mesh.size == 2")
    assert "6 passed" in pytest_in(tmp_path, python, "test_1.py", "--emulated-devices", "2")


@pytest.mark.parametrize("name", NAMES)
def test_such_a_project_under_pytest(python, tmp_path, name):
    project(tmp_path, name)
    (tmp_path / "test_0.py").write_text(FOREIGN.format(order=ORDERS[0]))
    theirs = "def test_it(parallel_mesh):\n    assert type(parallel_mesh).__module__ == 'jaxppo_sharding.mesh'"
    (tmp_path / "test_1.py").write_text(theirs)
    assert "1 passed" in pytest_in(tmp_path, python, "test_0.py")
    assert "1 passed" in pytest_in(tmp_path, python, "test_1.py", "--emulated-devices", "1")


def test_a_missing_sharding_is_named(python, built, tmp_path):
    """The wheel's jaxppo alone, as a careless vendoring leaves it."""
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(tmp_path, [name for name in wheel.namelist() if not name.startswith("sharding/")])
    (tmp_path / "sharding.py").write_text("mine = 1\n")
    done = run(python, "-c", "import jaxppo", cwd=tmp_path)
    assert "ImportError: sharding: got no package at" in done.stderr


def project(folder: Path, name: str) -> None:
    """A project that has a module of its own named sharding."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine: int = 1\n")
