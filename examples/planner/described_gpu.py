"""Described H100s, so that XLA compiles for them on a machine without a GPU.

It needs the extra gpu-aot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
# no search for the fastest kernels: there is no card to time them on
NO_SEARCH = {"xla_gpu_autotune_level": "0"}


def described_gpus(count: int) -> Sequence[Any]:
    """H100s of one host.

    Raises:
      ModuleNotFoundError: jax-cuda12-plugin is not installed.
    """
    import jax_cuda12_plugin  # noqa: F401  without it JAX's own error is a page long

    topology = f"1x1x{count}"  # slices, hosts, devices of a host
    return topologies.get_topology_desc(
        "", platform="cuda", topology=topology, target_config=H100
    ).devices
