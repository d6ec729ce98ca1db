"""Finds and checks the PartitionSpecs of a head's hidden states and kernel: the caller's, or the mesh's defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxppo.head.call import Names
from jaxppo.head.head import Head
from jaxppo.sharding import ParallelMesh, ShardAxes, check_parallel, note, varying

NO_MESH = "without parallel=, expected the mesh that has these axes, or no spec"


def entry_names(entry: Any) -> Names:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def bring_hidden(
    what: str, parallel: ParallelMesh | ShardAxes | None, hidden: jax.Array, given: P | None
) -> tuple[jax.Array, bool]:
    """Reshards hidden states like the batch's tokens, and tells whether the tensor axis shards their positions too.

    On a mesh any spec is accepted. Inside a `shard_map` hidden states must already be sharded like the tokens.

    Args:
      what: the name of the argument that holds the spec, for errors.
      parallel: the mesh, or the roles of its axes.
      hidden: `[R, T, H]`.
      given: the spec of `hidden`; None for the mesh's default.
    """
    check_parallel(parallel)
    if given is not None and not isinstance(given, P):
        raise TypeError(f"{what}: got {given!r}, expected a PartitionSpec or None")
    roles = parallel.axes if isinstance(parallel, ParallelMesh) else parallel or ShardAxes()
    if parallel is None and given is not None and any(map(entry_names, given)):
        raise ValueError(f"{what}: got {given} {NO_MESH}")
    if parallel is None or given is None:
        return hidden, bool(roles.tensor) and roles.sequence_parallel
    sizes = parallel.mesh.shape if isinstance(parallel, ParallelMesh) else jax.sharding.get_abstract_mesh().shape

    def above_1(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(n for n in names if sizes.get(n) != 1)

    entries = [above_1(entry_names(entry)) for entry in _full(given, 3)]
    data, context, tensor = map(above_1, (roles.data, roles.context, roles.tensor))
    if entries == [data, context, ()]:
        return hidden, False
    if entries == [data, context + tensor, ()]:
        return hidden, True
    names = [name for entry in entries for name in entry]
    possible = len(entries) == 3 and not entries[2] and len(set(names)) == len(names) and set(names) <= set(sizes)
    mesh = parallel if isinstance(parallel, ParallelMesh) else None
    if mesh is None or not possible or any(n % mesh.size(e) for n, e in zip(hidden.shape, entries, strict=True)):
        where = "" if mesh else " inside a shard_map"
        expected = f"{P(data or None, context or None, None)}, as the tokens of the batch lie"
        expected += f", or {P(data or None, context + tensor, None)}" if tensor else ""
        expected += ", or another spec of R and T that fits the mesh" if mesh else ""
        raise ValueError(f"{what}: got {given} for shape {hidden.shape}{where}, expected {expected}")
    whole = hidden.shape[1] % mesh.size(context + tensor) == 0
    by_position = bool(tensor) and set(tensor) <= set(entries[1]) and whole
    wanted = _spec_of_hidden(mesh, by_position)
    to = jax.reshard if mesh.is_explicit else lax.with_sharding_constraint
    with note(f"hidden states brought from {given} to {wanted}"):
        # the first constraint gives the gradient the caller's spec
        return to(to(hidden, mesh.sharding(given)), mesh.sharding(wanted)), by_position


def _spec_of_hidden(parallel: ParallelMesh, sequence_parallel: bool) -> P:
    return dataclasses.replace(parallel, sequence_parallel=sequence_parallel).hidden_spec


def place_head(
    parallel: ParallelMesh | ShardAxes | None, name: str, hidden: jax.Array, head: Head, sequence_parallel: bool
) -> tuple[P, P | None, tuple[int, int]]:
    """The specs of a kernel and of hidden states, and [R, T] of their tokens; raises if shapes and specs disagree.

    A spec is the one that was given, or the mesh's default. Without a mesh, hidden states have no spec.
    """
    head.check(name, hidden.shape[2])
    kernel, v_dim = head.kernel, head.v_dim
    roles = parallel.axes if isinstance(parallel, ParallelMesh) else parallel or ShardAxes()
    on_mesh = isinstance(parallel, ParallelMesh)
    kernel_spec = _kernel_spec(parallel, roles, hidden, kernel, v_dim, head.spec)
    gathered = entry_names(kernel_spec[1 - v_dim])
    H = kernel.shape[1 - v_dim] * (1 if on_mesh else roles.size(gathered))
    if hidden.shape[2] != H:
        raise ValueError(
            f"{name}.kernel: got shape {kernel.shape} with layout {head.layout!r}, expected {hidden.shape[2]} rows of "
            f"H, as in hidden {hidden.shape}"
        )
    if isinstance(parallel, ShardAxes):
        _check_part(name, parallel, head, v_dim)
    hidden_spec = _spec_of_hidden(parallel, sequence_parallel) if isinstance(parallel, ParallelMesh) else None
    shards = roles.size(roles.tensor) if sequence_parallel and not on_mesh else 1
    return kernel_spec, hidden_spec, (hidden.shape[0], hidden.shape[1] * shards)


def _check_part(name: str, axes: ShardAxes, head: Head, v_dim: int) -> None:
    """Raises if a kernel that varies over the tensor axis holds the whole vocabulary rather than a part of it."""
    own, shards = head.kernel.shape[v_dim], axes.size(axes.tensor)
    is_part = bool(set(axes.tensor) & varying(head.kernel))
    if is_part and head.vocab_size is not None and head.vocab_size <= own * (shards - 1):
        raise ValueError(
            f"{name}.vocab_size: got {head.vocab_size} with {own} columns on each of {shards} tensor shards, the last "
            "of which would hold padding alone, expected each device's part of the vocabulary; a kernel that was "
            "gathered over the tensor axis is to be invariant over it: all_gather(..., to='invarying')"
        )


def _full(spec: P, rank: int) -> P:
    return P(*spec, *[None] * (rank - len(spec)))


def _kernel_spec(
    parallel: ParallelMesh | ShardAxes | None,
    roles: ShardAxes,
    hidden: jax.Array,
    kernel: jax.Array,
    v_dim: int,
    given: P | None,
) -> P:
    if given is None and isinstance(parallel, ParallelMesh) and parallel.is_explicit:
        given = getattr(jax.typeof(kernel).sharding, "spec", None)
    if given is not None:
        full = _full(given, 2)
        if parallel is None and any(map(entry_names, full)):
            raise ValueError(
                f"head.spec: got {given} without parallel=, expected the mesh that has these axes, or no spec"
            )
        if isinstance(parallel, ParallelMesh):  # axes of size 1 have no role, and do not cut anything
            sizes = parallel.mesh.shape
            full = P(*(tuple(name for name in entry_names(entry) if sizes.get(name) != 1) or None for entry in full))
        return _checked_kernel_spec(roles, full, v_dim)
    if isinstance(parallel, ParallelMesh):
        h_entry, v_entry = parallel.kernel_spec("hv")
        if kernel.shape[v_dim] % parallel.tensor_size:
            v_entry = None  # JAX cannot shard such a kernel, so it arrives whole
    else:
        sharded_h = roles.fsdp and kernel.shape[1 - v_dim] != hidden.shape[2]
        h_entry, v_entry = (roles.fsdp if sharded_h else None), roles.tensor or None
    return P(h_entry, v_entry) if v_dim == 1 else P(v_entry, h_entry)


def _checked_kernel_spec(roles: ShardAxes, spec: P, v_dim: int) -> P:
    h_names, v_names = entry_names(spec[1 - v_dim]), entry_names(spec[v_dim])
    if set(h_names) & set(roles.tensor):
        raise ValueError(f"head.spec: got {spec}, expected the tensor axes {roles.tensor} on the vocabulary only")
    if set(v_names) & set(roles.tensor) and not set(roles.tensor) <= set(v_names):
        raise ValueError(f"head.spec: got {spec}, expected all of the tensor axes {roles.tensor} or none")
    return spec
