"""How often a loop turns, read off the integers that it carries; for traced (jaxpr) and compiled (HLO) loops alike.

A reader of either language says with `operate` what becomes of the integers and conditions of a program. Inside a loop
an integer is a sum of the loop's slots (what it carries from turn to turn) and a constant. `turns` then finds the slots
that grow by the same step in every turn, and the turns in which the condition, made of comparisons of them, must hold
and must fail. A value that nothing is known of is None. An estimate is right or infinite, never too small: integers
that would leave the range of their dtype are not followed beyond it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Sequence
from typing import NamedTuple

_ENDLESS = 2**30  # turns; a loop that may take more is bounded by its counter's dtype, not by its program


class Turns(NamedTuple):
    """How often a loop turns: at least `low`, at most `high`, which is infinite where nothing bounds it."""

    low: float
    high: float


class Limits(NamedTuple):
    """What an integer dtype can hold."""

    low: int
    high: int

    @classmethod
    def of(cls, dtype: str) -> Limits | None:
        """The limits of a dtype as JAX ("int32") or HLO ("s32") writes it, None for a dtype that is no integer.

        Example:
          >>> Limits.of("s8"), Limits.of("uint8"), Limits.of("float32")
          (Limits(low=-128, high=127), Limits(low=0, high=255), None)
        """
        if not (match := re.fullmatch(r"(u)?(?:int|s)?(\d+)", dtype)):
            return None
        values = 2 ** int(match[2])
        return cls(0, values - 1) if match[1] else cls(-values // 2, values // 2 - 1)


@dataclasses.dataclass(frozen=True)
class Integer:
    """The sum of `factor * slot` over `slots`, and something that lies between `low` and `high` in every turn.

    Before it wraps around: what a comparison gets to see is the same up to multiples of what its dtype can hold.
    """

    low: int
    high: int
    slots: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: Integer) -> Integer:
        factors = dict(self.slots)
        for slot, factor in other.slots:
            factors[slot] = factors.get(slot, 0) + factor
        return Integer(
            self.low + other.low, self.high + other.high, tuple(sorted((s, f) for s, f in factors.items() if f))
        )

    def __mul__(self, by: int) -> Integer:
        low, high = sorted((self.low * by, self.high * by))
        return Integer(low, high, tuple((slot, factor * by) for slot, factor in self.slots if by))

    def __sub__(self, other: Integer) -> Integer:
        return self + other * -1

    @property
    def exact(self) -> bool:
        return self.low == self.high and not self.slots


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`left relation right` of integers that `limits` holds; relation as JAX names it: lt, le, gt, ge, eq or ne."""

    relation: str
    left: Integer
    right: Integer
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Every:
    """All of the parts hold."""

    parts: tuple[Condition, ...] = ()


@dataclasses.dataclass(frozen=True)
class Some:
    """One of the parts holds, or more."""

    parts: tuple[Condition, ...] = ()


Condition = Comparison | Every | Some | None
Value = Integer | Condition

_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def slot(index: int) -> Integer:
    """What a loop carries at `index`, at the start of a turn."""
    return Integer(0, 0, ((index, 1),))


def constant(value: bool | int) -> Value:
    """A constant of a program."""
    if isinstance(value, bool):
        return Every() if value else Some()
    return Integer(value, value)


def operate(name: str, args: Sequence[Value], limits: Limits | None) -> Value:
    """What an operation makes of scalars.

    Args:
      name: as JAX names it.
      args: its operands; of "select" without the predicate.
      limits: of its operands' dtype, None where they are no integers.

    Returns:
      The result, None where it is not known.

    Example:
      >>> operate("add", (slot(0), constant(2)), Limits.of("s32"))
      Integer(low=2, high=2, slots=((0, 1),))
    """
    if name in ("and", "or", "not"):
        return None if limits else _combine(name, args)
    if limits is None:
        return None
    integers = [arg if isinstance(arg, Integer) else None for arg in args]
    if name in _OPPOSITE:
        left, right = (Integer(*limits) if x is None else x for x in integers)
        return Comparison(name, left, right, limits)
    if name in ("min", "max", "clamp", "select"):
        return _bounded(name, [_within(x, limits) for x in integers])
    return _arithmetic(name, integers)


def convert(value: Value, source: Limits | None, target: Limits | None) -> Value:
    """What a copy makes of a scalar, from one dtype to another or the same; limits as for `operate`."""
    if source == target:
        return value
    if source is None or target is None or not isinstance(value, Integer):
        return None
    inside = _within(value, source)
    return inside if _holds(target, inside.low, inside.high) else None


def _combine(name: str, args: Sequence[Value]) -> Condition:
    conditions = tuple(None if isinstance(arg, Integer) else arg for arg in args)
    if name == "not":
        return _opposite(conditions[0])
    return Every(conditions) if name == "and" else Some(conditions)


def _opposite(condition: Condition) -> Condition:
    match condition:
        case Comparison(relation, left, right, limits):
            return Comparison(_OPPOSITE[relation], left, right, limits)
        case Every(parts):
            return Some(tuple(map(_opposite, parts)))
        case Some(parts):
            return Every(tuple(map(_opposite, parts)))
    return None


def _within(value: Integer | None, limits: Limits) -> Integer:
    """The range of an integer for operations that do not commute with its wrapping around."""
    known = value is not None and not value.slots and _holds(limits, value.low, value.high)
    return value if value is not None and known else Integer(*limits)


def _bounded(name: str, ranges: Sequence[Integer]) -> Integer:
    lows, highs = [x.low for x in ranges], [x.high for x in ranges]
    match name:
        case "min":
            return Integer(min(lows), min(highs))
        case "max":
            return Integer(max(lows), max(highs))
        case "clamp":
            return Integer(min(max(lows[:2]), lows[2]), min(max(highs[:2]), highs[2]))
    return Integer(min(lows), max(highs))


def _arithmetic(name: str, integers: Sequence[Integer | None]) -> Integer | None:
    known = [x for x in integers if x is not None]
    if len(known) < len(integers):
        return None
    match name, known:
        case "add", [a, b]:
            return a + b
        case "sub", [a, b]:
            return a - b
        case "neg", [a]:
            return a * -1
        case "mul", [a, b] if b.exact:
            return a * b.low
        case "mul", [a, b] if a.exact:
            return b * a.low
    return None


def _holds(limits: Limits, *values: float) -> bool:
    return all(limits.low <= value <= limits.high for value in values)


class _Line(NamedTuple):
    """An integer that starts between `low` and `high` and grows by `step` in each turn."""

    low: int
    high: int
    step: int


def turns(condition: Value, before: Sequence[Value], after: Sequence[Value]) -> Turns:
    """How often a loop turns.

    Args:
      condition: whether there is another turn, of the slots at its start.
      before: the slots when the loop is reached.
      after: the slots at the end of a turn, of those at its start.

    Returns:
      `Turns`; `low` is infinite where the condition never fails.

    Example:
      >>> below = operate("lt", (slot(0), constant(9)), Limits.of("s32"))
      >>> turns(below, [constant(0)], [operate("add", (slot(0), constant(2)), Limits.of("s32"))])
      Turns(low=5, high=5)
    """
    holds = _times(None if isinstance(condition, Integer) else condition, _lines(before, after))
    high = holds.false_from if holds.false_from <= _ENDLESS else math.inf
    return Turns(min(holds.true_until, holds.false_from), high)


def during(before: Sequence[Value], after: Sequence[Value], at_most: float) -> list[Value]:
    """What the slots hold at the start of any of a loop's first `at_most` turns; arguments as for `turns`."""
    found: list[Value] = []
    for line in _lines(before, after):
        if line is None or (line.step and not math.isfinite(at_most)):
            found.append(None)
        else:
            last = line.step * max(int(at_most) - 1, 0) if line.step else 0
            found.append(Integer(line.low + min(last, 0), line.high + max(last, 0)))
    return found


def kept(before: Sequence[Value], after: Sequence[Value]) -> list[Value]:
    """What is known of the slots behind a loop: those that no turn changes; arguments as for `turns`."""
    return [old if new == slot(i) else None for i, (old, new) in enumerate(zip(before, after, strict=True))]


def _lines(before: Sequence[Value], after: Sequence[Value]) -> list[_Line | None]:
    """How each slot goes, None where that is not known."""
    starts = [x if isinstance(x, Integer) and not x.slots else None for x in before]
    lines = [
        _Line(start.low, start.high, 0) if start is not None and new == slot(i) else None
        for i, (start, new) in enumerate(zip(starts, after, strict=True))
    ]
    constant_lines = list(lines)
    for i, (start, new) in enumerate(zip(starts, after, strict=True)):
        if start is None or lines[i] is not None or not isinstance(new, Integer):
            continue
        growth = _line(new - slot(i), constant_lines)
        if growth is not None and growth.low == growth.high:
            lines[i] = _Line(start.low, start.high, growth.low)
        elif (value := _line(new, constant_lines)) is not None:  # computed anew in each turn
            lines[i] = _Line(min(start.low, value.low), max(start.high, value.high), 0)
    return lines


def _line(value: Integer, lines: Sequence[_Line | None]) -> _Line | None:
    total, step = Integer(value.low, value.high), 0
    for index, factor in value.slots:
        if (line := lines[index]) is None:
            return None
        total += Integer(line.low, line.high) * factor
        step += line.step * factor
    return _Line(total.low, total.high, step)


class _Times(NamedTuple):
    """A condition holds in every turn before `true_until`, and in none from `false_from` until `false_until`."""

    true_until: float
    false_from: float
    false_until: float


_ALWAYS = _Times(math.inf, math.inf, math.inf)
_NEVER = _Times(0, 0, math.inf)
_UNKNOWN = _Times(0, math.inf, math.inf)


def _times(condition: Condition, lines: Sequence[_Line | None]) -> _Times:
    match condition:
        case Every(parts):
            return functools.reduce(_both, (_times(part, lines) for part in parts), _ALWAYS)
        case Some(parts):
            return functools.reduce(_either, (_times(part, lines) for part in parts), _NEVER)
        case Comparison():
            return _compared(condition, lines)
    return _UNKNOWN


def _both(a: _Times, b: _Times) -> _Times:
    _, false_from, false_until = min(a, b, key=operator.attrgetter("false_from"))
    return _Times(min(a.true_until, b.true_until), false_from, false_until)


def _either(a: _Times, b: _Times) -> _Times:
    false_from, false_until = max(a.false_from, b.false_from), min(a.false_until, b.false_until)
    true_until = max(a.true_until, b.true_until)
    return _Times(true_until, *((false_from, false_until) if false_from < false_until else (math.inf, math.inf)))


def _compared(condition: Comparison, lines: Sequence[_Line | None]) -> _Times:
    limits = condition.limits
    unknown = _Line(*limits, 0)
    left, right = (_line(side, lines) or unknown for side in (condition.left, condition.right))
    difference = _Line(left.low - right.high, left.high - right.low, left.step - right.step)
    opposite = _Line(-difference.high, -difference.low, -difference.step)
    match condition.relation:
        case "lt":
            times = _below(difference, 0)
        case "le":
            times = _below(difference, 1)
        case "gt":
            times = _below(opposite, 0)
        case "ge":
            times = _below(opposite, 1)
        case "eq":
            times = _equal(difference)
        case _:
            times = _unequal(difference)
    valid = min(_held(left, limits), _held(right, limits))
    false_until = min(times.false_until, valid)
    false = (times.false_from, false_until) if times.false_from < false_until else (math.inf, math.inf)
    return _Times(min(times.true_until, valid), *false)


def _held(line: _Line, limits: Limits) -> float:
    """How many turns a line surely stays within limits."""
    if not _holds(limits, line.low, line.high):
        return 0
    if line.step == 0:
        return math.inf
    room = limits.high - line.high if line.step > 0 else line.low - limits.low
    return room // abs(line.step) + 1


def _below(line: _Line, bound: int) -> _Times:
    """When a line lies below `bound`."""
    low, high = line.low - bound, line.high - bound
    if line.step > 0:
        return _Times(max(-(high // line.step), 0), max(-(low // line.step), 0), math.inf)
    if high < 0:
        return _ALWAYS
    if low >= 0:
        return _NEVER if line.step == 0 else _Times(0, 0, low // -line.step + 1)
    return _UNKNOWN


def _zero(line: _Line) -> int | None:
    """The turn in which a line that is known exactly, and moves, is 0; None where it never is."""
    turn, rest = divmod(-line.low, line.step)
    return turn if rest == 0 and turn >= 0 else None


def _equal(line: _Line) -> _Times:
    """When a line is 0."""
    if line.step == 0 and not line.low <= 0 <= line.high:
        return _NEVER
    if line.low < line.high:
        return _UNKNOWN
    if line.step == 0:
        return _ALWAYS
    turn = _zero(line)
    return _Times(1, 1, math.inf) if turn == 0 else _Times(0, 0, math.inf if turn is None else turn)


def _unequal(line: _Line) -> _Times:
    """When a line is not 0."""
    if line.step == 0 and not line.low <= 0 <= line.high:
        return _ALWAYS
    if line.low < line.high:
        return _UNKNOWN
    if line.step == 0:
        return _NEVER
    turn = _zero(line)
    return _ALWAYS if turn is None else _Times(turn, turn, turn + 1)
