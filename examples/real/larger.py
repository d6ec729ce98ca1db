"""A task for `train_grpo --task`: which of two numbers is larger.

They have two digits, and other tens.

The base model answers about every other question rightly, which is chance.
"""

from __future__ import annotations

import random
from typing import Any


def question(i: int) -> dict[str, Any]:
    """The i-th question. Both orders of two numbers count as one, so that neither is trained on if
    the other is held out.
    """
    draw = random.Random(i)
    a = draw.randint(10, 99)
    b = draw.randint(10, 99)
    while a // 10 == b // 10:
        b = draw.randint(10, 99)
    return {
        "question": f"Which is larger, {a} or {b}?",
        "answer": str(max(a, b)),
        "id": (min(a, b), max(a, b)),
    }


def score(text: str, entry: dict[str, Any]) -> float:
    """1 for the larger number and nothing else, 0 for any other text."""
    return float(text.strip() == entry["answer"])
