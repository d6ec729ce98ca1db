"""Bad arguments of log-probs are refused at trace time, by name, with what was got and what was expected."""

import jax
import jax.numpy as jnp
import pytest

from jaxppo import log_probs_from_hidden, log_probs_from_logits
from sharding import make_parallel_mesh

R, T, H, V = 2, 4, 3, 10
HIDDEN, KERNEL, TARGETS = jnp.ones((R, T, H)), jnp.ones((H, V)), jnp.zeros((R, T), jnp.int32)
LOGITS = jnp.ones((R, T, V))

OF_BOTH = [
    ({"targets": jnp.zeros((R, T))}, TypeError, "targets: got dtype float32, expected an integer dtype"),
    ({"targets": TARGETS[:, :3]}, ValueError, r"targets: got shape \(2, 3\), expected \(2, 4\)"),
    ({"targets": TARGETS[0]}, ValueError, r"targets: got shape \(4,\), expected \(2, 4\)"),
    ({"where": jnp.ones((R, 3), bool)}, ValueError, r"where: got shape \(2, 3\), expected \(2, 4\)"),
    ({"entropy": "yes"}, ValueError, "entropy: got 'yes', expected one of none, metric, bonus"),
    ({"entropy": True}, ValueError, "entropy: got True, expected one of"),
    ({"temperature": 0.0}, ValueError, "temperature: got 0.0, expected a positive number"),
    ({"temperature": -1}, ValueError, "temperature: got -1, expected a positive number"),
    ({"temperature": float("nan")}, ValueError, "temperature: got nan, expected a positive number"),
    ({"temperature": jnp.ones(2)}, ValueError, r"temperature: got shape \(2,\), expected a scalar"),
    ({"vocab_size": 0}, ValueError, "vocab_size: got 0, expected 1 to 10"),
    ({"vocab_size": 11}, ValueError, "vocab_size: got 11, expected 1 to 10"),
    ({"parallel": "dp=8"}, TypeError, "parallel: got str, expected ParallelMesh, ShardAxes or None"),
]
OF_LOGITS = [
    ({"logits": jnp.ones((R, T, V), jnp.int32)}, TypeError, "logits: got dtype int32, expected a floating-point"),
    ({"logits": LOGITS[0]}, ValueError, r"logits: got shape \(4, 10\), expected \[R, T, V\]"),
    ({"keep_mask": jnp.ones((R, T, 9), bool)}, ValueError, r"keep_mask: got shape \(2, 4, 9\), expected \(2, 4, 10\)"),
    ({"keep_mask": jnp.ones((R, T, V))}, TypeError, "keep_mask: got dtype float32, expected bool"),
]
OF_HIDDEN = [
    ({"hidden": jnp.ones((R, T, H), jnp.int32)}, TypeError, "hidden: got dtype int32, expected a floating-point"),
    ({"hidden": HIDDEN[0]}, ValueError, r"hidden: got shape \(4, 3\), expected \[R, T, H\]"),
    ({"kernel": KERNEL[None]}, ValueError, r"kernel: got shape \(1, 3, 10\), expected \[H, V\] or \[V, H\]"),
    ({"kernel": KERNEL.astype(int)}, TypeError, "kernel: got dtype int32, expected a floating-point"),
    ({"kernel": jnp.ones((4, V))}, ValueError, r"kernel: got shape \(4, 10\) with layout 'hv', expected 3 rows of H"),
    ({"kernel_layout": "vh"}, ValueError, r"kernel: got shape \(3, 10\) with layout 'vh', expected 3 rows of H"),
    ({"kernel_layout": "VH"}, ValueError, "kernel_layout: got 'VH', expected 'hv' or 'vh'"),
    ({"bias": jnp.ones(9)}, ValueError, r"bias: got shape \(9,\), expected \(10,\)"),
    ({"bias": jnp.ones((1, V))}, ValueError, r"bias: got shape \(1, 10\), expected \(10,\)"),
    ({"bias": jnp.ones(V, jnp.int32)}, TypeError, "bias: got dtype int32, expected a floating-point"),
    ({"logit_softcap": 0.0}, ValueError, "logit_softcap: got 0.0, expected a positive number or None"),
    ({"logit_softcap": -30.0}, ValueError, "logit_softcap: got -30.0, expected a positive number or None"),
    ({"block_bytes": 0}, ValueError, "block_bytes: got 0, expected a positive number of bytes"),
    ({"keep_ids": jnp.zeros((R, T), jnp.int32)}, ValueError, r"keep_ids: got shape \(2, 4\), expected \[R, T, K\]"),
    ({"keep_ids": jnp.zeros((R, 3, 2), jnp.int32)}, ValueError, r"keep_ids: got shape \(2, 3, 2\), expected"),
    ({"keep_ids": jnp.zeros((R, T, 2))}, TypeError, "keep_ids: got dtype float32, expected an integer dtype"),
]


def from_logits(logits=LOGITS, targets=TARGETS, **options):
    return log_probs_from_logits(logits, targets, **options)


def from_hidden(hidden=HIDDEN, kernel=KERNEL, targets=TARGETS, **options):
    return log_probs_from_hidden(hidden, kernel, targets, **options)


@pytest.mark.parametrize(("arguments", "error", "message"), OF_BOTH + OF_LOGITS)
def test_of_logits(arguments, error, message):
    with pytest.raises(error, match=message):
        from_logits(**arguments)


@pytest.mark.parametrize(("arguments", "error", "message"), OF_BOTH + OF_HIDDEN)
def test_of_hidden_states(arguments, error, message):
    with pytest.raises(error, match=message):
        from_hidden(**arguments)


@pytest.mark.parametrize("call", [from_logits, from_hidden])
def test_while_tracing(call):
    """Shapes and dtypes are refused under jit too; a temperature's value cannot be."""
    with pytest.raises(ValueError, match="targets: got shape"):
        jax.jit(lambda y: call(targets=y))(TARGETS[:, :3])
    jax.jit(lambda t: call(temperature=t))(-1.0)


@pytest.mark.parametrize("call", [from_logits, from_hidden])
def test_what_the_mesh_does_not_divide(call):
    with pytest.raises(ValueError, match=r"got shape \(2, 4, .* expected dimension 0 to be a multiple of 8"):
        call(parallel=make_parallel_mesh("dp=8"))
    with pytest.raises(ValueError, match=r"got shape \(2, 4, .* expected dimension 1 to be a multiple of 8"):
        call(parallel=make_parallel_mesh("cp=8"))


@pytest.mark.parametrize("call", [from_logits, from_hidden])
def test_vmap_over_a_mesh(call):
    stacked, parallel = jnp.stack([TARGETS, TARGETS]), make_parallel_mesh("dp=2,cp=4")
    with pytest.raises(ValueError, match=f"log_probs_{call.__name__}: got vmap around a ParallelMesh call"):
        jax.vmap(lambda y: call(targets=y, parallel=parallel))(stacked)
