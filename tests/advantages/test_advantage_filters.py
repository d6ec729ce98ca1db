"""Changes of rewards, samples and advantages around an estimator, against numbers worked out by
hand.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle.off_policy as truth
import oracle.step
import pytest
from random_losses import RULES
from random_steps import Place, Step, batch_of, many_samples, of_each, step_samples

from jaxppo import OffPolicyConfig, Rejection, RolloutBatch, Sample, Unusable, advantages
from sharding import make_parallel_mesh

SYSTEMS = ("trl", "tunix", "torchtitan")
PAIRS = [(7, 1.0), (8, 0.5), (7, 0.0), (9, 1.0), (8, 0.5), (5, 0.0)]
SAMPLES = [Sample([5, 6, 4], response_start=1, group_id=g, reward=r) for g, r in PAIRS]


def test_groups_of_equal_rewards():
    assert [s.group_id for s in advantages.drop_equal_groups(SAMPLES)] == [7, 7]
    kept = advantages.drop_equal_groups(SAMPLES, keep_lone=True)
    assert [(s.group_id, s.reward) for s in kept] == [(7, 1.0), (7, 0.0), (9, 1.0), (5, 0.0)]
    assert advantages.drop_equal_groups(SAMPLES[1:2]) == []


@pytest.mark.parametrize("apart", [2**-52, 1e-16, 2**-24, 2**-22])
def test_what_is_left_is_what_has_advantages(apart):
    """Rewards that differ in f64 alone are equal in a batch: a group of them was kept, with
    advantages of 0.
    """
    samples = [
        *SAMPLES,
        *(dataclasses.replace(SAMPLES[0], group_id=3, reward=r) for r in (1.0, 1.0 + apart)),
    ]
    batch = RolloutBatch.from_samples(samples, row_length=24)
    found = np.asarray(advantages.grpo(batch.rewards, batch.group_ids))
    kept = advantages.drop_equal_groups(samples)
    assert [found[batch.sample_ids == i].item() != 0 for i in range(len(samples))] == [
        s in kept for s in samples
    ]
    assert (samples[-1] in kept) == (apart == 2**-22)


def of_group(*rewards, **more):
    return [Sample([5, 6, 4], response_start=1, group_id=7, reward=r, **more) for r in rewards]


def test_rewards_that_are_nearly_equal():
    near = of_group(0.0, 0.1)
    assert advantages.drop_equal_groups(near) == near
    # 0.1 of f32 is 1.5e-9 above that of f64
    assert advantages.drop_equal_groups(near, tolerance=0.1) == []
    assert advantages.drop_equal_groups(near, tolerance=0.09) == near
    for wrong in (-1, float("nan"), "1"):
        with pytest.raises(ValueError, match="tolerance: got"):
            advantages.drop_equal_groups(near, tolerance=wrong)


def test_samples_without_a_reward_and_parts_are_not_compared():
    some = of_group(1.0, None, float("nan"))
    assert advantages.drop_equal_groups(some) == []
    assert advantages.drop_equal_groups(some, keep_lone=True) == some
    assert advantages.drop_equal_groups([*some, *of_group(0.0)]) == [*some, *of_group(0.0)]
    assert advantages.drop_equal_groups(of_group(1.0, 1.0, rollout_id=3), keep_lone=True)
    batch = RolloutBatch.from_samples([*some, *of_group(0.0)], row_length=24)
    batch.validate(vocab_size=9)
    assert advantages.dr_grpo(batch.rewards, batch.group_ids).tolist() == [[0.5, 0, 0, -0.5]]
    with pytest.raises(ValueError, match="samples: got no reward, expected samples with rewards"):
        advantages.drop_equal_groups(of_group(None))


STEP = Step(many_samples(12, 3), seed=5, spread=0.3, advantages="by token", garbage=float("nan"))
# mesh, explicit, layout, sequence parallel, row length, rows, segments, micro-batches
PLACES = {
    "one device": Place(None, False, "contiguous", False, 16, 4, 3, None),
    "zigzag": Place("dp=2,cp=2,tp=2", False, "zigzag", False, 16, 2, 3, 3),
    "data": Place("dp=8,cp=1,tp=1", False, "contiguous", False, 16, 8, 2, 2),
}
CORRECTIONS = [
    OffPolicyConfig(rejections=(Rejection("seq_max_k1", 0.7, 1.5),), opsm_delta=0.0),
    OffPolicyConfig(
        rejections=(Rejection("token_k1", 0.8, 1.2), Rejection("seq_mean_k3", high=0.1))
    ),
    OffPolicyConfig("token", 0.9, 1.1, "zero", batch_normalize=True, veto=0.5),
    OffPolicyConfig(
        "sequence", rejections=(Rejection("token_k2", high=0.05, compares="current/old"),)
    ),
]


@pytest.mark.every(2)
@pytest.mark.parametrize("correction", range(len(CORRECTIONS)))
@pytest.mark.parametrize("place", PLACES)
def test_samples_that_a_correction_leaves_in(correction, place):
    """By the oracle's weights of tokens."""
    config = CORRECTIONS[correction]
    where = PLACES[place]
    drawn = step_samples(STEP)
    batch = batch_of(STEP, drawn, where)
    found = jax.jit(lambda b: advantages.accepted_samples(b, config, parallel=where.parallel))(
        batch
    )
    policies = {
        name: [getattr(s, f"{of}_log_probs")[s.here] for s in drawn]
        for name, of in {"current": "old", "old": "old", "rollout": "rollout"}.items()
    }
    options = dataclasses.asdict(config) | {"opsm_delta": None, "batch_normalize": False}
    expected = truth.correction(
        policies, [0 * x for x in policies["old"]], [s.mask for s in drawn], options
    )
    left = [bool((x.weights * x.accepted > 0).any()) for x in expected]
    assert of_each(batch, drawn, found).tolist() == left
    assert 0 < sum(left) < len([s for s in drawn if s.count]) or correction == 3


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("correction", range(len(CORRECTIONS)))
@pytest.mark.parametrize("place", ["one device", "zigzag"])
def test_samples_that_a_correction_leaves_in_beside_unusable_tokens(correction, rule, place):
    """By the oracle's weights: 0 or those of a ratio of 1, in the statistics of sequences or out
    of them.
    """
    config = CORRECTIONS[correction]
    where = PLACES[place]
    drawn = step_samples(STEP, unusable=True)
    batch = batch_of(STEP, drawn, where)
    options = dataclasses.asdict(config) | {"opsm_delta": None, "batch_normalize": False}
    of_loss = {"unusable": RULES[rule], "off_policy": options, "ratio_to": "old", "kl": None}
    counted = [oracle.step.in_denominators(s, of_loss) for s in drawn]
    usable = [~oracle.step.not_finite(s, of_loss)[s.here] for s in counted]
    if RULES[rule]["policy"] == "ratio_1":
        usable = [np.ones_like(x) for x in usable]
    policies = {
        name: [getattr(s, f"{of}_log_probs")[s.here] for s in counted]
        for name, of in {"current": "old", "old": "old", "rollout": "rollout"}.items()
    }
    none = [np.zeros(s.count) for s in counted]
    expected = truth.correction(policies, none, [s.mask for s in counted], options)
    left = [
        bool((x.weights * x.accepted * on > 0).any())
        for x, on in zip(expected, usable, strict=True)
    ]
    given = {"unusable": Unusable(**RULES[rule]), "parallel": where.parallel}
    found = jax.jit(lambda b: advantages.accepted_samples(b, config, **given))(batch)
    assert of_each(batch, drawn, found).tolist() == left
    assert any(left)
    with pytest.raises(ValueError, match="batch: got a loss mask or log-probs that break a rule"):
        advantages.accepted_samples(batch, config, parallel=where.parallel)


def test_acceptance_beside_a_token_that_the_sampler_does_not_know():
    """Its only other token is rejected, so that a ratio of 1 alone keeps the sample."""
    more = {"old_log_probs": [-1.0, -1.0], "rollout_log_probs": [-3.0, np.nan]}
    batch = RolloutBatch.from_samples([dataclasses.replace(SAMPLES[0], **more)], row_length=4)
    config = OffPolicyConfig(rejections=(Rejection("token_k1", 0.5, 2.0),))
    kept = {
        system: advantages.accepted_samples(batch, config, unusable=Unusable.of(system))
        for system in SYSTEMS
    }
    assert {system: x.tolist() for system, x in kept.items()} == {
        "trl": [[True]], "tunix": [[False]], "torchtitan": [[False]],
    }  # fmt: skip
    for wrong in ("trl", None, "drop"):
        with pytest.raises(
            ValueError, match=r"unusable: got .*, expected 'nan' or an instance of Unusable"
        ):
            advantages.accepted_samples(batch, config, unusable=wrong)


def test_acceptance_by_the_mean_of_a_sequence_that_lacks_a_token():
    """The sampler's ratios to the trainer, 2, 1 and 2, have a geometric mean of 1.59; without
    that of 1 it is 2.
    """
    twice = np.log(2) - 1
    sample = Sample(
        [5, 6, 7, 8], 1, old_log_probs=[-1.0] * 3, rollout_log_probs=[twice, np.nan, twice]
    )
    batch = RolloutBatch.from_samples([sample], row_length=4)
    config = OffPolicyConfig(rejections=(Rejection("seq_mean_k1", 0.5, 1.8),))
    kept = {
        system: advantages.accepted_samples(batch, config, unusable=Unusable.of(system))
        for system in SYSTEMS
    }
    assert {system: bool(x[0, 0]) for system, x in kept.items()} == {
        "trl": True,
        "tunix": True,
        "torchtitan": False,
    }


def test_what_acceptance_reads():
    batch = RolloutBatch.from_samples(SAMPLES, row_length=24)
    config = OffPolicyConfig("token")
    with pytest.raises(ValueError, match=r"batch\.(old|rollout)_log_probs: got None"):
        advantages.accepted_samples(batch, config)
    with pytest.raises(TypeError, match="config: got Rejection, expected OffPolicyConfig"):
        advantages.accepted_samples(batch, Rejection("token_k1"))


def test_a_log_prob_of_the_sampler_above_0_counts_as_0_here_too():
    """exp(0.1) of the sampler over the trainer is beyond 1.05, and the capped one is 1."""
    more = {"old_log_probs": [0.0, -1.0], "rollout_log_probs": [0.1, -1.0]}
    batch = RolloutBatch.from_samples([dataclasses.replace(SAMPLES[0], **more)], row_length=4)
    config = OffPolicyConfig(rejections=(Rejection("seq_max_k1", 0.95, 1.05),))
    assert advantages.accepted_samples(batch, config).tolist() == [[True]]


@pytest.mark.parametrize("unsound", [np.nan, np.inf, 0.5])
def test_no_sample_of_an_unsound_step_is_accepted(unsound):
    """Once True: no comparison with NaN is beyond a bound."""
    more = {"old_log_probs": [-1.0, -1.0], "rollout_log_probs": [-1.0, unsound]}
    batch = RolloutBatch.from_samples([dataclasses.replace(SAMPLES[0], **more)], row_length=4)
    config = OffPolicyConfig(rejections=(Rejection("token_k1", 0.5, 2.0),))
    with pytest.raises(ValueError, match="batch: got a loss mask or log-probs that break a rule"):
        advantages.accepted_samples(batch, config)
    under_jit = jax.jit(lambda b: advantages.accepted_samples(b, config))
    assert under_jit(jax.tree.map(jnp.asarray, batch)).tolist() == [[False]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (SAMPLES[0], "samples: got Sample, expected a sequence of Sample"),
        (
            [SAMPLES[0], dataclasses.replace(SAMPLES[0], group_id=None)],
            r"samples\[1\].group_id: got None",
        ),
    ],
)
def test_samples_that_cannot_be_compared(samples, message):
    with pytest.raises((TypeError, ValueError), match=message):
        advantages.drop_equal_groups(samples)


def test_overlong_penalty():
    """verl's goes on falling beyond the maximal length; the paper's equation ends at -1."""
    lengths = jnp.array([[0, 3, 4, 5], [6, 7, 8, 80]])
    got = advantages.overlong_penalty(lengths, max_length=8, buffer=4, factor=2.0)
    np.testing.assert_array_equal(got, [[0, 0, 0, -0.5], [-1, -1.5, -2, -2]])
    assert not np.signbit(got[0, 0])


def test_bad_lengths():
    lengths = jnp.ones((1, 2))
    sound = {"max_length": 8, "buffer": 4, "factor": 1.0}
    for name, wrong in {"max_length": 0, "buffer": 0, "factor": -1.0}.items():
        with pytest.raises(ValueError, match=f"{name}: got {wrong}, expected a finite number"):
            advantages.overlong_penalty(lengths, **sound | {name: wrong})
    with pytest.raises(ValueError, match="buffer: got 9, expected at most max_length, 8"):
        advantages.overlong_penalty(lengths, **sound | {"buffer": 9})
    run = jax.jit(lambda **numbers: advantages.overlong_penalty(lengths, **sound | numbers))
    np.testing.assert_array_equal(run(), advantages.overlong_penalty(lengths, **sound))
    for name, wrong in {"max_length": 0, "buffer": 9, "factor": -1.0}.items():
        assert np.isnan(run(**{name: wrong})).all()


def test_numbers_of_a_penalty_that_are_arrays():
    """Once a TypePromotionError of JAX: an array of integers was added to one of floats."""
    numbers = {"max_length": 8, "buffer": 4, "factor": 2}
    for kind in (np.int64, np.float32, jnp.int32, jnp.float32):
        got = advantages.overlong_penalty(
            jnp.array([[6, 8]]), **{name: kind(x) for name, x in numbers.items()}
        )
        np.testing.assert_array_equal(got, [[-1, -2]])


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_samples_out_of_a_packed_step(mesh):
    """The overlong filter: a truncated sample carries no loss, and may leave its group's
    statistics as well.
    """
    parallel = mesh and make_parallel_mesh(mesh)
    batch = RolloutBatch.from_samples(SAMPLES, row_length=8, rows=4)
    kept = (batch.sample_ids != 2).astype(np.float32)
    loss_mask = advantages.spread(kept, batch, parallel=parallel)
    sample = np.take_along_axis(batch.sample_ids, np.maximum(batch.segment_ids - 1, 0), axis=1)
    assert (batch.loss_mask[sample == 2] > 0).any()
    np.testing.assert_array_equal(loss_mask, np.where(sample == 2, 0, batch.loss_mask))
    ids = np.where(kept, batch.group_ids, -1)
    assert (
        np.asarray(advantages.rloo(batch.rewards, ids, singletons="reward", parallel=parallel)) != 0
    ).sum() == 2


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_explained_variance(mesh):
    parallel = mesh and make_parallel_mesh(mesh)
    returns = np.array([[3.0, 5.0, 0, 1.0], [7.0, 0, 9.0, 2.0]]) + 1000
    mask = np.array([[1.0, 1, 0, 1], [1, 0, 1, 1]])
    values = np.where(mask > 0, 0.5 * returns - 3, np.nan)
    got = advantages.explained_variance(
        *map(jnp.asarray, (values, returns, mask)), parallel=parallel
    )
    np.testing.assert_allclose(got, 0.75, rtol=1e-5)


def test_equal_returns_leave_nothing_to_explain():
    """The variance of 97 equal numbers is 1e-21 in some programs: numbers of 1e20 without the
    bound.
    """
    values = jnp.linspace(-1, 1, 97)[None]
    mask = jnp.ones((1, 97))
    explained = jax.jit(
        lambda x: advantages.explained_variance(
            values, jnp.full((1, 97), x), jnp.ones((1, 97), bool)
        )
    )
    with jax.debug_nans(True):
        assert all(explained(jnp.float32(value)) == 0 for value in (1.2573022, -1.321048, 0.1, 0.0))
    one_apart = jnp.full((1, 97), 1.25).at[0, 0].set(1.5)
    np.testing.assert_allclose(
        advantages.explained_variance(0 * values, one_apart, mask), 0, atol=1e-6
    )
