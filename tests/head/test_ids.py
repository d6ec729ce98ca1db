"""Log-probs of several ids at each position, from hidden states and from logits, against float64
numpy, on any mesh.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import F32, R, T, call_head, head_arrays, with_gradients
from oracle import OracleHead
from oracle.head import head_gradient, id_gradient, id_log_probs, logits

from jaxppo import Head, log_probs_from_hidden, log_probs_from_logits
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.testing import assert_trees_close

MIXED, V = "dp=2,cp=2,tp=2", 97  # a vocabulary that the tensor axis does not divide
OPTIONS = {"softcap": 2.0, "temperature": 0.7}
IDS_ONLY = {"g": jnp.zeros((R, T)), "e": jnp.zeros((R, T))}


def truth(arrays):
    """Log-probs of the ids, and the gradients of their weighted sum by logits, hidden states and
    kernel.
    """
    wide = {
        k: np.asarray(x, np.float64 if x.dtype.kind == "f" else None) for k, x in arrays.items()
    }
    rows = wide.get("where", np.ones((R, T), bool))
    head = OracleHead(wide["kernel"], wide.get("bias"), softcap=OPTIONS["softcap"])
    hidden, ids, g = (wide[name][rows] for name in ("hidden", "ids", "i"))
    z = logits(hidden, head, OPTIONS["temperature"])
    dz = id_gradient(z, ids, g)
    dhidden, gradient = head_gradient(hidden, head, dz, OPTIONS["temperature"])
    values = np.zeros((R, T, ids.shape[-1]))
    of_hidden = np.zeros_like(wide["hidden"])
    values[rows], of_hidden[rows] = id_log_probs(z, ids), dhidden
    return values, {"hidden": of_hidden, "kernel": gradient.kernel, "bias": gradient.bias}


@pytest.mark.every(5)
@pytest.mark.parametrize("with_where", [False, True])
@pytest.mark.parametrize("mesh", [None, MIXED, "fsdp=4,tp=2", "tp=8"])
def test_values_and_gradients(mesh, with_where):
    arrays = head_arrays(V, ids=9, with_where=with_where) | IDS_ONLY
    parallel = mesh and make_parallel_mesh(mesh)
    stats, gradients = jax.jit(lambda a: with_gradients(call_head, parallel, a, **OPTIONS))(arrays)
    values, expected = truth(arrays)
    assert_trees_close(stats.id_log_probs, values, **F32)
    assert_trees_close(gradients, expected, rtol=5e-6, atol=5e-6)
    assert np.isinf(values).any()


def in_logits(parallel, arrays, **options):
    logits = (
        jnp.matmul(arrays["hidden"], arrays["kernel"], precision="highest")
        + arrays["bias"][None, None]
    )
    logits = OPTIONS["softcap"] * jnp.tanh(logits / OPTIONS["softcap"])
    rest = {name: arrays[name] for name in ("ids", "where") if name in arrays}
    temperature = OPTIONS["temperature"]
    return log_probs_from_logits(
        logits, arrays["targets"], parallel=parallel, temperature=temperature, **rest
    )


@pytest.mark.parametrize("mesh", [None, MIXED, "tp=8"])
def test_from_logits(mesh):
    arrays = head_arrays(V, ids=9) | IDS_ONLY
    parallel = mesh and make_parallel_mesh(mesh)
    stats, gradients = jax.jit(lambda a: with_gradients(in_logits, parallel, a))(arrays)
    values, expected = truth(arrays)
    assert_trees_close(stats.id_log_probs, values, **F32)
    assert_trees_close(gradients, expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("mesh", [None, MIXED])
@pytest.mark.parametrize("call", [call_head, in_logits])
def test_an_id_outside_the_vocabulary_is_nan(call, mesh):
    """Its log-prob is NaN, and so is the gradient of its token if the log-prob is used."""
    arrays = head_arrays(V, ids=4) | IDS_ONLY
    parallel = mesh and make_parallel_mesh(mesh)
    run = jax.jit(lambda a: with_gradients(call, parallel, a))
    clean = run(arrays)
    for bad in (-2, -100, V, 2**31 - 1):
        spoilt = {**arrays, "ids": arrays["ids"].at[4, 3, 1].set(bad)}
        stats, gradients = run(spoilt)
        nan = np.isnan(stats.id_log_probs)
        assert nan[4, 3, 1]
        assert nan.sum() == 1
        assert np.isnan(gradients["hidden"][4, 3]).all()
        assert np.isnan(gradients["hidden"]).sum() == gradients["hidden"].shape[-1]
        _, unused = run(spoilt | {"i": arrays["i"].at[4, 3, 1].set(0)})
        assert not np.isnan(unused["hidden"]).any()
    assert not np.isnan(clean[0].id_log_probs).any()


@pytest.mark.parametrize("mesh", [None, MIXED])
def test_nothing_that_is_masked_matters(mesh):
    arrays = head_arrays(V, ids=4, with_where=True) | IDS_ONLY
    parallel = mesh and make_parallel_mesh(mesh)
    run = jax.jit(lambda a: with_gradients(call_head, parallel, a, device="five"))
    clean = run(arrays)
    masked = ~np.asarray(arrays["where"])[..., None]
    for bad in (-100, -1, 5, 2**31 - 1):
        spoilt = {**arrays, "ids": jnp.where(masked, bad, arrays["ids"])}
        stats, gradients = run(spoilt)
        assert_trees_close((dataclasses.replace(stats, ids=arrays["ids"]), gradients), clean, 0, 0)
    np.testing.assert_array_equal(np.asarray(clean[0].id_log_probs)[masked[..., 0]], 0)


def test_an_empty_slot_has_no_gradient_whatever_the_loss_makes_of_it():
    """A loss may have q log(q / p), whose gradient at q = 0 and p = 0 is NaN by the chain rule."""
    hidden = np.ones((1, 1, 2), np.float32)
    kernel = np.array([[1, 2, 0], [0, 1, 1]], np.float32)
    ids = np.array([[[2, -1]]], np.int32)

    @jax.jit
    @jax.grad
    def gradient(kernel):
        stats = log_probs_from_hidden(hidden, kernel, jnp.array([[0]]), ids=ids)
        weighted = jnp.array([[[0.5, 0.0]]]) * stats.id_log_probs
        return jnp.where(ids >= 0, weighted, 0).sum()

    p = np.exp([1, 3, 1]) / np.exp([1, 3, 1]).sum()
    of_logits = 0.5 * (np.array([0, 0, 1]) - p)
    assert_trees_close(gradient(kernel), np.tile(of_logits, (2, 1)), **F32)


def test_they_are_of_the_whole_vocabulary_where_the_targets_are_renormalised():
    arrays = head_arrays(V, ids=4, nucleus=5)
    whole = {name: x for name, x in arrays.items() if name != "nucleus_ids"}
    with_nucleus, without = (jax.jit(lambda a: call_head(None, a))(a) for a in (arrays, whole))
    assert_trees_close(with_nucleus.id_log_probs, without.id_log_probs, **F32)
    assert not np.allclose(with_nucleus.log_probs, without.log_probs)


def test_ids_of_other_dtypes():
    arrays = head_arrays(V, ids=4)
    expected = call_head(None, arrays).id_log_probs
    with jax.enable_x64(True):
        wide = call_head(None, {**arrays, "ids": arrays["ids"].astype(jnp.int64)}).id_log_probs
        lost = call_head(
            None, {**arrays, "ids": arrays["ids"].astype(jnp.int64) + 2**32}
        ).id_log_probs
    assert_trees_close(wide, expected, 0, 0)
    assert np.isnan(lost).all()
    narrow = call_head(None, {**arrays, "ids": arrays["ids"].astype(jnp.int8)}).id_log_probs
    assert_trees_close(narrow, expected, 0, 0)


def test_the_audit_tells_of_them_and_no_mask_is_made():
    """No array of the program has both K and the columns as dimensions, and each schedule
    scatters once per tile.
    """
    hidden = jax.ShapeDtypeStruct((1, 64, 16), jnp.float32)
    kernel = jax.ShapeDtypeStruct((16, 640), jnp.float32)
    targets = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    ids = jax.ShapeDtypeStruct((1, 64, 200), jnp.int32)

    def loss(hidden, kernel, targets, ids):
        return log_probs_from_hidden(hidden, Head(kernel), targets, ids=ids).id_log_probs.sum()

    gradient = jax.grad(loss, (0, 1))
    notes = audit(gradient, hidden, kernel, targets, ids).notes
    assert "logits of 200 ids per token, gathered from each tile" in notes
    assert "gradients of 200 ids per token, one scatter-add per tile" in notes
    program = str(jax.make_jaxpr(gradient)(hidden, kernel, targets, ids))
    assert "200,640" not in program
    assert "200,512" not in program
    assert program.count("scatter-add[") == 1
