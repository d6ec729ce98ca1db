"""Returns and GAE against serial f64 loops over each sequence, in every context layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_rows import MESHES, hard_batch, layouts_on, sequences

from jaxppo import RolloutBatch, Sample, advantages
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

BATCH, REWARDS = hard_batch()
MASK = BATCH.loss_mask
BATCH_64 = jax.tree.map(lambda x: np.asarray(x, np.float64), BATCH)
REWARDS_64 = np.asarray(REWARDS, np.float64)
MASK_64 = np.asarray(MASK, np.float64)


def serial_returns(gamma, masked):
    out = np.zeros(MASK.shape)
    for row, _, places in sequences(BATCH):
        running = 0.0
        for t in places[::-1]:
            if MASK_64[row, t]:
                out[row, t] = running = REWARDS_64[row, t] + gamma * running
            else:
                running *= {"skip": 1, "discount": gamma}[masked]
    return out


def serial_gae(gamma, lam, value_lam):
    advantage = np.zeros(MASK.shape)
    returns = np.zeros(MASK.shape)
    for row, _, places in sequences(BATCH):
        running, target, next_value = 0.0, 0.0, 0.0
        for t in places[::-1]:
            if MASK_64[row, t]:
                value = BATCH_64.values[row, t]
                delta = REWARDS_64[row, t] + gamma * next_value - value
                running = delta + gamma * lam * running
                target = delta + gamma * value_lam * target
                next_value = value
                advantage[row, t], returns[row, t] = running, target + value
    return advantage, returns


def serial_token_rewards(coef):
    out = np.zeros(MASK.shape)
    for row, s, places in sequences(BATCH):
        trained = places[MASK_64[row, places] > 0]
        out[row, trained] -= coef * BATCH_64.values[row, trained]
        out[row, trained[-1:]] += BATCH_64.rewards[row, s]
    return out


def returns_of(parallel, rewards, batch, masked):
    options = {"gamma": 0.9, "masked": masked, "parallel": parallel}
    return advantages.discounted_returns(rewards, batch, **options)


def gae_of(parallel, rewards, batch, gamma, lam, value_lam):
    options = {"gamma": gamma, "lam": lam, "value_lam": value_lam, "parallel": parallel}
    return advantages.gae(rewards, batch.values, batch, **options)


def token_rewards_of(parallel, rewards, batch):
    options = {"kl": batch.values, "kl_coef": 0.1, "parallel": parallel}
    return advantages.token_rewards(batch.rewards, batch, **options)


def baseline_of(parallel, rewards, batch):
    options = {"kl": batch.values, "kl_coef": 0.1, "parallel": parallel}
    return advantages.reinforce_plus_plus_baseline(batch.rewards, batch.group_ids, batch, **options)


def weighted_distillation_of(parallel, rewards, batch):
    own = -jnp.abs(batch.returns)
    teacher = -jnp.abs(batch.values)
    return advantages.importance_weighted_distillation(
        own, teacher, batch, gain=0.75, parallel=parallel
    )


GAE = {"gamma": 0.99, "lam": 0.95, "value_lam": 0.95}
GAE_OF_ONE_STEP = {"gamma": 0.97, "lam": 0.0, "value_lam": 0.5}
# by name: fn(parallel, rewards, batch)
ON_ALL_LAYOUTS = {
    "gae": functools.partial(gae_of, **GAE),
    "token_rewards": token_rewards_of,
    "weighted distillation": weighted_distillation_of,
}
ON_MESHES = ON_ALL_LAYOUTS | {
    "returns, skip": functools.partial(returns_of, masked="skip"),
    "returns, discount": functools.partial(returns_of, masked="discount"),
    "baseline": baseline_of,
}
AT_NIGHT = {"gae of one step": functools.partial(gae_of, **GAE_OF_ONE_STEP)}


def computed(estimators, parallel, arrays):
    """The result of each estimator, all of them in one program."""

    @jax.jit
    def run(rewards, batch):
        return {name: fn(parallel, rewards, batch) for name, fn in estimators.items()}

    return run(*arrays)


@functools.cache
def on_meshes(at_night=False):
    """The results in logical order, by mesh and by name."""
    estimators = AT_NIGHT if at_night else ON_MESHES
    return {
        mesh: computed(estimators, make_parallel_mesh(mesh), (REWARDS, BATCH))
        for mesh in MESHES[1:]
    }


@functools.cache
def on_layouts():
    """The results in logical order, by layout and by name."""
    found = {}
    for layout, parallel, to_physical, to_logical in layouts_on():
        physical = computed(ON_ALL_LAYOUTS, parallel, map(to_physical, (REWARDS, BATCH)))
        found[layout] = jax.tree.map(to_logical, physical)
    return found


def assert_same_everywhere(name, expected):
    """The estimator gives `expected` on every mesh, and in every layout if it is computed there."""
    for mesh, found in on_meshes(at_night=name in AT_NIGHT).items():
        assert_trees_close(found[name], expected, context=mesh)
    if name in ON_ALL_LAYOUTS:
        for layout, found in on_layouts().items():
            assert_trees_close(found[name], expected, context=layout)


@pytest.mark.parametrize("masked", ["skip", "discount"])
def test_discounted_returns(masked):
    assert_same_everywhere(f"returns, {masked}", serial_returns(0.9, masked))


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "options"), [("gae", GAE), ("gae of one step", GAE_OF_ONE_STEP)])
def test_gae(name, options):
    # One that resets at a shard's border is off by up to 100%; one that reads V across a hole in
    # the mask, NaN.
    assert_same_everywhere(name, serial_gae(**options))


def test_reward_lands_on_the_last_response_token_whichever_shard_owns_it():
    # On the last token of a shard, or of the row, every sequence but the fullest would lose its
    # reward.
    assert_same_everywhere("token_rewards", serial_token_rewards(0.1))


def test_whiten_a_mean_a_million_times_the_deviation():
    # E[x^2] - E[x]^2 in f32 gives deviation 0 or NaN here; a mean of rounded sums alone is off by
    # up to 0.1.
    x = (1000 + 1e-3 * np.random.default_rng(1).normal(size=MASK.shape)).astype(np.float32)
    mask = np.asarray(MASK) > 0
    exact = x[mask].astype(np.float64)
    expected = np.where(mask, (x.astype(np.float64) - exact.mean()) / exact.std(ddof=1), 0)
    for mesh in MESHES:
        whiten = jax.jit(functools.partial(advantages.whiten, parallel=make_parallel_mesh(mesh)))
        got = whiten(jnp.where(mask, x, jnp.nan), MASK)
        np.testing.assert_allclose(got, expected, atol=1e-4)
        np.testing.assert_allclose(np.asarray(got)[mask].std(ddof=1), 1, rtol=1e-4)


def test_whiten_of_equal_values_or_of_none_is_zero():
    assert (advantages.whiten(jnp.full((2, 8), 1000.1), jnp.ones((2, 8))) == 0).all()
    assert (advantages.whiten(jnp.full((2, 8), jnp.nan), jnp.zeros((2, 8))) == 0).all()


def test_reinforce_plus_plus_baseline_is_whitened_over_data_and_context():
    token = np.asarray(MASK) > 0
    centred = advantages.dr_grpo(BATCH.rewards, BATCH.group_ids)
    of_tokens = np.asarray(advantages.spread(centred, BATCH), np.float64)
    x = of_tokens - 0.1 * np.nan_to_num(BATCH.values)
    whitened = (x - x[token].mean()) / x[token].std(ddof=1)
    assert_same_everywhere("baseline", np.where(token, whitened, 0))


def test_distillation_pulls_to_the_teacher():
    own = -np.abs(np.asarray(REWARDS))
    theirs = -np.abs(np.asarray(BATCH.values))
    got = advantages.on_policy_distillation(BATCH.advantages, own, theirs, MASK, coef=0.5)
    expected = np.where(MASK > 0, BATCH.advantages - 0.5 * (own - theirs), 0)
    assert_trees_close(got, expected)


def test_weighted_distillation_follows_each_sequence_on_any_mesh():
    own = -np.abs(np.asarray(BATCH.returns))
    theirs = -np.abs(np.asarray(BATCH.values))
    expected = np.zeros(own.shape)
    for row, s in np.argwhere(np.asarray(BATCH.sample_ids) >= 0):
        at = (np.asarray(BATCH.segment_ids)[row] == s + 1) & (np.asarray(MASK)[row] > 0)
        d = (theirs - own)[row, at].astype(np.float64)
        before = np.cumsum(np.abs(d)) - np.abs(d)
        expected[row, at] = (1 + 0.75 * (1 - before / max(np.abs(d).sum(), 1e-8))) * d
    assert_same_everywhere("weighted distillation", expected)


def test_advantages_are_constants():
    def total(rewards):
        advantage, returns = advantages.gae(rewards, BATCH.values, BATCH)
        return (
            advantage.sum() + returns.sum() + advantages.reinforce_plus_plus(rewards, BATCH).sum()
        )

    assert (jax.jit(jax.grad(total))(REWARDS) == 0).all()


@pytest.mark.every(2)
@pytest.mark.parametrize(("row_length", "layout"), [(64, "contiguous"), (96, "zigzag")])
def test_packing_and_order_change_nothing(row_length, layout):
    rng = np.random.default_rng(4)
    samples = [
        Sample(
            np.zeros(n, int),
            start,
            values=rng.normal(size=n - start),
            reward=rng.normal(),
            sample_id=i,
        )
        for i, (n, start) in enumerate([(30, 4), (9, 1), (12, 12), (17, 3), (25, 20), (8, 2)])
    ]

    @functools.partial(jax.jit, static_argnums=1)
    def run(b, parallel):
        rewards = advantages.token_rewards(b.rewards, b, parallel=parallel)
        return advantages.gae(rewards, b.values, b, lam=0.9, parallel=parallel)

    def by_sample(samples, **options):
        batch = RolloutBatch.from_samples(samples, **options)
        arrays = [np.asarray(x) for x in run(batch, options.get("parallel"))]
        found = {}
        for row, slot in zip(*np.nonzero(batch.sample_ids >= 0), strict=True):
            here = batch.segment_ids[row] == slot + 1
            order = np.argsort(batch.positions[row, here])
            found[int(batch.sample_ids[row, slot])] = [x[row, here][order] for x in arrays]
        return [found[i] for i in range(len(samples))]

    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    one_a_row = by_sample(samples, row_length=32, rows=6, num_segments=1)
    assert_trees_close(
        by_sample(samples[::-1], row_length=row_length, parallel=parallel), one_a_row
    )


def test_bad_input():
    with pytest.raises(ValueError, match=r"lam: got 1.5, expected a number in \[0, 1\]"):
        advantages.gae(REWARDS, REWARDS, BATCH, lam=1.5)
    with pytest.raises(
        ValueError, match=r"rewards: got shape \(8, 16\), expected the batch's \[R, T\], \(8, 32\)"
    ):
        advantages.gae(REWARDS[:, :16], REWARDS, BATCH)
    with pytest.raises(ValueError, match="masked: got 'drop', expected one of 'skip', 'discount'"):
        advantages.discounted_returns(REWARDS, BATCH, masked="drop")
    with pytest.raises(
        ValueError, match=r"rewards: got shape \(3, 4\), expected the batch's \[R, S\], \(8, 4\)"
    ):
        advantages.token_rewards(BATCH.rewards[:3], BATCH)
    for alone, message in [
        ({"kl": REWARDS}, "kl_coef: got None with kl"),
        ({"kl_coef": 0.1}, "kl: got None with kl_coef"),
    ]:
        with pytest.raises(ValueError, match=message):  # before: it did nothing
            advantages.token_rewards(BATCH.rewards, BATCH, **alone)
    with pytest.raises(ValueError, match="rewards: got None, expected the batch's"):
        advantages.token_rewards(None, BATCH)


@pytest.mark.parametrize("mesh", [None, "dp=1,cp=4,tp=2"])
def test_a_response_that_was_cut_goes_on(mesh):
    """With a critic that is right, a cut changes nothing: its returns were 3.5 and 1 for 5 and
    4.
    """
    parallel = mesh and make_parallel_mesh(mesh, context_layout="zigzag")
    samples = [Sample([5] * 6, response_start=1), Sample([5] * 3, response_start=1)]
    batch = RolloutBatch.from_samples(samples, row_length=16, rows=1, parallel=parallel)
    values = jnp.where(batch.loss_mask > 0, 5.0 - batch.positions, jnp.nan)
    last_values = jnp.where(batch.sample_ids == 1, 3.0, 0.0)
    found = advantages.gae(
        batch.loss_mask,
        values,
        batch,
        gamma=1.0,
        lam=0.5,
        last_values=last_values,
        parallel=parallel,
    )
    counts = np.asarray(batch.loss_mask) > 0
    assert not np.asarray(found[0]).any()
    np.testing.assert_array_equal(np.asarray(found[1])[counts], np.asarray(values)[counts])
    with pytest.raises(
        ValueError, match=r"last_values: got shape \(1, 16\), expected the batch's \[R, S\]"
    ):
        advantages.gae(batch.loss_mask, values, batch, last_values=values, parallel=parallel)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"share_prefixes": True}], ids=str)
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (None, "contiguous"),
        ("dp=2,cp=2,tp=2", "zigzag"),
        ("cp=4", "zigzag_per_segment"),
        ("cp=8", "striped"),
    ],
)
def test_values_after_responses_that_were_cut(mesh, layout, options):
    """One sample a row, and several: of S = 1 a recipe once gave 0 for all, in silence."""
    devices = jax.devices()[: 4 if mesh == "cp=4" else 8]
    parallel = mesh and make_parallel_mesh(mesh, devices=devices, context_layout=layout)
    last_values = jax.jit(functools.partial(advantages.last_values, parallel=parallel))
    for lengths in ([5, 9, 3, 7, 2, 6, 4, 8], [60, 33, 50, 41]):
        samples = [Sample([7] * (n - 1) + [10 + n], 1, sample_id=i) for i, n in enumerate(lengths)]
        batch = RolloutBatch.from_samples(samples, row_length=64, parallel=parallel, **options)
        cut = np.arange(len(lengths)) % 3 != 1
        truncated = cut[np.maximum(batch.sample_ids, 0)]
        values = np.where(batch.segment_ids > 0, 0.5 * batch.tokens, np.nan).astype(np.float32)
        found = np.asarray(last_values(values, batch, truncated))
        expected = np.array([0.5 * (10 + n) * c for n, c in zip(lengths, cut, strict=True)])
        np.testing.assert_allclose(
            found, np.where(batch.sample_ids < 0, 0, expected[batch.sample_ids]), rtol=1e-6
        )


def test_rows_that_lack_the_last_token_are_refused():
    x = jnp.ones((1, 3), jnp.int32)
    ids = jnp.ones((1, 3), jnp.int32)
    batch = RolloutBatch.from_target_aligned(x, x, ids, jnp.arange(3)[None], ids)
    with pytest.raises(ValueError, match="batch: got rows whose last position has a target"):
        advantages.last_values(jnp.ones((1, 3)), batch, batch.sample_ids == 0)
