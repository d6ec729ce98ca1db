"""Top-k distillation with a sampled tail: the oracle's numbers on any mesh, and its mean over
the drawn tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import OracleHead, other_losses
from oracle.head import head_gradient, id_gradient, id_log_probs, log_softmax, logits
from policy_steps import quick_jit

from jaxppo import (
    RolloutBatch,
    TokenStats,
    Unusable,
    explain_broken_rules,
    log_probs_from_logits,
    loss_from_hidden,
    loss_from_stats,
)
from jaxppo.losses import TopKDistillation
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

R, T, H, V, K = 4, 8, 12, 37, 5
LOSS = TopKDistillation("reverse_kl", tail="sampled")
WITH_RULE = dataclasses.replace(LOSS, unusable=Unusable("weight_0"))
RNG = np.random.default_rng(11)
MASK = np.zeros((R, T), np.float32)
MASK[0, :7], MASK[1, 3:5], MASK[3, 6] = 1, 1, 1


def batch_of(targets, mask, **arrays):
    one = np.ones(targets.shape, np.int32)
    row = np.tile(np.arange(targets.shape[1], dtype=np.int32)[None], (targets.shape[0], 1))
    rows = np.arange(targets.shape[0], dtype=np.int32)[:, None]
    return RolloutBatch(
        one, np.asarray(targets, np.int32), one, row, np.asarray(mask), rows, **arrays
    )


def taught(batch, ids, log_q, of_targets):
    names = ("teacher_ids", "teacher_log_probs", "teacher_target_log_probs")
    arrays = np.int32(ids), np.float32(log_q), np.float32(of_targets)
    return dataclasses.replace(batch, extras=dict(zip(names, arrays, strict=True)))


def step():
    """Hidden states, a kernel and a teacher's logits; half of the targets are among the
    teacher's likeliest.
    """
    hidden = RNG.normal(size=(R, T, H))
    kernel = RNG.normal(size=(H, V)) / 2
    z = 2 * RNG.normal(size=(R, T, V))
    log_q = log_softmax(z.reshape(-1, V)).reshape(z.shape)
    ids = np.argsort(-log_q, axis=-1)[..., :K]
    targets = np.where(RNG.random((R, T)) < 0.5, ids[..., 1], np.argsort(log_q, axis=-1)[..., 3])
    ids[0, 1, 3:], ids[1, 3] = -1, -1
    targets[1, 3] = 4
    of_ids = np.take_along_axis(log_q, np.maximum(ids, 0), axis=-1)
    of_targets = np.take_along_axis(log_q, targets[..., None], axis=-1)[..., 0]
    return hidden, kernel, ids, of_ids, targets, of_targets


STEP = step()


@functools.cache
def compiled(loss, mesh, memory):
    """The loss, its metrics, and gradients by the hidden states and the kernel, compiled once."""
    parallel = mesh and make_parallel_mesh(mesh)

    def run(hidden, kernel, batch):
        return loss_from_hidden(hidden, kernel, batch, loss, parallel=parallel, memory=memory)

    return quick_jit(jax.value_and_grad(run, (0, 1), has_aux=True))


def truth(at=MASK > 0):
    """The loss of these tokens, divided by the number of all loss tokens, and its gradients by
    states and kernel.
    """
    hidden, kernel, ids, of_ids, targets, of_targets = STEP
    rows = hidden[at]
    head = OracleHead(kernel)
    n = int(MASK.sum())
    z = logits(rows, head)
    sets = np.concatenate([ids[at], targets[at][:, None]], axis=-1)
    log_p = id_log_probs(z, sets)
    log_q = np.concatenate([of_ids[at], of_targets[at][:, None]], axis=-1)
    total = 0.0
    slopes = np.zeros(log_p.shape)
    outside = 0
    for t in range(len(sets)):
        there = sets[t] >= 0
        place = list(sets[t]).index(sets[t, -1])  # K is the target's own
        drawn_id = -1 if place == K else place
        value, slopes[t, there] = other_losses.sampled_tail(
            log_p[t, there], log_q[t, there], drawn_id
        )
        total = total + value
        outside = outside + (drawn_id < 0)
    assert 1 < outside < len(sets) - 1
    by_hidden, by_head = head_gradient(rows, head, id_gradient(z, sets, slopes / n))
    of_hidden = np.zeros(hidden.shape)
    of_hidden[at] = by_hidden
    return total / n, of_hidden, by_head.kernel


@pytest.mark.parametrize(
    ("mesh", "memory"), [(None, None), (None, 2**15), ("dp=2,cp=2,tp=2", None)]
)
def test_the_oracle(mesh, memory):
    """In one pass and in two; NaN and ids beyond the vocabulary where there is no loss."""
    hidden, kernel, ids, of_ids, targets, of_targets = STEP
    off = MASK == 0
    given = [np.where(off[..., None], 10**6, ids), np.where(off[..., None], np.nan, of_ids)]
    batch = taught(
        batch_of(np.where(off, -100, targets), MASK), *given, np.where(off, np.nan, of_targets)
    )
    states = np.where(off[..., None], np.nan, hidden).astype(np.float32), np.float32(kernel)
    (loss, found), gradients = compiled(LOSS, mesh, memory)(*states, batch)
    expected, *by = truth()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_trees_close(gradients, tuple(by), rtol=2e-5, atol=2e-6)
    assert float(found["broken_rules"].value) == 0


# a log-prob of the teacher that is not there: that of an id, or of a target that is an id or is
# none
LACKING = {
    "of an id": ((0, 0), np.nan),
    "of an id, too large": ((0, 2), np.inf),
    "of a target": ((0, 3), np.nan),
    "of another target": ((0, 5), -np.inf),
}


@pytest.mark.parametrize(
    ("mesh", "memory"), [(None, None), (None, 2**15), ("dp=2,cp=2,tp=2", None)]
)
def test_tokens_for_which_the_teacher_lacks_a_log_prob(mesh, memory):
    """They have no loss and no gradient, and stay in the denominators; without a rule the loss
    is NaN.
    """
    hidden, kernel, ids, of_ids, targets, of_targets = STEP
    of_ids = of_ids.copy()
    of_targets = of_targets.copy()
    at = MASK > 0
    for what, (place, bad) in LACKING.items():
        spoilt = of_ids[..., 0] if what.startswith("of an id") else of_targets
        spoilt[place] = bad
        at[place] = False
    batch = taught(batch_of(targets, MASK), ids, of_ids, of_targets)
    states = np.float32(hidden), np.float32(kernel)
    (loss, found), gradients = compiled(WITH_RULE, mesh, memory)(*states, batch)
    expected, *by = truth(at)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_trees_close(gradients, tuple(by), rtol=2e-5, atol=2e-6)
    assert (float(found["unusable_tokens"].value), float(found["broken_rules"].value)) == (
        len(LACKING),
        0,
    )
    np.testing.assert_allclose(
        found["divergence"].value, expected * MASK.sum() / at.sum(), rtol=1e-5
    )
    (without_rule, _), _ = compiled(LOSS, None, None)(*states, batch)
    assert np.isnan(without_rule)


def test_a_drawn_token_that_the_student_finds_impossible():
    """By hand: one id, of p = 0.5 and q = 0.25; the tail of a drawn token with p = 0.25 and q = 0.5
    is 1 - log 2.

    The second token of three has p = 0 where the teacher has 0.5: the divergence of such a sample
    is infinite.
    """
    tokens = jnp.array([[2, 3, 2]])
    batch = taught(
        batch_of(tokens, np.ones((1, 3))), [[[1]] * 3], np.log([[[0.25]] * 3]), np.log([[0.5] * 3])
    )
    batch = dataclasses.replace(batch, real_last_targets=True)
    own = jnp.log(jnp.array([[0.25, 0.0, 0.25]]))
    of_ids = jnp.log(jnp.full((1, 3, 1), 0.5))

    def run(own, of_ids, loss=WITH_RULE):
        return loss_from_stats(TokenStats(own, id_log_probs=of_ids), batch, loss)

    slopes = quick_jit(jax.value_and_grad(run, (0, 1), has_aux=True))
    (value, found), (by_own, by_ids) = slopes(own, of_ids)
    each = (0.5 * np.log(2) - 0.5 + 0.25) + (2 - 1 - np.log(2))
    np.testing.assert_allclose(value, 2 * each / 3, rtol=1e-6)
    np.testing.assert_allclose(by_own, np.array([[-1, 0, -1]]) * np.log(2) / 3, rtol=1e-6)
    np.testing.assert_allclose(
        by_ids[..., 0], np.array([[1, 0, 1]]) * 0.5 * np.log(2) / 3, rtol=1e-6
    )
    assert float(found["unusable_tokens"].value) == 1
    assert np.isnan(run(own, of_ids, LOSS)[0])


def drawn(z, teacher, ids):
    """The loss of logits z `[V]` for each token that may be drawn, by its probability: V
    positions of one row.
    """
    n = len(z)
    log_p = log_softmax(z[None])[0]
    log_q = log_softmax(teacher[None])[0]
    weights = jnp.asarray(np.exp(log_p), jnp.float32)[None]
    batch = batch_of(
        np.arange(n)[None],
        np.ones((1, n), np.float32),
        loss_weights=weights,
        real_last_targets=True,
    )
    batch = taught(batch, np.tile(ids, (1, n, 1)), np.tile(log_q[ids], (1, n, 1)), log_q[None])
    loss = dataclasses.replace(LOSS, aggregation="token_sum")

    def run(z):
        rows = jnp.broadcast_to(z[None, None], (1, n, n))
        stats = log_probs_from_logits(rows, batch.targets, ids=batch.extras["teacher_ids"])
        return loss_from_stats(stats, batch, loss)[0]

    return quick_jit(jax.value_and_grad(run))(np.float32(z))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_mean_over_drawn_tokens_is_the_whole_divergence(k):
    """In value and gradient. A slope of log(p / q) in the tail beside the raw p log(p / q) of the
    ids, as others write it down, is off by the gradient of the ids' mass: by 0.1 here.
    """
    z, teacher = 1.5 * np.random.default_rng(0).normal(size=(2, 6))
    ids = np.argsort(-teacher)[:k]
    value, gradient = drawn(z, teacher, ids)
    expected, by_logits = other_losses.divergence(z[None], teacher[None])
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, by_logits[0], rtol=1e-4, atol=1e-6)
    p = np.exp(log_softmax(z[None])[0])
    mass = p[ids].sum()
    of_mass = p * (np.isin(np.arange(6), ids) - mass)
    assert (np.abs(of_mass).max() > 0.1) == (k < 6)


def test_where_both_agree_no_token_moves():
    """With 1 + log(p / q) as both slopes the gradient of a token alone is not 0, though that of
    the mean is.
    """
    z = np.random.default_rng(1).normal(size=6)
    log_p = log_softmax(z[None])[0].astype(np.float32)
    ids = np.tile([[[1, 4]]], (1, 6, 1))
    batch = batch_of(np.arange(6)[None], np.ones((1, 6), np.float32), real_last_targets=True)
    batch = taught(batch, ids, log_p[ids], log_p[None])

    def run(own, of_ids):
        return loss_from_stats(TokenStats(own, id_log_probs=of_ids), batch, LOSS)[0]

    value, slopes = quick_jit(jax.value_and_grad(run, (0, 1)))(log_p[None], log_p[ids])
    assert float(value) == 0
    assert all(not np.any(np.asarray(x)) for x in slopes)


def test_a_teacher_that_was_rounded_counts_as_certain():
    """A log-prob up to 0.125 above 0 counts as 0; beyond it, or NaN, the loss is NaN by name."""
    batch = batch_of(np.array([[3, 0]]), np.array([[1, 0]], np.float32))
    stats = TokenStats(jnp.full((1, 2), -1.0), id_log_probs=jnp.full((1, 2, 1), -2.0))

    def run(of_target):
        given = taught(
            batch, np.full((1, 2, 1), 1), np.full((1, 2, 1), -2.0), np.full((1, 2), of_target)
        )
        return loss_from_stats(stats, given, LOSS)

    # q / p - 1 + log(p / q) with q = 1
    np.testing.assert_allclose(run(0.1)[0], np.e - 2, rtol=1e-6)
    assert float(run(0.1)[0]) == float(run(0.0)[0])
    for value in (0.13, np.nan, -np.inf):
        loss, found = run(value)
        assert np.isnan(loss)
        assert explain_broken_rules(found["broken_rules"].value)[0].startswith(
            "teacher_target_log_probs: expected"
        )


def test_what_is_missing_is_named():
    hidden, kernel, ids, of_ids, targets, of_targets = STEP
    states = np.float32(hidden), np.float32(kernel)
    batch = taught(batch_of(targets, MASK), ids, of_ids, of_targets)

    def run(loss=LOSS, **extras):
        given = dataclasses.replace(batch, extras=batch.extras | extras)
        (value, _), _ = compiled(loss, None, None)(*states, given)
        return float(value)

    lacking = {name: x for name, x in batch.extras.items() if name != "teacher_target_log_probs"}
    with pytest.raises(
        ValueError,
        match=r"batch\.extras: got .*, expected 'teacher_target_log_probs' among them, f32",
    ):
        loss_from_hidden(*states, dataclasses.replace(batch, extras=lacking), LOSS)
    with pytest.raises(
        ValueError,
        match=r"'teacher_target_log_probs'\]: got shape \(4, 8, 2\), expected the batch's",
    ):
        run(teacher_target_log_probs=jnp.zeros((4, 8, 2)))
    for kind in ("forward_kl", "jensen_shannon"):
        with pytest.raises(
            ValueError, match=f"divergence: got '{kind}', expected 'reverse_kl' with tail='sampled'"
        ):
            TopKDistillation(kind, tail="sampled")
    renamed = dataclasses.replace(LOSS, target_log_probs="other")
    assert run(renamed, other=batch.extras["teacher_target_log_probs"]) == run()
