"""Type-checks the examples of the pages, as their reader's own code: python -m
tests.support.typed_pages.
"""

import doctest
import shutil
import subprocess
import sys
from pathlib import Path

if __package__:
    from tests.support.pages import DOCS, PAGES
else:
    from pages import DOCS, PAGES

ROOT = DOCS.parent
# A page's functions have no annotations, and it uses a name again for the next example.
OPTIONS = [
    "--check-untyped-defs",
    "--allow-redefinition-new",
    "--local-partial-types",
    "--disable-error-code=no-redef",
]
OPTIONS += ["--ignore-missing-imports", "--follow-imports=silent"]


def module(page: Path) -> str:
    """A page's examples at their own lines, so that mypy's line numbers are the page's."""
    lines = [""] * len(page.read_text().splitlines())
    for example in doctest.DocTestParser().get_examples(page.read_text(), str(page)):
        source = example.source.splitlines()
        lines[example.lineno : example.lineno + len(source)] = source
    return "\n".join(lines) + "\n"


def check(folder: Path, pages: list[Path] = PAGES) -> tuple[int, str]:
    """mypy's exit code and report. `folder` gets one module for each page."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in pages:
        text = module(page)
        # whose example is a docstring's, and imports nothing
        if text.strip() and page.stem != "CONTRIBUTING":
            # numbers.py would hide a standard module
            (folder / f"page_{page.stem.lower()}.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        *OPTIONS,
        *sorted(map(str, folder.glob("*.py"))),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    code, report = check(ROOT / "build" / "typed_pages")
    print(report, end="")
    sys.exit(code)
