"""What keeps a nightly run going, and the summary that it leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import programs
import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip(reason="no such card")
def test_not_here(): pass
"""
WHOLE = """
import pytest
pytest.importorskip("nothing", reason="nothing is there")
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--search-seed", type=int)
"""
OF_SEED = """
import os
import pytest

@pytest.mark.parametrize("seed", [os.environ["SEARCH_SEED"]])
def test_seed(seed): pass
"""

OF_DAY_AND_NIGHT = """
import pytest

@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [1, 2, 3])
def test_table(x, y): pass

@pytest.mark.nightly
def test_night(): pass
"""


def run(folder, paths, *options, workers=2):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), *options, str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.nightly
def test_workers_draw_from_one_seed(tmp_path):
    (tmp_path / "test_seed.py").write_text(OF_SEED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = run(
        tmp_path, [ROOT / "tests", ROOT / "tests" / "support"], "--nightly", "-p", "conftest"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "workers",
    [pytest.param(0, marks=pytest.mark.nightly), 1, pytest.param(2, marks=pytest.mark.nightly)],
)
def test_a_run_by_day_says_how_many_cases_it_left_out(tmp_path, workers):
    """Four of six cases have a new value; -k chooses before anything is left out."""
    (tmp_path / "test_table.py").write_text(OF_DAY_AND_NIGHT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = nightly\n")
    paths = [ROOT / "tests", ROOT / "tests" / "support"]
    done = run(tmp_path, paths, "-p", "conftest", workers=workers)
    assert "4 of 7 cases ran; --nightly runs the others too" in done.stdout, (
        done.stdout + done.stderr
    )
    if workers == 0:
        chosen = run(tmp_path, paths, "-p", "conftest", "-k", "not night", workers=0)
        assert "4 of 6 cases ran" in chosen.stdout
        every_case = run(tmp_path, paths, "-p", "conftest", "--nightly", workers=0)
        assert "ran; --nightly" not in every_case.stdout


def test_programs_are_let_go_where_there_are_many(monkeypatch):
    double = jax.jit(lambda x: 2 * x)
    monkeypatch.setattr(programs, "SECONDS", 0)
    for most, left in ((10**9, 1), (0, 0)):
        monkeypatch.setattr(programs, "MOST_REGIONS", most)
        double(1)
        programs.let_go()
        assert double._cache_size() == left


@pytest.mark.nightly
def test_summary_of_a_run_in_two_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX")
    (tmp_path / "test_few.py").write_text(TESTS)
    (tmp_path / "test_whole.py").write_text(WHOLE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = run(
        tmp_path,
        [ROOT],
        "--search-seed",
        "7",
        "-p",
        "tests.support.nightly_summary",
        "--summary",
        "few",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "few-summary.json").read_text())
    assert found["outcomes"] == {"passed": 1, "failed": 1, "skipped": 2}
    assert found["failed"] == ["test_few.py::test_bad"]
    assert found["skipped"] == {"Skipped: no such card": 1, "Skipped: nothing is there": 1}
    assert found["files"]["test_few.py"]["tests"] == 3
    assert found["search_seed"] == 7
    assert found["exit_code"] == 1
    assert "assert False" in (tmp_path / "few-failed.txt").read_text()
    ran = {*(tmp_path / "few-ran.txt").read_text().splitlines()}
    assert {"failed test_few.py::test_bad", "passed test_few.py::test_good"} <= ran
    text = (tmp_path / "few-summary.md").read_text()
    for part in (
        "1 failed, 1 passed, 2 skipped",
        "- test_few.py::test_bad",
        "1 x Skipped: no such card",
        "seed 7`",
    ):
        assert part in text
    assert "XLA_FLAGS: `--xla_cpu_max_isa=AVX`" in text
