"""Tokens in chunks of one size: a token's numbers then have the same bits in every batch and on
every mesh.

XLA compiles a product for its shape, and with another shape it may add up in another order. A
sampler computes one token of each row at a time, a trainer computes whole rows, so their sums
differ in the last bits. Here both run one loop. Each turn computes a chunk of `SIZE` tokens on one
device, which holds all parameters that the chunk needs. What lies in the chunk, how many chunks
there are and how many devices share them changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxppo import ParallelMesh
from jaxppo.sharding import vary

SIZE = 16  # tokens of a chunk


def in_chunks(
    fn: Callable[..., Any], parallel: ParallelMesh, whole: Any, *tokens: jax.Array
) -> Any:
    """fn(whole, *tokens), where each call of fn sees one chunk.

    Args:
      fn: from `whole` and arrays `[1, SIZE, ...]` to arrays `[1, SIZE, ...]`; no token's result
        depends on another token of the chunk.
      parallel: the mesh, whose devices share the chunks, those of the tensor axis too.
      whole: arrays that each device holds whole: parameters, or keys and values.
      tokens: arrays `[R, T, ...]`.
    """
    R, T = tokens[0].shape[:2]
    names = parallel.mesh.axis_names
    devices = parallel.mesh.size
    # XLA would unroll a loop of one turn: another program, other bits
    turns = max(2, -(-R * T // (SIZE * devices)))
    padding = devices * turns * SIZE - R * T

    def flat(x: jax.Array) -> jax.Array:
        x = x.reshape(R * T, *x.shape[2:])
        return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))

    def of_device(whole: Any, *tokens: jax.Array) -> Any:
        whole = jax.tree.map(lambda x: vary(x, names), whole)
        chunks = tuple(x.reshape(turns, 1, SIZE, *x.shape[1:]) for x in tokens)
        # a gradient computes a chunk again, and keeps none
        of_chunk = jax.checkpoint(lambda chunk: fn(whole, *chunk))
        found = lax.map(of_chunk, chunks)
        return jax.tree.map(lambda x: x.reshape(turns * SIZE, *x.shape[3:]), found)

    shared = P(names)
    in_specs = (P(), *[shared] * len(tokens))
    of_mesh = jax.shard_map(of_device, mesh=parallel.mesh, in_specs=in_specs, out_specs=shared)
    found = of_mesh(whole, *map(flat, tokens))
    return jax.tree.map(lambda x: x[: R * T].reshape(R, T, *x.shape[1:]), found)


def apply(
    method: Callable[..., Any], module: nnx.Module, chunked: ParallelMesh | None, *tokens: jax.Array
) -> Any:
    """method(module, *tokens): chunk by chunk on this mesh, or all tokens at once for None."""
    if chunked is None:
        return method(module, *tokens)
    graphdef, state = nnx.split(module)

    def of_chunk(state: nnx.State, *chunk: jax.Array) -> Any:
        return method(nnx.merge(graphdef, state), *chunk)

    return in_chunks(of_chunk, chunked, state, *tokens)


def mesh_of(slots: int | None, parallel: ParallelMesh) -> ParallelMesh | None:
    """The mesh on which a model's tokens are computed in chunks, if they are."""
    if slots is None:
        return None
    return parallel
