"""Which samples make the statistics of a group: those with a reward, among the given ones, each
rollout once.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import RolloutBatch, Sample, TokenStats, advantages
from sharding import make_parallel_mesh

REWARDS = jnp.array([[1.0, 0.0, 0.5, 2.0, 0.0, 1.0]])
IDS = jnp.array([[7, 7, 7, 7, 8, 8]])
IDS_OF_TOKENS = jnp.arange(1, 7)[None]
BATCH = RolloutBatch(*[IDS_OF_TOKENS] * 3, 0 * IDS_OF_TOKENS, jnp.ones((1, 6)), jnp.arange(6)[None])
LENGTHS = jnp.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
# of samples and of tokens: here each sample is one token, so that all are [1, 6]
OF_SAMPLES = {
    **{
        name: getattr(advantages, name)
        for name in ("grpo", "dr_grpo", "rloo", "maxrl", "standardize", "gpg")
    },
    "rloo, scaled": partial(advantages.rloo, scale_by_std=True),
    "standardize, by group": partial(
        advantages.standardize, mean="group", std="group", leave_one_out=True
    ),
    "pass_at_k": advantages.pass_at_k,
    "opo": lambda r, g, lengths=LENGTHS, **more: advantages.opo(r, g, lengths, **more),
    "gdpo": lambda r, g, batch=BATCH, **more: advantages.gdpo(
        [r, r**2], g, batch, whitened=None, **more
    ),
    "gdpo, of tokens": lambda r, g, batch=BATCH, **more: advantages.gdpo(
        [r, r**2], g, batch, **more
    ),
    "gdpo, of samples": lambda r, g, batch=BATCH, **more: advantages.gdpo(
        [r], g, batch, whitened="samples", **more
    ),
    "reinforce_plus_plus_baseline, of tokens": lambda r, g, batch=BATCH, **more: (
        advantages.reinforce_plus_plus_baseline(r, g, batch, **more)
    ),
}
OF_TOKENS = {
    "whiten": lambda x, among, **more: advantages.whiten(x, BATCH.loss_mask, among=among, **more),
    "optimal_token_baseline": lambda x, among, **more: advantages.optimal_token_baseline(
        x, TokenStats(-LENGTHS, sum_p2=jnp.exp(-LENGTHS)), IDS, BATCH, among=among, **more
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_a_sample_without_a_reward_is_in_no_statistic(name):
    """An aborted sibling with a reward of -100 moved the others: dr_grpo gave 25.1 for -0.17."""
    call = OF_SAMPLES[name]
    aborted = REWARDS.at[0, 1].set(jnp.nan)
    expected = call(REWARDS, IDS.at[0, 1].set(-1))
    np.testing.assert_array_equal(call(aborted, IDS), expected)
    assert expected[0, 1] == 0
    assert np.abs(expected).max() > 0
    assert not call(jnp.full((1, 6), jnp.nan), IDS).any()


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [*OF_SAMPLES, *OF_TOKENS])
def test_the_others_have_advantages_against_those_that_count(name):
    """What a sample outside holds changes nothing for the others, and it is not divided by a
    deviation of 0.
    """

    def call(x, among):
        if name in OF_TOKENS:
            return np.asarray(OF_TOKENS[name](x, among))
        return np.asarray(OF_SAMPLES[name](x, IDS, among=among))

    among = jnp.array([[True, True, True, False, True, True]])
    one, other = (call(REWARDS.at[0, 3].set(x), among) for x in (2.0, 4.0))
    kept = np.asarray(among)
    np.testing.assert_array_equal(one[kept], other[kept])
    assert (np.abs(call(REWARDS, None) - one)[kept] > 1e-3).any()
    assert (other[~kept] > one[~kept]).all() or name in ("pass_at_k", "gdpo, of samples")
    equal = call(jnp.where(among, 1.0, REWARDS), among)
    assert not equal[kept].any() or name in ("standardize", "gpg", "whiten")
    assert np.abs(equal).max() < 10
    with pytest.raises(TypeError, match=r"among: got dtype float32, expected bool"):
        call(REWARDS, jnp.ones((1, 6)))


CUT = np.array([0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 4, 4])  # the rollout of each part
ORDER = np.random.default_rng(0).permutation(12)


def in_rows(x):
    """Rollouts `[1, 5]` as parts `[4, 3]`."""
    return jnp.asarray(np.asarray(x)[0, CUT][ORDER].reshape(4, 3))


PARTS = RolloutBatch(
    *[jnp.tile(jnp.arange(1, 4), (4, 1))] * 3,
    jnp.zeros((4, 3), int),
    jnp.ones((4, 3)),
    jnp.arange(12).reshape(4, 3),
)
WHOLE = RolloutBatch(
    *[IDS_OF_TOKENS[:, :5]] * 3, IDS_OF_TOKENS[:, :5] * 0, jnp.ones((1, 5)), jnp.arange(5)[None]
)
OF_BATCHES = [name for name in OF_SAMPLES if name.startswith("gdpo")]
# what else the estimators take: of whole rollouts, and of their parts
MORE = {name: [{"batch": WHOLE}, {"batch": PARTS}] for name in OF_BATCHES}
MORE["opo"] = [
    {"lengths": LENGTHS[:, :5]},
    {"lengths": in_rows(np.asarray(LENGTHS)[:, :5] / np.bincount(CUT))},
]


@pytest.mark.every(3)
@pytest.mark.parametrize("mesh", [None, "dp=4,cp=1,tp=2"])
@pytest.mark.parametrize("name", [name for name in OF_SAMPLES if "tokens" not in name])
def test_a_rollout_that_was_cut_counts_once(name, mesh):
    """Parts in several rows, on several devices."""
    parallel = mesh and make_parallel_mesh(mesh)
    whole, parts = MORE.get(name, [{}, {}])
    rewards = np.asarray(REWARDS)[:, :5]
    ids = np.asarray(IDS)[:, :5]

    def call(*given, **more):
        return np.asarray(OF_SAMPLES[name](*given, **more))

    expected = call(rewards, ids, **whole)
    given = in_rows(rewards), in_rows(ids)
    rollout_ids = in_rows(np.arange(5, dtype=np.int32)[None])
    got = call(*given, rollout_ids=rollout_ids, parallel=parallel, **parts)
    np.testing.assert_allclose(got, in_rows(expected), rtol=1e-6, atol=1e-7)
    # a mean by length is the same
    assert (np.abs(call(*given, parallel=parallel, **parts) - got) > 1e-2).any() or name == "opo"


@pytest.mark.every(2)
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_parts_that_differ(name):
    def call(r, g, **more):
        return OF_SAMPLES[name](r, g, **more)

    jitted = jax.jit(call)
    rollouts = jnp.array([[0, 0, 1, 2, 3, 4]])
    among = jnp.ones((1, 6), bool)
    good = {"r": REWARDS.at[0, 1].set(1), "g": IDS, "rollout_ids": rollouts, "among": among}
    assert np.isfinite(jitted(**good)).all()
    wrong = {
        r"rewards.*: got 1 and 0.5 in rollout 0, expected equal": {
            "r": good["r"].at[0, 1].set(0.5)
        },
        r"rewards.*: got 1 and nan in rollout 0, expected equal": {
            "r": good["r"].at[0, 1].set(jnp.nan)
        },
        r"group_ids: got 7 and 8 in rollout 0": {"g": IDS.at[0, 1].set(8)},
        r"among: got 1 and 0 in rollout 0": {"among": among.at[0, 1].set(False)},
        r"rollout_ids: got -1 for a sample": {"rollout_ids": rollouts.at[0, 2].set(-1)},
    }
    for message, changed in wrong.items():
        with pytest.raises(ValueError, match=message):
            call(**good | changed)
        assert np.isnan(jitted(**good | changed)).any(), message


# one prompt, three rollouts with rewards of 1, 0 and 0; the first was cut into two samples
CUT_SAMPLES = [
    Sample([5, 6, 7], 1, reward=reward, group_id=3, rollout_id=rollout)
    for reward, rollout in ((1.0, 10), (1.0, 10), (0.0, 11), (0.0, 12))
]
# worked by hand: the mean of 1, 0, 0 is 1/3, its deviation sqrt(1/3)
BY_HAND = {
    # 1.155, -0.577; each part counted as a rollout: 0.866, -0.866
    "grpo": [2 / 3**0.5, -1 / 3**0.5],
    "dr_grpo": [2 / 3, -1 / 3],
    "rloo": [1.0, -0.5],
    "maxrl": [2.0, -1.0],
    "gpg": [2.0, -1.0],  # 3 rollouts over the one that is not 0
    "standardize": [2 / 3**0.5, -1 / 3**0.5],
    "pass_at_k": [3**0.5, 0.0],
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", BY_HAND)
def test_the_groups_of_a_batch_count_a_cut_rollout_once(name, stacked):
    """`grpo(batch.rewards, batch.group_ids)` did not know the rollouts, though the batch does."""
    sizes = {"rows": 2, "micro_batches": 2, "row_length": 3} if stacked else {"row_length": 12}
    batch = RolloutBatch.from_samples(CUT_SAMPLES, **sizes)
    estimator = jax.jit(lambda batch: getattr(advantages, name)(batch.rewards, **batch.groups))
    got = estimator(batch)
    ids = np.asarray(batch.sample_ids)
    assert got.shape == batch.rewards.shape
    of_first, of_others = BY_HAND[name]
    by_sample = dict(zip(ids[ids >= 0].tolist(), np.asarray(got)[ids >= 0], strict=True))
    expected = [of_first, of_first, of_others, of_others]
    np.testing.assert_allclose([by_sample[i] for i in range(4)], expected, rtol=3e-5)


def test_groups_of_batches_without_rollouts():
    batch = RolloutBatch.from_samples(
        [dataclasses.replace(s, rollout_id=None) for s in CUT_SAMPLES], row_length=12
    )
    assert batch.groups["rollout_ids"] is None
    np.testing.assert_allclose(
        advantages.dr_grpo(batch.rewards, **batch.groups), [[0.5, 0.5, -0.5, -0.5]]
    )
    no_groups = dataclasses.replace(batch, group_ids=None)
    with pytest.raises(
        ValueError, match=r"group_ids: got None in grpo, expected .*give every Sample its group_id"
    ):
        advantages.grpo(batch.rewards, **no_groups.groups)


@pytest.mark.parametrize("jitted", [False, True])
def test_estimators_that_take_the_batch_read_its_rollouts(jitted):
    """Both took a cut rollout for two: 0.5 for 2/3."""
    compiled = jax.jit if jitted else lambda f: f
    batch = RolloutBatch.from_samples(CUT_SAMPLES, row_length=12)
    on_tokens = np.asarray(batch.loss_mask) > 0

    def of_mean(batch):
        return advantages.reinforce_plus_plus_baseline(
            batch.rewards, batch.group_ids, batch, whitened=False
        )

    def of_several(batch):
        return advantages.gdpo([batch.rewards], batch.group_ids, batch, whitened=None)

    (a, b), (c, d) = BY_HAND["dr_grpo"], BY_HAND["grpo"]
    dr_grpo = np.repeat([a, a, b, b], 2)
    grpo = np.repeat([c, c, d, d], 2)
    found = np.asarray(compiled(of_mean)(batch))
    np.testing.assert_allclose(found[on_tokens], dr_grpo, rtol=1e-6)
    found = np.asarray(compiled(of_several)(batch))
    np.testing.assert_allclose(found[on_tokens], grpo, rtol=1e-5)


def test_the_optimal_token_baseline_takes_no_cut_rollout():
    """Its places count from a rollout's first token: a part that begins in the middle was
    compared at other places.
    """
    batch = RolloutBatch.from_samples(CUT_SAMPLES, row_length=12)
    stats = TokenStats(-batch.loss_mask, sum_p2=0.5 * batch.loss_mask)

    def call(batch, **ids):
        return advantages.optimal_token_baseline(batch.loss_mask, stats, batch=batch, **ids)

    with pytest.raises(ValueError, match=r"rollout_ids: got 2 samples of rollout 10, expected one"):
        call(batch, **batch.groups)
    with pytest.raises(ValueError, match=r"rollout_ids: got 2 samples of rollout 10, expected one"):
        call(batch, group_ids=batch.group_ids)
    jitted = jax.jit(lambda batch: call(batch, **batch.groups))
    assert np.isnan(jitted(batch)[batch.loss_mask > 0]).all()
    apart = dataclasses.replace(batch, rollout_ids=batch.sample_ids)
    expected = jax.jit(call)(
        dataclasses.replace(batch, rollout_ids=None), group_ids=batch.group_ids
    )
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(jitted(apart), expected)


def test_parts_that_differ_are_told_what_to_do():
    unequal = [dataclasses.replace(CUT_SAMPLES[0], reward=0.5), *CUT_SAMPLES[1:]]
    batch = RolloutBatch.from_samples(unequal, row_length=12)
    advice = "give each part the reward of the whole rollout, or leave rollout_ids out"
    with pytest.raises(ValueError, match=f"rewards: got 0.5 and 1 in rollout 10, .*: {advice}"):
        advantages.grpo(batch.rewards, **batch.groups)


NUMBERS = dict.fromkeys(
    ("grpo", "standardize", "pass_at_k", "maxrl", "rloo, scaled", "gdpo"), ("epsilon", -1.0)
)
NUMBERS |= dict.fromkeys(OF_TOKENS, ("epsilon", -1.0)) | {"gpg": ("f_norm", 0.0)}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_its_range(name):
    """A negative epsilon flipped all signs, and NaN passed."""
    given = (REWARDS, IDS) if name in OF_SAMPLES else (REWARDS, None)
    call = OF_SAMPLES.get(name) or OF_TOKENS[name]
    number, least = NUMBERS[name]
    for wrong in (least, float("nan"), float("inf"), "1", True, jnp.ones(2)):
        with pytest.raises(ValueError, match=f"{number}: got .*, expected a finite number"):
            call(*given, **{number: wrong})
    traced = jax.jit(lambda x: call(*given, **{number: x}))
    assert all(np.isnan(traced(wrong)).any() for wrong in (least, jnp.nan))
    np.testing.assert_allclose(traced(0.5), call(*given, **{number: 0.5}), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrong", [jnp.nan, -1.0])
def test_lengths_that_are_no_lengths(wrong):
    """They were a group without a token: advantages of 0."""
    got = advantages.opo(REWARDS, IDS, LENGTHS.at[0, 1].set(wrong))
    assert np.isnan(got[0, :4]).all()
    assert np.isfinite(got[0, 4:]).all()
    assert np.isfinite(
        advantages.opo(REWARDS.at[0, 1].set(jnp.nan), IDS, LENGTHS.at[0, 1].set(wrong))
    ).all()


def test_flags():
    for name, flag in {
        "grpo": "scale_by_std",
        "pass_at_k": "scale_by_std",
        "standardize": "unbiased",
    }.items():
        with pytest.raises(ValueError, match=f"{flag}: got 'no', expected True or False"):
            getattr(advantages, name)(REWARDS, IDS, **{flag: "no"})
