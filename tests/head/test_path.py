"""docs/path_of_a_gradient.md names the functions that a traced gradient runs through."""

import ast
import re
from pathlib import Path

import pytest
from traced_path import ROOT, gradient, traced, types_of

PAGE = (ROOT / "docs" / "path_of_a_gradient.md").read_text()
# run on accelerators, on meshes with FSDP, for losses that are not token-local, and for heads that
# are quantised
ELSEWHERE = {
    "stats_with_kept_logits",
    "chunk_of_kept",
    "one_pass_in_groups",
    "sweep_in_eighths",
    "scattered",
}
ELSEWHERE |= {"quantized_operands", "quantized_product"}


def named():
    """(file, name) of all names on the page.

    A file belongs to the names before it, back to the previous file.
    """
    found = []
    waiting = []
    for text in re.findall(r"`([^`]+)`", PAGE):
        if not text.endswith(".py"):
            waiting.append(text)
            continue
        found += [
            (text, name)
            for name in waiting
            if re.fullmatch(r"[A-Za-z_][\w.]*", name) and name != "shard_map"
        ]
        waiting = []
    return found


def defined(path: Path):
    """The functions and classes of a file, methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return names


@pytest.fixture(scope="module")
def entered():
    """The functions that two gradients run through, one in one pass and one in two."""
    return traced(gradient()) | traced(gradient(memory=2**17))


def test_each_name_exists_where_the_page_says():
    anywhere = {name for path in (ROOT / "jaxppo" / "head").rglob("*.py") for name in defined(path)}
    lost = [(file, name) for file, name in named() if name not in defined(ROOT / file) | anywhere]
    assert lost == []


def test_a_gradient_runs_through_them(entered):
    names = {name for _, name in entered} | {name.removesuffix(".__init__") for _, name in entered}
    functions = {
        name for _, name in named() if name.rsplit(".", 1)[-1][0].islower() or name.startswith("_")
    }
    assert {name for name in functions if name not in names} <= ELSEWHERE


def test_files_that_a_gradient_runs_through_stand_on_the_page(entered):
    heads = {file for file, _ in entered if file.startswith("jaxppo/head/")}
    small = {"__init__"}
    assert {file for file in heads if file not in PAGE and Path(file).stem not in small} == set()


def test_the_head_stays_small(entered):
    """If it grows above these numbers, somebody should read it as a whole again."""
    assert len({x for x in traced(gradient()) if x[0].startswith("jaxppo/head/")}) <= 95
    assert len({x for x in entered if x[0].startswith("jaxppo/head/")}) <= 120
    assert len(types_of(ROOT / "jaxppo" / "head")) <= 23
