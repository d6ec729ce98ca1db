"""Flops of a traced function's matrix products, counted where the lengths of loops are still known: in the jaxpr."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.extend import core


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
      `Flops`. A `while` counts 0 times at least, and at most as often as a constant in its condition allows.

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
            return Flops(0, body.high * _most_turns(params["cond_jaxpr"]) if body.high else 0)
        case "cond":
            branches = [count_flops(branch) for branch in params["branches"]]
            return Flops(min(b.low for b in branches), max(b.high for b in branches))
    total = Flops(0, 0)
    for value in params.values():
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
            total += count_flops(value)
    return total


def _most_turns(condition: Any) -> float:
    """The smallest constant that the condition compares a loop variable to be less than."""
    bounds = [
        int(eqn.invars[1].val)
        for eqn in condition.jaxpr.eqns
        if eqn.primitive.name == "lt" and isinstance(eqn.invars[1], core.Literal)
    ]
    return min(bounds, default=math.inf)
