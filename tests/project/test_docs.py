"""The pages: every block runs, every public name has its place, every loss its section.

`make docs` builds them.
"""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pages import DOCS, PAGES

import jaxppo
from jaxppo import contrib, policy_losses, presets

# Blocks for packages that `make test` does not install. Nightly tests run their text if the package
# is installed.
RUN_BY = {
    "levanter_loss": "integrations/test_trainers.py",
    "skyrl_loss": "integrations/test_trainers.py",
    "easydel_loss": "integrations/test_trainers.py",
    "jaxppo_tunix.rl_cluster()": "integrations/test_tunix.py",
    "hidden_and_head(model, output)": "integrations/test_maxtext.py",
    "def compute_chunked_logps(": "integrations/test_pull_request_tunix.py",
    "def _compute_chunked_logprobs(self": "integrations/test_pull_request_skyrl_tx.py",
}


def runs_elsewhere(block):
    names = [name for name in RUN_BY if name in block]
    return any(
        f'"{name}"' in (Path(__file__).parents[1] / RUN_BY[name]).read_text() for name in names
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_an_example_that_runs(page):
    """`make docs-examples` runs the blocks that begin with >>>."""
    for kind, block in re.findall(
        r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        runs = kind == "python" and (block.startswith(">>> ") or runs_elsewhere(block))
        assert kind == "{toctree}" or runs, block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_no_wider_than_the_site_shows(page):
    lines = page.read_text().splitlines()
    assert [line for line in lines if line.startswith((">>> ", "... ")) and len(line) > 88] == []


def definitions(source):
    return {
        node.name: ast.unparse(node) for node in ast.parse(source).body if hasattr(node, "name")
    }


# functions of a page that its program has not
PAGE_ALONE = {
    "agent": ["turn", "trajectory", "in_order"],
    "critic": ["WithValues", "shared_loss"],
    "distillation": ["padded_head", "of_tokens", "log_p"],
    "training_step": ["start_on", "update_in_parts", "looked_at", "learn_part"],
}


@pytest.mark.parametrize(
    ("page", "example", "left_out"),
    [
        ("training_step", "grpo", {"train"}),
        ("agent", "agent", {"draw", "complete", "play", "create", "train"}),
        ("dpo", "dpo", {"create", "train"}),
        ("distillation", "distillation", {"create", "train"}),
        ("critic", "critic", {"create", "train"}),
    ],
)
def test_a_tutorial_shows_its_example(page, example, left_out):
    """The page's functions and classes are those of the program, which tests train."""
    code = re.findall(r"^(?:>>>|\.\.\.) ?(.*)$", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    source = (DOCS.parent / f"examples/{example}.py").read_text()
    shown = definitions("\n".join(code))
    program = definitions(source)
    assert [name for name, text in shown.items() if program.get(name) != text] == PAGE_ALONE.get(
        page, []
    )
    assert {*program} - {*shown} == left_out
    assert len(source.splitlines()) <= 180


def test_the_reference_holds_every_public_name():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.rst"))
    found = set(re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)$", text, re.MULTILINE))
    modules = {name for name in jaxppo.__all__ if inspect.ismodule(getattr(jaxppo, name))}
    expected = {f"jaxppo.{name}" for name in set(jaxppo.__all__) - modules}
    rarer = [
        "base.kl",
        "base.metrics",
        "batch.nucleus",
        "step.entropy",
        "step.masks",
        "step.staleness",
    ]
    rarer += [
        "losses",
        *(f"losses.{name}" for name in ("covariance", "distillation", "mtp", "preference")),
    ]
    rarer += [f"contrib.{module.name}" for module in pkgutil.iter_modules(contrib.__path__)]
    for module in (modules - {"presets"}).union(rarer):
        listed = importlib.import_module(f"jaxppo.{module}").__all__
        expected |= {f"jaxppo.{module}.{name}" for name in set(listed) - set(jaxppo.__all__)}
    undocumented = {
        "jaxppo.policy_losses.BY_NAME",
        "jaxppo.sharding.multihost",
        "jaxppo.base.metrics.Metrics",
    }
    assert not expected - found - undocumented
    assert {"jaxppo.presets", "jaxppo.sharding.multihost"} <= found  # with all their members
    assert "__all__" in vars(presets)


@pytest.mark.parametrize("name", policy_losses.BY_NAME)
def test_which_loss_when_knows_every_loss(name):
    """With the papers that its docstring names."""
    page = (DOCS / "choosing_a_loss.md").read_text()
    loss = policy_losses.BY_NAME[name]
    assert f"`{loss.__name__}`" in page
    for link in re.findall(r"https://[\w./-]+", loss.__doc__):
        assert f"({link})" in page


def test_figures_are_shown_and_drawn(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import curves
    import figures

    shown = {
        name for page in PAGES for name in re.findall(r"\(figures/(\w+)\.svg\)", page.read_text())
    }
    drawn = set(curves.FIGURES) | set(figures.DIAGRAMS)
    assert shown == {path.stem for path in (DOCS / "figures").glob("*.svg")} == drawn
    assert set(curves.LOSSES) == set(policy_losses.BY_NAME)


def drawn(folder, names=(), **environment):
    """The bytes of the figures, drawn in a process of its own."""
    command = [sys.executable, DOCS / "figures.py", folder, *names]
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    return {path.stem: path.read_bytes() for path in folder.glob("*.svg")}


@pytest.mark.nightly
def test_figures_are_the_same_bytes_on_any_machine(tmp_path):
    """XLA for AVX2 could draw another curve of "kl" than for AVX-512, and a user's matplotlibrc
    other letters.
    """
    (tmp_path / "matplotlibrc").write_text(
        "font.family: serif\nsvg.fonttype: path\npath.simplify: False\n"
    )
    old = {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2", "MATPLOTLIBRC": str(tmp_path)}
    names = ("kl", "packing")
    here = drawn(tmp_path / "here", names)
    there = drawn(tmp_path / "there", names, **old)
    assert here == there
    assert set(here) == set(names)


@pytest.mark.nightly
def test_tracked_figures_are_those_that_are_drawn(tmp_path):
    """So that `make docs` leaves the working tree as it was.

    It may have drawn before: git knows what is tracked.
    """
    found = drawn(tmp_path)
    tracked = {name: ["git", "-C", DOCS, "show", f":./figures/{name}.svg"] for name in found}
    kept = {
        name: subprocess.run(command, check=True, capture_output=True).stdout
        for name, command in tracked.items()
    }
    assert [name for name, text in found.items() if kept[name] != text] == []


def test_addresses_of_this_project_stand_in_one_place():
    """There is no such repository yet: pages link within the site, and speak of this project's
    tracker.
    """
    root = DOCS.parent
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    addresses = {urls["Repository"], urls["Documentation"]}
    listed = subprocess.run(
        ["git", "-C", root, "ls-files"], check=True, capture_output=True, text=True
    ).stdout
    suffixes = (".md", ".py", ".rst", ".ipynb", ".html", ".cff", ".yml")
    files = [name for name in listed.split() if name.endswith(suffixes) and (root / name).is_file()]
    assert "README.md" in files
    texts = {name: (root / name).read_text() for name in files}
    assert [
        name for name, text in texts.items() if any(address in text for address in addresses)
    ] == []


LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(text):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#{1,6} (.*)$", BLOCK.sub("", text), re.MULTILINE)
    named = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings
    ]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in named}


def lost_links(page, text):
    """The links within the repository that lead to no file, or to no heading of a page."""
    lost = []
    for link in LINK.findall(BLOCK.sub("", text)):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        there = link.startswith("http") or target.exists()
        if not there or (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())
        ):
            lost.append(link)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_site_lead_somewhere(page):
    assert lost_links(page, page.read_text()) == []


def test_a_lost_link_is_seen():
    text = "[a](head.md#use) [b](head.md#nothing) [c](nothing.md) [d](https://x.y/#z)"
    assert lost_links(DOCS / "index.md", text) == ["head.md#nothing", "nothing.md"]


def test_pip_lines_install_what_there_is():
    """No index has jaxppo yet, so extras are installed in a checkout; there, each is one of
    pyproject.toml.
    """
    with (DOCS.parent / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    texts = {
        path.name: path.read_text()
        for path in [*PAGES, *DOCS.parent.glob("*.md"), *DOCS.parent.glob("*/**/*.py")]
    }
    asked = {
        name: re.findall(r"pip install '(jaxppo|\.)\[([\w,-]+)\]'", text)
        for name, text in texts.items()
    }
    assert {
        name: lines for name, lines in asked.items() if any(what == "jaxppo" for what, _ in lines)
    } == {}
    assert {
        extra for lines in asked.values() for _, found in lines for extra in found.split(",")
    } <= {*extras}
