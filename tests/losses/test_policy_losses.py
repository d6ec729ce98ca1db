"""Each registered loss by itself: its gradient, its extremes, its flags; and losses of the
user's own.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from policy_steps import LOSSES, config_of, loss_named, loss_of, step_of, whole, with_selected

from jaxppo import CISPO, SAPO, PolicyLossConfig, RolloutBatch, TokenStats, presets
from jaxppo.losses.policy_tokens import PolicyTokenLoss
from jaxppo.policy_losses import ASPO, PolicyLoss, ProbabilityMask
from jaxppo.step.aggregation import normalize, token_weights
from sharding import Segments

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2, 2, 2]])
MASK = np.array([[1, 0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1, 1, 1]])


def arguments(dtype):
    """log_probs, old_log_probs and advantages, away from kinks; every second token is selected."""
    rng = np.random.default_rng(0)
    old = rng.uniform(-3, -0.2, MASK.shape)
    log_probs = np.minimum(old + rng.uniform(-0.7, 0.7, MASK.shape), -0.01)
    advantages = np.where(SEGMENTS == 1, [[1.3], [-0.8]], [[-0.4], [0.9]])
    return tuple(jnp.asarray(np.where(MASK > 0, x, 0), dtype) for x in (log_probs, old, advantages))


def call(loss, log_probs, old, advantages, **hyperparameters):
    loss = loss_named(loss, **hyperparameters) if isinstance(loss, str) else loss
    extra = (
        {"selected": jnp.asarray(MASK * (np.arange(8) % 2), log_probs.dtype)}
        if loss.selects
        else {}
    )
    mask = jnp.asarray(MASK, log_probs.dtype)
    return loss(
        log_probs, old, advantages, mask=mask, segments=Segments(jnp.asarray(SEGMENTS), 2), **extra
    )


class Constants:
    """stop_gradient that on later calls gives what it gave at the point of differentiation: then
    f64 differences of a loss with constants in it (a detached ratio, a detached mask) are the
    differences that its gradient claims.
    """

    def __init__(self):
        self.recorded, self.place, self.original = [], None, jax.lax.stop_gradient

    def __call__(self, x):
        if self.place is None:
            self.recorded.append(self.original(x))
            return self.recorded[-1]
        self.place += 1
        return self.recorded[self.place - 1]


ALL = {name: {"dual_clip": 1.5} if name in ("aspo", "ppo", "gspo") else {} for name in LOSSES}
OF_SEQUENCES = [
    ("cispo", {"level": "sequence", "unified_mask": True}),
    ("sapo", {"level": "sequence"}),
]
MORE = [
    ("gspo", {"gradient": "token"}),
    ("cispo", {"unified_mask": True}),
    ("probability_mask", {"pull": 0.3}),
]
VARIANTS = [*ALL.items(), *MORE, *OF_SEQUENCES]


@pytest.mark.every(5)
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_gradient_is_that_of_f64_differences(name, options):
    with jax.enable_x64(True):
        x, old, advantages = arguments(jnp.float64)
        weights = jnp.asarray(np.random.default_rng(1).uniform(0.5, 1.5, MASK.shape) * MASK)
        constants = Constants()

        def total(x):
            return jnp.sum(call(name, x, old, advantages, **options)[0] * weights)

        def record(x):
            total(x)
            return constants.recorded

        with mock.patch.object(lax, "stop_gradient", constants):
            constants.recorded = jax.jit(record)(x)
            constants.place = 0
            with_constants = jax.jit(total).lower(x).compile()
        differences = np.zeros(MASK.shape)
        for place in zip(*np.nonzero(MASK), strict=True):
            ends = []
            for step in (1e-6, -1e-6):
                moved = np.array(x)
                moved[place] += step
                ends.append(float(with_constants(moved)))
            differences[place] = (ends[0] - ends[1]) / 2e-6
        gradient = jax.jit(jax.grad(total))(x)
    assert np.abs(differences).max() > 0.1
    np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-8)
    x, old, advantages = arguments(jnp.float32)
    weights = np.asarray(weights, np.float32)
    gradient = jax.jit(jax.grad(total))(x)
    np.testing.assert_allclose(gradient, differences, rtol=2e-5, atol=2e-6)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", LOSSES)
def test_any_log_ratio_is_finite(name):
    """exp(100) is inf in f32, and inf * 0 a NaN gradient: the ratio is exp of at most 20."""
    _, old, _ = arguments(jnp.float32)

    @jax.jit
    @jax.value_and_grad
    def value_and_gradient(x, advantages):
        return jnp.sum(call(name, x, old, advantages)[0])

    for ratio in (100.0, -100.0, 1e4, -1e4):
        x = np.where(MASK > 0, old + ratio, 0)
        for sign in (1.0, -1.0):
            value, gradient = value_and_gradient(x, np.full(MASK.shape, sign, np.float32))
            assert np.isfinite(value), (ratio, sign)
            assert np.all(np.isfinite(gradient)), (ratio, sign)


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in LOSSES), *OF_SEQUENCES])
def test_token_local_flag_is_true(name, options):
    """No token of a token-local loss feels another's log-prob; those of others do, or they lose the
    one-pass path.

    By values, not by the Jacobian: the weight of a sequence may be a constant of differentiation,
    as VESPO's is.
    """
    log_probs, old, advantages = arguments(jnp.float32)

    @jax.jit
    @jax.vmap
    def values(x):
        return call(name, x, old, advantages, **options)[0].reshape(-1)

    still = np.zeros((1, 16), np.float32)  # the first turn moves nothing
    moves = np.concatenate([still, 0.1 * np.eye(16, dtype=np.float32) * MASK.reshape(-1)])
    usual, *moved = np.asarray(values(np.asarray(log_probs) + moves.reshape(17, 2, 8)))
    felt = (np.asarray(moved) != usual) & ~np.eye(16, dtype=bool)
    assert loss_named(name, **options).token_local == (not np.any(felt))


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [n for n in LOSSES if loss_named(n).token_local])
def test_token_local_losses_in_blocks(name):
    """The sum over blocks of tokens, each by itself, is the loss: what a one-pass head relies
    on.
    """
    batch = RolloutBatch.from_samples(step_of(4), row_length=24, rows=4, num_segments=9)
    loss = PolicyTokenLoss(config_of(name, "sequence_mean_token_mean", entropy_coef=0.0, kl=None))
    assert loss.token_local
    selected = np.float32(batch.positions % 2) if loss.config.loss.selects else None

    @jax.jit
    def weights_and_loss(batch):
        segments = batch.segments()
        normalizer = normalize(batch, segments, loss.aggregation)
        stats = TokenStats(batch.returns, batch.values)
        whole, _ = loss_of(stats, batch, loss.config, None, selected=selected)
        return token_weights(batch.loss_mask, segments, normalizer), whole

    @jax.jit
    def sum_of_block(batch, weights):
        stats = TokenStats(batch.returns, batch.values)
        losses = sum(loss.terms(stats, batch, None, None).values())
        return jnp.sum(losses * weights)

    weights, expected = weights_and_loss(batch)
    total = 0.0
    for block in range(0, 24, 8):

        def cut(x, columns=slice(block, block + 8)):
            return x[:, columns] if x.shape[1] == 24 else x

        part = jax.tree.map(cut, with_selected(batch, selected))
        total += sum_of_block(part, cut(np.asarray(weights)))
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)


def test_gspo_gradients_differ_where_masks_are_uneven():
    """Sequence: each loss token has s / n of the sequence's weight.

    Token: its own weight times s.
    """
    log_probs, old, _ = arguments(jnp.float32)
    weights = jnp.asarray(MASK * np.arange(8.0), jnp.float32)
    gradients = {}
    for how in ("sequence", "token"):
        fn = functools.partial(call, "gspo", clip_high=9.0, gradient=how)

        def weighted(log_probs, fn=fn):
            return jnp.sum(fn(log_probs, old, jnp.ones(MASK.shape))[0] * weights)

        gradients[how] = jax.jit(jax.grad(weighted))(log_probs)
    first = (SEGMENTS[0] == 1) & (MASK[0] > 0)
    s = np.exp(np.mean((log_probs - old)[0][first]))
    np.testing.assert_allclose(gradients["sequence"][0][first], -s * (0 + 2) / 2, rtol=1e-5)
    np.testing.assert_allclose(gradients["token"][0][first], -s * np.array([0.0, 2.0]), rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Squared(PolicyLoss):
    """A third party's loss."""

    scale: float = 1.0

    def __call__(self, log_probs, old_log_probs, advantages, *, mask, segments, selected=None):
        return self.scale * (log_probs - advantages) ** 2, {
            "far": (jnp.abs(log_probs) > 1).astype(jnp.float32)
        }


def test_a_loss_of_the_users_own():
    batch = RolloutBatch.from_samples(step_of(4), row_length=24, rows=4, num_segments=9)
    config = PolicyLossConfig(Squared(2.0))
    value, _, found = whole(config, metrics=True)(batch)
    on = batch.loss_mask > 0
    np.testing.assert_allclose(
        value, 2 * np.mean((batch.returns - batch.advantages)[on] ** 2), rtol=1e-5
    )
    np.testing.assert_allclose(
        found["far"].value, np.mean(np.abs(batch.returns[on]) > 1), rtol=1e-6
    )
    assert not PolicyTokenLoss(config).token_local


def values_and_slopes(fn, x):
    """The losses that fn(x) gives beside its indicators, the gradient of their sum, and these."""

    def total(x):
        losses, indicators = fn(x)
        return losses.sum(), (losses, indicators)

    (_, (losses, indicators)), slopes = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
    return losses, slopes, indicators


def test_a_token_that_the_probability_mask_drops_is_pulled_still_and_the_cap_keeps_the_gradient():
    """By hand: p - q is 0.4, -0.4, 0.1 and 2e-5; the last ratio is 3, capped at 2."""
    p = np.array([0.5, 0.1, 0.2, 3e-5])
    q = np.array([0.1, 0.5, 0.1, 1e-5])
    a = np.array([1.0, -1.0, -1.0, 1.0])
    d = np.log(p / q)
    loss = ProbabilityMask(0.3, 0.3, ratio_cap=2.0, pull=0.5)

    def values(x):
        return loss(x, np.float32(np.log(q)), np.float32(a))

    losses, slopes, indicators = values_and_slopes(values, np.float32(np.log(p)))
    kept = np.array([0.0, 0.0, 2.0, -2.0])
    np.testing.assert_allclose(losses, kept + 0.5 * d**2, rtol=1e-5)
    np.testing.assert_allclose(slopes, kept + d, rtol=1e-5)
    np.testing.assert_array_equal(indicators["clip_fraction"], [1, 1, 0, 0])


@pytest.mark.parametrize(
    ("a", "topr", "up"), [(1.0, [0.6931, 1.6094, 0.5108, 1.2040], None), (-1.0, None, None)]
)
def test_topr_and_up_grpo_by_hand(a, topr, up):
    """p = (.5, .2, .6, .3), old (.4, .4, .1, .2): ratios 1.25, .5, 6 and 1.5."""
    x = jnp.log(jnp.array([0.5, 0.2, 0.6, 0.3]))
    old = jnp.log(jnp.array([0.4, 0.4, 0.1, 0.2]))
    topr = topr or [-0.6931, -0.8047, -0.5108, -1.2040]
    up = -a * x if a > 0 else [1.25, 0.8, 3.0, 1.5]
    slopes = {"topr": [1.0, 0.5, 1.0, 1.0], "up_grpo": [1.25, 0.0, 0.0, 1.5]}
    for name, expected in (("topr", topr), ("up_grpo", up)):
        loss = getattr(presets, name)().loss

        def values(x, loss=loss):
            return loss(x, old, jnp.full(4, a), mask=None, segments=None)

        losses, by, _ = values_and_slopes(values, x)
        np.testing.assert_allclose(losses, expected, rtol=2e-4)
        np.testing.assert_allclose(by, -np.ones(4) if a > 0 else slopes[name], rtol=1e-5)


def test_flipped_weights_by_hand():
    """Ratios 1.5, 0.5, 0.25 with A = 2, then 1.5 and 0.5 with A = -2, 4 with A = -1 and A = 0; the
    old p is 0.1.

    PPO's gradients are 0, -1, -0.5, 3, 0, 4 and 0: the token that fell most is pulled up least.
    """
    ratio = np.array([1.5, 0.5, 0.25, 1.5, 0.5, 4.0, 4.0])
    a = jnp.array([2.0, 2.0, 2.0, -2.0, -2.0, -1.0, 0.0])
    x = np.log(0.1 * ratio)

    def values(x):
        return ASPO(clip_low=0.25, clip_high=0.25, dual_clip=2.5)(
            x, jnp.full(7, np.float32(np.log(0.1))), a
        )

    losses, slopes, indicators = values_and_slopes(values, np.float32(x))
    np.testing.assert_allclose(losses, [-1.6, -4, -5 * x[2], 3, 1.5, 2.5 * x[5], 0], rtol=1e-5)
    np.testing.assert_allclose(slopes, [0, -4, -5, 3, 0, 2.5, 0], rtol=1e-5)
    np.testing.assert_array_equal(indicators["clip_fraction"], [1, 0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(indicators["heavy_fraction"], [0, 0, 1, 0, 0, 1, 0])


def test_the_unified_mask_asks_for_the_sign_of_the_advantage():
    """By hand: ratios 2 and 0.4 with both signs, bounds 0.75 and 1.5."""
    ratio = np.array([2.0, 2.0, 0.4, 0.4])
    a = np.array([1.0, -1.0, 1.0, -1.0])
    old = np.full(4, -2.0, np.float32)
    x = old + np.float32(np.log(ratio))

    @jax.jit
    def run(x, a):
        return CISPO(0.25, 0.5, unified_mask=True)(x, old, a, mask=None, segments=None)

    values, found = run(x, np.float32(a))
    np.testing.assert_allclose(values, np.array([0, 1.5, -0.75, 0]) * x, rtol=1e-5)
    np.testing.assert_array_equal(found["masked_fraction"], [1, 0, 0, 1])
    np.testing.assert_array_equal(found["clip_fraction"], [1, 1, 1, 1])


def test_the_gradient_of_a_gate_that_is_nearly_one():
    """It is 4 r p (1 - p).

    With 1 - p taken from p in f32 it is off by 0.4% at a ratio of 15, by 6% at 17.
    """
    ratios = np.array([1.0, 5.0, 10.0, 15.0, 17.0])
    p = 1 / (1 + np.exp(1 - ratios))
    q = 1 / (1 + np.exp(ratios - 1))
    given = (jnp.zeros(5), jnp.ones(5))

    def loss(log_probs):
        return SAPO(tau_positive=1.0)(log_probs, *given, mask=None, segments=None)[0].sum()

    found = jax.jit(jax.grad(loss))(np.float32(np.log(ratios)))
    np.testing.assert_allclose(found, -4 * ratios * p * q, rtol=1e-5)
