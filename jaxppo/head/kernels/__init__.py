"""Implementations of a tile's arithmetic."""

from __future__ import annotations

from jaxppo.head.kernels.reference import Reference
from jaxppo.head.tile import XLA
from jaxppo.head.types import Implementation, Op


def choose(implementation: Implementation | None, device: str) -> Op:
    """The implementation that was asked for. The default is XLA, since nobody has run the kernels on a chip yet."""
    if implementation == "mosaic_tpu":
        from jaxppo.head.kernels.mosaic_tpu import MosaicTPU  # imported here, since Pallas for TPUs loads more modules

        return MosaicTPU(device)
    return Reference() if implementation == "reference" else XLA()
