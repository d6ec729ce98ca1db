"""The computed numbers of turns against loops that run, in 8-bit integers that wrap around."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sharding.audit.trips import Integer, Limits, Loop, Turns, constant, convert, operate

S8 = Limits.of("int8")
RUN = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "add": lambda a, b: wrap(a + b),
    "sub": lambda a, b: wrap(a - b),
    "mul": lambda a, b: wrap(a * b),
    "min": min,
    "max": max,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
    "select": lambda a, b: b,  # the branch that the predicate chose
    "clamp": lambda low, x, high: min(max(x, low), high),
}


def wrap(x):
    return (x + 128) % 256 - 128


def read(tree, slots):
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
            return operate(name, [read(arg, slots) for arg in args], None)
        case (name, *args):
            return operate(name, [read(arg, slots) for arg in args], S8)


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
    loop = Loop(lambda slots: [read(step, slots) for step in after], [constant(x) for x in before])
    found = loop.turns(lambda slots: read(condition, slots))
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


def int32(name, *args):
    return operate(name, [constant(x) if isinstance(x, int) else x for x in args], INT32)


def turns(condition, start, step=1):
    """The turns of a loop over one integer, which grows by `step`."""
    loop = Loop(
        lambda slots: [int32("add", slots[0], step)],
        [constant(start) if isinstance(start, int) else start],
    )
    return loop.turns(lambda slots: condition(slots[0]))


def both(name, *args):
    return operate(name, args, None)


@pytest.mark.parametrize(
    ("condition", "start", "step", "expected"),
    [
        (lambda i: int32("lt", i, 9), 0, 1, (9, 9)),
        (lambda i: int32("le", i, 9), 0, 1, (10, 10)),
        (lambda i: int32("lt", i, 9), 0, 2, (5, 5)),
        (lambda i: int32("lt", i, 9), 4, 1, (5, 5)),
        (lambda i: int32("lt", i, 9), 20, 1, (0, 0)),
        (lambda i: int32("lt", i, 9), Integer(2, 5), 1, (4, 7)),
        (lambda i: int32("gt", i, 0), 9, -2, (5, 5)),
        (lambda i: int32("ge", i, 0), 9, -2, (5, 5)),
        (lambda i: int32("gt", 9, i), 0, 1, (9, 9)),
        (lambda i: int32("ne", i, 9), 0, 3, (3, 3)),
        (lambda i: int32("lt", i, 9), 0, -1, (2**31 + 1, math.inf)),
        (lambda i: int32("lt", i, None), 0, 1, (0, math.inf)),
        (lambda i: int32("lt", i, int32("min", None, 6)), 0, 1, (0, 6)),
        (lambda i: int32("lt", i, int32("clamp", 2, None, 6)), 0, 1, (2, 6)),
        (lambda i: int32("lt", i, int32("select", 4, 7)), 0, 1, (4, 7)),
        (lambda i: both("and", int32("lt", i, 9), None), 0, 1, (0, 9)),
        (lambda i: both("or", int32("lt", i, 9), None), 0, 1, (9, math.inf)),
        (lambda i: constant(True), 0, 1, (math.inf, math.inf)),
        (lambda i: constant(False), 0, 1, (0, 0)),
        (lambda i: None, 0, 1, (0, math.inf)),
        # These are no plain counters, and no compiler was seen to write them: unknown, but never
        # too few turns.
        (lambda i: int32("eq", i, 0), 0, 3, (0, math.inf)),
        (lambda i: both("or", int32("lt", i, 9), int32("lt", i, 5)), 0, 1, (9, math.inf)),
        (lambda i: both("not", int32("ge", i, 9)), 0, 1, (0, math.inf)),
        (lambda i: int32("lt", i, 9), None, 1, (0, math.inf)),
        (lambda i: operate("lt", (i, constant(9)), Limits.of("float32")), 0, 1, (0, math.inf)),
    ],
)
def test_turns_of_a_counter(condition, start, step, expected):
    assert turns(condition, start, step) == Turns(*expected)


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
