"""Draft losses against the oracle, in every layout and in micro-batches."""

import dataclasses
import functools

import jax
import numpy as np
import oracle.draft as truth
import pytest
from hard_rows import R, T, hard_batch, layouts_on, sequences
from policy_steps import quick_jit

from jaxppo import Head, Normalizer, finalize_metrics
from jaxppo.contrib.draft import Draft, draft_loss, draft_metrics
from sharding import make_parallel_mesh
from sharding.audit.program import hang_risks
from sharding.testing import assert_trees_close

H, G, V, K = 4, 5, 11, 3
RNG = np.random.default_rng(0)
BATCH, _ = hard_batch()
PLAIN = (
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "values",
    "returns",
    "rewards",
)
BATCH = dataclasses.replace(BATCH, **dict.fromkeys(PLAIN))
MASK = np.asarray(BATCH.loss_mask)
IDS = np.asarray(BATCH.segment_ids)
HIDDEN = 0.5 * RNG.normal(size=(K, R, T, H)).astype(np.float32)
KERNEL = RNG.normal(size=(H, V)).astype(np.float32)
POLICY = 0.5 * RNG.normal(size=(R, T, G)).astype(np.float32)
POLICY_KERNEL = RNG.normal(size=(G, V)).astype(np.float32)
COEF, ETA = 0.3, 2.0
OBJECTIVES = ("soft_cross_entropy", "total_variation", "likelihood", "end_to_end")


def pairs_of_places(k):
    """(row, t, t + k) where both positions have loss and are in one sequence."""
    for row, _, places in sequences(BATCH):
        for t, later in zip(places, places[k:], strict=False):
            if MASK[row, t] and MASK[row, later]:
                yield row, t, later


@functools.cache
def expected(objective):
    """The loss, its gradients by hidden states and kernel, acceptance by depth; f64, one token
    at a time.
    """
    w = KERNEL.astype(np.float64)
    v = POLICY_KERNEL.astype(np.float64)
    by_hidden = np.zeros(HIDDEN.shape)
    by_kernel = np.zeros(KERNEL.shape)
    losses = []
    found = {}
    by_token = {}
    for k in range(1, K + 1):
        there = list(pairs_of_places(k))
        x = np.stack([HIDDEN[k - 1, row, t] for row, t, _ in there]).astype(np.float64)
        z = x @ w
        p = np.stack([POLICY[row, later] for row, _, later in there]).astype(np.float64) @ v
        a, by_a = truth.acceptance(z, p)
        found[f"draft_{k}_acceptance"] = a.mean()
        found[f"draft_{k}_agreement"] = np.mean(z.argmax(-1) == p.argmax(-1))
        for (row, t, _), one, slope, h in zip(there, a, by_a, x, strict=True):
            by_token.setdefault((row, t), []).append((k, one, slope, h))
        if objective == "end_to_end":
            continue
        value, dz = (
            (1 - a, -by_a)
            if objective == "total_variation"
            else getattr(truth, objective)(
                z, p, **({"eta": ETA} if objective == "likelihood" else {})
            )
        )
        losses.append(value.mean())
        dz = COEF / K / len(there) * dz
        by_kernel += x.T @ dz
        for (row, t, _), g in zip(there, dz, strict=True):
            by_hidden[k - 1, row, t] += w @ g
    if objective == "end_to_end":
        # a depth counts where those before it do
        reached = {
            at: [d for i, d in enumerate(each, 1) if d[0] == i] for at, each in by_token.items()
        }
        reached = {at: each for at, each in reached.items() if each}
        for (row, t), each in reached.items():
            value, slopes = truth.end_to_end([d[1] for d in each])
            losses.append(value)
            for (k, _, by_logits, h), slope in zip(each, slopes, strict=True):
                g = COEF / len(reached) * slope * by_logits
                by_hidden[k - 1, row, t] += w @ g
                by_kernel += np.outer(h, g)
    return COEF * np.mean(losses), (by_hidden, by_kernel), found


def everything(objective, parallel, hidden, kernel, policy, policy_kernel, batch, **options):
    def fn(h, k):
        loss = Draft(objective=objective, eta=ETA, coef=COEF)
        return draft_loss(h, k, policy, policy_kernel, batch, loss, parallel=parallel, **options)

    (loss, found), gradients = jax.value_and_grad(fn, (0, 1), has_aux=True)(hidden, kernel)
    return loss, gradients, finalize_metrics(found)


def check(objective, got):
    loss, gradients, found = got
    value, wanted, metrics = expected(objective)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    assert_trees_close(gradients, tuple(map(np.float32, wanted)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.pop("draft_loss"), loss)
    for name, x in found.items():
        np.testing.assert_allclose(
            x, 0 if name.endswith("rules") else metrics[name], rtol=1e-5, err_msg=name
        )


@pytest.mark.every(2)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_oracle(objective):
    hidden = np.where(IDS[None, :, :, None] > 0, HIDDEN, np.nan)
    policy = np.where(MASK[..., None] > 0, POLICY, np.nan)
    check(
        objective,
        jax.jit(functools.partial(everything, objective, None))(
            hidden, KERNEL, policy, POLICY_KERNEL, BATCH
        ),
    )


def test_the_decay_of_depths():
    """Losses 1.2, 1.5 and 2 of three depths at 0.8: SpecForge's sum 3.68, divided by 2.44 as in
    Automodel.
    """
    given = [*HIDDEN], KERNEL, POLICY, POLICY_KERNEL, BATCH

    def at(decay):
        return float(draft_loss(*given, Draft(coef=1.0, decay=decay))[0])

    alone = [float(draft_loss(*given, Draft(coef=1.0, decay=1e-7))[0])]
    # from the mean at two decays the losses of the other depths, K = 3
    means = [at(1.0), at(0.5)]
    second = 4 * (1.75 * means[1] - alone[0]) - (3 * means[0] - alone[0])
    third = 3 * means[0] - alone[0] - second
    expected = (alone[0] + 0.8 * second + 0.64 * third) / 2.44
    np.testing.assert_allclose(at(0.8), expected, rtol=1e-4)
    with pytest.raises(ValueError, match="decay: got 0"):
        Draft(decay=0)


def test_a_temperature_is_that_of_the_token_that_is_predicted():
    """Both models are divided by the policy's temperature there.

    Positions without loss may hold anything.
    """
    temperature = np.where(MASK > 0, RNG.uniform(0.5, 2, (R, T)), np.nan).astype(np.float32)
    given = [*HIDDEN], KERNEL, POLICY, POLICY_KERNEL, BATCH

    @quick_jit
    def run(temperature):
        loss = draft_loss(*given, Draft(coef=COEF), temperature=temperature)[0]
        return loss, draft_metrics(*given, temperature=temperature)

    loss, found = run(temperature)
    total = 0.0
    for k in range(1, K + 1):
        there = list(pairs_of_places(k))
        of = np.array([temperature[row, later] for row, _, later in there], np.float64)[:, None]
        z = (
            np.stack([HIDDEN[k - 1, row, t] for row, t, _ in there]).astype(np.float64)
            @ KERNEL
            / of
        )
        p = (
            np.stack([POLICY[row, later] for row, _, later in there]).astype(np.float64)
            @ POLICY_KERNEL
            / of
        )
        total += COEF / K * truth.soft_cross_entropy(z, p)[0].mean()
        np.testing.assert_allclose(
            found[f"draft_{k}_acceptance"].value, truth.acceptance(z, p)[0].mean(), rtol=1e-5
        )
    np.testing.assert_allclose(loss, total, rtol=1e-5)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("objective", "mesh", "layout"),
    [
        ("soft_cross_entropy", "dp=2,cp=2,tp=2", "zigzag"),
        ("total_variation", "dp=2,cp=4,tp=1", "zigzag_per_segment"),
        ("likelihood", "dp=2,cp=4,tp=1", "striped"),
        ("end_to_end", "dp=2,cp=2,tp=2", "contiguous"),
    ],
)
def test_on_a_mesh(objective, mesh, layout):
    ((_, parallel, to_physical, _),) = layouts_on(mesh, [layout])
    order = np.asarray(to_physical(np.broadcast_to(np.arange(T), (R, T))))

    def place(x):
        return np.take_along_axis(x, order[..., None], 1)

    hidden = np.stack([place(x) for x in HIDDEN])
    run = functools.partial(everything, objective, parallel)
    args = hidden, KERNEL, place(POLICY), POLICY_KERNEL, to_physical(BATCH)
    loss, (dhidden, dkernel), found = jax.jit(run)(*args)
    dhidden = np.stack(
        [np.take_along_axis(np.asarray(x), np.argsort(order, 1)[..., None], 1) for x in dhidden]
    )
    check(objective, (loss, (dhidden, dkernel), found))
    assert hang_risks(jax.make_jaxpr(run)(*args)) == []
    metrics = jax.jit(lambda h, k, *x: draft_metrics(h, k, *x, parallel=parallel))(*args)
    got = finalize_metrics(metrics)
    wanted = expected(objective)[2]
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.every(2)
@pytest.mark.parametrize("options", [{"explicit": True}, {"sequence_parallel": True}], ids=str)
def test_explicit_axes_and_hidden_states_sharded_by_position(options):
    """Arrays have the shardings that a model gives them."""
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", **options)

    def put(x, spec):
        return jax.device_put(x, parallel.sharding(spec))

    hidden = [put(x, parallel.hidden_spec) for x in HIDDEN]
    policy = put(POLICY, parallel.hidden_spec)
    batch = BATCH.put(parallel)
    kernels = [
        put(np.pad(x, ((0, 0), (0, 1))), parallel.kernel_spec()) for x in (KERNEL, POLICY_KERNEL)
    ]

    def run(hidden, policy, kernel, policy_kernel, batch):
        loss = Draft(objective="likelihood", eta=ETA, coef=COEF)
        of = functools.partial(Head, vocab_size=V)

        def fn(h, k):
            return draft_loss(h, of(k), policy, of(policy_kernel), batch, loss, parallel=parallel)

        (loss, found), gradients = jax.value_and_grad(fn, (0, 1), has_aux=True)(hidden, kernel)
        return loss, gradients, finalize_metrics(found)

    loss, (dhidden, dkernel), found = jax.jit(run)(hidden, policy, *kernels, batch)
    check(
        "likelihood",
        (loss, (np.stack([np.asarray(x) for x in dhidden]), np.asarray(dkernel)[:, :V]), found),
    )


@pytest.mark.parametrize("objective", ["likelihood", "end_to_end"])
def test_micro_batches_add_up(objective):
    """The micro-batches are uneven, so their own denominators would be wrong."""

    def stack(x):
        return x.reshape(2, R // 2, *x.shape[1:])

    batches = jax.tree.map(stack, BATCH)
    loss = Draft(K, objective, ETA, COEF)
    parts = Normalizer.of(loss, batches)
    assert len(parts) == (1 if objective == "end_to_end" else K)
    total = 0.0
    for i in range(2):
        batch, normalizers = jax.tree.map(lambda x, i=i: x[i], (batches, parts))
        given = HIDDEN.reshape(K, 2, R // 2, T, H)[:, i], KERNEL, stack(POLICY)[i], POLICY_KERNEL
        total += draft_loss(*given, batch, loss, normalizers=normalizers)[0]
    np.testing.assert_allclose(total, expected(objective)[0], rtol=1e-5)


def test_no_gradient_reaches_the_policy():
    def run(p, v):
        return draft_loss(HIDDEN, KERNEL, p, v, BATCH, Draft(objective="likelihood"))[0]

    assert not any(np.any(g) for g in jax.jit(jax.grad(run, (0, 1)))(POLICY, POLICY_KERNEL))


def test_a_draft_that_is_the_policy():
    """It is always accepted. A position behind a gap in the mask does not count."""
    shifted = np.stack([np.pad(POLICY[:, k:], ((0, 0), (0, k), (0, 0))) for k in range(1, K + 1)])
    for objective, value in {"total_variation": 0, "likelihood": 0, "end_to_end": 0}.items():
        loss, found = draft_loss(
            shifted, POLICY_KERNEL, POLICY, POLICY_KERNEL, BATCH, Draft(objective=objective)
        )
        np.testing.assert_allclose(loss, value, atol=1e-6)
        np.testing.assert_allclose(found["draft_2_acceptance"].value, 1, rtol=1e-6)
    agreed = draft_metrics(shifted, POLICY_KERNEL, POLICY, POLICY_KERNEL, BATCH)
    assert float(agreed["draft_3_agreement"].value) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": HIDDEN[:0]}, "hidden: got no depths"),
        ({"head": [KERNEL] * 2}, "head: got 2, expected 3 for the 3 depths of hidden"),
        (
            {"policy_head": POLICY_KERNEL[:, :7]},
            "policy_head.kernel: got 7 columns, expected the draft's 11",
        ),
        ({"normalizers": Normalizer.of(Draft(2), BATCH)}, "normalizers: got 2, expected 3"),
        (
            {"normalizers": Normalizer.of(Draft(2), BATCH), "loss": Draft(objective="end_to_end")},
            "normalizers: got 2, expected 1",
        ),
        ({"loss": Draft(2)}, "hidden: got 3 depths, expected 2, those of Draft"),
    ],
)
def test_bad_input(arguments, message):
    given = {
        "hidden": HIDDEN,
        "head": KERNEL,
        "policy_hidden": POLICY,
        "policy_head": POLICY_KERNEL,
        "batch": BATCH,
    }
    with pytest.raises(
        ValueError, match="objective: got 'kl', expected one of 'soft_cross_entropy'"
    ):
        Draft(objective="kl")
    with pytest.raises(ValueError, match=r"eta: got -1.0"):
        Draft(eta=-1.0)
    with pytest.raises(ValueError, match=message):
        draft_loss(**given | arguments)
