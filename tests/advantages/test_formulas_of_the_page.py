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


def best_alone(r, _):
    order = np.sort(r)
    return np.where(r == order[-1], (order[-1] - order[-2]) / (r.std(ddof=1) + 1e-6), 0)


def of_others(r, _):
    return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])


IN_GROUPS = {"rewards": BATCH.rewards, "group_ids": BATCH.group_ids}
EXPECTED = {
    "grpo": lambda: grouped(lambda r, _: (r - r.mean()) / (r.std(ddof=1) + 1e-6)),
    "dr_grpo": lambda: grouped(lambda r, _: r - r.mean()),
    "rloo": lambda: grouped(of_others),
    "opo": lambda: grouped(lambda r, n: r - np.average(r, weights=n)),
    "pass_at_k": lambda: grouped(best_alone),
    "gpg": lambda: grouped(lambda r, _: r - r.mean()) * 5 / 4,
    "maxrl": lambda: grouped(lambda r, _: (r - r.mean()) / r.mean()),
    "standardize": lambda: (REWARDS - REWARDS.mean()) / (REWARDS.std(ddof=1) + 1e-5),
    "gdpo": lambda: whitened(grouped(lambda r, _: (r - r.mean()) / (r.std(ddof=1) + 1e-6))),
    "reinforce_plus_plus": lambda: whitened(REWARDS),
    "reinforce_plus_plus_baseline": lambda: whitened(grouped(lambda r, _: r - r.mean())),
    "whiten": lambda: whitened(REWARDS),
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
    np.testing.assert_allclose(of_each_sample(found), EXPECTED[name](), rtol=1e-5, atol=1e-6)


def test_every_row_and_its_epsilon():
    assert {*EPSILON} == {*EXPECTED}
    for name, shown in EPSILON.items():
        parameter = inspect.signature(getattr(advantages, name)).parameters.get("epsilon")
        assert shown.partition(",")[0] == ("" if parameter is None else str(parameter.default)), (
            name
        )
