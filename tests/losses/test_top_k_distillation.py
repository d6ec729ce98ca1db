"""Distillation from a teacher's top-k, compared with the oracle, NeMo-RL's numbers and the full
divergence.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import tiles_of
from oracle import OracleHead, other_losses
from oracle.head import head_gradient, id_gradient, id_log_probs, log_softmax, logits
from policy_steps import quick_jit

from jaxppo import (
    Normalizer,
    RolloutBatch,
    Unusable,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_hidden,
    loss_from_stats,
)
from jaxppo.losses import TopKDistillation, distillation
from jaxppo.losses.top_k_divergence import Tail, TopKDivergence
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.testing import assert_trees_close

KINDS = get_args(TopKDivergence)
TAILS = get_args(Tail)
CLOSED = ("bucket", "renormalise")
R, T, H, V, K = 4, 8, 12, 97, 6
MIXED = "dp=2,cp=2,tp=2"
RNG = np.random.default_rng(3)


def top_k(z, k):
    """The k largest ids of logits `[..., V]`, and their log-probs."""
    log_p = log_softmax(np.asarray(z, np.float64).reshape(-1, z.shape[-1])).reshape(z.shape)
    ids = np.argsort(-log_p, axis=-1)[..., :k]
    return ids.astype(np.int32), np.take_along_axis(log_p, ids, axis=-1).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("divergence", "beta", "tail"))
def values_and_gradient(log_p, log_q, **options):
    """The divergence of each token, and the gradient of their sum."""

    def of_tokens(x):
        return distillation.top_k_divergence(x, log_q, **options)

    values, gradient = jax.vjp(of_tokens, log_p)
    return values, gradient(jnp.ones_like(values))[0]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
def test_against_the_oracle(kind, tail):
    z, teacher = RNG.normal(size=(2, 50, V)) * 2
    ids, log_q = top_k(teacher, K)
    log_p = np.take_along_axis(log_softmax(z), ids, axis=-1).astype(np.float32)
    found, gradient = values_and_gradient(log_p, log_q, divergence=kind, beta=0.3, tail=tail)
    for t in range(50):
        value, by_log_p = other_losses.top_k_divergence(log_p[t], log_q[t], kind, 0.3, tail)
        np.testing.assert_allclose(found[t], value, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(gradient[t], by_log_p, rtol=2e-5, atol=2e-6)


@pytest.mark.every(9)
@pytest.mark.parametrize("tail", CLOSED)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_never_negative(kind, tail):
    """For near, far and equal policies and any mass of the ids.

    With a bucket it is at most the full divergence.
    """
    z = RNG.normal(size=(400, V)) * RNG.uniform(0, 12, (400, 1))
    far = RNG.normal(size=z.shape) * np.repeat([0.0, 1e-6, 1e-3, 1.0, 10.0], 80)[:, None]
    for k in (1, K, V):
        ids, log_q = top_k(z + far, k)
        log_p = np.take_along_axis(log_softmax(z), ids, axis=-1).astype(np.float32)
        found, _ = values_and_gradient(log_p, log_q, divergence=kind, beta=0.3, tail=tail)
        assert np.isfinite(found).all()
        assert found.min() >= 0
        if tail == "bucket" and kind in ("forward_kl", "reverse_kl", "jensen_shannon"):
            full, _ = other_losses.divergence(z, z + far, kind, 0.3)
            assert (np.asarray(found) <= full * (1 + 1e-4) + 1e-5).all()


def test_left_out_it_is_negative_where_the_student_has_more_mass_on_the_ids():
    """It is -0.3 log 3. Clamping it at 0 would hide that, and lose the gradient."""
    p, q = np.float32(np.log([[0.9]])), np.float32(np.log([[0.3]]))

    @jax.jit
    def by_tail(p, q):
        return {tail: distillation.top_k_divergence(p, q, tail=tail)[0] for tail in TAILS}

    found = by_tail(p, q)
    assert float(found["leave_out"]) == pytest.approx(-0.3 * np.log(3), rel=1e-6)
    bucket = 0.3 * np.log(0.3 / 0.9) + 0.7 * np.log(0.7 / 0.1)
    assert float(found["bucket"]) == pytest.approx(bucket, rel=1e-6)
    assert float(found["renormalise"]) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_slots_count_no_mass(kind, tail):
    """Whatever an empty slot holds, the divergence does not depend on it, and it gets no
    gradient.
    """
    z, teacher = RNG.normal(size=(2, 9, V))
    ids, log_q = top_k(teacher, K)
    log_p = np.take_along_axis(log_softmax(z), ids, axis=-1).astype(np.float32)
    options = {"divergence": kind, "beta": 0.3, "tail": tail}

    def run(p, q, ids):
        return jax.value_and_grad(
            lambda p: distillation.top_k_divergence(p, q, ids, **options).sum()
        )(p)

    expected = run(log_p, log_q, ids)
    for filler in (-np.inf, np.nan, 0.0, 5.0):
        wide = [
            np.concatenate([x, np.full((9, 2), filler, np.float32)], axis=-1)
            for x in (log_p, log_q)
        ]
        padded = np.concatenate([ids, np.full((9, 2), -1)], axis=-1)
        value, gradient = run(*wide, padded)
        assert_trees_close((value, gradient[:, :K]), expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(gradient[:, K:], 0)
    none = distillation.top_k_divergence(log_p, log_q, np.full_like(ids, -1), **options)
    np.testing.assert_array_equal(none, 0)


def test_skewed_and_adaptive_by_hand():
    """ROLL's, skew 0.1 and alpha 0.5: tail and head have a gap of 0.2 each."""
    p, q = (np.float32(np.log(x)) for x in ([0.5, 0.3, 0.2], [0.7, 0.2, 0.1]))
    kinds = {"skewed_forward_kl": 0.1, "skewed_reverse_kl": 0.1, "adaptive_kl": 0.5}

    @jax.jit
    def of_each(p, q):
        of = functools.partial(distillation.top_k_divergence, p, q, tail="renormalise")
        return [of(divergence=kind, beta=beta) for kind, beta in kinds.items()]

    np.testing.assert_allclose(of_each(p, q), [0.069578, 0.072828, 0.088578], rtol=1e-4)
    *_, adaptive = of_each(q, q)
    assert float(adaptive) == 0  # ROLL's 0 / 0


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", KINDS)
def test_all_ids_are_the_full_divergence(kind):
    """The ids' mass is 1 within f32's rounding: the bucket gets 1e-7 of both rather than log(0)."""
    z, teacher = RNG.normal(size=(2, 30, V)) * 3
    ids, log_q = top_k(teacher, V)
    log_p = np.take_along_axis(log_softmax(z), ids, axis=-1).astype(np.float32)
    expected = {
        name: other_losses.divergence(z, teacher, name, 0.3)[0]
        for name in ("forward_kl", "reverse_kl", "jensen_shannon")
    }
    p, q = (np.exp(log_softmax(x)) for x in (z, teacher))
    for name, a, b in (("skewed_forward_kl", q, p), ("skewed_reverse_kl", p, q)):
        expected[name] = (a * np.log(a / (0.3 * a + 0.7 * b))).sum(axis=-1)
    expected["adaptive_kl"] = [
        other_losses.top_k_divergence(np.log(x), np.log(y), "adaptive_kl", 0.3, "leave_out")[0]
        for x, y in zip(p, q, strict=True)
    ]
    expected["mixed_kl"] = 0.3 * expected["forward_kl"] + 0.7 * expected["reverse_kl"]
    for tail in TAILS:
        found, gradient = values_and_gradient(log_p, log_q, divergence=kind, beta=0.3, tail=tail)
        np.testing.assert_allclose(found, expected[kind], rtol=2e-5, atol=1e-5)
        assert np.isfinite(gradient).all()


def test_the_mixture_is_not_continuous_at_its_ends():
    """At both ends it tends to 0, while TRL's alpha of 0 and 1 give the two KLs.

    So both ends are refused.
    """
    p = np.float32(np.log([[0.5, 0.2]]))
    q = np.float32(np.log([[0.4, 0.4]]))

    def of(q, divergence, beta):
        return distillation.top_k_divergence(p, q, divergence=divergence, beta=beta)[0]

    @jax.jit
    def of_each(q):
        near_ends = [of(q, "jensen_shannon", end) for end in (1e-6, 1 - 1e-6)]
        two = [of(q, kind, 0.5) for kind in ("forward_kl", "reverse_kl")]
        return near_ends, two, [of(q, "mixed_kl", share) for share in (1.0, 0.0, 0.5)]

    near_ends, (forward, reverse), (all_forward, all_reverse, _) = of_each(q)
    assert all(0 <= x < 2e-6 for x in near_ends)
    assert min(forward, reverse) > 0.09
    assert all_forward == forward
    assert all_reverse == reverse
    q = np.float32([[np.log(0.4), -np.inf]])  # from there the reverse divergence is infinite
    _, (forward, reverse), (all_forward, _, half) = of_each(q)
    assert all_forward == forward < np.inf
    assert half == reverse == np.inf
    for end in (0, 1, 0.0, 1.0):
        with pytest.raises(
            ValueError, match=r"beta: got .* expected a number in \(0, 1\), or 'forward_kl' or"
        ):
            of(q, "jensen_shannon", end)


@jax.jit
def of_tails(p, q):
    """The divergences over two ids, and over the first of them alone, by the tail."""
    first = np.array([[3, -1]])
    found = {}
    for tail in TAILS:
        of = functools.partial(distillation.top_k_divergence, p, q, tail=tail)
        found[tail] = of(), of(ids=first)
    return found


@pytest.mark.parametrize("tail", TAILS)
def test_probabilities_of_a_student_are_nan(tail):
    """Taken for log-probs, they gave 0.0112 renormalised, and -1.013 where the tail is left out."""
    q = np.float32(np.log([[0.4, 0.4]]))
    of_both, of_first = of_tails(np.float32([[0.5, 0.2]]), q)[tail]
    assert np.isnan(of_both).all()
    assert np.isnan(of_first).all()
    _, of_first = of_tails(np.float32([[-1.0, 9.0]]), q)[tail]
    assert np.isfinite(of_first).all()


def test_a_teacher_that_cannot_be_is_nan():
    p = np.float32(np.log([[0.5, 0.2]]))

    def of(q, tail="bucket"):
        of_both, _ = of_tails(p, np.float32(q))[tail]
        return float(of_both[0])

    assert np.isnan(of([[0.1, -2.0]]))  # logits, not log-probs
    assert np.isnan(of([[np.nan, -2.0]]))
    assert np.isnan(of(np.log([[0.9, 0.9]])))  # an id that stands twice
    assert np.isfinite(of(np.log([[0.9, 0.9]]), tail="renormalise"))
    assert np.isfinite(of([[-0.1, -np.inf]]))  # a probability of 0


RECORDS = json.loads(
    (Path(__file__).parents[1] / "golden" / "peers" / "top_k_distillation.json").read_text()
)["records"]


@pytest.mark.every(3)
@pytest.mark.parametrize("record", RECORDS, ids=[str(record["call"]) for record in RECORDS])
def test_what_nemo_computed(record):
    """They always renormalise the teacher, and the student unless `zero_outside_topk` is set.

    They renormalise before the call, so their gradients are by renormalised log-probs.
    """
    options, (log_p, log_q) = (
        record["options"],
        (np.asarray(record[x], np.float32) for x in ("student", "teacher")),
    )
    kind = f"{options['kl_type']}_kl"
    tail = "leave_out" if options["zero_outside_topk"] else "renormalise"
    log_q = log_q - np.log(np.exp(log_q).sum(-1, keepdims=True))

    found, gradient = values_and_gradient(
        log_p, log_q, divergence=kind, beta=options["mixed_kl_weight"], tail=tail
    )
    value = found.sum() / record["tokens"]
    gradient = np.asarray(gradient) / record["tokens"]
    np.testing.assert_allclose(value, record["loss"], rtol=2e-5, atol=1e-6)
    theirs = np.asarray(record["gradient"])
    if tail == "renormalise":
        theirs -= (
            np.exp(log_p) / np.exp(log_p).sum(-1, keepdims=True) * theirs.sum(-1, keepdims=True)
        )
    np.testing.assert_allclose(gradient, theirs, rtol=1e-4, atol=1e-6)


MASK = np.zeros((R, T), np.float32)
MASK[0, :7], MASK[1, 3:5], MASK[3, 6] = 1, 1, 1


def arrays():
    """Hidden states, a kernel, a teacher's top-k and a batch.

    Positions without loss hold NaN and invalid ids.
    """
    hidden = RNG.normal(size=(R, T, H))
    kernel = RNG.normal(size=(H, V)) / 2
    ids, log_q = top_k(RNG.normal(size=(R, T, V)) * 2, K)
    ids[0, 1, 3:], ids[1, 3] = -1, -1
    off = MASK == 0
    hidden[off], ids[off], log_q[off] = np.nan, 10**6, np.nan
    targets = np.where(off, -100, RNG.integers(0, V, (R, T))).astype(np.int32)
    one = jnp.ones((R, T), jnp.int32)
    batch = RolloutBatch(
        one,
        jnp.asarray(targets),
        one,
        jnp.tile(jnp.arange(T)[None], (R, 1)),
        jnp.asarray(MASK),
        jnp.arange(R)[:, None],
    )

    def f32(x):
        return jnp.asarray(x, jnp.float32)

    return f32(hidden), f32(kernel), jnp.asarray(ids), f32(log_q), batch


ARRAYS = arrays()


def truth(kind, tail):
    """The mean loss, its gradients, and the mean mass of teacher and student on the ids."""
    hidden, kernel, ids, log_q, _ = (
        np.asarray(x, np.float64) if not isinstance(x, RolloutBatch) else x for x in ARRAYS
    )
    at = MASK > 0
    rows = hidden[at]
    head = OracleHead(kernel)
    z = logits(rows, head)
    of_ids = ids[at].astype(int)
    log_q = log_q[at]
    log_p = id_log_probs(z, of_ids)
    n = int(at.sum())
    g = np.zeros_like(log_p)
    values = []
    masses = np.zeros(2)
    for t in range(n):
        there = of_ids[t] >= 0
        if there.any():
            value, g[t, there] = other_losses.top_k_divergence(
                log_p[t, there], log_q[t, there], kind, 0.3, tail
            )
            values.append(value)
            masses += np.exp(log_q[t, there]).sum(), np.exp(log_p[t, there]).sum()
    by_hidden, by_head = head_gradient(rows, head, id_gradient(z, of_ids, g / n))
    of_hidden = np.zeros_like(hidden)
    of_hidden[at] = by_hidden
    return sum(values) / n, (of_hidden, by_head.kernel), masses / n


def taught(batch, ids, log_q):
    return dataclasses.replace(batch, extras={"teacher_ids": ids, "teacher_log_probs": log_q})


def from_hidden(hidden, kernel, options, parallel=None, **of_head):
    *given, batch = ARRAYS[2:]
    loss = TopKDistillation(**options)
    return loss_from_hidden(
        hidden, kernel, taught(batch, *given), loss, parallel=parallel, **of_head
    )


def from_stats(hidden, kernel, options, parallel=None):
    _, _, ids, log_q, batch = ARRAYS
    given = {"ids": ids, "where": batch.loss_mask > 0, "parallel": parallel}
    stats = log_probs_from_hidden(hidden, kernel, batch.targets, **given)
    return loss_from_stats(
        stats, taught(batch, ids, log_q), TopKDistillation(**options), parallel=parallel
    )


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("way", "mesh", "kind", "tail"),
    [
        (from_hidden, None, "forward_kl", "bucket"),
        (from_hidden, MIXED, "forward_kl", "bucket"),
        (from_hidden, "tp=4", "jensen_shannon", "renormalise"),
        (from_hidden, MIXED, "reverse_kl", "bucket"),
        (from_stats, MIXED, "mixed_kl", "leave_out"),
    ],
)
def test_the_loss_on_any_mesh(way, mesh, kind, tail):
    parallel = mesh and make_parallel_mesh(
        mesh, devices=jax.devices()[: 4 if mesh == "tp=4" else 8]
    )
    options = {"divergence": kind, "beta": 0.3, "tail": tail}
    with tiles_of("five"):
        fn = quick_jit(
            jax.value_and_grad(lambda *x: way(*x, options, parallel), (0, 1), has_aux=True)
        )
        (loss, metrics), gradients = fn(*ARRAYS[:2])
    expected, expected_gradients, masses = truth(kind, tail)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_trees_close(gradients, expected_gradients, rtol=2e-5, atol=2e-6)
    found = [
        metrics[name].value
        for name in ("divergence", "teacher_mass", "student_mass", "broken_rules")
    ]
    np.testing.assert_allclose(found, [expected, *masses, 0], rtol=1e-5)


@functools.cache
def of_config(loss, parallel):
    """The loss, its metrics, and gradients by the hidden states and the kernel, compiled once."""

    def run(hidden, kernel, batch):
        return loss_from_hidden(hidden, kernel, batch, loss, parallel=parallel)

    return quick_jit(jax.value_and_grad(run, (0, 1), has_aux=True))


@pytest.mark.parametrize("mesh", [None, MIXED])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_the_teacher_does_not_know(bad, mesh):
    """Without a rule the loss is NaN; with one the token has no divergence, and stays in the
    denominators.
    """
    hidden, kernel, ids, log_q, batch = ARRAYS
    parallel = mesh and make_parallel_mesh(mesh)
    place = tuple(int(i) for i in np.argwhere(MASK > 0)[2])
    spoilt = log_q.at[(*place, 1)].set(bad)
    without = dataclasses.replace(batch, loss_mask=batch.loss_mask.at[place].set(0))

    def of(batch, log_q, loss):
        return of_config(loss, parallel)(hidden, kernel, taught(batch, ids, log_q))

    (loss, found), gradients = of(batch, spoilt, TopKDistillation(unusable=Unusable("weight_0")))
    (of_others, _), slopes = of(without, log_q, TopKDistillation())
    share = 1 - 1 / MASK.sum()
    np.testing.assert_allclose(loss, share * of_others, rtol=1e-5)
    expected = jax.tree.map(lambda x: share * np.asarray(x), slopes)
    assert_trees_close(gradients, expected, rtol=1e-5, atol=1e-7)
    assert float(found["unusable_tokens"].value) == 1
    np.testing.assert_allclose(found["divergence"].value, of_others, rtol=1e-5)
    assert np.isnan(of(batch, spoilt, TopKDistillation())[0][0])


@pytest.mark.nightly
def test_one_pass_and_two():
    options = {"tail": "bucket"}

    def grad(**more):
        return jax.grad(lambda *x: from_hidden(*x, options, **more)[0], (0, 1))

    for memory, way in ((None, "one pass"), (2**15, "two passes")):
        assert audit(grad(memory=memory), *ARRAYS[:2]).notes[0].startswith(way)
    one, two = (quick_jit(grad(memory=memory))(*ARRAYS[:2]) for memory in (None, 2**15))
    assert_trees_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_micro_batches_add_up():
    hidden, kernel, ids, log_q, batch = ARRAYS
    loss = TopKDistillation()
    batch = taught(batch, ids, log_q)
    parts = jax.tree.map(lambda x: x.reshape(2, R // 2, *x.shape[1:]), (hidden, batch))
    normalizer = Normalizer.of(loss, parts[1])
    found = 0.0
    for k in range(2):
        h, b, n = jax.tree.map(lambda x: x[k], (*parts, normalizer))  # noqa: B023
        found += loss_from_hidden(h, kernel, b, loss, normalizer=n)[0]
    np.testing.assert_allclose(found, loss_from_hidden(hidden, kernel, batch, loss)[0], rtol=1e-6)


def test_from_logits_and_several_teachers_by_row():
    """Each row may have another teacher: its row of the arrays."""
    z, (one, other) = (
        RNG.normal(size=(R, T, V)),
        (top_k(RNG.normal(size=(R, T, V)), K) for _ in range(2)),
    )
    batch = ARRAYS[4]
    z = np.float32(z)

    @quick_jit
    def loss(ids, log_q, mask):
        of_rows = dataclasses.replace(batch, loss_mask=mask)
        stats = log_probs_from_logits(z, of_rows.targets, ids=ids, where=mask > 0)
        mine = TopKDistillation(aggregation="token_sum")
        return loss_from_stats(stats, taught(of_rows, ids, log_q), mine)[0]

    by_row = [np.concatenate([x[:1], y[1:]]) for x, y in zip(one, other, strict=True)]
    first = MASK * (np.arange(R) == 0)[:, None]
    apart = loss(*one, first) + loss(*other, MASK - first)
    np.testing.assert_allclose(loss(*by_row, MASK), apart, rtol=1e-6)


def test_bad_input():
    hidden, kernel, ids, log_q, batch = ARRAYS

    def run(ids, log_q, **more):
        return loss_from_hidden(hidden, kernel, taught(batch, ids, log_q), TopKDistillation(**more))

    for more, message in [
        ({"divergence": "kl"}, "divergence: got 'kl', expected one of 'forward_kl', 'reverse_kl'"),
        ({"unusable": "drop"}, "unusable: got 'drop', expected 'nan' or an instance of Unusable"),
        (
            {"unusable": Unusable("ratio_1")},
            r"unusable: got Unusable\(.*, expected 'nan' or Unusable\('weight_0'\)",
        ),
        (
            {"tail": "drop"},
            "tail: got 'drop', expected one of 'bucket', 'renormalise', 'leave_out'",
        ),
        (
            {"divergence": "mixed_kl", "beta": 1.5},
            "beta: got 1.5, expected a finite number of at least 0 and of at",
        ),
        ({"aggregation": "mean"}, "aggregation: got 'mean'"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(ids, log_q, **more)
    with pytest.raises(
        ValueError,
        match=r"teacher_log_probs'\]: got shape \(4, 8, 5\), expected that of 'teacher_ids', ",
    ):
        run(ids, log_q[..., :5])
    with pytest.raises(
        ValueError,
        match=r"batch.extras\['teacher_ids'\]: got shape \(4, 7, 6\), expected \(4, 8\) and mo",
    ):
        run(ids[:, :7], log_q)
    stats = log_probs_from_hidden(hidden, kernel, batch.targets, where=batch.loss_mask > 0)
    with pytest.raises(ValueError, match=r"stats.id_log_probs: got None, expected f32\[R, T, K\]"):
        loss_from_stats(stats, taught(batch, ids, log_q), TopKDistillation())
    for spoilt in (ids.at[0, 0, 0].set(V), ids.at[0, 0, 0].set(-2)):
        assert np.isnan(run(spoilt, log_q)[0])
    assert np.isnan(run(ids, log_q.at[0, 0, 0].set(0.5))[0])


def test_checks_on_the_host():
    ids, log_q = top_k(RNG.normal(size=(2, 3, V)), K)
    distillation.check_top_k(ids, log_q, V)
    padded = np.where(np.arange(K) < 3, ids, -1)
    distillation.check_top_k(padded, np.where(padded < 0, np.nan, log_q), V)

    def spoil(x, value):
        return np.where(np.arange(x.size).reshape(x.shape) == 9, value, x)

    for bad, message in [
        ((spoil(ids, V), log_q), r"ids: got 97 at \(0, 1, 3\), expected -1 or 0 to 96"),
        ((spoil(ids, -100), log_q), r"ids: got -100 at \(0, 1, 3\)"),
        (
            (spoil(ids, ids[0, 1, 0]), log_q),
            r"ids: got \d+ at \(0, 1, 3\), expected each id once at a position",
        ),
        (
            (ids, spoil(log_q, 0.5)),
            r"log_probs: got 0.5 at \(0, 1, 3\), expected log-probs of at most",
        ),
        ((ids, spoil(log_q, np.nan)), r"log_probs: got nan at \(0, 1, 3\)"),
        (
            (ids, spoil(log_q, 0.0)),
            r"the mass of log_probs: got 1\.\d+ at \(0, 1, 0\), expected at most 1",
        ),
        (
            (ids, log_q[..., :2]),
            r"log_probs: got shape \(2, 3, 2\), expected that of ids, \(2, 3, 6\)",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            distillation.check_top_k(*bad, V)


@pytest.mark.parametrize(("beta", "same"), [(1.0, "forward_kl"), (0.0, "reverse_kl")])
def test_a_traced_share_of_0_leaves_a_divergence_out(beta, same):
    """Where one gives an id no probability, a divergence is infinite, and 0 times that is NaN."""
    one = jnp.log(jnp.array([0.5, 0.2]))
    other = jnp.array([np.log(0.4), -np.inf])
    log_p, log_q = (one, other) if same == "forward_kl" else (other, one)

    def of(x, beta):
        return distillation.top_k_divergence(x, log_q, divergence="mixed_kl", beta=beta)

    found = jax.jit(jax.value_and_grad(of))(log_p, beta)
    expected = values_and_gradient(log_p, log_q, divergence=same)
    assert np.isfinite(expected[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)
