"""The page of methods: each call that it names is there, with its options, and so is each test.

Nothing is run.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
from pages import DOCS

import jaxppo

TESTS = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (DOCS / "methods.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| method |", "| metric |"))
]
METHODS = [row for row in ROWS if len(row) == 4]


@functools.cache
def functions_of(name):
    """The names of a file's functions."""
    return {
        node.name
        for node in ast.parse((TESTS / name).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def find(name):
    """What a public name stands for, in jaxppo or one of its modules."""
    found = jaxppo
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(f"{found.__name__}.{part}")
    return found


def options_of(what):
    """The parameters of a function or of a dataclass."""
    fields = (
        {field.name for field in dataclasses.fields(what)}
        if dataclasses.is_dataclass(what)
        else set()
    )
    return fields | {*inspect.signature(what).parameters}


def test_the_page_has_methods():
    assert len(METHODS) > 60
    assert {len(row) for row in ROWS} == {2, 4}  # those that are not built have a reason alone


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row[0])
def test_calls_and_tests_are_there(row):
    _, calls, systems, test = row
    assert systems
    for call in re.findall(r"`([^`]+)`", calls):
        name, options = re.fullmatch(r"([\w.]+)(?:\(([\w=, ]+)\))?", call).groups()
        if name.startswith("jnp."):
            continue
        wanted = {option.strip(" =") for option in options.split(",")} if options else set()
        assert wanted <= options_of(find(name)), call
    if test != "-":
        path, name = re.fullmatch(r"`([\w/]+\.py)::(\w+)`", test).groups()
        assert name in functions_of(path)
