"""A page that names a default of another project says for which version: defaults move."""

import re

import pytest
from pages import DOCS, PAGES

PEERS = "verl slime miles TRL Tunix NeMo-RL SkyRL prime-rl AReaL ROLL OpenRLHF Tinker vLLM SGLang MaxText simply Liger"
PEERS_BY_WORD = {peer: re.compile(rf"(?<![\w./-])(?<!with ){re.escape(peer)}(?![\w-])") for peer in PEERS.split()}
MONTHS = "January February March April May June July August September October November December"
# 0.9.1, "at 1dda039b", "of August 2026"
VERSION = rf"(?:\d+\.\d+(?:\.\w+)*|(?:at )?`?[0-9a-f]{{7,8}}\b|(?:of |in )?(?:{'|'.join(MONTHS.split())}) 20\d\d)"
ABOUT = re.compile(r"\bdefaults?\b(?! to)")
PAGES_OF_USERS = [page for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]


def sentences(text):
    """The sentences of a page outside its blocks of code, and the rows of its tables."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", prose):
        for part in re.split(r"\n(?=[|-])", paragraph):
            whole = " ".join(part.split())
            yield from [whole] if whole.startswith("|") else re.split(r"(?<=[.:]) (?=[A-Z*`])", whole)


def without_version(text):
    """(peer, sentence) for each default of a peer on a page that has no version of that peer."""
    found = []
    for sentence in sentences(text):
        if ABOUT.search(sentence):
            for peer, word in PEERS_BY_WORD.items():
                dated = rf"{word.pattern}(?:'s|\]\([^)]*\))?[^.|\n]{{0,40}}?{VERSION}"
                if word.search(sentence) and not re.search(dated, text):
                    found.append((peer, sentence[:90]))
    return found


@pytest.mark.parametrize("page", PAGES_OF_USERS, ids=lambda page: page.name)
def test_a_default_of_another_project_has_a_version(page):
    assert without_version(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        ("The bound is 0.2, verl's default.", ["verl"]),
        ("| DAPO, verl's default |\n| slime's default |", ["verl", "slime"]),
        ("This page follows verl 0.9.1.\n\nThe bound is 0.2, verl's default.", []),
        ("The bound is TRL's default.\n\nIt follows verl 0.9.1.", ["TRL"]),
        ("0.3 is prime-rl's default of September 2026.", []),
        ("It follows slime at 624b824a. In slime it is 0.2 by default.", []),
        ("verl has no such loss. By default it is off.", []),
        ("```python\n# verl's default\n```", []),
    ],
)
def test_the_check_itself(text, peers):
    assert [peer for peer, _ in without_version(text)] == peers


def test_pages_that_are_walked():
    assert {DOCS / "migrating.md", DOCS / "from_trl.md", DOCS.parent / "README.md"} <= {*PAGES_OF_USERS}
