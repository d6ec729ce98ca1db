"""Rows packed as trees: which segment continues which, and hence which tokens attend to which.

A prefix that samples share is a segment with the sample id -1. `parents i32[R, S]` holds the parent
of each segment, by its number in `segment_ids` in the same row, 0 for none. Branches follow their
parent, with no other segment between, so that the descendants of a segment are neighbours: from the
next segment up to its `ends`.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxppo.base.arrays import Arrays, check
from jaxppo.base.pytree import register

__all__ = ["Paths", "check_recurrent"]


@register()
@dataclasses.dataclass(frozen=True)
class Paths:
    """The arrays that decide which tokens attend to which.

    They travel with tokens, in any order and part of a row.

    Args:
      segment_ids: `i32[R, T]`, 0 is padding.
      positions: `i32[R, T]`, places in the sample, from 0.
      ends: `i32[R, T]`, the last descendant of each token's segment, or the segment itself if it
        has none; None for rows without shared prefixes.

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
        cls,
        segment_ids: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        parents: Int[Array, "R S"] | None,
    ) -> Paths:
        """The paths of rows, or of stacked rows."""
        if parents is None:
            return cls(segment_ids, positions)
        # a comparison and not a gather: on Explicit meshes its result has a known sharding
        _, numbers = _numbers(parents, jnp)
        is_in = segment_ids[..., :, None] == numbers
        last = jnp.where(is_in, ends(parents, jnp)[..., None, :], 0)
        return cls(segment_ids, positions, last.sum(-1, dtype=jnp.int32))

    def attends(self, keys: Paths) -> Bool[Array, "R Q K"]:
        """Whether each of these tokens attends to each of `keys`: those up to itself in its segment
        and its ancestors.

        Args:
          keys: the paths of the same rows, in any order; all positions, for example, while `self`
            is one context shard.

        Returns:
          `bool[R, Q, K]`, the mask of `jax.nn.dot_product_attention` once a dimension for heads is
          added. Padding attends to padding.
        """
        query = self.segment_ids[..., :, None]
        key = keys.segment_ids[..., None, :]
        causal = self.positions[..., :, None] >= keys.positions[..., None, :]
        if keys.ends is None:
            return causal & (query == key)
        return causal & (key <= query) & (query <= keys.ends[..., None, :])


def check_recurrent(model: object, batch: Any) -> None:
    """Raises where a recurrent model would run on rows that are trees.

    A recurrent state runs from token to token, but the segment after a branch is its sibling, and
    needs the state of their parent.

    Args:
      model: any model; its attribute `recurrent` is read, if it has one.
      batch: the batch that the model will run on.

    Raises:
      ValueError: `recurrent` is True, and the batch has shared prefixes.

    Example:
      >>> import types
      >>> batch = RolloutBatch.from_samples([Sample([5, 6], response_start=1)], row_length=4, share_prefixes=True)
      >>> check_recurrent(types.SimpleNamespace(recurrent=True), batch)
      Traceback (most recent call last):
      ...
      ValueError: batch: got rows packed as trees for a model with recurrent state, expected share_prefixes=False
    """
    good = batch.parents is None or not getattr(model, "recurrent", False)
    check(
        "batch",
        "rows packed as trees for a model with recurrent state",
        good,
        "share_prefixes=False",
    )


def ends(parents: Arrays, xp: ModuleType) -> Arrays:
    """`i32[..., S]`, the last descendant of each segment, or the segment itself if it has none.

    The descendants of segment a are those after it, up to the first whose parent comes before a.
    """
    own, others = _numbers(parents, xp)
    leaves = (others > own) & (parents[..., None, :] < own)
    return xp.where(leaves, others, parents.shape[-1] + 1).min(axis=-1) - 1


def starts(parents: Arrays, lengths: Arrays, xp: ModuleType) -> Arrays:
    """`[..., S]`, the position at which each segment begins: the total of `lengths`, `[..., S]`,
    of its ancestors.
    """
    own, others = _numbers(parents, xp)
    is_ancestor = (own < others) & (others <= ends(parents, xp)[..., :, None])
    return xp.where(is_ancestor, lengths[..., :, None], 0).sum(axis=-2, dtype=lengths.dtype)


def out_of_order(parents: Arrays, xp: ModuleType) -> Arrays:
    """`bool[..., S]`, True for a segment whose parent is not before it, or not on the path of
    the segment before it.
    """
    own, others = _numbers(parents, xp)
    is_parent = parents[..., None, :] == own
    outside = (own >= others) | (ends(parents, xp)[..., :, None] < others)
    has_bad_parent = (is_parent & outside).any(axis=-2)
    return has_bad_parent | (parents < 0) | (parents > parents.shape[-1])


def has_branches(parents: Arrays, xp: ModuleType) -> Arrays:
    """`bool[..., S]`, True for a segment that is the parent of another."""
    own, _ = _numbers(parents, xp)
    return (parents[..., None, :] == own).any(axis=-1)


def _numbers(parents: Arrays, xp: ModuleType) -> tuple[Any, Any]:
    """The numbers 1 to S of segments along two new last dimensions: `[1, ..., S, 1]` and
    `[1, ..., 1, S]`.
    """
    numbers = xp.arange(1, parents.shape[-1] + 1, dtype=xp.int32)
    leading = (1,) * (parents.ndim - 1)
    return numbers.reshape(*leading, -1, 1), numbers.reshape(*leading, 1, -1)
