"""log_probs_from_hidden: values and gradients against float64 logits, on any mesh, with every
option.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import (
    BF16,
    F32,
    OPTIONS,
    PARAMETERS,
    R,
    T,
    call_head,
    check_head,
    head_arrays,
    truth,
    with_gradients,
)

from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close, factorings

MIXED = "dp=2,cp=2,tp=2"


def meshes(names, **options):
    return [None if name is None else make_parallel_mesh(name, **options) for name in names]


def test_every_factoring():
    check_head(meshes([None, *factorings(8)]), head_arrays(97), entropy="bonus")


def test_everything_at_once():
    arrays = head_arrays(1000, layout="vh", with_where=True, nucleus=7, last=990)
    options = {"layout": "vh", "softcap": 3.0, "temperature": 0.7, "vocab_size": 990}
    names = [None, "dp=8", "tp=8", "dp=2,cp=2,tp=2"]
    check_head(meshes(names), arrays, entropy="bonus", device="five", **options)


# columns of a device: less than a block, a block, a block and a column, the same with windows that
# overlap
@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("V", "mesh"),
    [(1000, MIXED), (1024, MIXED), (1026, MIXED), (1025, MIXED), (4096, "tp=8"), (4097, "tp=8")],
)
def test_vocabularies_and_blocks(V, mesh):
    check_head(meshes([mesh]), head_arrays(V, bias=False), entropy="bonus")


@pytest.mark.every(7)
@pytest.mark.parametrize(
    "name",
    [
        "softcap",
        "vh",
        "where",
        "several token blocks",
        "nucleus",
        "ids",
        "ids, where",
        "ids, nucleus",
        "statistics",
        "padding",
        "lora",
        "lora, vh",
        "scale",
        "temperatures",
    ],
)
def test_options(name):
    of_arrays, options = OPTIONS[name]
    check_head(meshes([MIXED]), head_arrays(1026, **of_arrays), entropy="bonus", **options)


@pytest.mark.parametrize("V", [97, 1026])
def test_bf16(V):
    check_head(meshes([None, MIXED]), head_arrays(V, dtype="bfloat16"), entropy="bonus", **BF16)


@pytest.mark.parametrize("V", [97, 104])
def test_explicit_axes(V):
    check_head(meshes([MIXED], explicit=True), head_arrays(V, with_where=True), entropy="bonus")


@pytest.mark.parametrize("entropy", ["none", "metric"])
def test_entropy_without_gradient(entropy):
    check_head(meshes([MIXED]), head_arrays(97), entropy=entropy)


def test_a_traced_temperature_is_a_constant():
    arrays = head_arrays(97)

    def run(temperature):
        stats = call_head(None, arrays, temperature=temperature, entropy="bonus")
        return (stats.log_probs + stats.entropy).sum()

    value, slope = jax.jit(jax.value_and_grad(run))(0.7)
    np.testing.assert_allclose(value, run(0.7), rtol=1e-6)
    assert slope == 0


@pytest.mark.parametrize("wrt", [("hidden",), ("kernel",), ("hidden", "bias")])
def test_some_of_the_gradients(wrt):
    check_head(meshes([MIXED]), head_arrays(97), wrt, entropy="bonus")


@pytest.mark.parametrize(("with_where", "mesh"), [(False, MIXED), (True, None), (True, "dp=8")])
def test_tokens_outermost(with_where, mesh):
    """With fewer columns than tokens, dkernel is the smaller accumulator, and the loop over
    tokens is the outer one.
    """
    arrays = head_arrays(10, with_where=with_where, bias=False)
    if mesh == "dp=8":
        arrays = head_arrays(6, with_where=with_where)
    check_head(meshes([mesh]), arrays, entropy="bonus", device="five")


def without_row(row):
    """A call whose loss leaves out the row, as a loss mask would: the cotangents of the row are
    zero.
    """

    def call(parallel, arrays, **options):
        stats = call_head(parallel, arrays, **options)
        return jax.tree.map(lambda x: x.at[row].set(0), stats)

    return call


@pytest.mark.parametrize("V", [10, 1026])  # tokens outermost, vocabulary outermost
@pytest.mark.parametrize("mesh", [None, MIXED])
def test_nothing_in_a_row_without_cotangent_matters(mesh, V):
    parallel = meshes([mesh])[0]
    arrays = head_arrays(V, lora=True, temperatures=True)
    run = jax.jit(lambda a: with_gradients(without_row(2), parallel, a, entropy="bonus"))
    clean = run(arrays)
    anything = {"hidden": jnp.nan, "targets": -100, "temperature": 0}
    spoiled = {name: arrays[name].at[2].set(value) for name, value in anything.items()}
    for name in anything:
        assert_trees_close(run({**arrays, name: spoiled[name]}), clean, 0, 0, name)
    assert_trees_close(run({**arrays, **spoiled}), clean, 0, 0)


@pytest.mark.parametrize("mesh", [None, MIXED])
def test_no_token_counts(mesh):
    arrays = head_arrays(97)
    arrays |= {"where": jnp.zeros((R, T), bool), "hidden": jnp.full_like(arrays["hidden"], jnp.nan)}
    found = jax.jit(lambda a: with_gradients(call_head, meshes([mesh])[0], a, entropy="bonus"))(
        arrays
    )
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf, 0)


def test_a_device_without_a_token_that_counts_does_no_product():
    """With a kernel of NaN, each product leaves NaN: in the row of the device with such tokens,
    and in no other.
    """
    arrays = head_arrays(97, bias=False)
    arrays |= {
        "where": jnp.zeros((R, T), bool).at[4].set(True),
        "kernel": jnp.full_like(arrays["kernel"], jnp.nan),
    }
    _, found = jax.jit(
        lambda a: with_gradients(call_head, meshes(["dp=8"])[0], a, entropy="bonus", device="five")
    )(arrays)
    np.testing.assert_array_equal(found["hidden"][4], np.nan, equal_nan=True)
    np.testing.assert_array_equal(np.delete(found["hidden"], 4, axis=0), 0)


@functools.cache
def with_padded_columns(mesh):
    """A compiled function of the arrays of a head whose columns from 97 on are padding."""
    options = {"entropy": "bonus", "vocab_size": 97}
    return jax.jit(lambda a: with_gradients(call_head, meshes([mesh])[0], a, **options))


@pytest.mark.parametrize("mesh", [None, MIXED, "tp=8"])
def test_padded_columns_hold_anything(mesh):
    arrays = head_arrays(104, last=97)
    run = with_padded_columns(mesh)
    clean = run(arrays)
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(clean[1][name][..., 97:], 0)
    for spoiler in (np.nan, -np.inf, np.inf):
        padded = {name: arrays[name].at[..., 97:].set(spoiler) for name in ("kernel", "bias")}
        assert_trees_close(run({**arrays, **padded}), clean, 0, 0)


@pytest.mark.parametrize("mesh", [None, MIXED])
def test_a_target_outside_the_vocabulary_is_nan(mesh):
    """Its log-prob and gradient are NaN; its entropy and every other token are as they were."""
    arrays = head_arrays(104, last=97)
    run = with_padded_columns(mesh)
    clean, clean_gradients = run(arrays)
    others = np.ones((R, T), bool)
    others[4, 3] = False
    for target in (-1, -100, 97, 103, 2**31 - 1):
        stats, gradients = run({**arrays, "targets": arrays["targets"].at[4, 3].set(target)})
        assert np.isnan(stats.log_probs[4, 3]), target
        assert np.isnan(gradients["hidden"][4, 3]).all(), target
        assert np.isnan(gradients["kernel"]).any(), target
        assert_trees_close(stats.log_probs[others], clean.log_probs[others], 0, 0)
        assert_trees_close(stats.entropy, clean.entropy, 0, 0)
        assert_trees_close(gradients["hidden"][others], clean_gradients["hidden"][others], 0, 0)


def test_vmap_on_one_device():
    """Over rows, with a mask whose loops end at different tokens."""
    arrays = head_arrays(1026, with_where=True, bias=False)
    batched = {name: x if name == "kernel" else x[:, None] for name, x in arrays.items()}
    axes = ({name: None if name == "kernel" else 0 for name in arrays},)

    def one(a):
        return with_gradients(call_head, None, a, entropy="bonus")

    stats, gradients = jax.jit(jax.vmap(one, in_axes=axes))(batched)
    expected, expected_gradients = truth(call_head, arrays, entropy="bonus")
    assert_trees_close(jax.tree.map(lambda x: x[:, 0], stats), expected, **F32)
    assert_trees_close(gradients["hidden"][:, 0], expected_gradients["hidden"], **F32)
    assert_trees_close(gradients["kernel"].sum(axis=0), expected_gradients["kernel"], **F32)


FULL = itertools.product([None, *factorings(8)], [97, 1000, 1024, 4097], ["float32", "bfloat16"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "V", "dtype", "explicit"), [(*case, i % 3 == 0) for i, case in enumerate(FULL)]
)
def test_full_table(mesh, V, dtype, explicit):
    """All options; every third case with Explicit axes, so that each mesh, size and dtype has
    both kinds.
    """
    tolerance = BF16 if dtype == "bfloat16" else F32
    for name, (of_arrays, options) in OPTIONS.items():
        options = {k: min(v, V - 7) if k == "vocab_size" else v for k, v in options.items()}
        of_arrays = {k: min(v, V - 7) if k == "last" else v for k, v in of_arrays.items()}
        arrays = head_arrays(V, dtype=dtype, **of_arrays)
        parallels = meshes([mesh], explicit=explicit) if mesh else [None]
        check_head(parallels, arrays, PARAMETERS, entropy="bonus", **tolerance, **options), name
