"""Multi-token prediction against a loop over sequences, in every layout, and its collectives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_rows import LAYOUTS, R, T, hard_batch, layouts_on, sequences
from policy_steps import quick_jit

from jaxppo import SFT, Normalizer, finalize_metrics
from jaxppo.losses.mtp import MTP, mtp_loss
from sharding import ParallelMesh, logical_positions, make_parallel_mesh
from sharding.audit.program import collectives, hang_risks
from sharding.testing import assert_trees_close

H, V, K = 4, 11, 3
RNG = np.random.default_rng(0)
BATCH, _ = hard_batch()
BATCH = dataclasses.replace(
    BATCH,
    **dict.fromkeys(
        ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values")
    ),
)
TARGETS = RNG.integers(0, V, size=(R, T))
MASK = np.asarray(BATCH.loss_mask)
IDS = np.asarray(BATCH.segment_ids)
BATCH = dataclasses.replace(BATCH, targets=jnp.asarray(np.where(MASK > 0, TARGETS, -100)))
HIDDEN = RNG.normal(size=(K, R, T, H)).astype(np.float32)
KERNEL = RNG.normal(size=(H, V)).astype(np.float32)
COEF = 0.3


def reference(temperature=None):
    """(nll, accuracy, tokens) of each depth in f64, one position at a time; a token has its own
    temperature.
    """
    temperature = np.ones((R, T)) if temperature is None else temperature.astype(np.float64)
    found = []
    for k in range(1, K + 1):
        losses = []
        hits = []
        for row, _, places in sequences(BATCH):
            for t, later in zip(places, places[k:], strict=False):
                if MASK[row, later]:
                    z = (
                        HIDDEN[k - 1, row, t].astype(np.float64)
                        @ KERNEL.astype(np.float64)
                        / temperature[row, later]
                    )
                    losses.append(np.log(np.exp(z).sum()) - z[TARGETS[row, later]])
                    hits.append(z.argmax() == TARGETS[row, later])
        found.append((np.mean(losses), np.mean(hits), len(losses)))
    return found


def everything(parallel, hidden, kernel, batch):
    """Loss, its gradients, and the finished metrics."""
    call = functools.partial(mtp_loss, batch=batch, loss=MTP(coef=COEF), parallel=parallel)
    (loss, found), gradients = jax.value_and_grad(lambda h, k: call(h, k), (0, 1), has_aux=True)(
        hidden, kernel
    )
    return loss, gradients, finalize_metrics(found)


@functools.cache
def on_one_device():
    return jax.jit(functools.partial(everything, None))(HIDDEN, KERNEL, BATCH)


def test_each_depth_predicts_further_on():
    loss, _, found = on_one_device()
    expected = reference()
    for k, (nll, accuracy, tokens) in enumerate(expected, 1):
        assert tokens > 40
        np.testing.assert_allclose(found[f"mtp_{k}_nll"], nll, rtol=1e-5)
        np.testing.assert_allclose(found[f"mtp_{k}_accuracy"], accuracy, rtol=1e-6)
    np.testing.assert_allclose(loss, COEF * np.mean([nll for nll, _, _ in expected]), rtol=1e-5)
    np.testing.assert_allclose(found["mtp_loss"], loss)


def test_a_temperature_is_that_of_the_token_that_is_predicted():
    """Across the borders of shards too; anything where no loss is."""
    ((_, parallel, to_physical, _),) = layouts_on("dp=2,cp=4,tp=1", ["zigzag"])
    temperature = np.where(MASK > 0, RNG.uniform(0.5, 2, (R, T)), np.nan).astype(np.float32)
    order = np.asarray(to_physical(np.broadcast_to(np.arange(T), (R, T))))
    hidden = np.stack([np.take_along_axis(h, order[..., None], 1) for h in HIDDEN])

    @quick_jit
    def run(hidden, batch, temperature):
        return mtp_loss(
            hidden, KERNEL, batch, MTP(coef=COEF), parallel=parallel, temperature=temperature
        )[1]

    found = run(hidden, to_physical(BATCH), np.take_along_axis(temperature, order, 1))
    for k, (nll, _, _) in enumerate(reference(temperature), 1):
        np.testing.assert_allclose(found[f"mtp_{k}_nll"].value, nll, rtol=1e-5)


CASES = [("dp=2,cp=4,tp=1", layout) for layout in LAYOUTS] + [
    ("dp=8,cp=1,tp=1", "zigzag"),
    ("dp=2,cp=2,tp=2", "zigzag"),
]
NIGHTLY = [("dp=1,cp=4,tp=2", layout) for layout in LAYOUTS] + [
    ("dp=1,cp=8,tp=1", layout) for layout in LAYOUTS[:2]
]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("mesh", "layout"), CASES + [pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY]
)
def test_no_layout_or_mesh_changes_a_number(mesh, layout):
    """Hidden states are NaN where no depth counts them, and the kernel is sharded over the
    tensor axis.
    """
    ((_, parallel, to_physical, _),) = layouts_on(mesh, [layout])
    order = np.asarray(to_physical(np.broadcast_to(np.arange(T), (R, T))))
    hidden = np.where(IDS[None, :, :, None] > 0, HIDDEN, np.nan)
    hidden = np.stack([np.take_along_axis(h, order[..., None], 1) for h in hidden])
    got = jax.jit(functools.partial(everything, parallel))(hidden, KERNEL, to_physical(BATCH))
    loss, (dhidden, dkernel), found = got
    dhidden = np.stack(
        [np.take_along_axis(np.asarray(h), np.argsort(order, 1)[..., None], 1) for h in dhidden]
    )
    assert_trees_close(
        (loss, (dhidden, dkernel), found), on_one_device(), context=f"{mesh} {layout}"
    )


@pytest.mark.parametrize(
    "aggregation",
    ["sequence_mean_token_mean", pytest.param("token_mean", marks=pytest.mark.nightly)],
)
def test_micro_batches_add_up_to_the_step(aggregation):
    """In uneven parts, of which the own denominators would be off."""
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag")
    order = logical_positions("zigzag", T, 2)

    def physical(x):
        return x[:, order] if x.shape == (R, T) else x

    batch = dataclasses.replace(
        jax.tree.map(physical, BATCH), context_layout="zigzag", context_shards=2
    )
    states = HIDDEN[:, :, order].reshape(K, 2, R // 2, T, H)
    stacked = jax.tree.map(lambda x: x.reshape(2, R // 2, *x.shape[1:]), batch)
    of_step = functools.partial(Normalizer.of, MTP(K, aggregation=aggregation), parallel=parallel)
    parts = quick_jit(of_step)(stacked)

    @jax.jit
    def loss_of(hidden, batch, normalizers):
        options = {"normalizers": normalizers, "parallel": parallel}
        return mtp_loss(hidden, KERNEL, batch, MTP(aggregation=aggregation), **options)[0]

    total = 0.0
    for i in range(2):
        part = jax.tree.map(lambda x, i=i: np.asarray(x)[i], (stacked, parts))
        total += loss_of(states[:, i], *part)
    whole = jax.jit(lambda *x: mtp_loss(*x, MTP(K, aggregation=aggregation))[0])(
        HIDDEN, KERNEL, BATCH
    )
    np.testing.assert_allclose(total, whole, rtol=1e-6)


def test_a_head_for_each_depth():
    """Given as a list or stacked; each depth is as with a head of its own only."""
    kernels = np.stack(
        [KERNEL, KERNEL + RNG.normal(size=KERNEL.shape).astype(np.float32), KERNEL * 2]
    )
    both = jax.jit(lambda h, k: (mtp_loss(h, k, BATCH), mtp_loss(list(h), list(k), BATCH)))(
        HIDDEN, kernels
    )
    (stacked, found), (listed, _) = both
    assert stacked == listed
    one_head = jax.jit(lambda h, k: mtp_loss(h, k, BATCH)[1])
    for k in (1, 2, 3):
        expected = one_head(HIDDEN, kernels[k - 1])[f"mtp_{k}_nll"].value
        np.testing.assert_allclose(found[f"mtp_{k}_nll"].value, expected, rtol=1e-6)
    assert len({float(found[f"mtp_{k}_nll"].value) for k in (1, 2, 3)}) == 3


@functools.cache
def gradients_where_one_is_stopped():
    """The gradients by hidden states and kernel, where those of the first are stopped, and where
    those of the second are.
    """

    def loss(stopped, *args):
        args = [jax.lax.stop_gradient(x) if i == stopped else x for i, x in enumerate(args)]
        return mtp_loss(*args, BATCH, MTP(coef=COEF))[0]

    @jax.jit
    def run(hidden, kernel):
        of_loss = [functools.partial(loss, stopped) for stopped in (0, 1)]
        return [jax.grad(fn, (0, 1))(hidden, kernel) for fn in of_loss]

    return run(HIDDEN, KERNEL)


@pytest.mark.parametrize("stopped", [0, 1])
def test_gradients_that_are_stopped(stopped):
    """Into the trunk, or into the head: as the docstring says, by `stop_gradient` of that
    argument.
    """
    gradients = gradients_where_one_is_stopped()[stopped]
    _, full, _ = on_one_device()
    assert not np.asarray(gradients[stopped]).any()
    np.testing.assert_allclose(gradients[1 - stopped], full[1 - stopped], rtol=1e-6)


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_device_is_left_waiting(layout):
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    batch = dataclasses.replace(BATCH, context_layout=layout, context_shards=2)
    traced = jax.make_jaxpr(functools.partial(everything, parallel))(HIDDEN, KERNEL, batch)
    assert collectives(traced)
    assert hang_risks(traced) == []


def test_a_row_with_nothing_to_predict_gives_zero():
    nothing = dataclasses.replace(BATCH, loss_mask=jnp.zeros_like(BATCH.loss_mask))
    mesh = ParallelMesh(jax.make_mesh((2, 4), ("dp", "cp")))  # Explicit axes
    loss, gradients, found = jax.jit(functools.partial(everything, mesh))(
        HIDDEN * np.nan, KERNEL, nothing
    )
    assert loss == 0
    assert not any(np.asarray(g).any() for g in gradients)
    assert found["mtp_1_nll"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": HIDDEN[:0]}, "hidden: got no depths, expected at least one"),
        ({"head": [KERNEL] * 2}, "head: got 2, expected 3 for the 3 depths of hidden"),
        ({"normalizers": [Normalizer.of(SFT(), BATCH)]}, "normalizers: got 1, expected 3"),
        ({"loss": MTP(2)}, "hidden: got 3 depths, expected 2, those of MTP"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match="aggregation: got 'mean', expected one of 'token_mean'"):
        MTP(aggregation="mean")
    with pytest.raises(ValueError, match="depths: got 0, expected a whole number of at least 1"):
        MTP(0)
    with pytest.raises(
        ValueError, match="depths: got None, expected a number, for the denominators of each depth"
    ):
        Normalizer.of(MTP(), BATCH)
    with pytest.raises(ValueError, match=message):
        mtp_loss(**({"hidden": HIDDEN, "head": KERNEL, "batch": BATCH} | arguments))
