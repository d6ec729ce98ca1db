"""No module needs one that needs it, however late it is imported."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules(root, *packages):
    """{dotted name: file} of packages."""
    paths = [path for package in packages for path in (root / package).rglob("*.py")]
    names = {path: path.relative_to(root).with_suffix("").parts for path in paths}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


def imports(tree, package):
    """(what is imported, whether it is for annotations alone) by the statements of a module, those in functions too.

    Args:
      tree: the module's.
      package: the parts of the name of the package that it is, or lies in.
    """
    pending = [(tree, False)]
    while pending:
        node, is_type = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += [(child, True) for child in node.body] + [(child, is_type) for child in node.orelse]
            continue
        pending += [(child, is_type) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_type) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*above, *filter(None, [node.module])])
            yield from ((f"{source}.{alias.name}", is_type) for alias in node.names)


def graph(root, *packages, with_types):
    """{module: the modules that it imports}; a name that is no module counts as the module that it comes from."""
    files, found = modules(root, *packages), {}
    for name, path in files.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        wanted = [what for what, is_type in imports(ast.parse(path.read_text()), package) if with_types or not is_type]
        known = [what if what in files else what.rpartition(".")[0] for what in wanted]
        found[name] = {what for what in known if what in files} - {name}
    return found


def circles(edges):
    """The sets of modules that all need each other."""

    def reached(start):
        seen, pending = set(), [start]
        while pending:
            new = edges[pending.pop()] - seen
            seen |= new
            pending += new
        return seen

    reach = {name: reached(name) for name in edges}
    return {frozenset(x for x in reach[name] if name in reach[x]) for name in edges if name in reach[name]}


def test_no_module_needs_itself():
    """Imports within functions count: they put off a circle and do not cut it. Those for annotations do not run."""
    assert circles(graph(ROOT, "jaxppo", "sharding", with_types=False)) == set()


# A method of a batch names the normalizer that it takes, and a normalizer is made of batches.
IN_ANNOTATIONS = {"jaxppo._stacked", "jaxppo.aggregation", "jaxppo.batch", "jaxppo.batch_checks", "jaxppo.validation"}


def test_circles_of_annotations_are_known():
    """A reader meets them all the same."""
    assert circles(graph(ROOT, "jaxppo", "sharding", with_types=True)) == {frozenset(IN_ANNOTATIONS)}


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
