"""Meshes, axis roles, sequence layouts, packing, collectives and audits. Knows nothing of reinforcement learning."""

from sharding.mesh import ParallelMesh, ShardAxes, make_parallel_mesh, shard_call, vary, vary_like, varying
from sharding.segments import Segments, segment_sum

__all__ = [
    "ParallelMesh",
    "Segments",
    "ShardAxes",
    "make_parallel_mesh",
    "segment_sum",
    "shard_call",
    "vary",
    "vary_like",
    "varying",
]
