"""A summary of a nightly run in NAME-summary.md and .json: what ran, how long, the slowest, the
seeds.

Failures are written to NAME-failed.txt as they happen, and the outcome of each test to
NAME-ran.txt.

A pytest plugin, `-p tests.support.nightly_summary --summary=NAME`. With xdist, the process that
hands out the tests writes it, from the reports of its workers.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

SLOWEST = 25


class Summary:
    """Takes the reports of tests, and writes the files after the last one."""

    def __init__(self, folder: Path, name: str):
        self.failures = folder / f"{name}-failed.txt"
        self.failures.write_text("")
        self.ran = folder / f"{name}-ran.txt"
        self.ran.write_text("")
        self.summary = folder / f"{name}-summary"
        self.began = time.time()
        self.seconds: dict[str, float] = defaultdict(float)
        self.outcomes: dict[str, str] = {}
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = before if before != "passed" else report.outcome
        if report.failed:
            with self.failures.open("a") as file:
                file.write(f"{report.nodeid}\n{report.longreprtext}\n\n")
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[report.longrepr[2]] += 1
        if report.when == "teardown":
            with self.ran.open("a") as file:
                file.write(f"{self.outcomes[report.nodeid]} {report.nodeid}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # a whole file, once of all workers
        if report.skipped and self.outcomes.get(report.nodeid) != "skipped":
            self.outcomes[report.nodeid] = "skipped"
            self.reasons[report.longrepr[2]] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        found = self.found(int(exitstatus)) | {
            "search_seed": session.config.getoption("search_seed")
        }
        self.summary.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        self.summary.with_suffix(".md").write_text(markdown(found))

    def found(self, exit_code: int) -> dict:
        files: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for test, seconds in self.seconds.items():
            entry = files[test.split("::")[0]]
            entry[0] += 1
            entry[1] += seconds
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:SLOWEST]
        return {
            "began": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.began)),
            "wall_seconds": round(time.time() - self.began, 1),
            "test_seconds": round(sum(self.seconds.values()), 1),
            "machine": (
                f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"
            ),
            "jax": version("jax"),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "exit_code": exit_code,
            "outcomes": dict(Counter(self.outcomes.values())),
            "failed": sorted(
                test for test, outcome in self.outcomes.items() if outcome == "failed"
            ),
            "skipped": dict(self.reasons),
            "files": {
                name: {"tests": n, "seconds": round(s, 1)} for name, (n, s) in sorted(files.items())
            },
            "slowest": [{"test": test, "seconds": round(seconds, 1)} for test, seconds in slowest],
        }


def markdown(found: dict) -> str:
    """The summary in markdown."""
    counts = (
        ", ".join(f"{n} {outcome}" for outcome, n in sorted(found["outcomes"].items())) or "no test"
    )
    lines = [
        "# Nightly",
        "",
        (
            f"{counts}; {found['wall_seconds'] / 60:.0f} minutes, {found['test_seconds'] / 60:.0f}"
            f" minutes of tests. Began {found['began']}. {found['machine']}, JAX {found['jax']}."
        ),
    ]
    lines += ["", f"XLA_FLAGS: `{found['xla_flags']}`"] if found["xla_flags"] else []
    for title, rows in (
        ("Failed", found["failed"]),
        ("Skipped", [f"{n} x {r}" for r, n in found["skipped"].items()]),
    ):
        lines += ["", f"## {title}", "", *(f"- {row}" for row in rows)] if rows else []
    lines += ["", "## What ran", "", "| file | tests | seconds |", "|---|---|---|"]
    lines += [
        f"| {name} | {entry['tests']} | {entry['seconds']} |"
        for name, entry in found["files"].items()
    ]
    lines += ["", "## The slowest", "", "| test | seconds |", "|---|---|"]
    lines += [f"| {entry['test']} | {entry['seconds']} |" for entry in found["slowest"]]
    seed = found["search_seed"]
    again = (
        f"Of searches and kills: {seed}; `--search-seed {seed}` repeats them. All others are fixed."
    )
    lines += ["", "## Seeds", "", again]
    return "\n".join(lines) + "\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--summary",
        default="nightly",
        metavar="NAME",
        help="what the files of the summary begin with",
    )


def pytest_configure(config: pytest.Config) -> None:
    # workers write nothing: they report to the process that hands out tests
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(
            Summary(config.rootpath, config.getoption("--summary")), "nightly-summary"
        )
