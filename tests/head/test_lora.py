"""Adapters on the head: the merged kernel never exists, and the gradients of both are the
oracle's.
"""

import jax
import jax.numpy as jnp
import pytest
from check_from_hidden import check_policy_loss_from_hidden
from random_heads import HeadShape
from random_losses import BASE
from random_steps import Drawn, Place, Step

from jaxppo import (
    KL,
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from sharding import make_parallel_mesh
from sharding.audit import audit

H, V, RANK, R, T = 1024, 32768, 4, 8, 8
CONFIG = PolicyLossConfig(kl=KL(0.1), entropy_coef=0.01)


def shapes(parallel, layout):
    """Hidden states, kernel, adapters and a batch, as only their shapes and shardings."""

    def of(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.sharding(spec))

    P = jax.P
    tokens = [of((R, T), parallel.tokens_spec, jnp.int32)] * 4 + [of((R, T), parallel.tokens_spec)]
    ids = [of((R, 1), parallel.rows_spec, jnp.int32)] * 3
    values = dict.fromkeys(
        ("advantages", "old_log_probs", "ref_log_probs"), of((R, T), parallel.tokens_spec)
    )
    kernel = of((H, V) if layout == "hv" else (V, H), parallel.kernel_spec(layout))
    adapters = of((H, RANK), P()), of((RANK, V), P(None, parallel.tensor))
    return (
        of((R, T, H), parallel.hidden_spec),
        kernel,
        adapters,
        RolloutBatch(*tokens, *ids, **values),
    )


def one_call(hidden, head, batch, parallel):
    return policy_loss_from_hidden(hidden, head, batch, CONFIG, parallel=parallel)[0]


def statistics(hidden, head, batch, parallel):
    stats = log_probs_from_hidden(hidden, head, batch.targets, entropy="bonus", parallel=parallel)
    return (stats.log_probs * batch.advantages + stats.entropy).sum()


def test_a_scale_is_asked_for():
    """Before: 1, which hid a forgotten alpha / r."""
    with pytest.raises(TypeError, match="scale"):
        LoRA(jnp.ones((4, 2)), jnp.ones((2, 8)))


@pytest.mark.every(5)
@pytest.mark.parametrize("way", [one_call, statistics])
@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "cp=2,tp=4"])
def test_the_merged_kernel_never_exists(way, layout, mesh):
    """All temporaries of a device together are half of its part of a kernel at most; with a
    merged one they are not.
    """
    parallel = make_parallel_mesh(mesh)
    hidden, kernel, adapters, batch = shapes(parallel, layout)

    def apart(hidden, kernel, adapters, batch):
        return way(hidden, Head(kernel, layout=layout, lora=LoRA(*adapters, 0.5)), batch, parallel)

    def merged(hidden, kernel, adapters, batch):
        whole = 0.5 * adapters[0] @ adapters[1]
        return way(
            hidden,
            Head(kernel + (whole if layout == "hv" else whole.T), layout=layout),
            batch,
            parallel,
        )

    part = 4 * H * V // parallel.tensor_size
    for wrt in ((), (0, 2)):

        def of(fn, wrt=wrt):
            return jax.grad(fn, wrt) if wrt else fn

        assert audit(of(apart), hidden, kernel, adapters, batch).temp_bytes < part / 2
    assert audit(merged, hidden, kernel, adapters, batch).temp_bytes >= part


@pytest.mark.parametrize("way", ["one call", "statistics first"])
@pytest.mark.parametrize(
    ("layout", "mesh", "dtype"),
    [
        ("hv", None, "float32"),
        ("vh", "dp=2,cp=2,tp=2", "float32"),
        ("hv", "dp=2,cp=2,tp=2", "bfloat16"),
        ("vh", "tp=8", "float32"),
    ],
)
def test_gradients_of_adapters_against_the_oracle(way, layout, mesh, dtype):
    shape = HeadShape(way, 530, 5, layout, dtype, True, True, True, 8.0, 0.5, "by token", False)
    drawn = [Drawn(2 + i % 2, (1, 1, 0, 1, 1, 1)[i % 3 :], i, 7 + i // 2, i) for i in range(6)]
    step = Step(tuple(drawn), 5, 0.3, "by token", float("nan"))
    where = Place(
        mesh, False, "zigzag" if mesh == "dp=2,cp=2,tp=2" else "contiguous", False, 16, 8, 2, None
    )
    check_policy_loss_from_hidden(BASE, where, shape, [step])
