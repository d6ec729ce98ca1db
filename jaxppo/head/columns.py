"""A head kernel as each device holds it, walked in blocks of the vocabulary.

The kernel may be sharded over the tensor axis along V, and over data axes (FSDP) along H or V. Blocks of it are
sliced, and gathered over the FSDP axes where there are some; gradients of blocks are summed over devices, in f32, and
scattered back. Remainders overlap the block before them with the duplicates masked, so nothing is padded or copied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo._sharding import ShardAxes, vary, varying
from jaxppo.head.tokens import even_block
from jaxppo.head.varying import as_primal, psum_in_blocks, psum_to

Names = tuple[str, ...]
LANES = 128  # of an accelerator's registers


class Block(NamedTuple):
    """One block of the vocabulary."""

    kernel: jax.Array  # [H, B], or [B, H]
    bias: Any  # f32[B]
    lora_b: Any  # [r, B]
    columns: jax.Array  # i32[B], the vocabulary ids of the columns
    valid: Any  # bool[B], False for duplicates of other blocks and for padding; True where there are none of either


class Parameters(NamedTuple):
    """A head's parameters of the vocabulary, or something for each of them; None where there is none.

    `lora_b` lies as the kernel does: `[r, V]` beside `[H, V]`, `[V, r]` beside `[V, H]`.
    """

    kernel: Any
    bias: Any
    lora_b: Any

    def each(self, fn: Callable[..., Any], *others: Parameters) -> Parameters:
        """fn(is_kernel, parameter, ...) for each one that is there."""
        values = zip(self, *others, strict=True)
        return Parameters(*(None if x[0] is None else fn(i == 0, *x) for i, x in enumerate(values)))


class Features(NamedTuple):
    """What tokens multiply those with, or something for each of them: hidden states, and hidden @ lora.a."""

    hidden: Any
    low: Any


@dataclasses.dataclass(frozen=True)
class Columns:
    """What is static about a head on a mesh, and the arithmetic of its blocks.

    Args:
      axes: the roles of the mesh axes.
      layout: "hv" or "vh".
      h_names: mesh axes that shard the kernel's H, all gathered.
      v_names: mesh axes that shard its V, the tensor axes among them or not.
      vocab_size: columns from there on have probability 0.
      softcap: logits are softcap * tanh(logits / softcap).
      scale: multiplies the logits before that.
      lora_scale: of the adapter.
      block_columns: columns of a block at most, in each of the pieces that a gather over V brings together.
    """

    axes: ShardAxes
    layout: str
    h_names: Names
    v_names: Names
    vocab_size: int
    softcap: float | None
    scale: float
    lora_scale: float
    block_columns: int

    @property
    def v_dim(self) -> int:
        return 1 if self.layout == "hv" else 0

    @property
    def gathered_v(self) -> Names:
        return tuple(n for n in self.v_names if n not in self.axes.tensor)

    @property
    def gathers(self) -> bool:
        return bool(self.h_names or self.gathered_v)

    @property
    def whole_vocabulary_each(self) -> bool:
        """The kernel is replicated over a tensor axis that does not divide V: each device takes a window of it."""
        return bool(self.axes.tensor) and not set(self.v_names) & set(self.axes.tensor)

    def window(self, columns: int) -> int:
        """How many of the `columns` of V that it holds a device works on."""
        return -(-columns // self.axes.size(self.axes.tensor)) if self.whole_vocabulary_each else columns

    def size(self, columns: int) -> int:
        """Columns of a block, of the `columns` that it holds."""
        return even_block(self.window(columns), self.block_columns, LANES)

    def blocks(self, columns: int) -> int:
        return -(-self.window(columns) // self.size(columns))

    def overlap(self, columns: int) -> bool:
        """Whether some blocks, or windows of other devices, have columns in common."""
        windows = self.axes.size(self.axes.tensor) if self.whole_vocabulary_each else 1
        return bool(self.window(columns) % self.size(columns)) or windows * self.window(columns) != columns

    def _place(self, i: Any, columns: int) -> tuple[Any, int, jax.Array]:
        """Where block i starts among the columns this device holds, how many it has, and which are its own."""
        window, size = self.window(columns), self.size(columns)
        own = self.axes.index(self.axes.tensor) * window if self.whole_vocabulary_each else 0
        low = jnp.minimum(own, columns - window)
        start = low + jnp.minimum(i * size, window - size)
        local = start + jnp.arange(size)
        return start, size, (local >= low + i * size) & (local >= own)

    def start(self, i: Any, columns: int) -> Any:
        """The first column of block i, of the `columns` that it holds."""
        return self._place(i, columns)[0]

    def _piece_bases(self, columns: int) -> jax.Array:
        """The first vocabulary id of each piece that a gather over V brings together, in the gather's order."""
        stride, strides = columns, {}
        for name in reversed(self.v_names):
            strides[name] = stride
            stride *= lax.axis_size(name)
        base: Any = sum((lax.axis_index(n) * strides[n] for n in self.v_names if n in self.axes.tensor), 0)
        bases = jnp.asarray(base).reshape(1)
        for name in self.gathered_v:
            bases = (bases[:, None] + strides[name] * jnp.arange(lax.axis_size(name))[None]).reshape(-1)
        return bases

    def block(self, parameters: Parameters, i: Any) -> Block:
        """Block i of the kernel, gathered over its FSDP axes."""
        kernel, bias, lora_b = parameters
        columns = kernel.shape[self.v_dim]
        start, size, own = self._place(i, columns)
        part = lax.dynamic_slice_in_dim(kernel, start, size, self.v_dim)
        bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, size).astype(jnp.float32)
        lora_b = None if lora_b is None else lax.dynamic_slice_in_dim(lora_b, start, size, self.v_dim)
        if self.h_names:
            part = lax.all_gather(part, self.h_names, axis=1 - self.v_dim, tiled=True)
        if self.gathered_v:
            part = lax.all_gather(part, self.gathered_v, axis=self.v_dim, tiled=True)
            bias = None if bias is None else lax.all_gather(bias, self.gathered_v, tiled=True)
            lora_b = None if lora_b is None else lax.all_gather(lora_b, self.gathered_v, axis=self.v_dim, tiled=True)
        ids = (self._piece_bases(columns)[:, None] + (start + jnp.arange(size))[None]).reshape(-1)
        exists, padded = ids < self.vocab_size, self.vocab_size < columns * math.prod(map(lax.axis_size, self.v_names))
        if padded:
            # padding may hold NaN, and 0 * NaN is NaN in the gradient of the hidden states
            part = jnp.where(jnp.expand_dims(exists, 1 - self.v_dim), part, 0)
            lora_b = None if lora_b is None else jnp.where(jnp.expand_dims(exists, 1 - self.v_dim), lora_b, 0)
            bias = None if bias is None else jnp.where(exists, bias, 0)
        valid = jnp.tile(own, ids.shape[0] // size) & exists if padded or self.overlap(columns) else True
        return Block(part, bias, lora_b, ids, valid)

    def part(self, i: Any, x: jax.Array, columns: int) -> jax.Array:
        """Block i of x, `[N, columns that the device works on]`; 0 in duplicates of other blocks."""
        start, size, own = self._place(i, columns)
        part = lax.dynamic_slice_in_dim(x, start - self.start(0, columns), size, axis=1)
        return jnp.where(own, part, 0) if x.shape[1] % size else part

    def set_part(self, i: Any, x: jax.Array, part: jax.Array, columns: int) -> jax.Array:
        """x with block i replaced by `part`, but for duplicates of other blocks."""
        start, size, own = self._place(i, columns)
        start = start - self.start(0, columns)
        if x.shape[1] % size:
            part = jnp.where(own, part, lax.dynamic_slice_in_dim(x, start, size, axis=1))
        return lax.dynamic_update_slice_in_dim(x, part, start, axis=1)

    def place_of(self, ids: jax.Array, block: Block) -> tuple[jax.Array, jax.Array]:
        """The place in the block of each vocabulary id, and whether the block has it as its own."""
        pieces = math.prod(lax.axis_size(n) for n in self.gathered_v)
        size = block.columns.shape[0] // pieces
        offset = ids[..., None] - block.columns[::size]
        inside = (offset >= 0) & (offset < size)
        place = jnp.where(inside, offset + jnp.arange(pieces) * size, 0).sum(-1)
        return place, inside.any(-1) & (True if block.valid is True else block.valid[place])

    def set_block(self, i: Any, is_kernel: bool, total: jax.Array, gradient: jax.Array, primal: jax.Array) -> jax.Array:
        """`total` with block i's f32 gradient, summed over the devices that share the primal."""
        v_dim = self.v_dim if primal.ndim == 2 else 0
        if self.h_names and is_kernel:
            gradient = lax.psum_scatter(gradient, self.h_names, scatter_dimension=1 - v_dim, tiled=True)
        if self.gathered_v:
            gradient = lax.psum_scatter(gradient, self.gathered_v, scatter_dimension=v_dim, tiled=True)
        # over the tensor axis windows differ, and only whole gradients can be summed: finish_gradient
        gradient = psum_to(gradient, varying(primal) | set(self.axes.tensor), total.dtype)
        return self.set(i, is_kernel, total, gradient)

    def set(self, i: Any, is_kernel: bool, total: jax.Array, gradient: jax.Array) -> jax.Array:
        """`total` with block i's gradient in its place."""
        v_dim = self.v_dim if total.ndim == 2 else 0
        start, size, own = self._place(i, total.shape[v_dim])
        if self.window(total.shape[v_dim]) % size:
            # a select, since XLA moves sums over devices that are added to a buffer out of the loop, as one whole sum
            own = own[:, None] if v_dim == 0 and total.ndim == 2 else own
            gradient = jnp.where(own, gradient, lax.dynamic_slice_in_dim(total, start, size, v_dim))
        return lax.dynamic_update_slice_in_dim(total, gradient, start, v_dim)

    def empty_gradient(self, primal: jax.Array) -> jax.Array:
        """Zeros for `set_block`."""
        windows = set(self.axes.tensor) if self.whole_vocabulary_each else set()
        return vary(jnp.zeros(primal.shape, primal.dtype), varying(primal) | windows)

    def finish_gradient(self, total: jax.Array, primal: jax.Array) -> jax.Array:
        """The end of `set_block`s: windows of one whole kernel are disjoint, so that any dtype sums them exactly."""
        return as_primal(total, primal)

    def accumulate(self, i: Any, is_kernel: bool, total: jax.Array, gradient: jax.Array) -> jax.Array:
        """This device's f32 `total` plus block i's gradient."""
        v_dim = self.v_dim if total.ndim == 2 else 0
        start = self.start(i, total.shape[v_dim])
        old = lax.dynamic_slice_in_dim(total, start, gradient.shape[v_dim], v_dim)
        return lax.dynamic_update_slice_in_dim(total, old + gradient, start, v_dim)

    def reduce(self, is_kernel: bool, total: jax.Array, primal: jax.Array) -> jax.Array:
        """Accumulated f32 gradients summed over the devices that share the primal, block by block."""
        return psum_in_blocks(total, primal, self.v_dim if primal.ndim == 2 else 0, self.block_columns)

    def logits(self, rows: Features, block: Block, temperature: jax.Array) -> jax.Array:
        """f32 logits `[N, B]` with -inf in columns that are not the block's own; temperature a scalar or `[N, 1]`."""
        z = _dot(rows.hidden, block.kernel, (1, 1 - self.v_dim))
        z = z if block.lora_b is None else z + self.lora_scale * _dot(rows.low, block.lora_b, (1, 1 - self.v_dim))
        z = z if block.bias is None else z + block.bias
        z = z if self.scale == 1 else self.scale * z
        z = z if self.softcap is None else self.softcap * jnp.tanh(z / self.softcap)
        return jnp.where(block.valid, z / temperature, -jnp.inf)

    def product_gradient(
        self, dz: jax.Array, z: jax.Array, counts: jax.Array, block: Block, temperature: jax.Array
    ) -> Any:
        """The gradient of hidden @ kernel from that of its logits z; 0 in rows that do not count."""
        dz = dz / temperature
        if self.softcap is not None:
            dz = dz * (1 - (z * temperature / self.softcap) ** 2)
        dz = dz if self.scale == 1 else self.scale * dz
        return jnp.where(counts[:, None] & block.valid, dz, 0)

    def feature_gradients(self, dz: jax.Array, block: Block, needs: Features) -> Features:
        """f32 `[N, H]` and `[N, r]`, where needs_grad is not None."""
        hidden = low = None
        if needs.hidden is not None:
            hidden = _dot(dz.astype(block.kernel.dtype), block.kernel, (1, self.v_dim))
        if needs.low is not None:
            low = self.lora_scale * _dot(dz.astype(block.lora_b.dtype), block.lora_b, (1, self.v_dim))
        return Features(hidden, low)

    def factor(self, rows: Features) -> Features:
        """Features as `parameter_gradients` takes them, to be made outside the loop over the vocabulary.

        For "hv" in f32 transposed: XLA for CPUs takes a tenth to a third longer for a product whose left factor is
        contracted along its rows. Of bf16 it cannot run the product if it transposes by layout.
        """
        return jax.tree.map(lambda x: x.T if self._transposes(x) else x, rows)

    def _transposes(self, rows: jax.Array) -> bool:
        return self.layout == "hv" and rows.dtype == jnp.float32

    def parameter_gradients(self, dz: jax.Array, factor: Features, needs: Parameters) -> Parameters:
        """f32 gradients of the block, in its layout, where `needs` is not None."""
        dkernel = None if needs.kernel is None else self._outer(dz, factor.hidden)
        dlora_b = None if needs.lora_b is None else self.lora_scale * self._outer(dz, factor.low)
        return Parameters(dkernel, None if needs.bias is None else dz.sum(axis=0), dlora_b)

    def _outer(self, dz: jax.Array, factor: jax.Array) -> jax.Array:
        product = dz.astype(factor.dtype)
        if self.layout == "vh":
            return _dot(product, factor, (0, 0))
        return _dot(factor, product, (1 if self._transposes(factor) else 0, 0))


def _dot(a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """A product with an f32 result, contracting dimension dims[0] of a with dims[1] of b."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    contract = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), contract, preferred_element_type=jnp.float32)
