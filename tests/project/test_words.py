"""Checks of texts: the length of README, paths in pages, plain words in docstrings."""

import ast
import inspect
import itertools
import json
import re
from pathlib import Path

import pytest
from pages import DOCS, PAGES

from benchmarks.tables import OF_README

FOLDERS = ("jaxppo", "sharding", "tests", "docs", "examples", "benchmarks")


def sources(*endings):
    """(path, text) of this project's own files, this one left out."""
    paths = [
        *DOCS.parent.glob("*.*"),
        *(path for folder in FOLDERS for path in (DOCS.parent / folder).rglob("*.*")),
    ]
    return [
        (path, path.read_text())
        for path in paths
        if path.suffix in endings and path != Path(__file__)
    ]


def test_the_readme_is_short():
    assert len((DOCS.parent / "README.md").read_text().splitlines()) < 170


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_are_there(page):
    """Links, `code` that is a path of this project, and the modules that commands run."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    paths = [page.parent / link for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", text)]
    paths += [
        DOCS.parent / name
        for name in re.findall(rf"(?<![\w./])((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])", text)
    ]
    modules = re.findall(r"python -m ((?:examples|benchmarks)(?:\.\w+)+)", text)
    paths += [DOCS.parent / f"{module.replace('.', '/')}.py" for module in modules]
    assert not [path for path in paths if not path.exists() and path.name != "PART.json"]


def docstrings(text):
    """Those of modules, classes and functions, and the strings that stand below the fields of a
    class.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            lines = (
                x.value
                for x in node.body
                if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
            )
            yield from (x.value.strip() for x in lines if isinstance(x.value, str))


def test_plain_words():
    """Docstrings begin with what a thing is; no text sends its reader back to another sentence
    by a single word.
    """
    begins = re.compile(r"(Of|The same of|What is static)\b")
    code = sources(".py")
    texts = sources(".py", ".md", ".rst")
    found = [
        f"{path}: {x[:60]}" for path, text in code for x in docstrings(text) if begins.match(x)
    ]
    found += [
        f"{path}: likewise"
        for path, text in texts
        if re.search(r"\blikewise\b", text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def test_returns_stand_below_each_other():
    """In Returns, a line is indented as the one above it, unless that one names an entry: Sphinx
    takes another line for a quotation, and ends with an error.
    """
    found = []
    for path, text in sources(".py"):
        for docstring in docstrings(text):
            lines = inspect.cleandoc(docstring).splitlines()
            if "Returns:" not in lines:
                continue
            after = lines[lines.index("Returns:") + 1 :]
            section = itertools.takewhile(lambda line: not line or line.startswith("  "), after)
            for above, line in itertools.pairwise(section):
                begins_entry = re.match(r" *([-*] |[`\w., ]{1,30}:)", above)
                if not begins_entry and indent(line) > indent(above) and above:
                    found.append(f"{path}: {line}")
    assert not found, "\n".join(found)


def indent(line):
    return len(line) - len(line.lstrip())


def test_measured_figures_are_those_of_the_results():
    """README's milliseconds and GiB, from the estimates that
    `python -m benchmarks.head --parts tpu` wrote.
    """
    case = {"head": "qwen3-8b", "mesh": "cp=4,tp=4", "tokens_per_shard": 8192}
    records = json.loads((DOCS.parent / "benchmarks/results/tpu.json").read_text())["records"]
    records = {(r["topology"][:3], r["version"]): r for r in records if case.items() <= r.items()}
    expected = []
    for version in OF_README:
        both = [
            records[chip, version.replace("a fifth", "one pass, a mask")] for chip in ("v5p", "v6e")
        ]
        times = [
            r["fifth_ms"] if version == "a fifth" else r["compute_ms"] + r["collectives_ms"]
            for r in both
        ]
        expected.append(
            [f"{time:.1f} ms" for time in times]
            + [f"{max(r['temporaries_gib'] for r in both):.2f} GiB"]
        )
    rows = re.findall(
        r"^\|.*\| ([\d.]+ ms) \| ([\d.]+ ms) \| ([\d.]+ GiB) \|$",
        (DOCS.parent / "README.md").read_text(),
        re.M,
    )
    assert [list(row) for row in rows] == expected


def test_gpu_figures_are_those_of_the_results():
    """The milliseconds and GiB of the page of measurements, from
    `python -m benchmarks.head --parts roofline`.
    """
    records = json.loads((DOCS.parent / "benchmarks/results/roofline.json").read_text())["records"]
    expected = [(f"{r['compute_ms']:.1f}", f"{r.get('temporaries_gib', 0):.2f}") for r in records]
    section = (
        (DOCS / "measurements.md")
        .read_text()
        .split("## Heads on H100s, by a roofline")[1]
        .split("\n## ")[0]
    )
    rows = [line.split("|")[2:-1] for line in section.splitlines() if re.match(r"\| [^m-]", line)]
    found = [
        re.findall(r"^ ([\d.]+)(?: \([\d.]+\))?(?:, ([\d.]+))? $", cell)[0]
        for row in zip(*rows, strict=True)
        for cell in row
    ]
    assert [(ms, gib or "0.00") for ms, gib in found] == expected


OF_H200 = {  # the words of a row, in order, and the version that it is of
    "the three bare products": ("floor", "three matmuls"),
    "PPO with an entropy bonus, plain JAX": ("policy loss", "plain"),
    "the same, one pass": ("policy loss", "jaxppo, one pass"),
    "the same, two passes, kept logits": ("policy loss", "jaxppo, kept logits"),
    "the same, two passes": ("policy loss", "jaxppo, two passes"),
    "20% of the tokens carry loss, plain JAX": ("policy loss, part", "plain, all tokens"),
    "log-probs and entropy, `log_probs_from_hidden`": ("entropy", "jaxppo"),
    "the same, `torch.compile`": ("entropy", "torch.compile"),
    "log-probs alone, `log_probs_from_hidden`": ("log-probs", "jaxppo"),
    "the same, `torch.compile`, bf16 logits": ("log-probs", "torch.compile"),
    "the same, Liger 0.8.5": ("log-probs", "Liger"),
    "log-probs without gradients, `log_probs_from_hidden`": ("values", "jaxppo"),
}


def test_figures_of_an_h200_are_those_of_the_results():
    """The milliseconds on the page of measurements, from `python -m benchmarks.head --here`."""
    records = json.loads((DOCS.parent / "benchmarks/results/h200.json").read_text())["records"]
    took = {(r["tokens"], r["group"], r["version"]): round(1000 * r["seconds"]) for r in records}
    section = (DOCS / "measurements.md").read_text().split("## On an H200")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in section.splitlines()]
    found = {}
    for row in rows:
        found.setdefault(row[1] if len(row) > 6 else "", row)
    for words, version in OF_H200.items():
        _, _, short, _, long, *_ = found[words]
        assert short == str(took[8192, *version]), words
        assert long == str(took.get((32768, *version), "")), words


def test_workflows_call_targets_of_the_makefile():
    targets = re.findall(r"^([\w-]+):(?!=)", (DOCS.parent / "Makefile").read_text(), re.MULTILINE)
    workflows = "\n".join(
        path.read_text() for path in (DOCS.parent / ".github/workflows").glob("*.yml")
    )
    called = {
        word
        for line in re.findall(r"run: make (.*)", workflows)
        for word in line.split()
        if re.fullmatch(r"[\w-]+", word)
    }
    assert {"lint", "types", "tests", "docs", "nightly"} <= called <= {*targets}
