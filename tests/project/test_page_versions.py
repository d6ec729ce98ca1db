"""What names a default of another project says for which version, in pages, docstrings and
comments: defaults move.
"""

import ast
import io
import re
import tokenize

import pytest
from pages import DOCS, PAGES

PEERS = (
    "verl slime miles TRL Tunix NeMo-RL SkyRL prime-rl AReaL ROLL OpenRLHF Tinker vLLM SGLang"
    " MaxText simply Liger"
)
PEERS_BY_WORD = {
    peer: re.compile(rf"(?<![\w./-])(?<!with ){re.escape(peer)}(?![\w-])") for peer in PEERS.split()
}
MONTHS = "January February March April May June July August September October November December"
# 0.9.1, "at 1dda039b", "of August 2026"
VERSION = (
    rf"(?:\d+\.\d+(?:\.\w+)*|(?:at )?`?[0-9a-f]{{7,8}}\b|(?:of |in )?(?:{'|'.join(MONTHS.split())})"
    r" 20\d\d)"
)
ABOUT = re.compile(r"\bdefaults?\b(?! to)")
PAGES_OF_USERS = [page for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]


def sentences(text):
    """The sentences of a page outside its blocks of code, and the rows of its tables."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", prose):
        for part in re.split(r"\n(?=[|-])", paragraph):
            whole = " ".join(part.split())
            yield from (
                [whole] if whole.startswith("|") else re.split(r"(?<=[.:]) (?=[A-Z*`])", whole)
            )


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


def prose_of(source):
    """The docstrings and the comments of a file, each entry of a list of arguments a paragraph
    of its own.
    """
    comments = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if token.start[0] == last + 1:
                text = f"{comments.pop()} {text}"
            comments.append(text)
            last = token.start[0]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [
        ast.get_docstring(x) or "" for x in ast.walk(ast.parse(source)) if isinstance(x, documented)
    ]
    return "\n\n".join([*(re.sub(r"\n(?= +[\w*, ]+: )", "\n\n", doc) for doc in docs), *comments])


ROOT = DOCS.parent
SOURCES = [
    path
    for folder in ("jaxppo", "examples", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_a_default_in_a_docstring_or_a_comment_has_a_version():
    """`Value` said that verl clips by 0.2, which is 0.5 since, and `top_k_divergence` that TRL
    drops the tail.
    """
    found = {}
    for path in SOURCES:
        source = path.read_text()
        if ABOUT.search(source) and (missing := without_version(prose_of(source))):
            found[str(path.relative_to(ROOT))] = missing
    assert found == {}


def test_the_prose_of_a_file():
    lines = ['"""One."""', "x = 1  # verl's", "# default", "", "# slime", "def f():"]
    lines += ['    """Two.', "", "    Args:", "      a: 1", '    """', ""]
    source = "\n".join(lines)
    assert prose_of(source).split("\n\n") == [
        "One.",
        "Two.",
        "Args:",
        "  a: 1",
        "verl's default",
        "slime",
    ]


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
    assert {DOCS / "migrating.md", DOCS / "from_trl.md", DOCS.parent / "README.md"} <= {
        *PAGES_OF_USERS
    }
