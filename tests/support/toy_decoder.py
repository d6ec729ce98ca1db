"""The example's small decoder with the same parameters on any mesh."""

import functools

import jax
from flax import nnx

from examples.trainer.model import create_model
from sharding import make_parallel_mesh


@functools.cache
def of_one_device(config, seed):
    """The parameters on the host."""
    one = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
    _, params = create_model(config, one, seed)
    return jax.device_get(jax.tree.leaves(params))


def decoder_on(config, parallel, seed):
    """The decoder's structure and its parameters, as `create_model` places them on the mesh.

    They are computed on one device, which compiles once for all meshes.
    """
    graphdef, abstract = jax.eval_shape(functools.partial(create_model, config, parallel, seed))
    shardings = jax.tree.map(parallel.sharding, nnx.get_partition_spec(abstract))
    placed = jax.device_put(of_one_device(config, seed), jax.tree.leaves(shardings))
    return graphdef, jax.tree.unflatten(jax.tree.structure(abstract), placed)
