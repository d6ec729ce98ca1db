"""Batches with the fields of simply's `RLTrainingExampleBatch`, as its
`rl_lib.create_train_batch` fills them.
"""

import numpy as np

V, R, T = 64, 6, 9


def fields(seed=0):
    """Six samples of several lengths, tool tokens in some, one of them not valid for training,
    one row of padding.
    """
    rng = np.random.default_rng(seed)
    lengths = np.array([9, 7, 4, 8, 6, 0])[:, None]
    places = np.arange(T)[None]
    there = places < lengths
    trained = there & (places >= 2) & (places != 5 - np.arange(R)[:, None] % 2)
    whole = rng.integers(1, V, (R, T + 1))
    return {
        "input_tokens": np.where(there, whole[:, :-1], 0),
        "target_tokens": np.where(there, whole[:, 1:], 0),
        "logprobs": np.where(there, rng.normal(-4.2, 0.3, (R, T)), 0),
        "target_mask": there,
        "answer_mask": trained,
        "in_batch_example_id": np.array([1, 1, 1, 2, 2, 0]),
        "reward": rng.normal(size=R),
        "is_correct": np.zeros(R, bool),
        "is_valid_for_training": np.array([True, True, False, True, True, False]),
        "ref_logprobs": np.where(trained, rng.normal(-4.1, 0.3, (R, T)), 0),
        "extra_inputs": {},
    }
