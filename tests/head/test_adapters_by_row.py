"""Adapters by row: values and gradients of each row are those of a head with that adapter merged
into its kernel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_head import reference_from_hidden

from jaxppo import (
    SFT,
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    accumulate_gradients,
    log_probs_from_hidden,
    loss_from_hidden,
    policy_loss_from_hidden,
)
from jaxppo.losses import Part
from jaxppo.losses.distillation import distillation_loss
from jaxppo.policy_losses import Reinforce
from sharding import make_parallel_mesh
from sharding.audit.program import notes

R, T, H, V, A, RANK = 4, 16, 12, 101, 3, 2
SCALE = 0.7
RNG = np.random.default_rng(0)
COUNTED = RNG.random((R, T)) < 0.6


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


IDS = jnp.asarray([2, 0, -1, 2], jnp.int32)
MASK = jnp.asarray(COUNTED, jnp.float32)
PARAMS = {
    "hidden": jnp.asarray(np.where(COUNTED[..., None], normal(R, T, H), np.float32(np.nan))),
    "kernel": jnp.asarray(normal(H, V)),
    "a": jnp.asarray(normal(A, H, RANK)),
    "b": jnp.asarray(normal(A, RANK, V)),
}
TARGETS = jnp.asarray(RNG.integers(0, V, (R, T)), jnp.int32)
ADVANTAGES = jnp.asarray(normal(R, T))
CONFIG = PolicyLossConfig(
    Reinforce(), ratio_to="current", entropy_coef=0.1, aggregation="token_sum"
)


def make_batch():
    ids = np.ones((R, T), np.int32)
    one = np.arange(R, dtype=np.int32)[:, None]
    places = np.tile(np.arange(T, dtype=np.int32), (R, 1))
    more = {"advantages": ADVANTAGES, "real_last_targets": True}
    return RolloutBatch(ids, TARGETS, ids, places, MASK, one, **more)


BATCH = make_batch()


def head_of(params, layout="hv"):
    kernel = params["kernel"] if layout == "hv" else params["kernel"].T
    return Head(kernel, lora=LoRA(params["a"], params["b"], SCALE), layout=layout)


def loss_of(params, batch, ids, parallel=None, layout="hv", **options):
    head = head_of(params, layout)
    return policy_loss_from_hidden(
        params["hidden"], head, batch, CONFIG, parallel=parallel, adapter_ids=ids, **options
    )


def merged(params):
    """-A log p - 0.1 entropy, summed over the loss tokens; each row has a kernel with its
    adapter merged in.
    """
    total = 0.0
    for row, k in enumerate(IDS.tolist()):
        kernel = params["kernel"] + (SCALE * params["a"][k] @ params["b"][k] if k >= 0 else 0)
        one = slice(row, row + 1)
        options = {"entropy": "bonus", "where": MASK[one] > 0}
        stats = reference_from_hidden(params["hidden"][one], kernel, TARGETS[one], **options)
        total += (MASK[one] * (-ADVANTAGES[one] * stats.log_probs - 0.1 * stats.entropy)).sum()
    return total


@functools.cache
def expected():
    """The loss and its gradients."""
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(merged))(PARAMS))


WAYS = {
    "one pass": {"memory": 2**30},
    "two passes": {"memory": 30_000},
    "vh": {"layout": "vh"},
    "mesh": {"mesh": "dp=2,cp=2,tp=2"},
    "positions over the tensor axis": {"mesh": "dp=2,cp=1,tp=4", "sequence_parallel": True},
    "fsdp": {"mesh": "fsdp=4,tp=2", "layout": "vh"},
}


@pytest.mark.every(2)
@pytest.mark.parametrize("way", WAYS)
def test_each_row_has_its_adapter(way):
    options = dict(WAYS[way])
    flags = {"sequence_parallel": True} if options.pop("sequence_parallel", False) else {}
    parallel = (mesh := options.pop("mesh", None)) and make_parallel_mesh(mesh, **flags)

    def run(p, ids):
        return loss_of(p, BATCH, ids, parallel, **options)[0]

    loss, gradient = jax.jit(jax.value_and_grad(run))(PARAMS, IDS)
    expected_loss, expected_gradient = expected()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name, x in expected_gradient.items():
        largest = np.nanmax(np.abs(x))
        np.testing.assert_allclose(gradient[name], x, rtol=2e-5, atol=4e-6 * largest, err_msg=name)
    assert not np.any(gradient["a"][1])  # no row has this adapter
    assert not np.any(gradient["b"][1])


def test_the_ways_are_what_they_say():
    for way in ("one pass", "two passes"):

        def loss(params, options=WAYS[way]):
            return loss_of(params, BATCH, IDS, **options)[0]

        found = notes(jax.make_jaxpr(jax.grad(loss))(PARAMS))
        assert found[0].startswith(way), found


def test_micro_batches_on_a_mesh():
    parallel = make_parallel_mesh("dp=2,tp=2", devices=jax.devices()[:4])
    halves = jax.tree.map(
        lambda x: x.reshape(2, R // 2, *x.shape[1:]), (BATCH, IDS, PARAMS["hidden"])
    )
    rest = {k: x for k, x in PARAMS.items() if k != "hidden"}

    def part(params, given):
        batch, ids, hidden = given
        return loss_of(params | {"hidden": hidden}, batch, ids, parallel)

    (loss, _), gradient = jax.jit(accumulate_gradients(part, halves))(rest)
    expected_loss, expected_gradient = expected()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name, x in gradient.items():
        np.testing.assert_allclose(x, expected_gradient[name], rtol=2e-5, atol=1e-4, err_msg=name)


def test_the_other_ways_in():
    head = head_of(PARAMS)
    hidden = PARAMS["hidden"]
    stats = log_probs_from_hidden(hidden, head, TARGETS, where=MASK > 0, adapter_ids=IDS)
    nll, _ = loss_from_hidden(hidden, head, BATCH, SFT(aggregation="token_sum"), adapter_ids=IDS)
    parts = {"written": Part(SFT(aggregation="token_sum"))}
    joint, _ = loss_from_hidden(hidden, head, BATCH, parts, adapter_ids=IDS)
    np.testing.assert_allclose([nll, joint], -stats.log_probs.sum(), rtol=1e-5)


def test_an_id_of_no_adapter_is_nan_in_its_row_alone():
    for bad in (A, -2):
        stats = log_probs_from_hidden(
            PARAMS["hidden"],
            head_of(PARAMS),
            TARGETS,
            where=MASK > 0,
            adapter_ids=IDS.at[1].set(bad),
        )
        assert np.isnan(stats.log_probs[1][MASK[1] > 0]).all()
        assert np.isfinite(stats.log_probs[np.array([0, 2, 3])]).all()
        assert np.isnan(loss_of(PARAMS, BATCH, IDS.at[1].set(bad))[0])


def test_bad_input():
    hidden = PARAMS["hidden"]
    one = Head(PARAMS["kernel"], lora=LoRA(PARAMS["a"][0], PARAMS["b"][0], 1.0))

    def call(head, ids):
        return log_probs_from_hidden(hidden, head, TARGETS, adapter_ids=ids)

    with pytest.raises(
        ValueError,
        match=r"adapter_ids: got None, expected i32\[R\] for the 3 adapters of head.lora",
    ):
        call(head_of(PARAMS), None)
    with pytest.raises(
        ValueError,
        match="adapter_ids: got an array, expected None without several adapters in head",
    ):
        call(one, IDS)
    with pytest.raises(
        ValueError, match=r"adapter_ids: got shape \(3,\), expected \(4,\), one per row"
    ):
        call(head_of(PARAMS), IDS[:3])
    with pytest.raises(TypeError, match="adapter_ids: got dtype float32, expected integers"):
        call(head_of(PARAMS), IDS.astype(jnp.float32))
    with pytest.raises(
        ValueError, match=r"lora.b: got shape \(2, 2, 101\), expected \(3, 2, 101\), \[A, r, V\]"
    ):
        call(Head(PARAMS["kernel"], lora=LoRA(PARAMS["a"], PARAMS["b"][:2], 1.0)), IDS)
    # these functions cannot take them yet
    with pytest.raises(ValueError, match="adapter_ids: got None, expected"):
        distillation_loss(hidden, head_of(PARAMS), hidden, PARAMS["kernel"], BATCH)
