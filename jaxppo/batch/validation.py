"""The checks that every function applies to its batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array

from jaxppo.base.arrays import check_flag
from jaxppo.batch.checks import arrays_of
from jaxppo.batch.extras import PREFIX, in_kind
from jaxppo.batch.rollout_batch import FLAGS, RolloutBatch


def check_arrays(batch: RolloutBatch, *, stacked: bool = False, prefix: str = "batch.") -> dict[str, Array]:
    """`arrays_of` a batch; raises unless it is one."""
    if not isinstance(batch, RolloutBatch):
        raise TypeError(f"{prefix.rstrip('.')}: got {type(batch).__name__}, expected RolloutBatch")
    for name in FLAGS:
        check_flag(prefix + name, getattr(batch, name))
    return arrays_of(vars(batch), stacked=stacked, prefix=prefix)


def checked(batch: RolloutBatch, *, stacked: bool = False, prefix: str = "batch.") -> RolloutBatch:
    """Checks a batch with `check_arrays`, and casts its integers to i32 and all other arrays to f32.

    Extras that are floats or bools stay as they are. With `stacked`, for functions of rows that read none of them, they
    are left out.
    """
    arrays = check_arrays(batch, stacked=stacked, prefix=prefix)
    fields: dict[str, Any] = {name: in_kind(name, x) for name, x in arrays.items()}
    extras = {} if stacked else {name: in_kind(PREFIX + name, x) for name, x in batch.extras.items()}
    return dataclasses.replace(batch, **fields, extras=extras)
