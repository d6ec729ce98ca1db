"""A head's parameters as one device holds them, in blocks of columns, and the sums over devices of their gradients.

The kernel may be sharded over the tensor axis along V, and over data axes (FSDP) along H or V. It is gathered over
those at once, or a block at a time. Remainders overlap the block before them with the duplicates masked, so nothing is
padded or copied.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.ops.tile import Block, Parameters
from jaxppo.head.tokens import even_block
from jaxppo.head.varying import Summing, as_primal, psum_in_blocks, sum_in_blocks, unwritten
from jaxppo.sharding import ShardAxes, vary, varying

Names = tuple[str, ...]
LANES = 128  # of an accelerator's registers
SUMMED_BYTES = 64 * 2**20  # of one sum over devices, which needs an array of its own


@dataclasses.dataclass(frozen=True)
class Columns:
    """How a head's columns lie on a mesh; static.

    Args:
      axes: the roles of the mesh axes.
      v_dim: the kernel's dimension of the vocabulary.
      h_names: mesh axes that shard the kernel's H, all gathered.
      v_names: mesh axes that shard its V, the tensor axes among them or not.
      vocab_size: columns from there on have probability 0.
      summing: how gradients of parameters are summed over devices.
    """

    axes: ShardAxes
    v_dim: int
    h_names: Names
    v_names: Names
    vocab_size: int
    summing: Summing

    @property
    def gathered_v(self) -> Names:
        return tuple(n for n in self.v_names if n not in self.axes.tensor)

    @property
    def gathers(self) -> bool:
        return bool(self.h_names or self.gathered_v)

    @property
    def pieces(self) -> int:
        """How many parts of V a gather brings together."""
        return math.prod(map(lax.axis_size, self.gathered_v))

    def window(self, columns: int) -> int:
        """How many of the `columns` of V that it holds a device works on: a share, if all of the tensor axis hold them.

        JAX cannot shard a vocabulary that the tensor axis does not divide.
        """
        shared = self.axes.tensor and not set(self.v_names) & set(self.axes.tensor)
        return -(-columns // self.axes.size(self.axes.tensor)) if shared else columns


class Vocabulary:
    """The parameters of one device in blocks of columns.

    Args:
      columns: how they lie.
      parameters: as the device holds them.
      block: columns of a block at most.
      once: gather them over FSDP axes now, rather than each block.
    """

    def __init__(self, columns: Columns, parameters: Parameters, block: int, once: bool):
        self.columns, self.given = columns, parameters
        self.by_block = columns.gathers and not once
        self.held = self._gather(parameters) if columns.gathers and once else parameters
        own = parameters.kernel.shape[columns.v_dim]
        bases = self._bases(own)
        self.ids = (bases[:, None] + jnp.arange(own, dtype=jnp.int32)[None]).reshape(-1)
        self.offsets = bases - bases[0]
        if self.by_block and columns.gathered_v:
            self.ids = self.ids.reshape(-1, own)[0]
        self.count = self.ids.shape[0]
        self.window = columns.window(self.count)
        self.size = even_block(self.window, block, LANES)
        self.blocks = -(-self.window // self.size)
        self.first: Any = 0
        if self.window < self.count:
            self.first = jnp.minimum(columns.axes.index(columns.axes.tensor) * self.window, self.count - self.window)
        total = own * math.prod(map(lax.axis_size, columns.v_names))
        self.padded = columns.vocab_size < total
        self.overlaps = bool(self.window % self.size) or (
            self.window < self.count and self.window * columns.axes.size(columns.axes.tensor) != self.count
        )

    @property
    def whole(self) -> bool:
        """The device works on all the columns of its own parameters."""
        return self.window == self.count and not self.columns.gathers

    def _bases(self, own: int) -> jax.Array:
        """The first vocabulary id of each piece that a gather over V brings together, in the gather's order."""
        stride, strides = own, {}
        for name in reversed(self.columns.v_names):
            strides[name] = stride
            stride *= lax.axis_size(name)
        tensor = [n for n in self.columns.v_names if n in self.columns.axes.tensor]
        bases = jnp.asarray(sum(lax.axis_index(n) * strides[n] for n in tensor), jnp.int32).reshape(1)
        for name in self.columns.gathered_v:
            each = jnp.arange(lax.axis_size(name), dtype=jnp.int32)
            bases = (bases[:, None] + strides[name] * each[None]).reshape(-1)
        return bases

    def _gather(self, parameters: Parameters) -> Parameters:
        columns = self.columns

        def gather(is_kernel: bool, x: jax.Array) -> jax.Array:
            if is_kernel and columns.h_names:
                x = lax.all_gather(x, columns.h_names, axis=1 - columns.v_dim, tiled=True)
            if columns.gathered_v:
                x = lax.all_gather(x, columns.gathered_v, axis=self._dim(x), tiled=True)
            return x

        return parameters.each(gather)

    def _dim(self, x: jax.Array) -> int:
        """The dimension of V."""
        return self.columns.v_dim if x.ndim == 2 else 0

    def start(self, i: Any) -> Any:
        """The first column of block i, of those held."""
        return self.first + jnp.minimum(i * self.size, self.window - self.size) if self.blocks > 1 else self.first

    def own(self, i: Any) -> Any:
        """bool: which columns of block i are its alone."""
        at = self.start(i) + jnp.arange(self.size, dtype=jnp.int32)
        before = self.columns.axes.index(self.columns.axes.tensor) * self.window if self.window < self.count else 0
        return (at >= self.first + i * self.size) & (at >= before)

    def slice(self, i: Any, x: jax.Array, size: int | None = None) -> jax.Array:
        """The columns of block i of an array that has all that are held."""
        if self.size == self.count:
            return x
        return lax.dynamic_slice_in_dim(x, self.start(i), size or self.size, self._dim(x))

    def block(self, i: Any) -> Block:
        """Block i, gathered if it is not yet."""
        parts = self.held.each(lambda _, x: self.slice(i, x))
        in_order = lambda: self.ids[0] + self.start(i) + jnp.arange(self.size, dtype=jnp.int32)  # noqa: E731
        ids = self.slice(i, self.ids) if self.columns.gathers else in_order()
        if self.by_block:
            parts, ids = self._gather(parts), (ids[None] + self.offsets[:, None]).reshape(-1)
        valid: Any = jnp.tile(self.own(i), ids.shape[0] // self.size) if self.overlaps else True
        if self.padded:
            exists = ids < self.columns.vocab_size
            # padding may hold NaN, and 0 * NaN is NaN in the gradient of the hidden states
            among = lambda x: exists if x.ndim == 1 else jnp.expand_dims(exists, 1 - self._dim(x))  # noqa: E731
            parts, valid = parts.each(lambda _, x: jnp.where(among(x), x, 0)), valid & exists
        bias = None if parts.bias is None else parts.bias.astype(jnp.float32)
        return Block(parts._replace(bias=bias), ids, valid)

    def place_of(self, ids: jax.Array, block: Block) -> tuple[jax.Array, jax.Array]:
        """The place in the block of each vocabulary id, and whether the block has it as its own."""
        starts = block.columns[:: block.columns.shape[0] // self.columns.pieces]
        size = block.columns.shape[0] // starts.shape[0]
        last = lambda x: x.reshape((1,) * ids.ndim + (-1,))  # noqa: E731
        offset = ids[..., None] - last(starts)
        inside = (offset >= 0) & (offset < size)
        before = last(jnp.arange(starts.shape[0], dtype=jnp.int32) * size)
        place = jnp.where(inside, offset + before, 0).sum(-1, dtype=jnp.int32)
        return place, inside.any(-1) & (True if block.valid is True else block.valid[place])

    def add(self, i: Any, is_kernel: bool, total: jax.Array, gradient: jax.Array) -> jax.Array:
        """This device's f32 `total`, of all columns held, plus the gradient of block i."""
        if self.size == self.count:
            return total + gradient
        return self._set(i, total, self.slice(i, total) + gradient)

    def _set(self, i: Any, total: jax.Array, part: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(total, part, self.start(i), self._dim(total))

    def put(self, i: Any, total: jax.Array, gradient: jax.Array, last_first: bool) -> jax.Array:
        """`total` with the gradient of block i in its place.

        With the last block first, its zeros in the columns that it shares with the one before are written over.
        """
        if self.window % self.size and not last_first:
            # a select, since XLA moves sums over devices that are added to a buffer out of the loop, as one whole sum
            own = jnp.expand_dims(self.own(i), 1 - self._dim(total)) if total.ndim == 2 else self.own(i)
            gradient = jnp.where(own, gradient, self.slice(i, total))
        return self._set(i, total, gradient)

    def put_summed(
        self, i: Any, last_first: bool, is_kernel: bool, total: jax.Array, gradient: jax.Array, primal: jax.Array
    ) -> jax.Array:
        """`total`, of the primal's shape, with the gradient of block i, summed over the devices that share it."""
        gradient = self._scatter(is_kernel, gradient, primal)
        # over the tensor axis windows differ, and only whole gradients can be summed: `finish`
        keep = varying(primal) | (set(self.columns.axes.tensor) if self.window < self.count else set())
        gradient = as_primal(gradient, primal, self.columns.summing, keep, self._dim(primal))
        return gradient if self.size == total.shape[self._dim(total)] else self.put(i, total, gradient, last_first)

    def _scatter(self, is_kernel: bool, gradient: jax.Array, primal: jax.Array) -> jax.Array:
        columns = self.columns
        gradient = gradient if columns.summing.dtype == "float32" else gradient.astype(primal.dtype)
        scatter = partial(lax.psum_scatter, tiled=True)
        if columns.h_names and is_kernel:
            gradient = scatter(gradient, columns.h_names, scatter_dimension=1 - columns.v_dim)
        if columns.gathered_v:
            gradient = scatter(gradient, columns.gathered_v, scatter_dimension=self._dim(primal))
        return gradient

    def empty(self, primal: jax.Array) -> jax.Array:
        """Where `put_summed` writes every column; zeros where it writes a window of them."""
        if self.window == self.count:
            return unwritten(primal, self._dim(primal))
        return vary(jnp.zeros(primal.shape, primal.dtype), varying(primal) | set(self.columns.axes.tensor))

    def finish(self, total: jax.Array, primal: jax.Array) -> jax.Array:
        """The end of `put_summed`s: windows of one whole kernel are disjoint, so that any dtype sums them exactly."""
        return as_primal(total, primal)

    def summed(self, is_kernel: bool, total: jax.Array, primal: jax.Array) -> jax.Array:
        """The f32 gradient of all columns held, summed over the devices that share the primal."""
        columns, dim = self.columns, self._dim(primal)
        if not columns.gathers:
            size = max(LANES, SUMMED_BYTES // (4 * total.size // total.shape[dim]))
            return psum_in_blocks(total, primal, dim, size, columns.summing)

        def part(start: Any, size: int) -> jax.Array:
            """The gradient of `size` of the device's own columns, from each device's part of all of them."""
            own = primal.shape[dim]
            pieces = [lax.dynamic_slice_in_dim(total, start + k * own, size, dim) for k in range(columns.pieces)]
            return self._scatter(is_kernel, jnp.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0], primal)

        # in blocks also for the compiler: XLA for TPUs takes one large scatter for a sum of all, and sums that in bf16
        size = max(LANES, SUMMED_BYTES // (4 * total.size // total.shape[dim]) // columns.pieces)
        return sum_in_blocks(part, primal, dim, size, columns.summing)
