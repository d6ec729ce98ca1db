"""A step of stacked micro-batches is one population: estimators take the whole step, and refuse
a part of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from estimator_cases import ESTIMATORS, Given, Options, amplified, given_of, known_of
from policy_steps import quick_jit, step_of
from random_steps import (
    MOST,
    Drawn,
    Place,
    Step,
    agree,
    batch_of,
    of_each,
    step_samples,
    to_samples,
)

from jaxppo import (
    SFT,
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    accumulate_gradients,
    advantages,
    finalize_metrics,
    policy_loss,
)
from jaxppo.losses.covariance import covariance_mask
from jaxppo.losses.mtp import MTP
from jaxppo.policy_losses import KLCov
from jaxppo.sharding import segment_sum
from jaxppo.step.masks import second_moment_mask, top_entropy_mask

# Groups of 4, 3, 2 and 1 samples, one of them without a loss token, one without a response.
GROUPS = (7, 9, 7, 0, 7, 9, 5, 9, 7, 0)
MASKS = [(1, 0, 1, 1, 1, 0, 1)[: (5 * i) % 8] or (0,) * (i % 2) for i in range(len(GROUPS))]
STEP = Step(
    tuple(
        Drawn(1 + i % 3, mask, i, g, i)
        for i, (mask, g) in enumerate(zip(MASKS, GROUPS, strict=True))
    ),
    seed=5,
    spread=0.3,
    advantages="by token",
    garbage=float("nan"),
)
OPTIONS = Options(
    0.9,
    0.8,
    1.0,
    "skip",
    False,
    0.1,
    0.5,
    True,
    1e-6,
    "reward",
    2.0,
    True,
    True,
    0.3,
    True,
    "tokens",
    "group",
    "step",
    True,
    left_out=True,
    cut=True,
    lacking=True,
)
# mesh, explicit, layout, sequence parallel, row length, rows, segments, micro-batches
PLACES = {
    "one device": Place(None, False, "contiguous", False, 16, 2, 3, 4),
    "one micro-batch": Place(None, False, "contiguous", False, 16, 8, 2, 1),
    "zigzag": Place("dp=2,cp=2,tp=2", False, "zigzag", False, 16, 2, 3, 3),
    "explicit": Place("dp=2,cp=2,tp=2", True, "striped", False, 16, 4, 2, 2),
    "per segment": Place("dp=1,cp=4,tp=2", False, "zigzag_per_segment", False, 32, 2, 3, 4),
    "data": Place("dp=8,cp=1,tp=1", False, "contiguous", False, 16, 8, 2, 2),
    "striped": Place("dp=1,cp=8,tp=1", False, "striped", False, 32, 1, 3, 6),
    "fsdp": Place("fsdp=4,cp=2", False, "zigzag", False, 16, 4, 2, 3),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("place", PLACES)
def test_every_estimator_of_a_stacked_step(place):
    """Statistics of each micro-batch alone are off by tens of percent here."""
    where = PLACES[place]
    samples = step_samples(STEP)
    known = known_of(STEP, samples, OPTIONS)
    batch = batch_of(STEP, samples, where)
    rows = where.rows * -(-len(samples) // MOST)  # a place is for so many samples
    assert batch.loss_mask.shape[:2] == (where.micro_batches, rows)
    if where.micro_batches > 1:
        parts = [set(np.unique(ids[ids >= 0])) for ids in batch.group_ids]
        assert any(a & b for i, a in enumerate(parts) for b in parts[:i]), (
            "expected groups over several micro-batches"
        )
    given = given_of(STEP, known, batch, OPTIONS)

    @quick_jit
    def run(batch, tokens, slots):
        given = Given(batch, tokens, slots, None)
        return {
            name: ours(given, OPTIONS, where.parallel) for name, (ours, _) in ESTIMATORS.items()
        }

    for name, x in run(batch, given.tokens, given.slots).items():
        expected = ESTIMATORS[name][1](known, OPTIONS)
        by_sample = isinstance(expected, np.ndarray)
        got = (
            of_each(batch, samples, x)
            if by_sample
            else np.concatenate(to_samples(batch, samples, x))
        )
        expected = expected if by_sample else np.concatenate(expected)
        agree(
            name,
            got,
            expected,
            0.1 + np.max(np.abs(expected)) + 0.1 * amplified(name, known, OPTIONS),
        )


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_lengths_of_a_stacked_step(mesh):
    place = dataclasses.replace(
        PLACES["zigzag"], mesh=mesh, layout="zigzag" if mesh else "contiguous"
    )
    samples = step_samples(STEP)
    batch = batch_of(STEP, samples, place)
    got = segment_sum(batch.loss_mask, batch.segment_ids, batch.num_segments, place.parallel)
    np.testing.assert_array_equal(of_each(batch, samples, got), [s.count for s in samples])


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_grpo_in_micro_batches_is_grpo_of_the_whole(mesh):
    """Rewards to gradients in one program: advantages of the stacked step, then its
    micro-batches.
    """
    place = dataclasses.replace(
        PLACES["zigzag"], mesh=mesh, layout="zigzag" if mesh else "contiguous"
    )
    samples = step_samples(STEP)
    stacked = batch_of(STEP, samples, place)
    whole = jax.tree.map(
        lambda x: x.reshape(-1, x.shape[-1]), dataclasses.replace(stacked, micro_batches=None)
    )
    parallel = place.parallel
    config = PolicyLossConfig(aggregation="sequence_mean_token_mean")

    def scored(batch):
        by_sample = advantages.grpo(batch.rewards, batch.group_ids, parallel=parallel)
        return dataclasses.replace(
            batch, advantages=advantages.spread(by_sample, batch, parallel=parallel)
        )

    def loss_fn(scale, batch, normalizer=None):
        stats = TokenStats(scale * jnp.where(batch.loss_mask > 0, batch.old_log_probs, 0))
        return policy_loss(stats, batch, config, parallel=parallel, normalizer=normalizer)

    @jax.jit
    def step(scale, batch):
        batch = scored(batch)
        normalizer = Normalizer.of(config, batch, parallel=parallel)
        (loss, found), gradient = accumulate_gradients(
            lambda x, part: loss_fn(x, *part), (batch, normalizer)
        )(scale)
        return loss, gradient, finalize_metrics(found)["broken_rules"]

    *got, broken = step(jnp.float32(1.1), stacked)
    expected = jax.jit(jax.value_and_grad(lambda x: loss_fn(x, scored(whole))[0]))(jnp.float32(1.1))
    assert broken == 0
    assert abs(expected[0]) > 1e-3
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


SAMPLES = [
    dataclasses.replace(s, reward=float(i % 2), rollout_id=i) for i, s in enumerate(step_of(3))
]
BATCHES = RolloutBatch.from_samples(SAMPLES, row_length=12, rows=2, micro_batches=4)
SELECTING = PolicyLossConfig(KLCov())
# functions of a batch; the others read arrays, which do not know their step
OF_A_BATCH = {
    "gdpo": lambda b: advantages.gdpo([b.rewards, b.rewards], b.group_ids, b),
    "reinforce_plus_plus": lambda b: advantages.reinforce_plus_plus(b.advantages, b),
    "reinforce_plus_plus_baseline": lambda b: advantages.reinforce_plus_plus_baseline(
        b.rewards, b.group_ids, b
    ),
    "optimal_token_baseline": lambda b: advantages.optimal_token_baseline(
        b.advantages, TokenStats(b.old_log_probs, sum_p2=jnp.exp(b.old_log_probs)), b.group_ids, b
    ),
    "covariance_mask": lambda b: covariance_mask(
        TokenStats(b.returns), b, SELECTING, jax.random.key(0)
    ),
    "second_moment_mask": second_moment_mask,
    "top_entropy_mask": lambda b: top_entropy_mask(jnp.asarray(b.values), b),
    "Normalizer.of": lambda b: Normalizer.of(SFT(), b).tokens,
}
OF_THE_STEP = OF_A_BATCH | {
    "whiten": lambda b: advantages.whiten(b.advantages, b.loss_mask),
    "explained_variance": lambda b: advantages.explained_variance(b.values, b.returns, b.loss_mask),
    "grpo": lambda b: advantages.grpo(b.rewards, b.group_ids),
    "rloo": lambda b: advantages.rloo(b.rewards, b.group_ids),
    "opo": lambda b: advantages.opo(b.rewards, b.group_ids, b.rewards),
    "gpg": lambda b: advantages.gpg(b.rewards, b.group_ids),
    "maxrl": lambda b: advantages.maxrl(b.rewards, b.group_ids),
    "standardize": lambda b: advantages.standardize(b.rewards, b.group_ids),
    "pass_at_k": lambda b: advantages.pass_at_k(b.rewards, b.group_ids),
}
CALLS = OF_THE_STEP | {
    "dr_grpo": lambda b: advantages.dr_grpo(b.rewards, b.group_ids),
    "Normalizer.of depths": lambda b: Normalizer.of(MTP(1), b)[0].tokens,
}
NAMES = {"dr_grpo": "grpo", "Normalizer.of depths": "Normalizer.of"}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CALLS)
def test_a_statistic_of_a_micro_batch_is_refused(name):
    """Before, it was the micro-batch's own statistic: whitened advantages were 0.71 to 1.35
    times those of the step.
    """
    statistic = jax.jit(CALLS[name])
    batches = dataclasses.replace(BATCHES, micro_batches=None)
    statistic(jax.tree.map(lambda x: x[0], batches))  # no earlier trace may be reused

    def loss_fn(w, batch):
        return (w * statistic(batch).sum(), {})

    message = (
        rf"{NAMES.get(name, name)}: got one micro-batch inside accumulate_gradients, expected the"
        r" whole step"
    )
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(loss_fn, batches)(jnp.float32(1))
    assert np.isfinite(statistic(batches)).all()


@pytest.mark.every(3)
@pytest.mark.parametrize("name", OF_A_BATCH)
def test_a_slice_of_a_stacked_batch_is_refused(name):
    """Also where it would be refused for its rollouts."""
    cut = dataclasses.replace(BATCHES, rollout_ids=np.where(BATCHES.rollout_ids >= 0, 0, -1))
    for batches in (BATCHES, cut):
        with pytest.raises(
            ValueError, match=rf"{name}: got one of 4 micro-batches, expected the whole step"
        ):
            CALLS[name](jax.tree.map(lambda x: x[0], batches))


def test_what_looks_along_a_sequence_alone_stays_right_for_a_micro_batch():
    expected = advantages.gae(BATCHES.advantages, BATCHES.values, BATCHES, lam=0.9)[0]

    def loss_fn(w, part):
        batch, expected = part
        found = advantages.gae(batch.advantages, batch.values, batch, lam=0.9)[0]
        return w * jnp.abs(found - expected).max(), {}

    assert accumulate_gradients(loss_fn, (BATCHES, expected))(jnp.float32(1))[0][0] == 0


def test_shapes_of_one_step():
    with pytest.raises(
        ValueError,
        match=r"rewards: got float32\[1, 1, 1, 1\] in grpo, expected floating \[R, S\], or",
    ):
        advantages.grpo(jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1), int))
    with pytest.raises(
        ValueError, match=r"x: got shape \(2, \d\), expected the batch's \[R, S\], \(4, 2, \d\)"
    ):
        advantages.spread(jnp.asarray(BATCHES.rewards[0]), BATCHES)
    with pytest.raises(
        ValueError, match=r"x, mask: got shapes .*, expected \[R, T\], or \[K, R, T\], both"
    ):
        advantages.whiten(jnp.ones(3), jnp.ones(3))
