"""Finds the part of a traced loss that runs once for all micro-batches: the copies of parameters on each device.

It edits a jaxpr, because no form of JAX 0.10 says the same for a loss that sees whole arrays on any mesh. A `shard_map`
of the data axes around the loop refuses a model's own constraints and `shard_map`s over them; `P(unreduced=...)` is
refused on Auto meshes; a sum in the head's gradient rule stays in the loop where cotangents differ (on TPUs). A loss
that is written for `ShardAxes` needs none of this: see `accumulate_gradients(parallel=)`.
"""

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

    originals: Callable[..., list[jax.Array]]  # of the parameters: the arrays that are copied
    copies: Callable[..., list[jax.Array]]  # of the originals: their copies, one a device, [D, ...]
    rest: Callable[..., list[Any]]  # of parameters, copies and micro-batch: what the loss returns, in a list
    used: list[bool]  # for each parameter, whether `rest` reads it beside the copies


def split(traced: ClosedJaxpr, params: Sequence[Any], others: Sequence[Any]) -> Split:
    """Takes the calls of `one_a_device` on parameters out of a function that was traced with these arguments."""
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # imported here because it loads Pallas

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
        return jaxpr_as_fun(ClosedJaxpr(part, traced.consts))

    return Split(
        function(inputs, _needed(jaxpr.eqns, originals, effects=False), originals),
        function(originals, found, copies),
        function([*inputs, *copies, *rest], eqns, outvars),
        [v in read for v in inputs],
    )


def _is_copy(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "jit" and eqn.params["name"] == "_one_a_device"


def _holds_copies(eqn: JaxprEqn) -> bool:
    """Whether the equation calls a jitted function that makes copies, at any depth."""
    if eqn.primitive.name != "jit" or _is_copy(eqn):
        return False
    return any(_is_copy(inner) or _holds_copies(inner) for inner in eqn.params["jaxpr"].eqns)


def _evaluate(traced: ClosedJaxpr, *args: Any) -> list[jax.Array]:
    """Runs a traced function. Jitted functions with copies are inlined: a trace of this run shows the copies."""
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


def _is_var(v: object) -> bool:
    return not hasattr(v, "val")  # a literal has one


def _copies_of_params(jaxpr: Jaxpr, params: Sequence[Any]) -> list[JaxprEqn]:
    """The calls of `one_a_device` whose argument is made of parameters alone and passes a gradient to them."""
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
    """Keeps one call for each array, and maps the results of the other calls to the result of the kept one."""
    first: dict[Any, JaxprEqn] = {}
    renamed = {}
    for eqn in marked:
        kept = first.setdefault((eqn.invars[0], id(eqn.params["jaxpr"])), eqn)
        renamed[eqn.outvars[0]] = kept.outvars[0]
    return list(first.values()), renamed


def _needed(eqns: Sequence[JaxprEqn], outvars: Iterable[Any], effects: bool = True) -> list[JaxprEqn]:
    """The equations that `outvars` depend on and, with `effects`, those that have side effects."""
    wanted, found = set(filter(_is_var, outvars)), []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars) or (effects and eqn.effects):
            wanted.update(filter(_is_var, eqn.invars))
            found.append(eqn)
    return found[::-1]


def gradients_of_originals(
    back: Callable[[list[jax.Array]], Any], originals: Sequence[jax.Array], totals: Sequence[jax.Array]
) -> list[jax.Array]:
    """Sums the gradients of copies, `[D, ...]`, over devices and takes them back to f32 gradients of parameters.

    The error of rounding a sum to the dtype of its original goes back in a second call, so that the gradient of a
    parameter that was narrowed for the copies is exact to 16 bits.
    """
    sums = [total.sum(axis=0) for total in totals]
    kept = list(map(rounded, sums, originals))
    lost = [x - y for x, y in zip(sums, kept, strict=True)]

    def through(xs: list[jax.Array]) -> list[jax.Array]:
        narrow = [x.astype(y.dtype) for x, y in zip(xs, originals, strict=True)]
        return [x.astype(jnp.float32) for x in back(narrow)]

    return [x + y for x, y in zip(through(kept), through(lost), strict=True)]


def rounded(x: jax.Array, like: jax.Array) -> jax.Array:
    """x in its own dtype, rounded to that of `like`. If it were only converted, XLA for TPU would sum it in bf16."""
    info = jnp.finfo(like.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)
