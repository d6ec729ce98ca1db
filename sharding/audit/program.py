"""The collectives of a traced program, those at which devices may hang, and the notes in the program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..notes import notes_in

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_NOT_COLLECTIVE = frozenset({"axis_index", "pcast", "pvary", "shard_map"})


def collectives(jaxpr: Jaxpr | ClosedJaxpr) -> list[tuple[str, tuple[str, ...]]]:
    """(primitive, mesh axes) of every collective of a (closed) jaxpr; loop bodies and branches are read once each.

    Args:
      jaxpr: as `jax.make_jaxpr` or `jax.jit(f).trace(...).jaxpr` give it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxppo.sharding import make_parallel_mesh, segment_sum
      >>> mesh = make_parallel_mesh(f"cp={jax.device_count()}")
      >>> ids = jnp.ones((1, 8), jnp.int32)
      >>> found = collectives(jax.make_jaxpr(lambda x: segment_sum(x, ids, 1, mesh))(jnp.ones((1, 8))))
      >>> len(found) == (jax.device_count() > 1)
      True
    """
    return [(eqn.primitive.name, _axes(eqn)) for eqn, _ in _equations(jaxpr, ()) if _axes(eqn)]


def hang_risks(jaxpr: Jaxpr | ClosedJaxpr) -> list[str]:
    """The collectives that devices may run a different number of times: in a `cond`, or a `while` whose end varies.

    A program without them runs the same collectives in the same order on every device.

    Args:
      jaxpr: as for `collectives`; traced with `check_vma=True` in its `shard_map`s.

    Returns:
      A line for each; an empty list if there is none.

    Example:
      >>> import jax
      >>> hang_risks(jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda c: c < 9, lambda c: c + 1, x))(0))
      []
    """
    return [
        f"{eqn.primitive.name} over {', '.join(_axes(eqn))} {' '.join(path)}"
        for eqn, path in _equations(jaxpr, ())
        if _axes(eqn) and path
    ]


def notes(jaxpr: Jaxpr | ClosedJaxpr) -> tuple[str, ...]:
    """The notes in a (closed) jaxpr, each once, in their order."""
    found = (notes_in(str(eqn.source_info.name_stack)) for eqn, _ in _equations(jaxpr, ()))
    return tuple(dict.fromkeys(text for texts in found for text in texts))


def _axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that an equation's collective crosses; none if it is not a collective."""
    if eqn.primitive.name in _NOT_COLLECTIVE:
        return ()
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    names = names if isinstance(names, (tuple, list)) else (names,)
    return tuple(name for name in names if isinstance(name, str))


def _equations(jaxpr: Jaxpr | ClosedJaxpr, path: tuple[str, ...]) -> Iterator[tuple[JaxprEqn, tuple[str, ...]]]:
    """Every equation, with the branches and varying loops around it."""
    from jax.extend import core

    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn, path
        inner = path
        if eqn.primitive.name == "cond":
            inner = (*path, "under cond")
        elif eqn.primitive.name == "while":
            predicate = getattr(eqn.params["cond_jaxpr"], "jaxpr", eqn.params["cond_jaxpr"]).outvars[0].aval
            if varying := sorted(predicate.manual_axis_type.varying):
                inner = (*path, f"in a while whose end varies over {', '.join(varying)}")
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, (core.Jaxpr, core.ClosedJaxpr)):
                    yield from _equations(part, inner)
