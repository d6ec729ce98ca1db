"""Flops of a traced function's matrix products, counted where the lengths of loops are still known: in the jaxpr."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax.extend import core

_SAME_VALUE = frozenset({"pvary", "pcast", "convert_element_type"})  # of the constant that they take in


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products on one device; a multiplication and an addition are two.

    Args:
      low: where loops whose length depends on data run as little as they can.
      high: where they run as long as they can; infinite where nothing bounds them.
    """

    low: float
    high: float

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.low + other.low, self.high + other.high)

    def __str__(self) -> str:
        low, high = f"{self.low / 1e9:.3f}", f"{self.high / 1e9:.3f}"
        return f"{low} GFLOP" if self.low == self.high else f"{low} to {high} GFLOP"


def count_flops(jaxpr: Any) -> Flops:
    """The flops of a (closed) jaxpr: the shapes inside a `shard_map` are one device's.

    Args:
      jaxpr: as `jax.make_jaxpr` or `jax.jit(f).trace(...)` give it.

    Returns:
      `Flops`. A `while` counts 0 times at least, and at most as often as a counter from 0 on can stay below a
      constant in its condition.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> count_flops(jax.make_jaxpr(lambda a: a @ a)(jnp.ones((8, 8)))).low
      1024
    """
    total = Flops(0, 0)
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total += _equation_flops(eqn)
    return total


def _equation_flops(eqn: Any) -> Flops:
    params = eqn.params
    match eqn.primitive.name:
        case "dot_general":
            (lhs, _), (_, _) = params["dimension_numbers"]
            operand = eqn.invars[0].aval.shape
            flops = 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(operand[d] for d in lhs)
            return Flops(flops, flops)
        case "scan":
            body = count_flops(params["jaxpr"])
            return Flops(body.low * params["length"], body.high * params["length"])
        case "while":
            body = count_flops(params["body_jaxpr"])
            return Flops(0, body.high * _most_turns(params) if body.high else 0)
        case "cond":
            branches = [count_flops(branch) for branch in params["branches"]]
            return Flops(min(b.low for b in branches), max(b.high for b in branches))
    total = Flops(0, 0)
    for value in params.values():
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
            total += count_flops(value)
    return total


def _most_turns(params: Any) -> float:
    """The smallest constant that the condition compares a counter, which the body raises by one, to be less than."""
    condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    constant, step = _constants(condition), _constants(body)
    raised = {e.outvars[0]: e.invars[0] for e in body.eqns if e.primitive.name == "add" and step(e.invars[1]) == 1}
    before, after = body.invars[params["body_nconsts"] :], body.outvars
    carried = condition.invars[params["cond_nconsts"] :]
    counters = {c for c, old, new in zip(carried, before, after, strict=True) if raised.get(new) is old}
    bounds = [constant(e.invars[1]) for e in condition.eqns if e.primitive.name == "lt" and e.invars[0] in counters]
    return min((bound for bound in bounds if bound is not None), default=math.inf)


def _constants(jaxpr: Any) -> Callable[[Any], int | None]:
    """The value of a variable that is a constant scalar, else None."""
    source = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name in _SAME_VALUE}

    def constant(value: Any) -> int | None:
        while not isinstance(value, core.Literal):
            if value not in source:
                return None
            value = source[value]
        return int(value.val)

    return constant
