"""Flops of a traced function's matrix products, counted where the lengths of loops are still known: in the jaxpr."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from ..notes import is_rare
from .program import AnyJaxpr, jaxprs_in
from .results import Flops
from .trips import Limits, Loop, Turns, Value, constant, scalar

Cost = tuple[Flops, list[bool]]  # the flops of something, and which of its arguments it needs

_NONE = Flops(0, 0)
# They run their jaxpr once, on their own arguments.
_CALLS = frozenset({"checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2", "shard_map"})


def count_flops(jaxpr: AnyJaxpr) -> Flops:
    """The flops of a (closed) jaxpr: the shapes inside a `shard_map` are one device's.

    What no result depends on does not count, since compilers leave it out, of loops too. The turns of a `while` are
    read off the integers in its condition, see `trips`: a range where the condition depends on data too, up to infinity
    where nothing else ends the loop.
    """
    return _cost(jaxpr, [])[0]


def _cost(jaxpr: AnyJaxpr, args: Sequence[Value], wanted: Sequence[bool] | None = None) -> Cost:
    """The cost of a jaxpr's wanted results, by default all, given what is known of its arguments."""
    known = _values(jaxpr, args)
    outvars = zip(jaxpr.outvars, wanted or [True] * len(jaxpr.outvars), strict=True)
    needed = {atom for atom, is_wanted in outvars if is_wanted and isinstance(atom, core.Var)}
    total = _NONE
    for eqn in reversed(jaxpr.eqns):
        read = [var in needed for var in eqn.outvars]
        if any(read) or any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects):
            flops, reads = _equation(eqn, [_value(known, atom) for atom in eqn.invars], read)
            total += flops
            needed |= {a for a, is_read in zip(eqn.invars, reads, strict=True) if is_read and isinstance(a, core.Var)}
    return total, [var in needed for var in jaxpr.invars]


def _equation(eqn: Any, args: list[Value], wanted: list[bool]) -> Cost:
    params, everything = eqn.params, [True] * len(args)
    match eqn.primitive.name:
        case "dot_general":
            (lhs, _), _ = params["dimension_numbers"]
            return _product(eqn, math.prod(eqn.invars[0].aval.shape[d] for d in lhs)), everything
        case "ragged_dot_general":
            return _ragged_dot(eqn), everything
        case "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            return _product(eqn, math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]), everything
        case "scan":
            return _scan(params, args, wanted)
        case "while":
            return _while(params, args, wanted)
        case "cond":
            branches, reads = zip(*(_cost(branch, args[1:], wanted) for branch in params["branches"]), strict=True)
            highest = min if is_rare(str(eqn.source_info.name_stack)) else max
            flops = Flops(min(b.low for b in branches), highest(b.high for b in branches))
            return flops, [True, *map(any, zip(*reads, strict=True))]
        case "custom_linear_solve":
            return _cost(params["jaxprs"].solve, [])[0], everything
    if (called := _called(eqn)) is not None:
        return _cost(called, args, wanted)
    total = sum((_cost(jaxpr, [])[0] for jaxpr in jaxprs_in(eqn)), _NONE)
    steps = getattr(params.get("grid_mapping"), "grid", ())  # a kernel runs in each of them
    known = all(isinstance(step, int) for step in steps)
    return _times(total, Turns(math.prod(steps), math.prod(steps)) if known else Turns(0, math.inf)), everything


def _called(eqn: Any) -> AnyJaxpr | None:
    """The jaxpr that an equation runs once, on its own arguments."""
    inner = jaxprs_in(eqn) if eqn.primitive.name in _CALLS else []
    sizes = [(len(x.invars), len(x.outvars)) for x in (eqn, *inner)]
    return inner[0] if len(inner) == 1 and sizes[0] == sizes[1] else None


def _product(eqn: Any, contracted: int, groups: int = 1) -> Flops:
    flops = 2 * math.prod(eqn.outvars[0].aval.shape) * contracted // groups
    return Flops(flops, flops)


def _ragged_dot(eqn: Any) -> Flops:
    """Every row (or contracted row) belongs to one group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    lhs, _, sizes = (x.aval.shape for x in eqn.invars[:3])
    contracted = numbers.dot_dimension_numbers[0][0]
    groups = sizes[-1] if set(numbers.lhs_ragged_dimensions) & set(contracted) else 1
    return _product(eqn, math.prod(lhs[d] for d in contracted), groups)


def _times(flops: Flops, turns: Turns) -> Flops:
    """The value for a body that runs `turns` times; 0 stays 0 where `turns` is infinite."""
    low, high = ((x * n if x and n else 0) for x, n in ((flops.low, turns.low), (flops.high, turns.high)))
    return Flops(low, high)


def _scan(params: dict[str, Any], args: list[Value], wanted: list[bool]) -> Cost:
    body, length = params["jaxpr"], params["length"]
    if "ft_in" in params:  # from JAX 0.12 on, a tree that splits what it is given
        first, count, _ = (len(list(part)) for part in params["ft_in"].update(range(len(args))).unpack())
    else:
        first, count = params["num_consts"], params["num_carry"]
    consts, carry, xs = args[:first], args[first : first + count], [None] * (len(args) - first - count)
    loop = Loop(lambda slots: _results(body, [*consts, *slots, *xs])[:count], carry)
    flops, reads = _turn(body, [*consts, *loop.during(length), *xs], wanted, slice(first, first + count))
    return _times(flops, Turns(length, length)), reads


def _while(params: dict[str, Any], args: list[Value], wanted: list[bool]) -> Cost:
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    asked_of, consts, carry = args[:first], args[first : first + second], args[first + second :]
    loop = Loop(lambda slots: _results(body, [*consts, *slots]), carry)
    turns = loop.turns(lambda slots: _results(condition, [*asked_of, *slots])[0])
    asked = Turns(turns.low + 1, turns.high + 1)  # the condition, once more than there are turns
    asking, asks = _cost(condition, [*asked_of, *loop.during(asked.high)])
    wanted = [a or b for a, b in zip(wanted, asks[first:], strict=True)]
    flops, reads = _turn(body, [*consts, *loop.during(turns.high)], wanted, slice(second, None))
    return _times(flops, turns) + _times(asking, asked), asks[:first] + reads


def _turn(body: AnyJaxpr, args: list[Value], wanted: list[bool], carry: slice) -> Cost:
    """The cost of a loop's body for its wanted results. The first ones are the arguments `carry` of the next turn."""
    while True:
        flops, reads = _cost(body, args, wanted)
        # what a turn reads, the turn before must compute
        reads[carry] = [a or b for a, b in zip(wanted, reads[carry], strict=False)]
        if reads[carry] == wanted[: len(reads[carry])]:
            return flops, reads
        wanted = reads[carry] + wanted[len(reads[carry]) :]


def _values(jaxpr: AnyJaxpr, args: Sequence[Value]) -> dict[Any, Value]:
    """What is known of the scalars of a jaxpr outside of its loops and branches, given that of its arguments."""
    known: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True)) if args else {}
    consts = zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=False)
    known |= {var: _constant(var.aval, value) for var, value in consts}
    for eqn in jaxpr.eqns:
        of_args, called = [_value(known, atom) for atom in eqn.invars], _called(eqn)
        results = [_result(eqn, of_args)] if called is None else _results(called, of_args)
        known.update(zip(eqn.outvars, results, strict=False))
    return known


def _results(jaxpr: AnyJaxpr, args: Sequence[Value]) -> list[Value]:
    known = _values(jaxpr, args)
    return [_value(known, atom) for atom in jaxpr.outvars]


def _value(known: dict[Any, Value], atom: Any) -> Value:
    return _constant(atom.aval, atom.val) if isinstance(atom, core.Literal) else known.get(atom)


def _result(eqn: Any, args: list[Value]) -> Value:
    """What is known of the first result of an equation."""
    operands, results = eqn.invars, eqn.outvars
    if not operands or not results or getattr(results[0].aval, "shape", None) != ():
        return None
    return scalar(eqn.primitive.name, args, _limits(operands[0].aval), _limits(results[0].aval))


def _limits(aval: Any) -> Limits | None:
    return Limits.of(str(getattr(aval, "dtype", "")))


def _constant(aval: Any, value: Any) -> Value:
    """The value of a literal or of a constant of a closed jaxpr."""
    if getattr(aval, "shape", None) != () or isinstance(value, jax.core.Tracer):
        return None
    if aval.dtype == bool:
        return constant(bool(value))
    return constant(int(value)) if _limits(aval) else None
