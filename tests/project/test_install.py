"""jaxppo installed from a wheel and editable: with its requirements alone, and beside another
module `sharding`.
"""

import re
import shutil
import sys
import tarfile
import tomllib
import zipfile

import pytest
from installed import KINDS, ROOT, pytest_in, requirements, run, succeed, with_jaxppo

# A project that has a module `sharding` of its own, under pytest with the plugin.
FOREIGN = """
import jaxppo, sharding

def test_it(parallel_mesh, assert_mesh_invariant):
    assert sharding.mine == 1
    assert isinstance(parallel_mesh, jaxppo.sharding.ParallelMesh)
    assert {type(parallel_mesh).__module__, assert_mesh_invariant.__module__} == {
        "jaxppo_sharding.mesh", "jaxppo_sharding.testing"
    }
"""


@pytest.fixture(
    scope="module", params=[KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.nightly)]
)
def python(request, built, tmp_path_factory):
    return with_jaxppo(tmp_path_factory.mktemp("env") / "venv", built[1], request.param, "pytest")


def test_the_wheel_holds_both_packages_a_pytest_plugin_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
    sources = {
        str(path.relative_to(ROOT))
        for name in ("jaxppo", "sharding")
        for path in ROOT.glob(f"{name}/**/*.py")
    }
    typed = {"jaxppo/py.typed", "sharding/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == sources | typed | {
        "pytest_jaxppo.py"
    }
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert sorted(requirements(built[1])) == ["jax", "jaxtyping", "numpy"]


def test_the_links_of_the_readme_lead_to_the_repository(built):
    """A package index shows README alone: a relative link, and its picture, would be broken
    there.
    """
    with zipfile.ZipFile(built[1]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        shown = wheel.read(name).decode().split("\n\n", 1)[1]
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    files = home.replace("github.com", "raw.githubusercontent.com")
    assert f"]({files}/main/docs/figures/overview.svg)" in shown
    back = shown.replace(f"{files}/main/", "").replace(f"{home}/blob/main/", "")
    assert back.strip() == (ROOT / "README.md").read_text().strip()


def test_the_sdist_holds_the_tests_and_what_they_compare_with(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/golden/verl.npz",
    } <= names
    assert not [
        name for name in names if "__pycache__" in name or name.startswith((".venv", "runs/"))
    ]


@pytest.mark.nightly
def test_smoke(python, tmp_path):
    for name in ("smoke.py", "typed_user.py"):
        shutil.copy(ROOT / "tests" / "support" / name, tmp_path)
    assert succeed(python, "smoke.py", cwd=tmp_path) == "fine\n"


def test_the_pytest_plugin_is_there_and_enters_no_run_that_does_not_name_it(python, tmp_path):
    unwanted = "{'jax', 'jaxppo', 'pytest_jaxppo'}"
    (tmp_path / "test_0.py").write_text(
        f"import sys\ndef test_it():\n    assert not {unwanted} & {{*sys.modules}}"
    )
    assert "1 passed" in pytest_in(tmp_path, python, "test_0.py")
    (tmp_path / "test_1.py").write_text(
        "def test_it(parallel_mesh):\n    assert parallel_mesh.mesh.size == 2"
    )
    assert "6 passed" in pytest_in(
        tmp_path, python, "test_1.py", "-p", "pytest_jaxppo", "--emulated-devices", "2"
    )


def test_a_project_with_a_module_named_sharding_under_pytest(python, tmp_path):
    """`test_import.py` has the other ways of finding it."""
    (tmp_path / "sharding.py").write_text("mine = 1\n")
    (tmp_path / "test_0.py").write_text(FOREIGN)
    assert "1 passed" in pytest_in(
        tmp_path, python, "test_0.py", "-p", "pytest_jaxppo", "--emulated-devices", "1"
    )


def test_a_missing_sharding_is_named(built, tmp_path):
    """The wheel's folder `jaxppo` alone, as somebody might copy it."""
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(
            tmp_path, [name for name in wheel.namelist() if not name.startswith("sharding/")]
        )
    (tmp_path / "sharding.py").write_text("mine = 1\n")
    done = run(sys.executable, "-c", "import jaxppo.sharding", cwd=tmp_path)
    assert "ImportError: sharding: got no package at" in done.stderr
