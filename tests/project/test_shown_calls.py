"""Calls as pages and examples show them: what they show is what users copy."""

import json
import re

import pytest
from pages import DOCS, PAGES

EXAMPLES = sorted((DOCS.parent / "examples").rglob("*.py"))
SOURCES = [
    *(page for page in PAGES if page.name != "CHANGELOG.md"),
    *EXAMPLES,
    DOCS / "first_loss.ipynb",
]


def code_of(path):
    """The text of a file; of a notebook that of its cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_estimators_get_the_groups_of_a_batch(path):
    """With `group_ids` alone the parts of a cut rollout count as rollouts of their own: see
    `RolloutBatch.groups`.
    """
    assert re.findall(r"advantages\.\w+\([^()]*\.group_ids\b", code_of(path)) == []


def test_some_page_shows_it():
    shown = r"advantages\.\w+\([^()]*\*\*\w+\.groups\b"
    assert sum(len(re.findall(shown, code_of(path))) for path in SOURCES) > 8
