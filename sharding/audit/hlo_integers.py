"""The values of integers in a compiled module (HLO), as far as its text shows them, and the turns of its loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .hlo import Computation, Instruction, Module, parts, root
from .trips import Limits, Loop, Turns, Value, constant, convert, operate

Known = Any  # a Value, or a list of them for an instruction that has several results

_NAMES = {"subtract": "sub", "multiply": "mul", "minimum": "min", "maximum": "max"}


def values(module: Module, computation: Computation, args: Sequence[Known] = ()) -> dict[str, Known]:
    """What is known of each instruction of a computation, given what is known of its parameters."""
    known: dict[str, Known] = {}
    for name, instruction in computation.items():
        known[name] = _value(module, computation, instruction, args, known)
    return known


class While(NamedTuple):
    """A `while`: its number of turns, the possible inputs of its body and condition, and what is known after it."""

    turns: Turns
    body_args: list[Known]
    condition_args: list[Known]
    results: Known


def loop(module: Module, instruction: Instruction, known: dict[str, Known]) -> While:
    """Reads a `while`, given the `values` of the computation that it stands in."""
    [body], [condition] = module.called(instruction, "body"), module.called(instruction, "condition")
    is_tuple = instruction.shape.startswith("(")
    nothing: list[Value] = [None] * (len(parts(instruction.shape)) if is_tuple else 1)

    def flat(found: Known) -> list[Value]:
        return (found if isinstance(found, list) else nothing) if is_tuple else [found]

    def whole(slots: list[Value]) -> Known:
        return slots if is_tuple else slots[0]

    read = Loop(lambda slots: flat(_result(module, body, [whole(slots)])), flat(known.get(instruction.operands[0])))
    turns = read.turns(lambda slots: _result(module, condition, [whole(slots)]))
    during, asked = read.during(turns.high), read.during(turns.high + 1)
    return While(turns, [whole(during)], [whole(asked)], whole(read.behind))


def _result(module: Module, computation: Computation, args: Sequence[Known]) -> Known:
    return values(module, computation, args)[root(computation).name]


def _value(
    module: Module, computation: Computation, instruction: Instruction, args: Sequence[Known], known: dict[str, Known]
) -> Known:
    operands = [known.get(name) for name in instruction.operands]
    dtype = instruction.scalar_dtype
    match instruction.op:
        case "parameter":
            number = int(instruction.inside)
            return args[number] if number < len(args) else None
        case "tuple":
            return operands
        case "get-tuple-element":
            return operands[0][instruction.index] if isinstance(operands[0], list) else None
        case "while":
            return loop(module, instruction, known).results
        case "constant":
            return _constant(instruction)
        case "fusion" | "call" if dtype or instruction.shape.startswith("("):
            return _result(module, module.called(instruction, "calls", "to_apply")[0], operands)
    if dtype is None or not operands or any(isinstance(x, list) for x in operands):
        return None
    source = computation.get(instruction.operands[0])
    return _scalar(instruction, operands, Limits.of((source and source.scalar_dtype) or ""), Limits.of(dtype))


def _scalar(instruction: Instruction, operands: list[Value], source: Limits | None, result: Limits | None) -> Value:
    """The result of an operation on scalars, given the limits of its operands' and its result's dtype."""
    match instruction.op:
        case "compare":
            return operate(instruction.direction.lower(), operands, source)
        case "select":
            return operate("select", operands[1:], result)
        case "bitcast" | "broadcast" | "convert" | "copy" | "reshape":
            return convert(operands[0], source, result)
    return operate(_NAMES.get(instruction.op, instruction.op), operands, result)


def _constant(x: Instruction) -> Value:
    if x.scalar_dtype == "pred":
        return constant(x.inside == "true")
    return constant(x.integer) if x.integer is not None and Limits.of(x.scalar_dtype or "") else None
