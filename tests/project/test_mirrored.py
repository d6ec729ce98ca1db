"""Tests are in the folder of what they test, and what they share is in tests/support."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def imported(path):
    """The modules that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_test_file_imports_another():
    tests = {path.stem for path in TESTS.rglob("test_*.py")}
    shared = {
        str(path): {name.split(".")[-1] for name in imported(path)} & tests
        for path in TESTS.rglob("*.py")
    }
    assert {path: names for path, names in shared.items() if names} == {}


def test_each_file_lies_in_a_folder():
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]
    assert [path.name for path in (TESTS / "support").glob("test_*.py")] == []


def test_no_two_files_share_a_name():
    """pytest imports test files, and these import what they share, by the name without the
    folder.
    """
    names = [path.name for path in TESTS.rglob("*.py") if path.parent.name != "oracle"]
    assert sorted({*names}) == sorted(names)
