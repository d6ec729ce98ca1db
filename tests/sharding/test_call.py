"""`shard_call` on meshes, on one device, within `jit`, `vmap` and a user's `shard_map`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import compilations
from token_sums import total

from sharding import (
    ParallelMesh,
    ShardAxes,
    make_parallel_mesh,
    shard_call,
    vary,
    vary_like,
    varying,
)
from sharding.testing import assert_trees_close, factorings

AUTO = (AxisType.Auto,) * 4
X = jnp.arange(64.0).reshape(8, 8)
MESH = jax.make_mesh((2, 2, 2), ("dp", "cp", "tp"), AUTO[:3])


@pytest.mark.every(5)
@pytest.mark.parametrize("mesh", [None, *factorings(8)])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_sum_on_any_mesh(mesh, explicit):
    parallel = mesh and make_parallel_mesh(mesh, explicit=explicit)
    value, gradient = jax.jit(jax.value_and_grad(partial(total, parallel)))(X)
    assert value == X.sum()
    np.testing.assert_array_equal(gradient, 1)


def test_none_stays_none_and_pytrees_pass():
    def per_shard(axes, x, missing, tree):
        assert missing is None
        return {"y": x + tree["a"]}, tree["b"]

    p = make_parallel_mesh("dp=2,cp=2,tp=2")

    def specs(p):
        return ([p.tokens_spec] * 3, ({"y": p.tokens_spec}, p.tokens_spec))

    args = {"x": X, "missing": None, "tree": {"a": X, "b": X}}
    for parallel in (None, p):
        found = shard_call("fn", per_shard, parallel, args, specs)
        assert_trees_close(found, ({"y": 2 * X}, X), 0, 0)


def test_inside_a_users_shard_map():
    axes = ShardAxes("dp", "cp", "tp")
    p = ParallelMesh(MESH)
    mapped = jax.shard_map(partial(total, axes), mesh=MESH, in_specs=p.tokens_spec, out_specs=P())
    assert jax.jit(mapped)(X) == X.sum()


def test_check_vma_off_is_noticed():
    axes = ShardAxes("dp", "cp", "tp")
    p = ParallelMesh(MESH)
    mapped = jax.shard_map(
        partial(total, axes), mesh=MESH, in_specs=p.tokens_spec, out_specs=P(), check_vma=False
    )
    with pytest.raises(
        ValueError, match="got check_vma=False over axis 'dp', expected check_vma=True"
    ):
        jax.jit(mapped)(X)


@pytest.mark.parametrize("explicit", [False, True])
def test_vmap_of_a_mesh_level_call(explicit):
    p = make_parallel_mesh("dp=2,cp=2,tp=2", explicit=explicit)
    stacked = jnp.stack([X, 2 * X])

    def squared(x):
        return total(p, x) ** 2

    sums = jax.vmap(partial(total, p))(stacked)
    np.testing.assert_array_equal(sums, [X.sum(), 2 * X.sum()])
    gradients = jax.jit(jax.vmap(jax.grad(squared)))(stacked)
    np.testing.assert_array_equal(
        gradients, np.broadcast_to(np.array([[[4032]], [[8064]]]), stacked.shape)
    )


def one_of_tokens(p):
    """Specs of one argument, an array of tokens, and of a scalar result."""
    return [p.tokens_spec], P()


def powers(axes, power, x):
    return axes.psum((x**power).sum(), axes.tokens)


def test_a_second_eager_call_compiles_nothing():
    p = ParallelMesh(MESH)

    def run(power, x):
        return shard_call("powers", powers, p, {"x": x}, one_of_tokens, static=power)

    square = partial(run, 2, X)
    assert compilations(square) > 0
    assert compilations(square) == compilations(square) == 0
    assert compilations(partial(run, 3, X)) > 0
    assert run(2, X) == (X**2).sum()


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_how_often_a_call_is_traced(mesh):
    traced = []
    p = mesh and make_parallel_mesh(mesh)

    def counted(axes, x):
        traced.append(x)
        return axes.psum((x * x).sum(), axes.tokens)

    def run(x):
        return shard_call("counted", counted, p, {"x": x}, one_of_tokens)

    def times(fn):
        traced.clear()
        fn()
        return len(traced)

    def again():
        return run(X), jax.vmap(run)(X[None]), jax.grad(run)(X)

    assert times(partial(run, X)) == 1
    assert times(again) == 0
    assert times(partial(jax.jit(jax.grad(run)), X)) == 1


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_a_gradient_within_a_jit_does_not_trace_the_primal_function(mesh):
    @jax.custom_vjp
    def square(x):
        raise AssertionError("traced in vain")

    def forward(x):
        return x * x, x

    def backward(x, g):
        return (2 * x * g,)

    square.defvjp(forward, backward)

    def per_shard(axes, x):
        return axes.psum(square(x).sum(), axes.tokens)

    p = mesh and make_parallel_mesh(mesh)

    def total(x):
        return shard_call("f", per_shard, p, {"x": x}, one_of_tokens)

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(X), 2 * X)


def test_vmap_of_a_per_shard_call():
    axes = ShardAxes("dp", "cp", "tp")
    p = ParallelMesh(MESH)
    batched = jax.vmap(partial(total, axes))
    mapped = jax.shard_map(batched, mesh=MESH, in_specs=P(None, *p.tokens_spec), out_specs=P())
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.stack([X, 2 * X])), [X.sum(), 2 * X.sum()])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (7, 8),
            (
                r"x: got shape \(7, 8\) in total, expected dimension 0 to be a multiple of 2, .*"
                r" \('dp',\)"
            ),
        ),
        (
            (8, 7),
            (
                r"x: got shape \(8, 7\) in total, expected dimension 1 to be a multiple of 2, .*"
                r" \('cp',\)"
            ),
        ),
    ],
)
def test_dimensions_that_the_mesh_does_not_divide(shape, message):
    with pytest.raises(ValueError, match=message):
        total(ParallelMesh(MESH), jnp.ones(shape))


def test_a_spec_with_an_axis_that_the_mesh_lacks():
    def itself(axes, x):
        return x

    def specs(p):
        return [P("pp")], P("dp")

    with pytest.raises(
        ValueError, match=r"x: got spec P\('pp',?\) in f, expected axes of the mesh"
    ):
        shard_call("f", itself, ParallelMesh(MESH), {"x": X}, specs)


def test_something_else_as_parallel():
    with pytest.raises(
        TypeError, match="parallel: got Mesh, expected ParallelMesh, ShardAxes or None"
    ):
        total(MESH, X)


def test_explicit_meshes_reshard_what_arrives():
    p = make_parallel_mesh("dp=2,cp=2,tp=2", explicit=True)
    for spec in (P(), P("tp", "dp"), p.tokens_spec):
        placed = jax.device_put(X, p.sharding(spec))
        assert jax.jit(partial(total, p))(placed) == X.sum()


def test_varying():
    def inside(x):
        assert varying(x) == {"dp", "cp"}
        assert varying(vary(x, ("tp", "dp"))) == {"dp", "cp", "tp"}
        assert varying(vary_like(jnp.zeros(()), {"a": x, "b": None})) == {"dp", "cp"}
        assert varying(jnp.zeros(())) == set()
        return lax.pmax(vary(x, ("tp",)), "tp")

    p = ParallelMesh(MESH)
    np.testing.assert_array_equal(
        jax.shard_map(inside, mesh=MESH, in_specs=p.tokens_spec, out_specs=p.tokens_spec)(X), X
    )


def test_an_array_on_one_device_beside_a_mesh_is_named():
    """As a parameter that was restored without a sharding.

    JAX named the library's own arguments.
    """
    mesh = make_parallel_mesh("dp=2,cp=2,tp=2")
    one = jax.device_put(X, jax.devices()[3])
    with pytest.raises(
        ValueError,
        match=r"^x: got an array on device 3 in total, expected all 8 devices of the mesh; ",
    ):
        total(mesh, one)
    assert total(mesh, X) == total(mesh, jax.device_put(X, mesh.sharding(P()))) == X.sum()


def test_arrays_of_numpy_compile_nothing_beside_the_call():
    """`jnp.asarray` compiled a program for each of their shapes."""
    total(None, np.ones((2, 3), np.float32))
    assert compilations(lambda: total(None, np.ones((3, 5), np.float32))) == 1
