"""A `Normalizer` knows what it was made for: a loss refuses one of another correction, step or part
of it.

"Before, x for y": an earlier version gave the loss x, and y is right.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import normalizer_of, step_of

from jaxppo import (
    SFT,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    TokenStats,
    accumulate_gradients,
    explain_broken_rules,
    loss_from_stats,
    make_parallel_mesh,
    policy_loss,
    policy_loss_from_hidden,
)

T, V = 12, 50
STEP = step_of(0)
MESH = "dp=2,cp=2,tp=2"
HIDDEN = jax.random.normal(jax.random.key(0), (8, T, 4))
KERNEL = jax.random.normal(jax.random.key(1), (4, V + 2))


def packed(samples=STEP, **options):
    return RolloutBatch.from_samples(
        samples, **{"row_length": T, "rows": 8, "num_segments": 4} | options
    )


BATCH = packed()
# the same samples in the same places, with more of their tokens counting
WIDER = (BATCH.loss_mask > 0) | ((BATCH.segment_ids > 0) & (BATCH.positions == 0))
LARGER = dataclasses.replace(BATCH, loss_mask=WIDER.astype(np.float32))
SMALLER = dataclasses.replace(BATCH, loss_mask=BATCH.loss_mask * (np.arange(T) < 5))
STACKED = packed(rows=2, micro_batches=4)


def loss_at(batch, config=None, **options):
    config = PolicyLossConfig() if config is None else config
    return policy_loss(TokenStats(jnp.asarray(batch.returns)), batch, config, **options)


def off(**options):
    return OffPolicyConfig(**{"weights": "token", "high": 2.0, "batch_normalize": True} | options)


@pytest.mark.parametrize(
    "other", [{"high": 1.01}, {"low": 0.9}, {"weights": "sequence"}, {"outside": "zero"}]
)
def test_the_mean_weight_of_another_correction(other):
    """Before, -0.289 for -0.278: the weights of one correction over the mean of another, here
    with high=1.01.
    """
    normalizer = normalizer_of(BATCH, "token_mean", off_policy=off(**other))
    field, value = next(iter(other.items()))
    message = (
        rf"normalizer: got one of off_policy=.*{field}={value!r}.*, expected"
        r" OffPolicyConfig\(weights='token'"
    )
    with pytest.raises(ValueError, match=message):
        loss_at(BATCH, PolicyLossConfig(off_policy=off()), normalizer=normalizer)


def test_no_mean_weight():
    normalizer = normalizer_of(BATCH, "token_mean", off_policy=off(batch_normalize=False))
    with pytest.raises(
        ValueError, match=r"normalizer: got one of off_policy=None, expected OffPolicyConfig\("
    ):
        loss_at(BATCH, PolicyLossConfig(off_policy=off()), normalizer=normalizer)


def test_what_the_mean_weight_does_not_depend_on():
    """Rejections and vetos leave the mean alone, and a loss that needs no mean may share the
    normalizer.
    """
    normalizer = normalizer_of(BATCH, "token_mean", off_policy=off())
    rejecting = off(rejections=(Rejection("token_k3", high=0.01),), veto=0.5)
    for config in (PolicyLossConfig(off_policy=rejecting), PolicyLossConfig()):
        got, _ = loss_at(BATCH, config, normalizer=normalizer)
        np.testing.assert_array_equal(got, loss_at(BATCH, config)[0])
    stats = TokenStats(jnp.asarray(BATCH.returns))
    np.testing.assert_array_equal(
        loss_from_stats(stats, BATCH, SFT(), normalizer=normalizer)[0],
        loss_from_stats(stats, BATCH, SFT())[0],
    )


def of_hidden(batch, config, **options):
    return policy_loss_from_hidden(HIDDEN, KERNEL, batch, config, **options)


@functools.cache
def compiled_normalizer(aggregation, mesh):
    """The normalizer of a batch, compiled once for all cases."""
    parallel = mesh and make_parallel_mesh(mesh)
    return jax.jit(functools.partial(normalizer_of, aggregation=aggregation, parallel=parallel))


@functools.cache
def compiled_loss(loss, aggregation, mesh):
    """(the loss, the number of broken rules) of a batch and its normalizer."""
    parallel = mesh and make_parallel_mesh(mesh)
    config = PolicyLossConfig(aggregation=aggregation)

    @jax.jit
    def run(batch, normalizer):
        value, found = loss(batch, config, parallel=parallel, normalizer=normalizer)
        return value, found["broken_rules"].value

    return run


@pytest.mark.parametrize("loss", [loss_at, of_hidden])
@pytest.mark.parametrize("mesh", [None, MESH])
@pytest.mark.parametrize("aggregation", ["token_mean", "rollout_mean"])
@pytest.mark.parametrize("other", ["larger", "smaller"])
def test_counts_of_another_step(loss, mesh, aggregation, other):
    """Before, a larger one gave -0.171 for -0.239."""
    run = compiled_loss(loss, aggregation, mesh)
    make = compiled_normalizer(aggregation, mesh)
    wrong = {"larger": LARGER, "smaller": SMALLER}[other]
    value, broken = run(BATCH, make(wrong))
    assert np.isnan(value)
    (line,) = explain_broken_rules(broken)
    assert line.startswith(
        "normalizer_of_another_step: expected a normalizer that was made of this step"
    )
    with pytest.raises(
        ValueError,
        match=r"normalizer: got \d.* at row \d, segment \d, expected a normalizer that was",
    ):
        BATCH.validate(V, normalizer=make(wrong))
    value, broken = run(BATCH, make(BATCH))
    assert np.isfinite(value)
    assert broken == 0
    BATCH.validate(V, normalizer=make(BATCH))


def accumulate(batches, normalizer):
    def fn(w, part):
        return policy_loss(
            TokenStats(w * part[0].returns), part[0], PolicyLossConfig(), normalizer=part[1]
        )

    (loss, found), _ = jax.jit(accumulate_gradients(fn, (batches, normalizer)))(jnp.float32(1))
    return loss, explain_broken_rules(found["broken_rules"].value)


def test_a_step_of_more_micro_batches():
    """Before, -0.076 for -0.085: half of a step over the tokens of all of it."""
    normalizer = Normalizer.of(SFT(), STACKED)

    def half(x):
        return x[:2]

    given = jax.tree.map(half, (STACKED, normalizer))
    with pytest.raises(
        ValueError, match=r"got one of a step of 4 micro-batches, expected 2: Normalizer\.of"
    ):
        accumulate(*given)
    with pytest.raises(
        ValueError, match="normalizer: got one of a step of 4 micro-batches, expected 2"
    ):
        given[0].validate(V, normalizer=normalizer)
    # says: one of three
    part = jax.tree.map(lambda x: x[0], dataclasses.replace(STACKED, micro_batches=3))
    with pytest.raises(
        ValueError, match="normalizer: got one of a step of 4 micro-batches, expected 3"
    ):
        loss_at(part, normalizer=jax.tree.map(lambda x: x[0], normalizer))
    loss, broken = accumulate(STACKED, normalizer)
    assert np.isfinite(loss)
    assert not broken
    STACKED.validate(V, normalizer=normalizer)


def test_normalizers_of_the_micro_batches_themselves():
    """Before, -1.81 for -0.24: a sum of means."""
    alone = dataclasses.replace(STACKED, micro_batches=None)
    each = [Normalizer.of(SFT(), jax.tree.map(lambda x, k=k: x[k], alone)) for k in range(4)]
    normalizers = jax.tree.map(lambda *x: jnp.stack(x), *each)
    with pytest.raises(
        ValueError, match="normalizer: got one of a step of 1 micro-batches, expected 4"
    ):
        accumulate(STACKED, normalizers)


def test_the_part_of_another_micro_batch():
    """Before, -0.259 for -0.344 with sequence_mean_token_mean, which reads the denominators of
    its own sequences.
    """
    normalizer = Normalizer.of(SFT(), STACKED)
    loss, broken = accumulate(STACKED, jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), normalizer))
    assert np.isnan(loss)
    assert "normalizer_of_another_step" in str(broken)


def test_one_micro_batch_is_the_step():
    batches = packed(micro_batches=1)
    first = jax.tree.map(lambda x: x[0], batches)
    stacked = Normalizer.of(SFT(), batches)
    alone = Normalizer.of(SFT(), first)
    expected = loss_at(first, normalizer=alone)[0]
    for normalizer in (jax.tree.map(lambda x: x[0], stacked), None):
        np.testing.assert_array_equal(loss_at(first, normalizer=normalizer)[0], expected)
    np.testing.assert_allclose(accumulate(batches, stacked)[0], expected, rtol=1e-6)
