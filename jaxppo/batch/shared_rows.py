"""What the prompts of samples, or whole samples, have in common: tokens, and the extras that are
read with them.

Each prompt becomes a matrix of codes, a row for each token: its id, and for each extra at the input
the number of its value, equal for equal bytes. A prompt's prefix is another's where their codes are
equal.
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
    """The codes of each prompt, or of each whole sample.

    Each column after the first has the name of an extra, and the value of each of its codes.
    """

    codes: list[Codes]
    extras: list[str]
    values: list[list[np.ndarray]]


def prompts_of(samples: Sequence[Sample], responses: bool = False) -> Prompts:
    """The codes of all prompts; with `responses` those of whole samples."""
    stops = [len(sample.tokens) if responses else sample.start for sample in samples]
    tokens = [np.asarray(sample.tokens, np.int32) for sample in samples]
    prompts = Prompts([own[:stop, None] for own, stop in zip(tokens, stops, strict=True)], [], [])
    for name, extras in extras_of(samples).items():
        if extras[0].at != "input":
            continue
        numbers, values = _numbered(name, extras, stops)
        codes = [
            np.append(own, more, axis=1) for own, more in zip(prompts.codes, numbers, strict=True)
        ]
        prompts = Prompts(codes, [*prompts.extras, name], [*prompts.values, values])
    return prompts


def _numbered(
    name: str, extras: Sequence[Extra], stops: Sequence[int]
) -> tuple[list[Codes], list[np.ndarray]]:
    """A code for each token up to these, and the value of each code."""
    dtype = common_dtype(f"extras[{name!r}]", [extra.values for extra in extras])
    numbers: dict[bytes, int] = {}
    values: list[np.ndarray] = []
    codes = []
    for extra, stop in zip(extras, stops, strict=True):
        rows = np.ascontiguousarray(extra.values[:stop], dtype)
        unknown = without_value(rows, extra.fill)
        own = np.full((len(rows), 1), UNKNOWN, np.int32)
        for i in np.flatnonzero(~unknown).tolist():
            own[i] = numbers.setdefault(rows[i].tobytes(), len(values))
            if own[i] == len(values):
                values.append(rows[i])
        codes.append(own)
    return codes, values


def with_targets(
    codes: Sequence[Codes], samples: Sequence[Sample], names: Sequence[str]
) -> list[Codes]:
    """The codes of whole samples, and one more of each token for each of these extras, which
    predictors have.

    A code is unknown where the sample does not train on the token: what it says there is not read.
    """
    longer = list(codes)
    extras = extras_of(samples)
    for name in names:
        dtype = common_dtype(f"extras[{name!r}]", [extra.values for extra in extras[name]])
        numbers: dict[bytes, int] = {}
        for i, (sample, extra) in enumerate(zip(samples, extras[name], strict=True)):
            rows = np.ascontiguousarray(extra.values, dtype)
            own = np.full((len(sample.tokens), 1), UNKNOWN, np.int32)
            for t in np.flatnonzero(sample.mask > 0).tolist():
                own[t] = numbers.setdefault(rows[t - sample.start].tobytes(), len(numbers))
            longer[i] = np.append(longer[i], own, axis=1)
    return longer


def in_order(codes: Sequence[Codes]) -> list[int]:
    """The prompts sorted: the longest common prefix of each is then with a neighbour.

    What is unknown stands last.
    """
    return sorted(range(len(codes)), key=lambda i: (codes[i].astype(">u4").tobytes(), i))


def in_common(one: Codes, other: Codes, *, or_unknown: bool = False) -> int:
    """How many first tokens are equal in both prompts, or with `or_unknown` do not contradict
    each other.
    """
    length = min(len(one), len(other))
    one = one[:length]
    other = other[:length]
    same = one == other
    if or_unknown:
        same |= (one == UNKNOWN) | (other == UNKNOWN)
    return int(np.argmin(np.append(same.all(axis=1), False)))


def with_known(samples: Sequence[Sample], responses: bool = False) -> Sequence[Sample]:
    """The samples, where a value that is unknown in one prompt is that of another which agrees so
    far.

    An engine's prefix cache leaves such gaps: it has no row of experts for tokens that it did not
    compute again. With `responses` whole samples are filled.
    """
    prompts = prompts_of(samples, responses)
    if not any((codes == UNKNOWN).any() for codes in prompts.codes):
        return samples
    codes = known_codes(prompts.codes)
    return [_filled(*each, prompts) for each in zip(samples, prompts.codes, codes, strict=True)]


def known_codes(codes: Sequence[Codes], first: int = 0) -> list[Codes]:
    """The codes, where one that is unknown is that of another prompt which agrees so far; in
    columns from `first`.
    """
    known = [x.copy() for x in codes]
    order = in_order(known)
    for ordered in (order, order[::-1]):
        for before, i in itertools.pairwise(ordered):
            upto = in_common(known[before], known[i], or_unknown=True)
            own = known[i][:upto, first:]
            gap = own == UNKNOWN
            own[gap] = known[before][:upto, first:][gap]
    return known


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
