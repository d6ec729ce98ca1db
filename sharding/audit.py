"""What a compiled function costs: collectives, temporaries and time from its module, flops from its jaxpr."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .flops import Flops, count_flops
from .hlo import Module, parse, transfer
from .program import notes
from .tpu_time import Time, chip_of, estimate_time


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled module.

    Args:
      op: "all-reduce", "all-gather", "reduce-scatter", "collective-permute" or "all-to-all".
      axes: the mesh axes that it crosses; None where its groups are no product of axes, or no mesh is known.
      bytes: of the whole array that a device puts in or gets out, whichever is larger; for one turn of a loop.
      in_loop: whether it sits in the body or the condition of a loop.
    """

    op: str
    axes: tuple[str, ...] | None
    bytes: int
    in_loop: bool


@dataclasses.dataclass(frozen=True)
class Audit:
    """What a compiled function costs on each device.

    Args:
      collectives: in the order of the module.
      temp_bytes: temporaries, as the compiler laid them out.
      argument_bytes: its arguments.
      output_bytes: its results.
      flops: of its matrix products, with loops counted; a range where a loop's length depends on data.
      time: what XLA:TPU expects it to take, see `jaxppo.sharding.Time`; None where the devices are no TPUs that are
        known there, or where a persistent compilation cache answered instead of the compiler.
      notes: what the function says of itself, see `jaxppo.sharding.note`.
      text: the compiled module.
    """

    collectives: tuple[Collective, ...]
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    flops: Flops
    time: Time | None
    notes: tuple[str, ...]
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        lines = [
            f"temporaries {self.temp_bytes / 2**20:.1f} MiB, arguments {self.argument_bytes / 2**20:.1f} MiB, "
            f"results {self.output_bytes / 2**20:.1f} MiB, {self.flops}"
        ]
        lines += f"time {self.time}".splitlines() if self.time else []
        lines += self.notes
        for c in self.collectives:
            over = "unknown axes" if c.axes is None else ", ".join(c.axes) or "no axis"
            lines.append(f"{c.op} over {over}: {c.bytes / 2**20:.3f} MiB{' in a loop' if c.in_loop else ''}")
        return "\n".join(lines)


def audit(fn: Callable[..., Any], *args: Any, mesh: Mesh | None = None) -> Audit:
    """Compiles `fn` for the devices of its arguments, real or only described, and reads off what it costs.

    Args:
      fn: what `jax.jit` takes, or its result.
      *args: arrays, or `jax.ShapeDtypeStruct`s with shardings, such as over a mesh of
        `jax.experimental.topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices`.
      mesh: names the axes of collectives; the mesh of the arguments' shardings by default.

    Returns:
      An `Audit`.

    Raises:
      TypeError: no function, a mesh of another class.
      ValueError: arguments on two meshes.

    Example:
      >>> import jax.numpy as jnp
      >>> found = audit(lambda a, b: a @ b, jnp.ones((4, 8)), jnp.ones((8, 2)))
      >>> found.collectives, found.flops.low
      ((), 128)
    """
    if not callable(fn):
        raise TypeError(f"fn: got {type(fn).__name__}, expected a function, or what jax.jit makes of one")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: got {type(mesh).__name__}, expected jax.sharding.Mesh, as ParallelMesh.mesh is")
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    traced = jitted.trace(*args)
    mesh = _mesh_of(args) if mesh is None else mesh
    device = _device_of(args, mesh)
    chip = chip_of(device)
    compiled, text, generated = _compile(traced.lower(), device)
    memory = compiled.memory_analysis()
    return Audit(
        collectives=_collectives(parse(text), mesh),
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        flops=count_flops(traced.jaxpr),
        time=estimate_time(generated, chip) if chip and generated else None,
        notes=notes(traced.jaxpr),
        text=text,
    )


def _mesh_of(args: Any) -> Mesh | None:
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
    meshes: set[Any] = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    if len(meshes) > 1:
        raise ValueError(f"args: got arrays on {len(meshes)} meshes, expected one, or mesh=")
    return meshes.pop() if meshes else None


def _device_of(args: Any, mesh: Mesh | None) -> Any:
    """One of the devices to compile for; None where neither the arguments nor the mesh say."""
    if mesh is not None:
        return mesh.devices.flat[0]
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
    return next((d for s in shardings if s is not None for d in s.device_set), None)


def _compile(lowered: Any, device: Any) -> tuple[Any, str, str]:
    """The compiled function, the text of its module and, on a TPU, that of the code generated from it."""
    if device is None or device.platform != "tpu":
        compiled = lowered.compile()
        return compiled, compiled.as_text(), ""
    # The text of some TPU modules cannot be had from the executable (XLA fails to read its own async instructions), and
    # the estimates of time are in the dump only. A program that a cache returns was not dumped.
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        text, generated = (
            "\n".join(path.read_text() for path in sorted(Path(folder).glob(f"*.{stage}.txt")))
            for stage in ("after_optimizations", "after_codegen")
        )
    return compiled, text or compiled.as_text(), generated


def _collectives(module: Module, mesh: Mesh | None) -> tuple[Collective, ...]:
    return tuple(
        Collective(found.op, _axes(found.groups, found.op, mesh), found.bytes, name in module.looped)
        for name, computation in module.computations.items()
        for instruction in computation.values()
        if (found := transfer(module, name, instruction))
    )


def _axes(groups: Sequence[tuple[int, ...]], op: str, mesh: Mesh | None) -> tuple[str, ...] | None:
    """The mesh axes along which the members of a group differ, if the groups are all that differ so."""
    if mesh is None or not groups:
        return None
    ids = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    places = np.array(list(np.ndindex(*ids.shape)))
    differ = [d for d in range(ids.ndim) if any((places[list(g), d] != places[g[0], d]).any() for g in groups)]
    axes = tuple(mesh.axis_names[d] for d in differ)
    if op == "collective-permute":
        return axes
    expected = np.moveaxis(ids, differ, range(len(differ))).reshape(math.prod(ids.shape[d] for d in differ), -1).T
    return axes if {frozenset(g) for g in groups} == {frozenset(map(int, g)) for g in expected} else None
