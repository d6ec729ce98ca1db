"""SFT and Value: the same on every mesh, blind to masked positions, and what their options mean."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_rows import MESHES, hard_batch
from plain_head import plain_logits, reference_from_hidden
from policy_steps import normalizer_of, quick_jit

from jaxppo import (
    SFT,
    Head,
    RolloutBatch,
    Sample,
    Value,
    advantages,
    explain_broken_rules,
    finalize_metrics,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_hidden,
    loss_from_stats,
)
from jaxppo.head.head import TokenStats
from sharding.testing import assert_mesh_invariant, assert_trees_close


def sft(parallel, x, batch, normalizer=None, **options):
    return loss_from_stats(
        TokenStats(x), batch, SFT(**options), parallel=parallel, normalizer=normalizer
    )


def value(parallel, x, batch, normalizer=None, **options):
    return loss_from_stats(x, batch, Value(**options), parallel=parallel, normalizer=normalizer)


def truth(fn, x, batch):
    """The token_mean loss in float64 numpy."""
    mask = np.asarray(batch.loss_mask) > 0
    x, old, goal = (np.asarray(a, np.float64)[mask] for a in (x, batch.values, batch.returns))
    if fn is sft:
        return -x.mean()
    return 0.5 * np.maximum((x - goal) ** 2, (np.clip(x, old - 0.2, old + 0.2) - goal) ** 2).mean()


@pytest.mark.every(2)
@pytest.mark.parametrize("fn", [sft, value])
def test_same_on_every_mesh_and_blind_to_nan_outside_the_mask(fn):
    batch, x = hard_batch()

    def run(parallel, x, batch):
        (loss, metrics), grad = jax.value_and_grad(lambda x: fn(parallel, x, batch), has_aux=True)(
            x
        )
        return loss, finalize_metrics(metrics), grad

    loss, metrics, grad = assert_mesh_invariant(run, x, batch, meshes=MESHES)
    np.testing.assert_allclose(loss, truth(fn, x, batch), rtol=1e-6)
    assert (np.asarray(grad)[np.asarray(batch.loss_mask) == 0] == 0).all()
    assert all(np.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("fn", [sft, value])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_micro_batches_add_up(fn, aggregation):
    # The mean of the micro-batches' own means is 10-40% off here: their token counts differ.
    batch, x = hard_batch()
    whole = fn(None, x, batch, aggregation=aggregation)[0]

    def stack(a):
        return np.asarray(a).reshape(2, 4, *a.shape[1:])

    stacked = jax.tree.map(stack, batch)
    normalizers = normalizer_of(stacked, aggregation)

    def part(tree, k):
        return jax.tree.map(lambda a: np.asarray(a)[k], tree)

    parts = [
        fn(
            None,
            stack(x)[k],
            part(stacked, k),
            aggregation=aggregation,
            normalizer=part(normalizers, k),
        )[0]
        for k in range(2)
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)


def test_nothing_to_learn_from_is_zero():
    batch, x = hard_batch()
    batch = jax.tree.map(lambda a: a, batch)
    batch = type(batch)(**{**vars(batch), "loss_mask": jnp.zeros_like(batch.loss_mask)})
    for fn in (sft, value):
        loss, grad = quick_jit(jax.value_and_grad(lambda x, fn=fn: fn(None, x, batch)[0]))(x)
        assert_trees_close((loss, grad), (jnp.float32(0), jnp.zeros_like(x)))


def test_value_conventions():
    one = jnp.ones((1, 2))
    ids = jnp.ones((1, 2), int)
    sample = jnp.zeros((1, 1), int)
    # The first value moved by 0.5 towards its return: outside the clip, clipped is worse. The
    # second away from it.
    batch = RolloutBatch(
        ids,
        ids,
        ids,
        ids,
        one,
        sample,
        values=0 * one,
        returns=jnp.array([[1.0, -1.0]]),
        real_last_targets=True,
    )
    now = jnp.array([[0.5, 0.5]])
    loss, worse = loss_from_stats(now, batch, Value(clip=0.2))
    double, outside = loss_from_stats(
        now, batch, Value(clip=0.2, factor=1.0, clip_fraction="outside")
    )
    np.testing.assert_allclose(
        [loss, double], [0.5 * (0.64 + 2.25) / 2, (0.64 + 2.25) / 2], rtol=1e-6
    )
    assert (float(worse["clip_fraction"].value), float(outside["clip_fraction"].value)) == (
        0.5,
        1.0,
    )
    plain, metrics = loss_from_stats(now, batch, Value(clip=None))
    np.testing.assert_allclose(plain, 0.5 * (0.25 + 2.25) / 2, rtol=1e-6)
    assert "clip_fraction" not in metrics


def test_dynamic_fine_tuning_by_hand():
    """-p log p, whose gradient by log p is -p; the metric stays the mean of -log p."""
    p = jnp.array([[0.5, 0.2, 0.6, 0.3]])
    ids = jnp.ones((1, 4), int)
    one = jnp.ones((1, 4))
    batch = RolloutBatch(ids, ids, ids, ids, one, jnp.zeros((1, 1), int), real_last_targets=True)

    def loss(x):
        return loss_from_stats(TokenStats(x), batch, SFT(dft=True))

    (value, found), by = jax.value_and_grad(loss, has_aux=True)(jnp.log(p))
    np.testing.assert_allclose([value, found["nll"].value], [0.334037, 1.004346], rtol=1e-5)
    np.testing.assert_allclose(by, -p / 4, rtol=1e-5)


def test_huber_by_hand():
    """0.5 e^2 up to delta and delta (|e| - delta / 2) beyond, for the clipped value too, as in
    AReaL.
    """
    ids = jnp.ones((1, 3), int)
    one = jnp.ones((1, 3))
    sample = jnp.zeros((1, 1), int)
    returns = jnp.array([[1.0, -1.0, 3.0]])
    batch = RolloutBatch(
        ids, ids, ids, ids, one, sample, values=0 * one, returns=returns, real_last_targets=True
    )
    now = jnp.array([[0.5, 0.5, 0.1]])

    def run(x):
        return loss_from_stats(
            x, batch, Value(clip=0.25, huber_delta=1.0, aggregation="token_sum")
        )[0]

    loss, gradient = jax.value_and_grad(run)(now)
    # errors -0.75 (clipped; the value itself is nearer), 1.5, -2.9
    np.testing.assert_allclose(loss, 0.5 * 0.75**2 + (1.5 - 0.5) + (2.9 - 0.5), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, 1, -1]], atol=1e-7)
    np.testing.assert_allclose(
        jax.grad(lambda x: loss_from_stats(x, batch, Value(clip=None, huber_delta=2.0))[0])(now)[
            0, 2
        ],
        -2 / 3,
    )
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(
            ValueError, match=f"huber_delta: got {wrong}, expected a finite number above 0"
        ):
            loss_from_stats(now, batch, Value(huber_delta=wrong))


V, H = 97, 8
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2}


def written_out(hidden, kernel, batch):
    """Label smoothing and z-loss, from the log-probs of all tokens."""
    counts = batch.loss_mask > 0
    every = jnp.broadcast_to(jnp.arange(V), (*counts.shape, V))
    stats = reference_from_hidden(
        hidden, kernel, batch.targets, where=counts, ids=every, logit_stats=("log_z",)
    )
    target = 0.9 * jax.nn.one_hot(batch.targets, V) + 0.1 / V
    losses = -(target * stats.id_log_probs).sum(-1) + 1e-2 * stats.log_z**2
    return jnp.where(counts, losses, 0).sum() / counts.sum(dtype=jnp.float32)


@pytest.mark.every(2)
@pytest.mark.parametrize("path", ["hidden", "logits"])
def test_label_smoothing_and_z_loss_on_every_mesh(path):
    batch, _ = hard_batch()
    rng = np.random.default_rng(3)
    targets = jnp.asarray(
        np.where(batch.loss_mask > 0, rng.integers(0, V, batch.loss_mask.shape), -100)
    )
    batch = dataclasses.replace(batch, targets=targets)
    hidden = jnp.asarray(rng.normal(size=(*targets.shape, H)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(H, V)), jnp.float32)

    def loss(parallel, hidden, kernel, batch):
        options = {
            "where": batch.loss_mask > 0,
            "logit_stats": ("log_z", "mean_logit"),
            "parallel": parallel,
        }
        if path == "hidden":
            stats = log_probs_from_hidden(
                hidden, Head(kernel, vocab_size=V), batch.targets, **options
            )
        else:
            hidden = jnp.where(batch.loss_mask[..., None] > 0, hidden, 0)
            logits = jnp.matmul(hidden, jnp.pad(kernel, ((0, 0), (0, 7))), precision="highest")
            logits = jnp.where(batch.loss_mask[..., None] > 0, logits, jnp.nan)
            stats = log_probs_from_logits(logits, batch.targets, vocab_size=V, **options)
        return loss_from_stats(stats, batch, SFT(**OPTIONS), parallel=parallel)

    def run(parallel, hidden, kernel, batch):
        grad = jax.value_and_grad(lambda *a: loss(parallel, *a, batch), (0, 1), has_aux=True)
        (value, metrics), grads = grad(hidden, kernel)
        return value, finalize_metrics(metrics), grads

    spoiled = jnp.where(batch.loss_mask[..., None] > 0, hidden, jnp.nan)
    got, metrics, grads = assert_mesh_invariant(
        run, spoiled, kernel, batch, meshes=["dp=2,cp=2,tp=2"], atol=3e-6
    )
    expected = jax.jit(jax.value_and_grad(written_out, (0, 1)))(hidden, kernel, batch)
    assert_trees_close((got, grads), expected, atol=3e-6)
    assert metrics["log_z"] > 0


def test_coefficients_may_be_traced():
    """In one pass too. They get no gradient, and a traced 0 adds a term of 0."""
    batch, _ = hard_batch()
    batch = dataclasses.replace(batch, targets=jnp.where(batch.loss_mask > 0, 3, -100))
    rng = np.random.default_rng(0)
    hidden = np.float32(rng.normal(size=(*batch.tokens.shape, H)))
    kernel = np.float32(0.3 * rng.normal(size=(H, V)))

    @quick_jit
    def run(kernel, options):
        def loss(kernel, options):
            return loss_from_hidden(hidden, kernel, batch, SFT(**options))[0]

        return jax.value_and_grad(loss, (0, 1))(kernel, options)

    z = np.asarray(plain_logits(hidden, kernel), np.float64)[np.asarray(batch.loss_mask) > 0]
    log_z = np.log(np.exp(z).sum(-1))
    of_uniform = log_z - z.mean(-1)
    of_target = log_z - z[:, 3]
    for s, c in ((0.1, 1e-2), (0.0, 1e-2), (0.1, 0.0)):
        value, (slope, by_options) = run(
            kernel, {"label_smoothing": jnp.float32(s), "z_loss": jnp.float32(c)}
        )
        expected = (1 - s) * of_target + s * of_uniform + c * log_z**2
        np.testing.assert_allclose(value, expected.mean(), rtol=1e-5)
        assert np.isfinite(slope).all()
        assert not any(by_options.values())
    # known to be 0: needs no log_z
    sft(None, jnp.zeros(batch.loss_mask.shape), batch, z_loss=jnp.float32(0))


def test_bad_input():
    batch, x = hard_batch()
    with pytest.raises(
        ValueError, match=r"values: got shape \(4, 32\), expected the batch's \[R, T\], \(8, 32\)"
    ):
        loss_from_stats(x[:4], batch, Value())
    with pytest.raises(ValueError, match=r"stats.log_probs: got shape"):
        sft(None, x[:, :3], batch)
    with pytest.raises(TypeError, match="stats: got ArrayImpl, expected TokenStats"):
        loss_from_stats(x, batch, SFT())
    with pytest.raises(
        ValueError, match=r"stats.log_z: got None, expected f32\[R, T\]: .*label_smoothing=0.1"
    ):
        sft(None, x, batch, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"label_smoothing: got 1.0"):
        sft(None, x, batch, label_smoothing=1.0)
    with pytest.raises(ValueError, match="z_loss: got -1"):
        sft(None, x, batch, z_loss=-1)
    with pytest.raises(ValueError, match="aggregation: got 'mean', expected one of 'token_mean'"):
        sft(None, x, batch, aggregation="mean")
    with pytest.raises(ValueError, match="aggregation_norm: got None"):
        sft(None, x, batch, aggregation="sequence_mean_token_sum_norm")
    with pytest.raises(ValueError, match="clip: got -1, expected a finite number above 0"):
        loss_from_stats(x, batch, Value(clip=-1))
    with pytest.raises(ValueError, match="clip_fraction: got 'all'"):
        loss_from_stats(x, batch, Value(clip_fraction="all"))
    empty = type(batch)(**{**vars(batch), "returns": None})
    with pytest.raises(ValueError, match=r"batch.returns: got None, expected f32\[R, T\]"):
        loss_from_stats(x, empty, Value())


def test_a_sample_without_a_reward_has_no_returns():
    """None is NaN, in returns and in the loss, and the rule says so. A reward of 0 is a number."""

    @quick_jit
    def run(batch):
        rewards = advantages.token_rewards(batch.rewards, batch)
        values = jnp.zeros(batch.tokens.shape)
        _, returns = advantages.gae(rewards, values, batch)
        batch = dataclasses.replace(batch, values=values, returns=returns)
        loss, found = loss_from_stats(values, batch, Value(clip=None))
        return loss, found["broken_rules"].value

    explained = []
    for reward in (None, 0.0):
        batch = RolloutBatch.from_samples(
            [Sample([1, 2, 3], 1, reward=reward), Sample([1, 4], 1, reward=1.0)], row_length=6
        )
        loss, broken = run(batch)
        explained.append((float(loss), explain_broken_rules(broken)))
    assert np.isnan(explained[0][0])
    assert explained[0][1] == [
        "returns: expected finite numbers where loss_mask is 1; those of a sample without a reward,"
        " None, are NaN"
    ]
    assert explained[1] == (pytest.approx(0.5 * 1 / 3), [])
