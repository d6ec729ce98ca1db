"""Group advantages: each group's own statistics, wherever its samples lie."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import RolloutBatch, advantages
from sharding.testing import assert_mesh_invariant

NEMO = json.loads((Path(__file__).parents[1] / "golden/peers/nemo_baselines.json").read_text())[
    "cases"
]
MESHES = ["dp=8,cp=1,tp=1", "dp=2,cp=2,tp=2", "dp=1,cp=4,tp=2"]
# Groups of 4, 3, 2, 1 samples, scattered over rows so that data shards share them; -1 where a row
# has no sample.
GROUPS = np.array(
    [
        [0, 1, 2],
        [0, -1, -1],
        [1, 0, -1],
        [-1, -1, -1],
        [3, 2, -1],
        [-1, 0, 1],
        [-1, -1, -1],
        [-1, -1, -1],
    ]
)
RNG = np.random.default_rng(0)
REWARDS = np.where(GROUPS >= 0, RNG.normal(size=GROUPS.shape), np.nan).astype(np.float32)
LENGTHS = RNG.integers(1, 9, GROUPS.shape).astype(np.float32)


def by_group(formula):
    """The expected result in f64: formula(rewards, lengths) for each group of two or more, 0 for
    a lone sample.
    """
    out = np.zeros(GROUPS.shape)
    for group in range(3):
        where = group == GROUPS
        out[where] = formula(REWARDS[where].astype(np.float64), LENGTHS[where].astype(np.float64))
    return out


def best_minus_second(r):
    top = np.sort(r)
    return np.where(r == top[-1], top[-1] - top[-2], 0)


def of_others(r):
    others = [np.delete(r, i) for i in range(len(r))]
    scale = [o.std(ddof=1) + 1e-6 if len(o) > 1 else 1 for o in others]
    return [(x - o.mean()) / s for x, o, s in zip(r, others, scale, strict=True)]


CASES = {
    "grpo": (advantages.grpo, lambda r, n: (r - r.mean()) / (r.std(ddof=1) + 1e-6)),
    "dr_grpo": (advantages.dr_grpo, lambda r, n: r - r.mean()),
    "rloo": (advantages.rloo, lambda r, n: [r[i] - np.delete(r, i).mean() for i in range(len(r))]),
    "rloo over the others' deviation": (
        partial(advantages.rloo, scale_by_std=True),
        lambda r, n: of_others(r),
    ),
    "maxrl": (
        lambda r, g, **k: advantages.maxrl(jnp.abs(r), g, **k),
        lambda r, n: (abs(r) - abs(r).mean()) / abs(r).mean(),
    ),
    "opo": (
        lambda *a, **k: advantages.opo(*a, LENGTHS, **k),
        lambda r, n: r - (r * n).sum() / n.sum(),
    ),
    "pass_at_k": (advantages.pass_at_k, lambda r, n: best_minus_second(r) / (r.std(ddof=1) + 1e-6)),
    "gpg": (advantages.gpg, lambda r, n: r - r.mean()),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", CASES)
def test_own_statistics_on_any_mesh(name):
    # Statistics over a data shard's part of a group, or over a fixed group size, are off by tens of
    # percent here.
    estimator, formula = CASES[name]
    got = assert_mesh_invariant(
        lambda parallel, r, g: estimator(r, g, parallel=parallel),
        jnp.array(REWARDS),
        jnp.array(GROUPS),
        meshes=MESHES,
    )
    np.testing.assert_allclose(got, by_group(formula), rtol=1e-5, atol=1e-6)


def test_equal_rewards_of_any_size_give_exactly_zero():
    rewards = jnp.full((4, 3), 1000.1)
    of_the_others = partial(advantages.rloo, scale_by_std=True)
    for estimator in (
        advantages.grpo,
        advantages.rloo,
        of_the_others,
        advantages.maxrl,
        advantages.standardize,
    ):
        assert (estimator(rewards, jnp.zeros((4, 3), int)) == 0).all()


@pytest.mark.parametrize("singletons", ["zero", "reward"])
def test_a_group_of_one(singletons):
    got = advantages.dr_grpo(jnp.array([[2.5, 1.0]]), jnp.array([[4, -1]]), singletons=singletons)
    assert got.tolist() == [[0.0 if singletons == "zero" else 2.5, 0.0]]


def test_bad_input():
    rewards = jnp.ones((2, 3))
    ids = jnp.zeros((2, 3), int)
    with pytest.raises(ValueError, match=r"group_ids: got shape \(2, 2\)"):
        advantages.grpo(rewards, ids[:, :2])
    with pytest.raises(TypeError, match="group_ids: got dtype float32, expected integers"):
        advantages.grpo(rewards, rewards)
    with pytest.raises(ValueError, match="singletons: got 'one'"):
        advantages.rloo(rewards, ids, singletons="one")
    with pytest.raises(ValueError, match="baselines: got shape"):
        advantages.remax(rewards, rewards[:1], ids)
    with pytest.raises(TypeError, match="rewards: got dtype int32"):
        advantages.grpo(ids, ids)
    with pytest.raises(ValueError, match="lengths: got shape"):
        advantages.opo(rewards, ids, rewards[:1])


@pytest.mark.every(7)
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_ids_of_any_integer_dtype(name, dtype):
    """Without the check, unsigned ids put all samples into one group, since -1 is their largest
    number.
    """
    ids = np.arange(24).reshape(8, 3) // 5
    rewards = RNG.normal(size=(8, 3)).astype(np.float32)
    call = CASES[name][0]
    np.testing.assert_array_equal(
        call(rewards, jnp.asarray(ids, dtype)), call(rewards, jnp.asarray(ids))
    )


def test_maxrl_of_a_negative_mean():
    """SkyRL divides by a negative mean: in a group with rewards -1 and 0 it makes right answers
    less likely.
    """
    rewards = jnp.array([[0.0, -1.0, 1.0, 0.0, -2.0]])
    ids = jnp.array([[7, 7, 8, 8, -1]])
    with pytest.raises(
        ValueError, match=r"rewards: got a negative mean, .* in group 7, expected finite rewards"
    ):
        advantages.maxrl(rewards, ids)
    np.testing.assert_array_equal(
        jax.jit(advantages.maxrl)(rewards, ids), [[np.nan, np.nan, 1, -1, 0]], equal_nan=True
    )


def test_maxrl_of_a_mean_of_0():
    """The mean of -0.3, 0.1 and 0.2 is 1e-8 in f32, and must count as 0: otherwise advantages
    are 3e7.
    """
    rewards = jnp.array([[-0.3, 0.1, 0.2], [0.0, 0.0, 0.0], [2.0, jnp.nan, 2.0]])
    ids = jnp.array([[7, 7, 7], [8, 8, 8], [9, -1, 9]])
    assert (advantages.maxrl(rewards, ids) == 0).all()
    assert advantages.maxrl(rewards, ids, singletons="reward")[2].tolist() == [0, 0, 0]
    infinite = jax.jit(advantages.maxrl)(rewards.at[2, 1].set(jnp.inf), 0 * ids)
    assert jnp.isnan(infinite).all()  # a reward that is no number is never an advantage of 0


def test_maxrl_of_one_right_answer_in_a_thousand():
    """Computed as the largest reward minus differences, the mean of 1e-3 would be 6e-8 off: 6e-5
    of the advantage.
    """
    got = advantages.maxrl(jnp.zeros((10, 100)).at[3, 7].set(1), jnp.zeros((10, 100), int))
    np.testing.assert_allclose(got[3, 7], 999, rtol=3e-7)
    np.testing.assert_array_equal(got[4], -1)


def test_deviation_of_others_that_are_equal():
    """A difference of sums of squares leaves a deviation of 1e-4, and advantages of 1e4."""
    of_the_others = partial(advantages.rloo, scale_by_std=True)
    rewards = jnp.array([[1.0, 0.1, 0.1, 0.1, 0.1, 3.0]])
    ids = jnp.array([[7, 7, 7, 7, 7, 8]])
    got = of_the_others(rewards, ids)
    assert got[0, 0] == rewards[0, 0] - rewards[0, 1]
    assert got[0, 5] == 0
    # with one reward far off, the others' deviation must stay exact
    rewards = jnp.array([[1e6, 1.0, 1.25, 1.5]])
    expected = (1e6 - 1.25) / (0.25 + 1e-6)
    np.testing.assert_allclose(
        of_the_others(rewards, 0 * rewards.astype(int))[0, 0], expected, rtol=1e-6
    )


@pytest.mark.parametrize("case", NEMO, ids=lambda c: c["test"])
def test_baselines_of_nemo(case):
    """Advantages as NeMo-RL computes them from baseline and deviation: divided by the deviation
    if that is above 0.
    """
    _, ids = np.unique(np.array(case["prompts"]), axis=0, return_inverse=True)
    ids = ids.reshape(1, -1).astype(np.int32)
    rewards = np.array([case["rewards"]], np.float32)
    std = np.array(case["std"])
    centred = np.array(case["rewards"]) - np.array(case["baseline"])
    np.testing.assert_allclose(advantages.rloo(rewards, ids), [centred], atol=1e-6)
    scaled = np.where(std > 0, centred / (std + 1e-6), centred)
    found = advantages.rloo(rewards, ids, scale_by_std=True)
    np.testing.assert_allclose(found, [scaled], rtol=1e-6, atol=1e-6)


def test_samples_left_out_of_their_group():
    """A group id of -1: the others' statistics are as if the sample were not there, and it has
    no advantage.
    """
    kept = np.array([[True, True, False, True]])
    rewards = np.array([[1.0, 0.0, 9.0, 0.5]], np.float32)
    ids = np.array([[7, 7, 7, 7]], np.int32)
    for estimator in (
        advantages.grpo,
        advantages.rloo,
        advantages.maxrl,
        advantages.standardize,
        advantages.gpg,
    ):
        got = np.asarray(estimator(rewards, np.where(kept, ids, -1)))
        assert got[0, 2] == 0
        without = estimator(rewards[kept][None], ids[kept][None])
        np.testing.assert_allclose(got[kept][None], without, rtol=1e-6)


@pytest.mark.parametrize(
    ("mean", "std", "leave_one_out", "expected"),
    [
        ("group", "group", False, [[0.5, -0.5, 1, -1, 0], [0.5**0.5, 0.5**0.5, 2**0.5, 2**0.5, 1]]),
        # about the mean of the step, 2: sqrt(1 + 4) and sqrt(4 + 0) over n - 1
        ("step", "group", False, [[-1, -2, 2, 0, 1], [5**0.5, 5**0.5, 2, 2, 1]]),
        ("group", "step", True, [[1, -1, 2, -2, 0], [(10 / 4) ** 0.5] * 5]),
        (None, "step", False, [[1, 0, 4, 2, 3], [(30 / 4) ** 0.5] * 5]),
        ("step", None, True, [[-1.25, -2.5, 2.5, 0, 1.25], [1 - 1e-5] * 5]),
    ],
)
def test_levels_by_hand(mean, std, leave_one_out, expected):
    rewards = jnp.array([[1.0, 0.0, 4.0, 2.0, 3.0]])
    ids = jnp.array([[7, 7, 8, 8, 9]])
    got = advantages.standardize(rewards, ids, mean=mean, std=std, leave_one_out=leave_one_out)
    np.testing.assert_allclose(
        got[0], np.array(expected[0]) / (np.array(expected[1]) + 1e-5), rtol=2e-6
    )


def test_leave_one_out_over_the_deviation_of_all():
    """Tunix's "grpo-loo" by hand: rewards 1, 0, 0.5 with a mean of 0.5 and a deviation of 0.5,
    times 3 / 2.

    NeMo-RL's leave-one-out, with the deviation of the two others, gives 1 less 0.25 over 0.3536:
    2.12.
    """
    rewards = jnp.array([[1.0, 0.0, 0.5, 3.0]])
    ids = jnp.array([[7, 7, 7, 8]])
    found = advantages.grpo(rewards, ids, leave_one_out=True, epsilon=0.0)
    np.testing.assert_allclose(found, [[1.5, -1.5, 0, 0]], atol=1e-6)
    plain = advantages.grpo(rewards, ids, leave_one_out=True, scale_by_std=False)
    np.testing.assert_allclose(plain, advantages.rloo(rewards, ids), atol=1e-6)
    outside = advantages.grpo(
        rewards, ids, leave_one_out=True, among=jnp.array([[True, True, False, True]])
    )
    np.testing.assert_allclose(outside[0], [2**0.5, -(2**0.5), 0, 0], rtol=1e-5, atol=1e-6)


def test_bad_rewards_of_gdpo():
    ids = jnp.array([[1, 2]])
    one = jnp.ones((1, 2))
    batch = RolloutBatch(ids, ids, ids, ids, one, jnp.array([[0, 1]]))
    refused = {
        "rewards: got no reward, expected a list of arrays": {"rewards": []},
        "rewards: got ArrayImpl, expected a list of arrays": {"rewards": one},
        "rewards[1]: got shape (1, 1)": {"rewards": [one, one[:, :1]]},
        "group_ids: got dtype float32, expected integers": {"group_ids": one},
        "weights: got 1 numbers, expected 2": {"weights": [1.0]},
        "weights[1]: got nan, expected a finite number": {"weights": [1.0, float("nan")]},
        "whitened: got 'groups'": {"whitened": "groups"},
        "leave_one_out: got 'no'": {"leave_one_out": "no"},
    }
    for message, wrong in refused.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            advantages.gdpo(**{"rewards": [one, one], "group_ids": ids, "batch": batch, **wrong})
    with pytest.raises(ValueError, match="mean: got 'batch', expected one of 'step', 'group'"):
        advantages.standardize(one, ids, mean="batch")
