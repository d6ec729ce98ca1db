"""The values of integers in a compiled module (HLO), as far as its text shows them, and the
turns of its loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .hlo import Computation, Instruction, Module, parts, root
from .trips import Limits, Loop, Turns, Value, constant, scalar

Known = Any  # a Value, or a list of them for an instruction that has several results


def values(
    module: Module, computation: Computation, args: Sequence[Known] = ()
) -> dict[str, Known]:
    """What is known of each instruction of a computation, given what is known of its parameters."""
    known: dict[str, Known] = {}
    for name, x in computation.items():
        known[name] = _value(module, computation, x, args, known)
    return known


class While(NamedTuple):
    """A `while`: its number of turns, the possible inputs of its body and condition, and what is
    known after it.
    """

    turns: Turns
    body_args: list[Known]
    condition_args: list[Known]
    results: Known


def loop(module: Module, x: Instruction, known: dict[str, Known]) -> While:
    """Reads a `while` whose state is a tuple, given the `values` of the computation that it
    stands in.
    """
    body = module.called(x, "body")
    condition = module.called(x, "condition")
    count = len(parts(x.shape))

    def slots_of(state: Known) -> list[Value]:
        if isinstance(state, list):
            return state
        return [None] * count

    def after_a_turn(slots: list[Value]) -> list[Value]:
        return slots_of(_result(module, body, [slots]))

    def goes_on(slots: list[Value]) -> Value:
        return _result(module, condition, [slots])

    counters = Loop(after_a_turn, slots_of(known.get(x.operands[0])))
    turns = counters.turns(goes_on)
    return While(
        turns, [counters.during(turns.high)], [counters.during(turns.high + 1)], counters.behind
    )


def _result(module: Module, computation: Computation, args: Sequence[Known]) -> Known:
    return values(module, computation, args)[root(computation).name]


def _value(
    module: Module,
    computation: Computation,
    x: Instruction,
    args: Sequence[Known],
    known: dict[str, Known],
) -> Known:
    operands = [known.get(name) for name in x.operands]
    match x.op:
        case "parameter":
            number = int(x.inside)
            return args[number] if number < len(args) else None
        case "tuple":
            return operands
        case "get-tuple-element":
            state = operands[0]
            return state[int(x.attribute("index"))] if isinstance(state, list) else None
        case "while":
            return loop(module, x, known).results
        case "constant":
            return _constant(x)
        case "fusion" | "call" if x.scalar_dtype or x.shape.startswith("("):
            return _result(module, module.called(x, "calls", "to_apply"), operands)
    return _scalar(computation, x, operands)


def _constant(x: Instruction) -> Value:
    if x.scalar_dtype == "pred":
        return constant(x.inside == "true")
    if Limits.of(x.scalar_dtype) is None:
        return None
    return constant(int(x.inside))


def _scalar(computation: Computation, x: Instruction, operands: list[Known]) -> Value:
    """The value of an operation on scalars; None for arrays and tuples."""
    if not x.scalar_dtype or not operands or any(isinstance(value, list) for value in operands):
        return None
    source = None
    if x.operands[0] in computation:
        source = Limits.of(computation[x.operands[0]].scalar_dtype)
    name = x.op
    if name == "compare":
        name = x.attribute("direction").lower()
    return scalar(name, operands, source, Limits.of(x.scalar_dtype))
