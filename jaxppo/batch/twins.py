"""Two batches of the same responses behind other prompts, each response at the same positions in both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxppo.base.arrays import check
from jaxppo.batch.samples import Sample, check_samples
from jaxppo.sharding import Packed, ParallelMesh, segment_multiple


def check_twin(
    samples: Sequence[Sample], twin: Sequence[Sample], share_prefixes: bool, parallel: ParallelMesh | None
) -> None:
    """Raises unless the twin has the samples' responses, and both can be packed with these at the same positions."""
    check_samples(twin, "twin")
    if len(twin) != len(samples):
        raise ValueError(f"twin: got {len(twin)} samples, expected {len(samples)}, one for each of samples")
    for i, (sample, other) in enumerate(zip(samples, twin, strict=True)):
        mine, theirs = (np.asarray(x.tokens)[x.start :] for x in (sample, other))
        if len(mine) != len(theirs):
            got = f"a response of {len(theirs)} tokens in sample {i}"
            expected = f"that of samples[{i}], {len(mine)} tokens"
        elif (mine != theirs).any():
            at = int(np.argmax(mine != theirs))
            got = f"{theirs[at]} as response token {at} of sample {i}"
            expected = f"{mine[at]}, as in samples[{i}]"
        elif other.sample_id not in (None, sample.sample_id):
            got = f"sample_id {other.sample_id} in sample {i}"
            expected = f"{sample.sample_id}, as in samples[{i}]"
        else:
            continue
        raise ValueError(f"twin: got {got}, expected {expected}")
    check("share_prefixes", share_prefixes, not share_prefixes, "False with a twin, whose prompts are other ones")
    if parallel is not None and segment_multiple(parallel.context_layout, parallel.context_size) > 1:
        raise ValueError(
            f"parallel: got context layout {parallel.context_layout!r} with a twin, expected another: it places the "
            "tokens of a sequence by the sequence's length, which differs between twins"
        )


def at_ends(packed: Packed, samples: Sequence[Sample]) -> Packed:
    """The places of samples that end where their rooms end; what is free before the shorter one stays padding."""
    lengths = np.array([len(sample.tokens) for sample in samples], np.int32)
    return dataclasses.replace(packed, lengths=lengths, start=packed.start + packed.lengths - lengths)
