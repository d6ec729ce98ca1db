"""The integers of a compiled module (HLO), as far as its text shows them, and with them the turns of its loops."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from .hlo import Computation, Instruction, Module, parts, root
from .trips import Limits, Turns, Value, constant, convert, during, kept, operate, slot, turns

Known = Any  # a Value, or a tuple of them for an instruction that has several results

_NAMES = {"subtract": "sub", "multiply": "mul", "minimum": "min", "maximum": "max", "negate": "neg"}


def values(module: Module, computation: Computation, args: Sequence[Known] = ()) -> dict[str, Known]:
    """What is known of each instruction of a computation, given what is known of its parameters."""
    known: dict[str, Known] = {}
    for name, instruction in computation.items():
        known[name] = _value(module, computation, instruction, args, known)
    return known


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `while`: how often it turns, what its body and its condition may be given, what is known behind it."""

    turns: Turns
    body_args: list[Known]
    condition_args: list[Known]
    results: Known


def loop(module: Module, instruction: Instruction, known: dict[str, Known]) -> Loop:
    """Reads a `while` whose computation's values are known as by `values`."""
    [body], [condition] = module.called(instruction, "body"), module.called(instruction, "condition")
    is_tuple = instruction.shape.startswith("(")
    before = known.get(instruction.operands[0])
    if is_tuple:
        before = before if isinstance(before, tuple) else (None,) * len(parts(instruction.shape))
        slots: Known = tuple(map(slot, range(len(before))))
    else:
        before, slots = (before,), slot(0)
    starts = [None if isinstance(x, tuple) else x for x in before]
    after = _result(module, body, [slots])
    after = after if isinstance(after, tuple) else (after,) if not is_tuple else (None,) * len(starts)
    found = turns(_result(module, condition, [slots]), starts, after)

    def within(at_most: float) -> list[Known]:
        seen = during(starts, after, at_most)
        return [tuple(seen) if is_tuple else seen[0]]

    behind = kept(starts, after)
    return Loop(found, within(found.high), within(found.high + 1), tuple(behind) if is_tuple else behind[0])


def _result(module: Module, computation: Computation, args: Sequence[Known]) -> Known:
    return values(module, computation, args)[root(computation).name]


def _value(
    module: Module, computation: Computation, instruction: Instruction, args: Sequence[Known], known: dict[str, Known]
) -> Known:
    operands = [known.get(name) for name in instruction.operands]
    dtype = _scalar_dtype(instruction)
    match instruction.op:
        case "parameter":
            number = int(instruction.inside)
            return args[number] if number < len(args) else None
        case "tuple":
            return tuple(operands)
        case "get-tuple-element":
            return operands[0][instruction.index] if isinstance(operands[0], tuple) else None
        case "while":
            return loop(module, instruction, known).results
        case "constant":
            return _constant(instruction.inside, dtype)
        case "fusion" | "call" if dtype:
            return _result(module, module.called(instruction, "calls", "to_apply")[0], operands)
    if dtype is None or any(isinstance(x, tuple) for x in operands):
        return None
    source = computation.get(instruction.operands[0]) if operands else None
    return _scalar(instruction, operands, Limits.of((source and _scalar_dtype(source)) or ""), Limits.of(dtype))


def _scalar(instruction: Instruction, operands: list[Value], source: Limits | None, result: Limits | None) -> Value:
    """What an operation on scalars gives, from one dtype's limits to another's."""
    match instruction.op:
        case "compare":
            direction = re.search(r"direction=(\w+)", instruction.attributes)
            return operate(direction[1].lower(), operands, source) if direction else None
        case "select":
            return operate("select", operands[1:], result)
        case "bitcast" | "broadcast" | "convert" | "copy" | "reshape":
            return convert(operands[0], source, result)
    return operate(_NAMES.get(instruction.op, instruction.op), operands, result)


def _scalar_dtype(instruction: Instruction) -> str | None:
    match = re.match(r"(\w+)\[\]", instruction.shape)
    return match[1] if match else None


def _constant(text: str, dtype: str | None) -> Value:
    if dtype == "pred":
        return constant(text == "true")
    return constant(int(text)) if dtype and Limits.of(dtype) and re.fullmatch(r"-?\d+", text) else None
