"""Counts how much code there is to read: functions that a traced gradient runs through, types,
lines, import circles.

python tests/support/traced_path.py        # functions of a gradient, types and lines of the head, import circles
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from import_graph import circles, graph

ROOT = Path(__file__).resolve().parents[2]


def traced(fn: Callable[[], Any]) -> set[tuple[str, str]]:
    """(file, name) of the functions of jaxppo and sharding that a call enters, without lambdas
    and comprehensions.
    """
    codes: set[CodeType] = set()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    jax.clear_caches()
    sys.setprofile(enter)
    try:
        fn()
    finally:
        sys.setprofile(None)
    ours = (str(ROOT / "jaxppo"), str(ROOT / "sharding"))
    named = [
        code for code in codes if code.co_filename.startswith(ours) and "<" not in code.co_name
    ]
    return {(str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname) for code in named}


def gradient(**options: Any) -> Callable[[], Any]:
    """Traces the gradient of `policy_loss_from_hidden` with respect to hidden states and kernel."""
    from jaxppo import PolicyLossConfig, RolloutBatch, policy_loss_from_hidden

    T, H, V = 512, 16, 1024
    ids = jnp.zeros((1, T), jnp.int32)
    ones = jnp.ones((1, T))
    places = jnp.arange(T, dtype=jnp.int32)[None]
    batch = RolloutBatch(
        ids,
        ids,
        ones.astype(jnp.int32),
        places,
        ones,
        ids[:, :1],
        advantages=ones,
        old_log_probs=-ones,
    )
    config = PolicyLossConfig(entropy_coef=0.01)

    def loss(h, k):
        return policy_loss_from_hidden(h, k, batch, config, **options)[0]

    return lambda: jax.make_jaxpr(jax.grad(loss, (0, 1)))(
        np.ones((1, T, H), np.float32), np.ones((H, V), np.float32)
    )


def types_of(folder: Path) -> list[str]:
    """The classes and the named aliases of types in a folder."""
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        found += [
            node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
        ]
    return found


def main() -> None:
    head = ROOT / "jaxppo" / "head"
    for name, options in {"one pass": {}, "two passes": {"memory": 2**17}}.items():
        found = traced(gradient(**options))
        of_head = Counter(file for file, _ in found if file.startswith("jaxppo/head"))
        print(
            f"{name}: {len(found)} functions in {len({f for f, _ in found})} files, of the head",
            end=" ",
        )
        print(f"{sum(of_head.values())} in {len(of_head)}")
    print(f"types of the head: {len(types_of(head))}")
    lines = {p: len(p.read_text().splitlines()) for p in head.rglob("*.py")}
    print(f"lines of the head: {sum(lines.values())}; files {len(lines)}")
    print(
        "import circles:"
        f" {sorted(map(sorted, circles(graph(ROOT, 'jaxppo', 'sharding', with_types=True))))}"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
