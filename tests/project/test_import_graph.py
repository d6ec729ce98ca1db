"""Imports, late ones included: no circles, and rooms stand on rooms below them."""

from pathlib import Path

import pytest
from import_graph import arrows_up, circles, graph

ROOT = Path(__file__).parents[2]


def test_no_module_needs_itself():
    """Imports within functions count, since they only delay a circle.

    Imports for annotations count, for the reader.
    """
    assert circles(graph(ROOT, "jaxppo", "sharding", with_types=True)) == set()


# The rooms of jaxppo, from the ground up. Rooms of one floor know nothing of each other.
FLOORS = [
    ["jaxppo.sharding"],
    ["jaxppo.base"],
    ["jaxppo.batch", "jaxppo.head", "jaxppo.policy_losses"],
    ["jaxppo.policy"],
    ["jaxppo.step", "jaxppo.advantages", "jaxppo.mismatch", "jaxppo.presets"],
    ["jaxppo.losses"],
    ["jaxppo.contrib", "jaxppo.integrations"],
    # doors for users; the second has an assertion about batches, too
    ["jaxppo", "jaxppo.sharding.testing"],
]


def test_no_room_stands_on_one_above_it():
    found = graph(ROOT, "jaxppo", with_types=True)
    assert arrows_up(FLOORS, found) == set()
    lower = arrows_up(FLOORS[::-1], found)
    assert len(lower) > 200  # what holds because of the order, and not because nothing is imported


def test_an_arrow_up_is_found():
    edges = {
        "p": {"p.c.x"},
        "p.a": set(),
        "p.a.x": {"p.a.y", "p.b.x"},
        "p.b.x": {"p.a.y", "p.c.x"},
        "p.c.x": set(),
    }
    assert arrows_up([["p.a"], ["p.b", "p.c"], ["p"]], edges) == {
        ("p.a.x", "p.b.x"),
        ("p.b.x", "p.c.x"),
    }


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
    for name, text in (
        ("__init__", "from .a import x"),
        ("a", line),
        ("b", "from .c import x"),
        ("c", "import p.a"),
    ):
        (tmp_path / "p" / f"{name}.py").write_text(text)
    expected = {frozenset({"p.a", "p.b", "p.c"})} if found else set()
    assert circles(graph(tmp_path, "p", with_types=with_types)) == expected
