"""Small batches by each constructor that takes arrays.

Tests of bad input change one of the arguments.
"""

import numpy as np

from jaxppo import RolloutBatch

IDS = np.array([[1, 2, 3, 4]])
ONES = np.ones((1, 4), np.int32)


def padded(**changes):
    given = {"prompt_ids": IDS, "completion_ids": IDS, "completion_mask": ONES} | changes
    return RolloutBatch.from_padded(**given)


def aligned(**changes):
    given = {"tokens": IDS, "segment_ids": ONES, "positions": IDS - 1, "loss_mask": ONES} | changes
    return RolloutBatch.from_token_aligned(**given)


def shifted(**changes):
    given = {
        "tokens": IDS,
        "targets": IDS,
        "segment_ids": ONES,
        "positions": IDS - 1,
        "loss_mask": ONES,
    } | changes
    return RolloutBatch.from_target_aligned(**given)


def thd(**changes):
    given = {
        "tokens": IDS,
        "cu_seqlens": np.array([0, 4]),
        "loss_mask": ONES,
        "aligned": "token",
    } | changes
    return RolloutBatch.from_cu_seqlens(**given)
