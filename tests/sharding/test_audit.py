"""The audit against programs whose collectives, bytes and flops can be counted by hand."""

from functools import partial
from operator import ge, gt, le, lt, ne

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


def largest_of_first_rows(x):
    return lax.pmax(x[0], "cp")


EVERYTHING = ("dp", "cp", "tp")
GATHER = partial(lax.all_gather, axis_name="tp", axis=0, tiled=True)
EXCHANGE = partial(lax.all_to_all, axis_name="cp", split_axis=0, concat_axis=1, tiled=True)
COUNTED = {  # (function, out_specs, collective, its axes, its bytes)
    "psum": (partial(lax.psum, axis_name="dp"), P(None, ("cp", "tp")), "all-reduce", ("dp",), 256),
    "psum over two axes": (
        partial(lax.psum, axis_name=("dp", "tp")),
        P(None, "cp"),
        "all-reduce",
        ("dp", "tp"),
        256,
    ),
    "psum over all": (
        partial(lax.psum, axis_name=EVERYTHING),
        P(),
        "all-reduce",
        EVERYTHING,
        256,
    ),
    "pmax": (largest_of_first_rows, P(("dp", "tp")), "all-reduce", ("cp",), 32),
    "all_gather": (GATHER, P(("dp", "tp"), "cp"), "all-gather", ("tp",), 512),
    "psum_scatter": (
        partial(scattered, axis="cp"),
        P(("dp", "cp"), "tp"),
        "reduce-scatter",
        ("cp",),
        256,
    ),
    "ppermute": (swap, SPEC, "collective-permute", ("tp",), 256),
    "all_to_all": (EXCHANGE, SPEC, "all-to-all", ("cp",), 256),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_collective_by_itself(name):
    fn, out_specs, op, axes, size = COUNTED[name]
    assert audited(fn, out_specs).collectives == (Collective(op, axes, size, False),)


def repeated(fn, x, length):
    """`fn` of x, of the result, and so on."""

    def turn(carry, _):
        return fn(carry), None

    return lax.scan(turn, x, length=length)[0]


def swapped_and_one(x):
    return swap(x) + 1


def swapped_square(x):
    return swap(x * x)


def while_all_devices_hold_little(x):
    """The condition has the collective."""

    def stop(carry):
        return lax.psum(carry.sum(), EVERYTHING) < 9

    def turn(carry):
        return carry + 1

    return lax.while_loop(stop, turn, x)


def test_a_collective_in_a_loop():
    swapped = (Collective("collective-permute", ("tp",), 256, True),)
    assert audited(partial(repeated, swapped_and_one, length=3)).collectives == swapped
    asked = audited(while_all_devices_hold_little)
    assert asked.collectives == (Collective("all-reduce", EVERYTHING, 4, True),)
    inner = partial(repeated, swapped_square, length=2)
    assert audited(partial(repeated, inner, length=2)).collectives == swapped


def test_bytes_follow_the_dtype():
    x = jax.ShapeDtypeStruct(X.shape, jnp.int8, sharding=X.sharding)
    assert [c.bytes for c in audited(swap, x=x).collectives] == [64]


def test_several_collectives_and_none():
    def both(x):
        return swap(x) + lax.pmax(x.sum(), ("dp", "cp"))

    found = audited(both)
    assert {(c.op, c.axes, c.bytes) for c in found.collectives} == {
        ("collective-permute", ("tp",), 256),
        ("all-reduce", ("dp", "cp"), 4),
    }
    assert audited(jnp.sin).collectives == ()


def over_its_second_axis(shape, mesh):
    """The axes of `mesh` that the audit names for a sum over an axis of another mesh with the
    same devices.
    """
    own = Mesh(mesh.devices.reshape(shape), ("a", "b"))
    x = jax.ShapeDtypeStruct((24, 24), jnp.float32, sharding=NamedSharding(own, P("a", "b")))
    sum_of = partial(lax.psum, axis_name="b")
    summed = jax.shard_map(sum_of, mesh=own, in_specs=P("a", "b"), out_specs=P("a"))
    return [c.axes for c in audit(summed, x, mesh=mesh).collectives]


def test_groups_that_are_no_product_of_axes_have_none():
    assert over_its_second_axis((2, 4), PARALLEL.mesh) == [("cp", "tp")]
    of_six = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("dp", "tp"))
    assert over_its_second_axis((2, 3), of_six) == [None]


def test_bytes_of_a_device():
    def two_products(x):
        between = jnp.sin(x) @ x.T
        return jnp.sort(between, axis=1) @ x

    found = audited(two_products)
    assert (found.argument_bytes, found.output_bytes) == (256, 256)
    assert found.temp_bytes >= 256
    assert found.flops.low == found.flops.high == 2 * 2 * 8**3


def test_it_reads_as_a_table():
    def summed_and_swapped(x):
        return repeated(swap, lax.psum(x @ x, "dp"), length=3)

    found = audited(summed_and_swapped, P(None, ("cp", "tp")))
    text = str(found)
    assert text.startswith("temporaries ")
    assert "0.000 GFLOP" in text
    assert "all-reduce over dp: 0.000 MiB" in text.splitlines()
    assert "collective-permute over tp: 0.000 MiB in a loop" in text.splitlines()


def test_arguments_on_two_meshes_are_refused():
    other = make_parallel_mesh("dp=8")
    y = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other.sharding(P("dp")))
    with pytest.raises(ValueError, match="args: got arrays on 2 meshes, expected one, or mesh="):
        audit(partial(jax.tree.map, jnp.sin), (X, y))


# Flops

A = jnp.ones((4, 4))
PRODUCT = 2 * 4**3


def square(a):
    return a @ a


def cube(a):
    return a @ a @ a


def itself(a):
    return a


def times_a(a):
    return a @ A


def sum_of_product(a):
    return (a @ A).sum()


def turns(length):
    """A loop with one product a turn, `length` turns."""

    def loop(a):
        def turn(carry, _):
            return carry @ a, None

        return lax.scan(turn, a, length=length)[0]

    return loop


def counted_turns(length):
    """`turns`, by a `fori_loop`."""

    def loop(a):
        def turn(i, carry):
            return carry @ a

        return lax.fori_loop(0, length, turn, a)

    return loop


def rarely(fn):
    def noted(a):
        with note("rarely: all of it"):
            return fn(a)

    return noted


def until(stop):
    """A loop with one product a turn; `stop` reads the counter and the array."""

    def loop(a):
        def goes_on(carry):
            return stop(*carry)

        def turn(carry):
            i, array = carry
            return i + 1, array @ a

        return lax.while_loop(goes_on, turn, (0, a))[1]

    return loop


def part(fn, at):
    """One of a function's results."""

    def run(a):
        return fn(a)[at]

    return run


def one_after_the_other(first, second):
    def run(a):
        return second(first(a))

    return run


def beside(fn):
    """fn of an array, and of its square, under jit and remat."""

    def both(a):
        return fn(a), fn(a @ a)

    return jax.jit(jax.remat(both))


def on_one_device(a):
    """A product, and the sum of another."""

    def run(a):
        return a @ a, lax.psum(a @ a, "one")

    mesh = Mesh(np.array(jax.devices()[:1]), ("one",))
    return jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())(a)


def in_one_loop(a):
    """The second value reads the first of the turn before, and not the other way round."""

    def goes_on(carry):
        return carry[2] < 6

    def turn(carry):
        first, second, i = carry
        return first @ a, first + second @ a, i + 1

    return lax.while_loop(goes_on, turn, (a, a, 0))


def if_positive(yes, no):
    """One of two functions, which depends on a number of the array."""

    def run(a):
        return lax.cond(a[0, 0] > 0, yes, no, a)

    return run


def product_first(a):
    return a @ a, a


def products_second(a):
    return a, a @ a @ a


def a_counter_alone(a):
    """A loop whose turns have no product."""

    def goes_on(i):
        return i < a[0, 0]

    def turn(i):
        return i + 1

    return lax.while_loop(goes_on, turn, 0.0)


# Conditions of loops, of a counter and of an array or an integer that is an argument.


def counter_is(compared, bound):
    """Such as `counter_is(lt, 9)`, for i < 9."""

    def stop(i, other):
        return compared(i, bound)

    return stop


def entry_is(compared, bound):
    """A comparison of an entry of the array."""

    def stop(i, a):
        return compared(a[0, 0], bound)

    return stop


def argument_is(compared, bound):
    """A comparison of the integer."""

    def stop(i, n):
        return compared(n, bound)

    return stop


def both(*stops):
    def stop(i, other):
        first, *others = (each(i, other) for each in stops)
        for each in others:
            first = first & each
        return first

    return stop


def either(first, second):
    def stop(i, other):
        return first(i, other) | second(i, other)

    return stop


def twice_the_counter_is_small(i, a):
    return 2 * i < 9


def counter_is_below_an_entry(i, a):
    return i < a[0, 0]


BELOW_8_AND_AN_ENTRY = both(counter_is(lt, 8), entry_is(lt, 9))


@pytest.mark.parametrize(
    ("fn", "low", "high"),
    [
        (square, 1, 1),
        (jax.jit(cube), 2, 2),
        (turns(5), 5, 5),
        (partial(repeated, turns(3), length=5), 15, 15),
        (counted_turns(7), 7, 7),
        (jax.remat(square), 1, 1),
        (jax.vmap(times_a), 1, 1),
        (jax.value_and_grad(sum_of_product), 2, 2),
        (jax.grad(sum_of_product), 1, 1),  # compilers leave out what no result reads
        (part(beside(turns(4)), 0), 4, 4),
        (part(beside(until(counter_is(lt, 5))), 0), 5, 5),
        (part(in_one_loop, 0), 6, 6),
        (part(on_one_device, 0), 1, 1),
        (part(in_one_loop, 1), 12, 12),
        (part(if_positive(product_first, products_second), 0), 0, 1),
        (if_positive(turns(2), turns(6)), 2, 6),
        (if_positive(itself, turns(6)), 0, 6),
        (rarely(if_positive(turns(2), turns(6))), 2, 2),
        (until(entry_is(lt, 9)), 0, float("inf")),
        (until(twice_the_counter_is_small), 5, 5),
        (until(BELOW_8_AND_AN_ENTRY), 0, 8),
        (until(both(counter_is_below_an_entry, counter_is(lt, 8), counter_is(lt, 6))), 0, 6),
        (one_after_the_other(until(BELOW_8_AND_AN_ENTRY), turns(3)), 3, 11),
        (a_counter_alone, 0, 0),
    ],
)
def test_flops(fn, low, high):
    assert count_flops(jax.make_jaxpr(fn)(A)) == Flops(low * PRODUCT, high * PRODUCT)


INF = float("inf")
N = jnp.asarray(3)  # an argument: its value is not known when the program is traced
FIRST = (0, A)


def loop(stop, step=1, start=0):
    """A loop with a product a turn, which carries a counter and an integer that is an argument."""

    def run(n):
        def goes_on(carry):
            i, _, argument = carry
            return stop(i, argument)

        def turn(carry):
            i, a, argument = carry
            return i + step, a @ a, argument

        return lax.while_loop(goes_on, turn, (start, A, n))[1]

    return run


# Conditions of `loop`, of its counter i and its argument n


def equal_answers(i, n):
    return (i < 9) == (n > 0)


def sum_is_below_9(i, n):
    return i + 3 < 9


def least_of_5_is_below_9(i, n):
    return jnp.minimum(i, 5) < 9


def below_n(i, n):
    return i < n


def below_n_and_5(i, n):
    return (i < 5) & (i < n)


def below_n_of_at_most_6(i, n):
    return i < jnp.minimum(n, 6)


def below_n_of_2_to_6(i, n):
    return i < jnp.clip(n, 2, 6)


def below_4_or_7(i, n):
    return i < jnp.where(n > 0, 4, 7)


def below_200_as_int32(i, n):
    return i.astype(jnp.int32) < 200


def not_past_9_nor_asked(i, n):
    return ~((i >= 9) | (n > 0))


def below_a_sum_of_n(i, n):
    return n * 0 + 9 > i


BELOW_9 = counter_is(lt, 9)
ASKED = argument_is(gt, 0)


def of_state(turn, first, stop=None):
    """A loop over three integers with the given `turn`, and a product a turn, while the first
    integer is below the second, or below `stop`; None in `first` is the argument.
    """

    def run(n):
        def goes_on(carry):
            i, bound, _, _ = carry
            return i < (bound if stop is None else stop)

        def with_product(carry):
            *state, a = carry
            return *turn(*state), a @ a

        state = (n if x is None else x for x in first)
        return lax.while_loop(goes_on, with_product, (*state, A))[3]

    return run


# Turns of `of_state`, of its counter i, its bound b and its step s


def by_the_step(i, b, s):
    return i + s, b, s


def by_one(i, b, s):
    return i + 1, b, s


def to_a_lower_bound(i, b, s):
    return i + 1, b - 1, s


def to_a_higher_bound(i, b, s):
    return i + 1, b + 1, s


def to_the_step(i, b, s):
    return i + 1, s, s


def to_the_step_or_7(i, b, s):
    return i + 1, jnp.minimum(s, 7), s


def of_two_counters(i, b, s):
    return b, i + 1, s


def outer(body, length=3):
    """A loop over `body`, which reads the turn, the array and the argument."""

    def run(n):
        def turn(i, a):
            return body(i, a, n)

        return lax.fori_loop(0, length, turn, A)

    return run


def inner(turns):
    """A loop of `turns` products; `turns` may be traced."""

    def run(a):
        def turn(j, a):
            return a @ a

        return lax.fori_loop(0, turns, turn, a)

    return run


# Bodies of `outer`


def a_loop_of_its_own(i, a, n):
    return loop(below_n_and_5)(n)


def as_often_as_the_turn(i, a, n):
    return inner(i)(a)


def twice_more_than_the_turn(i, a, n):
    return inner(i + 2)(a)


def five_times_if_asked(i, a, n):
    return lax.cond(n > i, inner(5), itself, a)


def as_often_as_asked(i, a, n):
    return inner(n)(a)


def one_more(carry):
    """A turn of a loop over a counter and an array."""
    i, a = carry
    return i + 1, a @ a


def of_loops_in_a_while(n):
    """Turn i has i products, at most 3."""

    def goes_on(carry):
        return carry[0] < 4

    def turn(carry):
        i, a = carry
        return i + 1, inner(i)(a)

    return lax.while_loop(goes_on, turn, FIRST)[1]


def if_asked(n):
    """A loop of 6 turns, or none."""

    def none(bound):
        return A

    return lax.cond(n > 0, loop(below_n), none, 6)


def in_two_loops(n):
    """Two loops. The second's bound is a number that the first carries along unchanged."""

    def first(c):
        return (c[0] + 1, c[1] @ c[1], c[2])

    def below_5(c):
        return c[0] < 5

    _, a, six = lax.while_loop(below_5, first, (0, A, 6))

    def below_six(c):
        return c[0] < six

    return lax.while_loop(below_six, one_more, (0, a))[1]


def in_remat(n):
    """The bound is a number of the program."""
    return jax.remat(jax.jit(loop(below_n)))(6)


def in_a_rule(n):
    """A loop in a custom_vjp; its bound is an argument of that function."""

    @jax.custom_vjp
    def rule(a, bound):
        def goes_on(carry):
            return carry[0] < bound

        return lax.while_loop(goes_on, one_more, (0, a))[1]

    def forward(a, bound):
        return rule(a, bound), None

    def backward(_, g):
        return g, None

    rule.defvjp(forward, backward)
    return rule(A, 6)


def on_a_mesh(n):
    def run(a, bound):
        def goes_on(carry):
            return carry[0] < bound

        first = (lax.pcast(0, "dp", to="varying"), a)
        return lax.while_loop(goes_on, one_more, first)[1]

    return jax.shard_map(run, mesh=PARALLEL.mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))(
        jnp.ones((8, 4)), 6
    )


def from_several_starts(n):
    def from_start(start):
        def turn(i, a):
            return a @ a

        return lax.fori_loop(start, 9, turn, A)

    return jax.vmap(from_start)(jnp.arange(2))


@pytest.mark.parametrize(
    ("fn", "low", "high"),
    [
        (loop(either(BELOW_9, ASKED)), 9, INF),
        (loop(either(ASKED, BELOW_9)), 9, INF),
        (loop(both(either(BELOW_9, ASKED), counter_is(lt, 12))), 9, 12),
        (loop(equal_answers), 0, INF),
        (loop(counter_is(le, 9)), 10, 10),
        (loop(counter_is(ne, 9)), 9, 9),
        (loop(BELOW_9, step=2), 5, 5),
        (loop(counter_is(gt, 0), step=-1, start=9), 9, 9),
        (loop(counter_is(ge, 0), step=-2, start=9), 5, 5),
        (loop(BELOW_9, start=4), 5, 5),
        (loop(BELOW_9, start=40), 0, 0),
        (loop(sum_is_below_9), 6, 6),
        (loop(least_of_5_is_below_9), INF, INF),
        (loop(below_n), 0, INF),
        (loop(below_n_of_at_most_6), 0, 6),
        (loop(below_n_of_2_to_6), 2, 6),
        (loop(below_4_or_7), 4, 7),
        (loop(BELOW_9, step=jnp.int8(2), start=jnp.int8(0)), 5, 5),
        # 126 + 2 is -128
        (loop(counter_is(lt, 127), step=jnp.int8(2), start=jnp.int8(0)), 64, INF),
        (loop(below_200_as_int32, step=jnp.int8(1), start=jnp.int8(0)), INF, INF),
        (loop(counter_is(lt, 8.5), step=1.0, start=0.0), 0, INF),  # floats are not followed
        (loop(BELOW_9, step=0), INF, INF),
        # no plain counters, and a compiler simplifies the last two: unknown, but never too few
        # turns
        (loop(either(BELOW_9, counter_is(lt, 4))), 9, INF),
        (loop(not_past_9_nor_asked), 0, INF),
        (loop(below_a_sum_of_n), 0, INF),
        # bounds and steps that the loop carries or changes
        (of_state(by_the_step, (0, 9, 2)), 5, 5),
        (of_state(to_a_lower_bound, (0, 9, 0)), 5, 5),
        (of_state(to_a_higher_bound, (0, 9, 0)), 2**31 - 9, INF),
        (of_state(to_the_step, (0, 9, None)), 0, INF),
        (of_state(to_the_step_or_7, (0, 9, None)), 0, 9),
        (of_state(by_the_step, (0, 9, None)), 0, INF),
        (of_state(by_one, (None, 0, 0), stop=9), 0, INF),
        (of_state(of_two_counters, (0, 0, 0), stop=9), 0, INF),
        # loops in loops, and in what JAX wraps functions with
        (outer(a_loop_of_its_own), 0, 15),
        (outer(as_often_as_the_turn, length=4), 0, 12),
        (outer(twice_more_than_the_turn, length=4), 8, 20),
        (outer(five_times_if_asked), 0, 15),
        (outer(as_often_as_asked), 0, INF),
        (of_loops_in_a_while, 0, 12),
        (if_asked, 0, 6),
        (in_two_loops, 11, 11),
        (in_remat, 6, 6),
        (jax.jit(loop(below_n)), 0, INF),
        (in_a_rule, 6, 6),
        (on_a_mesh, 6, 6),
        (from_several_starts, 0, INF),
    ],
)
def test_flops_of_a_while(fn, low, high):
    assert count_flops(jax.make_jaxpr(fn)(N)) == Flops(low * PRODUCT, high * PRODUCT)


@pytest.mark.parametrize(("stop", "low", "high"), [(BELOW_9, 9, 9), (both(BELOW_9, below_n), 0, 9)])
def test_a_product_in_a_condition_runs_once_more_than_the_body(stop, low, high):
    """Two products in the condition, one in the body."""

    def loop(n):
        def goes_on(carry):
            i, a = carry
            return stop(i, n) & ((a @ A @ A)[0, 0] < INF)

        def turn(carry):
            i, a = carry
            return i + 1, a @ A

        return lax.while_loop(goes_on, turn, FIRST)

    # The loop may end before its first turn, depending on what the products give.
    assert count_flops(jax.make_jaxpr(loop)(N)) == Flops(2 * PRODUCT, (3 * high + 2) * PRODUCT)


def test_a_product_in_nothing_but_a_condition():
    def loop(a):
        def goes_on(count):
            return (a @ a)[0, 0] > count

        def turn(count):
            return count + 1

        return lax.while_loop(goes_on, turn, 0.0)

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
        def matvec(x):
            return a @ x

        def solver(_, b):
            return turns(2)(a)[0] + b

        return lax.custom_linear_solve(matvec, a[0], solver)

    assert count_flops(jax.make_jaxpr(solve)(A)) == Flops(2 * PRODUCT, 2 * PRODUCT)


def test_flops_of_ragged_products_and_convolutions():
    rows = jnp.ones((10, 3))
    kernels = jnp.ones((2, 3, 7))
    sizes = jnp.array([4, 6])
    assert count_flops(jax.make_jaxpr(lax.ragged_dot)(rows, kernels, sizes)).high == 2 * 10 * 3 * 7

    def total(kernels):
        return lax.ragged_dot(rows, kernels, sizes).sum()

    gradient = jax.grad(total)
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
    call = jax.shard_map(square, mesh=PARALLEL.mesh, in_specs=SPEC, out_specs=SPEC)
    assert count_flops(jax.make_jaxpr(call)(jnp.ones((16, 32)))).low == 2 * 8**3


def test_flops_of_loops_that_a_mask_ends_are_bounded():
    """On a mesh the bound of the loop is a constant with a pcast to varying."""
    # chunks of tokens meet all 1026 columns, 513 of them on a device
    for parallel, tokens, columns, device in (
        (None, 64, 1026, "small"),
        (PARALLEL, 16, 513, "five"),
    ):
        call = partial(call_head, parallel, device=device)
        arrays = head_arrays(1026, with_where=True)
        found = count_flops(jax.make_jaxpr(call)(arrays))
        assert found.low == 0
        assert found.high == 2 * tokens * (12 + 1) * columns  # 12 features and a bias
        everything = {k: x for k, x in arrays.items() if k != "where"}
        assert count_flops(jax.make_jaxpr(call)(everything)).low == found.high
