"""What the prompts of samples have in common: their tokens, and the extras that a model reads with them.

Each prompt becomes a matrix of codes, a row for each token: its id, and for each extra at the input the number of its
value, equal for equal bytes. A prompt's prefix is another's where their codes are equal.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxppo.batch.extras import Extra, common_dtype, without_value
from jaxppo.batch.samples import Sample, extras_of

Codes = Int[np.ndarray, "p columns"]
UNKNOWN = -1  # the code of a token of which an extra says nothing


class Prompts(NamedTuple):
    """The codes of each prompt; the extras of the columns after the first, and the value of each of their codes."""

    codes: list[Codes]
    extras: list[str]
    values: list[list[np.ndarray]]


def prompts_of(samples: Sequence[Sample]) -> Prompts:
    """The codes of all prompts."""
    prompts = Prompts([np.asarray(sample.tokens, np.int32)[: sample.start, None] for sample in samples], [], [])
    for name, extras in extras_of(samples).items():
        if extras[0].at != "input":
            continue
        numbers, values = _numbered(name, samples, extras)
        codes = [np.append(own, more, axis=1) for own, more in zip(prompts.codes, numbers, strict=True)]
        prompts = Prompts(codes, [*prompts.extras, name], [*prompts.values, values])
    return prompts


def _numbered(name: str, samples: Sequence[Sample], extras: Sequence[Extra]) -> tuple[list[Codes], list[np.ndarray]]:
    """A code for each token of each prompt, and the value of each code."""
    dtype = common_dtype(f"extras[{name!r}]", [extra.values for extra in extras])
    numbers: dict[bytes, int] = {}
    values: list[np.ndarray] = []
    codes = []
    for sample, extra in zip(samples, extras, strict=True):
        rows = np.ascontiguousarray(extra.values[: sample.start], dtype)
        unknown = without_value(rows, extra.fill)
        own = np.full((len(rows), 1), UNKNOWN, np.int32)
        for i in np.flatnonzero(~unknown).tolist():
            own[i] = numbers.setdefault(rows[i].tobytes(), len(values))
            if own[i] == len(values):
                values.append(rows[i])
        codes.append(own)
    return codes, values


def in_order(codes: Sequence[Codes]) -> list[int]:
    """The prompts sorted: the longest common prefix of each is then with a neighbour. What is unknown stands last."""
    return sorted(range(len(codes)), key=lambda i: (codes[i].astype(">u4").tobytes(), i))


def in_common(one: Codes, other: Codes, *, or_unknown: bool = False) -> int:
    """How many first tokens are equal in both prompts, or with `or_unknown` do not contradict each other."""
    length = min(len(one), len(other))
    one = one[:length]
    other = other[:length]
    same = one == other
    if or_unknown:
        same |= (one == UNKNOWN) | (other == UNKNOWN)
    return int(np.argmin(np.append(same.all(axis=1), False)))


def with_known(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples, where a value that is unknown in one prompt is that of another which agrees so far.

    An engine's prefix cache leaves such gaps: it has no row of experts for tokens that it did not compute again.
    """
    prompts = prompts_of(samples)
    if not any((codes == UNKNOWN).any() for codes in prompts.codes):
        return samples
    codes = [x.copy() for x in prompts.codes]
    order = in_order(codes)
    for ordered in (order, order[::-1]):
        for before, i in itertools.pairwise(ordered):
            upto = in_common(codes[before], codes[i], or_unknown=True)
            gap = codes[i][:upto] == UNKNOWN
            codes[i][:upto][gap] = codes[before][:upto][gap]
    return [_filled(*each, prompts) for each in zip(samples, prompts.codes, codes, strict=True)]


def _filled(sample: Sample, before: Codes, after: Codes, prompts: Prompts) -> Sample:
    """The sample with the values of the codes that became known."""
    extras = dict(sample.extras or {})
    for column, (name, values) in enumerate(zip(prompts.extras, prompts.values, strict=True), 1):
        known = np.flatnonzero(before[:, column] != after[:, column])
        if known.size:
            filled = np.array(extras[name].values)
            filled[known] = [values[code] for code in after[known, column].tolist()]
            extras[name] = dataclasses.replace(extras[name], values=filled)
    return dataclasses.replace(sample, extras=extras)
