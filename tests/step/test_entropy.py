"""The adaptive coefficient of the entropy bonus, against its rule in plain Python."""

import dataclasses
import math
from functools import partial, reduce

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import config_of, loss_of, step_of

from jaxppo import RolloutBatch, TokenStats, finalize_metrics
from jaxppo.base.metrics import merge_metrics
from jaxppo.step.entropy import AdaptiveEntropy, EntropyState, entropy_metrics
from sharding import make_parallel_mesh

ENTROPIES = [0.5, 0.2, 0.1, 0.15, 0.3, 0.05, 0.05, 0.4, 0.4, 0.4, 0.4, 0.1]


def by_hand(entropies, target, step, most, coef):
    """Skywork-OR1, section 4: the bonus of each step, and of the one after the last."""
    used = [coef]
    for entropy in entropies:
        coef = min(max(coef + (step if entropy <= target else -step), 0.0), most)
        used.append(coef if entropy <= target else 0.0)
    return used


@pytest.mark.parametrize(
    ("step", "most", "first"), [(0.005, 1.0, 0.0), (0.125, 0.25, 0.25), (0.5, 1.0, 0.1)]
)
def test_the_coefficients_of_a_run(step, most, first):
    adaptive = AdaptiveEntropy(target=0.2, step=step, most=most)
    update = jax.jit(adaptive.update)
    state = adaptive.init(first)
    used = []
    for entropy in np.float32(ENTROPIES):
        used.append(float(adaptive.coef(state)))
        state = update(state, entropy)
    used.append(float(adaptive.coef(state)))
    target = float(np.float32(0.2))  # the second entropy is the target itself
    np.testing.assert_allclose(
        used, by_hand(np.float32(ENTROPIES), target, step, most, first), rtol=1e-5, atol=1e-7
    )


def test_the_state_is_all_that_a_run_saves():
    adaptive = AdaptiveEntropy()
    state = adaptive.update(adaptive.update(adaptive.init(), 0.1), 0.1)
    restored = EntropyState(*(jnp.asarray(np.asarray(x)) for x in state))
    assert float(adaptive.coef(adaptive.update(restored, 0.1))) == float(
        adaptive.coef(adaptive.update(state, 0.1))
    )


def test_in_a_step():
    """The metric of one step moves the bonus of the next, without another compilation."""
    adaptive = AdaptiveEntropy(target=10.0, step=0.25)
    batch = RolloutBatch.from_samples(step_of(4), row_length=24, rows=4, num_segments=9)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, log_probs, entropies):
        config = config_of("ppo", kl=None, entropy_coef=adaptive.coef(state))
        loss, found = loss_of(TokenStats(log_probs, entropies), batch, config, None)
        return loss, found, adaptive.update(state, found["entropy"].value)

    first, found, state = step(adaptive.init(), batch.returns, batch.values)
    second, _, _ = step(state, batch.returns, batch.values)
    np.testing.assert_allclose(first - second, 0.25 * found["entropy"].value, rtol=1e-5)


def test_an_entropy_of_nan_does_not_pass_for_a_low_one():
    adaptive = AdaptiveEntropy()
    state = jax.jit(adaptive.update)(adaptive.init(0.5), jnp.float32(math.nan))
    assert np.isnan(adaptive.coef(state))
    assert np.isnan(adaptive.coef(adaptive.update(state, 0.5)))


def update_by(entropy):
    adaptive = AdaptiveEntropy()
    return adaptive.update(adaptive.init(), entropy)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(AdaptiveEntropy, target=-1.0),
            "target: got -1.0, expected a finite number of at least 0",
        ),
        (
            partial(AdaptiveEntropy, step=math.nan),
            "step: got nan, expected a finite number of at least 0",
        ),
        (
            partial(AdaptiveEntropy, most="1"),
            "most: got '1', expected a finite number of at least 0",
        ),
        (
            partial(AdaptiveEntropy().init, 2.0),
            "coef: got 2.0, expected a finite number of at least 0 and of at most 1",
        ),
        (
            partial(update_by, math.nan),
            "entropy: got nan, expected a finite",
        ),
        (partial(update_by, np.ones(3, np.float32)), "entropy: got"),
    ],
)
def test_bad_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def entropies(samples):
    """Those of the loss tokens, and their places from the first loss token of their sample, of
    `step_of`.
    """
    each = [
        (np.asarray(s.values)[s.mask[s.start :] > 0], np.flatnonzero(s.mask[s.start :] > 0))
        for s in samples
    ]
    return np.concatenate([x for x, _ in each]), np.concatenate(
        [i - i[0] for _, i in each if len(i)]
    )


@jax.jit
def merged(*parts):
    """The finalized metrics of micro-batches."""
    return finalize_metrics(reduce(merge_metrics, parts))


@pytest.mark.parametrize("layout", [None, "contiguous", "zigzag"])
def test_quantiles_and_places(layout):
    parallel = layout and make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    samples = step_of(6, 40)
    wanted = (0.0, 0.25, 0.5, 0.8, 1.0)
    batch = RolloutBatch.from_samples(
        samples, row_length=32, rows=24, num_segments=8, parallel=parallel
    )
    spoilt = np.where(batch.loss_mask > 0, batch.values, np.nan)

    @jax.jit
    def run(batch, entropy):
        stats = TokenStats(batch.returns, entropy)
        return entropy_metrics(stats, batch, quantiles=wanted, starts=(0, 1, 4), parallel=parallel)

    x, place = entropies(samples)
    expected = {
        f"entropy_from_{a}": x[(place >= a) & (place < b)].mean()
        for a, b in ((0, 1), (1, 4), (4, 99))
    }
    expected |= {f"entropy_p{100 * q:g}": np.quantile(x, q, method="inverted_cdf") for q in wanted}
    # of micro-batches that are merged, of unequal sizes, and of all at once
    some = dataclasses.replace(batch, loss_mask=batch.loss_mask * (batch.sample_ids[:, :1] < 9))
    rest = dataclasses.replace(batch, loss_mask=batch.loss_mask - some.loss_mask)
    for parts in ([batch], [some, rest]):
        got = merged(*(run(part, spoilt) for part in parts))
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            close = 0.015 * np.sqrt(value) + 1e-4 if "_p" in name else 1e-6
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=close, err_msg=name)
    nothing = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    assert all(float(x) == 0 for x in merged(run(nothing, spoilt)).values())
    assert np.isnan(merged(run(batch, np.full_like(spoilt, np.nan)))["entropy_p50"])


def test_bad_entropies():
    batch = RolloutBatch.from_samples(step_of(0), row_length=24, rows=4)
    stats = TokenStats(batch.returns, batch.values)
    with pytest.raises(ValueError, match=r"stats.entropy: got None, expected f32\[R, T\]"):
        entropy_metrics(TokenStats(batch.returns), batch)
    with pytest.raises(ValueError, match=r"stats.entropy: got shape \(2, 24\)"):
        entropy_metrics(TokenStats(batch.returns, batch.values[:2]), batch)
    with pytest.raises(ValueError, match=r"quantiles: got 1.5, expected a finite number"):
        entropy_metrics(stats, batch, quantiles=(1.5,))
    for starts in ((1, 2), (0, 4, 4), ()):
        with pytest.raises(ValueError, match=r"starts: got .*, expected 0 and then larger numbers"):
            entropy_metrics(stats, batch, starts=starts)
