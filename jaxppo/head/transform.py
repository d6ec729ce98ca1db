"""What happens to logits between the product with the kernel and the temperature: options of `Head`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxppo._arrays import check_number


@dataclasses.dataclass(frozen=True)
class Transform:
    """z = softcap * tanh(scale * x / softcap) of x = hidden @ kernel + bias + LoRA; static.

    Args:
      softcap: None for none.
      scale: multiplies x first.
    """

    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("scale", self.scale)
        if self.softcap is not None:
            check_number("softcap", self.softcap, above=0)

    @property
    def not_in_kernels(self) -> str | None:
        """What of it a hand-written kernel cannot compute, in words."""
        return None

    def of(self, x: jax.Array) -> jax.Array:
        """z, elementwise in f32."""
        x = x if self.scale == 1 else self.scale * x
        return x if self.softcap is None else self.softcap * jnp.tanh(x / self.softcap)

    def gradient(self, dz: jax.Array, z: Callable[[], jax.Array]) -> jax.Array:
        """The gradient by x from that by z; `z` is called where it is needed."""
        if self.softcap is not None:
            dz = dz * (1 - (z() / self.softcap) ** 2)
        return dz if self.scale == 1 else self.scale * dz
