"""What of a traced loss can be done once for all micro-batches: the copies of parameters that each device has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


class Split(NamedTuple):
    """A traced loss of parameters and a micro-batch, with the copies of parameters taken out of it."""

    originals: Callable[..., list[jax.Array]]
    """Of the parameters: what there are copies of."""
    copies: Callable[..., list[jax.Array]]
    """Of the originals: one copy a device of each, `[D, ...]`."""
    rest: Callable[..., list[Any]]
    """Of parameters, copies and micro-batch: what the loss function returns, in a list."""
    used: list[bool]
    """The parameters that the rest reads beside the copies."""


def split(traced: ClosedJaxpr, params: Sequence[Any], others: Sequence[Any]) -> Split:
    """Takes out of a function traced with these arguments what `one_a_device` makes of its parameters."""
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # here, since it loads Pallas

    if any(map(_holds_copies, traced.jaxpr.eqns)):
        traced = jax.make_jaxpr(partial(_evaluate, traced))(*params, *others)
    jaxpr, count = traced.jaxpr, len(params)
    inputs, rest = jaxpr.invars[:count], jaxpr.invars[count:]
    marked = _copies_of_params(jaxpr, inputs)
    found, renamed = _without_repeats(marked)
    originals, copies = [eqn.invars[0] for eqn in found], [eqn.outvars[0] for eqn in found]
    taken = {id(eqn) for eqn in marked}

    def name(v: Any) -> Any:
        return renamed.get(v, v) if _is_var(v) else v

    eqns = [eqn.replace(invars=list(map(name, eqn.invars))) for eqn in jaxpr.eqns if id(eqn) not in taken]
    eqns = _needed(eqns, outvars := list(map(name, jaxpr.outvars)))
    read = {v for eqn in eqns for v in eqn.invars if _is_var(v)} | set(filter(_is_var, outvars))

    def function(invars: Sequence[Any], eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> Callable[..., list[Any]]:
        part = jaxpr.replace(invars=[*invars], eqns=[*eqns], outvars=[*outvars])
        run: Callable[..., list[Any]] = jaxpr_as_fun(ClosedJaxpr(part, traced.consts))
        return run

    return Split(
        function(inputs, _needed(jaxpr.eqns, originals, effects=False), originals),
        function(originals, found, copies),
        function([*inputs, *copies, *rest], eqns, outvars),
        [v in read for v in inputs],
    )


def _is_copy(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "jit" and eqn.params["name"] == "_one_a_device"


def _holds_copies(eqn: JaxprEqn) -> bool:
    """Whether it is the call of a jitted function in which there are copies, at any depth."""
    if eqn.primitive.name != "jit" or _is_copy(eqn):
        return False
    return any(_is_copy(inner) or _holds_copies(inner) for inner in eqn.params["jaxpr"].eqns)


def _evaluate(traced: ClosedJaxpr, *args: Any) -> list[Any]:
    """What a traced function returns; jitted functions with copies are evaluated, not called."""
    from jax.extend.core import ClosedJaxpr, DropVar, jaxpr_as_fun

    jaxpr = traced.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*traced.consts, *args), strict=True))

    def read(v: Any) -> Any:
        return values[v] if _is_var(v) else v.val

    for eqn in jaxpr.eqns:
        if _holds_copies(eqn):
            values.update(zip(eqn.outvars, _evaluate(eqn.params["jaxpr"], *map(read, eqn.invars)), strict=True))
            continue
        given = list(filter(_is_var, eqn.invars))
        made = [v for v in eqn.outvars if not isinstance(v, DropVar)]
        alone = jaxpr.replace(constvars=[], invars=given, eqns=[eqn], outvars=made)
        values.update(zip(made, jaxpr_as_fun(ClosedJaxpr(alone, []))(*map(read, given)), strict=True))
    return list(map(read, jaxpr.outvars))


def _is_var(v: Any) -> bool:
    return not hasattr(v, "val")  # a literal has one


def _copies_of_params(jaxpr: Jaxpr, params: Sequence[Any]) -> list[JaxprEqn]:
    """The calls of `one_a_device` on what is made of parameters alone, and through which their gradient flows."""
    known, flows, found = {*jaxpr.constvars, *params}, set(params), []
    for eqn in jaxpr.eqns:
        inputs = set(filter(_is_var, eqn.invars))
        if eqn.effects or not inputs <= known:
            continue
        known.update(eqn.outvars)
        if flows.isdisjoint(inputs) or eqn.primitive.name == "stop_gradient":
            continue
        flows.update(v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.floating))  # type: ignore[attr-defined]
        if _is_copy(eqn):
            found.append(eqn)
    return found


def _without_repeats(marked: Iterable[JaxprEqn]) -> tuple[list[JaxprEqn], dict[Any, Any]]:
    """One call for all those of the same array, and by which variable the result of another is known then."""
    first: dict[Any, JaxprEqn] = {}
    renamed = {}
    for eqn in marked:
        kept = first.setdefault((eqn.invars[0], id(eqn.params["jaxpr"])), eqn)
        renamed[eqn.outvars[0]] = kept.outvars[0]
    return list(first.values()), renamed


def _needed(eqns: Sequence[JaxprEqn], outvars: Iterable[Any], effects: bool = True) -> list[JaxprEqn]:
    """The equations that `outvars` are made by, those with effects too if asked for."""
    wanted, found = set(filter(_is_var, outvars)), []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars) or (effects and eqn.effects):
            wanted.update(filter(_is_var, eqn.invars))
            found.append(eqn)
    return found[::-1]


def gradients_of_originals(
    back: Callable[[list[jax.Array]], Any], originals: Sequence[jax.Array], totals: Sequence[jax.Array]
) -> list[jax.Array]:
    """f32 gradients of parameters from those of the copies of what is made of them, `[D, ...]`, summed over devices.

    Each sum is rounded to the dtype of its original. What the rounding takes away goes the same way, so that a
    parameter that was narrowed for the copies gets its gradient to 16 bits.
    """
    sums = [total.sum(axis=0) for total in totals]
    info = [jnp.finfo(x.dtype) for x in originals]
    # rounded before they are converted: else XLA for TPU sums over devices in bf16
    rounded = [lax.reduce_precision(x, i.nexp, i.nmant) for x, i in zip(sums, info, strict=True)]
    lost = [x - y for x, y in zip(sums, rounded, strict=True)]

    def through(xs: list[jax.Array]) -> list[jax.Array]:
        narrow = [x.astype(y.dtype) for x, y in zip(xs, originals, strict=True)]
        return [x.astype(jnp.float32) for x in back(narrow)]

    return [x + y for x, y in zip(through(rounded), through(lost), strict=True)]
