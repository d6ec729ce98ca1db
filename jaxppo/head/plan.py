"""Plans the tiles of a call by device, sizes and memory. A plan changes the time, and the results by rounding only.

CPUs are fast with tiles that fit their caches. Accelerators need wide tiles: each tile reads and writes an f32
accumulator, and the product hides that if the tile has about 4 * peak flops / memory bandwidth columns or tokens: 664
on a v5p, 1180 on an H100, 2240 on a v6e, and twice that if the update is an op of its own. So on accelerators a chunk
of tokens is computed in all columns of the device at once, and dlogits wait for one product of many chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.token_blocks import even_size
from jaxppo.head.types import Cut, HeadCall, Inputs, NeedsGrad, Plan, Profile, Sizes
from jaxppo.sharding import ParallelMesh, ShardAxes, known_device, varying, wider_dtype

GIB, MIB = 2**30, 2**20


CPU = Profile(
    whole=False,
    one_pass=48 * MIB,
    tile=4 * MIB,
    tokens=1024,
    least=128,
    group=0,
    chunk=512,
    columns=512,
    wide=2048,
    masked_columns=2048,
    deterministic=256,
    rings=False,
    fused_features=0,
    few_logits=0,
    references=0,
    fused_tokens=0,
    columns_grow=False,
    gathers_columns=False,
)


def _accelerator(
    kind: str,
    columns: int,
    masked_columns: int,
    least: int = 512,
    tile: int = 150,
    fused_tokens: int = 1024,
    tpu: bool = True,
) -> Profile:
    """The profile of an accelerator. One pass may take an eighth of its memory; an unknown one counts as 16 GiB.

    A tile of 75 MiB stays in the VMEM of a v5e or v6e.
    """
    device = known_device(kind)
    return Profile(
        whole=True,
        one_pass=(16 * GIB if device is None else device.memory) // 8,
        tile=tile * MIB,
        tokens=1024,
        least=least,
        group=8192,
        chunk=2048,
        columns=columns,
        wide=8192,
        masked_columns=masked_columns,
        deterministic=1024,
        rings=tpu,
        fused_features=3072 if tpu else 0,
        few_logits=384 * MIB if tpu else 2**40,  # one chunk each on GPUs, where XLA copies what a branch adds to
        references=(150 if tpu else tile) * MIB,
        fused_tokens=fused_tokens if tpu else 0,
        columns_grow=not tpu,
        gathers_columns=not tpu,
    )


def _gpu(kind: str) -> Profile:
    """The profile of a GPU, by how XLA compiles for it; nothing was timed there.

    XLA copies a slice of columns before it multiplies them. So a tile of the forward has few tokens and all columns of
    a vocabulary up to 155k. The accumulators of the second pass lie in memory, so its tiles are as large as 0.25 GiB
    allow for Qwen3-8B's head.
    """
    return dataclasses.replace(_accelerator(kind, 1152, 2048, tile=304, tpu=False), tokens=512)


# A key is a part of a device's kind, since described devices do not report their memory. The last key fits them all.
PROFILES = {
    "cpu": CPU,
    "TPU v4": _accelerator("TPU v4", 1536, 2688),
    "TPU v5 lite": _accelerator("TPU v5 lite", 2048, 2048, tile=75),
    "TPU v5": _accelerator("TPU v5", 1536, 2688),
    "TPU v6 lite": _accelerator("TPU v6 lite", 3584, 3584, 1024, 75, 2048),
    "TPU7x": _accelerator("TPU7x", 2048, 2048),
    "H100": _gpu("H100"),
    "H200": _gpu("H200"),
    "B200": _gpu("B200"),
    "": _gpu(""),
}


def sizes_of(call: HeadCall, inputs: Inputs) -> Sizes:
    """The sizes of a device's arrays."""
    kernel, hidden, tensor = inputs.parameters.kernel, inputs.features.hidden, call.axes.tensor
    gathered_v = tuple(n for n in call.v_names if n not in tensor)
    pieces = math.prod(map(lax.axis_size, gathered_v))
    whole = kernel.shape[1 - call.v_dim] * call.axes.size(call.h_names), kernel.shape[call.v_dim] * pieces
    itemsize = wider_dtype(hidden.dtype, kernel.dtype).itemsize
    gathers = bool(call.h_names or gathered_v)
    axes = frozenset().union(*map(varying, jax.tree.leaves(inputs)), tensor)
    in_result = kernel.dtype == jnp.float32 and axes <= varying(kernel) and not gathers
    tokens = inputs.targets.shape[0] if inputs.targets is not None else math.prod(hidden.shape[:2])
    return Sizes(
        tokens=tokens,
        features=whole[0],
        columns=window(call, whole[1]),
        itemsize=itemsize,
        rows=tokens * whole[0] * hidden.dtype.itemsize if call.sequence_parallel else 0,
        gathered=whole[0] * whole[1] * kernel.dtype.itemsize if gathers else 0,
        accumulator=0 if in_result else 4 * whole[0] * whole[1],
        direct=not gathered_v and window(call, whole[1]) == whole[1],
        masked=inputs.counts is not None and call.follow_mask,
        of_logit=4
        + (0 if inputs.nucleus_ids is None else 1)
        + (0 if inputs.ids is None else 4)
        + (8 if call.asked.top_k else 0),
        references=references(call, inputs),
    )


def references(call: HeadCall, inputs: Inputs) -> bool:
    """Whether sums of exponentials are relative to the target's logit, which then takes the place of the maximum.

    The target's logit is known before the product: one row of a kernel `[V, H]` gives it. With `[H, V]` a column has to
    be gathered, which is slow on TPUs. The operands must be bf16, since it costs accuracy. For ids and the likeliest
    ids, logits are read from memory, and then maxima can be read there too.
    """
    kernel, hidden = inputs.parameters.kernel, inputs.features.hidden
    chosen = call.profile.references > 0 and not call.deterministic
    asked = inputs.targets is not None and inputs.nucleus_ids is None and inputs.ids is None and not call.asked.top_k
    gathered = call.layout == "vh" or call.profile.gathers_columns
    return chosen and asked and gathered and hidden.dtype == kernel.dtype == jnp.bfloat16


def window(call: HeadCall, columns: int) -> int:
    """The number of columns that a device works on, out of the `columns` that it holds.

    If all devices of the tensor axis hold the same columns, each works on its share: JAX cannot shard a vocabulary that
    the tensor axis does not divide.
    """
    shared = call.axes.tensor and not set(call.v_names) & set(call.axes.tensor)
    return -(-columns // call.axes.size(call.axes.tensor)) if shared else columns


EIGHTHS = 8  # equal parts of the vocabulary; where a device's columns end, a part ends too, if tp divides 8


def eighths(call: HeadCall, columns: int) -> int:
    """How many of the vocabulary's eight parts (`EIGHTHS`) a device works on, out of the `columns` that it holds.

    In a deterministic call each part is summed apart, in tiles of the same shapes on any number of devices. The number
    is 0 if parts do not end where devices' columns end, and if the call is not deterministic. A device then sums all
    its columns together.
    """
    shards, shared = call.axes.size(call.axes.tensor), window(call, columns) < columns
    equal = not EIGHTHS % shards and not columns * (1 if shared else shards) % EIGHTHS
    return EIGHTHS // shards if call.deterministic and equal and set(call.v_names) <= set(call.axes.tensor) else 0


def plan_of(call: HeadCall, inputs: Inputs, *, needs: NeedsGrad | None = None, token_loss: bool = False) -> Plan:
    """The schedule and the tiles of a call on a device.

    Args:
      call: the static part of the call.
      inputs: the device's arrays.
      needs: the gradients that are asked for; None for a forward alone.
      token_loss: a token's loss is known once its statistics are, so one pass is taken if the memory allows it.

    Raises:
      ValueError: no tile fits the memory.
    """
    return _plan(call, sizes_of(call, inputs), needs is None or not any(needs.parameters), token_loss)


@functools.cache
def _plan(call: HeadCall, sizes: Sizes, frozen: bool, token_loss: bool) -> Plan:
    """`plan_of`; with `frozen`, no gradient of a parameter is asked for."""
    if token_loss and (found := _one_pass(call, sizes)) is not None:
        return dataclasses.replace(found, passes=1)
    return _two_passes(call, sizes, frozen)


def _one_pass(call: HeadCall, sizes: Sizes) -> Plan | None:
    """A plan of one pass, which takes three products; None if it does not fit the memory."""
    memory = call.memory or call.profile.one_pass
    if not call.profile.whole:
        return _small_one_pass(call, sizes, memory)
    # Products cannot compute dlogits with ids and nuclei, whose places are in whole blocks. Products compute
    # some dlogits several times. With a soft-cap that costs
    # too much, and if H is sharded, the product for each share of the features needs all dlogits.
    may_fuse = call.profile.fused_features > 0 and sizes.of_logit == 4
    return _late(call, sizes, memory, may_fuse and call.transform.softcap is None and not call.h_names)


def _small_one_pass(call: HeadCall, sizes: Sizes, memory: int) -> Plan | None:
    if call.deterministic:  # a forward alone is another program, which merges several blocks and so has other bits
        return None
    N, H, V, profile = sizes.tokens, sizes.features, sizes.columns, call.profile
    B = min(V, profile.columns)
    fixed = 5 * 4 * H * B + sizes.accumulator + sizes.gathered + sizes.rows
    most = (memory - fixed) // (sizes.of_logit * V + 8 * B + 12 * H)
    if most < min(N, profile.least):
        return None
    cut = Cut(even_size(N, most), B)
    return Plan(cut, False, "by_tile", cut)


def _late(call: HeadCall, sizes: Sizes, memory: int, may_fuse: bool) -> Plan | None:
    """The largest group of tokens that fits the memory, in the largest chunks that fit.

    A single chunk of all tokens takes twice the memory of smaller chunks. It is tried if dlogits should rather be
    computed within products.
    """
    N, H, V, profile = sizes.tokens, sizes.features, sizes.columns, call.profile
    fixed = sizes.gathered + sizes.rows

    most = N if profile.group >= N else profile.group // 2  # several groups need an accumulator too
    # an array of dlogits costs much time compared with products of few features; stored logits may take little memory
    few = 4 * most * V <= profile.few_logits
    little = profile.fused_features >= H or few
    rather = may_fuse and not sizes.masked and (little or (call.memory is not None and sizes.references))

    def fuses(group: int, chunk: int) -> bool:
        return group == chunk and may_fuse and (rather or group >= N)

    def fits(group: int, chunk: int) -> bool:
        one, fused = group >= N and sizes.direct, fuses(group, chunk)
        logits = chunk * V * sizes.of_logit
        kept = fixed + 2 * group * H * sizes.itemsize + (logits if fused else group * V * sizes.itemsize)
        kept += 0 if one else sizes.accumulator
        products = min(sizes.accumulator, 8 * H * 4096) if one else 4 * group * H
        products += 4 * group * H if one and not profile.rings else 0  # rings hold it in pieces
        return kept + (products if fused else max(logits, products)) <= memory

    powers = [2**k for k in range(20, 6, -1)]
    chunk = profile.chunk if sizes.masked else profile.tokens
    chunks = [min(chunk, N), *(c for c in powers if min(profile.least, 512) <= c < chunk)]
    groups = [g for g in sorted({most, chunk, *powers}, reverse=True) if min(chunk, profile.least) <= g <= most]
    # a group of one chunk adds faster to a small accumulator than one that follows the mask in quarters
    alone = sizes.masked and few and not (sizes.direct and most == N)
    if call.deterministic:
        cuts = [(profile.deterministic, profile.deterministic)]
    else:
        cuts = [(N, N)] if rather and profile.group >= N else []
        cuts += [(g, c) for g in groups for c in ([g, *chunks] if rather else chunks) if c <= g]
        cuts = [(g, c) for g, c in cuts if g == c] if alone else cuts
    for group, chunk in cuts:
        if not call.deterministic:
            group = _equal(call, N, group)
            chunk = _equal(call, group, chunk)
        group = chunk * -(-group // chunk)
        if fits(group, chunk):
            return Plan(Cut(chunk, V), False, "late", Cut(chunk, V), group, fuses(group, chunk), sizes.direct)
    return None


def _equal(call: HeadCall, count: int, most: int) -> int:
    """The size of equal blocks of at most `most` tokens; on accelerators a multiple of 256, unless one block is enough.

    A product of 2000 tokens takes longer than one of 2048.
    """
    if not call.profile.whole or count <= most:
        return even_size(count, most)
    blocks = -(-count // most)
    return min(most, -(-count // (256 * blocks)) * 256)


def _shrunk(call: HeadCall, sizes: Sizes, cut: Cut, fixed: int) -> Cut:
    """Makes the cut smaller until it fits the memory, if one is given, and its blocks of tokens equal."""
    least = Cut(min(cut.tokens, 8), min(cut.columns, 128))

    def size(cut: Cut) -> int:
        tile = cut.tokens * cut.columns * (sizes.of_logit + sizes.itemsize) * call.heads
        return fixed + tile + cut.tokens * sizes.features * sizes.itemsize + 8 * sizes.features * cut.columns

    if call.memory is not None and size(least) > call.memory:
        raise ValueError(f"memory: got {call.memory} bytes, expected at least {size(least)} for this head and batch")
    while call.memory is not None and size(cut) > call.memory:
        if cut.columns > least.columns and (cut.columns > cut.tokens or cut.tokens <= least.tokens):
            cut = Cut(cut.tokens, max(least.columns, cut.columns // 2))
        else:
            cut = Cut(max(8, cut.tokens // 2), cut.columns)
    return Cut(_equal(call, sizes.tokens, cut.tokens), cut.columns)


def _fused(call: HeadCall, sizes: Sizes) -> Cut | None:
    """The tile, with all columns, of a forward whose sums are a part of the product; None if columns have to be cut.

    XLA would copy a block of columns for every tile of tokens, because some tokens may be computed again. So if memory
    is short, tokens are cut first. They are not cut to 128, which would take twice as long.
    """
    V, profile = sizes.columns, call.profile
    if not sizes.references or not profile.fused_tokens:
        return None
    # with a mask a tile is smaller, so that few tokens behind the last one that counts are computed in vain
    tokens = profile.tokens if sizes.masked else profile.fused_tokens
    maximum = "accuracy" in call.asked.logit_stats  # it needs the logits in memory
    most = min(call.memory or math.inf, profile.references if maximum else math.inf)
    while tokens > 256 and tokens * V * sizes.of_logit > most:
        tokens //= 2
    fits = call.memory is None or tokens * V * sizes.of_logit <= call.memory
    return Cut(_equal(call, sizes.tokens, tokens), V) if fits else None


def _two_passes(call: HeadCall, sizes: Sizes, frozen: bool) -> Plan:
    """Fewer columns mean more reads of the accumulated dhidden. Fewer tokens mean more reads of a block of dkernel."""
    N, H, V, profile = sizes.tokens, sizes.features, sizes.columns, call.profile
    # The work can stop only after a block of tokens, so with a mask CPUs have at least four. On accelerators smaller
    # products are slow: on a v5p, 2048 tokens in four blocks take 1.6 times the time of one block.
    most = min(N, max(profile.least, -(-N // 4))) if sizes.masked and not profile.whole else N
    tokens = profile.deterministic if call.deterministic else min(most, profile.tokens)
    tile = profile.references if sizes.references else profile.tile
    by_tile = Cut(tokens, min(V, tile // (4 * tokens * call.heads)))
    if not call.deterministic:
        by_tile = _shrunk(call, sizes, by_tile, 0)
    forward = _fused(call, sizes) or by_tile
    if call.memory is not None and profile.whole:
        fits = _late(call, sizes, call.memory, may_fuse=False)
        if fits is not None:
            return dataclasses.replace(fits, forward=forward)
    if frozen and not sizes.gathered:
        return Plan(forward, False, "by_tile", by_tile)
    columns = profile.masked_columns if sizes.masked else profile.columns
    columns *= max(1, N // profile.wide) if profile.columns_grow else 1
    cut = Cut(min(most, profile.chunk if sizes.masked else profile.wide), min(V, columns))
    cut = _shrunk(call, sizes, cut, 4 * N * H + sizes.rows)
    # for the forward a kernel is gathered at once if it fits beside the tile, or else a block at a time
    by_block = bool(sizes.gathered) and sizes.gathered + profile.tile > (call.memory or profile.one_pass)
    return Plan(cut if by_block and not call.deterministic else forward, by_block, "by_vocabulary", cut)


def device_kind(parallel: ParallelMesh | ShardAxes | None, x: Any) -> str:
    """The kind of the mesh's devices. Inside a `shard_map` its mesh tells, else the devices on which x lies."""
    if isinstance(parallel, ParallelMesh):
        return str(parallel.mesh.devices.flat[0].device_kind)
    for mesh in (jax.sharding.get_abstract_mesh(), getattr(jax.typeof(x).sharding, "mesh", None)):
        device = getattr(mesh, "abstract_device", None)  # has no platform in JAX 0.10.0
        if device is not None:
            return str(device.device_kind)
    return str(jax.devices()[0].device_kind)
