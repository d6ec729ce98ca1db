"""Drafts with a vocabulary of their own: the ids of the policy's vocabulary that the columns of
a head stand for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxppo.base.arrays import AnyArray, as_token_ids, check, check_array, check_count
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.call import Asked, HeadCall, Inputs, Names
from jaxppo.head.order import read
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary

__all__ = ["draft_ids_of_counts", "draft_ids_of_d2t", "draft_targets"]


def draft_ids_of_d2t(d2t: Int[AnyArray, " D"], vocab_size: int) -> Int[np.ndarray, " D"]:
    """The ids, `i32[D]`, that EAGLE-3's `d2t` stands for: id of column j = j + d2t[j].

    Args:
      d2t: `i32[D]`, of a checkpoint; on the host.
      vocab_size: V, of the policy.

    Raises:
      TypeError, ValueError: no integers `[D]`; two columns of one id, or an id outside the
        vocabulary.

    Example:
      >>> draft_ids_of_d2t(np.array([0, 1, 1, 4]), vocab_size=8).tolist()
      [0, 2, 3, 7]

    Li et al. 2025, EAGLE-3, https://arxiv.org/abs/2503.01840; SpecForge,
    https://github.com/sgl-project/SpecForge
    """
    check_array("d2t", d2t)
    check_count("vocab_size", vocab_size, least=1)
    columns = d2t.shape[-1] if d2t.ndim else 0
    ids = np.arange(columns) + np.asarray(d2t, np.int64)
    _check_ids("d2t", ids, vocab_size)
    return ids.astype(np.int32)


def draft_ids_of_counts(counts: Int[AnyArray, " V"], size: int) -> Int[np.ndarray, " D"]:
    """The ids, `i32[D]`, that occur most often, rising; of equally many the lower ids.

    Args:
      counts: `i32[V]`, how often each id occurs, on the host: `np.bincount(tokens, minlength=V)` of
        what was drawn.
      size: D, the columns that the draft's head will have.

    Raises:
      TypeError, ValueError: no integers `[V]`; D that is not 1 to V.

    Example:
      >>> draft_ids_of_counts(np.array([5, 0, 7, 5, 9]), 3).tolist()
      [0, 2, 4]
    """
    check_array("counts", counts)
    check_count("size", size, least=1)
    good = counts.ndim == 1 and size <= counts.shape[0]
    check("counts", f"shape {counts.shape}", good, f"[V] with at least size={size} ids")
    by_count = np.argsort(-np.asarray(counts, np.int64), kind="stable")
    return np.sort(by_count[:size]).astype(np.int32)


def draft_targets(
    batch: RolloutBatch,
    draft_ids: Int[AnyArray, " D"],
    vocab_size: int,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> RolloutBatch:
    """The batch with targets as columns of a draft's head: for `SFT` and `mtp_loss`, whose targets
    are columns.

    Args:
      batch, parallel: `[R, T]`, and the mesh.
      draft_ids: `i32[D]`, the id of each column.
      vocab_size: V, of the policy.

    Returns:
      The batch with such targets, and loss mask 0 where the target is not among the ids: the draft
      cannot draw it.

    Raises:
      TypeError, ValueError: ids that `draft_loss` would refuse. Under `jit` such ids make the mask
        NaN, and every loss.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 7, 3, 5], response_start=1)], row_length=4)
      >>> found = draft_targets(batch, jnp.array([0, 5, 7]), vocab_size=8)
      >>> found.targets[0, :3].tolist(), found.loss_mask[0].tolist()
      ([2, 0, 1], [1.0, 0.0, 1.0, 0.0])
    """
    check_count("vocab_size", vocab_size, least=1)
    batch = checked(batch, reader="draft_targets")
    draft_ids = as_draft_ids(draft_ids, vocab_size)
    arguments = {"targets": batch.targets, "loss_mask": batch.loss_mask, "draft_ids": draft_ids}

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        return [p.tokens_spec, p.tokens_spec, jax.P()], p.tokens_spec

    targets, mask = shard_call("draft_targets", _as_columns, parallel, arguments, specs, vocab_size)
    return dataclasses.replace(batch, targets=targets, loss_mask=mask)


def _as_columns(
    axes: ShardAxes, vocab_size: int, targets: Array, mask: Array, ids: Array
) -> tuple[Array, Array]:
    numbers = jnp.arange(ids.shape[0], dtype=jnp.int32)
    columns = jnp.full(vocab_size, -1, jnp.int32).at[ids].set(numbers)
    column = columns[jnp.clip(targets, 0, vocab_size - 1)]
    there = (column >= 0) & (targets >= 0) & (targets < vocab_size)
    return jnp.where(there, column, 0), jnp.where(there, mask, 0) + sound_ids(ids, vocab_size)


def as_draft_ids(draft_ids: Any, vocab_size: int) -> Int[AnyArray, " D"]:
    """The checked ids as i32."""
    check_array("draft_ids", draft_ids)
    _check_ids("draft_ids", draft_ids, vocab_size)
    return as_token_ids(draft_ids)


def _check_ids(what: str, ids: Any, vocab_size: int) -> None:
    """Raises unless these are different ids of the vocabulary, as far as they are known outside
    of jit.
    """
    check(what, f"shape {ids.shape}", ids.ndim == 1 and ids.size > 0, "[D]")
    if isinstance(ids, jax.core.Tracer) or not getattr(ids, "is_fully_addressable", True):
        return
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"{what}: got the id {outside[0]}, expected 0 to {vocab_size - 1}")
    different, counts = np.unique(ids, return_counts=True)
    twice = different[counts > 1]
    if twice.size:
        raise ValueError(f"{what}: got the id {twice[0]} twice, expected each once")


def sound_ids(ids: Int[Array, " D"], vocab_size: int) -> jax.Array:
    """A scalar, 0 where the ids are different ids of the vocabulary, and NaN elsewhere."""
    ordered = jnp.sort(ids)
    inside = (ordered[0] >= 0) & (ordered[-1] < vocab_size)
    different = (ordered[1:] != ordered[:-1]).all()
    return jnp.where(inside & different, jnp.float32(0), jnp.nan)


def inputs_of_columns(
    call: HeadCall, inputs: Inputs, ids: Int[Array, " D"], like: HeadCall, like_inputs: Inputs
) -> tuple[HeadCall, Inputs]:
    """The columns `ids` of a head as a head of their own, which lie as those of the head `like`.

    The ids are equal on all devices, one for each column of that head that is no padding.
    """
    own = int(like_inputs.kernel.shape[_kernel_dim(like)])  # columns that a device holds
    ids = jnp.pad(ids, (0, own * call.axes.size(like.v_names) - ids.shape[0]))
    columns: dict[str, Any] = {}
    for name, dim in {"kernel": _kernel_dim(call), "bias": -1, "lora_b": -1}.items():
        x = getattr(inputs, name)
        if x is not None:
            columns[name] = _columns(x, dim % x.ndim, ids, call.v_names, like.v_names, own)
    call = dataclasses.replace(
        call, v_names=like.v_names, vocab_size=like.vocab_size, asked=Asked()
    )
    return call, inputs._replace(**columns, tokens=inputs.tokens._replace(targets=None))


def _kernel_dim(call: HeadCall) -> int:
    """The dimension of a kernel's columns, from the end."""
    if call.transposed:
        return -1
    return call.v_dim - 2


def _columns(
    x: jax.Array, dim: int, ids: jax.Array, names: Names, to: Names, own: int
) -> jax.Array:
    """The columns `ids` of an array whose columns are divided over `names`, divided over `to`."""
    count = x.shape[dim]
    column = ids
    if names:
        column = ids - count * lax.axis_index(names)
    inside = (column >= 0) & (column < count)
    here = jnp.take(x, jnp.where(inside, column, 0), dim, mode="clip")
    others = [d for d in range(x.ndim) if d != dim]
    here = jnp.where(jnp.expand_dims(inside, others), here, 0)
    if names and names == to:  # exact in any dtype: a device adds 0 for the columns that it lacks
        return lax.psum_scatter(here, names, scatter_dimension=dim, tiled=True)
    if names:
        here = lax.psum(vary(here, frozenset(names)), names)
    if not to:
        return here
    return read(vary(here, frozenset(to)), own * lax.axis_index(to), own, dim)
