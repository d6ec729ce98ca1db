"""The public figures of TPUs and GPUs."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """A chip, or one of the JAX devices on it.

    Args:
      name: the usual short name.
      kinds: JAX's `device_kind`, or a word of it.
      flops: peak bf16 operations a second.
      hertz: cycles a second.
      bandwidth: bytes a second to and from its memory.
      memory: bytes of memory.
      link: bytes a second over one link to a neighbour, one way; for a GPU over all its links to
        the switch.
      wraps: how many chips along an axis form a ring rather than a line: 16, or 4 in a slice of
        whole 4x4x4 cubes. 0 for a GPU.
      devices: the number of JAX devices on a chip, for clients that do not say.
    """

    name: str
    kinds: tuple[str, ...]
    flops: float
    hertz: float
    bandwidth: float
    memory: int
    link: float
    wraps: int
    devices: int = 1

    def shared_by(self, devices: int) -> Device:
        """One of the devices that share a chip."""
        return dataclasses.replace(
            self,
            flops=self.flops / devices,
            bandwidth=self.bandwidth / devices,
            memory=self.memory // devices,
            devices=1,
        )


# Peak and memory: https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. Links and rings:
# https://jax-ml.github.io/scaling-book/tpus, whose links are a tenth slower than the advertised
# 100e9 (v5p, v6e) and 50e9 (v5e); it has no tpu7x, which is advertised with v5p's links. The clock
# follows from the peak, which is two operations of each cell of the matrix units in a cycle: 2 * 4
# * 128**2 cells (v4, v5p), 4 * 128**2 (v5e), 4 * 256**2 (v6e), 2 * 4 * 256**2 (tpu7x). GPUs are the
# SXM boards of https://www.nvidia.com/en-us/data-center/{h100, h200,dgx-b200}, dense bf16 without
# sparsity, with as many cells as 132 * 2048 (H100, H200), 148 * 4096 (B200).
DEVICES = (
    Device("v4", ("TPU v4",), 275e12, 1.05e9, 1200e9, 32 * GIB, 45e9, 4),
    Device("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 1.5e9, 819e9, 16 * GIB, 45e9, 16),
    Device("v5p", ("TPU v5", "TPU v5p"), 459e12, 1.75e9, 2765e9, 95 * GIB, 90e9, 4),
    Device("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 1.75e9, 1638e9, 32 * GIB, 90e9, 16),
    Device("tpu7x", ("TPU7x",), 2307e12, 2.2e9, 7380e9, 192 * GIB, 90e9, 4, devices=2),
    Device("H100", ("H100",), 989e12, 1.83e9, 3350e9, 80 * GIB, 450e9, 0),
    Device("H200", ("H200",), 989e12, 1.83e9, 4800e9, 141 * GIB, 450e9, 0),
    Device("B200", ("B200",), 2250e12, 1.86e9, 8000e9, 180 * GIB, 900e9, 0),
)


def known_device(kind: str) -> Device | None:
    """The figures of one device by its `device_kind`, None for an unknown kind.

    Example:
      >>> known_device("TPU7x").memory // 2**30, known_device("NVIDIA H100 80GB HBM3").name, known_device("cpu")
      (96, 'H100', None)
    """
    chip = _chip(kind)
    if chip is None:
        return None
    return chip.shared_by(chip.devices)


def device_of(device: Any) -> Device | None:
    """The figures of a device, real or described; its client tells how many share a chip.

    None for unknown kinds.
    """
    chip = _chip(getattr(device, "device_kind", ""))
    if chip is None:
        return None
    cores = [getattr(d, "core_on_chip", 0) or 0 for d in device.client.devices()]
    return chip.shared_by(1 + max(cores))


def _chip(kind: str) -> Device | None:
    names = {kind, *re.split(r"\W+", kind)}
    return next((device for device in DEVICES if names & set(device.kinds)), None)
