"""A head whose kernel and hidden states have 8 bits: the rounding, the product, and gradients
straight through it.

Scales are as Qwix (github.com/google/qwix, `qarray.py`) and DeepSeek-V3 (arxiv.org/abs/2412.19437,
3.3) have them: the largest of the numbers that share a scale becomes the largest number of the
format. They are f32, as the quotients are, which are products with the inverse.
e4m3 is the format of arxiv.org/abs/2209.05433: 4 bits of exponent with bias 7, 3 of mantissa,
subnormal numbers, no infinity, and 448 its largest number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .head import HeadGradient, OracleHead, product_gradient, through_products
from .samples import Array

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


def to_e4m3(numbers: Array) -> Array:
    """The nearest number of e4m3, of two equally near ones the even one; beyond 448 it is 448."""
    numbers = np.clip(np.asarray(numbers, np.float64), -448, 448)
    _, exponent = np.frexp(numbers)  # |x| = m 2^exponent, m from 0.5 to 1
    unit = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    return np.rint(numbers / unit) * unit


def to_int8(numbers: Array) -> Array:
    return np.clip(np.rint(np.asarray(numbers, np.float64)), -128, 127)


def quantized(
    numbers: Any,
    axis: int,
    dtype: str,
    block: int | None = None,
    largest: float | None = None,
    powers_of_two: bool = False,
) -> Any:
    """(values, scale), in float64, of a matrix whose numbers along the axis share a scale, all or
    those of a block.

    The scale has as many dimensions, with one entry a block. Powers of two are no smaller than the
    scale would be.
    """
    numbers = np.moveaxis(np.asarray(numbers, np.float32), axis, -1)
    size = block or numbers.shape[-1]
    blocks = numbers.reshape(len(numbers), -1, size)
    inverse = np.float32(1 / (largest or LARGEST[dtype]))
    scale = np.abs(blocks).max(-1, keepdims=True) * inverse
    scale = np.where(scale < np.sqrt(np.finfo(np.float32).tiny), np.float32(1), scale)
    if powers_of_two:
        # scale = mantissa * 2^exponent, mantissa from 0.5 to 1
        mantissa, exponent = np.frexp(scale)
        scale = np.where(mantissa == 0.5, scale, np.ldexp(np.float32(1), exponent))
    quotients = blocks * (np.float32(1) / scale)
    values = to_int8(quotients) if dtype == "int8" else to_e4m3(quotients)
    values = np.moveaxis(values.reshape(numbers.shape), -1, axis)
    return values, np.moveaxis(scale[..., 0].astype(np.float64), -1, axis)


def dequantized(values: Any, scale: Any) -> Array:
    """values * scale, each entry of the scale for as many values as there are for one."""
    values = np.asarray(values, np.float64)
    scale = np.asarray(scale, np.float64)
    for axis in range(2):
        scale = np.repeat(scale, values.shape[axis] // scale.shape[axis], axis)
    return values * scale


def rounded(numbers: Any, axis: int, dtype: str, **how: Any) -> Array:
    """What a matrix is read as."""
    return dequantized(*quantized(numbers, axis, dtype, **how))


@dataclass
class QuantizedHead(OracleHead):
    """x = read(h) @ read(kernel) + bias + lora_scale * (h @ a) @ b, before scale, soft-cap and
    temperature.
    """

    dtype: str = "float8_e4m3fn"
    block: int | None = None
    largest: float | None = None
    of_hidden: bool = True  # else the hidden states are read as they are

    def read_kernel(self) -> Array:
        return rounded(self.kernel, 0, self.dtype, block=self.block, largest=self.largest)

    def read_hidden(self, hidden: Array) -> Array:
        if not self.of_hidden:
            return np.asarray(hidden, np.float64)
        return rounded(hidden, 1, self.dtype, block=self.block, largest=self.largest)


def head_gradient(
    hidden: Array, head: QuantizedHead, dz: Array, temperature: Any = 1.0
) -> tuple[Array, HeadGradient]:
    """From d / dz to d / d(hidden) and d / d(kernel, bias, a, b), as if read(x) had slope 1."""
    return through_products(hidden, head, product_gradient(hidden, head, dz, temperature))
