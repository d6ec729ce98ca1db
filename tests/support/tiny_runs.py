"""Runs of the trainer with a tiny model, and what they report."""

import json

TINY = ["--width", "16", "--layers", "1", "--prompts", "4", "--samples", "4", "--held-out", "16"]
TINY += ["--task", "gcd"]  # whose prompts are of many lengths
# runs of several modules have these options, and share the steps that one of them compiled
USUAL = [*TINY, "--learning-rate", "0.01", "--kl-coef", "0.1"]
ONE_UPDATE = [*USUAL, "--updates", "1", "--explain", "16"]  # all samples of a step are explained


def records(folder):
    """The numbers of each step, but for those of the machine.

    Anything else than finite numbers and null fails.
    """

    def refuse(text):
        raise ValueError(text)

    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = (json.loads(line, parse_constant=refuse) for line in lines)
    return [
        {k: v for k, v in line.items() if k not in ("tokens_per_second", "memory_gib")}
        for line in found
    ]
