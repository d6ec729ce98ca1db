"""The page of a run, as one HTML file that loads no others: curves, settings and a picture of
the mesh.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import html
import io
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from examples.trainer.content_policy import policy_tag
from examples.trainer.files import read_text
from examples.trainer.report import read_records

# title: (the text below it, patterns of the names of its curves)
CHARTS = {
    "Reward": (
        "of the task's verifier; accuracy is the share of full marks",
        ("reward", "accuracy"),
    ),
    "Held-out accuracy": (
        "share of full marks among the likeliest responses to held-out questions",
        ("held_out_*",),
    ),
    "KL": (
        "nats per token: to the supervised model, and to the policy that sampled (ppo_kl)",
        ("kl", "ppo_kl*"),
    ),
    "Pass rates": (
        "of the groups of a prompt: with all, none or a part of their samples of full marks",
        ("pass_*",),
    ),
    "Entropy": ("of the policy, nats per token", ("entropy*",)),
    "Clip fractions": (
        "share of tokens whose ratio is clipped, in the last update of a step",
        ("clip_fraction*",),
    ),
    "Ratios": ("of the policy to the one that sampled, in the last update of a step", ("ratio_*",)),
    "Mismatch": (
        "between the log-probs of sampler and trainer",
        (
            "mismatch_*kl",
            "mismatch_log_prob_abs_diff",
            "mismatch_chi2_sequence",
            "mismatch_jensen_shannon",
            "mismatch_token_mult_prob_error",
            "sampler_*",
        ),
    ),
    "Rollout weights": (
        (
            "the trainer's probability of a token over the sampler's, and the effective share of"
            " samples"
        ),
        ("mismatch_weight_*", "mismatch_sequence_effective_sample_size"),
    ),
    "Loss": ("of the first update of a step", ("loss", "pg_loss")),
    "Gradient norm": ("before clipping", ("gradient_norm",)),
    "Throughput": ("tokens of prompts and responses per second", ("tokens_per_second",)),
    "Memory": (
        "GiB, the highest so far: of a device where it says, else of the process",
        ("memory_gib",),
    ),
    "Left out": (
        "updates without a finite gradient, and rules of data that were broken",
        ("skipped", "broken_rules"),
    ),
}
_SAMPLE = ("reward", "prompt", "completion")
_STEPS_SHOWN = 20
_TELLING = ("task", "model", "loss", "mesh", "seed")  # arguments that stand in the title
_TO_TOKENS = '<p><a href="tokens.html">What the loss does with each token of a few samples</a></p>'
_DECADES = 3  # values that span more are drawn on a log axis
_MOST_DECADES = 4  # and so many of them each way, where values have both signs
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 0 } p { margin: .2rem 0; color: #57606a }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); gap: 1.2rem }
figure { margin: 0; border: 1px solid #d0d7de; border-radius: 6px; padding: .8rem } svg { width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .scroll { overflow-x: auto }
td, th { border: 1px solid #d0d7de; padding: .2rem .6rem; text-align: left; font-weight: normal }
pre { margin: 0; font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
th { background: #f6f8fa } .mesh td { text-align: center; min-width: 3rem } .warn { color: #b42318 }
svg * { stroke-linejoin: round; stroke-linecap: butt }
"""
# matplotlib gives every drawing this element; the page's own style has its rule
_STYLE_OF_SVG = '<style type="text/css">*{stroke-linejoin: round; stroke-linecap: butt}</style>'


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's folder holds: records by step, the settings, and how many lines were not valid
    (`left_out`).

    `samples` are a few of each step, by step.
    """

    name: str
    records: Sequence[Mapping[str, Any]]
    left_out: int
    settings: Mapping[str, Any]
    samples: Mapping[int, Sequence[Any]]

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """The records, their finite numbers alone."""
        return [{name: x for name, x in record.items() if _is_finite(x)} for record in self.records]


def _is_finite(x: Any) -> bool:
    # JSON has integers of any size, and a plot needs some room around its largest number
    return isinstance(x, int | float) and not isinstance(x, bool) and -1e300 < x < 1e300


def load_run(folder: Path) -> Run:
    """Reads a run's folder.

    Broken lines are counted; of two records of one step the later one is kept.

    Raises:
      ValueError: there are no metrics.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(
            f"run: got {folder}, expected the --out folder of a run, with metrics.jsonl"
        )
    lines = sum(1 for line in read_text(path, errors="replace").splitlines() if line.strip())
    found = list(read_records(path))
    by_step = {record["step"]: record for record in found if abs(record["step"]) < 1 << 53}
    try:
        settings = json.loads(read_text(folder / "settings.json", errors="replace"))
    except (OSError, ValueError, RecursionError):
        settings = {}
    if not isinstance(settings, dict):
        settings = {}
    path = folder / "samples.jsonl"
    texts = {}
    if path.is_file():
        texts = {record["step"]: record.get("samples") for record in read_records(path)}
    samples = {step: texts[step] for step in sorted(texts) if isinstance(texts[step], list)}
    records = [by_step[step] for step in sorted(by_step)]
    return Run(folder.resolve().name, records, lines - len(found), settings, samples)


def page(run: Run, beside: Run | None = None, tokens: bool = False) -> str:
    """The whole page, with the curves of another run drawn thin beside this run's, and a link to
    a page of tokens.
    """
    names = sorted({name for record in run.records for name in record} - {"step"})
    shown: set[str] = set()
    charts = []
    for title, (about, wanted) in CHARTS.items():
        curves = [
            name for pattern in wanted for name in names if fnmatch.fnmatchcase(name, pattern)
        ]
        shown |= set(curves)
        charts.append(_chart(run, title, about, curves, beside))
    charts += [_chart(run, name, "", [name], beside) for name in names if name not in shown]
    steps = [record["step"] for record in run.records]
    told = "no step yet"
    if steps:
        told = f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    if run.left_out:
        told += f"; {run.left_out} lines of metrics.jsonl are no records"
    if beside is not None:
        told += f"; dotted curves are those of {beside.name}"
    title = title_of(run)
    body = [
        f"<h1>{html.escape(title)}</h1><p>{html.escape(told)}</p>" + _TO_TOKENS * tokens,
        f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>',
        "<h2>Numbers</h2>" + _summary(run, names),
        "<h2>Samples</h2>" + _samples(run.samples),
        "<h2>Mesh</h2>" + _mesh(run.settings.get("mesh")),
    ]
    for name, value in run.settings.items():
        if name != "mesh":
            body.append(f"<h2>{html.escape(str(name).capitalize())}</h2>{_table(value)}")
    if not run.settings:
        body.append("<h2>Settings</h2><p>settings.json is not there, or cannot be read</p>")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    head += policy_tag(_STYLE, style_attributes=True)  # the curves have some
    head += f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return (
        f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'
    )


def title_of(run: Run) -> str:
    """The run's name, and what tells it from other runs."""
    arguments = run.settings.get("arguments")
    if not isinstance(arguments, Mapping):
        return run.name
    told = [
        f"{name} {_text(arguments[name])}" for name in _TELLING if arguments.get(name) is not None
    ]
    if not told:
        return run.name
    return f"{run.name}: {', '.join(told)}"


def _series(run: Run, name: str) -> tuple[list[int], list[float], list[int]]:
    """The steps and values of one name, with NaN for values that are not finite, and the steps
    of those.
    """
    steps = []
    values = []
    lost = []
    for record, numbers in zip(run.records, run.numbers, strict=True):
        if name in record:
            steps.append(record["step"])
            values.append(float(numbers.get(name, math.nan)))
            if name not in numbers:
                lost.append(record["step"])
    return steps, values, lost


def _chart(
    run: Run, title: str, about: str, names: Sequence[str], beside: Run | None = None
) -> str:
    """The curves of one chart.

    Those that never change are told in words: a line at 1 or 0 would only set the scale.
    """
    heading = f"<h3>{html.escape(title)}</h3><p>{html.escape(about)}</p>"
    if not names:
        return f"<figure>{heading}<p>not recorded in this run</p></figure>"
    figure = Figure(figsize=(5, 2.6), layout="constrained")
    axis = figure.subplots()
    notes = []
    drawn = []
    for number, name in enumerate(names):
        colour = f"C{number % 10}"
        steps, values, lost = _series(run, name)
        finite = [x for x in values if math.isfinite(x)]
        other_steps, other_values, _ = _series(beside, name) if beside else ([], [], [])
        other = [x for x in other_values if math.isfinite(x)]
        if len(steps) > 1 and not lost and len({f"{x:.4g}" for x in (*finite, *other)}) == 1:
            notes.append(f"<p>{html.escape(name)} is {finite[0]:.4g} in every step</p>")
            continue
        drawn += finite + other
        if other:
            axis.plot(other_steps, other_values, ":", color=colour, linewidth=0.9)
        # labels and titles are text that matplotlib must not read as formulas
        axis.plot(
            steps,
            values,
            marker="." if len(steps) < 30 else None,
            label=plain(name),
            color=colour,
            linewidth=1.3,
        )
        for step in lost[:200]:
            axis.axvline(step, color="#b42318", linewidth=0.6, alpha=0.6)
        notes += _note_of_lost(name, lost)
    if not axis.lines:
        return f"<figure>{heading}{''.join(notes)}</figure>"
    _set_axis(axis, drawn)
    if len(names) > 1:
        figure.legend(loc="outside upper left", ncols=2, fontsize=7, frameon=False)
    return f"<figure>{heading}{_svg(figure, title)}{''.join(notes)}</figure>"


def _note_of_lost(name: str, steps: Sequence[int]) -> list[str]:
    """A note on the steps in which a value is not finite; none where there is no such step."""
    if not steps:
        return []
    some = ", ".join(map(str, steps[:5]))
    if len(steps) > 5:
        some += ", ..."
    return [
        f'<p class="warn">{html.escape(name)} is no finite number in {len(steps)} steps: {some}</p>'
    ]


def _set_axis(axis: Any, values: Sequence[float]) -> None:
    """A grid and the label of steps; and a log axis for values that span many decades."""
    axis.set_xlabel("GRPO step")
    axis.grid(alpha=0.3)
    sizes = [abs(x) for x in values if x]
    if not sizes or max(sizes) <= min(sizes) * 10**_DECADES:
        return
    if min(values) >= 0:
        axis.set_yscale("log", nonpositive="mask")
    else:  # linear around 0, and a log axis each way
        axis.set_yscale("symlog", linthresh=max(min(sizes), max(sizes) * 10**-_MOST_DECADES))


def plain(text: str) -> str:
    """Text that matplotlib shows as it is: a leading underscore would hide a label, a dollar
    begin a formula.
    """
    return text.replace("$", r"\$").lstrip("_") or "?"


def _svg(figure: Figure, title: str) -> str:
    """The figure as an SVG element; its ids differ from those of all other figures on the page."""
    key = re.sub(r"\W", "-", title.lower())
    file = io.StringIO()
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": key, "font.family": "sans-serif"}
    ):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    drawn = file.getvalue().replace(_STYLE_OF_SVG, "")
    drawn = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", drawn[drawn.index("<svg") :])
    return drawn.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)


def _summary(run: Run, names: Sequence[str]) -> str:
    rows = []
    for name in names:
        values = [x for x in _series(run, name)[1] if math.isfinite(x)]
        if values:
            cells = (f"<td>{x:.4g}</td>" for x in (values[0], values[-1], min(values), max(values)))
            rows.append(f"<tr><th>{html.escape(name)}</th>{''.join(cells)}</tr>")
    if not rows:
        return "<p>no numbers yet</p>"
    head = "".join(f"<th>{text}</th>" for text in ("", "first", "last", "lowest", "highest"))
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _samples(samples: Mapping[int, Sequence[Any]]) -> str:
    """Prompts, completions and rewards of evenly spaced steps, the first and the last included."""
    if not samples:
        return "<p>not recorded in this run</p>"
    steps = list(samples)
    count = min(len(steps), _STEPS_SHOWN)
    some = sorted({steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)})
    rows = []
    for step in some:
        for sample in samples[step]:
            told = (
                [sample.get(name) for name in _SAMPLE] if isinstance(sample, Mapping) else [sample]
            )
            cells = (f"<td><pre>{html.escape(_text(text))}</pre></td>" for text in told)
            rows.append(f"<tr><th>{step}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{text}</th>" for text in ("step", *_SAMPLE))
    told = f"a few of {len(some)} of {len(steps)} steps; those of all are in samples.jsonl"
    return f'<p>{told}</p><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _table(value: Any) -> str:
    rows = value.items() if isinstance(value, Mapping) else [("", value)]
    cells = (
        f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(_text(v))}</td></tr>" for k, v in rows
    )
    return f'<div class="scroll"><table>{"".join(cells)}</table></div>'


def _text(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _mesh(mesh: Any) -> str:
    """Draws a cell for each device: rows are the first axis, columns the others, colours parts
    of the parameters.
    """
    try:
        axes = {str(name): int(size) for name, size in mesh["axes"].items()}
        devices = [str(device) for device in mesh["devices"]]
        roles = {str(role): [str(name) for name in names] for role, names in mesh["roles"].items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return "<p>not recorded in this run</p>"
    if not axes or min(axes.values()) < 1 or math.prod(axes.values()) != len(devices):
        return "<p>not recorded in this run</p>"
    parts = [*roles.get("tensor", ()), *roles.get("fsdp", ())]
    colours: dict[Any, int] = {}
    (first, rows), *across = axes.items()
    columns = list(itertools.product(*(range(size) for _, size in across)))
    heads = (
        " ".join(f"{name} {i}" for (name, _), i in zip(across, column, strict=True))
        for column in columns
    )
    lines = ["<th></th>" + "".join(f"<th>{html.escape(text)}</th>" for text in heads)]
    for row in range(rows):
        cells = []
        for number, column in enumerate(columns):
            place = dict(zip(axes, (row, *column), strict=True))
            part = tuple(place.get(name) for name in parts)
            hue = 47 * colours.setdefault(part, len(colours)) % 360
            device = html.escape(devices[row * len(columns) + number])
            cells.append(f'<td style="background: hsl({hue} 65% 88%)">{device}</td>')
        lines.append(f"<th>{html.escape(first)} {row}</th>{''.join(cells)}")
    told = f"devices of one colour hold the same part of the parameters, of {len(colours)}"
    picture = "".join(f"<tr>{line}</tr>" for line in lines)
    rest = {name: x for name, x in mesh.items() if name not in ("axes", "devices", "roles")} | roles
    return (
        f'<p>{told}</p><div class="scroll"><table'
        f' class="mesh">{picture}</table></div>{_table(rest)}'
    )
