"""The costs of a compiled function: collectives, temporaries and time from its module, flops from its jaxpr."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Lowered

from ..devices import device_of
from .clock import estimate_time, roofline
from .flops import count_flops
from .hlo import parse, transfer
from .links import Torus
from .program import notes
from .results import Audit, Collective


def read(fn: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh | None) -> Audit:
    """The audit of a function, see `audit`."""
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    traced = jitted.trace(*args)
    shardings = [s for x in jax.tree.leaves(args) if (s := getattr(x, "sharding", None)) is not None]
    mesh = _mesh_of(shardings) if mesh is None else mesh
    of_args = {d for s in shardings for d in s.device_set}
    devices = sorted(of_args, key=lambda d: d.id) if mesh is None else list(mesh.devices.flat)
    device = devices[0] if devices else None  # None where neither the arguments nor the mesh name one
    compiled, text, generated = _compile(traced.lower(), device)
    module, memory, chip, time = parse(text), compiled.memory_analysis(), device_of(device), None
    if chip and device and device.platform == "gpu":
        time = roofline(text, chip)
    elif chip and generated:
        time = estimate_time(generated, chip, Torus.of(devices, chip))
    return Audit(
        collectives=tuple(
            Collective(found.op, _axes(found.groups, found.op, mesh), found.bytes, name in module.looped)
            for name, computation in module.computations.items()
            for instruction in computation.values()
            if (found := transfer(module, name, instruction))
        ),
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        flops=count_flops(traced.jaxpr),
        time=time,
        notes=notes(traced.jaxpr),
        text=text,
    )


def _mesh_of(shardings: Sequence[Sharding]) -> Mesh | None:
    meshes: set[Any] = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    if len(meshes) > 1:
        raise ValueError(f"args: got arrays on {len(meshes)} meshes, expected one, or mesh=")
    return meshes.pop() if meshes else None


def _compile(lowered: Lowered, device: jax.Device | None) -> tuple[Any, str, str]:
    """The compiled function, the text of its module and, on a TPU, the text of the generated code."""
    if device is None or device.platform != "tpu":
        compiled: Any = lowered.compile()
        return compiled, compiled.as_text(), ""
    # Some TPU executables cannot give their module's text (XLA fails to read its own async instructions), and only the
    # dump has the estimates of time. A program from a cache was not dumped.
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        text, generated = (
            "\n".join(path.read_text() for path in sorted(Path(folder).glob(f"*.{stage}.txt")))
            for stage in ("after_optimizations", "after_codegen")
        )
    return compiled, text or compiled.as_text(), generated


def _axes(groups: Sequence[tuple[int, ...]], op: str, mesh: Mesh | None) -> tuple[str, ...] | None:
    """The mesh axes that a collective's groups span; None where the groups are not a product of axes."""
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
