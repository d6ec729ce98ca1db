"""The values of integers in a compiled module (HLO), as far as its text shows them, and the turns of its loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .hlo import Computation, Instruction, Module, parts, root
from .trips import Limits, Loop, Turns, Value, constant, scalar

Known = Any  # a Value, or a list of them for an instruction that has several results


def values(module: Module, computation: Computation, args: Sequence[Known] = ()) -> dict[str, Known]:
    """What is known of each instruction of a computation, given what is known of its parameters."""
    known: dict[str, Known] = {}
    for name, x in computation.items():
        known[name] = _value(module, computation, x, args, known)
    return known


class While(NamedTuple):
    """A `while`: its number of turns, the possible inputs of its body and condition, and what is known after it."""

    turns: Turns
    body_args: list[Known]
    condition_args: list[Known]
    results: Known


def loop(module: Module, x: Instruction, known: dict[str, Known]) -> While:
    """Reads a `while` whose state is a tuple, given the `values` of the computation that it stands in."""
    body, condition = module.called(x, "body"), module.called(x, "condition")
    nothing: list[Value] = [None] * len(parts(x.shape))

    def slots_of(found: Known) -> list[Value]:
        return found if isinstance(found, list) else nothing

    read = Loop(lambda slots: slots_of(_result(module, body, [slots])), slots_of(known.get(x.operands[0])))
    turns = read.turns(lambda slots: _result(module, condition, [slots]))
    return While(turns, [read.during(turns.high)], [read.during(turns.high + 1)], read.behind)


def _result(module: Module, computation: Computation, args: Sequence[Known]) -> Known:
    return values(module, computation, args)[root(computation).name]


def _value(
    module: Module, computation: Computation, x: Instruction, args: Sequence[Known], known: dict[str, Known]
) -> Known:
    operands = [known.get(name) for name in x.operands]
    result = Limits.of(x.scalar_dtype)
    match x.op:
        case "parameter":
            number = int(x.inside)
            return args[number] if number < len(args) else None
        case "tuple":
            return operands
        case "get-tuple-element":
            return operands[0][int(x.attribute("index"))] if isinstance(operands[0], list) else None
        case "while":
            return loop(module, x, known).results
        case "constant" if x.scalar_dtype == "pred":
            return constant(x.inside == "true")
        case "constant":
            return constant(int(x.inside)) if result else None
        case "fusion" | "call" if x.scalar_dtype or x.shape.startswith("("):
            return _result(module, module.called(x, "calls", "to_apply"), operands)
    if not x.scalar_dtype or not operands or any(isinstance(value, list) for value in operands):
        return None
    source = Limits.of(computation[x.operands[0]].scalar_dtype) if x.operands[0] in computation else None
    name = x.attribute("direction").lower() if x.op == "compare" else x.op
    return scalar(name, operands, source, result)
