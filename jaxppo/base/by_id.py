"""Statistics over the samples of a step that share an id: the groups of a prompt, the rollouts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Num

from jaxppo.sharding import ShardAxes, vary


@dataclasses.dataclass(frozen=True)
class ById:
    """Numbers the ids of all data shards' N samples; per-shard code.

    A table, `[N]`, has one value for each id.

    Samples without an id, -1, share one number.
    """

    axes: ShardAxes
    own: Int[Array, "R S"]  # the numbers of this device's samples
    all: Int[Array, " N"]  # those of all samples
    there: Bool[Array, "R S"]  # which of this device's samples have an id

    @classmethod
    def of(cls, axes: ShardAxes, ids: Int[Array, "R S"]) -> ById:
        """Numbers all samples by their ids; this device's ids are given, -1 where there is no
        sample.
        """
        axes.check_complete("a comparison of samples by id", ids)
        if jnp.issubdtype(ids.dtype, jnp.signedinteger):  # an unsigned -1 would be the largest id
            ids = jnp.maximum(ids, -1)
        everyone = _gather(axes, ids.reshape(-1))
        order = jnp.argsort(everyone)
        is_next = jnp.diff(everyone[order], prepend=everyone[order[:1]]) != 0
        numbered = jnp.cumsum(is_next, dtype=jnp.int32)
        numbers = jnp.zeros_like(numbered).at[order].set(numbered, unique_indices=True)
        own = lax.dynamic_slice_in_dim(numbers, axes.index(axes.data) * ids.size, ids.size)
        return cls(axes, own.reshape(ids.shape), numbers, ids >= 0)

    def gather(self, x: Num[Array, "R S"]) -> Num[Array, " N"]:
        """The values of all devices' samples, 0 where there is no sample."""
        return _gather(self.axes, jnp.where(self.there, x, 0).reshape(-1))

    def sum(self, x: Num[Array, " N"]) -> Num[Array, " N"]:
        """The table of each id's sum."""
        return jax.ops.segment_sum(x, self.all, self.all.size)

    def max(self, x: Num[Array, " N"]) -> Num[Array, " N"]:
        """The table of each id's largest value."""
        return jax.ops.segment_max(x, self.all, self.all.size)


def _gather(axes: ShardAxes, x: Num[Array, " n"]) -> Num[Array, " N"]:
    if not axes.data:
        return x
    return lax.all_gather(vary(x, axes.data), axes.data, tiled=True, to="invarying")
