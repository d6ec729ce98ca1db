"""What happens to logits between the product with the kernel and the temperature: options of `Head`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo._arrays import check_choice, check_number

LogitsDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Transform:
    """z = softcap * tanh(scale * x / softcap) of x = hidden @ kernel + bias + LoRA; static.

    Args:
      dtype: to which x is rounded first; the gradient is that of no rounding.
      softcap: None for none.
      scale: multiplies x first.
    """

    dtype: LogitsDtype = "float32"
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_choice("logits_dtype", self.dtype, LogitsDtype)
        check_number("scale", self.scale)
        if self.softcap is not None:
            check_number("softcap", self.softcap, above=0)

    @property
    def not_in_kernels(self) -> str | None:
        """What of it a hand-written kernel cannot compute, in words."""
        return None if self.dtype == "float32" else f"logits_dtype={self.dtype!r}"

    def of(self, x: jax.Array) -> jax.Array:
        """z, elementwise in f32."""
        if self.dtype == "bfloat16":  # not by a cast and back, which XLA leaves out
            x = x + lax.stop_gradient(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) - x)
        x = x if self.scale == 1 else self.scale * x
        return x if self.softcap is None else self.softcap * jnp.tanh(x / self.softcap)

    def gradient(self, dz: jax.Array, z: Callable[[], jax.Array]) -> jax.Array:
        """The gradient by x from that by z; `z` is called where it is needed."""
        if self.softcap is not None:
            dz = dz * (1 - (z() / self.softcap) ** 2)
        return dz if self.scale == 1 else self.scale * dz
