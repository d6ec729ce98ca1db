"""The versions of Python and JAX that are supported, each in a fresh environment with the wheel:
nightly.
"""

import functools
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from installed import ROOT, run, succeed

LOWEST = ("jax==0.10.0", "numpy==2.0.0", "jaxtyping==0.2.36")  # as pyproject.toml has them
NEWEST = ("jax",)  # whatever the index has, supported or not
VERSIONS = [
    ("3.11", LOWEST),
    ("3.11", ("jax==0.10.*",)),
    ("3.12", ("jax==0.10.*",)),
    ("3.12", ("jax==0.11.*",)),
    ("3.12", ("jax==0.12.*",)),
    ("3.13", ("jax==0.10.*",)),
    ("3.13", ("jax==0.11.*",)),
    ("3.13", ("jax==0.12.*",)),
    ("3.13", NEWEST),
]
SELECTION = [
    "audit",
    "from_hidden",
    "from_logits",
    "jax_internals",
    "mesh",
    "packing",
    "policy_config",
    "policy_loss",
    "program",
    "segments",
    "sums",
    "trips",
]


@functools.cache
def interpreter(version):
    """A Python of that version on this machine, None where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found = [
        shutil.which(f"python{version}"),
        *sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")),
    ]
    for path in filter(None, found):
        asked = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True)
        if asked.returncode == 0:
            return path
    return None


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("version", "wanted"), VERSIONS, ids=lambda x: x if isinstance(x, str) else x[0]
)
def test_version(built, tmp_path, version, wanted):
    base = interpreter(version)
    if base is None:
        pytest.skip(f"Python {version} is not installed here")
    succeed(base, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    offered = run(*pip, "download", "-q", "--no-deps", "-d", tmp_path / "found", *wanted)
    if offered.returncode:
        pytest.skip(
            f"no index here has {' '.join(wanted)} for Python {version}:"
            f" {offered.stderr.strip()[-200:]}"
        )
    succeed(*pip, "install", "-q", built[1], *wanted, "pytest", "hypothesis", "chex")
    tests = tmp_path / "tests"
    shutil.copytree(ROOT / "tests", tests, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert succeed(python, tests / "support" / "smoke.py", cwd=tmp_path) == "fine\n"
    pytest_in = functools.partial(
        succeed, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path
    )
    (tmp_path / "test_plugin.py").write_text(
        "def test_it(parallel_mesh):\n    assert parallel_mesh.mesh.size == 2"
    )
    assert pytest_in("test_plugin.py", "-p", "pytest_jaxppo", "--emulated-devices", "2").startswith(
        "...... "
    )
    pytest_in(*(next(tests.rglob(f"test_{name}.py")) for name in SELECTION))


def test_the_selection_is_of_files_that_exist():
    names = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    assert {*SELECTION} <= names


def test_the_lowest_versions_are_those_that_the_package_asks_for():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dependencies = ["jax>=0.10", "jaxtyping>=0.2.36", "numpy>=2.0"]' in text
    assert LOWEST == ("jax==0.10.0", "numpy==2.0.0", "jaxtyping==0.2.36")


def test_the_table_in_the_docs_is_what_is_tested():
    rows = [
        line.strip("| ").split(" | ")
        for line in (ROOT / "docs" / "versions.md").read_text().splitlines()
    ]
    header = next(row for row in rows if row[0] == "JAX")
    supported = {
        (python.removeprefix("Python "), f"jax=={row[0]}.*")
        for row in rows
        for python, word in zip(header, row, strict=False)
        if word == "yes"
    }
    assert supported == {
        (python, *wanted) for python, wanted in VERSIONS if wanted not in (LOWEST, NEWEST)
    }


def test_the_nightly_workflow_sets_up_every_python_that_is_tested():
    """It set up 3.11 alone, and the others were skipped."""
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    pythons = re.search(r"python-version: \|\n((?: +3\.\d+\n)+)", workflow)[1].split()
    assert {*pythons} == {python for python, _ in VERSIONS}
    with (ROOT / "pyproject.toml").open("rb") as file:
        classifiers = tomllib.load(file)["project"]["classifiers"]
    named = [
        name.rpartition(" ")[2]
        for name in classifiers
        if name.startswith("Programming Language :: Python :: 3.")
    ]
    assert {*named} == {*pythons}
