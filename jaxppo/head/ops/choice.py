"""Which implementation of a tile's arithmetic a call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jaxppo.head.ops.reference import Reference
from jaxppo.head.ops.tile import Form, Op
from jaxppo.head.ops.xla import XLA

if TYPE_CHECKING:
    from jaxppo.head.schedules.walk import Inputs
    from jaxppo.head.tiles import Budget

Implementation = Literal["xla", "mosaic_tpu", "reference"]
_XLA, _REFERENCE = XLA(), Reference()


def choose(implementation: Implementation | None, budget: Budget, form: Form, inputs: Inputs) -> Op:
    """The implementation that was asked for; XLA where none was, since nobody has run the kernels on a chip.

    Raises:
      NotImplementedError: one that does not support it, with the reason.
    """
    if implementation == "mosaic_tpu":
        from jaxppo.head.ops.mosaic_tpu import MosaicTPU  # JAX's kernels for TPUs import more than JAX

        op: Op = MosaicTPU(budget.device)
    else:
        op = _REFERENCE if implementation == "reference" else _XLA
    if (reason := op.unsupported(budget, form, inputs)) is not None:
        raise NotImplementedError(f"implementation: got {implementation!r}, which does not support {reason}")
    return op
