"""What every function makes of its batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxppo.batch.extras import PREFIX, in_kind
from jaxppo.batch.rollout_batch import RolloutBatch, check_arrays


def checked(
    batch: RolloutBatch, *, stacked: bool = False, prefix: str = "batch.", reader: str = ""
) -> RolloutBatch:
    """Checks a batch with `check_arrays`, and casts its integers to i32 and all other arrays to
    f32.

    Extras that are floats or bools stay as they are. With `stacked`, for functions of rows that
    read none of them, they are left out.
    """
    arrays = check_arrays(batch, stacked=stacked, prefix=prefix, reader=reader)
    fields: dict[str, Any] = {name: in_kind(name, x) for name, x in arrays.items()}
    extras = {}
    if not stacked:
        extras = {name: in_kind(PREFIX + name, x) for name, x in batch.extras.items()}
    return dataclasses.replace(batch, **fields, extras=extras)
