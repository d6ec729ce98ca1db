"""GiGPO: two group baselines of the steps of trajectories; its host functions; spans of two
tokenizers.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hard_rows import MESHES

from jaxppo import RolloutBatch, Sample, advantages
from jaxppo.contrib.gigpo import gigpo, state_groups, step_returns
from jaxppo.contrib.spans import align_spans, span_distillation
from sharding import make_parallel_mesh

# One prompt, two trajectories: states a, b with rewards 0, 1, and a, c, c with rewards 0.
GROUPS = [7] * 5
STATES = ["a", "b", "a", "c", "c"]
RETURNS = step_returns([0.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 1])
REWARDS = [1.0, 1.0, 0.0, 0.0, 0.0]


def test_by_hand():
    """verl-agent's mean_norm and mean_std_norm, by trajectory and by step rows."""
    np.testing.assert_allclose(RETURNS, [0.95, 1, 0, 0, 0], rtol=1e-6)
    states = state_groups(GROUPS, STATES)
    given = (jnp.array([x], jnp.float32) for x in (REWARDS, RETURNS))
    ids = jnp.array([GROUPS]), jnp.asarray(states)[None]
    arrays = (*given, *ids)
    rollouts = jnp.array([[0, 0, 1, 1, 1]])
    found = gigpo(*arrays, rollout_ids=rollouts)
    np.testing.assert_allclose(found[0], [0.975, 0.5, -0.975, -0.5, -0.5], rtol=1e-5)
    by_rows = gigpo(*arrays, step_coef=0.0)
    np.testing.assert_allclose(by_rows[0], [0.6, 0.6, -0.4, -0.4, -0.4], rtol=1e-5)
    scaled = gigpo(*arrays, rollout_ids=rollouts, scale_by_std=True)
    np.testing.assert_allclose(
        scaled[0], [1.414212, 0.707106, -1.414212, -0.707106, -0.707106], rtol=1e-5
    )


def test_equal_states_of_other_prompts_are_not_compared():
    assert state_groups([1, 2, 1], ["s", "s", None]).tolist() == [0, 1, -1]
    with pytest.raises(ValueError, match="states: got 1, expected 2"):
        state_groups([1, 2], ["s"])
    with pytest.raises(ValueError, match="gamma: got 1"):
        step_returns([1.0], [0], gamma=1.5)


def numpy_gigpo(rewards, returns, groups, states, coef):
    out = np.zeros(len(rewards))
    for x, ids, alone in ((rewards, groups, None), (coef * returns, states, 0.0)):
        for i in range(len(x)):
            peers = [x[j] for j in range(len(x)) if ids[j] == ids[i]]
            if ids[i] < 0 or (len(peers) == 1 and alone is not None):
                continue
            out[i] += x[i] if len(peers) == 1 else x[i] - np.mean(peers)
    return out


@pytest.mark.parametrize("mesh", [None, *MESHES][:2])
def test_on_a_mesh(mesh):
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 4, 20)
    states = state_groups(groups.tolist(), rng.integers(0, 3, 20).tolist())
    rewards, returns = rng.normal(size=(2, 20)).astype(np.float32)
    parallel = None if mesh is None else make_parallel_mesh("dp=2,cp=2,tp=2")
    samples = [
        Sample([1, 2], 1, reward=float(r), group_id=int(g))
        for r, g in zip(rewards, groups, strict=True)
    ]
    batch = RolloutBatch.from_samples(
        samples, row_length=16, rows=4, num_segments=8, parallel=parallel
    )

    def placed(x, fill):
        return np.where(batch.sample_ids >= 0, x[batch.sample_ids], fill)

    found = gigpo(
        batch.rewards,
        placed(returns, np.nan),
        batch.group_ids,
        placed(states, -1),
        step_coef=0.5,
        parallel=parallel,
    )
    expected = placed(numpy_gigpo(rewards, returns, groups, states, 0.5), 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


TEXT = "naïve – 日本"  # in bytes: characters of one, two and three


def ends(*pieces):
    assert b"".join(pieces) == TEXT.encode()
    return np.cumsum([len(x) for x in pieces])


def test_spans_end_where_both_tokenizations_have_a_border():
    raw = TEXT.encode()
    # cuts characters in two
    student = ends(raw[:3], raw[3:4], raw[4:7], raw[7:11], raw[11:13], raw[13:])
    teacher = ends(raw[:6], raw[6:7], raw[7:10], raw[10:11], raw[11:14], raw[14:])
    own, theirs = align_spans(student, teacher)
    assert own.tolist() == [0, 0, 0, 1, 2, 2]
    assert theirs.tolist() == [0, 0, 1, 1, 2, 2]
    rng = np.random.default_rng(0)
    x, y = -rng.exponential(size=(2, 6))
    found = span_distillation(x, y, own, theirs, coef=0.5)
    for c in range(3):
        np.testing.assert_allclose(
            found[own == c].sum(), 0.5 * (y[theirs == c].sum() - x[own == c].sum()), rtol=1e-5
        )
        assert np.ptp(found[own == c]) < 1e-6


def test_equal_tokenizers_are_on_policy_distillation():
    x, y = np.log([[0.5, 0.2, 0.4], [0.8, 0.1, 0.3]])
    spans = align_spans([2, 3, 7], [2, 3, 7])
    args = (jnp.asarray(a, jnp.float32)[None] for a in (0 * x, x, y))
    expected = advantages.on_policy_distillation(*args, jnp.ones((1, 3)), coef=2.0)[0]
    np.testing.assert_allclose(span_distillation(x, y, *spans, coef=2.0), expected, rtol=1e-5)


def test_what_has_no_span_has_no_advantage():
    own, theirs = align_spans([0, 2, 4, 5], [2, 6])  # a token without text; a rest that ends apart
    assert (own.tolist(), theirs.tolist()) == ([-1, 0, -1, -1], [0, -1])
    assert span_distillation([-9.0, -1.0, -1.0, -1.0], [-0.5, np.nan], own, theirs).tolist() == [
        0.0,
        0.5,
        0.0,
        0.0,
    ]
    with pytest.raises(ValueError, match="ends: got"):
        align_spans([3, 2], [3])
    with pytest.raises(ValueError, match=r"log_probs: got shape \(2,\), expected \(4,\)"):
        span_distillation([-1.0, -1.0], [-1.0, -1.0], own, theirs)
