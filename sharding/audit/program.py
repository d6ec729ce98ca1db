"""The collectives of a traced program, those at which devices may hang, and the notes in the
program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..notes import notes_in

AnyJaxpr = Jaxpr | ClosedJaxpr

_NOT_COLLECTIVE = frozenset({"axis_index", "pcast", "pvary", "shard_map"})


def collectives(jaxpr: AnyJaxpr) -> list[tuple[str, tuple[str, ...]]]:
    """(primitive, mesh axes) of every collective of a (closed) jaxpr; loop bodies and branches
    are read once each.
    """
    crossed = [(eqn.primitive.name, _axes(eqn)) for eqn, _ in _equations(jaxpr)]
    return [(name, axes) for name, axes in crossed if axes]


def hang_risks(jaxpr: AnyJaxpr) -> list[str]:
    """The collectives that devices may run a different number of times: in a `cond`, or a `while`
    whose end varies.

    A program without them runs the same collectives in the same order on every device. Its
    `shard_map`s need `check_vma=True`.
    """
    risks = []
    for eqn, path in _equations(jaxpr):
        axes = _axes(eqn)
        if axes and path:
            risks.append(f"{eqn.primitive.name} over {', '.join(axes)} {' '.join(path)}")
    return risks


def notes(jaxpr: AnyJaxpr) -> tuple[str, ...]:
    """The notes in a (closed) jaxpr, each once, in their order."""
    names = (str(eqn.source_info.name_stack) for eqn, _ in _equations(jaxpr))
    return tuple(dict.fromkeys(text for name in names for text in notes_in(name)))


def _axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that an equation's collective crosses; none if it is not a collective."""
    if eqn.primitive.name in _NOT_COLLECTIVE:
        return ()
    names = _as_tuple(eqn.params.get("axes", eqn.params.get("axis_name", ())))
    return tuple(name for name in names if isinstance(name, str))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple | list):
        return tuple(value)
    return (value,)


def jaxprs_in(eqn: JaxprEqn) -> list[AnyJaxpr]:
    """The bodies, branches and kernels of an equation."""
    parts = [part for value in eqn.params.values() for part in _as_tuple(value)]
    return [part for part in parts if isinstance(part, AnyJaxpr)]


def _equations(
    jaxpr: AnyJaxpr, path: tuple[str, ...] = ()
) -> Iterator[tuple[JaxprEqn, tuple[str, ...]]]:
    """Every equation, with the branches and varying loops around it."""
    for eqn in jaxpr.eqns:
        yield eqn, path
        inner = path
        if eqn.primitive.name == "cond":
            inner = (*path, "under cond")
        elif eqn.primitive.name == "while":
            varying = sorted(eqn.params["cond_jaxpr"].out_avals[0].manual_axis_type.varying)
            if varying:
                inner = (*path, f"in a while whose end varies over {', '.join(varying)}")
        for part in jaxprs_in(eqn):
            yield from _equations(part, inner)
