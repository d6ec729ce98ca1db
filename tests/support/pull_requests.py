"""A pytest plugin: a trainer's own tests, with the function of a page of docs/pull_requests in the
place of theirs.

In a checkout of the trainer, JAXPPO being this repository's folder:

    export PYTHONPATH=.:$JAXPPO:$JAXPPO/tests/support
    python -m pytest -p pull_requests --pull-request tunix tests/rl/common_test.py
"""

import functools
import importlib
import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "pull_requests"
PLACES = {
    "tunix": ("tunix.rl.common", "compute_chunked_logps"),
    "skyrl_tx": (
        "skyrl.tx.utils.logits_processor",
        "LogitsProcessorMixin._compute_chunked_logprobs",
    ),
}


def documented(page, **names):
    """The function that a page puts in the place of the trainer's."""
    [block] = re.findall(
        r"^```python\n((?!>>>).*?)^```$",
        (PAGES / f"{page}.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    exec(block, names)
    return names[PLACES[page][1].split(".")[-1]]


def pytest_addoption(parser):
    parser.addoption("--pull-request", choices=sorted(PLACES), required=True)


def pytest_configure(config):
    module, path = PLACES[config.getoption("--pull-request")]
    *owners, name = path.split(".")
    where = importlib.import_module(module)
    for owner in owners:
        where = getattr(where, owner)
    ours = documented(config.getoption("--pull-request"), theirs=getattr(where, name))
    config.calls = 0

    @functools.wraps(ours)
    def counted(*args, **kwargs):
        config.calls += 1
        return ours(*args, **kwargs)

    setattr(where, name, counted)


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(
        f"{PLACES[config.getoption('--pull-request')][1]} of the page: {config.calls} calls"
    )
