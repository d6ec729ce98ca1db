"""What is written: the length of README, paths in pages, words."""

import ast
import re
from pathlib import Path

import pytest
from test_docs import DOCS, PAGES

FOLDERS = ("jaxppo", "sharding", "tests", "docs", "examples", "benchmarks")


def sources(*endings):
    """(path, text) of this project's own files, this one left out."""
    paths = [*DOCS.parent.glob("*.*"), *(path for folder in FOLDERS for path in (DOCS.parent / folder).rglob("*.*"))]
    return [(path, path.read_text()) for path in paths if path.suffix in endings and path != Path(__file__)]


def test_the_readme_is_short():
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_are_there(page):
    """Links, `code` that is a path of this project, and the modules that commands run."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    paths = [page.parent / link for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", text)]
    paths += [DOCS.parent / name for name in re.findall(rf"(?<![\w./])((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])", text)]
    modules = re.findall(r"python -m ((?:examples|benchmarks)\.\w+)", text)
    paths += [DOCS.parent / f"{module.replace('.', '/')}.py" for module in modules]
    assert not [path for path in paths if not path.exists() and path.name != "PART.json"]


def docstrings(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (found := ast.get_docstring(node)):
            yield found


def test_plain_words():
    """A docstring begins with what a thing is; "likewise" makes a reader look for what is meant."""
    begins = re.compile(r"(Of|The same of|What is static)\b")
    code, texts = sources(".py"), sources(".py", ".md", ".rst")
    found = [f"{path}: {x[:60]}" for path, text in code for x in docstrings(text) if begins.match(x)]
    found += [f"{path}: likewise" for path, text in texts if re.search(r"\blikewise\b", text, re.IGNORECASE)]
    assert not found, "\n".join(found)
