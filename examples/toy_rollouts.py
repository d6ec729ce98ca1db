"""The data of the frameworks' examples: rollouts that reward even tokens and punish odd ones."""

import math

import numpy as np

from jaxppo import ParallelMesh, RolloutBatch, Sample

VOCAB, WIDTH = 128, 32


def rollouts(seed: int, parallel: ParallelMesh | None) -> RolloutBatch:
    """16 samples, whose lengths depend on the seed, in rows whose number and length never change."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(16):
        length = 2 * int(rng.integers(2, 7))
        tokens = 2 * rng.integers(0, 8, 3 + length) + np.arange(3 + length) % 2  # even and odd tokens in turns
        response = tokens[3:]
        samples.append(
            Sample(
                tokens,
                response_start=3,
                group_id=group,
                advantages=np.where(response % 2 == 0, 1.0, -1.0),
                old_log_probs=np.full(len(response), -math.log(VOCAB)),
            )
        )
    batch = RolloutBatch.from_samples(samples, row_length=32, rows=16, num_segments=4, parallel=parallel)
    return batch if parallel is None else batch.put(parallel)
