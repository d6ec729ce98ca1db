"""The checks that every function applies to its batch and to the statistics of a head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxppo._arrays import INTEGERS, check_array, check_flag, needed
from jaxppo.batch import RolloutBatch
from jaxppo.batch_checks import arrays_of
from jaxppo.head.checks import as_token_ids
from jaxppo.head.head import TokenStats


def check_arrays(batch: RolloutBatch, *, stacked: bool = False, prefix: str = "batch.") -> dict[str, Array]:
    """The arrays of a batch that are not None; raises unless it is a batch, with the right shapes and dtypes.

    Args:
      batch: the user's argument, unchecked.
      stacked: micro-batches may be stacked, `[K, R, T]`.
      prefix: stands before the names of arrays in errors.
    """
    if not isinstance(batch, RolloutBatch):
        raise TypeError(f"{prefix.rstrip('.')}: got {type(batch).__name__}, expected RolloutBatch")
    for name in ("real_last_targets", "weighted_denominators"):
        check_flag(prefix + name, getattr(batch, name))
    return arrays_of(vars(batch), stacked=stacked, prefix=prefix)


def checked(batch: RolloutBatch, *, stacked: bool = False, prefix: str = "batch.") -> RolloutBatch:
    """Checks a batch with `check_arrays`, and casts its integers to i32 and all other arrays to f32.

    Extras that are floats or bools stay as they are. With `stacked`, for functions of rows that read none of them, they
    are left out.
    """

    def brought(name: str, x: Array) -> Array:
        if name in INTEGERS:
            return x if x.dtype == jnp.int32 else as_token_ids(x)
        return x if x.dtype == jnp.float32 else x.astype(jnp.float32)

    arrays = check_arrays(batch, stacked=stacked, prefix=prefix)
    fields: dict[str, Any] = {name: brought(name, x) for name, x in arrays.items()}
    extras = {} if stacked else batch.extras
    fields["extras"] = {n: as_token_ids(x) if jnp.issubdtype(x.dtype, jnp.integer) else x for n, x in extras.items()}
    return dataclasses.replace(batch, **fields)


def check_stats(stats: TokenStats, shape: tuple[int, ...], *read: str, how: str = "") -> None:
    """Raises unless these are statistics of this shape, in the dtypes of `KINDS`, with those that the caller reads.

    Args:
      stats: the user's argument, unchecked.
      shape: `[R, T]` of the batch, or `[K, R, T]`.
      read: the fields that must not be None, beside `log_probs`.
      how: how to get them, for the error.
    """
    if not isinstance(stats, TokenStats):
        raise TypeError(f"stats: got {type(stats).__name__}, expected TokenStats")
    for name in read:
        needed(f"stats.{name}", getattr(stats, name), f"f32[R, T]: {how}")
    for field in dataclasses.fields(stats):
        x = getattr(stats, field.name)
        if field.name == "entropy_mode" or (x is None and field.name != "log_probs"):
            continue
        of_ids = field.name in OF_IDS
        check_array(f"stats.{field.name}", x)
        if x.shape[: len(shape)] != shape or x.ndim != len(shape) + of_ids:
            expected = f"{shape} and K" if of_ids else f"{shape}"
            raise ValueError(f"stats.{field.name}: got shape {x.shape}, expected the batch's, {expected}")


OF_IDS = ("ids", "id_log_probs", "top_ids", "top_log_probs")  # the statistics that have a dimension K
