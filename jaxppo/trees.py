"""Rows packed as trees: which segments go on from which, and so which tokens see which.

A prefix that samples share is a segment without a sample. `parents i32[R, S]` says whose branch a segment is: the
parent's number in `segment_ids`, in the same row, 0 for none. A segment stands before its branches, and with nothing
else between, so that all that go on from it are neighbours: from the one behind it to its `ends`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

__all__ = ["Paths", "check_recurrent"]


class Rows(Protocol):
    """What is asked of a `RolloutBatch`."""

    @property
    def parents(self) -> Int[Array, "R S"] | None: ...


@partial(jax.tree_util.register_dataclass, data_fields=["segment_ids", "positions", "ends"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Paths:
    """What decides which tokens see which: arrays that travel with the tokens, in any order and any part of a row.

    Args:
      segment_ids: `i32[R, T]`, 0 is padding.
      positions: `i32[R, T]`, places in the sample, from 0.
      ends: `i32[R, T]`, the last segment that goes on from that of each token, itself where none does; None for rows
        without shared prefixes.

    Example:
      >>> prompts = [[5, 6, 7, 8, 1], [5, 6, 7, 8, 2]]
      >>> samples = [Sample(tokens, response_start=4) for tokens in prompts]
      >>> batch = RolloutBatch.from_samples(samples, row_length=8, share_prefixes=True)
      >>> batch.segment_ids.tolist(), batch.positions.tolist()
      ([[1, 1, 1, 2, 2, 3, 3, 0]], [[0, 1, 2, 3, 4, 3, 4, 0]])
      >>> batch.paths.attends(batch.paths)[0, 6].astype(int)          # the last token of the second sample
      Array([1, 1, 1, 0, 0, 1, 1, 0], dtype=int32)
    """

    segment_ids: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    ends: Int[Array, "R T"] | None = None

    @classmethod
    def of(
        cls, segment_ids: Int[Array, "R T"], positions: Int[Array, "R T"], parents: Int[Array, "R S"] | None
    ) -> Paths:
        """Those of rows, or of stacked rows."""
        if parents is None:
            return cls(segment_ids, positions)
        # compared, not gathered: an explicit mesh knows how the result lies
        is_in = segment_ids[..., :, None] == _numbers(parents.shape[-1], parents.ndim, jnp)
        last = jnp.where(is_in, ends(parents, jnp)[..., None, :], 0)
        return cls(segment_ids, positions, last.sum(-1, dtype=jnp.int32))

    def attends(self, keys: Paths) -> Bool[Array, "R Q K"]:
        """Whether each of these tokens sees each of `keys`: those up to itself of its own segment and its ancestors.

        Args:
          keys: of the same rows, in any order, such as all positions of a row while `self` is of one context shard.

        Returns:
          `bool[R, Q, K]`, as `jax.nn.dot_product_attention(mask=)` takes it with a dimension for heads. A token of
          padding sees padding.
        """
        query, key = self.segment_ids[..., :, None], keys.segment_ids[..., None, :]
        causal = self.positions[..., :, None] >= keys.positions[..., None, :]
        if keys.ends is None:
            return causal & (query == key)
        return causal & (key <= query) & (query <= keys.ends[..., None, :])


def check_recurrent(model: Any, batch: Rows) -> None:
    """Raises where a model says that it has a state along the row, `recurrent`, and the rows are trees.

    A state runs from token to token; behind a branch stands its sibling, whose state is another.

    Args:
      model: anything; `recurrent` is read where it has it.
      batch: what the model is to run on.

    Raises:
      ValueError: it is True, and the batch has shared prefixes.

    Example:
      >>> import types
      >>> batch = RolloutBatch.from_samples([Sample([5, 6], response_start=1)], row_length=4, share_prefixes=True)
      >>> check_recurrent(types.SimpleNamespace(recurrent=True), batch)
      Traceback (most recent call last):
      ...
      ValueError: batch: got rows packed as trees for a model with recurrent state, expected share_prefixes=False
    """
    if batch.parents is not None and getattr(model, "recurrent", False):
        raise ValueError(
            "batch: got rows packed as trees for a model with recurrent state, expected share_prefixes=False"
        )


def ends(parents: Any, xp: ModuleType) -> Any:
    """`i32[..., S]`, the last segment that goes on from each, itself where none does.

    Those that go on from a are the ones behind it up to the first whose parent stands before a.
    """
    count = parents.shape[-1]
    numbers = _numbers(count, parents.ndim, xp)
    own = numbers.reshape(*numbers.shape[:-2], count, 1)
    leaves = (numbers > own) & (parents[..., None, :] < own)
    return xp.where(leaves, numbers, count + 1).min(axis=-1) - 1


def starts(parents: Any, lengths: Any, xp: ModuleType) -> Any:
    """`[..., S]`, the position at which each segment begins: as many as its ancestors have.

    Args:
      parents: `i32[..., S]`, in order.
      lengths: of that shape, how many positions each segment has.
      xp: numpy or jax.numpy.
    """
    numbers = _numbers(parents.shape[-1], parents.ndim, xp)
    own = numbers.reshape(*numbers.shape[:-2], parents.shape[-1], 1)
    is_ancestor = (own < numbers) & (numbers <= ends(parents, xp)[..., :, None])
    return xp.where(is_ancestor, lengths[..., :, None], 0).sum(axis=-2, dtype=lengths.dtype)


def out_of_order(parents: Any, xp: ModuleType) -> Any:
    """`bool[..., S]`, whose parent does not stand before it, or on no path to the segment before it."""
    numbers = _numbers(parents.shape[-1], parents.ndim, xp)
    own = numbers.reshape(*numbers.shape[:-2], parents.shape[-1], 1)
    is_parent = parents[..., None, :] == own
    left = is_parent & ((own >= numbers) | (ends(parents, xp)[..., :, None] < numbers))
    return left.any(axis=-2) | (parents < 0) | (parents > parents.shape[-1])


def has_branches(parents: Any, xp: ModuleType) -> Any:
    """`bool[..., S]`, which segments are the parent of another."""
    numbers = _numbers(parents.shape[-1], parents.ndim, xp)
    return (parents[..., None, :] == numbers.reshape(*numbers.shape[:-2], -1, 1)).any(axis=-1)


def _numbers(count: int, rank: int, xp: ModuleType) -> Any:
    """The numbers 1 to S along a new last dimension, `[1, ..., 1, S]`."""
    return xp.arange(1, count + 1, dtype=xp.int32).reshape((1,) * rank + (count,))
