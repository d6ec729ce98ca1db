"""Meshes, axis roles, sequence layouts, packing, collectives and audits. Knows nothing of reinforcement learning."""

from sharding.layout import check_row_length, logical_positions, physical_places, row_multiple
from sharding.mesh import ParallelMesh, ShardAxes, make_parallel_mesh, shard_call, vary, vary_like, varying
from sharding.packing import Packed, pack, unpack
from sharding.redistribute import redistribute
from sharding.scan import scan_affine, scan_shard
from sharding.segments import Segments, segment_sum
from sharding.shift import shift_left, shift_shard

__all__ = [
    "Packed",
    "ParallelMesh",
    "Segments",
    "ShardAxes",
    "check_row_length",
    "logical_positions",
    "make_parallel_mesh",
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
