"""Prints the tables of README and of docs/measurements.md from benchmarks/results/tpu.json, as
Markdown.

python -m benchmarks.tables
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "tpu.json"
CHIPS = ("v5p:2x2x4", "v6e:4x4")
# by topology, mesh, head, tokens and version
Rows = dict[tuple[str, str, str, int, str], dict[str, Any]]

VERSIONS = {
    "plain": "plain JAX, which holds the logits",
    "best plain": "plain JAX at its best",
    "one pass, a mask": "`policy_loss_from_hidden`, one pass, with a mask that is 1 everywhere",
    "one pass, no mask": "the same with `follow_mask=False`",
    "two passes": "`log_probs_from_hidden` and a loss that is not token-local, two passes, no mask",
    "two passes, a mask": "the same with a mask that is 1 everywhere",
    "two passes, kept logits": "the same with kept logits, no mask",
    "two passes, kept logits, a mask": "the same with kept logits and a mask that is 1 everywhere",
    "forward": "`log_probs_from_hidden` without gradients",
}
RATIOS = ("one pass, no mask", "one pass, a mask")


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def one_head(rows: Rows) -> Iterator[str]:
    """Computing plus sums, and computing over the bare products."""
    cells = []
    for version, text in VERSIONS.items():
        both = [rows[chip, "cp=4,tp=4", "qwen3-8b", 8192, version] for chip in CHIPS]
        cell = [text]
        for r in both:
            cell += [
                f"{r['compute_ms']:.1f} + {r['collectives_ms']:.1f}",
                f"{r['over_products']:.2f}",
            ]
        cells.append([*cell, f"{max(r['temporaries_gib'] for r in both):.2f} GiB"])
    return table(["", "v5p, ms", "over products", "v6e, ms", "over products", "temporaries"], cells)


def over_best_plain(rows: Rows) -> Iterator[str]:
    """Times over plain JAX at its best of both chips, a dash for what was not estimated; and the
    larger memory.
    """

    def row(mesh: str, name: str, tokens: int) -> list[str]:
        found = {
            v: [rows.get((chip, mesh, name, tokens, v)) for chip in CHIPS]
            for v in (*RATIOS, "best plain")
        }
        ratios = [
            " / ".join(f"{r['over_best_plain']:.2f}" if r else "-" for r in found[v])
            for v in RATIOS
        ]
        memory = [
            max(r["temporaries_gib"] for r in found[v] if r)
            for v in ("one pass, a mask", "best plain")
        ]
        where = [mesh] * (mesh != "cp=4,tp=4") + [f"{tokens} tokens"] * (tokens != 8192)
        return [", ".join([name, *where]), *ratios, *(f"{x:.2f}" for x in memory)]

    cells = [
        row(*key)
        for key in dict.fromkeys((mesh, name, tokens) for _, mesh, name, tokens, _ in rows)
    ]
    return table(["head", "no mask", "a mask", "GiB, a mask", "GiB, plain"], cells)


OF_README = (
    "plain",
    "best plain",
    "one pass, a mask",
    "a fifth",
    "two passes, kept logits, a mask",
    "two passes, a mask",
    "forward",
)


def readme(rows: Rows) -> Iterator[str]:
    """The sums of computing and collectives."""
    cells = []
    for version in OF_README:
        name = version.replace("a fifth", "one pass, a mask")
        both = [rows[chip, "cp=4,tp=4", "qwen3-8b", 8192, name] for chip in CHIPS]
        times = [
            r["fifth_ms"] if version == "a fifth" else r["compute_ms"] + r["collectives_ms"]
            for r in both
        ]
        gib = max(r["temporaries_gib"] for r in both)
        cells.append([version, *(f"{time:.1f} ms" for time in times), f"{gib:.2f} GiB"])
    return table(["", "TPU v5p", "TPU v6e", "temporary memory"], cells)


def main() -> None:
    records = json.loads(RESULTS.read_text())["records"]
    keys = ("topology", "mesh", "head", "tokens_per_shard", "version")
    rows: Rows = {tuple(r[key] for key in keys): r for r in records}  # type: ignore[misc]
    for lines in (readme(rows), one_head(rows), over_best_plain(rows)):
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
