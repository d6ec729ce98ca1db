"""Which functions of the package a traced gradient runs through, and what else says how much there is to read.

python tests/support/traced_path.py        # functions of a gradient, types and lines of the head, import circles
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def traced(fn: Callable[[], Any]) -> set[tuple[str, str]]:
    """(file, name) of the functions of jaxppo and sharding that a call enters, lambdas and the like left out."""
    found: set[tuple[str, str]] = set()

    def enter(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or "<" in code.co_name or not path.is_relative_to(ROOT):
            return
        if path.relative_to(ROOT).parts[0] in ("jaxppo", "sharding"):
            found.add((str(path.relative_to(ROOT)), code.co_qualname))

    jax.clear_caches()
    sys.setprofile(enter)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return found


def gradient(**options: Any) -> Callable[[], Any]:
    """Traces a gradient of `policy_loss_from_hidden` by hidden states and kernel."""
    from jaxppo import PolicyLossConfig, RolloutBatch, policy_loss_from_hidden

    T, H, V = 512, 16, 1024
    ids, ones = jnp.zeros((1, T), jnp.int32), jnp.ones((1, T))
    places = jnp.arange(T, dtype=jnp.int32)[None]
    batch = RolloutBatch(
        ids, ids, ones.astype(jnp.int32), places, ones, ids[:, :1], advantages=ones, old_log_probs=-ones
    )
    config = PolicyLossConfig(entropy_coef=0.01)
    loss = lambda h, k: policy_loss_from_hidden(h, k, batch, config, **options)[0]  # noqa: E731
    return lambda: jax.make_jaxpr(jax.grad(loss, (0, 1)))(np.ones((1, T, H), np.float32), np.ones((H, V), np.float32))


def circles(package: str = "jaxppo") -> list[list[str]]:
    """The groups of modules of which each imports, directly or not, each of the others, if only for types."""
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in (ROOT / package).rglob("*.py")
    }
    graph = {name: {t for t in _imports(path) if t in files and t != name} for name, path in files.items()}
    reach = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(m for m in reach[n] if n in reach[m])) for n in graph if n in reach[n]}
    return sorted(map(list, groups))


def _imports(path: Path) -> set[str]:
    """What a module imports, at its top level and for types; `from a import b` is a.b where that is a module."""
    found: set[str] = set()
    body = ast.parse(path.read_text()).body
    for_types = [x for node in body if isinstance(node, ast.If) for x in node.body]
    for node in body + for_types:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            own = node.module.replace(".", "/")
            if not all((ROOT / f"{own}/{alias.name}.py").is_file() for alias in node.names):
                found.add(node.module)
    return found


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def types_of(folder: Path) -> list[str]:
    """The classes and the named aliases of types in a folder."""
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        found += [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return found


def main() -> None:
    head = ROOT / "jaxppo" / "head"
    for name, options in {"one pass": {}, "two passes": {"memory": 2**17}}.items():
        found = traced(gradient(**options))
        of_head = Counter(file for file, _ in found if file.startswith("jaxppo/head"))
        print(f"{name}: {len(found)} functions in {len({f for f, _ in found})} files, of the head", end=" ")
        print(f"{sum(of_head.values())} in {len(of_head)}")
    print(f"types of the head: {len(types_of(head))}")
    lines = {p: len(p.read_text().splitlines()) for p in head.rglob("*.py")}
    pallas = sum(n for p, n in lines.items() if "mosaic" in p.name)
    print(f"lines of the head: {sum(lines.values())}, of Pallas {pallas}; files {len(lines)}")
    print(f"import circles: {circles()}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
