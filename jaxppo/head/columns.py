"""Some columns of a head's vocabulary as a head of their own, beside the log z of all columns. Per-shard."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxppo.head.border import slice_of
from jaxppo.head.call import Asked, HeadCall, Inputs, Names
from jaxppo.sharding import vary


def inputs_of_columns(
    call: HeadCall, inputs: Inputs, ids: Int[Array, " D"], like: HeadCall, its: Inputs
) -> tuple[HeadCall, Inputs]:
    """The call and the arrays of the columns with these ids, divided over devices as another head's columns are.

    Args:
      call: of all columns.
      inputs: its arrays, as the device holds them.
      ids: ids of the vocabulary, for the columns of the other head that are no padding; equal on all devices.
      like: the call of the other head.
      its: its arrays.
    """
    own = int(its.kernel.shape[-2:][1 if like.transposed else like.v_dim])  # columns that a device holds
    ids = jnp.pad(ids, (0, own * (lax.axis_size(like.v_names) if like.v_names else 1) - ids.shape[0]))
    arrays = {name: getattr(inputs, name) for name in ("kernel", "bias", "lora_b")}
    if call.copied:
        a = inputs.lora_a
        arrays = {name: None if x is None else x[0] for name, x in arrays.items()}
        inputs = inputs._replace(lora_a=None if a is None else a[0])
    dims = {"kernel": 1 if call.transposed else call.v_dim, "bias": 0, "lora_b": -1}

    def columns(name: str, x: jax.Array | None) -> jax.Array | None:
        return None if x is None else _columns(x, dims[name] % x.ndim, ids, call.v_names, like.v_names, own)

    found = {name: columns(name, x) for name, x in arrays.items()}
    call = dataclasses.replace(call, v_names=like.v_names, vocab_size=like.vocab_size, asked=Asked(), copied=False)
    return call, inputs._replace(**found, targets=None)


def _columns(x: jax.Array, dim: int, ids: jax.Array, names: Names, to: Names, own: int) -> jax.Array:
    """The columns `ids` of an array whose columns are divided over `names`, divided over `to`.

    A device adds what it holds of the columns and 0 for the others, so the sum over devices is exact in any dtype.
    """
    count = x.shape[dim]
    place = ids - (count * lax.axis_index(names) if names else 0)
    inside = (place >= 0) & (place < count)
    here = jnp.take(x, jnp.where(inside, place, 0), dim, mode="clip")
    shape = [1] * x.ndim
    shape[dim] = ids.shape[0]
    here = jnp.where(inside.reshape(shape), here, jnp.zeros((), x.dtype))
    if names and names == to:
        return lax.psum_scatter(here, names, scatter_dimension=dim, tiled=True)
    here = lax.psum(vary(here, frozenset(names)), names) if names else here
    return slice_of(vary(here, frozenset(to)), own * lax.axis_index(to), own, dim) if to else here


def sound_ids(ids: Int[Array, " D"], vocab_size: int) -> jax.Array:
    """A scalar, 0 where the ids are different ids of the vocabulary, and NaN elsewhere."""
    ordered = jnp.sort(ids)
    fine = (ordered[0] >= 0) & (ordered[-1] < vocab_size) & (ordered[1:] != ordered[:-1]).all()
    return jnp.where(fine, jnp.float32(0), jnp.nan)
