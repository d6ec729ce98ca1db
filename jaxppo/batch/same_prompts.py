"""One group id, one prompt: advantages compare the samples of a group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxppo.base.arrays import check
from jaxppo.batch.samples import Sample
from jaxppo.sharding import multihost

Prompts = dict[int, list[np.ndarray]]  # by group id, the prompts of the samples of one rollout
_EXPECTED = "ids that are equal for the samples of one prompt only"


def check_groups(samples: Sequence[Sample]) -> Prompts:
    """Raises where one group id has two prompts, whose samples would then be compared; returns the
    prompts.

    Two rollouts have the same prompt if that is so for a sample of each. Two samples do if the
    longer prompt begins with the shorter: a later part of a rollout continues the prompt of the
    first, or has a context that was rewritten.
    """
    groups: dict[int, dict[Any, list[int]]] = {}
    for i, sample in enumerate(samples):
        if sample.group_id is not None:
            rollout = ("sample", i) if sample.rollout_id is None else sample.rollout_id
            groups.setdefault(sample.group_id, {}).setdefault(rollout, []).append(i)
    known: Prompts = {}
    for group, rollouts in groups.items():
        first = next(iter(rollouts.values()))[0]
        for members in rollouts.values():
            prompts = [np.asarray(samples[i].tokens[: samples[i].start], np.int32) for i in members]
            others = known.setdefault(group, prompts)
            same = any(_begins_alike(prompt, other) for prompt in prompts for other in others)
            got = f"{group} for different prompts in samples {first} and {members[0]}"
            check(
                "group_id",
                got,
                same,
                f"{_EXPECTED}; parts of one rollout may differ, with a rollout_id",
            )
    return known


def _begins_alike(a: np.ndarray, b: np.ndarray) -> bool:
    shorter = min(len(a), len(b))
    return bool((a[:shorter] == b[:shorter]).all())


def check_groups_of_hosts(known: Prompts) -> None:
    """Raises where hosts gave one group id to different prompts, as `check_groups` on one host;
    all must call this.
    """
    own_lengths = [(group, len(prompt)) for group, prompts in known.items() for prompt in prompts]
    lengths = np.concatenate(_gathered(own_lengths, 2))
    own_begins = []
    for group, length in sorted(set(map(tuple, lengths.tolist()))):
        for prompt in known.get(group, ()):
            if length <= len(prompt):
                own_begins.append((group, length, zlib.crc32(prompt[:length].tobytes())))
    seen: dict[int, set[tuple[int, ...]]] = {}
    for begins in _gathered(own_begins, 3):
        for group in np.unique(begins[:, 0]).tolist():
            in_group = set(map(tuple, begins[begins[:, 0] == group].tolist()))
            same = not in_group.isdisjoint(seen.setdefault(group, in_group))
            got = f"{group} for different prompts on several hosts"
            check("group_id", got, same, f"{_EXPECTED}; add an offset of its own on each host")


def _gathered(rows: Sequence[tuple[int, ...]], columns: int) -> list[np.ndarray]:
    """The rows of each host, as matrices."""
    return multihost.gather(np.array(rows, np.int64).reshape(-1, columns))
