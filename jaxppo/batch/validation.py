"""The checks that every function applies to its batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxppo.base.arrays import INTEGERS, as_token_ids, check_flag
from jaxppo.batch.checks import arrays_of
from jaxppo.batch.rollout_batch import RolloutBatch


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
