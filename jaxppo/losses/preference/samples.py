"""Samples and micro-batches of pairs, on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxppo.base.arrays import check, check_count, check_number, needed
from jaxppo.batch.host import as_list
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.samples import Sample, as_tokens, check_samples
from jaxppo.sharding import ParallelMesh, check_parallel, multihost

TokenIds = Sequence[int] | Int[np.ndarray, "n"]


def samples_of_pairs(
    prompts: Sequence[TokenIds],
    chosen: Sequence[TokenIds],
    rejected: Sequence[TokenIds],
    *,
    margins: Sequence[float] | None = None,
    first_id: int = 0,
) -> list[Sample]:
    """Makes samples from lists of prompts, chosen and rejected responses: two for each pair, next
    to each other.

    Args:
      prompts, chosen, rejected: token ids of each prompt, and of the better and the worse response
        to it.
      margins: how much better each chosen response is, above 0; by default 1.
      first_id: the group id of the first pair; the next pairs have the next ids. Hosts of one run
        need different ids.

    Returns:
      Samples with `group_id`, `response_start` and `reward`: the margin for chosen ones, else 0.

    Raises:
      ValueError: lists of other lengths, an empty response or prompt, a margin that is not above 0.

    Example:
      >>> samples = samples_of_pairs([[1, 2]], chosen=[[3]], rejected=[[4, 5]])
      >>> [(x.tokens, x.group_id, x.reward) for x in samples]
      [([1, 2, 3], 0, 1.0), ([1, 2, 4, 5], 0, 0.0)]
    """
    arguments: dict[str, Any] = {"prompts": prompts, "chosen": chosen, "rejected": rejected}
    if margins is not None:
        arguments["margins"] = margins
    expected = "a list with one entry a pair"
    lists = {name: as_list(name, x, expected) for name, x in arguments.items()}
    count = len(lists["prompts"])
    for name, x in lists.items():
        check(name, len(x), len(x) == count, f"{count}, as many as prompts")
    of_pairs = lists.pop("margins", [1.0] * count)
    check_count("first_id", first_id)
    samples = []
    for i in range(count):
        margin = check_number(f"margins[{i}]", of_pairs[i], above=0)
        prompt, *responses = (as_tokens(f"{name}[{i}]", x[i]).tolist() for name, x in lists.items())
        for name, tokens in zip(lists, (prompt, *responses), strict=True):
            check(f"{name}[{i}]", "no token", bool(tokens), "at least one")
        for tokens, reward in zip(responses, (margin, 0.0), strict=True):
            samples.append(
                Sample(prompt + tokens, len(prompt), reward=reward, group_id=first_id + i)
            )
    return samples


def mismatched_samples(samples: Sequence[Sample]) -> list[Sample]:
    """As many samples, of each prompt with the response of the next sample of another group:
    `kto_reference_point`'s.

    Args:
      samples: at least two groups of them; only tokens, prompts, masks and group ids are read.

    Raises:
      ValueError: a sample without a group id where no other tells them apart.

    Example:
      >>> samples = [Sample([1, 2], 1, group_id=0), Sample([5, 6, 7], 1, group_id=1)]
      >>> [x.tokens for x in mismatched_samples(samples)]
      [[1, 6, 7], [5, 2]]
    """
    check_samples(samples)
    count = len(samples)
    groups = [i if s.group_id is None else s.group_id for i, s in enumerate(samples)]
    mismatched = []
    for i, sample in enumerate(samples):
        others = (
            samples[j % count] for j in range(i + 1, i + count) if groups[j % count] != groups[i]
        )
        other = next(others, None)
        if other is None:
            raise ValueError(
                f"samples: got the group {groups[i]} alone, expected samples of another prompt too"
            )
        prompt = list(sample.tokens)[: sample.start]
        mask = [*[0.0] * len(prompt), *other.mask[other.start :]]
        mismatched.append(
            Sample([*prompt, *list(other.tokens)[other.start :]], len(prompt), loss_mask=mask)
        )
    return mismatched


def micro_batches_of_pairs(
    samples: Sequence[Sample],
    micro_batches: int,
    *,
    parallel: ParallelMesh | None = None,
    **options: Any,
) -> RolloutBatch:
    """Samples of pairs as micro-batches `[K, R, T]` of about as many tokens, both of a pair in one;
    numpy arrays.

    Args:
      samples: see `samples_of_pairs`; group ids tell which belong together.
      micro_batches: K.
      parallel, **options: see `RolloutBatch.from_samples`; `rows` are those of each micro-batch.

    Raises:
      ValueError: fewer groups than micro-batches, a sample without a group id, no `rows` where
        several processes pack, what `from_samples` raises.

    Example:
      >>> samples = samples_of_pairs([[1], [2]], chosen=[[3, 4], [5]], rejected=[[6], [7]])
      >>> batches = micro_batches_of_pairs(samples, 2, row_length=8)
      >>> batches.group_ids[batches.group_ids >= 0].tolist()
      [0, 0, 1, 1]
    """
    check_samples(samples)
    if "twin" in options:
        raise TypeError(
            "twin: got one in micro_batches_of_pairs, expected it in RolloutBatch.from_samples"
            " alone"
        )
    check_parallel(parallel, "ParallelMesh or None")
    hosts = parallel if parallel is not None and multihost.spans_processes(parallel) else None
    first = 0
    if hosts:
        needed(
            "rows",
            options.get("rows"),
            "the rows of each micro-batch, since several processes pack them",
        )
        first = multihost.numbers_before(hosts, len(samples))
    groups: dict[int, list[Sample]] = {}
    for i, sample in enumerate(samples):
        group_id = needed(
            f"samples[{i}].group_id", sample.group_id, "one id for both samples of a pair"
        )
        sample_id = first + i if sample.sample_id is None else sample.sample_id
        groups.setdefault(group_id, []).append(dataclasses.replace(sample, sample_id=sample_id))
    check_count("micro_batches", micro_batches, least=1)
    check(
        "micro_batches",
        micro_batches,
        micro_batches <= len(groups),
        f"1 to {len(groups)}, the number of pairs",
    )
    shares = _equal_shares(groups.values(), micro_batches)

    def packed(**sizes: int | None) -> list[RolloutBatch]:
        return [
            RolloutBatch.from_samples(share, parallel=parallel, **{**options, **sizes})
            for share in shares
        ]

    batches = packed()
    rows, segments = (max(x.sample_ids.shape[axis] for x in batches) for axis in (0, 1))
    if any(x.sample_ids.shape != (rows, segments) for x in batches):  # pack again, all in one shape
        batches = packed(
            num_segments=segments, **({} if hosts else {"rows": rows, "buckets": None})
        )
    stacked: RolloutBatch = jax.tree.map(lambda *x: np.stack(x), *batches)
    return dataclasses.replace(stacked, micro_batches=micro_batches)


def _equal_shares(groups: Iterable[list[Sample]], count: int) -> list[list[Sample]]:
    """The samples in so many shares of about as many tokens, each group in one of them."""
    shares: list[list[Sample]] = [[] for _ in range(count)]
    tokens = [0] * count
    by_size = [(sum(len(sample.tokens) for sample in group), group) for group in groups]
    # the longest first, each to the share with the fewest tokens
    for size, group in sorted(by_size, key=lambda sized: -sized[0]):
        least = tokens.index(min(tokens))
        tokens[least] += size
        shares[least] += group
    return shares
