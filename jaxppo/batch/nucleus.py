"""Top-p/top-k replay: the ids that the sampler could draw at each token, brought into a batch's
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxppo.base.arrays import check, check_count, needed
from jaxppo.batch.placing import placed
from jaxppo.batch.rollout_batch import RolloutBatch, check_arrays
from jaxppo.batch.samples import Sample, check_samples
from jaxppo.batch.token_sets import TokenSets

__all__ = ["pack_nucleus_ids"]


def pack_nucleus_ids(
    recorded: Sequence[TokenSets | Sequence[Any]] | None,
    samples: Sequence[Sample],
    batch: RolloutBatch,
    *,
    width: int | None = None,
) -> Int[np.ndarray, "*K R T width"]:
    """Places the sampler's recorded nuclei at the positions of a batch that predict their tokens;
    on the host.

    Pass the result as `nucleus_ids=` to `log_probs_from_hidden` or `log_probs_from_logits`. Both
    keep the sampled token whether it was recorded or not.

    Args:
      recorded: `recorded[i][j]`: the token ids that the sampler could draw at response token j of
        samples[i]; ragged, in any order, negative ids ignored, empty for tokens that a tool wrote.
        Or recorded[i] has flat `token_ids` and `offsets`, which is faster. None takes each sample's
        `nucleus`.
      samples: the samples that the batch was made from.
      batch: `[R, T]` or `[K, R, T]`, in any layout.
      width: the static size of the last dimension; by default the power of two that holds the
        largest nucleus.

    Returns:
      `i32[R, T, width]`, or `[K, R, T, width]`; -1 padded.

    Raises:
      ValueError: a sample whose number of nuclei is not its number of response tokens, a nucleus
        wider than `width`, a sample of the batch that is not among the samples.

    Example:
      >>> samples = [Sample([5, 6, 7], response_start=1)]
      >>> batch = RolloutBatch.from_samples(samples, row_length=4)
      >>> pack_nucleus_ids([[[6, 9], [7]]], samples, batch).tolist()
      [[[6, 9], [7, -1], [-1, -1], [-1, -1]]]
    """
    check_arrays(batch, stacked=True)
    check_samples(samples)
    if width is not None:
        check_count("width", width, least=1)
    if recorded is None:
        recorded = _recorded_by(samples)
    if not isinstance(recorded, Sequence) or isinstance(recorded, str):
        raise TypeError(
            f"recorded: got {type(recorded).__name__}, expected the sets of each sample, or None"
        )
    good = len(recorded) == len(samples)
    check("recorded", f"{len(recorded)} samples", good, f"{len(samples)}, as many as samples")
    nuclei = {}
    for i, (sample, ragged) in enumerate(zip(samples, recorded, strict=True)):
        sets = TokenSets.of(f"recorded[{i}]", ragged).without_negative()
        count = len(sample.tokens) - sample.start
        check(
            f"recorded[{i}]",
            f"{len(sets)} nuclei",
            len(sets) == count,
            f"{count}, one a response token",
        )
        sample_id = i if sample.sample_id is None else sample.sample_id
        nuclei[sample_id] = sets
    widest = max(int(sets.sizes.max(initial=0)) for sets in nuclei.values())
    if width is None:
        width = 1 << max(widest - 1, 0).bit_length()
    check("width", width, widest <= width, f"at least {widest}, the size of the largest nucleus")
    ids = [i for i in np.unique(batch.sample_ids).tolist() if i >= 0]
    for i in ids:
        check("samples", f"none with sample_id {i}", i in nuclei, "all samples of the batch")
    if not ids:  # the rows of a process of a pod may all be padding
        return np.full((*batch.segment_ids.shape, width), -1, np.int32)
    return placed(batch, {i: nuclei[i].padded(width) for i in ids}, "predicting", -1)


def _recorded_by(samples: Sequence[Sample]) -> list[TokenSets]:
    """The nuclei that the samples hold."""
    recorded: list[Any] = []
    for i, sample in enumerate(samples):
        nucleus = sample.nucleus
        if sample.start == len(sample.tokens):  # it has no token that could have a nucleus
            nucleus = TokenSets.empty(0)
        recorded.append(needed(f"samples[{i}].nucleus", nucleus, "the recorded ids of each token"))
    return recorded
