"""The arithmetic of a tile as Pallas kernels for TPUs: products and softmax sums of a piece while it lies in VMEM.

XLA writes a tile's f32 logits to memory and reads them back for the sums. Here they stay on the chip. One kernel
returns the softmax sums (and the logits, if the one pass asks for them). Another returns the gradient of the logits in
the dtype that products take. Both run the functions of `tile` and `softmax` on pieces of tokens by columns, with all of
H at once, so the formulas are written only once. XLA computes the products of the backward.

This implementation is not the default. The table has times estimated by `jaxppo.sharding.audit` for a Qwen3-8B head
(H 4096, V 151936, bf16) over cp=4, tp=4 with 8192 tokens per device, in ms of compute. XLA's time comes first, that of
the kernels second. libtpu is 0.0.52, and nothing was timed on a chip:

               v5p            v6e            tpu7x
    forward     6.11   6.23    3.48   3.32    2.68   2.57
    two passes 28.2   28.0    17.7   16.3    15.3   13.4
    one pass   22.5   22.7    14.7   14.7    10.4   10.4

The estimates assume that kernels reach 93% of the peak. By the compiler's static profile the kernel of the sums reaches
92% on a v5p and 81% on a v6e, that of the gradient 96% and 77%; on a tpu7x both reach 75% to 80%. There products and
the arithmetic after them do not overlap. (The profile passes by work that is under a condition, so it was made without
the check for pieces without tokens.) On a v5p the kernels gain next to nothing. On a v6e a forward gains 5% here, and
14% for Gemma 3 4B; but by the static profile, in which XLA's forward takes 3.26 ms, it loses 10% here. Two passes gain
8% on a v6e and 12% on a tpu7x, nearly all of it by the gradient's kernel. One pass gains nothing.

On CPUs the kernels are interpreted, which is slow and only for tests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxppo._arrays import needed
from jaxppo.head import softmax
from jaxppo.head import tile as xla
from jaxppo.head.softmax import Cotangents, Residuals, Sums
from jaxppo.head.types import Block, Chunk, Features, HeadCall, Inputs, Op, Parameters, Tile
from jaxppo.sharding import unvary, vary, varying

MIB = 2**20
LANES = 128  # lanes of a register
SUBLANES = 32  # a multiple of the sublanes of registers of any dtype
MATRIX = 256  # columns of the matrix units of newer chips


# Bytes of a core's VMEM, and the tokens and columns of the largest piece. A key is a part of the device's kind.
# The two cores of a v5p share the tokens of a chunk.
CHIPS = {
    "TPU v5 lite": (128 * MIB, 1024, 2048),
    "TPU v5": (64 * MIB, 512, 1024),
    "TPU v6 lite": (128 * MIB, 1024, 2048),
    "TPU7x": (64 * MIB, 1024, 1024),
    "cpu": (64 * MIB, 32, 256),
}


class _Operands(NamedTuple):
    """The arrays that a kernel reads: of C tokens and B columns outside of it, of a piece inside."""

    rows: Features  # [C, H] and [C, r]
    parameters: Parameters  # as in `Block`, the bias [1, B]
    column_ids: Any  # i32[1, B], -1 where the column is not the block's own
    targets: Any  # i32[C, 1]
    numbers: Any  # f32[C, n], the leaves of `_Numbers`


class _Numbers(NamedTuple):
    """The numbers that a kernel reads for each token, f32[C] each, or None."""

    temperature: jax.Array | None
    residuals: Residuals | None = None
    cotangents: Cotangents | None = None


@dataclasses.dataclass(frozen=True)
class MosaicTPU(Op):
    """A tile by the kernels of this file.

    Args:
      device: the kind of the devices.
    """

    leaves_logits: ClassVar[bool] = False
    device: str

    @property
    def _interpreted(self) -> bool:
        return self.device.startswith("cpu")

    def unsupported(self, call: HeadCall, inputs: Inputs) -> str | None:
        hidden, kernel = inputs.features.hidden, inputs.parameters.kernel
        dtypes = {str(x.dtype) for x in jax.tree.leaves((inputs.features, inputs.parameters, inputs.lora_a))}
        if self._chip is None:
            return f"devices of the kind {self.device!r}, only {sorted(CHIPS)}"
        if call.heads > 1:
            return "several heads at once"
        if inputs.nucleus_ids is not None:
            return "nucleus_ids"
        if inputs.ids is not None:
            return "ids"
        if call.asked.top_k:
            return "top_k"
        if call.transform.dtype != "float32":
            return f"logits_dtype={call.transform.dtype!r}"
        if call.precision == "high":
            return "precision='high'"
        if dtypes - {"bfloat16", "float32"}:
            return f"hidden states or parameters of {sorted(dtypes)}, only bfloat16 and float32"
        if _piece(self._chip, hidden.shape[-1], _operand_bytes(call, hidden, kernel)) is None:
            return f"H = {hidden.shape[-1]}, of which no piece fits {self._chip[0]} bytes of VMEM"
        return None

    @property
    def _chip(self) -> tuple[int, int, int] | None:
        return next((chip for kind, chip in CHIPS.items() if kind in self.device), None)

    def forward(self, call: HeadCall, tile: Tile, like: Sums, keep: bool) -> tuple[Sums, jax.Array | None]:
        grid = _Grid.of(self, call, tile, tile.chunk.counts)
        numbers = _Numbers(tile.chunk.temperature)
        kernel = partial(_forward, call, jax.tree.structure(numbers))
        out = [jax.tree.map(lambda x: grid.of_tokens(x.dtype), like), grid.of_tile(jnp.float32) if keep else None]
        sums, x = grid.run("head_forward", kernel, _operands(grid, tile, numbers), out)
        return softmax.merge_pieces(sums), x

    def dlogits(
        self, call: HeadCall, tile: Tile, residuals: Residuals, cotangents: Cotangents, x: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        if x is not None:  # only elementwise arithmetic is left to do
            return xla.XLA().dlogits(call, tile, residuals, cotangents, x)
        grid = _Grid.of(self, call, tile, cotangents.counts)
        numbers = _Numbers(tile.chunk.temperature, residuals, cotangents)
        kernel = partial(_dlogits, call, jax.tree.structure(numbers))
        dtype = xla.product_dtype(tile.chunk.rows.hidden, tile.block.parameters.kernel)
        out = [grid.of_tile(dtype), None if tile.block.parameters.bias is None else grid.of_columns()]
        dz, total = grid.run("head_dlogits", kernel, _operands(grid, tile, numbers), out)
        return dz, None if total is None else total.sum(axis=(0, 1))


def _operands(grid: _Grid, tile: Tile, numbers: _Numbers) -> _Operands:
    """The operands, with numbers and columns padded to whole pieces by values that do not count."""
    block = tile.block
    columns = jnp.where(block.valid, block.column_ids, -1)
    columns = jnp.pad(columns, ((0, 0), (0, -grid.columns % grid.bv)), constant_values=-1)
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(numbers)]
    stacked = jnp.pad(jnp.stack(leaves, axis=1), ((0, -grid.tokens % grid.bt), (0, 0))) if leaves else None
    return _Operands(tile.chunk.rows, block.parameters, columns, tile.chunk.targets[:, None], stacked)


def _in_kernel(structure: Any, refs: _Operands) -> tuple[Tile, _Numbers]:
    """A piece as a tile."""
    x = jax.tree.map(lambda ref: ref[...], refs._replace(targets=None, numbers=None))
    numbers = jax.tree.unflatten(structure, [refs.numbers[:, k] for k in range(structure.num_leaves)])
    block = Block(x.parameters, x.column_ids, x.column_ids >= 0)
    chunk = Chunk(x.rows, refs.targets[:, 0], None, None, numbers.temperature, None)
    return Tile(chunk, block, None, None, None), numbers


def _by_lane(x: jax.Array) -> jax.Array:
    """`[n, B]` as `[1, B / 128, n, 128]`, which moves nothing."""
    return jnp.stack([x[:, k : k + LANES] for k in range(0, x.shape[1], LANES)])[None]


def _forward(call: HeadCall, structure: Any, active: Any, refs: _Operands, out: Any) -> None:
    """Adds the sums of a piece to those of earlier pieces, which stay in VMEM while the tokens are the same.

    Each lane has its own sums, since sums across lanes are slow: on a v6e they took a fifth of the time.
    """
    i, j = pl.program_id(0), pl.program_id(1)
    sums, x_out = out

    def write(new: Any) -> None:
        jax.tree.map(lambda ref, x: ref.__setitem__(..., x), sums, new)

    @pl.when(j == 0)
    def _() -> None:
        like = jax.tree.map(lambda ref: ref[...], sums)
        write(softmax.no_sums(like))

    @pl.when(active[i] > 0)
    def _() -> None:
        tile, _ = _in_kernel(structure, refs)
        x = xla.products(call, tile.chunk.rows, tile.block.parameters)
        z = xla.logits(call, tile.chunk, tile.block, x)
        is_target = refs.targets[...][None, None] == _by_lane(tile.block.column_ids)
        old = jax.tree.map(lambda ref: ref[...], sums)
        z_y = jnp.where(is_target, _by_lane(z), 0).sum(axis=1)
        found = softmax.block_sums(_by_lane(z), z_y, is_target, None, old)
        write(softmax.merge(old, jax.tree.map(lambda x: x[0], found)))
        if x_out is not None:
            x_out[...] = x


def _dlogits(call: HeadCall, structure: Any, active: Any, refs: _Operands, out: Any) -> None:
    i = pl.program_id(0)
    narrow, total = out

    @pl.when(active[i] == 0)
    def _() -> None:
        for ref in jax.tree.leaves(out):
            ref[...] = jnp.zeros_like(ref)

    @pl.when(active[i] > 0)
    def _() -> None:
        tile, numbers = _in_kernel(structure, refs)
        cotangents = needed("cotangents", numbers.cotangents)
        cotangents = cotangents._replace(counts=cotangents.counts != 0)
        dz = xla.product_gradients(call, tile, needed("residuals", numbers.residuals), cotangents)
        narrow[...] = dz.astype(narrow.dtype)
        if total is not None:
            total[...] = dz.sum(axis=0)[None, None]


def _operand_bytes(call: HeadCall, hidden: jax.Array, kernel: jax.Array) -> int:
    """The bytes of a number that products take, with the next piece's; f32 is split into bf16 numbers, which spill."""
    itemsize = max(hidden.dtype.itemsize, kernel.dtype.itemsize)
    return 2 * itemsize * (2 if itemsize == 4 and call.precision != "default" else 1)


def _piece(chip: tuple[int, int, int], H: int, operand_bytes: int) -> tuple[int, int] | None:
    """The largest piece that fits, or None if none does.

    The piece does not depend on the number of tokens, so the bits of a token's sums do not depend on it either.
    """

    def size(bt: int, bv: int) -> int:
        """The bytes of operands, of what is written for each token, and of temporaries."""
        return operand_bytes * (bt + bv) * H + 2 * bt * LANES * 4 * 8 + 5 * bt * bv * 4

    vmem, bt, bv = chip
    while size(bt, bv) > vmem * 3 // 4:
        if bt <= SUBLANES and bv <= MATRIX:
            return None
        bt, bv = (bt, bv // 2) if bv > max(bt, MATRIX) else (max(bt // 2, SUBLANES), bv)
    return bt, bv


def _even(count: int, most: int, multiple: int) -> int:
    """The size, a multiple of `multiple`, of as few equal pieces of `count` as sizes up to `most` allow."""
    size = -(-count // -(-count // most))
    return -(-size // multiple) * multiple


class _Result(NamedTuple):
    """One result of a kernel."""

    array: jax.ShapeDtypeStruct
    piece: pl.BlockSpec


@dataclasses.dataclass(frozen=True)
class _Grid:
    """A tile in pieces of bt tokens and bv columns, columns innermost."""

    op: MosaicTPU
    call: HeadCall
    tokens: int
    columns: int
    bt: int
    bv: int
    active: jax.Array  # i32[pieces of tokens], 0 where no token of the piece counts
    axes: frozenset[str]

    @classmethod
    def of(cls, op: MosaicTPU, call: HeadCall, tile: Tile, counts: jax.Array | None) -> _Grid:
        hidden, kernel = tile.chunk.rows.hidden, tile.block.parameters.kernel
        C, B = hidden.shape[0], kernel.shape[call.v_dim]
        most = _piece(needed("chip", op._chip), hidden.shape[1], _operand_bytes(call, hidden, kernel))
        bt, bv = needed("piece", most, "one that fits VMEM")
        bt, bv = _even(C, bt, SUBLANES), _even(B, bv, MATRIX)
        pieces = -(-C // bt)
        if counts is None:
            active = jnp.ones(pieces, jnp.int32)
        else:
            active = jnp.pad(counts, (0, -C % bt)).reshape(pieces, bt).any(axis=1).astype(jnp.int32)
        axes = frozenset().union(*map(varying, jax.tree.leaves((tile, counts))))
        return cls(op, call, C, B, bt, bv, active, axes)

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.tokens // self.bt), -(-self.columns // self.bv)

    def _struct(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        axes = frozenset() if self.op._interpreted else self.axes
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=axes))

    def _given(self, x: jax.Array) -> jax.Array:
        """An operand of the kernel; `_struct` is the type of its results.

        The interpreter of kernels knows no varying axes. `pltpu.InterpretParams` knows them, but makes devices wait for
        each other, forever if one takes fewer turns of a loop. So the interpreter's operands lose their varying axes,
        and its results get them back.
        """
        return unvary(x, tuple(sorted(varying(x)))) if self.op._interpreted else x

    def of_tokens(self, dtype: DTypeLike) -> _Result:
        """A result `[C, 128]`."""
        spec = pl.BlockSpec((self.bt, LANES), lambda i, j, active: (i, 0))
        return _Result(self._struct((self.tokens, LANES), dtype), spec)

    def of_tile(self, dtype: DTypeLike) -> _Result:
        """A result `[C, B]`."""
        spec = pl.BlockSpec((self.bt, self.bv), lambda i, j, active: (i, j))
        return _Result(self._struct((self.tokens, self.columns), dtype), spec)

    def of_columns(self) -> _Result:
        """A result `[pieces of tokens, 1, B]`."""
        spec = pl.BlockSpec((1, 1, self.bv), lambda i, j, active: (i, 0, j))
        return _Result(self._struct((self.shape[0], 1, self.columns), jnp.float32), spec)

    def _specs(self, operands: _Operands) -> _Operands:
        """Which piece of each operand is loaded. No column is loaded for tokens that do not count."""
        row = pl.BlockSpec((1, self.bv), lambda i, j, active: (0, j * active[i]))

        def tokens(x: jax.Array) -> pl.BlockSpec:
            return pl.BlockSpec((self.bt, x.shape[1]), lambda i, j, active: (i, 0))

        def by_columns(x: jax.Array) -> pl.BlockSpec:
            if self.call.v_dim == 1:
                return pl.BlockSpec((x.shape[0], self.bv), lambda i, j, active: (0, j * active[i]))
            return pl.BlockSpec((self.bv, x.shape[1]), lambda i, j, active: (j * active[i], 0))

        parameters = jax.tree.map(by_columns, operands.parameters)
        return _Operands(
            jax.tree.map(tokens, operands.rows),
            parameters._replace(bias=None if operands.parameters.bias is None else row),
            row,
            tokens(operands.targets),
            None if operands.numbers is None else tokens(operands.numbers),
        )

    def run(self, name: str, kernel: Callable[..., None], operands: _Operands, out: Any) -> Any:
        """Runs `kernel(active, operands, results)` on each piece and returns its results, as `out` describes them."""
        arrays, structure = jax.tree.flatten(operands)
        results, out_structure = jax.tree.flatten(out, is_leaf=lambda x: isinstance(x, _Result))
        n = len(arrays)

        def body(active: Any, *refs: Any) -> None:
            kernel(active, jax.tree.unflatten(structure, refs[:n]), jax.tree.unflatten(out_structure, refs[n:]))

        written = sum(math.prod(x.array.shape) * x.array.dtype.itemsize for x in results)
        read = sum(x.nbytes for x in jax.tree.leaves(operands.rows))
        read += self.shape[0] * sum(x.nbytes for x in jax.tree.leaves(operands.parameters))
        inner = sum(x.shape[1] for x in jax.tree.leaves(operands.rows))
        found = pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=self.shape,
                in_specs=jax.tree.leaves(self._specs(operands)),
                out_specs=[x.piece for x in results],
            ),
            out_shape=[x.array for x in results],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=needed("chip", self.op._chip)[0]
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * self.tokens * self.columns * inner,
                bytes_accessed=read + written,
                transcendentals=self.tokens * self.columns,
            ),
            interpret=self.op._interpreted,
            name=name,
        )(*map(self._given, (self.active, *arrays)))
        return jax.tree.unflatten(out_structure, [vary(x, self.axes) for x in found])
