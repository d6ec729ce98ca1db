"""The pages of the documentation."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    *DOCS.glob("**/*.md"),
    *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
