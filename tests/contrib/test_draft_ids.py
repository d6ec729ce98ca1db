"""Drafts whose heads have fewer columns than the policy's, against the oracle, on meshes and in
micro-batches.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle.draft as truth
import pytest
from hard_rows import R, T, hard_batch, layouts_on, sequences

from jaxppo import (
    Head,
    LoRA,
    Normalizer,
    RolloutBatch,
    Sample,
    accumulate_gradients,
    finalize_metrics,
)
from jaxppo.batch.broken_rules import explain_broken_rules
from jaxppo.contrib.draft import Draft, draft_loss, draft_metrics
from jaxppo.contrib.draft_ids import draft_ids_of_counts, draft_ids_of_d2t, draft_targets
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

H, G, V, K, RANK = 4, 5, 24, 2, 2
RNG = np.random.default_rng(0)
BATCH, _ = hard_batch()
MASK = np.asarray(BATCH.loss_mask)
HIDDEN = 0.5 * RNG.normal(size=(K, R, T, H)).astype(np.float32)
POLICY = 0.5 * RNG.normal(size=(R, T, G)).astype(np.float32)
KERNEL, POLICY_KERNEL, BIAS = (
    RNG.normal(size=s).astype(np.float32) for s in ((H, 16), (G, V), (V,))
)
A, B = (RNG.normal(size=s).astype(np.float32) for s in ((G, RANK), (RANK, V)))
IDS = RNG.permutation(V)[:16].astype(np.int32)  # in no order
OBJECTIVES = ("soft_cross_entropy", "total_variation", "likelihood", "end_to_end")
TEMPERATURE, COEF = 0.75, 0.3


def places(k):
    """(row, t, t + k) where both positions have loss and are in one sequence."""
    for row, _, of in sequences(BATCH):
        yield from (
            (row, t, later)
            for t, later in zip(of, of[k:], strict=False)
            if MASK[row, t] and MASK[row, later]
        )


def policy_logits(x, columns):
    x = x.astype(np.float64)
    return (
        x @ POLICY_KERNEL[:, :columns] + 0.5 * x @ A @ B[:, :columns] + BIAS[:columns]
    ) / TEMPERATURE


@functools.cache
def expected(objective, columns=V, count=16):
    """The loss, its gradients, and metrics by depth in float64; the policy has `columns`, the
    draft `count`.
    """
    w = KERNEL[:, :count].astype(np.float64)
    ids = IDS[:count]
    by_hidden = np.zeros(HIDDEN.shape)
    by_kernel = np.zeros(w.shape)
    losses = []
    found = {}
    reached = {}
    for k in range(1, K + 1):
        there = list(places(k))
        x = np.stack([HIDDEN[k - 1, row, t] for row, t, _ in there]).astype(np.float64)
        z = x @ w / TEMPERATURE
        p = policy_logits(np.stack([POLICY[row, at] for row, _, at in there]), columns)
        a, by_a = truth.acceptance(z, p, ids)
        found |= {
            f"draft_{k}_acceptance": a.mean(),
            f"draft_{k}_agreement": np.mean(ids[z.argmax(-1)] == p.argmax(-1)),
        }
        if objective == "end_to_end":
            for (row, t, _), one, slope, h in zip(there, a, by_a, x, strict=True):
                if k == 1 or len(reached.get((row, t), ())) == k - 1:
                    reached.setdefault((row, t), []).append((one, slope, h))
            continue
        value, dz = (
            (1 - a, -by_a)
            if objective == "total_variation"
            else getattr(truth, objective)(z, p, ids=ids)
        )
        losses.append(value.mean())
        dz = COEF / K / len(there) / TEMPERATURE * dz
        by_kernel += x.T @ dz
        for (row, t, _), g in zip(there, dz, strict=True):
            by_hidden[k - 1, row, t] += w @ g
    for (row, t), each in reached.items():
        value, slopes = truth.end_to_end([one for one, _, _ in each])
        losses.append(value)
        for k, ((_, by_logits, h), slope) in enumerate(zip(each, slopes, strict=True)):
            g = COEF / len(reached) / TEMPERATURE * slope * by_logits
            by_hidden[k, row, t] += w @ g
            by_kernel += np.outer(h, g)
    return COEF * np.mean(losses), (by_hidden, by_kernel), found


def policy_head(columns=V, **options):
    kernel, b, bias = (jnp.asarray(x[..., :columns]) for x in (POLICY_KERNEL, B, BIAS))
    return Head(kernel, bias, LoRA(jnp.asarray(A), b, 0.5), **options)


@functools.partial(jax.jit, static_argnames=("objective", "parallel", "columns"))
def everything(hidden, kernel, policy, batch, ids, *, objective, parallel=None, columns=V):
    """The loss, its gradients and metrics, and those of `draft_metrics`."""
    call = {"parallel": parallel, "temperature": TEMPERATURE, "draft_ids": ids}

    def fn(hidden, kernel):
        return draft_loss(
            hidden,
            kernel,
            policy,
            policy_head(columns),
            batch,
            Draft(objective=objective, coef=COEF),
            **call,
        )

    (loss, found), gradients = jax.value_and_grad(fn, (0, 1), has_aux=True)(hidden, kernel)
    metrics = draft_metrics(hidden, kernel, policy, policy_head(columns), batch, **call)
    return loss, gradients, finalize_metrics(found), finalize_metrics(metrics)


def check(objective, got, **sizes):
    loss, gradients, found, metrics = got
    value, wanted, of_depths = expected(objective, **sizes)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    assert_trees_close(gradients, tuple(map(np.float32, wanted)), rtol=1e-4, atol=1e-5)
    assert metrics.keys() == of_depths.keys()
    for name, x in of_depths.items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-5, atol=1e-6, err_msg=name)
    for k in range(1, K + 1):
        np.testing.assert_allclose(
            found[f"draft_{k}_acceptance"], of_depths[f"draft_{k}_acceptance"], rtol=1e-5
        )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_oracle(objective):
    """Padding and positions without loss may hold anything."""
    hidden = np.where(np.asarray(BATCH.segment_ids)[None, :, :, None] > 0, HIDDEN, np.nan)
    policy = np.where(MASK[..., None] > 0, POLICY, np.nan)
    check(objective, everything(hidden, KERNEL, policy, BATCH, IDS, objective=objective))


MESHES = [
    ("soft_cross_entropy", "dp=2,cp=2,tp=2", "zigzag", {}),
    ("likelihood", "dp=1,cp=1,tp=8", "contiguous", {}),
    # tp does not divide the draft's columns
    ("end_to_end", "dp=1,cp=2,tp=4", "striped", {"count": 11}),
    # nor here the policy's
    ("total_variation", "dp=2,cp=1,tp=4", "contiguous", {"columns": 23, "count": 12}),
    ("likelihood", "dp=2,cp=1,tp=4", "contiguous", {"columns": 23, "count": 11}),  # here neither
]
FULL = [
    pytest.param(o, m, "zigzag", {}, marks=pytest.mark.nightly)
    for o in OBJECTIVES
    for m in ("dp=2,tp=4", "dp=4,tp=2")
]


@pytest.mark.parametrize(("objective", "mesh", "layout", "sizes"), [*MESHES, *FULL])
def test_on_a_mesh(objective, mesh, layout, sizes):
    count = sizes.get("count", 16)
    columns = sizes.get("columns", V)
    kernel = KERNEL[:, :count]
    ids = np.where(columns > IDS, IDS, 0)[:count]
    assert columns == V or len(set(ids)) == count
    ((_, parallel, to_physical, _),) = layouts_on(mesh, [layout])
    order = np.asarray(to_physical(np.broadcast_to(np.arange(T), (R, T))))

    def place(x):
        return np.take_along_axis(x, order[..., None], 1)

    hidden = np.stack([place(x) for x in HIDDEN])
    given = hidden, kernel, place(POLICY), to_physical(BATCH), ids
    options = {"objective": objective, "parallel": parallel, "columns": columns}
    loss, (of_hidden, of_kernel), *found = everything(*given, **options)
    back = np.stack(
        [np.take_along_axis(np.asarray(x), np.argsort(order, 1)[..., None], 1) for x in of_hidden]
    )
    check(objective, (loss, (back, of_kernel), *found), **sizes)


def test_fsdp_positions_and_explicit_axes():
    """Arrays have the shardings that a model gives them; kernels are padded, in layouts of their
    own.
    """
    parallel = make_parallel_mesh("fsdp=2,cp=2,tp=2", explicit=True, sequence_parallel=True)

    def put(x, spec):
        return jax.device_put(x, parallel.sharding(spec))

    pad = ((0, 0), (0, 2))
    arrays = {
        "hidden": [put(x, parallel.hidden_spec) for x in HIDDEN],
        "policy": put(np.pad(POLICY, ((0, 0), (0, 0), (0, 1))), parallel.hidden_spec),
        "kernel": put(np.pad(KERNEL[:, :14], pad, constant_values=np.nan), parallel.kernel_spec()),
        "policy_kernel": put(
            np.pad(POLICY_KERNEL, ((0, 1), (0, 2))).T.copy(), parallel.kernel_spec("vh")
        ),
    }

    def run(hidden, policy, kernel, policy_kernel, batch, ids):
        theirs = Head(policy_kernel, layout="vh", vocab_size=V)

        def fn(h, w):
            given = h, Head(w, vocab_size=14), policy, theirs, batch, Draft(objective="likelihood")
            return draft_loss(*given, parallel=parallel, draft_ids=ids)[0]

        return jax.value_and_grad(fn, (0, 1))(hidden, kernel)

    loss, (_, of_kernel) = jax.jit(run)(
        **arrays, batch=BATCH.put(parallel), ids=put(IDS[:14], jax.P())
    )

    def alone(h, w):
        loss = Draft(objective="likelihood")
        return draft_loss(h, w, POLICY, POLICY_KERNEL, BATCH, loss, draft_ids=IDS[:14])[0]

    expected, (_, wanted) = jax.jit(jax.value_and_grad(alone, (0, 1)))(HIDDEN, KERNEL[:, :14])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(of_kernel)[:, :14], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mesh", [None, "dp=2,tp=2"])
def test_micro_batches_add_up(mesh):
    """Within `accumulate_gradients`, where each device has its own copy of the parameters."""
    parallel = mesh and make_parallel_mesh(mesh, devices=jax.devices()[:4])
    half = {
        "hidden": HIDDEN.reshape(K, 2, R // 2, T, H).swapaxes(0, 1),
        "policy": POLICY.reshape(2, R // 2, T, G),
    }
    batches = jax.tree.map(lambda x: x.reshape(2, R // 2, *x.shape[1:]), BATCH)
    config = Draft(K, "soft_cross_entropy", coef=COEF)
    whole = Normalizer.of(config, batches, parallel=parallel)

    def loss(params, part):
        x, batch, normalizers = part
        given = list(x["hidden"]), params["kernel"], x["policy"], policy_head(), batch, config
        of = {
            "parallel": parallel,
            "normalizers": normalizers,
            "temperature": TEMPERATURE,
            "draft_ids": params["ids"],
        }
        return draft_loss(*given, **of)

    def run(kernel, half, batches, whole):
        step = accumulate_gradients(
            lambda w, part: loss({"kernel": w, "ids": IDS}, part), (half, batches, whole)
        )
        return step(kernel)

    (value, _), gradient = jax.jit(run)(KERNEL, half, batches, whole)
    wanted = expected("soft_cross_entropy")
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted[1][1], rtol=1e-4, atol=1e-6)


def test_all_ids_are_as_none_and_a_cut_kernel_is_not():
    def of(ids, kernel=POLICY_KERNEL, width=V):
        given = HIDDEN, np.tile(KERNEL, 2)[:, :width], POLICY, kernel, BATCH
        metrics = finalize_metrics(draft_metrics(*given, draft_ids=ids))
        return float(draft_loss(*given, Draft(objective="likelihood"), draft_ids=ids)[0]), metrics

    (loss, metrics), (plain, without) = of(np.arange(V)), of(None)
    np.testing.assert_allclose(loss, plain, rtol=1e-6)
    for name, x in without.items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-6)
    few = of(IDS, width=16)[1]
    cut = of(None, POLICY_KERNEL[:, IDS], 16)[1]
    assert float(cut["draft_1_acceptance"]) > float(few["draft_1_acceptance"]) + 0.05


def test_acceptance_is_that_of_rejection_sampling():
    """A token drawn from the draft is accepted with min(1, p / d): by sampling, to four standard
    errors.
    """
    rng = np.random.default_rng(1)
    n = 200_000
    d, p = (np.exp(x - np.logaddexp.reduce(x)) for x in (rng.normal(size=6), rng.normal(size=V)))
    ids = IDS[:6]
    drawn = rng.choice(6, size=n, p=d)
    accepted = rng.random(n) < p[ids][drawn] / d[drawn]
    batch = RolloutBatch.from_samples([Sample([1, 2, 3, 4], 1)], row_length=4)
    states = (
        np.ones((1, 1, 4, 1), np.float32),
        np.log(d)[None],
        np.ones((1, 4, 1), np.float32),
        np.log(p)[None],
    )
    found = jax.jit(draft_metrics)(*map(np.float32, states), batch, draft_ids=ids)[
        "draft_1_acceptance"
    ]
    assert abs(accepted.mean() - float(found.value)) < 4 * accepted.std() / np.sqrt(n)


@jax.jit
def with_traced_ids(ids):
    """The loss, and the metrics of both functions."""
    given = HIDDEN, KERNEL, POLICY, POLICY_KERNEL, BATCH
    loss, found = draft_loss(*given, draft_ids=ids)
    metrics = draft_metrics(*given, draft_ids=ids)
    return loss, finalize_metrics(found), finalize_metrics(metrics)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[:15], "draft_ids: got 15, expected 16, the columns of the draft"),
        (np.where(IDS[3] == IDS, V, IDS), "draft_ids: got the id 24, expected 0 to 23"),
        (np.where(IDS[3] == IDS, -1, IDS), "draft_ids: got the id -1, expected 0 to 23"),
        (
            np.where(IDS[3] == IDS, IDS[4], IDS),
            "draft_ids: got the id .* twice, expected each once",
        ),
        (IDS[None], r"draft_ids: got shape \(1, 16\), expected \[D\]"),
        (IDS * 1.0, "draft_ids: got dtype float64, expected integers"),
        (list(IDS), "draft_ids: got list, expected an array of integers"),
    ],
)
def test_bad_ids(ids, message):
    given = HIDDEN, KERNEL, POLICY, POLICY_KERNEL, BATCH
    for call in (draft_loss, draft_metrics):
        with pytest.raises((TypeError, ValueError), match=message):
            call(*given, draft_ids=ids)
    # bad by its values alone
    if isinstance(ids, np.ndarray) and ids.shape == (16,) and ids.dtype == np.int32:
        loss, of_loss, metrics = with_traced_ids(ids)
        assert np.isnan(loss)
        assert "draft_ids" in " ".join(explain_broken_rules(of_loss["draft_1_broken_rules"]))
        assert np.isnan(metrics["draft_1_acceptance"])


def test_ids_of_a_checkpoint_and_of_counts():
    offsets = np.sort(IDS) - np.arange(16)
    np.testing.assert_array_equal(draft_ids_of_d2t(offsets, V), np.sort(IDS))
    counts = np.bincount(RNG.integers(0, V, 500), minlength=V)
    found = draft_ids_of_counts(counts, 10)
    assert counts[found].min() >= np.delete(counts, found).max()
    for call, message in (
        (lambda: draft_ids_of_d2t(offsets - 9, V), "d2t: got the id -5, expected 0 to 23"),
        (lambda: draft_ids_of_d2t(offsets + 2**32, V), "d2t: got the id 42949"),
        (lambda: draft_ids_of_counts(counts, V + 1), "counts: got shape"),
        (lambda: draft_ids_of_counts(counts / 2, 3), "counts: got dtype float64"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_targets_as_columns(mesh):
    parallel = mesh and make_parallel_mesh(mesh)
    batch = dataclasses.replace(
        BATCH, targets=np.random.default_rng(0).integers(0, V, (R, T), np.int32)
    )
    found = draft_targets(batch, IDS, V, parallel=parallel)
    there = np.isin(batch.targets, IDS)
    np.testing.assert_array_equal(found.loss_mask, np.where(there, MASK, 0))

    @jax.jit
    def with_traced_ids(ids):
        return draft_targets(batch, ids, V, parallel=parallel)

    for at in (V, -1, IDS[4]):  # under jit a bad id is found as NaN
        bad = with_traced_ids(np.where(IDS[3] == IDS, at, IDS))
        assert np.isnan(bad.loss_mask).all()
    on = there & (np.asarray(BATCH.segment_ids) > 0)
    np.testing.assert_array_equal(IDS[np.asarray(found.targets)][on], batch.targets[on])
    assert 0 < found.loss_mask.sum() < MASK.sum()
