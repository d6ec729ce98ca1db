"""A head's parameters as one device holds them, cut into blocks of columns, and the gradients of those blocks.

The kernel may be sharded over the tensor axis along V, and over data axes (FSDP) along H or V. The FSDP shards are
gathered at once, or a block at a time. A last block that would be shorter overlaps the block before it, and the
duplicate columns are masked, so nothing is padded or copied.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.gradient_sums import as_primal, sum_in_blocks, unwritten
from jaxppo.head.plan import eighths, window
from jaxppo.head.ring import LANES
from jaxppo.head.slices import Tree, put_slice, rows_at, slice_of, submatrix
from jaxppo.head.token_blocks import even_size
from jaxppo.head.types import Block, Chunk, HeadCall, Index, Parameters, Submatrix, Tile
from jaxppo.sharding import vary, varying

SUMMED_COLUMNS = 4096  # the columns that are summed at a time, of a gradient that exists already
SUMMED_BYTES = 64 * 2**20  # the size of one sum over devices, which needs an array of its own


class VocabularyBlocks:
    """The parameters of one device in blocks of columns.

    Args:
      call: says how the parameters lie on the mesh.
      parameters: the device's shards.
      size: the largest number of columns of a block.
      by_block: gather over FSDP axes for each block, rather than all at once.
    """

    def __init__(self, call: HeadCall, parameters: Parameters, size: int, by_block: bool = False):
        self.call, self.given, self.most = call, parameters, size
        self.gathered_v = tuple(n for n in call.v_names if n not in call.axes.tensor)
        self.gathers = bool(call.h_names or self.gathered_v)
        self.by_block = self.gathers and by_block
        self.held = self._gather(parameters) if self.gathers and not by_block else parameters
        own = parameters.kernel.shape[call.v_dim]
        bases = self._bases(own)
        self.ids = (bases[:, None] + _range(own)[None]).reshape(-1)
        self.offsets = bases - bases[0]
        if self.by_block and self.gathered_v:
            self.ids = self.ids.reshape(-1, own)[0]
        self.count = self.ids.shape[0]
        shards = call.axes.size(call.axes.tensor)
        self._cut(window(call, self.count))
        self.eighths = eighths(call, self.count)
        self.first: Index = 0
        self.shared = self.window < self.count
        if self.shared:
            self.first = jnp.minimum(call.axes.index(call.axes.tensor) * self.window, self.count - self.window)
        self.padded = call.vocab_size < own * math.prod(map(lax.axis_size, call.v_names))
        self.overlaps = bool(self.window % self.size) or self.count > self.window != self.count / shards
        rings = call.profile.rings and not self.gathered_v
        self.sums: Any = {"sum_dtype": call.sum_dtype, "rings": rings, "is_sum": bool(self.gathered_v)}

    def _cut(self, columns: int) -> None:
        self.window, self.size = columns, even_size(columns, self.most, LANES)
        self.blocks = -(-columns // self.size)

    def eighth(self, p: Index) -> VocabularyBlocks:
        """The blocks of part p of the device's columns, one of the equal parts that `plan.eighths` counts."""
        found = copy.copy(self)
        found._cut(self.window // self.eighths)
        found.first = self.first + p * found.window
        found.overlaps, found.shared = bool(found.window % found.size), False
        return found

    def _bases(self, own: int) -> jax.Array:
        """The first vocabulary id of each piece that a gather over V concatenates, in the gather's order."""
        stride, strides = own, {}
        for name in reversed(self.call.v_names):
            strides[name] = stride
            stride *= lax.axis_size(name)
        tensor = [n for n in self.call.v_names if n in self.call.axes.tensor]
        bases = jnp.asarray(sum(lax.axis_index(n) * strides[n] for n in tensor)).reshape(1)
        for name in self.gathered_v:
            bases = (bases[:, None] + strides[name] * _range(lax.axis_size(name))[None]).reshape(-1)
        return bases

    def _gather(self, parameters: Parameters) -> Parameters:
        def gather(is_kernel: bool, x: jax.Array) -> jax.Array:
            if is_kernel and self.call.h_names:
                x = lax.all_gather(x, self.call.h_names, axis=1 - self.call.v_dim, tiled=True)
            if self.gathered_v:
                x = lax.all_gather(x, self.gathered_v, axis=self.dim(x), tiled=True)
            return x

        return each(gather, parameters)

    def dim(self, x: jax.Array) -> int:
        """The dimension of x that runs along V."""
        return self.call.v_dim if x.ndim == 2 else 0

    def start(self, i: Index) -> Index:
        """The first column of block i, among the columns held."""
        return self.first + jnp.minimum(i * self.size, self.window - self.size) if self.blocks > 1 else self.first

    def own(self, i: Index) -> jax.Array:
        """bool: the columns of block i that no other block has."""
        at = self.start(i) + _range(self.size)
        before = self.call.axes.index(self.call.axes.tensor) * self.window if self.shared else 0
        return (at >= self.first + i * self.size) & (at >= before)

    def block(self, i: Index) -> Block:
        """Block i, gathered if it is not yet."""
        start = self.start(i)
        parts = jax.tree.map(lambda x: slice_of(x, start, self.size, self.dim(x)), self.held)
        ids = slice_of(self.ids, start, self.size) if self.gathers else self.ids[0] + start + _range(self.size)
        if self.by_block:
            parts, ids = self._gather(parts), (ids[None] + self.offsets[:, None]).reshape(-1)
        valid: jax.Array | Literal[True] = jnp.tile(self.own(i), ids.shape[0] // self.size) if self.overlaps else True
        if self.padded:
            exists = ids < self.call.vocab_size
            # padding may hold NaN, and 0 * NaN is NaN in the gradient of the hidden states
            parts = jax.tree.map(lambda x: jnp.where(self._beside(exists, x), x, 0), parts)
            valid = valid & exists
        bias = None if parts.bias is None else parts.bias.astype(jnp.float32)[None]
        return Block(parts._replace(bias=bias), ids[None], valid if valid is True else valid[None])

    def _beside(self, of_columns: jax.Array, x: jax.Array) -> jax.Array:
        """Values of columns `[B]`, with dimensions of 1 added so that they broadcast against x."""
        return of_columns if x.ndim == 1 else jnp.expand_dims(of_columns, 1 - self.dim(x))

    def tile(self, chunk: Chunk, block: Block) -> Tile:
        """Some tokens by the columns of a block."""
        if chunk.targets is None:
            return Tile(chunk, block, None, None, None)
        place, nucleus = self._place_of(chunk.targets, block), None
        of_ids = None if chunk.ids is None else self._place_of(chunk.ids, block)
        if chunk.nucleus_ids is not None:
            ids = jnp.concatenate([chunk.nucleus_ids, chunk.targets[:, None]], axis=1)
            places, inside = self._place_of(ids, block)
            C, B = ids.shape[0], block.column_ids.shape[1]
            empty = vary(jnp.zeros((C, B), bool), varying(ids) | varying(block.column_ids))
            nucleus = empty.at[_range(C)[:, None], jnp.where(inside, places, B)].set(True, mode="drop")
        return Tile(chunk, block, place, nucleus, of_ids)

    def rows(self, ids: jax.Array) -> tuple[Parameters, jax.Array]:
        """The parameters of vocabulary ids, one row per id, and whether this device holds each id."""
        place, inside = self._place_of(ids, Block(self.held, self.ids[None], True))

        def of_ids(x: jax.Array) -> jax.Array:
            return rows_at(jnp.moveaxis(x, self.dim(x), 0), place)

        return jax.tree.map(of_ids, self.held), inside

    def _place_of(self, ids: jax.Array, block: Block) -> tuple[jax.Array, jax.Array]:
        """The place in the block of each vocabulary id, and whether the id is a valid column of the block."""
        pieces = math.prod(map(lax.axis_size, self.gathered_v))
        size = block.column_ids.shape[1] // pieces
        starts = block.column_ids[0, ::size]
        as_last = (*[1] * ids.ndim, pieces)
        offset = ids[..., None] - starts.reshape(as_last)
        inside = (offset >= 0) & (offset < size)
        place = jnp.where(inside, offset + (_range(pieces) * size).reshape(as_last), 0).sum(-1, dtype=jnp.int32)
        return place, inside.any(-1) & (True if block.valid is True else block.valid[0, place])

    def over_blocks(self, body: Callable[[Index, Tree], Tree], carry: Tree) -> Tree:
        """`carry = body(i, carry)` over the blocks, the last one first, since the block before it may overlap it."""
        if self.blocks == 1:
            return body(0, carry)
        return lax.fori_loop(0, self.blocks, lambda i, carry: body(self.blocks - 1 - i, carry), carry)

    def add(self, i: Index, total: jax.Array, gradient: jax.Array) -> jax.Array:
        """This device's f32 `total`, of all columns held, plus the gradient of block i."""
        if self.size == self.count:
            return total + gradient
        start, dim = self.start(i), self.dim(total)
        return put_slice(total, slice_of(total, start, self.size, dim) + gradient, start, dim)

    def empty(self, primal: jax.Array) -> jax.Array:
        """The array that `put_summed` fills: not initialized if every column is written, zeros if only a window is."""
        if self.window == self.count:
            return unwritten(primal.shape, primal.dtype, varying(primal), self.dim(primal))
        return vary(jnp.zeros(primal.shape, primal.dtype), varying(primal) | set(self.call.axes.tensor))

    def put_summed(
        self,
        axes: frozenset[str],
        size: int,
        i: Index,
        is_kernel: bool,
        total: jax.Array,
        gradient: Any,
        primal: jax.Array,
    ) -> jax.Array:
        """`total`, of the primal's shape, with the gradient of block i, summed over the devices that share the block.

        The gradient varies along `axes`. That of a kernel is a `Submatrix`, which is summed `size` columns at a time.
        The last block comes first: in the columns that it shares with the block before it holds zeros, which that block
        overwrites.
        """
        # windows differ along the tensor axis: the whole gradient is summed over it at the end, exactly in any dtype
        keep = frozenset(self.call.axes.tensor if self.window < self.count else ())
        dim = self.dim(primal)
        if is_kernel:
            part = self._of_own(gradient, dim, self.size) if self.gathered_v else gradient
            given: Any = {"length": self.size, "scatter": self.call.h_names, "keep": keep, **self.sums}
            gradient = sum_in_blocks(part, primal, dim, size, axes, **given)
        else:
            keep, scattered = keep | varying(primal), self._scattered(gradient, dim) if self.gathered_v else gradient
            gradient = as_primal(scattered, primal, self.call.sum_dtype, keep=keep, is_sum=self.sums["is_sum"])
        return gradient if self.size == total.shape[dim] else put_slice(total, gradient, self.start(i), dim)

    def _of_own(self, part: Submatrix, dim: int, own: int) -> Submatrix:
        """This device's `own` columns, summed over devices, of `part`, which has all columns that were gathered."""
        pieces = math.prod(map(lax.axis_size, self.gathered_v))

        def summed(start: Index, size: int, first: Index, width: int) -> jax.Array:
            found = [part(start + k * own, size, first, width) for k in range(pieces)]
            return self._scattered(jnp.concatenate(found, dim), dim)

        return summed

    def _scattered(self, gradient: jax.Array, dim: int) -> jax.Array:
        gradient = gradient if self.call.sum_dtype == "float32" else gradient.astype(self.given.kernel.dtype)
        return lax.psum_scatter(gradient, self.gathered_v, scatter_dimension=dim, tiled=True)

    def sum(
        self, is_kernel: bool, part: Submatrix, primal: jax.Array, axes: frozenset[str], *, by_rows: bool = False
    ) -> jax.Array:
        """The gradient of all columns held, a matrix that varies along `axes`, summed over devices one block at a time.

        With blocks no second f32 array of its shape is needed. And one large scatter would be a sum in bf16 in XLA for
        TPUs. `by_rows` is that of `RingSum`; half a share then has about a thousand rows.
        """
        dim = self.dim(primal)
        scatter = self.call.h_names if is_kernel else ()
        width = primal.shape[1 - dim] * math.prod(map(lax.axis_size, scatter))
        part = self._of_own(part, dim, primal.shape[dim]) if self.gathered_v else part
        size = 2 * SUMMED_COLUMNS if by_rows else SUMMED_BYTES // (4 * width)
        return sum_in_blocks(part, primal, dim, size, axes, scatter=scatter, by_rows=by_rows, **self.sums)

    def summed(self, is_kernel: bool, total: jax.Array, primal: jax.Array) -> jax.Array:
        """The f32 gradient of all columns held, summed over the devices that share the primal."""
        if total.ndim == 1:
            total = self._scattered(total, 0) if self.gathered_v else total
            return as_primal(total, primal, self.call.sum_dtype, is_sum=self.sums["is_sum"])
        return self.sum(is_kernel, partial(submatrix, total, self.dim(total)), primal, varying(total))


_range = partial(jnp.arange, dtype=jnp.int32)


def each(fn: Callable[..., Any], parameters: Parameters, *others: Parameters) -> Parameters:
    """fn(is_kernel, parameter, ...) for each parameter that is not None."""
    values = zip(parameters, *others, strict=True)
    return Parameters(*(None if x[0] is None else fn(i == 0, *x) for i, x in enumerate(values)))
