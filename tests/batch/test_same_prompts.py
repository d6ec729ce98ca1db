"""A group id is of one prompt: samples of two prompts would be compared with one another."""

import numpy as np
import pytest

from jaxppo import RolloutBatch, Sample


def sample(prompt, *response, **ids):
    return Sample([*prompt, *response], response_start=len(prompt), reward=1.0, **ids)


ONE_PROMPT = {
    "siblings": [
        sample([5, 6], 7, group_id=3),
        sample([5, 6], 8, 9, group_id=3),
        sample([4], 1, group_id=1),
    ],
    "a later turn continues the prompt": [
        sample([5, 6], 7, group_id=3, rollout_id=0),
        sample([5, 6, 7, 8], 9, group_id=3, rollout_id=0),
        sample([5, 6, 2, 1], 9, group_id=3, rollout_id=1),
        sample([5, 6], 2, group_id=3, rollout_id=1),
    ],
    "a later part has a context that was rewritten": [
        sample([5, 6], 7, group_id=3, rollout_id=0),
        sample([9, 9, 9], 9, group_id=3, rollout_id=1),
        sample([5, 6], 4, group_id=3, rollout_id=1),
        sample([8], 4, group_id=3, rollout_id=0),
    ],
    "numpy": [sample(np.array([5, 6]), 7, group_id=np.int64(3)), sample([5, 6], 7, group_id=3)],
    "no groups": [sample([5, 6], 7), sample([4], 1)],
}


@pytest.mark.parametrize("name", ONE_PROMPT)
def test_samples_of_one_prompt_are_packed(name):
    samples = ONE_PROMPT[name]
    assert (RolloutBatch.from_samples(samples, row_length=16).sample_ids >= 0).sum() == len(samples)


TWO_PROMPTS = {
    "two prompts": (
        [sample([5, 6], 7, group_id=3), sample([5, 8], 7, group_id=3)],
        "3 for .* in samples 0 and 1",
    ),
    "the third": (
        [sample(p, 7, group_id=g) for p, g in (([4], 1), ([5, 6], 3), ([5, 6], 3), ([4, 5, 6], 3))],
        "3 for different prompts in samples 1 and 3",
    ),
    "parts that nobody says belong together": (
        [sample([5, 6], 7, group_id=3), sample([9, 9], 9, group_id=3)],
        "with a rollout_id",
    ),
    "rollouts of two prompts": (
        [
            sample(p, 7, group_id=3, rollout_id=i // 2)
            for i, p in enumerate(([5, 6], [9], [4, 6], [2]))
        ],
        "in samples 0 and 2",
    ),
}


@pytest.mark.parametrize("name", TWO_PROMPTS)
@pytest.mark.parametrize("share_prefixes", [False, True])
def test_two_prompts_of_one_group_are_refused(name, share_prefixes):
    samples, message = TWO_PROMPTS[name]
    with pytest.raises(ValueError, match=f"group_id: got .*{message}"):
        RolloutBatch.from_samples(samples, row_length=16, share_prefixes=share_prefixes)
