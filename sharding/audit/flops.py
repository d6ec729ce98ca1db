"""Flops of a traced function's matrix products, counted where the lengths of loops are still
known: in the jaxpr.
"""

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
_CALLS = frozenset(
    {
        "checkpoint",
        "closed_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "jit",
        "remat2",
        "shard_map",
    }
)


def count_flops(jaxpr: AnyJaxpr) -> Flops:
    """The flops of a (closed) jaxpr: the shapes inside a `shard_map` are one device's.

    What no result depends on does not count, since compilers leave it out, of loops too. The turns
    of a `while` are read off the integers in its condition, see `trips`: a range where the
    condition depends on data too, up to infinity where nothing else ends the loop.
    """
    return _cost(jaxpr, [])[0]


def _cost(jaxpr: AnyJaxpr, args: Sequence[Value], wanted: Sequence[bool] | None = None) -> Cost:
    """The cost of a jaxpr's wanted results, by default all, given what is known of its
    arguments.
    """
    known = _values(jaxpr, args)
    needed = _variables(jaxpr.outvars, wanted or [True] * len(jaxpr.outvars))
    total = _NONE
    for eqn in reversed(jaxpr.eqns):
        results_needed = [var in needed for var in eqn.outvars]
        if any(results_needed) or _has_effects(eqn):
            args_known = [_value(known, atom) for atom in eqn.invars]
            flops, args_needed = _equation(eqn, args_known, results_needed)
            total += flops
            needed |= _variables(eqn.invars, args_needed)
    return total, [var in needed for var in jaxpr.invars]


def _variables(atoms: Sequence[Any], wanted: Sequence[bool]) -> set[Any]:
    """The wanted atoms that are variables; the others are literals."""
    return {
        atom
        for atom, is_wanted in zip(atoms, wanted, strict=True)
        if is_wanted and isinstance(atom, core.Var)
    }


def _has_effects(eqn: Any) -> bool:
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _equation(eqn: Any, args: list[Value], wanted: list[bool]) -> Cost:
    params = eqn.params
    everything = [True] * len(args)
    match eqn.primitive.name:
        case "dot_general":
            (lhs, _), _ = params["dimension_numbers"]
            return _product(eqn, math.prod(eqn.invars[0].aval.shape[d] for d in lhs)), everything
        case "ragged_dot_general":
            return _ragged_dot(eqn), everything
        case "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            return (
                _product(eqn, math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]),
                everything,
            )
        case "scan":
            return _scan(params, args, wanted)
        case "while":
            return _while(params, args, wanted)
        case "cond":
            return _conditional(eqn, args, wanted)
        case "custom_linear_solve":
            return _cost(params["jaxprs"].solve, [])[0], everything
    called = _called(eqn)
    if called is not None:
        return _cost(called, args, wanted)
    total = sum((_cost(jaxpr, [])[0] for jaxpr in jaxprs_in(eqn)), _NONE)
    return _times(total, _kernel_steps(eqn)), everything


def _conditional(eqn: Any, args: list[Value], wanted: list[bool]) -> Cost:
    """The cheapest branch at least, and the dearest at most unless it is rarely taken."""
    branches = [_cost(branch, args[1:], wanted) for branch in eqn.params["branches"]]
    lows = [flops.low for flops, _ in branches]
    highs = [flops.high for flops, _ in branches]
    most = min if is_rare(str(eqn.source_info.name_stack)) else max
    needed = zip(*(reads for _, reads in branches), strict=True)
    return Flops(min(lows), most(highs)), [True, *map(any, needed)]


def _kernel_steps(eqn: Any) -> Turns:
    """How often the body of a kernel runs, and once for anything else."""
    steps = getattr(eqn.params.get("grid_mapping"), "grid", ())
    if not all(isinstance(step, int) for step in steps):
        return Turns(0, math.inf)
    return Turns(math.prod(steps), math.prod(steps))


def _called(eqn: Any) -> AnyJaxpr | None:
    """The jaxpr that an equation runs once, on its own arguments."""
    if eqn.primitive.name not in _CALLS:
        return None
    inner = jaxprs_in(eqn)
    if len(inner) != 1:
        return None
    if len(inner[0].invars) != len(eqn.invars) or len(inner[0].outvars) != len(eqn.outvars):
        return None
    return inner[0]


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
    return Flops(_product_or_zero(flops.low, turns.low), _product_or_zero(flops.high, turns.high))


def _product_or_zero(count: float, turns: float) -> float:
    if not count or not turns:  # 0 * inf would be NaN
        return 0
    return count * turns


def _scan(params: dict[str, Any], args: list[Value], wanted: list[bool]) -> Cost:
    body = params["jaxpr"]
    length = params["length"]
    if "ft_in" in params:  # from JAX 0.12 on, a tree that splits what it is given
        first, count, _ = (
            len(list(part)) for part in params["ft_in"].update(range(len(args))).unpack()
        )
    else:
        first = params["num_consts"]
        count = params["num_carry"]
    consts = args[:first]
    carry = args[first : first + count]
    xs = [None] * (len(args) - first - count)
    loop = Loop(lambda slots: _results(body, [*consts, *slots, *xs])[:count], carry)
    flops, reads = _turn(
        body, [*consts, *loop.during(length), *xs], wanted, slice(first, first + count)
    )
    return _times(flops, Turns(length, length)), reads


def _while(params: dict[str, Any], args: list[Value], wanted: list[bool]) -> Cost:
    condition = params["cond_jaxpr"]
    body = params["body_jaxpr"]
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    condition_consts = args[:first]
    body_consts = args[first:second]
    loop = Loop(lambda slots: _results(body, [*body_consts, *slots]), args[second:])
    turns = loop.turns(lambda slots: _results(condition, [*condition_consts, *slots])[0])
    checks = Turns(turns.low + 1, turns.high + 1)  # the condition, once more than there are turns
    check_flops, check_reads = _cost(condition, [*condition_consts, *loop.during(checks.high)])
    wanted = [a or b for a, b in zip(wanted, check_reads[first:], strict=True)]
    body_args = [*body_consts, *loop.during(turns.high)]
    flops, body_reads = _turn(body, body_args, wanted, slice(len(body_consts), None))
    return _times(flops, turns) + _times(check_flops, checks), check_reads[:first] + body_reads


def _turn(body: AnyJaxpr, args: list[Value], wanted: list[bool], carry: slice) -> Cost:
    """The cost of a loop's body for its wanted results.

    The first ones are the arguments `carry` of the next turn.
    """
    while True:
        flops, reads = _cost(body, args, wanted)
        # what a turn reads, the turn before must compute
        reads[carry] = [a or b for a, b in zip(wanted, reads[carry], strict=False)]
        if reads[carry] == wanted[: len(reads[carry])]:
            return flops, reads
        wanted = reads[carry] + wanted[len(reads[carry]) :]


def _values(jaxpr: AnyJaxpr, args: Sequence[Value]) -> dict[Any, Value]:
    """What is known of the scalars of a jaxpr outside of its loops and branches, given that of
    its arguments.
    """
    known: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True)) if args else {}
    consts = zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=False)
    known |= {var: _constant(var.aval, value) for var, value in consts}
    for eqn in jaxpr.eqns:
        args_known = [_value(known, atom) for atom in eqn.invars]
        called = _called(eqn)
        results = [_result(eqn, args_known)] if called is None else _results(called, args_known)
        known.update(zip(eqn.outvars, results, strict=False))
    return known


def _results(jaxpr: AnyJaxpr, args: Sequence[Value]) -> list[Value]:
    known = _values(jaxpr, args)
    return [_value(known, atom) for atom in jaxpr.outvars]


def _value(known: dict[Any, Value], atom: Any) -> Value:
    if isinstance(atom, core.Literal):
        return _constant(atom.aval, atom.val)
    return known.get(atom)


def _result(eqn: Any, args: list[Value]) -> Value:
    """What is known of the first result of an equation."""
    if not eqn.invars or not eqn.outvars:
        return None
    result = eqn.outvars[0].aval
    if getattr(result, "shape", None) != ():
        return None
    return scalar(eqn.primitive.name, args, _limits(eqn.invars[0].aval), _limits(result))


def _limits(aval: Any) -> Limits | None:
    return Limits.of(str(getattr(aval, "dtype", "")))


def _constant(aval: Any, value: Any) -> Value:
    """The value of a literal or of a constant of a closed jaxpr."""
    if getattr(aval, "shape", None) != () or isinstance(value, jax.core.Tracer):
        return None
    if aval.dtype == bool:
        return constant(bool(value))
    if not _limits(aval):
        return None
    return constant(int(value))
