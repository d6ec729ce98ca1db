"""Draws the figures of the documentation from the package itself: `python docs/figures.py`.

They are the same bytes on every x86 machine, so that drawing them changes no tracked file.
Arguments: another folder to draw into, and the names of the figures, all by default.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import curves
from curves import GREY, INK, SHARDS

FOLDER = Path(__file__).parent / "figures"


def same_everywhere() -> None:
    """Makes XLA and matplotlib forget what machine and whose account this is; before JAX is
    imported.
    """
    import matplotlib

    # newer instructions round otherwise, and a point that moves by 1e-4 takes other vertices of a
    # curve with it
    os.environ["XLA_FLAGS"] = "--xla_cpu_max_isa=SSE4_2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    matplotlib.rcdefaults()


def main() -> None:
    same_everywhere()
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {
        "svg.hashsalt": "jaxppo",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
    }
    style |= {
        "axes.spines.right": False,
        "axes.edgecolor": GREY,
        "text.color": INK,
        "axes.labelcolor": INK,
    }
    matplotlib.rcParams.update(style)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    figures = DIAGRAMS | curves.FIGURES
    for name in sys.argv[2:] or figures:
        figure = figures[name]()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def canvas(width: float, height: float) -> Any:
    """An empty figure whose axes are inches, (0, 0) the lower left corner."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def cells(
    axes: Any, x: float, y: float, texts: Any, colours: Any, size: float = 0.32, font: float = 8
) -> None:
    """A row of squares from (x, y) on, each with its text; a colour None is an empty place."""
    from matplotlib.patches import Rectangle

    for i, (text, colour) in enumerate(zip(texts, colours, strict=True)):
        corner = (x + i * size, y)
        axes.add_patch(
            Rectangle(
                corner, size, size, facecolor=colour or "white", edgecolor=GREY, linewidth=0.7
            )
        )
        axes.text(
            x + (i + 0.5) * size,
            y + size / 2,
            text,
            ha="center",
            va="center_baseline",
            fontsize=font,
        )


def overview() -> Any:
    """Samples, batch, hidden states, statistics, loss: what each is, and its shape."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    figure, axes = canvas(10.4, 3.6)
    steps = [
        ("Samples", "prompt | response", "a list of N,\nof any length", "on the host"),
        (
            "RolloutBatch",
            "packed rows",
            "tokens  targets\nloss_mask  ...\n[R, T]\nrewards  [R, S]",
            "R rows of T tokens,\nS segments each",
        ),
        ("hidden", "your model", "[R, T, H]", "the last layer's output"),
        ("TokenStats", "the head", "log_probs  [R, T]\nentropy  [R, T]", "[R, T, V] never exists"),
        (
            "loss, metrics",
            "the policy loss",
            "f32[ ]\nMetric by name",
            "and gradients\n[R, T, H], [H, V]",
        ),
    ]
    between = ("from_samples", "model(params, batch)", "log_probs_\nfrom_hidden", "policy_loss")
    width, gap = 1.62, 0.5
    for i, (name, what, shapes, note) in enumerate(steps):
        x = 0.15 + i * (width + gap)
        box = FancyBboxPatch(
            (x, 0.95), width, 1.85, boxstyle="round,pad=0,rounding_size=0.08", linewidth=1
        )
        box.set(facecolor=SHARDS[(0, 0, 1, 2, 3)[i]], edgecolor=GREY)
        axes.add_patch(box)
        centre = x + width / 2
        axes.text(centre, 2.57, name, ha="center", va="center", fontsize=12, weight="bold")
        axes.text(centre, 2.31, what, ha="center", va="center", fontsize=9.5)
        axes.text(
            centre,
            1.62,
            shapes,
            ha="center",
            va="center",
            fontsize=9.5,
            family="monospace",
            linespacing=1.5,
        )
        axes.text(centre, 0.72, note, ha="center", va="top", fontsize=9.5, style="italic")
        if i:
            arrow = FancyArrowPatch(
                (x - gap + 0.04, 1.9), (x - 0.04, 1.9), arrowstyle="-|>", mutation_scale=12
            )
            arrow.set(color=INK, linewidth=1)
            axes.add_patch(arrow)
            axes.text(
                x - gap / 2,
                2.95,
                between[i - 1],
                ha="center",
                va="bottom",
                fontsize=9.5,
                family="monospace",
            )
    start, end = 0.15 + 2 * (width + gap), 0.15 + 4 * (width + gap) + width
    axes.annotate(
        "",
        (start, 0.2),
        (end, 0.2),
        arrowprops={"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "color": GREY},
    )
    together = "policy_loss_from_hidden: both steps at once, in one pass where the loss allows it"
    axes.text((start + end) / 2, 0.12, together, ha="center", va="top", fontsize=9)
    return figure


def packing() -> Any:
    """Where `pack` puts samples of eight lengths."""
    from jaxppo import make_parallel_mesh
    from jaxppo.sharding import pack

    lengths = (9, 7, 6, 5, 4, 3, 3, 2)
    sequences = [range(n) for n in lengths]
    packed = pack(sequences, row_length=12, parallel=make_parallel_mesh("dp=1"), rows=4)
    colours = [SHARDS[i % 4] for i in range(len(lengths))]
    figure, axes = canvas(8.6, 3.1)
    axes.text(0.2, 2.9, "samples", fontsize=10, weight="bold", va="center")
    axes.text(4.4, 2.9, "rows, T = 12", fontsize=10, weight="bold", va="center")
    for i, n in enumerate(lengths):
        cells(axes, 0.45, 2.46 - 0.32 * i, [""] * n, [colours[i]] * n, size=0.28)
        axes.text(0.3, 2.6 - 0.32 * i, "abcdefgh"[i], ha="center", va="center_baseline", fontsize=9)
    for row in range(packed.rows):
        names, shades = [""] * 12, [None] * 12
        for i in range(len(lengths)):
            if packed.row[i] == row:
                for t in range(packed.start[i], packed.start[i] + lengths[i]):
                    names[t], shades[t] = "abcdefgh"[i], colours[i]
        cells(axes, 4.4, 2.4 - 0.56 * row, names, shades, size=0.33, font=8)
    tokens, longest = sum(lengths), max(lengths)
    used, padded = tokens / (packed.rows * 12), tokens / (len(lengths) * longest)
    axes.text(
        4.4,
        0.38,
        f"{tokens} tokens in {packed.rows} x 12 places: {used:.0%} are used",
        fontsize=8.5,
    )
    axes.text(
        4.4,
        0.14,
        f"padded to {len(lengths)} x {longest} places: {padded:.0%} would be",
        fontsize=8.5,
    )
    return figure


def layouts() -> Any:
    """Which positions each of four context shards holds, from the layouts' own formulas."""
    import numpy as np

    from jaxppo.sharding import logical_positions

    lengths = np.array([[16, 8, 8]])
    figure, axes = canvas(10.6, 3.1)
    for k, layout in enumerate(("contiguous", "zigzag", "zigzag_per_segment", "striped")):
        order = logical_positions(
            layout, 32, 4, lengths if layout == "zigzag_per_segment" else None
        ).reshape(-1)
        y = 2.2 - 0.6 * k
        axes.text(
            1.65, y + 0.13, layout, ha="right", va="center_baseline", fontsize=9, family="monospace"
        )
        for shard in range(4):
            held = order[shard * 8 : shard * 8 + 8]
            segment = np.searchsorted((16, 24, 32), held, "right")
            cells(axes, 1.8 + shard * 2.2, y, held, [SHARDS[i] for i in segment], 0.26, 7)
    for shard in range(4):
        axes.text(
            1.8 + shard * 2.2 + 1.04, 2.72, f"shard {shard}", ha="center", fontsize=9, weight="bold"
        )
    note = (
        "T = 32 positions of one row over C = 4 shards; colours are its segments of 16, 8 and 8"
        " tokens"
    )
    axes.text(1.8, 0.12, note, fontsize=8)
    return figure


def schedules() -> Any:
    """In which order the three schedules walk over tiles of tokens by columns."""
    figure, axes = canvas(9.4, 3.0)
    rows, columns, size = 4, 6, 0.38
    three = {
        "forward": (
            "1 product",
            "statistics of each tile; no gradient",
            lambda t, v: t * columns + v,
        ),
        "one pass": (
            "3 products",
            "a chunk of tokens: logits, loss, gradients,\nthen the next chunk",
            lambda t, v: t,
        ),
        "two passes": (
            "4 products",
            "statistics as in the forward, then for each\nblock of columns the gradients",
            lambda t, v: v,
        ),
    }
    for k, (name, (products, what, turn)) in enumerate(three.items()):
        x = 0.55 + 3.05 * k
        axes.text(x, 2.72, name, fontsize=10.5, weight="bold", va="center")
        axes.text(x + columns * size, 2.72, products, fontsize=8.5, va="center", ha="right")
        for t in range(rows):
            y = 2.1 - t * size
            numbers = [turn(t, v) for v in range(columns)]
            cells(axes, x, y, [n + 1 for n in numbers], [SHARDS[n % 4] for n in numbers], size)
        axes.text(
            x - 0.08, 2.1 - 1 * size, "tokens", rotation=90, ha="right", va="center", fontsize=8
        )
        axes.text(
            x + columns * size / 2,
            0.84,
            "columns of the vocabulary",
            ha="center",
            va="top",
            fontsize=8,
        )
        axes.text(x, 0.5, what, fontsize=8, va="top", linespacing=1.4)
    return figure


DIAGRAMS = {"overview": overview, "packing": packing, "layouts": layouts, "schedules": schedules}

if __name__ == "__main__":
    main()
