"""Steps whose prompts have common prefixes on three levels, as batches that hold each prefix
once or repeat it.
"""

import dataclasses

import numpy as np
from policy_steps import step_of

from jaxppo import RolloutBatch, Sample

# prefixes: of all samples, and of the first two of three groups
SYSTEM = [41, 42, 43]
TOOLS = [44, 45, 46, 47]


def three_levels(seed: int, count: int = 9) -> list[Sample]:
    """`step_of` with longer prompts: the system's tokens, those of tools, and those of the
    group.
    """
    rng = np.random.default_rng(seed)
    questions = [[10 + group, *rng.integers(0, 40, 4)] for group in range(count)]
    samples = []
    for sample in step_of(seed, count):
        before = [*SYSTEM, *(TOOLS if sample.group_id < 2 else []), *questions[sample.group_id]]
        samples.append(
            dataclasses.replace(
                sample,
                tokens=[*before, *sample.tokens],
                response_start=len(before) + sample.response_start,
                loss_mask=[*[0] * len(before), *sample.loss_mask],
                reward=float(rng.normal()),
            )
        )
    return samples


def both(samples, **options) -> tuple[RolloutBatch, RolloutBatch]:
    """The samples packed in plain rows, and in rows as trees."""
    depths = {"mtp_depths": options.pop("mtp_depths")} if "mtp_depths" in options else {}
    whole = RolloutBatch.from_samples(samples, **options)
    return whole, RolloutBatch.from_samples(samples, share_prefixes=True, **depths, **options)


def by_token(x, batch: RolloutBatch) -> dict:
    """{(sample, position): value} of a packed array at positions with loss, for any packing and
    layout.
    """

    def rows(a):
        return np.asarray(a).reshape(-1, *np.shape(a)[batch.loss_mask.ndim - 1 :])

    x, mask, segments, positions = (
        rows(a) for a in (x, batch.loss_mask, batch.segment_ids, batch.positions)
    )
    samples = np.asarray(batch.sample_ids).reshape(-1, batch.num_segments)
    places = np.argwhere(mask > 0)
    return {(int(samples[r, segments[r, t] - 1]), int(positions[r, t])): x[r, t] for r, t in places}


def assert_same_tokens(x, batch, y, other, **tolerance):
    """Both arrays have the same value at each token with loss."""
    found = by_token(x, batch)
    expected = by_token(y, other)
    assert found.keys() == expected.keys()
    got, want = (
        np.array([values[key] for key in sorted(expected)]) for values in (found, expected)
    )
    np.testing.assert_allclose(got, want, **tolerance)
