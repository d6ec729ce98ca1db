"""The page of a run's tokens, as one HTML file that loads no others: each coloured by what the loss
does with it.

tokens_page.js draws it in the browser, from data in the page.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.trainer.content_policy import policy_tag
from examples.trainer.files import read_text
from examples.trainer.report import read_records

# names of tokens.jsonl, in the order in which the page offers them; names that are not here follow
LABELS = {
    "contribution": "contribution to the loss",
    "log_probs": "log-prob",
    "ratio": "ratio",
    "advantages": "advantage",
    "weight": "weight",
    "loss/policy": "policy term",
    "loss/kl": "KL term",
    "loss/entropy": "entropy term",
    "gradient": "gradient by the log-prob",
}
_OF_TOKENS = ("tokens", "text", "loss_mask", "reason")  # lists that are no numbers to colour by
_MOST = 1_000_000  # numbers on a page: steps are left out of a larger run
_SCRIPT = Path(__file__).with_name("tokens_page.js")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0; overflow-wrap: anywhere } h2 { font-size: 1rem; margin: 1.2rem 0 .2rem }
p { margin: .2rem 0 } p, small, legend, dt { color: #57606a } small { font-weight: normal; font-size: .9rem }
.controls { display: flex; flex-wrap: wrap; align-items: baseline; gap: .5rem 1.2rem; margin: 1rem 0 .5rem }
select { max-width: 100% } select, button, input { font: inherit }
fieldset { border: 1px solid #d0d7de; border-radius: 6px; flex-basis: 100% }
fieldset label { display: inline-block; margin-right: 1rem } label { white-space: nowrap }
.legend { display: flex; align-items: center; gap: .6rem; white-space: nowrap } .bar { flex: 0 1 12rem; height: 1rem }
.two { display: grid; grid-template-columns: minmax(0, 1fr) 19rem; gap: 1.5rem; align-items: start }
.tokens { font: 16px/2 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.tokens span { padding: .15rem .1rem; margin: 0 1px; border-bottom: 3px solid transparent; unicode-bidi: isolate }
.tokens .up { border-bottom-color: #b35806 } .tokens .down { border-bottom: 3px dotted #2166ac }
.tokens .still { outline: 1px dashed #57606a } .tokens .out { color: #57606a } .tokens .off { color: #afb8c1 }
.tokens .bad { text-decoration: underline wavy #b42318 }
.tokens [role=option] { cursor: pointer } .tokens .seen { outline: 2px solid #1b1f24 }
.tokens :focus { outline-width: 3px }
aside { position: sticky; top: 1rem; border: 1px solid #d0d7de; border-radius: 6px; padding: .8rem; background: #fff }
aside h3 { margin: 0; font: 16px/1.4 ui-monospace, monospace; white-space: pre-wrap }
aside { overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 0 .8rem; margin: .4rem 0 0; font-size: .9rem }
dt { overflow-wrap: anywhere } dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums }
.now { font-weight: bold; color: inherit }
@media (max-width: 800px) {
body { margin: 1rem auto; padding-bottom: 36vh } .two { display: block }
aside { position: fixed; inset: auto 0 0 0; max-height: 30vh; overflow-y: auto; border-radius: 0; padding: .6rem 1rem }
dl { grid-template-columns: minmax(0, 1fr) auto minmax(0, 1fr) auto } }
@media (max-width: 460px) { dl { grid-template-columns: minmax(0, 1fr) auto } }
"""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The explained samples of a run, in the order of their steps, and how many lines were none
    (`left_out`).
    """

    samples: Sequence[Mapping[str, Any]]
    left_out: int


def load_tokens(folder: Path) -> Tokens | None:
    """Reads tokens.jsonl, None if there is none.

    Of two records of one sample in one step the later one is kept.
    """
    path = folder / "tokens.jsonl"
    if not path.is_file():
        return None
    lines = sum(1 for line in read_text(path, errors="replace").splitlines() if line.strip())
    found = [sample for record in read_records(path) if (sample := _sample(record))]
    kept = {(sample["step"], sample["id"]): sample for sample in found}
    return Tokens([kept[key] for key in sorted(kept)], lines - len(found))


def _sample(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the page shows of a record; None if it is none of a sample."""
    step = record["step"]
    number = record.get("sample_id")
    tokens = record.get("tokens")
    if not (
        _is_id(step) and _is_id(number) and isinstance(tokens, list) and all(map(_is_id, tokens))
    ):
        return None
    size = len(tokens)
    mask = record.get("loss_mask")
    reasons = record.get("reason")
    text = record.get("text", [""] * size)
    if not (
        _are(mask, size, _is_finite)
        and _are(reasons, size, _is_text)
        and _are(text, size, _is_text)
    ):
        return None
    values = {
        name: [None if x is None else float(f"{x:.6g}") for x in numbers]
        for name, numbers in record.items()
        if name not in _OF_TOKENS and _are(numbers, size, lambda x: x is None or _is_finite(x))
    }
    reward = record.get("reward")
    group = record.get("group_id")
    before = record.get("before")
    return {
        "step": step,
        "id": number,
        "group": group if _is_id(group) else None,
        "reward": reward if _is_finite(reward) else None,
        "before": before if _is_text(before) else "",
        "tokens": tokens,
        "text": text,
        "mask": [x > 0 for x in mask],
        "reasons": reasons,
        "values": values,
    }


def _are(found: Any, size: int, fits: Any) -> bool:
    return isinstance(found, list) and len(found) == size and all(map(fits, found))


def _is_id(x: Any) -> bool:
    # which JavaScript has exactly
    return isinstance(x, int) and not isinstance(x, bool) and abs(x) < 1 << 53


def _is_finite(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and -1e300 < x < 1e300


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def tokens_page(title: str, tokens: Tokens) -> str:
    """The whole page of a run with this title."""
    samples, steps = _that_fit(tokens.samples)
    names = {name for sample in samples for name in sample["values"]}
    columns = [name for name in LABELS if name in names] + sorted(names - {*LABELS})
    data = {"samples": samples, "columns": [[name, LABELS.get(name, name)] for name in columns]}
    shown = len({sample["step"] for sample in samples})
    told = f"a few samples of {shown} of {steps} steps; all that were explained are in tokens.jsonl"
    if tokens.left_out:
        told += f"; {tokens.left_out} lines of it are no records"
    if not samples:
        told = f"no sample yet; {told}"
    script = _SCRIPT.read_text(encoding="utf-8")
    head = [
        (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width,'
            ' initial-scale=1">'
        ),
        policy_tag(_STYLE, script),
        f"<title>{html.escape(title)}: tokens</title><style>{_STYLE}</style>",
    ]
    body = [
        (
            f'<h1>{html.escape(title)}</h1><p>{told}</p><p><a href="report.html">The curves of this'
            " run</a></p>"
        ),
        "<noscript><p>This page is drawn by JavaScript.</p></noscript>",
        (
            '<div id="page"></div><script type="application/json"'
            f' id="data">{_in_script(data)}</script>'
        ),
        f"<script>{script}</script>",
    ]
    return (
        "<!DOCTYPE html><html"
        f' lang="en"><head>{"".join(head)}</head><body>{"".join(body)}</body></html>\n'
    )


def _that_fit(samples: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int]:
    """The samples of as many steps as a page has room for, the first and the last included, and
    the number of all.
    """
    steps = sorted({sample["step"] for sample in samples})
    numbers = sum(len(sample["tokens"]) * (1 + len(sample["values"])) for sample in samples)
    every = max(math.ceil(numbers / _MOST), 1)
    kept = {*steps[::every], *steps[-1:]}
    return [sample for sample in samples if sample["step"] in kept], len(steps)


def _in_script(data: Any) -> str:
    """JSON that holds neither the end of a script element nor the begin of a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
