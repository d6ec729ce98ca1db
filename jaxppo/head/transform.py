"""What happens to logits between the product with the kernel and the temperature: options of `Head`."""

from __future__ import annotations

import dataclasses
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
        x = self._scaled(x)
        return x if self.softcap is None else self.softcap * jnp.tanh(x / self.softcap)

    def _scaled(self, x: jax.Array) -> jax.Array:
        if self.dtype == "bfloat16":  # not by a cast and back, which XLA leaves out
            x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return x if self.scale == 1 else self.scale * x

    def gradient(self, dz: jax.Array, x: jax.Array) -> jax.Array:
        """The gradient by x from that by z.

        1 - tanh(y)^2 as 4 e^-2|y| / (1 + e^-2|y|)^2: the difference is all rounding where tanh(y) is nearly 1.
        """
        if self.softcap is not None:
            e = jnp.exp(-2 * jnp.abs(self._scaled(x) / self.softcap))
            dz = dz * (4 * e / (1 + e) ** 2)
        return dz if self.scale == 1 else self.scale * dz
