"""The sizes of tiles, from the memory that a call may take. They change the time, and the results by rounding only.

An f32 accumulator is read and written for each tile, and the product hides that if the tile has about 4 * peak flops /
memory bandwidth columns or tokens: 664 on a v5p, 1180 on an H100, 2240 on a v6e. So accelerators compute a chunk of
tokens in all columns of the device at once, or a block of columns by up to 8192 tokens. CPUs want tiles that fit caches.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxppo.head.border import Local, count_of, deterministic_tokens, parts_of, window_size
from jaxppo.head.call import HeadCall
from jaxppo.sharding import wider_dtype

LEAST = 128  # tokens of the smallest group: with fewer, two passes cost less than the updates of dkernel


class Plan(NamedTuple):
    """Sizes: tokens of a chunk, and of the larger tiles made of chunks; columns of a block of each pass."""

    passes: int
    chunk: int  # tokens whose statistics are computed at once
    group: int  # of one pass: tokens whose dlogits fill one array; of two: tokens of a tile of the second
    columns: int  # of a block of the statistics
    wide: int  # of a block of the second pass
    by_block: bool = False  # statistics gather a kernel a block at a time

    def __str__(self) -> str:
        products = f", products of {self.group} tokens" if self.passes == 1 and self.group > self.chunk else ""
        return f"{self.chunk} tokens x {self.columns} columns{products}"


def plan_of(call: HeadCall, given: Local, *, token_loss: bool = False) -> Plan:
    """One pass in the largest groups and chunks that fit the memory if a token's loss is known at once, else two.

    Raises:
      ValueError: no tile fits the memory.
    """
    N, kernel, profile = given.size(call), given.parameters[0], call.profile
    H, own = given.features[0].shape[-1], kernel.shape[call.v_dim]
    held = count_of(call, own)
    V, item = window_size(call, held), wider_dtype(given.features[0].dtype, kernel.dtype).itemsize
    # bytes of an f32 logit, and beside it of a nucleus, of the gradients of ids, of the likeliest with their places
    logit = 4 + (given.tokens.nucleus is not None) + 4 * (given.tokens.ids is not None) + 8 * (call.asked.top_k > 0)
    logit *= call.heads
    gathers = bool(call.h_names or call.gathered_v)
    fixed = kernel.dtype.itemsize * H * held if gathers else 0
    fixed += N * H * given.features[0].dtype.itemsize if call.sequence_parallel else 0
    if token_loss and not call.deterministic:
        memory = (call.memory or profile.one_pass) - fixed
        found = _one_pass(N, H, V, logit, item, memory, profile.whole, profile.group)
        if found is not None:
            return found
    if call.deterministic:  # every tile has one shape on any mesh and in any batch
        chunk = deterministic_tokens(call)
        columns = V // (parts_of(call, held) or 1)
        return Plan(2, chunk, chunk, columns, min(columns, profile.columns))
    return _two_passes(call, N, H, V, logit, item, fixed, given.counts is not None)


def _one_pass(N: int, H: int, V: int, logit: int, item: int, memory: int, whole: bool, most: int) -> Plan | None:
    for group in [N, *(2**k for k in range(13, 6, -1))]:
        group = min(group, N)
        several = group < N
        if group > most or (several and group > most // 2) or (several and group < LEAST):
            continue
        for chunk in [most // 4, *(c for c in (1024, 512, 256, 128) if c < most // 4)] if whole else [64, 32]:
            chunk = even(group, min(chunk, group), whole)
            filled = chunk * -(-group // chunk)
            products = 4 * filled * H + min(4 * H * V, 8 * H * 4096)
            need = item * filled * (V + 2 * H) + max(logit * chunk * V, products) + (4 * H * V if several else 0)
            if need <= memory:
                return Plan(1, chunk, filled, V, V)
    return None


def _two_passes(call: HeadCall, N: int, H: int, V: int, logit: int, item: int, fixed: int, given_mask: bool) -> Plan:
    profile, memory = call.profile, call.memory
    # XLA fuses the sums of all columns into a product with bf16 operands: logits need no memory then, see `references`
    most = profile.group
    if given_mask and call.follow_mask:  # the work can stop only after a tile
        most = most // 4 if profile.whole else min(most, max(most // 8, -(-N // 4)))
    rows = even(N, most, profile.whole)
    chunk = even(
        rows, max(8, min(profile.tokens, profile.tile // (logit * (V if profile.whole else 512)))), profile.whole
    )
    columns = V if profile.whole else min(V, max(128, profile.tile // (logit * chunk) // 128 * 128))
    wide = min(
        V, profile.columns * max(1, N // profile.group) if not profile.rings and profile.whole else profile.columns
    )
    by_block = fixed > 0 and fixed > (memory or profile.one_pass)
    if memory is not None:

        def size(rows: int, wide: int) -> int:
            return rows * wide * (logit + item) + 8 * H * wide + 4 * N * H

        least = size(min(rows, 8), min(V, 128))
        if least > memory:
            raise ValueError(f"memory: got {memory} bytes, expected at least {least} for this head and batch")
        while size(rows, wide) > memory:
            if wide > 128 and (wide > rows or rows <= 8):
                wide = max(128, wide // 2)
            else:
                rows = max(8, rows // 2)
        while logit * chunk * columns > memory:
            if chunk > 256 or columns <= 128:
                chunk = max(8, chunk // 2)
            else:
                columns = max(128, columns // 2)
    chunk = even(rows, min(chunk, rows), profile.whole)
    rows = chunk * -(-rows // chunk)
    return Plan(2, chunk, rows, min(columns, wide) if by_block else columns, wide, by_block)


def even(count: int, most: int, whole: bool = True) -> int:
    """The size of equal blocks of at most `most`, with as few blocks as that allows.

    If there are several it is a multiple of 8, and on accelerators (`whole`) of 256, unless `most` has no room: a
    product of 2000 tokens takes longer than one of 2048.

    Example:
      >>> even(2304, 2048), even(30, 12), even(100, 40)
      (1280, 10, 40)
    """
    blocks = -(-count // most)
    size = -(-count // blocks)
    if blocks == 1:
        return size
    for unit in (256, 8) if whole else (8,):
        rounded_up = -(-size // unit) * unit
        if rounded_up <= most:
            return rounded_up
    return size
