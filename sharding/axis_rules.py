"""Derives the roles of mesh axes from logical axis rules, as Flax and MaxText write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from .axes import Names

# The usual logical names of a loss's dimensions: first MaxText's for logits and head, then its
# other names and Flax's.
_USUAL = {
    "batch": ("activation_embed_and_logits_batch", "activation_batch", "batch"),
    "length": ("activation_length", "length"),
    "embed": ("embed_vocab", "embed"),
    "vocab": ("vocab",),
}


def roles_of_rules(
    rules: Sequence[Sequence[Any]], sizes: Mapping[str, int], given: Mapping[str, str | None]
) -> tuple[Names, Names, Names, Names]:
    """The axes of data, context, tensor and fsdp, in the order in which the rules name them.

    `sizes` are those of the mesh axes; axes that it lacks, or has in size 1, are left out. `given`
    are the logical names of batch, length, embed and vocab, None for the usual ones.
    """
    pairs = [_pair(rule) for rule in rules]
    known = {name for name, _ in pairs}
    called = {dim: _called(dim, given[dim], known) for dim in _USUAL}

    def above_one(axes: Names) -> Names:
        return tuple(name for name in axes if sizes.get(name, 1) > 1)

    data, context = map(above_one, _assign(called["batch"], called["length"], pairs))
    fsdp, tensor = map(above_one, _assign(called["embed"], called["vocab"], pairs))
    if shared := [name for name in tensor if name in data + context]:
        raise ValueError(
            f"rules: got mesh axes {', '.join(map(repr, shared))} for {called['vocab']!r} and for"
            " tokens, expected the vocabulary over axes of its own; ParallelMesh(mesh, data=...)"
            " takes roles, Head(spec=...) such a kernel"
        )
    if alone := [name for name in fsdp if name not in data + context]:
        raise ValueError(
            f"rules: got mesh axes {', '.join(map(repr, alone))} for {called['embed']!r} alone,"
            " expected those of a kernel's rows to shard tokens too"
        )
    return data, context, tensor, fsdp


def _pair(rule: object) -> tuple[str, Names]:
    if (
        isinstance(rule, str)
        or not isinstance(rule, Sequence)
        or len(rule) != 2
        or not isinstance(rule[0], str)
    ):
        raise ValueError(f"rules: got {rule!r}, expected pairs of a logical name and mesh axes")
    name, axes = rule
    if axes is None or axes is P.UNCONSTRAINED:
        return name, ()
    if isinstance(axes, str):
        return name, (axes,)
    if not isinstance(axes, Sequence) or not all(isinstance(axis, str) for axis in axes):
        raise ValueError(f"rules: got {rule!r}, expected names of mesh axes")
    return name, tuple(axes)


def _called(dim: str, given: str | None, known: set[str]) -> str | None:
    """The logical name of a dimension; None where no rule names it, and it is not sharded."""
    names = ", ".join(sorted(known)) or "none"
    if given is not None and given not in known:
        raise ValueError(f"{dim}: got {given!r}, expected a name of the rules: {names}")
    if given is not None:
        return given
    for name in _USUAL[dim]:
        if name in known:
            return name
    if dim == "batch":
        raise ValueError(
            f"rules: got names {names}, expected one of {', '.join(_USUAL[dim])}; pass batch="
        )
    return None


def _assign(
    first: str | None, second: str | None, pairs: Sequence[tuple[str, Names]]
) -> tuple[Names, Names]:
    """The mesh axes of the dimensions of one array: each by its first rule whose axes the other
    does not use.
    """
    taken: dict[str | None, Names] = {}
    for name, axes in pairs:
        in_use = {axis for others in taken.values() for axis in others}
        if name in (first, second) and name not in taken and in_use.isdisjoint(axes):
            taken[name] = axes
    return taken.get(first, ()), taken.get(second, ())
