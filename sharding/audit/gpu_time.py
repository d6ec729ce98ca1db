"""A lower bound of a compiled GPU program's time, by a roofline of its kernels. No GPU is needed.

XLA for GPUs writes no estimate into its modules. Each kernel, which is one instruction of the module, takes the time of
its bytes at the memory's peak or of its products at the peak of their dtype, whichever is longer. A loop's kernels
count once per turn. Kernel launches, caches and efficiency below the peaks are left out, so a real card takes longer:
use the figure to compare programs.
"""

from __future__ import annotations

import numpy as np

from ..devices import Device
from .hlo import Computation, Instruction, dimensions, parse
from .links import Switch
from .results import Time
from .tpu_time import Clock, product_flops, spent

# Peaks relative to bf16's. f32 operands are multiplied as TF32 or, at the highest precision, outside of the tensor
# cores, at a sixteenth on an H100 (https://www.nvidia.com/en-us/data-center/h100).
_TF32, _FULL_F32 = 1 / 2, 1 / 16


def roofline(text: str, chip: Device) -> Time:
    """The least time of a compiled GPU module: bytes or products of each kernel, loops as often as they turn.

    Args:
      text: the text of the optimized module.
      chip: the chip that it was compiled for.

    Returns:
      `Time`.

    Example:
      >>> from sharding.devices import known_device
      >>> text = '''ENTRY %main (x: f32[3350,250000]) -> f32[3350,250000] {
      ...   %x = f32[3350,250000]{1,0} parameter(0)
      ...   ROOT %y = f32[3350,250000]{1,0} add(%x, %x)
      ... }'''
      >>> roofline(text, known_device("H100")).elementwise
      2.0
    """
    return _Roofline(parse(text), chip, Switch()).time("a roofline")


class _Roofline(Clock):
    """See `Clock`."""

    def is_free(self, x: Instruction) -> bool:
        return x.target == "AllocateBuffer"

    def product_seconds(self, computation: Computation, x: Instruction) -> float:
        """The time of a `dot`, or of a product `[M, K] @ [K, N]` that a library computes.

        The sizes multiplied are those of both factors and of the result of a library's call: M K K N M N.
        """
        operands = [computation[name].shape for name in x.operands[:2] if name in computation]
        if x.op == "dot":
            flops = product_flops(computation, x)
        elif x.target.startswith("__cublas"):
            sizes = [float(np.prod(dimensions(shape))) for shape in (*operands, x.shape)]
            flops = 2 * float(np.prod(sizes)) ** 0.5
        else:
            return 0.0
        is_f32 = any(shape.startswith("f32") for shape in operands)
        return flops / self.chip.flops / ((_FULL_F32 if x.is_highest else _TF32) if is_f32 else 1)

    def without_estimate(self, kind: str, seconds: float) -> np.ndarray:
        return spent(kind, seconds)  # and nothing is said of a part: there are no estimates
