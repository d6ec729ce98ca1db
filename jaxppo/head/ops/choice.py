"""Which implementation of a tile's arithmetic a call takes."""

from __future__ import annotations

from typing import Any, Literal

from jaxppo.head.ops.tile import Form, Op
from jaxppo.head.ops.xla import XLA

Implementation = Literal["xla", "mosaic_tpu", "reference"]
_BY_NAME: dict[str, Op] = {"xla": XLA()}


def choose(implementation: Implementation | None, platform: str, form: Form, inputs: Any, logit_stats: bool) -> Op:
    """The implementation that was asked for, or the best that supports the call.

    Raises:
      NotImplementedError: one that does not support it, with the reason.
    """
    return _BY_NAME[implementation or "xla"]
