"""Flops of a traced function's matrix products, counted where the lengths of loops are still known: in the jaxpr."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ..notes import is_rare
from .dead_code import CALLS, AnyJaxpr, Wanted, matters, of_body, read, split
from .results import Flops
from .trips import Limits, Loop, Turns, Value, constant, convert, operate

_NONE = Flops(0, 0)


def count_flops(jaxpr: AnyJaxpr) -> Flops:
    """The flops of a (closed) jaxpr: the shapes inside a `shard_map` are one device's.

    What no result depends on does not count, since compilers leave it out.

    Args:
      jaxpr: as `jax.make_jaxpr` or `jax.jit(f).trace(...)` give it.

    Returns:
      `Flops`. The turns of a `while` are read off the integers in its condition, see `trips`: a range where
      the condition depends on data too, up to infinity where nothing else ends the loop.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> count_flops(jax.make_jaxpr(lambda a: a @ a)(jnp.ones((8, 8)))).low
      1024
    """
    return _run(jaxpr, [], True)[0]


def _run(
    jaxpr: AnyJaxpr, args: Sequence[Value], count: bool, wanted: Wanted | None = None
) -> tuple[Flops, list[Value]]:
    """The flops of a jaxpr, if they are to be counted, and what is known of its `wanted` results, by default all."""
    inner, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    known: dict[Any, Value] = dict(zip(inner.invars, args, strict=True)) if args else {}
    known |= {var: _constant(var.aval, value) for var, value in zip(inner.constvars, consts, strict=False)}

    def value(atom: Any) -> Value:
        return _constant(atom.aval, atom.val) if isinstance(atom, core.Literal) else known.get(atom)

    total = _NONE
    for eqn, is_read in zip(inner.eqns, read(jaxpr, wanted or (True,) * len(inner.outvars))[0], strict=True):
        if matters(eqn, is_read):
            flops, results = _equation(eqn, [value(atom) for atom in eqn.invars], count, is_read)
            total += flops
            known.update(zip(eqn.outvars, results, strict=False))
    return total, [value(atom) for atom in inner.outvars]


def _equation(eqn: Any, args: list[Value], count: bool, wanted: Wanted) -> tuple[Flops, list[Value]]:
    """The flops of an equation, and what is known of its results; an empty list means nothing is known."""
    params = eqn.params
    match eqn.primitive.name:
        case "dot_general":
            (lhs, _), (_, _) = params["dimension_numbers"]
            contracted = math.prod(eqn.invars[0].aval.shape[d] for d in lhs)
            return _exactly(2 * math.prod(eqn.outvars[0].aval.shape) * contracted), []
        case "ragged_dot_general":
            return _ragged_dot(eqn), []
        case "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            features = kernel[params["dimension_numbers"].rhs_spec[0]]
            return _exactly(2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // features), []
        case "scan" | "while" | "cond" if not count:
            return _NONE, []
        case "scan":
            return _scan(params, args, of_body(eqn, wanted)), []
        case "while":
            return _while(params, args, of_body(eqn, wanted)), []
        case "cond":
            branches = [_run(branch, args[1:], True, wanted)[0] for branch in params["branches"]]
            highest = min if is_rare(str(eqn.source_info.name_stack)) else max
            return Flops(min(b.low for b in branches), highest(b.high for b in branches)), []
        case "custom_linear_solve":
            return _run(params["jaxprs"].solve, [], count)[0], []
    inner = [value for value in params.values() if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))]
    if not inner:
        return _NONE, [_scalar(eqn, args)]
    if eqn.primitive.name in CALLS and len(inner) == 1 and _arity(inner[0]) == len(args):
        same = len(getattr(inner[0], "jaxpr", inner[0]).outvars) == len(wanted)
        return _run(inner[0], args, count, wanted if same else None)
    total = sum((_run(j, [], count)[0] for j in inner), _NONE)
    steps = getattr(params.get("grid_mapping"), "grid", ())  # a kernel runs in each of them
    known = all(isinstance(step, int) for step in steps)
    return _times(total, Turns(math.prod(steps), math.prod(steps)) if known else Turns(0, math.inf)), []


def _exactly(flops: float) -> Flops:
    return Flops(flops, flops)


def _times(flops: Flops, turns: Turns) -> Flops:
    """The value for a body that runs `turns` times; 0 stays 0 where `turns` is infinite."""
    low, high = ((x * n if x and n else 0) for x, n in ((flops.low, turns.low), (flops.high, turns.high)))
    return Flops(low, high)


def _arity(jaxpr: AnyJaxpr) -> int:
    return len(getattr(jaxpr, "jaxpr", jaxpr).invars)


def _ragged_dot(eqn: Any) -> Flops:
    """Every row (or contracted row) belongs to one group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    lhs, _, sizes = (x.aval.shape for x in eqn.invars[:3])
    contracted = numbers.dot_dimension_numbers[0][0]
    flops = 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contracted)
    groups = sizes[-1] if set(numbers.lhs_ragged_dimensions) & set(contracted) else 1
    return _exactly(flops // groups)


def _scan(params: dict[str, Any], args: list[Value], wanted: Wanted) -> Flops:
    body, length = params["jaxpr"], params["length"]
    first, count = split(params, len(args))
    consts, carry = args[:first], args[first : first + count]
    xs: list[Value] = [None] * (_arity(body) - len(consts) - len(carry))
    loop = Loop(lambda slots: _run(body, [*consts, *slots, *xs], False, wanted)[1][:count], carry)
    flops, _ = _run(body, [*consts, *loop.during(length), *xs], True, wanted)
    return _times(flops, Turns(length, length))


def _while(params: dict[str, Any], args: list[Value], wanted: Wanted) -> Flops:
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    condition_consts, body_consts = args[:first], args[first:last]
    loop = Loop(lambda slots: _run(body, [*body_consts, *slots], False, wanted)[1], args[last:])
    turns = loop.turns(lambda slots: _run(condition, [*condition_consts, *slots], False)[1][0])
    asked = Turns(turns.low + 1, turns.high + 1)  # the condition, once more than there are turns
    flops, _ = _run(body, [*body_consts, *loop.during(turns.high)], True, wanted)
    asking, _ = _run(condition, [*condition_consts, *loop.during(asked.high)], True)
    return _times(flops, turns) + _times(asking, asked)


_SAME = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "pcast", "pvary", "reshape", "sharding_constraint",
     "squeeze"}
)  # fmt: skip


def _scalar(eqn: core.JaxprEqn, args: list[Value]) -> Value:
    """What is known of the result of an operation on scalars."""
    name, operands, result = eqn.primitive.name, [x.aval for x in eqn.invars], eqn.outvars[0].aval
    if getattr(result, "shape", None) != () or not operands:
        return None
    if name in _SAME:
        return convert(args[0], _limits(operands[0]), _limits(result))
    if name == "select_n":
        return operate("select", args[1:], _limits(operands[1]))
    return operate(name, args, _limits(operands[0]))


def _limits(aval: Any) -> Limits | None:
    dtype = getattr(aval, "dtype", None)
    return Limits.of(str(dtype)) if dtype is not None and jnp.issubdtype(dtype, jnp.integer) else None


def _constant(aval: Any, value: Any) -> Value:
    """The value of a literal or of a constant of a closed jaxpr."""
    if getattr(aval, "shape", None) != () or isinstance(value, jax.core.Tracer):
        return None
    if aval.dtype == bool:
        return constant(bool(value))
    return constant(int(value)) if _limits(aval) else None
