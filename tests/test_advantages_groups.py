"""Group advantages: each group's own statistics, wherever its samples lie."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import advantages
from sharding.testing import assert_mesh_invariant

MESHES = ["dp=8,cp=1,tp=1", "dp=2,cp=2,tp=2", "dp=1,cp=4,tp=2"]
# Groups of 4, 3, 2, 1 samples, scattered over rows so that data shards share them; -1 where a row has no sample.
GROUPS = np.array(
    [[0, 1, 2], [0, -1, -1], [1, 0, -1], [-1, -1, -1], [3, 2, -1], [-1, 0, 1], [-1, -1, -1], [-1, -1, -1]]
)
RNG = np.random.default_rng(0)
REWARDS = np.where(GROUPS >= 0, RNG.normal(size=GROUPS.shape), np.nan).astype(np.float32)
LENGTHS = RNG.integers(1, 9, GROUPS.shape).astype(np.float32)


def by_group(formula):
    """The f64 truth: formula(rewards, lengths) of each group of two and more, 0 for the lone sample."""
    out = np.zeros(GROUPS.shape)
    for group in range(3):
        where = group == GROUPS
        out[where] = formula(REWARDS[where].astype(np.float64), LENGTHS[where].astype(np.float64))
    return out


def best_minus_second(r):
    top = np.sort(r)
    return np.where(r == top[-1], top[-1] - top[-2], 0)


PRESENT = GROUPS >= 0
CASES = {
    "grpo": (advantages.grpo, lambda r, n: (r - r.mean()) / (r.std(ddof=1) + 1e-6)),
    "dr_grpo": (advantages.dr_grpo, lambda r, n: r - r.mean()),
    "rloo": (advantages.rloo, lambda r, n: [r[i] - np.delete(r, i).mean() for i in range(len(r))]),
    "opo": (lambda *a, **k: advantages.opo(*a, LENGTHS, **k), lambda r, n: r - (r * n).sum() / n.sum()),
    "pass_at_k": (advantages.pass_at_k, lambda r, n: best_minus_second(r) / (r.std(ddof=1) + 1e-6)),
    "gpg": (advantages.gpg, lambda r, n: r - r.mean()),
}


@pytest.mark.parametrize("name", CASES)
def test_own_statistics_on_any_mesh(name):
    # Statistics over a data shard's part of a group, or over a fixed group size, are off by tens of percent here.
    estimator, formula = CASES[name]
    got = assert_mesh_invariant(
        lambda parallel, r, g: estimator(r, g, parallel=parallel), jnp.array(REWARDS), jnp.array(GROUPS), meshes=MESHES
    )
    np.testing.assert_allclose(got, by_group(formula), rtol=1e-5, atol=1e-6)


def test_equal_rewards_of_any_size_give_exactly_zero():
    rewards = jnp.full((4, 3), 1000.1)
    for estimator in (advantages.grpo, advantages.rloo):
        assert (estimator(rewards, jnp.zeros((4, 3), int)) == 0).all()


@pytest.mark.parametrize("singletons", ["zero", "reward"])
def test_a_group_of_one(singletons):
    got = advantages.dr_grpo(jnp.array([[2.5, 1.0]]), jnp.array([[4, -1]]), singletons=singletons)
    assert got.tolist() == [[0.0 if singletons == "zero" else 2.5, 0.0]]


def test_bad_input():
    rewards, ids = jnp.ones((2, 3)), jnp.zeros((2, 3), int)
    with pytest.raises(ValueError, match=r"group_ids: got shape \(2, 2\)"):
        advantages.grpo(rewards, ids[:, :2])
    with pytest.raises(TypeError, match="group_ids: got dtype float32, expected integers"):
        advantages.grpo(rewards, rewards)
    with pytest.raises(ValueError, match="singletons: got 'one'"):
        advantages.rloo(rewards, ids, singletons="one")
    with pytest.raises(ValueError, match="baselines: got shape"):
        advantages.remax(rewards, rewards[:1], ids)
    with pytest.raises(ValueError, match="rewards: got int32"):
        advantages.grpo(ids, ids)
    with pytest.raises(ValueError, match="lengths: got shape"):
        advantages.opo(rewards, ids, rewards[:1])


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_ids_of_any_integer_dtype(name, dtype):
    """Today: of unsigned ids all samples were one group, since -1 is their largest."""
    ids, rewards = np.arange(24).reshape(8, 3) // 5, RNG.normal(size=(8, 3)).astype(np.float32)
    call = CASES[name][0]
    np.testing.assert_array_equal(call(rewards, jnp.asarray(ids, dtype)), call(rewards, jnp.asarray(ids)))
