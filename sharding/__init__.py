"""Meshes, axis roles, sequence layouts, packing, collectives and audits.

Knows nothing of reinforcement learning.
"""

from typing import TYPE_CHECKING, Any

from . import multihost
from .audit import audit
from .axes import LAYOUTS, ShardAxes, unvary, vary, vary_like, varying
from .call import shard_call
from .devices import known_device
from .dtypes import wider_dtype
from .layouts import (
    check_row_length,
    in_order,
    logical_positions,
    physical_places,
    row_multiple,
    segment_multiple,
)
from .layouts.base import Layout, Row, register_layout
from .mesh import ParallelMesh, check_parallel, make_parallel_mesh
from .notes import note
from .packing import Packed, pack, unpack
from .placement import links
from .rows import (
    check_context_rows,
    held_positions,
    redistribute,
    scan_affine,
    scan_shard,
    shift_left,
    shift_shard,
)
from .segments import Segments, segment_sum

if TYPE_CHECKING:
    from .audit.results import Audit, Collective, Time
else:

    def __getattr__(name: str) -> Any:
        if name not in ("Audit", "Collective", "Time"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .audit import results  # imported here because few programs audit

        return getattr(results, name)


__all__ = [
    "LAYOUTS",
    "Audit",
    "Collective",
    "Layout",
    "Packed",
    "ParallelMesh",
    "Row",
    "Segments",
    "ShardAxes",
    "Time",
    "audit",
    "check_context_rows",
    "check_parallel",
    "check_row_length",
    "held_positions",
    "in_order",
    "known_device",
    "links",
    "logical_positions",
    "make_parallel_mesh",
    "multihost",
    "note",
    "pack",
    "physical_places",
    "redistribute",
    "register_layout",
    "row_multiple",
    "scan_affine",
    "scan_shard",
    "segment_multiple",
    "segment_sum",
    "shard_call",
    "shift_left",
    "shift_shard",
    "unpack",
    "unvary",
    "vary",
    "vary_like",
    "varying",
    "wider_dtype",
]
