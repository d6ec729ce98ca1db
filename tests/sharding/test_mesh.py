"""Meshes, the roles of their axes, `shard_call`, and `assert_mesh_invariant`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import compilations

from sharding import ParallelMesh, ShardAxes, make_parallel_mesh, shard_call, vary, vary_like, varying
from sharding.testing import assert_mesh_invariant, assert_trees_close, emulate_devices, factorings

AUTO = (AxisType.Auto,) * 4
X = jnp.arange(64.0).reshape(8, 8)


def total(parallel, x):
    """A sum over all tokens, with each device's share of it."""

    def per_shard(axes, x):
        return axes.psum(x.sum(), axes.tokens)

    return shard_call("total", per_shard, parallel, {"x": x}, lambda p: ([p.tokens_spec], P()))


# Roles


def test_roles_of_a_described_mesh():
    p = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag")
    assert (p.data, p.context, p.tensor, p.fsdp) == (("dp",), ("cp",), ("tp",), ())
    assert (p.data_size, p.context_size, p.tensor_size) == (2, 2, 2)
    assert p.axes == ShardAxes("dp", "cp", "tp", context_layout="zigzag")
    assert p.axes.tokens == ("dp", "cp")
    assert not p.is_explicit
    assert make_parallel_mesh("tp=8", explicit=True).is_explicit


def test_axes_of_size_one_vanish():
    p = make_parallel_mesh("dp=8,cp=1,tp=1")
    assert (p.data, p.context, p.tensor) == (("dp",), (), ())
    assert p.tokens_spec == P("dp", None)
    assert p.kernel_spec() == P(None, None)
    assert make_parallel_mesh("dp=1,cp=1,tp=1", devices=jax.devices()[:1]).hidden_spec == P(None, None, None)


def test_roles_by_convention():
    mesh = jax.make_mesh((2, 1, 2, 2), ("replica", "fsdp", "sequence", "model"), AUTO)
    p = ParallelMesh(mesh)
    assert (p.data, p.fsdp, p.context, p.tensor) == (("replica",), (), ("sequence",), ("model",))
    assert ParallelMesh(mesh, context=None, replicated="sequence").context == ()
    p = ParallelMesh(mesh, data=("sequence", "replica"))  # so no axis is left for the context role
    assert (p.data, p.context) == (("sequence", "replica"), ())
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "dp", "tp"), AUTO[:3])
    assert ParallelMesh(mesh).data == ("fsdp", "dp")  # in the order of the mesh
    assert ParallelMesh(mesh, data="dp").data == ("dp", "fsdp")
    assert ParallelMesh(mesh, fsdp=None, data=("dp", "fsdp")).kernel_spec() == P(None, "tp")


def test_one_axis_may_shard_positions_and_a_kernel():
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "context", "tensor"), AUTO[:3])
    p = ParallelMesh(mesh, fsdp=("fsdp", "context"))
    assert (p.data, p.context) == (("fsdp",), ("context",))
    assert p.kernel_spec() == P(("fsdp", "context"), "tensor")


def test_an_axis_without_a_role_is_an_error():
    mesh = jax.make_mesh((2, 2, 2), ("dp", "expert", "tp"), AUTO[:3])
    message = (
        r"mesh: got axes dp=2, expert=2, tp=2, expected a role for each; 'expert' has none.*replicated=\('expert',\)"
    )
    with pytest.raises(ValueError, match=message):
        ParallelMesh(mesh)
    assert ParallelMesh(mesh, replicated="expert").axes.replicated == ("expert",)
    assert ParallelMesh(jax.make_mesh((1, 8), ("expert", "tp"), AUTO[:2])).tensor == ("tp",)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_sum_over_devices_needs_to_know_the_axes(check_vma):
    """The axes of a shard_map around a per-shard call, where its arrays differ along them, or may."""

    def inside(axes, x):
        axes.check_complete("the mean", x)
        return x

    def run(axes):
        return jax.shard_map(
            lambda x: inside(axes, x), mesh=MESH, in_specs=P("dp"), out_specs=P("dp"), check_vma=check_vma
        )(X)

    with pytest.raises(ValueError, match=r"parallel: got no role for mesh axis 'dp' .* the mean would be that of one"):
        run(ShardAxes())
    if check_vma:
        run(ShardAxes(data="dp"))
    run(ShardAxes(data="dp", replicated=("cp", "tp")))
    with pytest.raises(ValueError, match="got no role for mesh axis"):
        jax.pmap(lambda x: inside(ShardAxes(), x))(X)
    inside(ShardAxes(), X)


def test_default_names_that_the_mesh_lacks_vanish():
    p = ParallelMesh(jax.make_mesh((8,), ("tp",)))
    assert (p.data, p.context, p.tensor) == ((), (), ("tp",))


def test_maxtext_axes():
    mesh = jax.make_mesh((2, 2, 1, 2), ("data", "fsdp", "context", "tensor"), AUTO)
    p = ParallelMesh(mesh)
    assert p == ParallelMesh(mesh, data="data", fsdp="fsdp", context="context", tensor="tensor")
    assert (p.data, p.fsdp, p.context, p.tensor) == (("data", "fsdp"), ("fsdp",), (), ("tensor",))
    assert p.tokens_spec == P(("data", "fsdp"), None)
    assert p.logits_spec == P(("data", "fsdp"), None, "tensor")
    assert p.kernel_spec("hv") == P("fsdp", "tensor")
    assert p.kernel_spec("vh") == P("tensor", "fsdp")
    assert float(jax.jit(lambda x: total(p, x))(X)) == X.sum()


def test_tunix_axes():
    p = ParallelMesh(jax.make_mesh((4, 2), ("fsdp", "tp")))
    assert (p.data, p.context, p.tensor) == (("fsdp",), (), ("tp",))
    assert p.kernel_spec() == P("fsdp", "tp")
    assert float(jax.jit(lambda x: total(p, x))(X)) == X.sum()


def test_specs():
    p = make_parallel_mesh("dp=2,cp=2,tp=2")
    assert p.rows_spec == P("dp")
    assert p.hidden_spec == P("dp", "cp", None)
    q = make_parallel_mesh("dp=2,cp=2,tp=2", sequence_parallel=True)
    assert q.hidden_spec == P("dp", ("cp", "tp"), None)
    assert q.tokens_spec == p.tokens_spec
    assert p.sharding(p.rows_spec).mesh is p.mesh


def test_a_role_of_several_axes():
    mesh = jax.make_mesh((2, 2, 1, 2), ("a", "b", "c", "d"), AUTO)
    p = ParallelMesh(mesh, data=("a", "b"), context=("c", "d"), tensor=None)
    assert (p.data_size, p.context_size, p.context) == (4, 2, ("d",))

    def place(axes, x):
        return jnp.zeros_like(x, int) + axes.index(axes.data)

    index = shard_call("index", place, p, {"x": X}, lambda p: ([p.tokens_spec], p.tokens_spec))
    np.testing.assert_array_equal(index[:, 0], [0, 0, 1, 1, 2, 2, 3, 3])


MESH = jax.make_mesh((2, 2, 2), ("dp", "cp", "tp"), AUTO[:3])


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"data": "batch"}, r"data: got axis 'batch', expected one of the mesh's axes \('dp', 'cp', 'tp'\)"),
        ({"fsdp": "fsdp"}, "fsdp: got axis 'fsdp', expected one of"),
        ({"tensor": ("tp", "tq")}, "tensor: got axis 'tq', expected one of"),
        ({"context": "tp", "tensor": "tp"}, "data, context, tensor, replicated: got .* expected no axis in two roles"),
        ({"data": "dp", "replicated": "dp"}, "expected no axis in two roles"),
        ({"fsdp": "tp"}, "expected no axis in two roles"),
        ({"context_layout": "spiral"}, "context_layout: got 'spiral', expected one of contiguous, zigzag"),
    ],
)
def test_roles_that_cannot_be(roles, message):
    with pytest.raises(ValueError, match=message):
        ParallelMesh(MESH, **roles)


def test_shard_axes_that_cannot_be():
    with pytest.raises(ValueError, match="expected no axis in two roles"):
        ShardAxes(data="a", tensor="a")
    with pytest.raises(
        ValueError, match=r"fsdp: got \('f',\), expected a subset of the data and context axes \('a',\)"
    ):
        ShardAxes(data="a", fsdp="f")
    with pytest.raises(ValueError, match="context_layout: got 'x', expected one of"):
        ShardAxes(context_layout="x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,cp=2", r"mesh: got sizes 2\*2=4 in 'dp=2,cp=2', expected 8 devices"),
        ("dp=16", "mesh: got sizes 16=16 in 'dp=16', expected 8 devices"),
        ("", "mesh: got '' in '', expected text like"),
        ("dp", "mesh: got 'dp' in 'dp', expected text like"),
        ("dp=eight", "mesh: got 'dp=eight'"),
        ("dp=-8", "mesh: got 'dp=-8'"),
        ("dp=0,tp=8", "mesh: got 'dp=0'"),
        ("dp=2.0,tp=4", "mesh: got 'dp=2.0'"),
        ("dp=2,dp=4", "mesh: got 'dp=4' in 'dp=2,dp=4'"),
        (
            "pp=8",
            "mesh: got axis 'pp', expected one of dp, data, replica, cp, context, sequence, sp, tp, tensor, model, f",
        ),
    ],
)
def test_descriptions_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        make_parallel_mesh(text)


# shard_call


@pytest.mark.every(5)
@pytest.mark.parametrize("mesh", [None, *factorings(8)])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_sum_on_any_mesh(mesh, explicit):
    parallel = mesh and make_parallel_mesh(mesh, explicit=explicit)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: total(parallel, x)))(X)
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
    mapped = jax.shard_map(lambda x: total(axes, x), mesh=MESH, in_specs=p.tokens_spec, out_specs=P())
    assert jax.jit(mapped)(X) == X.sum()


def test_check_vma_off_is_noticed():
    axes, p = ShardAxes("dp", "cp", "tp"), ParallelMesh(MESH)
    mapped = jax.shard_map(lambda x: total(axes, x), mesh=MESH, in_specs=p.tokens_spec, out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match="got check_vma=False over axis 'dp', expected check_vma=True"):
        jax.jit(mapped)(X)


@pytest.mark.parametrize("explicit", [False, True])
def test_vmap_of_a_mesh_level_call(explicit):
    p = make_parallel_mesh("dp=2,cp=2,tp=2", explicit=explicit)
    stacked = jnp.stack([X, 2 * X])
    np.testing.assert_array_equal(jax.vmap(lambda x: total(p, x))(stacked), [X.sum(), 2 * X.sum()])
    gradients = jax.jit(jax.vmap(jax.grad(lambda x: total(p, x) ** 2)))(stacked)
    np.testing.assert_array_equal(gradients, np.broadcast_to(np.array([[[4032]], [[8064]]]), stacked.shape))


def powers(axes, power, x):
    return axes.psum((x**power).sum(), axes.tokens)


def test_a_second_eager_call_compiles_nothing():
    p = ParallelMesh(MESH)

    def run(power, x):
        return shard_call("powers", powers, p, {"x": x}, lambda p: ([p.tokens_spec], P()), static=power)

    assert compilations(lambda: run(2, X)) > 0
    assert compilations(lambda: run(2, X)) == compilations(lambda: run(2, X)) == 0
    assert compilations(lambda: run(3, X)) > 0
    assert run(2, X) == (X**2).sum()


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_how_often_a_call_is_traced(mesh):
    traced, p = [], mesh and make_parallel_mesh(mesh)

    def counted(axes, x):
        traced.append(x)
        return axes.psum((x * x).sum(), axes.tokens)

    def run(x):
        return shard_call("counted", counted, p, {"x": x}, lambda p: ([p.tokens_spec], P()))

    def times(fn):
        traced.clear()
        fn()
        return len(traced)

    assert times(lambda: run(X)) == 1
    assert times(lambda: (run(X), jax.vmap(run)(X[None]), jax.grad(run)(X))) <= 1  # vmap has another shape
    assert times(lambda: jax.jit(jax.grad(run))(X)) == 1


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_a_gradient_within_a_jit_does_not_trace_the_primal_function(mesh):
    @jax.custom_vjp
    def square(x):
        raise AssertionError("traced in vain")

    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))

    def per_shard(axes, x):
        return axes.psum(square(x).sum(), axes.tokens)

    p = mesh and make_parallel_mesh(mesh)
    total = partial(shard_call, "f", per_shard, p, specs=lambda p: ([p.tokens_spec], P()))
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: total({"x": x})))(X), 2 * X)


def test_vmap_of_a_per_shard_call():
    axes, p = ShardAxes("dp", "cp", "tp"), ParallelMesh(MESH)
    batched = jax.vmap(lambda x: total(axes, x))
    mapped = jax.shard_map(batched, mesh=MESH, in_specs=P(None, *p.tokens_spec), out_specs=P())
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.stack([X, 2 * X])), [X.sum(), 2 * X.sum()])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((7, 8), r"x: got shape \(7, 8\) in total, expected dimension 0 to be a multiple of 2, .* \('dp',\)"),
        ((8, 7), r"x: got shape \(8, 7\) in total, expected dimension 1 to be a multiple of 2, .* \('cp',\)"),
    ],
)
def test_dimensions_that_the_mesh_does_not_divide(shape, message):
    with pytest.raises(ValueError, match=message):
        total(ParallelMesh(MESH), jnp.ones(shape))


def test_a_spec_with_an_axis_that_the_mesh_lacks():
    def call():
        return shard_call("f", lambda axes, x: x, ParallelMesh(MESH), {"x": X}, lambda p: ([P("pp")], P("dp")))

    with pytest.raises(ValueError, match=r"x: got spec P\('pp',?\) in f, expected axes of the mesh"):
        call()


def test_something_else_as_parallel():
    with pytest.raises(TypeError, match="parallel: got Mesh, expected ParallelMesh, ShardAxes or None"):
        total(MESH, X)


def test_explicit_meshes_reshard_what_arrives():
    p = make_parallel_mesh("dp=2,cp=2,tp=2", explicit=True)
    for spec in (P(), P("tp", "dp"), p.tokens_spec):
        assert jax.jit(lambda x: total(p, x))(jax.device_put(X, p.sharding(spec))) == X.sum()


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


# assert_mesh_invariant fails when it should


def test_factorings():
    assert len(factorings(8)) == len(set(factorings(8))) == 10
    assert all(np.prod([int(part[3:]) for part in mesh.split(",")]) == 8 for mesh in factorings(8))


def test_what_depends_on_the_mesh_is_found():
    def forgets_context(axes, x):
        share = axes.psum(x.sum(), axes.data)
        return lax.pmax(share, axes.context) if axes.context else share

    def fn(parallel, x):
        return shard_call("f", forgets_context, parallel, {"x": x}, lambda p: ([p.tokens_spec], P()))

    assert_mesh_invariant(fn, X, meshes=["dp=8", "dp=2,tp=4"])
    with pytest.raises(AssertionError, match=r"mesh dp=1,cp=2,tp=4 at the result: 1 of 1 differ"):
        assert_mesh_invariant(fn, X)
    assert assert_mesh_invariant(total, X) == X.sum()


def test_wrong_gradients_are_found():
    """Right values, and gradients that are too large by the size of an axis."""

    def twice(axes, x):
        x = x + (axes.size(axes.tensor) - 1) * (x - lax.stop_gradient(x))
        return axes.psum(x.sum(), axes.tokens)

    def fn(parallel, x):
        return shard_call("f", twice, parallel, {"x": x}, lambda p: ([p.tokens_spec], P()))

    assert_mesh_invariant(fn, X)
    with pytest.raises(AssertionError, match=r"mesh .*tp=\d+ at \[1\]: 64 of 64 differ, .* got \d.0, expected 1.0"):
        assert_mesh_invariant(lambda parallel, x: jax.value_and_grad(lambda x: fn(parallel, x))(x), X)


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        ({"a": 1.0}, {"b": 1.0}, "here: got a tree"),
        ({"a": np.ones(2)}, {"a": np.ones(3)}, r"here at \['a'\]: got shape \(2,\), expected \(3,\)"),
        ([np.array([1.0, np.nan])], [np.ones(2)], r"here at \[0\]: 1 of 2 differ, most at \(1,\)"),
        ([np.array([1.0, 2e-3])], [np.array([1.0, 0.0])], r"off by 0.002"),
        ([np.array([1, 2])], [np.array([1, 3])], "1 of 2 differ"),
    ],
)
def test_trees_that_differ(got, expected, message):
    tree = jax.tree.map(np.asarray, (got, expected))
    with pytest.raises(AssertionError, match=message):
        assert_trees_close(*tree, atol=1e-3, rtol=1e-3, context="here")


def test_trees_that_agree():
    tree = {"a": np.array([1.0, np.nan, np.inf]), "b": jnp.ones(3, jnp.bfloat16), "c": np.arange(3), "d": None}
    assert_trees_close(tree, tree, 0, 0)
    assert_trees_close([np.array([1e6, 0.5])], [np.array([1e6, 0.0])], rtol=0, atol=1e-6)


def test_emulated_devices_are_checked():
    emulate_devices(8)
    with pytest.raises(RuntimeError, match="count: got 8 devices already in use, expected 4"):
        emulate_devices(4)
