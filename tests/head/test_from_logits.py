"""log_probs_from_logits: values and gradients against float64, on any mesh, with every option."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import F32, check_head, truth, with_gradients
from jax.sharding import PartitionSpec as P
from plain_head import reference_from_logits

from jaxppo import log_probs_from_logits
from sharding import ParallelMesh, ShardAxes, make_parallel_mesh
from sharding.testing import assert_trees_close, factorings

R, T = 8, 8
MIXED = "dp=2,cp=2,tp=2"


def logits_arrays(
    V, *, dtype="float32", with_where=False, nucleus=False, temperatures=False, last=None
):
    """The arrays of a call by argument name, and the weights of its results; masked positions
    hold NaN and -100.
    """
    rng = np.random.default_rng(V)
    arrays = {
        "logits": jnp.asarray(3 * rng.normal(size=(R, T, V)), dtype),
        "targets": jnp.asarray(rng.integers(0, last or V, (R, T)), jnp.int32),
        "g": jnp.asarray(rng.normal(size=(R, T)), jnp.float32).at[0, :2].set(0),
        "e": jnp.asarray(rng.normal(size=(R, T)), jnp.float32).at[0, 1:3].set(0),
    }
    if with_where:
        where = rng.random((R, T)) < 0.4
        # devices with no token at all, however the tokens are split
        where[3], where[:, 5] = False, False
        arrays["where"] = jnp.asarray(where)
        arrays["logits"] = jnp.where(where[..., None], arrays["logits"], jnp.nan)
        arrays["targets"] = jnp.where(where, arrays["targets"], -100)
    if temperatures:
        arrays["temperature"] = jnp.asarray(rng.uniform(0.5, 2, (R, T)), jnp.float32)
    if nucleus:
        arrays["nucleus_ids"] = jnp.asarray(rng.integers(-1, last or V, (R, T, V // 5)), jnp.int32)
    return arrays


def call_logits(parallel, arrays, **options):
    options |= {
        name: arrays[name] for name in ("where", "nucleus_ids", "temperature") if name in arrays
    }
    if parallel == "reference":
        return reference_from_logits(arrays["logits"], arrays["targets"], **options)
    return log_probs_from_logits(arrays["logits"], arrays["targets"], parallel=parallel, **options)


def check(meshes, arrays, tolerances=F32, **options):
    parallels = [make_parallel_mesh(mesh) if isinstance(mesh, str) else mesh for mesh in meshes]
    options = {"entropy": "bonus", **options}
    check_head(parallels, arrays, ("logits",), call=call_logits, **tolerances, **options)


@pytest.mark.nightly
def test_every_factoring():
    check([None, *factorings(8)], logits_arrays(1000))


def test_everything_at_once():
    arrays = logits_arrays(1000, with_where=True, nucleus=True, last=990)
    check([None, "dp=8", "tp=8", MIXED], arrays, vocab_size=990, temperature=0.7)


OPTIONS = {
    "plain": ({}, {}),
    "temperature": ({}, {"temperature": 0.3}),
    "temperatures": ({"temperatures": True, "with_where": True}, {}),
    "where": ({"with_where": True}, {}),
    "nucleus, where": ({"nucleus": True, "with_where": True}, {}),
    "padding": ({"last": 90}, {"vocab_size": 90}),
    "no entropy": ({}, {"entropy": "none"}),
    "entropy as a metric": ({}, {"entropy": "metric"}),
    "nucleus, entropy as a metric": ({"nucleus": True}, {"entropy": "metric"}),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    of_arrays, options = OPTIONS[name]
    check([MIXED], logits_arrays(104, **of_arrays), **options)


@pytest.mark.parametrize("name", ["plain", "nucleus, where"])
def test_bf16(name):
    of_arrays, options = OPTIONS[name]
    rounded_once = {"rtol": 2**-8, "atol": 1e-6}
    check([None, MIXED], logits_arrays(104, dtype="bfloat16", **of_arrays), rounded_once, **options)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["plain", "nucleus, where", "padding", "temperatures"])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_vocabulary_that_the_tensor_axis_does_not_divide(name, explicit):
    """Such logits cannot be sharded over the axis.

    Each device works on a window of columns; the last one overlaps.
    """
    of_arrays, options = OPTIONS[name]
    meshes = [make_parallel_mesh(mesh, explicit=explicit) for mesh in ("dp=2,cp=4", MIXED, "tp=8")]
    check(meshes, logits_arrays(97, **of_arrays), **options)


@pytest.mark.parametrize("V", [3, 9, 49])
def test_fewer_columns_than_fill_all_windows(V):
    """Windows of ceil(V / tp) columns may end before the last device, whose columns are all
    another's.
    """
    check([make_parallel_mesh(mesh) for mesh in ("dp=2,tp=4", "tp=8")], logits_arrays(V))


def test_minus_zero_is_as_likely_as_zero():
    stats = log_probs_from_logits(
        jnp.array([[[0.0, -0.0]] * 2]), jnp.array([[0, 1]]), logit_stats=("accuracy",)
    )
    assert stats.accuracy.tolist() == [[1, 1]]


def test_logits_that_are_whole_in_a_users_shard_map():
    arrays = logits_arrays(97)
    parallel = make_parallel_mesh(MIXED)
    specs = (P("dp", "cp"), *[parallel.tokens_spec] * 3)

    def inside(logits, targets, g, e):
        def loss(logits):
            stats = log_probs_from_logits(logits, targets, parallel=parallel.axes, entropy="bonus")
            return jax.lax.psum((stats.log_probs * g + stats.entropy * e).sum(), ("dp", "cp"))

        return jax.grad(loss)(logits)

    run = jax.jit(jax.shard_map(inside, mesh=parallel.mesh, in_specs=specs, out_specs=specs[0]))
    got = run(*(arrays[name] for name in ("logits", "targets", "g", "e")))
    _, expected = truth(call_logits, arrays, ("logits",), entropy="bonus")
    assert_trees_close(got, expected["logits"], **F32)


@pytest.mark.parametrize("name", ["plain", "nucleus, where"])
def test_explicit_axes(name):
    of_arrays, options = OPTIONS[name]
    arrays = logits_arrays(104, **of_arrays)
    parallel = make_parallel_mesh(MIXED, explicit=True)
    check([parallel], arrays, **options)
    sharded = {
        **arrays,
        "logits": jax.device_put(arrays["logits"], parallel.sharding(parallel.logits_spec)),
    }
    check([parallel], sharded, **options)


def test_inside_a_users_shard_map():
    """Gradients are taken outside and inside of the shard_map."""
    parallel = make_parallel_mesh(MIXED)
    arrays = logits_arrays(104)
    P = jax.sharding.PartitionSpec
    axes = ShardAxes("dp", "cp", "tp")
    tokens = parallel.tokens_spec
    logits = parallel.logits_spec
    args = [arrays[name] for name in ("logits", "targets", "g", "e")]

    def total(logits, targets, g, e):
        stats = log_probs_from_logits(logits, targets, parallel=axes, entropy="bonus")
        return jax.lax.psum((stats.log_probs * g + stats.entropy * e).sum(), axes.tokens)

    def mapped(fn, out_specs):
        return jax.shard_map(
            fn, mesh=parallel.mesh, in_specs=(logits, tokens, tokens, tokens), out_specs=out_specs
        )

    expected = jax.jit(
        lambda a: with_gradients(call_logits, None, a, ("logits",), entropy="bonus")
    )(arrays)[1]
    outside = jax.jit(jax.grad(mapped(total, P())))(*args)
    inside = jax.jit(mapped(jax.grad(total), logits))(*args)
    assert_trees_close([outside, inside], [expected["logits"]] * 2, **F32)


def test_other_axis_names():
    """MaxText's: tokens over data and fsdp, two axes for the vocabulary."""
    mesh = jax.make_mesh((2, 1, 1, 2, 2), ("data", "fsdp", "context", "tensor", "tensor_transpose"))
    roles = {
        "data": ("data", "fsdp"),
        "context": "context",
        "tensor": ("tensor", "tensor_transpose"),
    }
    check([ParallelMesh(mesh, **roles)], logits_arrays(104, with_where=True))


@pytest.mark.parametrize("mesh", [None, MIXED])
def test_nothing_in_masked_positions_or_padded_columns_matters(mesh):
    arrays = logits_arrays(104, with_where=True, last=97)
    parallel = mesh and make_parallel_mesh(mesh)
    run = jax.jit(
        lambda a: with_gradients(
            call_logits, parallel, a, ("logits",), entropy="bonus", vocab_size=97
        )
    )
    clean = run({**arrays, "logits": jnp.where(arrays["where"][..., None], arrays["logits"], 0)})
    masked = ~np.asarray(arrays["where"])
    for spoiler in (np.nan, -np.inf, np.inf, 1e38):
        spoiled = jnp.where(masked[..., None], spoiler, arrays["logits"]).at[..., 97:].set(spoiler)
        found = run({**arrays, "logits": spoiled})
        assert_trees_close(found, clean, 0, 0)
        for leaf in (*jax.tree.leaves(found), found[1]["logits"]):
            np.testing.assert_array_equal(leaf[masked], 0)
        np.testing.assert_array_equal(found[1]["logits"][..., 97:], 0)


@pytest.mark.parametrize("mesh", [None, MIXED])
def test_nothing_in_a_row_without_cotangent_matters(mesh):
    parallel = mesh and make_parallel_mesh(mesh)
    arrays = logits_arrays(104)

    def without_row(parallel, arrays, **options):
        return jax.tree.map(lambda x: x.at[2].set(0), call_logits(parallel, arrays, **options))

    run = jax.jit(lambda a: with_gradients(without_row, parallel, a, ("logits",), entropy="bonus"))
    clean = run(arrays)
    np.testing.assert_array_equal(clean[1]["logits"][2], 0)
    targets = arrays["targets"].at[2].set(-100)
    for spoiler in (np.nan, -np.inf, np.inf):
        found = run({**arrays, "targets": targets, "logits": arrays["logits"].at[2].set(spoiler)})
        assert_trees_close(found, clean, 0, 0)


@pytest.mark.parametrize("mesh", [None, MIXED])
@pytest.mark.parametrize("nucleus", [False, True])
def test_a_target_outside_the_vocabulary_is_nan(mesh, nucleus):
    """Its log-prob and gradient are NaN; its entropy and every other token are as they were."""
    parallel = mesh and make_parallel_mesh(mesh)
    arrays = logits_arrays(104, last=97, nucleus=nucleus)
    run = jax.jit(
        lambda a: with_gradients(
            call_logits, parallel, a, ("logits",), entropy="bonus", vocab_size=97
        )
    )
    clean, clean_gradients = run(arrays)
    others = np.ones((R, T), bool)
    others[4, 3] = False
    for target in (-1, -100, 97, 103, 2**31 - 1):
        stats, gradients = run({**arrays, "targets": arrays["targets"].at[4, 3].set(target)})
        assert np.isnan(stats.log_probs[4, 3]), target
        assert np.isnan(gradients["logits"][4, 3]).any(), target
        assert_trees_close(stats.log_probs[others], clean.log_probs[others], 0, 0)
        assert_trees_close(stats.entropy, clean.entropy, 0, 0)
        assert_trees_close(gradients["logits"][others], clean_gradients["logits"][others], 0, 0)


def test_vmap_on_one_device():
    arrays = logits_arrays(97)

    def one(logits, targets):
        return log_probs_from_logits(logits, targets, entropy="metric")

    batched = jax.jit(jax.vmap(one))(arrays["logits"][:, None], arrays["targets"][:, None])
    expected = jax.jit(one)(arrays["logits"], arrays["targets"])
    assert_trees_close(jax.tree.map(lambda x: x[:, 0], batched), expected, **F32)


@pytest.mark.nightly
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("V", [104, 1000, 4096])
@pytest.mark.parametrize("mesh", factorings(8))
def test_full_table(mesh, V, dtype, explicit):
    tolerances = F32 if dtype == "float32" else {"rtol": 2**-8, "atol": 1e-6}
    for of_arrays, options in OPTIONS.values():
        parallel = make_parallel_mesh(mesh, explicit=explicit)
        check([parallel], logits_arrays(V, dtype=dtype, **of_arrays), tolerances, **options)
