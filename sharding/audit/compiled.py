"""The costs of a compiled function: collectives, temporaries and time from its module, flops
from its jaxpr.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Lowered

from ..devices import device_of
from .clock import estimate_time, roofline
from .flops import count_flops
from .hlo import Module, parse, transfer
from .links import Torus
from .program import notes
from .results import Audit, Collective, Time


def read(fn: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh | None) -> Audit:
    """The audit of a function, see `audit`."""
    if not hasattr(fn, "lower"):
        fn = jax.jit(fn)
    traced = fn.trace(*args)  # type: ignore[attr-defined]
    shardings = [
        x.sharding for x in jax.tree.leaves(args) if getattr(x, "sharding", None) is not None
    ]
    if mesh is None:
        mesh = _mesh_of(shardings)
    devices = _devices(shardings, mesh)
    # None where neither the arguments nor the mesh name one
    device = devices[0] if devices else None
    compiled, text, generated = _compile(traced.lower(), device)
    module = parse(text)
    memory = compiled.memory_analysis()
    return Audit(
        collectives=tuple(_collectives(module, mesh)),
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        flops=count_flops(traced.jaxpr),
        time=_time(text, generated, devices),
        notes=notes(traced.jaxpr),
        text=text,
    )


def _collectives(module: Module, mesh: Mesh | None) -> Iterator[Collective]:
    """The collectives of a module, in its order."""
    for name, computation in module.computations.items():
        for instruction in computation.values():
            sent = transfer(module, name, instruction)
            if sent is not None:
                yield Collective(
                    sent.op, _axes(sent.groups, sent.op, mesh), sent.bytes, name in module.looped
                )


def _time(text: str, generated: str, devices: Sequence[jax.Device]) -> Time | None:
    """The time of a module; None for devices that are not known."""
    if not devices:
        return None
    chip = device_of(devices[0])
    if chip is None:
        return None
    if devices[0].platform == "gpu":
        return roofline(text, chip)
    if generated:
        return estimate_time(generated, chip, Torus.of(devices, chip))
    return None


def _devices(shardings: Sequence[Sharding], mesh: Mesh | None) -> list[jax.Device]:
    if mesh is not None:
        return list(mesh.devices.flat)
    everywhere = {device for sharding in shardings for device in sharding.device_set}
    return sorted(everywhere, key=lambda device: device.id)


def _mesh_of(shardings: Sequence[Sharding]) -> Mesh | None:
    meshes: set[Any] = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    if len(meshes) > 1:
        raise ValueError(f"args: got arrays on {len(meshes)} meshes, expected one, or mesh=")
    return meshes.pop() if meshes else None


def _compile(lowered: Lowered, device: jax.Device | None) -> tuple[Any, str, str]:
    """The compiled function, the text of its module and, on a TPU, the text of the generated
    code.
    """
    if device is None or device.platform != "tpu":
        compiled: Any = lowered.compile()
        return compiled, compiled.as_text(), ""
    # Some TPU executables cannot give their module's text (XLA fails to read its own async
    # instructions), and only the dump has the estimates of time. A program from a cache was not
    # dumped.
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        text = _dumped(folder, "after_optimizations")
        generated = _dumped(folder, "after_codegen")
    return compiled, text or compiled.as_text(), generated


def _dumped(folder: str, stage: str) -> str:
    files = sorted(Path(folder).glob(f"*.{stage}.txt"))
    return "\n".join(path.read_text() for path in files)


def _axes(groups: Sequence[tuple[int, ...]], op: str, mesh: Mesh | None) -> tuple[str, ...] | None:
    """The mesh axes that a collective's groups span; None where the groups are not a product of
    axes.
    """
    if mesh is None or not groups:
        return None
    ids = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    places = np.array(list(np.ndindex(*ids.shape)))
    differ = []
    for d in range(ids.ndim):
        if any(np.ptp(places[list(group), d]) > 0 for group in groups):
            differ.append(d)
    axes = tuple(mesh.axis_names[d] for d in differ)
    if op == "collective-permute":
        return axes
    members = math.prod(ids.shape[d] for d in differ)
    expected = np.moveaxis(ids, differ, range(len(differ))).reshape(members, -1).T
    if {frozenset(group) for group in groups} != {frozenset(group) for group in expected.tolist()}:
        return None
    return axes
