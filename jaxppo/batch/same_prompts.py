"""One group id, one prompt: advantages compare the samples of a group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxppo.batch.samples import Sample
from jaxppo.sharding import multihost

Prompts = dict[int, list[np.ndarray]]
"""By group id, the prompts of the samples of one rollout."""


def check_groups(samples: Sequence[Sample]) -> Prompts:
    """Raises where one group id has two prompts, whose samples would then be compared; returns the prompts.

    Two rollouts have the same prompt if that is so for a sample of each. Two samples do if the longer prompt begins
    with the shorter: a later part of a rollout continues the prompt of the first, or has a context that was rewritten.
    """
    first: dict[int, int] = {}
    rollouts: dict[int, dict[Any, list[int]]] = {}
    for i, sample in enumerate(samples):
        if sample.group_id is not None:
            first.setdefault(sample.group_id, i)
            own = ("sample", i) if sample.rollout_id is None else sample.rollout_id
            rollouts.setdefault(sample.group_id, {}).setdefault(own, []).append(i)

    def prompts(of: Sequence[int]) -> list[np.ndarray]:
        return [np.asarray(samples[i].tokens[: samples[i].start], np.int32) for i in of]

    known = {group: prompts(next(iter(by_rollout.values()))) for group, by_rollout in rollouts.items()}
    for group, by_rollout in rollouts.items():
        for of in by_rollout.values():
            if not any(_begins_alike(a, b) for a in prompts(of) for b in known[group]):
                raise ValueError(
                    f"group_id: got {group} for different prompts in samples {first[group]} and {of[0]}, expected ids "
                    "that are equal for the samples of one prompt only; parts of one rollout may differ, with a "
                    "rollout_id"
                )
    return known


def _begins_alike(a: np.ndarray, b: np.ndarray) -> bool:
    shorter = min(len(a), len(b))
    return bool((a[:shorter] == b[:shorter]).all())


def check_groups_of_hosts(known: Prompts) -> None:
    """Raises where hosts gave one group id to different prompts, as `check_groups` on one host; all must call this."""
    lengths = np.array([(g, len(p)) for g, prompts in known.items() for p in prompts], np.int64).reshape(-1, 2)
    ends: dict[int, set[int]] = {}
    for group, length in np.concatenate(multihost.gather(lengths)).tolist():
        ends.setdefault(group, set()).add(length)
    prints = [
        (group, end, zlib.crc32(prompt[:end].tobytes()))
        for group, prompts in known.items()
        for prompt in prompts
        for end in ends[group]
        if end <= len(prompt)
    ]
    seen: dict[int, set[tuple[int, int]]] = {}
    for of_host in multihost.gather(np.array(prints, np.int64).reshape(-1, 3)):
        own: dict[int, set[tuple[int, int]]] = {}
        for group, end, fingerprint in of_host.tolist():
            own.setdefault(group, set()).add((end, fingerprint))
        for group, starts in own.items():
            if not starts & seen.setdefault(group, starts):
                raise ValueError(
                    f"group_id: got {group} for different prompts on several hosts, expected ids that are equal for "
                    "the samples of one prompt only; add an offset of its own on each host"
                )
