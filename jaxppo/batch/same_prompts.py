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
    """Raises where one group id has two prompts, whose samples would then be compared; returns the prompts.

    Two rollouts have the same prompt if that is so for a sample of each. Two samples do if the longer prompt begins
    with the shorter: a later part of a rollout continues the prompt of the first, or has a context that was rewritten.
    """
    groups: dict[int, dict[Any, list[int]]] = {}
    for i, sample in enumerate(samples):
        if sample.group_id is not None:
            rollout = ("sample", i) if sample.rollout_id is None else sample.rollout_id
            groups.setdefault(sample.group_id, {}).setdefault(rollout, []).append(i)
    known: Prompts = {}
    for group, rollouts in groups.items():
        for members in rollouts.values():
            prompts = [np.asarray(samples[i].tokens[: samples[i].start], np.int32) for i in members]
            first = next(iter(rollouts.values()))[0]
            same = any(_begins_alike(a, b) for a in prompts for b in known.setdefault(group, prompts))
            got = f"{group} for different prompts in samples {first} and {members[0]}"
            check("group_id", got, same, f"{_EXPECTED}; parts of one rollout may differ, with a rollout_id")
    return known


def _begins_alike(a: np.ndarray, b: np.ndarray) -> bool:
    shorter = min(len(a), len(b))
    return bool((a[:shorter] == b[:shorter]).all())


def check_groups_of_hosts(known: Prompts) -> None:
    """Raises where hosts gave one group id to different prompts, as `check_groups` on one host; all must call this."""
    lengths = np.array([(g, len(p)) for g, prompts in known.items() for p in prompts], np.int64).reshape(-1, 2)
    ends = sorted(set(map(tuple, np.concatenate(multihost.gather(lengths)).tolist())))
    begins = [(g, end, zlib.crc32(p[:end].tobytes())) for g, end in ends for p in known.get(g, ()) if end <= len(p)]
    seen: dict[int, set[tuple[int, ...]]] = {}
    for of_host in multihost.gather(np.array(begins, np.int64).reshape(-1, 3)):
        for group in np.unique(of_host[:, 0]).tolist():
            found = set(map(tuple, of_host[of_host[:, 0] == group].tolist()))
            same = not found.isdisjoint(seen.setdefault(group, found))
            got = f"{group} for different prompts on several hosts"
            check("group_id", got, same, f"{_EXPECTED}; add an offset of its own on each host")
