"""Parameters as one copy for each device, so that the sum of their gradients over devices can wait."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .axes import Names, axis_names, vary
from .mesh import ParallelMesh


def one_a_device(x: jax.Array, parallel: ParallelMesh, spec: P) -> jax.Array:
    """An array as one copy for each of the devices that share it: `[...]` to `[D, ...]`, no device sending anything.

    The gradient of the copies is what each device's own tokens contribute. Their sum over devices, the gradient of x,
    is in f32. `jaxppo.accumulate_gradients` takes it once, behind its loop over micro-batches.

    Args:
      x: `[...]`, floating-point.
      parallel: the mesh.
      spec: how x lies on it; D is the number of devices along the data and context axes that are not in it.

    Returns:
      `[D, ...]`, sharded by `parallel.copies_spec(spec)`.

    Example:
      >>> mesh = make_parallel_mesh("dp=4,cp=2")
      >>> copies = one_a_device(jnp.ones((3, 5)), mesh, P())
      >>> copies.shape, copies.sharding.spec[0]
      ((8, 3, 5), ('dp', 'cp'))
    """
    names = axis_names(parallel.copies_spec(spec)[0])
    if not names:
        return x[None]
    if parallel.is_explicit:
        x = jax.reshard(x, parallel.sharding(spec))
    return _one_a_device(x, parallel, names, spec)


# by its name `accumulate_gradients` finds it in a traced loss
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _one_a_device(x: jax.Array, parallel: ParallelMesh, names: Names, spec: P) -> jax.Array:
    def per_shard(x: jax.Array) -> jax.Array:
        return vary(x.astype(jnp.float32), names).astype(x.dtype)[None]

    return jax.shard_map(per_shard, mesh=parallel.mesh, in_specs=spec, out_specs=P(names, *spec))(x)
