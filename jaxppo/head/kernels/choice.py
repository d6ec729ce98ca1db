"""Chooses the implementation of a tile's arithmetic."""

from __future__ import annotations

from jaxppo.head.kernels.reference import Reference
from jaxppo.head.tile import XLA
from jaxppo.head.types import Implementation, Op


def choose(implementation: Implementation | None, device: str) -> Op:
    """The implementation that was asked for, by default XLA: nobody has run the kernels on a chip yet."""
    if implementation == "mosaic_tpu":
        from jaxppo.head.kernels.mosaic_tpu import MosaicTPU  # JAX's kernels for TPUs import more than JAX

        return MosaicTPU(device)
    return Reference() if implementation == "reference" else XLA()
