"""What a compiled function costs: collectives and temporaries from its module, flops from its jaxpr."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .flops import Flops, count_flops
from .program import notes

_OPS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
_ITEM_BITS = {"pred": 8, "bf16": 16, "f16": 16, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled module.

    Args:
      op: "all-reduce", "all-gather", "reduce-scatter", "collective-permute" or "all-to-all".
      axes: the mesh axes that it crosses; None where its groups are no product of axes, or no mesh is known.
      bytes: of the whole array that a device puts in or gets out, whichever is larger; for one turn of a loop.
      in_loop: whether it sits in the body of a loop.
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
      notes: what the function says of itself, see `sharding.program.note`.
      text: the compiled module.
    """

    collectives: tuple[Collective, ...]
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    flops: Flops
    notes: tuple[str, ...]
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        lines = [
            f"temporaries {self.temp_bytes / 2**20:.1f} MiB, arguments {self.argument_bytes / 2**20:.1f} MiB, "
            f"results {self.output_bytes / 2**20:.1f} MiB, {self.flops}"
        ]
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
      ValueError: arguments on two meshes.

    Example:
      >>> import jax.numpy as jnp
      >>> found = audit(lambda a, b: a @ b, jnp.ones((4, 8)), jnp.ones((8, 2)))
      >>> found.collectives, found.flops.low
      ((), 128)
    """
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    traced = jitted.trace(*args)
    mesh = _mesh_of(args) if mesh is None else mesh
    compiled, text = _compile(traced.lower(), mesh)
    memory = compiled.memory_analysis()
    return Audit(
        collectives=_collectives(text, mesh),
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        flops=count_flops(traced.jaxpr),
        notes=notes(traced.jaxpr),
        text=text,
    )


def _mesh_of(args: Any) -> Mesh | None:
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
    meshes: set[Any] = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    if len(meshes) > 1:
        raise ValueError(f"args: got arrays on {len(meshes)} meshes, expected one, or mesh=")
    return meshes.pop() if meshes else None


def _compile(lowered: Any, mesh: Mesh | None) -> tuple[Any, str]:
    """The compiled function and the text of its module."""
    if mesh is None or mesh.devices.flat[0].platform != "tpu":
        compiled = lowered.compile()
        return compiled, compiled.as_text()
    # the text of some TPU modules cannot be had from the executable (XLA fails to read its own async instructions)
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        return compiled, "\n".join(path.read_text() for path in sorted(Path(folder).glob("*.after_optimizations.txt")))


def _collectives(text: str, mesh: Mesh | None) -> tuple[Collective, ...]:
    computations = _computations(text)
    looped = _in_loops(computations)
    op = re.compile(rf"= (?P<shape>\(.*?\)|\S+) (?P<op>{'|'.join(_OPS)})(?P<start>-start)?\(")
    found = []
    for name, lines in computations.items():
        for line in lines:
            if match := op.search(line):
                groups = _groups(line)
                size = max(_shape_bytes(match["shape"], bool(match["start"])), 1)
                kind = match["op"]
                if kind == "reduce-scatter" and groups:
                    size *= len(groups[0])
                if name.startswith("all-reduce-scatter"):  # the fusion that is XLA's reduce-scatter on TPU
                    kind = "reduce-scatter"
                found.append(Collective(kind, _axes(groups, kind, mesh), size, name in looped))
    return tuple(found)


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of a module, by its name."""
    computations: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = computations.setdefault(match[1], [])
        else:
            current.append(line)
    return computations


def _in_loops(computations: dict[str, list[str]]) -> set[str]:
    """The computations that run inside the body of a loop."""
    called = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
    many = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
    calls: dict[str, set[str]] = {}
    pending: list[str] = []
    for name, lines in computations.items():
        text = "\n".join(lines)
        calls[name] = set(called.findall(text))
        for names in many.findall(text):
            calls[name] |= {n.strip().lstrip("%") for n in names.split(",")}
        pending += re.findall(r"body=%?([\w.\-]+)", text)
    looped: set[str] = set()
    while pending:
        if (name := pending.pop()) not in looped:
            looped.add(name)
            pending += calls.get(name, ())
    return looped


def _shape_bytes(shape: str, started: bool) -> int:
    """The bytes of a shape; of a started collective, which carries its operand along, the larger of its parts."""
    sizes = []
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        bits = _ITEM_BITS.get(dtype) or int(re.sub(r"^\D+", "", dtype).split("e")[0])
        sizes.append(math.prod(int(d) for d in dims.split(",") if d) * bits // 8)
    return (max(sizes) if started else sum(sizes)) if sizes else 0


def _groups(line: str) -> list[tuple[int, ...]]:
    """The groups of devices that a collective joins; pairs for a permutation."""
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line):
        return [tuple(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, source, order = ([int(x) for x in (g or "").split(",") if x] for g in match.groups())
        ids = np.arange(math.prod(source)).reshape(source)
        return [tuple(map(int, g)) for g in (ids.transpose(order) if order else ids).reshape(shape)]
    if match := re.search(r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\] ?\{((?:'\w+',? ?)+)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        joined = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", match[2])]
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        last = np.moveaxis(ids, joined, range(-len(joined), 0))
        return [tuple(map(int, g)) for g in last.reshape(-1, math.prod(last.shape[-len(joined) :]))]
    return []


def _axes(groups: list[tuple[int, ...]], op: str, mesh: Mesh | None) -> tuple[str, ...] | None:
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
