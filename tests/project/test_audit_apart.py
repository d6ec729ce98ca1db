"""`sharding.audit` is a tool of its own: a program that does not audit never loads it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
AUDIT = ROOT / "sharding" / "audit"


def imports(path):
    """Whole names of the modules that a file imports, wherever it does, and of what it takes
    from them.
    """
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            within = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*within, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_nothing_but_the_door_imports_the_audit():
    files = [
        p
        for folder in ("jaxppo", "sharding")
        for p in (ROOT / folder).rglob("*.py")
        if AUDIT not in p.parents
    ]
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name in imports(path)
        if f"{name}.".startswith("sharding.audit.")
    }
    names = "audit", *(f"results.{name}" for name in ("Audit", "Collective", "Time")), "results"
    assert found == {("sharding/__init__.py", f"sharding.audit.{name}") for name in names}


def test_the_door_loads_nothing_of_it_before_it_is_called():
    tree = ast.parse((AUDIT / "__init__.py").read_text())
    at_once = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert at_once == ["__future__", "collections.abc", "typing", "jax.sharding"]


def test_the_text_of_modules_is_read_in_one_file():
    files = [*AUDIT.glob("*.py")]
    assert [path.name for path in files if "re" in imports(path)] == ["hlo.py"]
