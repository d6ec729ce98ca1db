"""The sizes that suit a kind of device, and the kind of device that a call runs on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxppo.sharding import ParallelMesh, ShardAxes, known_device

GIB = 2**30
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Profile:
    """The sizes that suit a kind of device."""

    memory: int  # bytes that one pass may take by default
    forward_bytes: int  # of the f32 logits of a chunk of the forward
    chunk_tokens: int  # the most tokens of a chunk
    block_width: int  # columns of a block of the second pass
    tile_tokens: int = 8192  # the most tokens of a tile of the second pass, without a mask
    block_width_with_mask: int | None = None  # tiles have fewer tokens then; None for `block_width`
    fixed_chunk: int = 1024  # tokens of a chunk of a deterministic call
    # the most tokens whose gradients of raw logits exist at once in one pass
    group_tokens: int = 8192
    shrinks_groups: bool = True  # where groups do not fit the memory; else two passes are taken
    # The most devices around which a sum goes as in `ring_sum`, beside its products. Around more it
    # goes as in `wide_ring_sum`. With 0 there is no ring.
    ring: int = 0
    parts: int = 4  # in which the products of one pass follow a mask
    logit_copies: int = 1  # how many arrays of a tile's f32 logits XLA keeps at once
    upcast: bool = False  # bf16 is multiplied as f32
    # logits lie in memory, where a target's is read; else XLA finds it in a sum over all columns
    gathers: bool = False
    # a product rounds its f32 sums itself, if no sum over devices follows
    rounding_products: bool = False


def _tpu(kind: str, block_width: int, mebibytes: int = 150, tile_tokens: int = 4096) -> Profile:
    """One pass may take an eighth of the memory. On a v5e or v6e 75 MiB of logits stay in VMEM."""
    return Profile(_eighth(kind), mebibytes * MIB, 2048, block_width, tile_tokens, ring=4)


def _gpu(kind: str) -> Profile:
    """XLA for GPUs would write an f32 product to memory before it rounds it: dkernel would exist
    twice.
    """
    return Profile(
        _eighth(kind),
        512 * MIB,
        2048,
        4608,
        block_width_with_mask=9216,
        gathers=True,
        rounding_products=True,
    )


def _eighth(kind: str) -> int:
    device = known_device(kind)
    if device is None:
        return 2 * GIB
    return device.memory // 8


# XLA for CPUs multiplies bf16 faster as f32, copies the rows that a product in a branch reads,
# keeps exponentials beside logits, and updates dkernel slowly
CPU = Profile(
    48 * MIB,
    16 * MIB,
    1024,
    512,
    4096,
    fixed_chunk=256,
    group_tokens=2048,
    shrinks_groups=False,
    parts=1,
    logit_copies=3,
    upcast=True,
    gathers=True,
)
# By a part of a device's kind, which described devices have too: they have no memory to ask for.
# The first part that is in the kind is taken; the last one is in all.
PROFILES = {
    "cpu": CPU,
    "TPU v4": _tpu("TPU v4", 2048),
    "TPU v5 lite": _tpu("TPU v5 lite", 2048, mebibytes=75, tile_tokens=8192),
    "TPU v5e": _tpu("TPU v5e", 2048, mebibytes=75, tile_tokens=8192),
    "TPU v5": _tpu("TPU v5", 2048),
    "TPU v6 lite": _tpu("TPU v6 lite", 3072, mebibytes=75, tile_tokens=8192),
    "TPU v6e": _tpu("TPU v6e", 3072, mebibytes=75, tile_tokens=8192),
    "TPU7x": _tpu("TPU7x", 2048),
    "TPU": _tpu("TPU", 2048),
    "H100": _gpu("H100"),
    "GH200": _gpu("GH200"),  # of 96 or 144 GB, which its kind does not always say
    "H200": _gpu("H200"),
    "B200": _gpu("B200"),
    "": _gpu(""),
}


def device_kind(parallel: ParallelMesh | ShardAxes | None, array: Any) -> str:
    """The kind of the mesh's devices, of the `shard_map` or Explicit axes around the call, or of
    JAX's first device.
    """
    if isinstance(parallel, ParallelMesh):
        return str(parallel.mesh.devices.flat[0].device_kind)
    for mesh in (
        jax.sharding.get_abstract_mesh(),
        getattr(jax.typeof(array).sharding, "mesh", None),
    ):
        device = getattr(mesh, "abstract_device", None)  # has no platform in JAX 0.10.0
        if device is not None:
            return str(device.device_kind)
    return str(jax.devices()[0].device_kind)


def profile_of(device: str) -> Profile:
    return next(profile for kind, profile in PROFILES.items() if kind in device)
