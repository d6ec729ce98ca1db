"""Meshes, axis roles, sequence layouts, packing, collectives and audits. Knows nothing of reinforcement learning."""

from . import multihost
from .audit import Audit, Collective, audit
from .layout import check_row_length, logical_positions, physical_places, row_multiple
from .mesh import ParallelMesh, ShardAxes, check_parallel, make_parallel_mesh, shard_call, vary, vary_like, varying
from .packing import Packed, pack, unpack
from .program import note
from .redistribute import check_context_rows, redistribute
from .scan import scan_affine, scan_shard
from .segments import Segments, segment_sum
from .shift import shift_left, shift_shard
from .tpu_time import Time

__all__ = [
    "Audit",
    "Collective",
    "Packed",
    "ParallelMesh",
    "Segments",
    "ShardAxes",
    "Time",
    "audit",
    "check_context_rows",
    "check_parallel",
    "check_row_length",
    "logical_positions",
    "make_parallel_mesh",
    "multihost",
    "note",
    "pack",
    "physical_places",
    "redistribute",
    "row_multiple",
    "scan_affine",
    "scan_shard",
    "segment_sum",
    "shard_call",
    "shift_left",
    "shift_shard",
    "unpack",
    "vary",
    "vary_like",
    "varying",
]
