"""Gives each device its own copy of a parameter, so that gradients are summed over devices once, at the end."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .axes import Names, axis_names, vary
from .dtypes import wider_dtype
from .mesh import ParallelMesh


def one_a_device(x: jax.Array, parallel: ParallelMesh, spec: P) -> jax.Array:
    """One copy of an array for each of the devices that share it, `[...]` to `[D, ...]`, without communication.

    The gradient of a copy is what that device's tokens contribute. The gradient of x is their sum, in f32 or wider;
    `jaxppo.accumulate_gradients` computes it once, after its loop over micro-batches.

    Args:
      x: `[...]`, floating-point.
      parallel: the mesh.
      spec: the PartitionSpec of x. D is the number of devices along the data and context axes that it does not name.

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


# `accumulate_gradients` finds this function in a traced loss by its name
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _one_a_device(x: jax.Array, parallel: ParallelMesh, names: Names, spec: P) -> jax.Array:
    def per_shard(x: jax.Array) -> jax.Array:
        wide = wider_dtype(x.dtype, jnp.float32)  # the dtype in which the copies' gradients are summed
        return vary(x.astype(wide), names).astype(x.dtype)[None]

    return jax.shard_map(per_shard, mesh=parallel.mesh, in_specs=spec, out_specs=P(names, *spec))(x)
