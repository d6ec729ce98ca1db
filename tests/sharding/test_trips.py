"""The computed numbers of turns against loops that run, in 8-bit integers that wrap around."""

import math
import operator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sharding.audit.trips import Integer, Limits, Loop, Turns, constant, convert, operate

S8 = Limits.of("int8")


def wrap(x):
    return (x + 128) % 256 - 128


def wrapped_sum(a, b):
    return wrap(a + b)


def wrapped_difference(a, b):
    return wrap(a - b)


def wrapped_product(a, b):
    return wrap(a * b)


def chosen(a, b):
    """The branch that the predicate chose."""
    return b


def clamped(low, x, high):
    return min(max(x, low), high)


RUN = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "add": wrapped_sum,
    "sub": wrapped_difference,
    "mul": wrapped_product,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.not_,
    "select": chosen,
    "clamp": clamped,
}


def read(tree, slots, limits=S8):
    """A formula as `operate` reads it: nested (operation, *arguments), "x" and "y" the slots,
    "?" unknown.
    """
    match tree:
        case "x" | "y":
            return slots["xy".index(tree)]
        case "?" | "?bool":
            return None
        case bool() | int():
            return constant(tree)
        case ("and" | "or" | "not" as name, *args):
            return operate(name, [read(arg, slots, limits) for arg in args], None)
        case (name, *args):
            return operate(name, [read(arg, slots, limits) for arg in args], limits)


def run(tree, slots, unknown):
    match tree:
        case "x" | "y":
            return slots["xy".index(tree)]
        case "?":
            return unknown[0]
        case "?bool":
            return unknown[1]
        case bool() | int():
            return tree
        case (name, *args):
            return RUN[name](*(run(arg, slots, unknown) for arg in args))


def loop_of(after, before, limits=S8):
    """A loop whose slots have the formulas `after` behind each turn, and the values `before` at
    first.
    """

    def turn(slots):
        return [read(step, slots, limits) for step in after]

    return Loop(turn, before)


def turns_of(loop, condition, limits=S8):
    """The turns of a loop while a formula holds."""

    def goes_on(slots):
        return read(condition, slots, limits)

    return loop.turns(goes_on)


small = st.integers(-12, 12)
leaves = st.sampled_from(["x", "y", "x", "y", "?"]) | small | st.sampled_from([-128, 127, 100])
integers = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "mul", "min", "max", "select"]), inner, inner),
        st.tuples(st.just("clamp"), inner, inner, inner),
    ),
    max_leaves=3,
)
conditions = st.recursive(
    st.one_of(
        st.tuples(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), integers, integers),
        st.booleans(),
        st.just("?bool"),
    ),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or"]), inner, inner), st.tuples(st.just("not"), inner)
    ),
    max_leaves=4,
)
steps = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(["x", "y"]), small),
    st.sampled_from(["x", "y"]),
    integers,
)


@settings(max_examples=500, deadline=None)
@given(
    conditions,
    st.tuples(steps, steps),
    st.tuples(small, small),
    st.lists(st.tuples(small, st.booleans())),
)
@example(("or", ("lt", "x", 9), ("lt", "y", 100)), (("add", "x", 1), ("add", "y", 1)), (0, 0), [])
@example(("or", ("lt", "x", 9), ("lt", "y", 5)), (("add", "x", 7), ("add", "y", 1)), (0, -128), [])
@example(("lt", "x", 127), (("add", "x", 2), "y"), (0, 0), [])
@example(("gt", "x", -128), (("sub", "x", "y"), "y"), (0, 3), [])
@example(
    ("lt", "x", ("sub", ("max", ("add", 100, 100), 0), 100)), (("add", "x", 1), "y"), (0, 0), []
)
def test_a_loop_turns_as_often_as_was_read(condition, after, before, unknown):
    loop = loop_of(after, [constant(x) for x in before])
    found = turns_of(loop, condition)
    assert 0 <= found.low <= found.high

    state = before
    taken = 0
    seen = []
    unknown = unknown or [(0, True)]
    while taken < 1000 and run(condition, state, unknown[taken % len(unknown)]):
        seen.append(state)
        state = tuple(run(step, state, unknown[taken % len(unknown)]) for step in after)
        taken += 1
    assert found.low <= taken or taken == 1000
    assert taken <= found.high

    for at, value in enumerate(loop.during(found.high)):
        assert value is None or all(
            (state[at] - value.low) % 256 <= value.high - value.low for state in seen
        )
    for at, value in enumerate(loop.behind):
        assert value is None or value == Integer(state[at], state[at])


INT32 = Limits.of("s32")
BELOW_9 = ("lt", "x", 9)


def turns(condition, start, step=1, limits=INT32):
    """The turns of a loop over one integer, which grows by `step`."""
    if isinstance(start, int):
        start = constant(start)
    loop = loop_of([("add", "x", step)], [start], INT32)
    return turns_of(loop, condition, limits)


@pytest.mark.parametrize(
    ("condition", "start", "step", "expected"),
    [
        (BELOW_9, 0, 1, (9, 9)),
        (("le", "x", 9), 0, 1, (10, 10)),
        (BELOW_9, 0, 2, (5, 5)),
        (BELOW_9, 4, 1, (5, 5)),
        (BELOW_9, 20, 1, (0, 0)),
        (BELOW_9, Integer(2, 5), 1, (4, 7)),
        (("gt", "x", 0), 9, -2, (5, 5)),
        (("ge", "x", 0), 9, -2, (5, 5)),
        (("gt", 9, "x"), 0, 1, (9, 9)),
        (("ne", "x", 9), 0, 3, (3, 3)),
        (BELOW_9, 0, -1, (2**31 + 1, math.inf)),
        (("lt", "x", "?"), 0, 1, (0, math.inf)),
        (("lt", "x", ("min", "?", 6)), 0, 1, (0, 6)),
        (("lt", "x", ("clamp", 2, "?", 6)), 0, 1, (2, 6)),
        (("lt", "x", ("select", 4, 7)), 0, 1, (4, 7)),
        (("and", BELOW_9, "?bool"), 0, 1, (0, 9)),
        (("or", BELOW_9, "?bool"), 0, 1, (9, math.inf)),
        (True, 0, 1, (math.inf, math.inf)),
        (False, 0, 1, (0, 0)),
        ("?bool", 0, 1, (0, math.inf)),
        # These are no plain counters, and no compiler was seen to write them: unknown, but never
        # too few turns.
        (("eq", "x", 0), 0, 3, (0, math.inf)),
        (("or", BELOW_9, ("lt", "x", 5)), 0, 1, (9, math.inf)),
        (("not", ("ge", "x", 9)), 0, 1, (0, math.inf)),
        (BELOW_9, None, 1, (0, math.inf)),
    ],
)
def test_turns_of_a_counter(condition, start, step, expected):
    assert turns(condition, start, step) == Turns(*expected)


def test_a_comparison_of_floats_is_not_followed():
    assert turns(BELOW_9, 0, limits=Limits.of("float32")) == Turns(0, math.inf)


def test_a_conversion_keeps_what_both_dtypes_hold():
    counter = Integer(0, 0, step=1)
    assert convert(counter, S8, S8) == counter
    assert convert(constant(100), S8, INT32) == constant(100)
    assert convert(constant(200), INT32, S8) is None
    # a counter that wraps around in eight bits
    assert convert(counter, S8, INT32) == Integer(-128, 127)
    assert convert(constant(200), S8, INT32) == Integer(-128, 127)
    assert convert(constant(1), INT32, Limits.of("float32")) is None
    assert convert(constant(True), None, INT32) is None
