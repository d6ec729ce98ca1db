"""Which implementation of a tile's arithmetic a call takes."""

from __future__ import annotations

from jaxppo.head.kernels.reference import Reference
from jaxppo.head.tile import XLA
from jaxppo.head.types import Implementation, Op


def choose(implementation: Implementation | None, device: str) -> Op:
    """The implementation that was asked for; XLA where none was, since nobody has run the kernels on a chip."""
    if implementation == "mosaic_tpu":
        from jaxppo.head.kernels.mosaic_tpu import MosaicTPU  # JAX's kernels for TPUs import more than JAX

        return MosaicTPU(device)
    return Reference() if implementation == "reference" else XLA()
