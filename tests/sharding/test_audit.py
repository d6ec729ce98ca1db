"""The audit against programs whose collectives, bytes and flops can be counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import call_head, head_arrays
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import make_parallel_mesh, note
from sharding.audit import audit
from sharding.audit.flops import count_flops
from sharding.audit.results import Collective, Flops

PARALLEL = make_parallel_mesh("dp=2,cp=2,tp=2")
SPEC = P("dp", ("cp", "tp"))
# [8, 8] on a device: 256 bytes
X = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=PARALLEL.sharding(SPEC))


def audited(fn, out_specs=SPEC, x=X):
    return audit(jax.shard_map(fn, mesh=PARALLEL.mesh, in_specs=SPEC, out_specs=out_specs), x)


def scattered(x, axis):
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)


def swap(x):
    return lax.ppermute(x, "tp", [(0, 1), (1, 0)])


COUNTED = {
    "psum": (lambda x: lax.psum(x, "dp"), P(None, ("cp", "tp")), "all-reduce", ("dp",), 256),
    "psum over two axes": (
        lambda x: lax.psum(x, ("dp", "tp")),
        P(None, "cp"),
        "all-reduce",
        ("dp", "tp"),
        256,
    ),
    "psum over all": (
        lambda x: lax.psum(x, ("dp", "cp", "tp")),
        P(),
        "all-reduce",
        ("dp", "cp", "tp"),
        256,
    ),
    "pmax": (lambda x: lax.pmax(x[0], "cp"), P(("dp", "tp")), "all-reduce", ("cp",), 32),
    "all_gather": (
        lambda x: lax.all_gather(x, "tp", axis=0, tiled=True),
        P(("dp", "tp"), "cp"),
        "all-gather",
        ("tp",),
        512,
    ),
    "psum_scatter": (
        lambda x: scattered(x, "cp"),
        P(("dp", "cp"), "tp"),
        "reduce-scatter",
        ("cp",),
        256,
    ),
    "ppermute": (swap, SPEC, "collective-permute", ("tp",), 256),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "cp", 0, 1, tiled=True),
        SPEC,
        "all-to-all",
        ("cp",),
        256,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_collective_by_itself(name):
    fn, out_specs, op, axes, size = COUNTED[name]
    assert audited(fn, out_specs).collectives == (Collective(op, axes, size, False),)


def test_a_collective_in_a_loop():
    found = audited(lambda x: lax.scan(lambda c, _: (swap(c) + 1, None), x, length=3)[0])
    assert found.collectives == (Collective("collective-permute", ("tp",), 256, True),)

    def asked(x):
        return lax.while_loop(
            lambda c: lax.psum(c.sum(), ("dp", "cp", "tp")) < 9, lambda c: c + 1, x
        )

    assert audited(asked).collectives == (Collective("all-reduce", ("dp", "cp", "tp"), 4, True),)
    nested = audited(
        lambda x: lax.fori_loop(
            0, 2, lambda i, c: lax.fori_loop(0, 2, lambda j, c: swap(c * c), c), x
        )
    )
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
    """The axes of `mesh` that the audit names for a sum over an axis of another mesh with the
    same devices.
    """
    own = Mesh(mesh.devices.reshape(shape), ("a", "b"))
    x = jax.ShapeDtypeStruct((24, 24), jnp.float32, sharding=NamedSharding(own, P("a", "b")))
    summed = jax.shard_map(
        lambda x: lax.psum(x, "b"), mesh=own, in_specs=P("a", "b"), out_specs=P("a")
    )
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
        lambda x: lax.scan(lambda c, _: (swap(c), None), lax.psum(x @ x, "dp"), length=3)[0],
        P(None, ("cp", "tp")),
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
    """A loop with one product a turn, `length` turns."""
    return lambda a: lax.scan(lambda c, _: (c @ a, None), a, length=length)[0]


def rarely(fn):
    def noted(a):
        with note("rarely: all of it"):
            return fn(a)

    return noted


def until(stop):
    return lambda a: lax.while_loop(lambda c: stop(*c), lambda c: (c[0] + 1, c[1] @ a), (0, a))[1]


def beside(fn):
    """fn of an array, and of its square, under jit and remat."""
    return jax.jit(jax.remat(lambda a: (fn(a), fn(a @ a))))


def one_device(fn):
    mesh = Mesh(np.array(jax.devices()[:1]), ("one",))
    return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())


def in_one_loop(a):
    """The second value reads the first of the turn before, and not the other way round."""
    return lax.while_loop(
        lambda c: c[2] < 6, lambda c: (c[0] @ a, c[0] + c[1] @ a, c[2] + 1), (a, a, 0)
    )


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
        (jax.value_and_grad(lambda a: (a @ A).sum()), 2, 2),
        (jax.grad(lambda a: (a @ A).sum()), 1, 1),  # compilers leave out what no result reads
        (lambda a: beside(turns(4))(a)[0], 4, 4),
        (lambda a: beside(until(lambda i, a: i < 5))(a)[0], 5, 5),
        (lambda a: in_one_loop(a)[0], 6, 6),
        (lambda a: one_device(lambda a: (a @ a, lax.psum(a @ a, "one")))(a)[0], 1, 1),
        (lambda a: in_one_loop(a)[1], 12, 12),
        (
            lambda a: lax.cond(a[0, 0] > 0, lambda a: (a @ a, a), lambda a: (a, a @ a @ a), a)[0],
            0,
            1,
        ),
        (lambda a: lax.cond(a[0, 0] > 0, turns(2), turns(6), a), 2, 6),
        (lambda a: lax.cond(a[0, 0] > 0, lambda a: a, turns(6), a), 0, 6),
        (rarely(lambda a: lax.cond(a[0, 0] > 0, turns(2), turns(6), a)), 2, 2),
        (until(lambda i, a: a[0, 0] < 9), 0, float("inf")),
        (until(lambda i, a: 2 * i < 9), 5, 5),
        (until(lambda i, a: (i < 8) & (a[0, 0] < 9)), 0, 8),
        (until(lambda i, a: (i < a[0, 0]) & (i < 8) & (i < 6)), 0, 6),
        (lambda a: turns(3)(until(lambda i, a: (i < 8) & (a[0, 0] < 9))(a)), 3, 11),
        (lambda a: lax.while_loop(lambda i: i < a[0, 0], lambda i: i + 1, 0.0), 0, 0),
    ],
)
def test_flops(fn, low, high):
    assert count_flops(jax.make_jaxpr(fn)(A)) == Flops(low * PRODUCT, high * PRODUCT)


INF = float("inf")
N = jnp.asarray(3)  # an argument: its value is not known when the program is traced
FIRST = (0, A)


def loop(stop, step=1, start=0):
    """A loop with a product a turn, which carries a counter and an integer that is an argument."""

    def turn(c):
        return (c[0] + step, c[1] @ c[1], c[2])

    return lambda n: lax.while_loop(lambda c: stop(c[0], c[2]), turn, (start, A, n))[1]


def of_state(stop, turn, first):
    """A loop over three integers with the given `turn` and `stop`, and a product a turn."""
    return lambda n: lax.while_loop(
        lambda c: stop(*c[:3]),
        lambda c: (*turn(*c[:3]), c[3] @ c[3]),
        (*(n if x is None else x for x in first), A),
    )[3]


def outer(body, length=3):
    return lambda n: lax.fori_loop(0, length, lambda i, c: body(i, c, n), A)


def inner(turns):
    """A loop of `turns` products; `turns` may be traced."""
    return lambda c: lax.fori_loop(0, turns, lambda j, d: d @ d, c)


def of_loops_in_a_while(n):
    """Turn i has i products, at most 3."""
    return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, inner(c[0])(c[1])), FIRST)[1]


def in_two_loops(n):
    """Two loops. The second's bound is a number that the first carries along unchanged."""

    def first(c):
        return (c[0] + 1, c[1] @ c[1], c[2])

    _, a, six = lax.while_loop(lambda c: c[0] < 5, first, (0, A, 6))
    return lax.while_loop(lambda c: c[0] < six, lambda c: (c[0] + 1, c[1] @ c[1]), (0, a))[1]


def in_a_rule(n):
    """A loop in a custom_vjp; its bound is an argument of that function."""

    @jax.custom_vjp
    def rule(a, bound):
        return lax.while_loop(lambda c: c[0] < bound, lambda c: (c[0] + 1, c[1] @ c[1]), (0, a))[1]

    rule.defvjp(lambda a, b: (rule(a, b), None), lambda _, g: (g, None))
    return rule(A, 6)


def on_a_mesh(n):
    def run(a, b):
        return lax.while_loop(
            lambda c: c[0] < b,
            lambda c: (c[0] + 1, c[1] @ c[1]),
            (lax.pcast(0, "dp", to="varying"), a),
        )[1]

    return jax.shard_map(run, mesh=PARALLEL.mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))(
        jnp.ones((8, 4)), 6
    )


@pytest.mark.parametrize(
    ("fn", "low", "high"),
    [
        (loop(lambda i, n: (i < 9) | (n > 0)), 9, INF),
        (loop(lambda i, n: (n > 0) | (i < 9)), 9, INF),
        (loop(lambda i, n: ((i < 9) | (n > 0)) & (i < 12)), 9, 12),
        (loop(lambda i, n: (i < 9) == (n > 0)), 0, INF),
        (loop(lambda i, n: i <= 9), 10, 10),
        (loop(lambda i, n: i != 9), 9, 9),
        (loop(lambda i, n: i < 9, step=2), 5, 5),
        (loop(lambda i, n: i > 0, step=-1, start=9), 9, 9),
        (loop(lambda i, n: i >= 0, step=-2, start=9), 5, 5),
        (loop(lambda i, n: i < 9, start=4), 5, 5),
        (loop(lambda i, n: i < 9, start=40), 0, 0),
        (loop(lambda i, n: i + 3 < 9), 6, 6),
        (loop(lambda i, n: jnp.minimum(i, 5) < 9), INF, INF),
        (loop(lambda i, n: i < n), 0, INF),
        (loop(lambda i, n: i < jnp.minimum(n, 6)), 0, 6),
        (loop(lambda i, n: i < jnp.clip(n, 2, 6)), 2, 6),
        (loop(lambda i, n: i < jnp.where(n > 0, 4, 7)), 4, 7),
        (loop(lambda i, n: i < 9, step=jnp.int8(2), start=jnp.int8(0)), 5, 5),
        # 126 + 2 is -128
        (loop(lambda i, n: i < 127, step=jnp.int8(2), start=jnp.int8(0)), 64, INF),
        (
            loop(lambda i, n: i.astype(jnp.int32) < 200, step=jnp.int8(1), start=jnp.int8(0)),
            INF,
            INF,
        ),
        (loop(lambda i, n: i < 8.5, step=1.0, start=0.0), 0, INF),  # floats are not followed
        (loop(lambda i, n: i < 9, step=0), INF, INF),
        # no plain counters, and a compiler simplifies the last two: unknown, but never too few
        # turns
        (loop(lambda i, n: (i < 9) | (i < 4)), 9, INF),
        (loop(lambda i, n: ~((i >= 9) | (n > 0))), 0, INF),
        (loop(lambda i, n: n * 0 + 9 > i), 0, INF),
        # bounds and steps that the loop carries or changes
        (of_state(lambda i, b, s: i < b, lambda i, b, s: (i + s, b, s), (0, 9, 2)), 5, 5),
        (of_state(lambda i, b, s: i < b, lambda i, b, s: (i + 1, b - 1, s), (0, 9, 0)), 5, 5),
        (
            of_state(lambda i, b, s: i < b, lambda i, b, s: (i + 1, b + 1, s), (0, 9, 0)),
            2**31 - 9,
            INF,
        ),
        (of_state(lambda i, b, s: i < b, lambda i, b, s: (i + 1, s, s), (0, 9, None)), 0, INF),
        (
            of_state(
                lambda i, b, s: i < b, lambda i, b, s: (i + 1, jnp.minimum(s, 7), s), (0, 9, None)
            ),
            0,
            9,
        ),
        (of_state(lambda i, b, s: i < b, lambda i, b, s: (i + s, b, s), (0, 9, None)), 0, INF),
        (of_state(lambda i, b, s: i < 9, lambda i, b, s: (i + 1, b, s), (None, 0, 0)), 0, INF),
        (of_state(lambda i, b, s: i < 9, lambda i, b, s: (b, i + 1, s), (0, 0, 0)), 0, INF),
        # loops in loops, and in what JAX wraps functions with
        (outer(lambda i, c, n: loop(lambda j, m: (j < 5) & (j < m))(n)), 0, 15),
        (outer(lambda i, c, n: inner(i)(c), 4), 0, 12),
        (outer(lambda i, c, n: inner(i + 2)(c), 4), 8, 20),
        (outer(lambda i, c, n: lax.cond(n > i, inner(5), lambda c: c, c)), 0, 15),
        (outer(lambda i, c, n: inner(n)(c)), 0, INF),
        (of_loops_in_a_while, 0, 12),
        (lambda n: lax.cond(n > 0, lambda b: loop(lambda i, m: i < m)(b), lambda b: A, 6), 0, 6),
        (in_two_loops, 11, 11),
        (lambda n: jax.remat(jax.jit(loop(lambda i, m: i < m)))(6), 6, 6),
        (lambda n: jax.jit(loop(lambda i, m: i < m))(n), 0, INF),
        (in_a_rule, 6, 6),
        (on_a_mesh, 6, 6),
        (
            lambda n: jax.vmap(lambda start: lax.fori_loop(start, 9, lambda i, a: a @ a, A))(
                jnp.arange(2)
            ),
            0,
            INF,
        ),
    ],
)
def test_flops_of_a_while(fn, low, high):
    assert count_flops(jax.make_jaxpr(fn)(N)) == Flops(low * PRODUCT, high * PRODUCT)


@pytest.mark.parametrize(
    ("stop", "low", "high"), [(lambda i, n: i < 9, 9, 9), (lambda i, n: (i < 9) & (i < n), 0, 9)]
)
def test_a_product_in_a_condition_runs_once_more_than_the_body(stop, low, high):
    """Two products in the condition, one in the body."""

    def loop(n):
        return lax.while_loop(
            lambda c: stop(c[0], n) & ((c[1] @ A @ A)[0, 0] < INF),
            lambda c: (c[0] + 1, c[1] @ A),
            FIRST,
        )

    # The loop may end before its first turn, depending on what the products give.
    assert count_flops(jax.make_jaxpr(loop)(N)) == Flops(2 * PRODUCT, (3 * high + 2) * PRODUCT)


def test_a_product_in_nothing_but_a_condition():
    def loop(a):
        return lax.while_loop(lambda c: (a @ a)[0, 0] > c, lambda c: c + 1, 0.0)

    assert count_flops(jax.make_jaxpr(loop)(A)) == Flops(PRODUCT, INF)


def test_a_kernel_runs_in_each_step_of_its_grid():
    def kernel(a_ref, o_ref):
        o_ref[...] = a_ref[...] @ a_ref[...]

    def call(a):
        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(a.shape, a.dtype), grid=(3, 5)
        )(a)

    assert count_flops(jax.make_jaxpr(call)(A)) == Flops(15 * PRODUCT, 15 * PRODUCT)


def test_a_linear_solve_runs_its_solver_alone():
    def solve(a):
        return lax.custom_linear_solve(lambda x: a @ x, a[0], lambda _, b: turns(2)(a)[0] + b)

    assert count_flops(jax.make_jaxpr(solve)(A)) == Flops(2 * PRODUCT, 2 * PRODUCT)


def test_flops_of_ragged_products_and_convolutions():
    rows = jnp.ones((10, 3))
    kernels = jnp.ones((2, 3, 7))
    sizes = jnp.array([4, 6])
    assert count_flops(jax.make_jaxpr(lax.ragged_dot)(rows, kernels, sizes)).high == 2 * 10 * 3 * 7
    gradient = jax.grad(lambda k: lax.ragged_dot(rows, k, sizes).sum())
    # nobody reads the product itself
    assert count_flops(jax.make_jaxpr(gradient)(kernels)).high == 2 * 10 * 3 * 7

    def convolve(x, k):
        return lax.conv(x, k, (1, 1), "VALID")

    found = count_flops(jax.make_jaxpr(convolve)(jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 2, 2))))
    assert found.high == 2 * (2 * 5 * 7 * 7) * (3 * 2 * 2)


def test_flops_of_batched_and_rectangular_products():
    def product(a, b):
        return jnp.einsum("bij,bkj->bik", a, b)

    assert (
        count_flops(jax.make_jaxpr(product)(jnp.ones((3, 4, 5)), jnp.ones((3, 7, 5)))).low
        == 2 * 3 * 4 * 5 * 7
    )


def test_flops_are_of_one_device():
    call = jax.shard_map(lambda x: x @ x, mesh=PARALLEL.mesh, in_specs=SPEC, out_specs=SPEC)
    assert count_flops(jax.make_jaxpr(call)(jnp.ones((16, 32)))).low == 2 * 8**3


def test_flops_of_loops_that_a_mask_ends_are_bounded():
    """On a mesh the bound of the loop is a constant with a pcast to varying."""
    # chunks of tokens meet all 1026 columns, 513 of them on a device
    for parallel, tokens, columns, device in (
        (None, 64, 1026, "small"),
        (PARALLEL, 16, 513, "five"),
    ):
        arrays = head_arrays(1026, with_where=True)
        found = count_flops(
            jax.make_jaxpr(lambda a, p=parallel, d=device: call_head(p, a, device=d))(arrays)
        )
        assert found.low == 0
        assert found.high == 2 * tokens * (12 + 1) * columns  # 12 features and a bias
        everything = {k: x for k, x in arrays.items() if k != "where"}
        assert (
            count_flops(
                jax.make_jaxpr(lambda a, p=parallel, d=device: call_head(p, a, device=d))(
                    everything
                )
            ).low
            == found.high
        )
