"""Meshes and the roles of their axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from token_sums import total

from sharding import ParallelMesh, ShardAxes, make_parallel_mesh, shard_call

AUTO = (AxisType.Auto,) * 4
X = jnp.arange(64.0).reshape(8, 8)


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
    assert make_parallel_mesh("dp=1,cp=1,tp=1", devices=jax.devices()[:1]).hidden_spec == P(
        None, None, None
    )


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
        r"mesh: got axes dp=2, expert=2, tp=2, expected a role for each; 'expert' has"
        r" none.*replicated=\('expert',\)"
    )
    with pytest.raises(ValueError, match=message):
        ParallelMesh(mesh)
    assert ParallelMesh(mesh, replicated="expert").axes.replicated == ("expert",)
    assert ParallelMesh(jax.make_mesh((1, 8), ("expert", "tp"), AUTO[:2])).tensor == ("tp",)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_sum_over_devices_needs_to_know_the_axes(check_vma):
    """The axes of a shard_map around a per-shard call, where its arrays differ along them, or
    may.
    """

    def inside(axes, x):
        axes.check_complete("the mean", x)
        return x

    def run(axes):
        return jax.shard_map(
            lambda x: inside(axes, x),
            mesh=MESH,
            in_specs=P("dp"),
            out_specs=P("dp"),
            check_vma=check_vma,
        )(X)

    with pytest.raises(
        ValueError,
        match=r"parallel: got no role for mesh axis 'dp' .* the mean would be that of one",
    ):
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
        (
            {"data": "batch"},
            r"data: got axis 'batch', expected one of the mesh's axes \('dp', 'cp', 'tp'\)",
        ),
        ({"fsdp": "fsdp"}, "fsdp: got axis 'fsdp', expected one of"),
        ({"tensor": ("tp", "tq")}, "tensor: got axis 'tq', expected one of"),
        (
            {"context": "tp", "tensor": "tp"},
            "data, context, tensor, replicated: got .* expected no axis in two roles",
        ),
        ({"data": "dp", "replicated": "dp"}, "expected no axis in two roles"),
        ({"fsdp": "tp"}, "expected no axis in two roles"),
        (
            {"context_layout": "spiral"},
            "context_layout: got 'spiral', expected one of contiguous, zigzag",
        ),
    ],
)
def test_roles_that_cannot_be(roles, message):
    with pytest.raises(ValueError, match=message):
        ParallelMesh(MESH, **roles)


def test_shard_axes_that_cannot_be():
    with pytest.raises(ValueError, match="expected no axis in two roles"):
        ShardAxes(data="a", tensor="a")
    with pytest.raises(
        ValueError,
        match=r"fsdp: got \('f',\), expected a subset of the data and context axes \('a',\)",
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
            (
                "mesh: got axis 'pp', expected one of dp, data, replica, cp, context, sequence, sp,"
                " tp, tensor, model, f"
            ),
        ),
    ],
)
def test_descriptions_that_cannot_be(text, message):
    with pytest.raises(ValueError, match=message):
        make_parallel_mesh(text)
