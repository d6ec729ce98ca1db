"""The sizes of tiles, from the memory that a call may take. They change the time, and the results by rounding only.

An f32 accumulator is read and written for each tile, and the product hides that if the tile has about 4 * peak flops /
memory bandwidth columns or tokens: 664 on a v5p, 1180 on an H100, 2240 on a v6e. CPUs want tiles that fit their caches.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import jax.numpy as jnp

from jaxppo.head.border import Local, axes_of, parts_of
from jaxppo.head.call import HeadCall
from jaxppo.sharding import varying, wider_dtype

FEW = 2048  # the most features with which an array of dlogits takes longer than to compute them in both products


class Plan(NamedTuple):
    """The tiles of one walk."""

    chunk: int  # tokens of a tile
    group: int  # tokens whose dlogits fill one array in one pass, a multiple of the chunk; else the chunk
    columns: int  # of a tile
    by_block: bool = False  # a kernel is gathered a block of columns at a time
    references: bool = False  # see `references`
    one_pass: bool = False
    ring_blocks: int = 2  # in which large sums that are not fused go around rings, one after the other
    fused: bool = False  # f32 logits of a group stay, and products compute the dlogits that they multiply

    def __str__(self) -> str:
        products = f", products of {self.group} tokens" if self.group > self.chunk else ""
        return f"{self.chunk} tokens x {self.columns} columns{products}"


class Sizes(NamedTuple):
    """The sizes of a device's arrays, in numbers and in bytes."""

    N: int
    H: int
    V: int  # columns on which the device works
    held: int  # columns that it holds or gathers
    item: int  # bytes of a number that is multiplied
    logit: int  # bytes of an f32 logit, and of what lies beside it
    gathered: int  # bytes of the gathered kernel
    rows: int  # bytes of gathered hidden states
    total: int  # bytes of an f32 sum of dkernel, 0 if it is the result itself
    masked: bool
    most: int  # tokens of a tile: with a mask fewer, since the work can stop only after a tile

    @classmethod
    def of(cls, call: HeadCall, given: Local) -> Sizes:
        """Beside a logit lie a nucleus, the gradients of ids, and the likeliest ids with their places."""
        kernel, hidden, tokens = given.parameters[0], given.features[0], given.tokens
        N = hidden.size // hidden.shape[-1] * (call.axes.size(call.axes.tensor) if call.sequence_parallel else 1)
        held, H = kernel.shape[call.v_dim] * call.axes.size(call.gathered_v), hidden.shape[-1]
        logit = 4 + (tokens.nucleus_ids is not None) + 4 * (tokens.ids is not None) + 8 * (call.asked.top_k > 0)
        gathered = kernel.dtype.itemsize * H * held if call.h_names or call.gathered_v else 0
        rows = hidden.dtype.itemsize * N * H if call.sequence_parallel else 0
        item = wider_dtype(hidden.dtype, kernel.dtype).itemsize
        is_result = kernel.dtype == jnp.float32 and axes_of(call, given) <= varying(kernel) and not gathered
        total = 0 if is_result else 4 * H * held
        masked, most = given.counts is not None and call.follow_mask, call.profile.group
        if masked:  # the work stops at most so many tokens late: 2048, or on CPUs about a quarter
            most = most // 4 if call.profile.whole else min(most, max(most // 8, -(-N // 4)))
        V = -(-held // call.axes.size(call.axes.tensor)) if call.shared else held
        return cls(N, H, V, held, item, logit * call.heads, gathered, rows, total, masked, most)


def references(call: HeadCall, given: Local) -> bool:
    """Whether sums are relative to the target's logit, which is known before the product: sums become part of it.

    It costs accuracy, so operands must be bf16. Ids and nuclei read the logits again anyway, and an H100 does it faster
    than it gathers the targets' logits.
    """
    tokens, dtypes = given.tokens, {given.features[0].dtype, given.parameters[0].dtype}
    alone = tokens.targets is not None and tokens.nucleus_ids is None and tokens.ids is None and not call.asked.top_k
    return bool(call.profile.rings) and alone and not call.deterministic and dtypes == {jnp.dtype(jnp.bfloat16)}


def plan_of_sweep(call: HeadCall, given: Local) -> Plan:
    """The tiles in which statistics are found. Raises if none fits the memory."""
    s, profile, memory = Sizes.of(call, given), call.profile, call.memory or 2**62
    if call.deterministic:  # every tile has one shape on any mesh and in any batch
        columns = s.V // (parts_of(call, s.held) or 1)
        _check(call, s.logit * call.fixed_chunk * columns)
        return Plan(call.fixed_chunk, call.fixed_chunk, columns)
    _check(call, s.logit * min(s.N, 8) * min(s.V, 128))
    by_block = s.gathered > 0 and s.gathered + profile.tile > (call.memory or profile.one_pass)
    refer = references(call, given) and not by_block
    if profile.whole and by_block:
        chunk, columns = s.most, min(s.V, profile.columns)
    elif profile.whole:
        # XLA fuses sums relative to a reference into their product. Logits are not in memory then, unless a maximum is
        # asked for. With a mask a tile is smaller, so that few tokens behind the last one that counts are computed.
        chunk = min(1024, profile.tokens) if s.masked or not refer else profile.tokens
        room = profile.tile * (2 if "accuracy" in call.asked.logit_stats else 2**40) if refer else profile.tile
        while chunk > 256 and s.logit * chunk * s.V > min(room, memory):
            chunk //= 2
        columns = s.V
        if s.logit * chunk * columns > memory:  # a block of columns is copied for each tile
            chunk = min(1024, profile.tokens)
            columns = max(128, memory // (s.logit * chunk + 2 * s.item * s.H) // 128 * 128)
    else:
        chunk = min(profile.tokens, profile.tile // (s.logit * 512), s.most)
        # As in the second pass: XLA for CPUs adds the products of tiles of other widths in another order, and then the
        # gradient of a probability near 1 would be that difference.
        columns = even_columns(s.V, profile.columns)
    while s.logit * min(chunk, s.N) * columns > memory:
        if columns > 128:
            columns = max(128, columns // 2)
        else:
            chunk //= 2
    chunk = even(s.N, max(8, chunk), profile.whole)
    return Plan(chunk, chunk, columns, by_block, refer)


def plan_of_second(call: HeadCall, given: Local) -> Plan:
    """The tiles of the second of two passes: a block of columns by many tokens. Raises if none fits the memory."""
    s, profile, memory = Sizes.of(call, given), call.profile, call.memory or 2**62
    columns = min(s.V, profile.columns)
    if call.deterministic:
        columns = min(columns, s.V // (parts_of(call, s.held) or 1))
        _check(call, (s.logit + s.item) * call.fixed_chunk * columns)
        return Plan(call.fixed_chunk, call.fixed_chunk, columns, by_block=True)
    if profile.whole and s.masked:  # fewer tokens want more columns than 2240, see above; XLA for GPUs copies these
        columns = min(s.V, max(columns, 3072) if profile.rings else 2 * columns)
    chunk = even(s.N, s.most, profile.whole)

    def size(chunk: int, columns: int) -> int:  # of a tile, a block's sum and a term of it, f32 gradients of features
        return chunk * columns * (s.logit + s.item) + 8 * s.H * columns + 4 * s.N * s.H + s.rows

    _check(call, size(min(chunk, 8), min(s.V, 128)))
    while size(chunk, columns) > memory:
        if columns > 128 and (columns > chunk or chunk <= 8):
            columns = max(128, columns // 2)
        else:
            chunk = max(8, chunk // 2)
    chunk, columns = even(s.N, chunk, profile.whole), even_columns(s.V, columns)
    return Plan(chunk, chunk, columns, by_block=True, ring_blocks=4)  # of dhidden: no product hides its messages


def plan_of_one_pass(call: HeadCall, given: Local) -> Plan | None:
    """The largest groups and chunks that fit the memory; None if none fit."""
    if call.deterministic:
        return None
    s, profile = Sizes.of(call, given), call.profile
    memory = (call.memory or profile.one_pass) - s.gathered - s.rows
    chunks = (2048, 1024, 512, 256, 128)[0 if s.masked else 1 :] if profile.whole else (64, 32)
    # of several groups; GPUs compute those that follow a mask whole, so there a group is one of the mask's chunks
    largest = profile.group // (4 if s.masked and profile.whole and not profile.rings else 2)
    # CPUs take one group: updates of dkernel by several take them longer than the product that one pass saves
    groups = [s.N] if profile.group >= s.N or not profile.whole else []
    groups += [even(s.N, largest >> i) for i in range(6) if profile.whole]  # 4096 to 128
    refer, few = references(call, given), s.H <= FEW or (call.memory is not None and groups[0] < s.N)
    # no FSDP by features: each share's product would compute all dlogits. A ring of 4 has six messages of H V / 8 f32
    fused = refer and few and not (s.masked or call.h_names or call.transform.softcap) and len(given.parameters) == 1
    messages = 3 * s.H * s.V if profile.rings and axes_of(call, given) > varying(given.parameters[0]) else 0
    most, beside = groups[0], max(messages, 2 * s.N * s.H) if groups[0] == s.N else s.total  # or dhidden
    if fused and 4 * most * (s.V + s.H) + beside <= memory:
        return Plan(most, most, s.V, references=True, one_pass=True, fused=True)
    # one block takes a tenth less time; its messages are little beside dlogits if tokens are more than twice features
    blocks = (1, 2) if groups[0] == s.N and (call.memory is not None or 2 * s.H < s.N) else (2,)
    for group, chunk, n in product(groups, chunks, blocks):
        chunk = even(group, min(chunk, profile.group // 4), profile.whole)
        filled, in_order = chunk * -(-group // chunk), 2 * s.item * s.N * s.H if s.masked else 0  # rows and gradients
        # the f32 gradients of features, and a block of a sum over devices: `ring.LARGE`, if features are 4096
        products = 4 * filled * s.H + 4 * s.H * (min(s.V, 8192) if profile.whole else profile.columns)
        logits = s.logit * chunk * s.V * (1 if profile.whole else 3)  # XLA for CPUs keeps exponentials too
        need = s.item * filled * (s.V + 2 * s.H) + max(logits, products, messages // n)
        if need + (s.total if group < s.N else in_order) <= memory:
            return Plan(chunk, filled, s.V, references=refer, one_pass=True, ring_blocks=n)
    return None


def _check(call: HeadCall, least: int) -> None:
    if call.memory is not None and least > call.memory:
        raise ValueError(f"memory: got {call.memory} bytes, expected at least {least} for this head and batch")


def even_columns(count: int, most: int) -> int:
    """The columns of equal blocks of whole 128s: what the last shares with the one before it is computed twice."""
    return min(count, most, -(-count // -(-count // most) // 128) * 128)


def even(count: int, most: int, whole: bool = True) -> int:
    """The size of equal blocks of at most `most`, as few as that allows: of 2304 by 2048 it is 1280."""
    size = -(-count // -(-count // most))
    # several are of whole 8s, on accelerators of whole 256s: a product of 2000 tokens takes longer than one of 2048
    units = (256, 8) if whole else (8,)
    fits = (whole_units for unit in units if (whole_units := -(-size // unit) * unit) <= most)
    return size if count <= most else next(fits, size)
