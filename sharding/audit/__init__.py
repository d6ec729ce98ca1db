"""The cost of a program on each device, read from what JAX traces and XLA compiles; no devices are
needed.

The text of compiled modules (HLO) is parsed by hand: `compiled.cost_analysis()` counts the body of
a loop once, the bindings of jaxlib show neither shapes nor attributes, and the protos that hold
both come with xprof or TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

if TYPE_CHECKING:
    from .results import Audit

__all__ = ["audit"]


def audit(fn: Callable[..., Any], *args: Any, mesh: Mesh | None = None) -> Audit:
    """The `Audit` of `fn`: compiles it for the devices of its arguments, real or only described,
    and reads its costs.

    Args:
      fn: a function, or the result of `jax.jit`.
      *args: arrays, or `jax.ShapeDtypeStruct`s with shardings, such as over a mesh of
        `jax.experimental.topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices`.
      mesh: names the axes of collectives; the mesh of the arguments' shardings by default.

    Raises:
      TypeError: `fn` is not a function, or `mesh` is not a Mesh.
      ValueError: arguments on several meshes.

    Example:
      >>> import jax.numpy as jnp
      >>> found = audit(lambda a, b: a @ b, jnp.ones((4, 8)), jnp.ones((8, 2)))
      >>> found.collectives, found.flops.low
      ((), 128)
    """
    from .compiled import read  # imported here so that other programs do not load it

    if not callable(fn):
        raise TypeError(
            f"fn: got {type(fn).__name__}, expected a function, or what jax.jit makes of one"
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh: got {type(mesh).__name__}, expected jax.sharding.Mesh, as ParallelMesh.mesh is"
        )
    return read(fn, args, mesh)
