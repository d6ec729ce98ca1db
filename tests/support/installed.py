"""Builds jaxppo and installs it into virtual environments that hold its requirements and nothing
else.
"""

import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
KINDS = ["wheel", "editable"]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command, cwd="/", **env):
    """The finished process, its output as text; without this process's PYTHONPATH."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")
    }
    environment = inherited | {"JAX_PLATFORMS": "cpu"} | env
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment
    )


def succeed(*command, **options):
    """Runs a command and returns what it prints; the test fails if the command does."""
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pytest_in(folder, python, *arguments):
    """Runs pytest on a folder without this tree's plugins and configuration; returns what it
    prints.
    """
    (folder / "pytest.ini").touch()
    return succeed(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, cwd=folder)


def build(folder):
    """(sdist, wheel), the wheel built from what the sdist holds."""
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def requirements(wheel):
    """The requirements in the wheel's metadata, without extras."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(file.read(name)).get_all("Requires-Dist")
    wanted = [Requirement(line) for line in lines]
    return [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]


def environment(folder, names):
    """Makes an environment with the named distributions of this one and their requirements;
    returns its interpreter.
    """
    succeed(sys.executable, "-m", "venv", "--without-pip", folder)
    site = next(folder.glob("lib/python*/site-packages"))
    for distribution in _closure(names).values():
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


def install(python, *what):
    """Installs into that environment without any package index."""
    succeed(
        *PIP,
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        *what,
    )


def with_jaxppo(folder, wheel, kind, *more):
    """Makes an environment with jaxppo (wheel or tree), its requirements and `more`; returns its
    interpreter.
    """
    editable = kind == "editable"
    tools = ["hatchling", "hatch-fancy-pypi-readme", "editables"] if editable else []
    python = environment(folder, [*requirements(wheel), *more, *tools])
    install(python, *(["-e", ROOT] if editable else [wheel]))
    return python


def _closure(names):
    found = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in found:
            found[name] = metadata.distribution(name)
            wanted = map(Requirement, found[name].requires or ())
            waiting += [
                r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})
            ]
    return found
