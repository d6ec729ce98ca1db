"""Every dotted name in the text of pages, README and CHANGELOG is one that a reader can type
behind `jaxppo.`.
"""

import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import jaxppo
import sharding

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
]
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
DOTTED = re.compile(r"`\.?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?=\W)[^`\n]*`")
FILES = (".py", ".md", ".json", ".jsonl", ".html", ".yaml")
PEERS = {"tunix.experimental"}  # a package of Tunix, not `jaxppo.integrations.tunix`
# variables of the pages that are called like a module
VARIABLES = {
    "batch": "jaxppo.RolloutBatch",
    "segments": "jaxppo.sharding.Segments",
    "trees": "jaxppo.batch.token_trees.TokenTrees",
}


def first_words():
    """The names of all modules, and what `jaxppo` exports: such a word promises a name of ours."""
    words = {*jaxppo.__all__, "jaxppo"}
    for package in (jaxppo, sharding):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            words.add(module.name.rpartition(".")[2])
    return words


def resolves(name):
    """Whether `jaxppo.name`, or the attribute of a variable, is there."""
    first, _, rest = name.partition(".")
    if first in VARIABLES and resolves(f"{VARIABLES[first]}.{rest}"):
        return True
    parts = name.removeprefix("jaxppo.").split(".")
    here = jaxppo
    path = "jaxppo"
    for part in parts:
        path = f"{path}.{part}"
        if dataclasses.is_dataclass(here) and part in {
            field.name for field in dataclasses.fields(here)
        }:
            return True  # what lies below a field is another class's
        if isinstance(here, property):
            return True
        if not hasattr(here, part):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        here = getattr(here, part)
    return True


def names_in(text, words):
    names = [match[1] for match in DOTTED.finditer(BLOCK.sub("", text))]
    return [
        n for n in names if n.split(".")[0] in words and not n.endswith(FILES) and n not in PEERS
    ]


@pytest.fixture(scope="module")
def words():
    return first_words()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_a_page(page, words):
    unknown = [name for name in names_in(page.read_text(), words) if not resolves(name)]
    assert not unknown, f"{page.name}: no such name in jaxppo: {', '.join(dict.fromkeys(unknown))}"


def test_a_wrong_name_is_seen(words):
    text = (
        "See `advantages.grpo(...)`, `staleness.weights`, `advantages.nothing` and `Head.of`; `x.y`"
        " is not ours."
    )
    assert [name for name in names_in(text, words) if not resolves(name)] == [
        "staleness.weights",
        "advantages.nothing",
    ]


def test_what_dir_shows_is_what_is_exported():
    shown = {name for name in dir(jaxppo) if not name.startswith("_")}
    assert shown == {*jaxppo.__all__}
