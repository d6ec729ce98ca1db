"""The bytes that an instruction of a compiled module (HLO) moves between a device and its
memory.
"""

from __future__ import annotations

from .hlo import Computation, Instruction, Module, root, shape_bytes


def hbm_bytes(module: Module, computation: Computation, x: Instruction) -> int:
    """The bytes of memory that an instruction reads and writes; if it slices or updates rows,
    only those rows.
    """
    read = 0
    for name in dict.fromkeys(x.operands):
        if name in computation:
            full = shape_bytes(computation[name].shape, in_hbm=True)
            read += _read(module, computation, x, name, full)
    return read + min(_written(module, computation, x), shape_bytes(x.shape, in_hbm=True))


def _read(module: Module, computation: Computation, x: Instruction, name: str, full: int) -> int:
    """The bytes that `x` reads of its operand `name`, which has `full` bytes; if it slices rows,
    only those rows.
    """
    if not full:
        return 0
    if x.op == "fusion":
        inner = module.called(x, "calls")
        places = [str(i) for i, operand in enumerate(x.operands) if operand == name]
        inputs = [y.name for y in inner.values() if y.op == "parameter" and y.inside in places]
        return min(full, sum(_read_by_all(module, inner, y, full) for y in inputs))
    if x.op == "bitcast":
        return _read_by_all(module, computation, x.name, full)
    if x.op in ("dynamic-slice", "gather") and x.operands[0] == name:
        return min(full, shape_bytes(x.shape))
    if x.op in ("dynamic-update-slice", "scatter") and x.operands[0] == name:
        return 0  # written in place
    return full


def _read_by_all(module: Module, computation: Computation, name: str, full: int) -> int:
    users = [y for y in computation.values() if name in y.operands]
    return min(full, sum(_read(module, computation, y, name, full) for y in users))


def _written(module: Module, computation: Computation, x: Instruction) -> int:
    operands = [computation[name] for name in x.operands if name in computation]
    match x.op:
        case "fusion":
            inner = module.called(x, "calls")
            return _written(module, inner, root(inner))
        case "tuple":
            return sum(_written(module, computation, y) for y in operands)
        case "bitcast" if operands:
            return _written(module, computation, operands[0])
        case "dynamic-update-slice" if len(operands) > 1:
            return shape_bytes(operands[1].shape)
        case "scatter" if len(operands) > 1:
            return shape_bytes(operands[-1].shape)
    return shape_bytes(x.shape)
