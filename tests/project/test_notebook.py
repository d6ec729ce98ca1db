"""The notebook runs from the top, and only its source is tracked. `make docs` shows its results."""

import json
import os
import subprocess
import sys

import pytest
from pages import DOCS

NOTEBOOK = json.loads((DOCS / "first_loss.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
AFTER = """
assert {name: len(x) for name, x in mib.items()} == {"plain JAX": 4, "policy_loss_from_hidden": 4}
assert mib["plain JAX"][-1] > 1.9 * mib["plain JAX"][-2] > 7 * mib["policy_loss_from_hidden"][-1]
assert abs(float(on_mesh(kernel, rows)) - float(loss)) < 1e-5
"""


def test_no_result_is_tracked():
    """Results, times, and the names of authors and tools are no part of the source."""
    for cell in NOTEBOOK["cells"]:
        assert cell["metadata"] == {}
        assert cell["cell_type"] != "code" or (cell["outputs"], cell["execution_count"]) == (
            [],
            None,
        )
    assert set(NOTEBOOK["metadata"]) == {"kernelspec", "language_info"}
    assert NOTEBOOK["metadata"]["language_info"] == {"name": "python"}
    assert (
        json.dumps(NOTEBOOK, indent=1, ensure_ascii=False) + "\n"
        == (DOCS / "first_loss.ipynb").read_text()
    )


@pytest.mark.nightly
def test_it_runs_from_the_top(tmp_path):
    """As a script, without Jupyter, in an environment where nobody has set up devices."""
    (tmp_path / "notebook.py").write_text("\n".join([*CODE, AFTER]))
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(DOCS.parent), "MPLBACKEND": "agg"}
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert second == f"{first.split(',')[0]} on 8 devices"


def test_ten_lines():
    """From the samples to the loss, blank lines left out, and the gradient."""
    lines = CODE[1].splitlines()
    end = next(i for i, line in enumerate(lines) if "value_and_grad" in line)
    assert len([line for line in lines[:end] if line]) <= 10
