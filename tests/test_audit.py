"""The audit against programs whose collectives, bytes and flops can be counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import call_head, head_arrays
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import make_parallel_mesh
from sharding.audit import Collective, audit
from sharding.flops import Flops, count_flops

PARALLEL = make_parallel_mesh("dp=2,cp=2,tp=2")
SPEC = P("dp", ("cp", "tp"))
X = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=PARALLEL.sharding(SPEC))  # [8, 8] on a device: 256 bytes


def audited(fn, out_specs=SPEC, x=X):
    return audit(jax.shard_map(fn, mesh=PARALLEL.mesh, in_specs=SPEC, out_specs=out_specs), x)


def scattered(x, axis):
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)


def swap(x):
    return lax.ppermute(x, "tp", [(0, 1), (1, 0)])


COUNTED = {
    "psum": (lambda x: lax.psum(x, "dp"), P(None, ("cp", "tp")), "all-reduce", ("dp",), 256),
    "psum over two axes": (lambda x: lax.psum(x, ("dp", "tp")), P(None, "cp"), "all-reduce", ("dp", "tp"), 256),
    "psum over all": (lambda x: lax.psum(x, ("dp", "cp", "tp")), P(), "all-reduce", ("dp", "cp", "tp"), 256),
    "pmax": (lambda x: lax.pmax(x[0], "cp"), P(("dp", "tp")), "all-reduce", ("cp",), 32),
    "all_gather": (
        lambda x: lax.all_gather(x, "tp", axis=0, tiled=True),
        P(("dp", "tp"), "cp"),
        "all-gather",
        ("tp",),
        512,
    ),
    "psum_scatter": (lambda x: scattered(x, "cp"), P(("dp", "cp"), "tp"), "reduce-scatter", ("cp",), 256),
    "ppermute": (swap, SPEC, "collective-permute", ("tp",), 256),
    "all_to_all": (lambda x: lax.all_to_all(x, "cp", 0, 1, tiled=True), SPEC, "all-to-all", ("cp",), 256),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_collective_by_itself(name):
    fn, out_specs, op, axes, size = COUNTED[name]
    assert audited(fn, out_specs).collectives == (Collective(op, axes, size, False),)


def test_a_collective_in_a_loop():
    found = audited(lambda x: lax.scan(lambda c, _: (swap(c) + 1, None), x, length=3)[0])
    assert found.collectives == (Collective("collective-permute", ("tp",), 256, True),)
    nested = audited(lambda x: lax.fori_loop(0, 2, lambda i, c: lax.fori_loop(0, 2, lambda j, c: swap(c * c), c), x))
    assert nested.collectives == (Collective("collective-permute", ("tp",), 256, True),)


def test_bytes_follow_the_dtype():
    x = jax.ShapeDtypeStruct(X.shape, jnp.int8, sharding=X.sharding)
    assert [c.bytes for c in audited(swap, x=x).collectives] == [64]


def test_several_collectives_and_none():
    found = audited(lambda x: swap(x) + lax.pmax(x.sum(), ("dp", "cp")))
    assert {(c.op, c.axes, c.bytes) for c in found.collectives} == {
        ("collective-permute", ("tp",), 256),
        ("all-reduce", ("dp", "cp"), 4),
    }
    assert audited(lambda x: x * 2).collectives == ()


def over_its_second_axis(shape, mesh):
    """The axes of `mesh` that a sum over an axis of another mesh of its devices is found to cross."""
    own = Mesh(mesh.devices.reshape(shape), ("a", "b"))
    x = jax.ShapeDtypeStruct((24, 24), jnp.float32, sharding=NamedSharding(own, P("a", "b")))
    summed = jax.shard_map(lambda x: lax.psum(x, "b"), mesh=own, in_specs=P("a", "b"), out_specs=P("a"))
    return [c.axes for c in audit(summed, x, mesh=mesh).collectives]


def test_groups_that_are_no_product_of_axes_have_none():
    assert over_its_second_axis((2, 4), PARALLEL.mesh) == [("cp", "tp")]
    of_six = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("dp", "tp"))
    assert over_its_second_axis((2, 3), of_six) == [None]


def test_bytes_of_a_device():
    found = audited(lambda x: jnp.sort(jnp.sin(x) @ x.T, axis=1) @ x)
    assert (found.argument_bytes, found.output_bytes) == (256, 256)
    assert found.temp_bytes >= 256
    assert found.flops.low == found.flops.high == 2 * 2 * 8**3


def test_it_reads_as_a_table():
    found = audited(
        lambda x: lax.scan(lambda c, _: (swap(c), None), lax.psum(x @ x, "dp"), length=3)[0], P(None, ("cp", "tp"))
    )
    text = str(found)
    assert text.startswith("temporaries ")
    assert "0.000 GFLOP" in text
    assert "all-reduce over dp: 0.000 MiB" in text.splitlines()
    assert "collective-permute over tp: 0.000 MiB in a loop" in text.splitlines()


def test_arguments_on_two_meshes_are_refused():
    other = make_parallel_mesh("dp=8")
    y = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other.sharding(P("dp")))
    with pytest.raises(ValueError, match="args: got arrays on 2 meshes, expected one, or mesh="):
        audit(lambda x, y: (x * 2, y), X, y)


# Flops

A = jnp.ones((4, 4))
PRODUCT = 2 * 4**3


def turns(length):
    """A product, `length` times."""
    return lambda a: lax.scan(lambda c, _: (c @ a, None), a, length=length)[0]


def until(stop):
    return lambda a: lax.while_loop(lambda c: stop(*c), lambda c: (c[0] + 1, c[1] @ a), (0, a))[1]


@pytest.mark.parametrize(
    ("fn", "low", "high"),
    [
        (lambda a: a @ a, 1, 1),
        (jax.jit(lambda a: a @ a @ a), 2, 2),
        (turns(5), 5, 5),
        (lambda a: lax.scan(lambda c, _: (turns(3)(c), None), a, length=5)[0], 15, 15),
        (lambda a: lax.fori_loop(0, 7, lambda i, c: c @ a, a), 7, 7),
        (jax.remat(lambda a: a @ a), 1, 1),
        (jax.vmap(lambda row: row @ A), 1, 1),
        (jax.grad(lambda a: (a @ A).sum()), 2, 2),
        (lambda a: lax.cond(a[0, 0] > 0, turns(2), turns(6), a), 2, 6),
        (lambda a: lax.cond(a[0, 0] > 0, lambda a: a, turns(6), a), 0, 6),
        (until(lambda i, a: a[0, 0] < 9), 0, float("inf")),
        (until(lambda i, a: 2 * i < 9), 0, float("inf")),
        (until(lambda i, a: (i < 8) & (a[0, 0] < 9)), 0, 8),
        (until(lambda i, a: (i < a[0, 0]) & (i < 8) & (i < 6)), 0, 6),
        (lambda a: turns(3)(until(lambda i, a: (i < 8) & (a[0, 0] < 9))(a)), 3, 11),
        (lambda a: lax.while_loop(lambda i: i < a[0, 0], lambda i: i + 1, 0.0), 0, 0),
    ],
)
def test_flops(fn, low, high):
    assert count_flops(jax.make_jaxpr(fn)(A)) == Flops(low * PRODUCT, high * PRODUCT)


def test_flops_of_batched_and_rectangular_products():
    product = lambda a, b: jnp.einsum("bij,bkj->bik", a, b)  # noqa: E731
    assert count_flops(jax.make_jaxpr(product)(jnp.ones((3, 4, 5)), jnp.ones((3, 7, 5)))).low == 2 * 3 * 4 * 5 * 7


def test_flops_are_of_one_device():
    call = jax.shard_map(lambda x: x @ x, mesh=PARALLEL.mesh, in_specs=SPEC, out_specs=SPEC)
    assert count_flops(jax.make_jaxpr(call)(jnp.ones((16, 32)))).low == 2 * 8**3


def test_flops_of_loops_that_a_mask_ends_are_bounded():
    """On a mesh the bound of the loop is a constant that was made to vary."""
    # 1026 columns in three even blocks, 513 of them on a device in two
    for parallel, tokens, columns in ((None, 64, 3 * 384), (PARALLEL, 16, 2 * 384)):
        arrays = head_arrays(1026, with_where=True)
        found = count_flops(jax.make_jaxpr(lambda a, p=parallel: call_head(p, a))(arrays))
        assert found.low == 0
        assert found.high == 2 * tokens * 12 * columns
        everything = {k: x for k, x in arrays.items() if k != "where"}
        assert count_flops(jax.make_jaxpr(lambda a, p=parallel: call_head(p, a))(everything)).low == found.high
