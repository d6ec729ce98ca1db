"""The matrix products of compiled programs: dtypes of their operands and results."""

import re

from sharding.audit.hlo import parse


def products(text):
    """(lhs, rhs, result, precision) of each product."""

    def dtype(shape):
        return re.match(r"\(?(\w+)\[", shape)[1]

    found = set()
    for computation in parse(text).computations.values():
        for x in computation.values():
            if x.op in ("dot", "convolution") or (x.op == "custom-call" and "gemm" in x.attributes):
                operands = [dtype(computation[name].shape) for name in x.operands[:2]]
                precision = re.search(r'operand_precision(?:=\{|":\[")(\w+)', x.attributes)
                found.add(
                    (*operands, dtype(x.shape), precision[1].lower() if precision else "default")
                )
    return found


def written_arrays(text):
    """The shapes of arrays that lie in memory, such as "f32[8,16]": results of instructions
    outside of fusions.
    """
    computations = parse(text).computations
    fused = {
        name
        for of in computations.values()
        for x in of.values()
        if x.op == "fusion"
        for name in x.all_called
    }
    outside = [
        x.shape for name, of in computations.items() if name not in fused for x in of.values()
    ]
    return {shape for shapes in outside for shape in re.findall(r"\w+\[[\d,]*\]", shapes)}
