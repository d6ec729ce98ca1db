"""Kernels and hidden states of 8 bits: how they are rounded, and their product.

Its gradient ignores the rounding.

A call rounds the device's share of a kernel once, and the hidden states of its tokens once. The
values that are multiplied have 8 bits, and scales multiply the sums. The gradients are those of the
dequantised numbers, values times scale, which are made in the dtype of hidden states where a
product reads them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxppo.base.arrays import (
    check,
    check_choice,
    check_count,
    check_flag,
    check_floating,
    dtype_name,
    plain_number,
)
from jaxppo.base.pytree import register
from jaxppo.head.order import Index, loop, read
from jaxppo.sharding import vary, varying

EightBits = Literal["float8_e4m3fn", "int8"]
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
# below it numbers are 0, and their scale is 1, as Qwix has it
LEAST_SCALE = float(np.sqrt(np.finfo(np.float32).tiny))


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How a head rounds its kernel and its hidden states to 8 bits before it multiplies them;
    static.

    Numbers that share a scale are, in f32,

        scale = max |x| / largest        values = nearest(x / scale), ties to even        x is read as values * scale

    Both quotients are products with an inverse. Each column of a kernel has scales of its own, and
    so has each token of the hidden states. Products of values of 8 bits add up in f32, those of
    int8 in i32, and both scales multiply the sum. The gradient ignores the rounding: it is that of
    the product of `values * scale`, and reaches the kernel and the hidden states as they were
    given.

    Args:
      dtype: "float8_e4m3fn" or "int8", a name or a dtype.
      block: of how many features a column or a token has a scale each; it divides H. None for one
        scale of all.
      hidden: whether hidden states are rounded too. If not, values of the kernel are multiplied in
        their dtype.
      largest: the value of the largest number; by default that of the dtype, 448 or 127. Qwix has
        127.5 for int8.
      powers_of_two: whether scales are rounded up to powers of two, as those of MXFP8, whose blocks
        have 32 features.

    Raises:
      ValueError: an unknown dtype, a number out of its range.

    Example:
      >>> Quantization("int8").largest
      127.0

    The dtype: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433. Blocks of 128:
    DeepSeek-V3, https://arxiv.org/abs/2412.19437. MXFP8: Rouhani et al. 2023,
    https://arxiv.org/abs/2310.10537, with scales that are rounded up, as in Qwix,
    https://github.com/google/qwix
    """

    dtype: EightBits = "float8_e4m3fn"
    block: int | None = None
    hidden: bool = True
    largest: float | None = None
    powers_of_two: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        check_choice("dtype", self.dtype, EightBits)
        if self.block is not None:
            check_count("block", self.block, least=1)
        check_flag("hidden", self.hidden)
        check_flag("powers_of_two", self.powers_of_two)
        largest = LARGEST[self.dtype]
        if self.largest is not None:
            largest = plain_number("largest", self.largest, above=0, most=largest + 0.5)
        object.__setattr__(self, "largest", largest)


@register()
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A kernel that is quantised already, values * scale. No gradient flows to it.

    A `Head` of it multiplies hidden states as they are, unless its `quantized=` says that they are
    rounded too.

    Args:
      values: e4m3 or int8 `[H, V]`, or `[V, H]` with layout "vh"; sharded as a kernel of floats is.
      scale: floats of as many dimensions, each a divisor of that of `values`: `[1, V]` for a scale
        of each column, `[H / 128, V]` for blocks of 128 features, `[H / 128, V / 128]` for blocks
        of both, as DeepSeek-V3 has them. On a mesh every device has it for all of H.

    Example:
      >>> import jax.numpy as jnp
      >>> kernel = QuantizedArray(jnp.ones((8, 100), jnp.int8), jnp.full((1, 100), 0.01))
      >>> kernel.shape
      (8, 100)
    """

    values: Array
    scale: Float[Array, "blocks columns"]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the values."""
        return np.dtype(self.values.dtype)

    @property
    def size(self) -> int:
        return int(self.values.size)

    @property
    def T(self) -> QuantizedArray:
        return QuantizedArray(self.values.T, self.scale.T)

    def by_column(self, v_dim: int) -> QuantizedArray:
        """The same numbers with an f32 scale of each column, `[blocks, V]` or `[V, blocks]`;
        without a gradient.
        """
        width = self.shape[v_dim]
        scale = self.scale.astype(jnp.float32)
        scales = scale.shape[v_dim]
        if scales != width:
            scale = jnp.repeat(scale, width // scales, v_dim, total_repeat_length=width)
        return lax.stop_gradient(QuantizedArray(self.values, scale))

    def dequantized(self, dtype: Any) -> jax.Array:
        """values * scale, rounded to this dtype."""
        rows, columns = self.shape
        row_scales, column_scales = self.scale.shape
        in_blocks = self.values.reshape(
            row_scales, rows // row_scales, column_scales, columns // column_scales
        )
        numbers = in_blocks.astype(jnp.float32) * self.scale[:, None, :, None]
        return numbers.astype(dtype).reshape(self.shape)


def check_quantized(name: str, kernel: QuantizedArray, features: int, v_dim: int) -> None:
    """Raises unless values and scale are of such arrays and fit each other and so many features."""
    dtype = dtype_name(getattr(kernel.values, "dtype", None))
    if dtype not in LARGEST:
        raise TypeError(f"{name}.values: got {dtype}, expected an array of {' or '.join(LARGEST)}")
    shape = kernel.values.shape
    check(
        f"{name}.values", f"shape {shape}", len(shape) == 2 and 0 not in shape, "[H, V] or [V, H]"
    )
    check_floating(f"{name}.scale", kernel.scale, 2, "[blocks, V] or [V, blocks]")
    sizes = [features, features]
    sizes[v_dim] = shape[v_dim]
    divides = all(
        size % scales == 0 for size, scales in zip(sizes, kernel.scale.shape, strict=True)
    )
    check(f"{name}.scale", f"shape {kernel.scale.shape}", divides, f"divisors of {tuple(sizes)}")


def rule_of(
    name: str, rule: Quantization | None, kernel: QuantizedArray, features: int, v_dim: int
) -> Quantization:
    """How a head with this kernel rounds: as the kernel was, and hidden states if the rule says
    so.
    """
    block = features // kernel.scale.shape[1 - v_dim]
    dtype: Any = dtype_name(kernel.values.dtype)
    if rule is None:
        return Quantization(dtype, block, hidden=False)
    good = rule.dtype == dtype and (rule.block or features) == block
    check(name, rule, good, f"dtype={dtype!r} and block={block}, those of the kernel")
    return rule


def quantize(rule: Quantization, array: jax.Array, dim: int) -> QuantizedArray:
    """An array of two dimensions in values of the rule.

    Its numbers along `dim`, or those of a block, share a scale.
    """
    size = array.shape[dim]
    block = rule.block or size
    in_blocks = [*array.shape]
    in_blocks[dim : dim + 1] = [size // block, block]
    numbers = array.astype(jnp.float32).reshape(in_blocks)
    # products with inverses have the same bits everywhere: XLA makes them of these divisions in
    # some programs only
    scale = jnp.abs(numbers).max(dim + 1, keepdims=True) * np.float32(1 / cast(float, rule.largest))
    scale = jnp.where(scale < LEAST_SCALE, 1, scale)
    if rule.powers_of_two:
        nearest_power = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=0)
        scale = jnp.where(nearest_power < scale, 2 * nearest_power, nearest_power)
    # without a barrier XLA for GPUs would write the quotients too, as it turns values of 8 bits
    # round
    values = lax.optimization_barrier(nearest(rule.dtype, numbers * (1 / scale)))
    return QuantizedArray(values.reshape(array.shape), scale.squeeze(dim + 1))


def nearest(dtype: EightBits, numbers: jax.Array) -> jax.Array:
    """f32 numbers as the nearest values of this dtype, ties to even; larger ones become its
    largest.
    """
    if dtype == "int8":
        return jnp.clip(jnp.round(numbers), -128, 127).astype(jnp.int8)
    # XLA for CPUs would convert by way of f16, and so round twice: values of 4 bits, and below
    # 2**-6 multiples of 2**-9, are converted exactly
    normal = lax.reduce_precision(numbers, exponent_bits=8, mantissa_bits=3)
    subnormal = jnp.round(numbers * 512) / 512
    values = jnp.where(jnp.abs(numbers) < 2**-6, subnormal, normal)
    return jnp.clip(values, -448, 448).astype(jnp.float8_e4m3fn)


def quantized_operands(
    rule: Quantization, v_dim: int, features: tuple[Any, ...], parameters: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Features and parameters, of which the first ones, hidden states and kernel, are rounded."""
    hidden, *other_features = features
    kernel, *other_parameters = parameters
    if rule.hidden:
        hidden = quantize(rule, hidden, 1)
    if not isinstance(kernel, QuantizedArray):
        kernel = quantize(rule, kernel, 1 - v_dim)
    return (hidden, *other_features), (kernel, *other_parameters)


def quantized_product(
    hidden: jax.Array | QuantizedArray,
    kernel: QuantizedArray,
    dim: int,
    upcast: bool,
    precision: Any,
) -> jax.Array:
    """The product of hidden states `[C, H]` and a kernel whose dimension `dim` is H: f32
    `[C, B]`.
    """
    blocks = kernel.scale.shape[dim]
    size = kernel.shape[dim] // blocks

    def of_block(b: Index) -> jax.Array:
        values = read(kernel.values, b * size, size, dim)
        scale = read(kernel.scale, b, 1, dim).reshape(1, -1)
        if not isinstance(hidden, QuantizedArray):
            features = read(hidden, b * size, size, 1)
            return _sums(features, values.astype(features.dtype), dim, upcast, precision) * scale
        features = read(hidden.values, b * size, size, 1)
        return _sums(features, values, dim, upcast, precision) * read(hidden.scale, b, 1, 1) * scale

    def add_block(b: Index, total: jax.Array) -> jax.Array:
        return total + of_block(b)

    if blocks == 1:
        return of_block(0)
    zeros = jnp.zeros((hidden.shape[0], kernel.shape[1 - dim]), jnp.float32)
    return loop(blocks, add_block, vary(zeros, varying(hidden, kernel)))


def _sums(left: jax.Array, right: jax.Array, dim: int, upcast: bool, precision: Any) -> jax.Array:
    """left @ right in the dtype of both, f32: the sums of int8 are i32, and others f32."""
    dims = (((1,), (dim,)), ((), ()))
    if upcast and left.dtype.itemsize < 4:  # exact, and the faster product of XLA for CPUs
        left = left.astype(jnp.float32)
        right = right.astype(jnp.float32)
    if left.dtype == jnp.int8:
        return lax.dot_general(left, right, dims, preferred_element_type=jnp.int32).astype(
            jnp.float32
        )
    if precision is None and left.dtype in (jnp.float32, jnp.float8_e4m3fn):
        # accelerators would multiply f32 in one bf16 or TF32 pass, and GPUs add products of fp8 in
        # fewer bits than f32
        precision = "highest"
    return lax.dot_general(
        left, right, dims, precision=precision, preferred_element_type=jnp.float32
    )
