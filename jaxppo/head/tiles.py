"""How tokens and columns are cut: by device, sizes and the memory allowed. Numbers do not depend on it, time does.

CPUs want tiles that fit their caches. Accelerators want wide ones: an f32 accumulator that is read and written for
each tile hides behind its product where the tile has about 4 * peak flops / memory bandwidth columns or tokens, 664 on
a v5p, 1180 on an H100, 2240 on a v6e, and twice that where the update is an op of its own. So there a chunk of tokens
meets the device's whole part of the vocabulary at once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxppo.head.tokens import even_block
from jaxppo.sharding import ParallelMesh, ShardAxes, varying, wider_dtype

if TYPE_CHECKING:
    from jaxppo.head.schedules.needs import NeedsGrad
    from jaxppo.head.schedules.walk import Inputs, Rule

GIB, MIB = 2**30, 2**20


@dataclasses.dataclass(frozen=True)
class Profile:
    """What is good for a kind of device.

    Args:
      whole: chunks meet the whole part of the vocabulary.
      one_pass: bytes of the one pass by default.
      tile: bytes of a tile of two passes, f32 logits and their gradient; on accelerators of a forward's logits.
      chunk: tokens of a tile; those of a forward and of chunks of the one pass on accelerators.
      least: tokens of a group of the one pass: with fewer, reading and writing dkernel costs more than two passes do.
      group: the most tokens of a group of the one pass that follows no mask; groups of `masked` tokens are as fast
        where there are several.
      columns: of a tile of the second pass; on CPUs of the one pass.
      wide: tokens of a tile of the second pass.
      masked: tokens of a chunk that follows a mask.
      masked_columns: of a tile of the second pass that follows a mask.
      deterministic: tokens of every chunk.
      shared_sums: devices share a sum of a bf16 gradient out along H. XLA for GPUs would transpose it for that, and XLA
        for CPUs sends f32 all the same.
    """

    whole: bool
    one_pass: int
    tile: int
    chunk: int
    least: int
    group: int
    columns: int
    wide: int
    masked: int
    masked_columns: int
    deterministic: int
    shared_sums: bool


CPU = Profile(
    whole=False,
    one_pass=48 * MIB,
    tile=8 * MIB,
    chunk=1024,
    least=128,
    group=1024,
    columns=512,
    wide=2048,
    masked=512,
    masked_columns=512,
    deterministic=256,
    shared_sums=False,
)


def _accelerator(
    gib: int, columns: int, masked_columns: int, least: int = 512, tile: int = 150, wide: int = 8192, tpu: bool = True
) -> Profile:
    """By default a sixteenth of the device's memory.

    A tile of 75 MiB stays in the VMEM of a v5e or v6e. On GPUs the second pass takes 2048 tokens at a time, to stay
    below 0.25 GiB where a head is Qwen3-8B's; nothing was timed there.
    """
    return Profile(
        whole=True,
        one_pass=gib * GIB // 16,
        tile=tile * MIB,
        chunk=1024,
        least=least,
        group=8192,
        columns=columns,
        wide=wide,
        masked=2048,
        masked_columns=masked_columns,
        deterministic=1024,
        shared_sums=tpu,
    )


def _gpu(gib: int) -> Profile:
    return _accelerator(gib, 2048, 2048, wide=2048, tpu=False)


# by what a device's kind contains, since described devices do not report their memory; the last is for all others
PROFILES = {
    "cpu": CPU,
    "TPU v4": _accelerator(32, 1536, 2688),
    "TPU v5 lite": _accelerator(16, 2048, 2048, tile=75),
    "TPU v5": _accelerator(95, 1536, 2688),
    "TPU v6 lite": _accelerator(32, 3584, 3584, 1024, 75),
    "TPU7x": _accelerator(96, 2048, 2048),
    "H100": _gpu(80),
    "H200": _gpu(141),
    "B200": _gpu(180),
    "": _accelerator(16, 2048, 2048, tpu=False),
}


def device_kind(parallel: ParallelMesh | ShardAxes | None, x: Any) -> str:
    """The kind of the mesh's devices; inside a `shard_map` its mesh knows them, else an array that is on some."""
    if isinstance(parallel, ParallelMesh):
        return str(parallel.mesh.devices.flat[0].device_kind)
    for mesh in (jax.sharding.get_abstract_mesh(), getattr(jax.typeof(x).sharding, "mesh", None)):
        device = getattr(mesh, "abstract_device", None)  # has no platform in JAX 0.10.0
        if device is not None:
            return str(device.device_kind)
    return str(jax.devices()[0].device_kind)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What tiles are chosen by, beside sizes.

    Args:
      device: its kind.
      memory: bytes a device may spend beside its results; None for its default.
      follow_mask: the work follows the tokens that count.
      deterministic: tiles do not depend on the number of tokens.
      keep: logits may wait in the memory of a gradient from forward to backward.
      heads: how many are walked together.
    """

    device: str
    memory: int | None
    follow_mask: bool
    deterministic: bool
    keep: bool
    heads: int

    @property
    def profile(self) -> Profile:
        return next(profile for kind, profile in PROFILES.items() if kind in self.device)

    @property
    def least_tokens(self) -> int:
        """Fewer are padded: to two chunks, since a loop of one turn would be compiled as another program."""
        return 2 * self.profile.deterministic if self.deterministic else 0


@dataclasses.dataclass(frozen=True)
class Cut:
    """Tokens and columns of a tile."""

    tokens: int
    columns: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens x {self.columns} columns"


@dataclasses.dataclass(frozen=True)
class Work:
    """What a device has to do; sizes in tokens, features and columns, and bytes.

    Args:
      tokens: N.
      features: H.
      columns: of the vocabulary, of the device's part.
      itemsize: of what products take.
      gathered: bytes of a kernel gathered over FSDP axes, 0 where there is none to gather.
      accumulator: bytes of an f32 gradient of the kernel beside the result, 0 where the result is one or none is asked.
      masked: it follows the tokens that count.
      nucleus: log-probs are renormalised over a nucleus.
      frozen: no gradient of a parameter is asked for.
      logits: a forward leaves them in memory.
    """

    tokens: int
    features: int
    columns: int
    itemsize: int
    gathered: int
    accumulator: int
    masked: bool
    nucleus: bool
    frozen: bool
    logits: bool

    @classmethod
    def of(cls, rule: Rule, inputs: Inputs, needs: NeedsGrad | None) -> Work:
        kernel, columns = inputs.parameters.kernel, rule.columns
        v_dim = columns.v_dim
        whole = kernel.shape[1 - v_dim] * columns.axes.size(columns.h_names), kernel.shape[v_dim] * columns.pieces
        dtype = wider_dtype(inputs.features.hidden.dtype, kernel.dtype)
        axes = frozenset().union(*map(varying, jax.tree.leaves(inputs)), columns.axes.tensor)
        in_result = kernel.dtype == jnp.float32 and axes <= varying(kernel) and not columns.gathers
        frozen = needs is not None and not any(needs.parameters)
        return cls(
            tokens=inputs.features.hidden.shape[0] * rule.parts,
            features=whole[0],
            columns=columns.window(whole[1]),
            itemsize=dtype.itemsize,
            gathered=whole[0] * whole[1] * kernel.dtype.itemsize if columns.gathers else 0,
            accumulator=0 if in_result or frozen else 4 * whole[0] * whole[1],
            masked=inputs.where is not None and rule.budget.follow_mask,
            nucleus=inputs.nucleus_ids is not None,
            frozen=frozen,
            logits=rule.op.leaves_logits,
        )


@dataclasses.dataclass(frozen=True)
class OnePassTiles:
    """Tiles of the one pass.

    Args:
      group: tokens whose gradients of the logits one product takes, and columns of a tile.
      chunks: in how many parts a group's logits are computed.
    """

    group: Cut
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.group}" + (f" in {self.chunks} chunks" if self.chunks > 1 else "")


def one_pass(budget: Budget, work: Work) -> OnePassTiles | None:
    """The tiles of the one pass, None where it does not fit the memory."""
    memory = budget.memory or budget.profile.one_pass
    return (_chunks if budget.profile.whole else _small_tiles)(budget, work, memory)


def _small_tiles(budget: Budget, work: Work, memory: int) -> OnePassTiles | None:
    N, H, V = work.tokens, work.features, work.columns
    B = min(V, budget.profile.columns)
    fixed = 5 * 4 * H * B + work.accumulator + work.gathered
    most = (memory - fixed) // ((5 if work.nucleus else 4) * V + 8 * B + 12 * H)
    if budget.deterministic:  # a forward alone is another program, and of several blocks to be merged it shows
        return None
    return OnePassTiles(Cut(even_block(N, most), B)) if most >= min(N, budget.profile.least) else None


def _chunks(budget: Budget, work: Work, memory: int) -> OnePassTiles | None:
    """As few groups as fit, since each reads and writes dkernel once.

    Where all tokens can be one group its product is dkernel; its logits are computed in chunks of `profile.chunk`.
    """
    N, H, V, profile = work.tokens, work.features, work.columns, budget.profile
    block = 8 * H * 4096  # of a sum of dkernel over devices

    def fits(group: int, chunks: int) -> bool:
        rows = group * H * work.itemsize
        accumulator = work.accumulator if group < N or work.gathered else min(work.accumulator, block)
        logits = group // chunks * V * (5 if work.nucleus else 4) + group * V * work.itemsize
        return work.gathered + rows + accumulator + logits <= memory

    at_once = not work.masked and profile.group >= N
    most = profile.deterministic if budget.deterministic else N if at_once else min(N, profile.masked)
    for group in (most, *(2**k for k in range(20, 6, -1) if profile.least <= 2**k < most)):
        chunks = group // profile.chunk if at_once and group % profile.chunk == 0 else 1
        if fits(group, chunks) and not (budget.deterministic and group < most):
            return OnePassTiles(Cut(group, V), chunks)
    return None


@dataclasses.dataclass(frozen=True)
class TwoPassTiles:
    """Tiles of two passes.

    Args:
      forward: of the statistics.
      backward: of the gradients.
      forward_vocabulary_first: the loop over the vocabulary is the outer one.
      vocabulary_first: the same of the gradients.
      kept: tokens whose logits wait for the backward, whole blocks of them or the start of the only one.
    """

    forward: Cut
    backward: OnePassTiles
    forward_vocabulary_first: bool
    vocabulary_first: bool
    kept: int = 0


def two_passes(rule: Rule, inputs: Inputs, needs: NeedsGrad | None) -> TwoPassTiles:
    """The tiles of two passes.

    Raises:
      ValueError: memory for no tile.
    """
    budget, work = rule.budget, Work.of(rule, inputs, needs)
    return _wide_two_passes(budget, work) if budget.profile.whole else _small_two_passes(budget, work, needs)


def _shrunk(budget: Budget, work: Work, cut: Cut, fixed: int) -> Cut:
    """The cut made smaller until it fits the memory, where there is one."""
    least = Cut(min(cut.tokens, 8), min(cut.columns, 128))

    def size(cut: Cut) -> int:
        tile = cut.tokens * cut.columns * (4 + work.itemsize) * budget.heads
        return fixed + tile + cut.tokens * work.features * work.itemsize + 8 * work.features * cut.columns

    if budget.memory is not None and size(least) > budget.memory:
        raise ValueError(f"memory: got {budget.memory} bytes, expected at least {size(least)} for this head and batch")
    while budget.memory is not None and size(cut) > budget.memory:
        wide = cut.columns > least.columns and (cut.columns > cut.tokens or cut.tokens <= least.tokens)
        cut = (
            Cut(cut.tokens, max(least.columns, cut.columns // 2)) if wide else Cut(max(8, cut.tokens // 2), cut.columns)
        )
    return cut


def _small_two_passes(budget: Budget, work: Work, needs: NeedsGrad | None) -> TwoPassTiles:
    """Few columns cost reads of the accumulated dhidden, few tokens those of an accumulated block of dkernel."""
    N, H, profile = work.tokens, work.features, budget.profile
    tile = profile.tile // budget.heads
    most = profile.chunk if work.masked or profile.wide < N else N
    if work.masked:  # blocks of tokens are what the work can stop after, so there are at least four
        most = min(most, max(128, -(-N // 4)))
    keeps = budget.keep and needs is not None and bool(needs.parameters.kernel) and not work.accumulator and H >= 128
    most = min(most, H) if keeps and (work.masked or most < N) else most
    tokens = even_block(N, max(1, min(most, tile // (8 * profile.columns))))
    columns = min(4 * profile.columns, max(profile.columns, tile // (8 * tokens) // 128 * 128))
    cut = _shrunk(budget, work, Cut(tokens, columns), 4 * N * H)
    forward = Cut(profile.deterministic, profile.columns) if budget.deterministic else cut
    kept = min(H, N) if cut.tokens == N else min(H, N) // cut.tokens * cut.tokens
    kept = kept if keeps and not budget.deterministic else 0
    return TwoPassTiles(forward, OnePassTiles(cut), True, bool(work.gathered) or not work.frozen, kept)


def _wide_two_passes(budget: Budget, work: Work) -> TwoPassTiles:
    N, H, V, profile = work.tokens, work.features, work.columns, budget.profile
    tokens = profile.deterministic if budget.deterministic else min(N, profile.chunk)
    forward = Cut(tokens, min(V, profile.tile // (4 * profile.chunk * budget.heads)) if work.logits else V)
    if not budget.deterministic and work.logits:
        forward = _shrunk(budget, work, forward, 0)
    fits = one_pass(budget, work) if budget.memory is not None else None
    if fits is not None or (work.frozen and not work.gathered):
        return TwoPassTiles(forward, fits or OnePassTiles(forward), False, False)
    most = profile.masked if work.masked else profile.wide
    columns = profile.masked_columns if work.masked else profile.columns
    cut = _shrunk(budget, work, Cut(min(N, most), min(V, columns)), 4 * N * H)
    # a kernel that is gathered for the forward at once beside its tile, or else a block at a time
    by_block = bool(work.gathered) and work.gathered + profile.tile > (budget.memory or profile.one_pass)
    return TwoPassTiles(cut if by_block else forward, OnePassTiles(cut), by_block, True)
