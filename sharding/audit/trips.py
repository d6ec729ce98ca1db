"""The number of turns of a loop, traced (jaxpr) or compiled (HLO), read from the counters that it
carries.

A counter changes by the same step in each turn. Conditions compare it with a constant or another
counter, and may also depend on data. All else is unknown: None for a value, 0 to infinitely many
turns. An estimate is never too small.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# turns; a loop that may take more is bounded by its counter's dtype, not by its program
_ENDLESS = 2**30


class Turns(NamedTuple):
    """How often a loop turns: at least `low`, at most `high`, which is infinite if nothing bounds
    it.

    As the value of a condition: the condition holds in each turn before `low`, and fails in turn
    `high` at the latest.
    """

    low: float
    high: float


_ALWAYS = Turns(math.inf, math.inf)
_NEVER = Turns(0, 0)
_UNKNOWN = Turns(0, math.inf)


class Limits(NamedTuple):
    """The smallest and the largest number of an integer dtype."""

    low: int
    high: int

    @classmethod
    def of(cls, dtype: str) -> Limits | None:
        """The limits of a dtype as JAX ("int32") or HLO ("s32") writes it; None if it is no
        integer.
        """
        bits = dtype.removeprefix("u").removeprefix("int").removeprefix("s")
        if not bits.isdecimal():
            return None
        count = 2 ** int(bits)
        if dtype.startswith("u"):
            return cls(0, count - 1)
        return cls(-count // 2, count // 2 - 1)

    def hold(self, x: Integer) -> bool:
        return self.low <= x.low and x.high <= self.high


@dataclasses.dataclass(frozen=True)
class Integer:
    """An integer from `low` to `high` in a loop's first turn that grows by `step` each turn, before
    it wraps around.

    Inside a loop's body it is added to what the loop carries at `slot`, where that is not None.
    """

    low: int
    high: int
    step: int = 0
    slot: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the range is the same in every turn."""
        return self.slot is None and not self.step

    def over(self, turns: float) -> Integer | None:
        """The range of the first `turns` turns."""
        if self.is_fixed:
            return self
        if math.isinf(turns):
            return None
        grown = self.step * max(int(turns) - 1, 0)
        return Integer(self.low + min(grown, 0), self.high + max(grown, 0))


Value = Integer | Turns | None


def constant(value: bool | int) -> Value:
    if value is True:
        return _ALWAYS
    if value is False:
        return _NEVER
    return Integer(value, value)


def _clamp(low: int, x: int, high: int) -> int:
    return min(max(x, low), high)


# how the ends of a result's range follow from those of its operands
_ENDS: dict[str, Any] = {
    "min": (min, min),
    "max": (max, max),
    "clamp": (_clamp, _clamp),
    "select": (min, max),
}


# operations that keep the value of a scalar, and HLO's names of others
_COPIES = frozenset(
    {"bitcast", "broadcast", "broadcast_in_dim", "convert", "convert_element_type", "copy", "pcast", "pvary", "reshape",
     "sharding_constraint", "squeeze"}
)  # fmt: skip
_NAMES = {"subtract": "sub", "multiply": "mul", "minimum": "min", "maximum": "max"}
_RELATIONS = ("lt", "le", "gt", "ge", "ne")


def scalar(name: str, args: Sequence[Value], source: Limits | None, result: Limits | None) -> Value:
    """The result of an operation of JAX or HLO on scalars, given the limits of its operands' and
    its result's dtype.
    """
    if name in _COPIES:
        return convert(args[0], source, result)
    if name in ("select", "select_n"):
        return operate("select", args[1:], result)
    return operate(_NAMES.get(name, name), args, source)


def operate(name: str, args: Sequence[Value], limits: Limits | None) -> Value:
    """The result of an operation on scalars, as far as its operands are known.

    Args:
      name: as JAX names it.
      args: its operands; for "select", without the predicate.
      limits: those of its operands' dtype; None if they are not integers.
    """
    if limits is None:
        return _combined(name, args)
    if name in _RELATIONS:
        left, right = (_any_integer(arg, limits) for arg in args)
        return _compared(name, left, right, limits)
    if name in _ENDS:
        least, most = _ENDS[name]
        ranges = [_within(arg, limits) for arg in args]
        return Integer(least(*(x.low for x in ranges)), most(*(x.high for x in ranges)))
    match name, args:
        case "add", [Integer() as a, Integer() as b]:
            return _added(a, b)
        case "sub", [Integer() as a, Integer() as b] if b.slot is None:
            return Integer(a.low - b.high, a.high - b.low, a.step - b.step, a.slot)
        case "mul", [Integer() as a, Integer() as b]:
            return _multiplied(a, b)
    return None


def _combined(name: str, args: Sequence[Value]) -> Value:
    """Two conditions, joined by "and" or "or"."""
    conditions = [arg if isinstance(arg, Turns) else _UNKNOWN for arg in args]
    lows = [turns.low for turns in conditions]
    if name == "and":
        return Turns(min(lows), min(turns.high for turns in conditions))
    if name == "or":
        return Turns(max(lows), math.inf)  # the turn in which both fail is not computed
    return None


def _any_integer(value: Value, limits: Limits) -> Integer:
    if isinstance(value, Integer):
        return value
    return Integer(*limits)


def _added(a: Integer, b: Integer) -> Value:
    if a.slot is not None and b.slot is not None:
        return None
    slot = b.slot if a.slot is None else a.slot
    return Integer(a.low + b.low, a.high + b.high, a.step + b.step, slot)


def _multiplied(a: Integer, b: Integer) -> Value:
    """The product of an integer and a known number."""
    if a.is_fixed and a.low == a.high:
        number = a.low
        other = b
    elif b.is_fixed and b.low == b.high:
        number = b.low
        other = a
    else:
        return None
    if other.slot is not None:
        return None
    low, high = sorted((other.low * number, other.high * number))
    return Integer(low, high, other.step * number)


def convert(value: Value, source: Limits | None, target: Limits | None) -> Value:
    """A scalar after a copy or a cast to another dtype; limits as for `operate`."""
    if source == target:
        return value
    if source is None or target is None or not isinstance(value, Integer):
        return None
    inside = _within(value, source)
    if not target.hold(inside):
        return None
    return inside


def _within(value: Value, limits: Limits) -> Integer:
    """The range of an integer for operations that do not commute with its wrapping around."""
    if isinstance(value, Integer) and value.is_fixed and limits.hold(value):
        return value
    return Integer(*limits)


def _compared(relation: str, left: Integer, right: Integer, limits: Limits) -> Value:
    if left.slot is not None or right.slot is not None:
        return None
    if relation in ("gt", "ge"):
        return _compared({"gt": "lt", "ge": "le"}[relation], right, left, limits)
    low = left.low - right.high
    high = left.high - right.low
    step = left.step - right.step
    if relation == "ne":
        turns = _until_zero(low, high, step)
    elif relation == "le":
        turns = _while_negative(low - 1, high - 1, step)
    else:
        turns = _while_negative(low, high, step)
    valid = min(_turns_within(left, limits), _turns_within(right, limits))
    if turns.high < valid:
        return turns
    return Turns(min(turns.low, valid), math.inf)


def _while_negative(low: int, high: int, step: int) -> Turns:
    """How long a difference from `low` to `high` that grows by `step` each turn stays below 0."""
    if step > 0:
        return Turns(max(-(high // step), 0), max(-(low // step), 0))
    if high < 0:
        return _ALWAYS
    if low >= 0:
        return _NEVER
    return _UNKNOWN


def _until_zero(low: int, high: int, step: int) -> Turns:
    """How long a difference that grows by `step` each turn is not 0."""
    if low < high or not step:
        return _UNKNOWN
    turn, rest = divmod(-low, step)
    if rest or turn < 0:
        return _ALWAYS
    return Turns(turn, turn)


def _turns_within(x: Integer, limits: Limits) -> float:
    """How many turns an integer surely stays within limits."""
    if not limits.hold(x):
        return 0
    if not x.step:
        return math.inf
    if x.step > 0:
        return (limits.high - x.high) // x.step + 1
    return (x.low - limits.low) // -x.step + 1


class Loop:
    """A loop's slots, which it carries from turn to turn.

    Args:
      body: maps the slots at the start of a turn to those at its end; called twice.
      before: the slots when the loop is reached.

    Attributes:
      slots: how each slot changes from turn to turn, None where that is not known.
      behind: what is known of the slots after the loop: those that no turn changes.
    """

    def __init__(
        self, body: Callable[[list[Value]], Sequence[Value]], before: Sequence[Value]
    ) -> None:
        anything: list[Value] = [Integer(0, 0, slot=i) for i in range(len(before))]
        unchanged = [new == slot for new, slot in zip(body(anything), anything, strict=True)]
        self.behind = [x if is_same else None for x, is_same in zip(before, unchanged, strict=True)]
        # Again, with the slots that never change: the step of another slot may be one of them.
        start = [x if isinstance(x, Integer) and x.is_fixed else None for x in before]
        known = list(anything)
        for i, x in enumerate(start):
            if x is not None and unchanged[i]:
                known[i] = x
        after = body(known)
        self.slots = [_slot(i, start[i], after[i]) for i in range(len(before))]

    def turns(self, condition: Callable[[list[Value]], Value]) -> Turns:
        """How often the loop turns, given its condition as a function of the slots at the start
        of a turn.
        """
        holds = condition([*self.slots])
        if not isinstance(holds, Turns):
            return _UNKNOWN
        if holds.high <= _ENDLESS:
            return Turns(min(holds.low, holds.high), holds.high)
        return Turns(holds.low, math.inf)

    def during(self, turns: float) -> list[Value]:
        """The possible values of the slots at the start of any of the first `turns` turns."""
        return [None if x is None else x.over(turns) for x in self.slots]


def _slot(index: int, start: Integer | None, new: Value) -> Integer | None:
    """The range of a loop's slot that holds `new` after a turn."""
    if start is None or not isinstance(new, Integer) or new.step:
        return None
    if new.slot is None:  # the same as before the loop, or computed anew in each turn
        return Integer(min(start.low, new.low), max(start.high, new.high))
    if new.slot == index and new.low == new.high:
        return Integer(start.low, start.high, new.low)
    return None
