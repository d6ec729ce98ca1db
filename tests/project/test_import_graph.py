"""No import circles, late imports included."""

from pathlib import Path

import pytest
from import_graph import circles, graph

ROOT = Path(__file__).parents[2]


def test_no_module_needs_itself():
    """Imports within functions count, since they only delay a circle. Imports for annotations count, for the reader."""
    assert circles(graph(ROOT, "jaxppo", "sharding", with_types=True)) == set()


@pytest.mark.parametrize(
    ("line", "with_types", "found"),
    [
        ("from p.b import x", False, True),
        ("from p import b", False, True),
        ("import p.b", False, True),
        ("from . import b", False, True),
        ("from .b import x", False, True),
        ("def f():\n    from .b import x", False, True),
        ("if TYPE_CHECKING:\n    from .b import x", False, False),
        ("if TYPE_CHECKING:\n    from .b import x", True, True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from .b import x", False, True),
        ("import os", False, False),
    ],
)
def test_a_circle_is_found(tmp_path, line, with_types, found):
    (tmp_path / "p").mkdir()
    for name, text in (("__init__", "from .a import x"), ("a", line), ("b", "from .c import x"), ("c", "import p.a")):
        (tmp_path / "p" / f"{name}.py").write_text(text)
    expected = {frozenset({"p.a", "p.b", "p.c"})} if found else set()
    assert circles(graph(tmp_path, "p", with_types=with_types)) == expected
