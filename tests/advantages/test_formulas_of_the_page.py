"""The table of formulas on the page "Which loss when": each in float64, and its epsilon against
the signature.
"""

import inspect
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import RolloutBatch, Sample, advantages

PAGE = (Path(__file__).parents[2] / "docs/choosing_a_loss.md").read_text()
TABLE = PAGE[PAGE.index("| estimator | advantage | epsilon |") :].partition("\n\n")[0]
EPSILON = {
    name: last.strip()
    for name, last in re.findall(r"^\| `(\w+)` \|.*\| ?([^|]*)\|$", TABLE, re.MULTILINE)
}
REWARDS = np.array([1.0, 0.25, 0.5, 0.0, 0.75])
GROUPS = np.array([0, 0, 0, 1, 1])
LENGTHS = np.array([1, 2, 3, 1, 2])
SAMPLES = [
    Sample([5] * (n + 1), 1, reward=r, group_id=g)
    for n, r, g in zip(LENGTHS, REWARDS, GROUPS, strict=True)
]
BATCH = RolloutBatch.from_samples(SAMPLES, row_length=16)


def grouped(of_group):
    """The values of a function of each group's rewards and lengths."""
    out = np.zeros(5)
    for group in (0, 1):
        here = group == GROUPS
        out[here] = of_group(REWARDS[here], LENGTHS[here])
    return out


def whitened(by_sample, epsilon=1e-12):
    x = np.repeat(by_sample, LENGTHS)
    return (by_sample - x.mean()) / np.sqrt(x.var(ddof=1) + epsilon)


# Functions of one group's rewards and lengths


def standardized(rewards, lengths):
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def centred(rewards, lengths):
    return rewards - rewards.mean()


def centred_by_length(rewards, lengths):
    return rewards - np.average(rewards, weights=lengths)


def over_mean(rewards, lengths):
    return centred(rewards, lengths) / rewards.mean()


def best_alone(rewards, lengths):
    order = np.sort(rewards)
    lead = (order[-1] - order[-2]) / (rewards.std(ddof=1) + 1e-6)
    return np.where(rewards == order[-1], lead, 0)


def of_others(rewards, lengths):
    return np.array([r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)])


IN_GROUPS = {"rewards": BATCH.rewards, "group_ids": BATCH.group_ids}
EXPECTED = {
    "grpo": grouped(standardized),
    "dr_grpo": grouped(centred),
    "rloo": grouped(of_others),
    "opo": grouped(centred_by_length),
    "pass_at_k": grouped(best_alone),
    "gpg": grouped(centred) * 5 / 4,
    "maxrl": grouped(over_mean),
    "standardize": (REWARDS - REWARDS.mean()) / (REWARDS.std(ddof=1) + 1e-5),
    "gdpo": whitened(grouped(standardized)),
    "reinforce_plus_plus": whitened(REWARDS),
    "reinforce_plus_plus_baseline": whitened(grouped(centred)),
    "whiten": whitened(REWARDS),
}
TOKENS = advantages.spread(BATCH.rewards, BATCH)
ARGUMENTS = {
    "opo": {
        **IN_GROUPS,
        "lengths": jnp.asarray([[LENGTHS[i] if i >= 0 else 0 for i in BATCH.sample_ids[0]]]),
    },
    "gdpo": {"rewards": [BATCH.rewards], "group_ids": BATCH.group_ids, "batch": BATCH},
    "reinforce_plus_plus": {
        "rewards": advantages.token_rewards(BATCH.rewards, BATCH),
        "batch": BATCH,
    },
    "reinforce_plus_plus_baseline": {**IN_GROUPS, "batch": BATCH},
    "whiten": {"x": TOKENS, "mask": BATCH.loss_mask},
}


def of_each_sample(found):
    """The value of each sample, of arrays `[R, S]` or `[R, T]`; all tokens of a sample have one
    value here.
    """
    slots = np.argsort(BATCH.sample_ids[0])[-5:]
    if found.shape == BATCH.sample_ids.shape:
        return np.asarray(found)[0, slots]
    tokens = np.asarray(found)[0]
    return [
        tokens[(BATCH.segment_ids[0] == slot + 1) & (BATCH.loss_mask[0] > 0)][0] for slot in slots
    ]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_formula(name):
    found = getattr(advantages, name)(**ARGUMENTS.get(name, IN_GROUPS))
    np.testing.assert_allclose(of_each_sample(found), EXPECTED[name], rtol=1e-5, atol=1e-6)


def test_every_row_and_its_epsilon():
    assert {*EPSILON} == {*EXPECTED}
    for name, shown in EPSILON.items():
        parameter = inspect.signature(getattr(advantages, name)).parameters.get("epsilon")
        assert shown.partition(",")[0] == ("" if parameter is None else str(parameter.default)), (
            name
        )
