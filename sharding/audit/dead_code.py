"""Which equations of a jaxpr matter to its results: compilers leave the others out, of loops too."""

from __future__ import annotations

import functools
from typing import Any

from jax.extend import core

AnyJaxpr = core.Jaxpr | core.ClosedJaxpr
Wanted = tuple[bool, ...]  # which results of a jaxpr, or of an equation, are read


@functools.lru_cache(maxsize=4096)  # a loop's body is looked at again until no more of its carry is read
def read(jaxpr: AnyJaxpr, wanted: Wanted) -> tuple[tuple[Wanted, ...], Wanted]:
    """The results that are read of each equation, and the arguments that are read, for some results of a jaxpr."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    used = {v for v, is_wanted in zip(inner.outvars, wanted, strict=True) if is_wanted and isinstance(v, core.Var)}
    results = []
    for eqn in reversed(inner.eqns):
        of_eqn = tuple(v in used for v in eqn.outvars)
        results.append(of_eqn)
        if matters(eqn, of_eqn):
            pairs = zip(eqn.invars, _arguments(eqn, of_eqn), strict=True)
            used |= {v for v, is_read in pairs if is_read and isinstance(v, core.Var)}
    return tuple(results[::-1]), tuple(v in used for v in inner.invars)


def matters(eqn: Any, wanted: Wanted) -> bool:
    """Whether an equation runs: something reads it, or it has an effect. That a collective names an axis is none."""
    return any(wanted) or any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def of_body(eqn: Any, wanted: Wanted) -> Wanted:
    """The results that are read of the body of a `scan` or `while`: what a turn reads, the turn before must compute."""
    if eqn.primitive.name == "while":
        constants, carry, condition = eqn.params["body_nconsts"], len(wanted), eqn.params["cond_jaxpr"]
        asked = read(condition, (True,))[1][eqn.params["cond_nconsts"] :]
        wanted = tuple(a or b for a, b in zip(wanted, asked, strict=True))
    else:
        constants, carry = split(eqn.params, len(eqn.invars))
    while True:
        arguments = read(_body(eqn), wanted)[1][constants : constants + carry]
        more = (*(a or b for a, b in zip(wanted, arguments, strict=False)), *wanted[carry:])
        if more == wanted:
            return wanted
        wanted = more


def _arguments(eqn: Any, wanted: Wanted) -> Wanted:
    """The arguments of an equation that are read."""
    params, everything = eqn.params, (True,) * len(eqn.invars)
    match eqn.primitive.name:
        case "while":
            first = params["cond_nconsts"]
            body = of_body(eqn, wanted)
            of_body_constants = read(params["body_jaxpr"], body)[1][: params["body_nconsts"]]
            return (*read(params["cond_jaxpr"], (True,))[1][:first], *of_body_constants, *body)
        case "scan":
            constants, carry = split(params, len(eqn.invars))
            body = of_body(eqn, wanted)
            found = read(params["jaxpr"], body)[1]
            return (*found[:constants], *body[:carry], *found[constants + carry :])
        case "cond":
            branches = [read(branch, wanted)[1] for branch in params["branches"]]
            return (True, *(any(x) for x in zip(*branches, strict=True)))
    inner = [value for value in params.values() if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))]
    if eqn.primitive.name not in CALLS or len(inner) != 1:
        return everything
    called = getattr(inner[0], "jaxpr", inner[0])
    same = (len(called.invars), len(called.outvars)) == (len(eqn.invars), len(eqn.outvars))
    return read(inner[0], wanted)[1] if same else everything


# They run their jaxpr once, on their own arguments.
CALLS = frozenset({"checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2", "shard_map"})


def _body(eqn: Any) -> AnyJaxpr:
    body: AnyJaxpr = eqn.params["body_jaxpr" if eqn.primitive.name == "while" else "jaxpr"]
    return body


def split(params: dict[str, Any], arguments: int) -> tuple[int, int]:
    """How many constants and how many carried values a `scan` has."""
    if "ft_in" in params:  # from JAX 0.12 on, a tree that splits what it is given
        constants, carry, _ = (len(list(part)) for part in params["ft_in"].update(range(arguments)).unpack())
        return constants, carry
    return params["num_consts"], params["num_carry"]
