"""The sizes of chunks and blocks, from the memory that a call may take.

They change results by rounding only.

A chunk is some of a device's tokens. A group is some chunks, whose gradients of raw logits exist at
once. A block is some columns, and its width is their number. A tile is a chunk by all columns or by
a block.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxppo.head.call import HeadCall
from jaxppo.head.door import Local
from jaxppo.sharding import wider_dtype

LEAST = 8  # tokens of a chunk, and columns of a block
UNIT = 128  # columns, to which blocks and shares are rounded: the lanes of a TPU's register
LEAST_GROUP = 128  # tokens


def chunk_of_forward(call: HeadCall, local: Local) -> int:
    """The tokens of a chunk. Raises if no chunk fits the memory."""
    N, H, V, number_bytes, logit_bytes = Sizes.of(call, local)
    token_bytes = logit_bytes * V
    if call.deterministic:
        fixed = call.profile.fixed_chunk
        # f32 logits alone: a fixed chunk cannot be smaller
        least = fixed * token_bytes // call.profile.logit_copies
        if call.heads == 1:
            least //= max(1, call.eighths)  # two heads are compared by all columns
        _check(call, least)
        return fixed
    _check(call, min(N, LEAST) * token_bytes)
    memory = call.memory or max(call.profile.forward_bytes, 256 * token_bytes)
    if call.memory and local.counts is not None:
        # tokens in order; they may lie beside half of it, else chunks would be tiny
        memory -= min(memory // 2, number_bytes * N * H)
    return fitting(N, call.profile.chunk_tokens, token_bytes, memory)


def chunk_of_one_pass(call: HeadCall, local: Local) -> tuple[int, int] | None:
    """The tokens of a chunk and of a group of chunks; None if one pass does not fit the memory."""
    if call.deterministic:
        return None
    N, H, V, number_bytes, logit_bytes = Sizes.of(call, local)
    token_bytes = logit_bytes * V
    memory = call.memory or call.profile.memory
    if call.h_names:
        memory -= number_bytes * call.axes.size(call.h_names) * local.parameters[0].size
    memory -= 2 * number_bytes * N * H  # tokens in order and their gradients
    if call.quantized is not None:
        memory -= (1 + number_bytes) * H * (N + V)  # operands of 8 bits, and dequantised ones
    messages = 0  # around a ring, after the chunks: half as much as the kernel's gradient
    if call.profile.ring and (
        call.h_names or 1 < call.axes.size(call.axes.tokens) <= call.profile.ring
    ):
        messages = 2 * H * V
    group = N
    most = call.profile.chunk_tokens
    if call.profile.group_tokens < N:
        group = equal_part(N, call.profile.group_tokens // 2)
    while True:
        # beside a group's gradients of raw logits: those of a piece of the kernel in f32, or of all
        # for several groups
        gradient = 4 * H * V
        if group == N:
            gradient //= 4
        else:
            # so that several groups take little more memory than one
            most = call.profile.chunk_tokens // 2
        room = memory - number_bytes * group * V - gradient
        if room >= max(min(N, 4 * LEAST) * token_bytes, messages):
            chunk = fitting(group, most, token_bytes, room)
            return chunk, -(-group // chunk) * chunk
        if group <= LEAST_GROUP or not call.profile.shrinks_groups:
            return None
        group = equal_part(N, group // 2)


def chunk_of_kept(call: HeadCall, local: Local) -> int | None:
    """The tokens of a chunk of a walk that keeps its products in f32; None if they do not fit the
    memory.

    Beside them the gradients follow as in one pass, of all tokens in one group.
    """
    N, _, V, _, _ = Sizes.of(call, local)
    memory = (call.memory or call.profile.memory) - 4 * N * V
    most = call.profile.chunk_tokens
    if local.counts is None:
        most = N  # a single chunk is what is kept, and not copied there
    profile = dataclasses.replace(
        call.profile, chunk_tokens=most, group_tokens=N, shrinks_groups=False
    )
    sizes = chunk_of_one_pass(
        dataclasses.replace(call, memory=max(1, memory), profile=profile), local
    )
    if sizes is None:
        return None
    return sizes[0]


def block_of_second(call: HeadCall, local: Local) -> tuple[int, int]:
    """The tokens of a chunk and the width of a block of the second pass.

    Raises if no tile fits the memory.
    """
    N, H, V, number_bytes, logit_bytes = Sizes.of(call, local)
    width = call.profile.block_width
    most = call.profile.tile_tokens
    if local.counts is not None:
        width = call.profile.block_width_with_mask or width
        most = call.profile.chunk_tokens  # work that follows a mask can stop behind a chunk only
    width = min(V, width)
    chunk = equal_part(N, most)
    if call.deterministic:
        chunk = call.profile.fixed_chunk

    def need(chunk: int, width: int) -> int:
        tile = chunk * width * (logit_bytes + number_bytes)
        block = (4 * H + number_bytes * N) * width  # its gradients of columns and of raw logits
        return tile + block + 4 * N * H

    _check(call, need(min(chunk, LEAST), min(V, LEAST)))
    memory = call.memory or need(chunk, width)
    while need(chunk, width) > memory:
        if width > LEAST and (width > chunk or chunk <= LEAST):
            width = max(LEAST, width // 2)
        else:
            chunk = max(LEAST, chunk // 2)
    if not call.deterministic:
        chunk = equal_part(N, chunk)
    unit = LEAST
    if width >= UNIT:
        unit = UNIT
    return chunk, equal_part(V, width, unit)


class Sizes(NamedTuple):
    """The sizes of a device's arrays."""

    N: int  # tokens
    H: int  # features
    V: int  # columns
    number_bytes: int  # of a number that is multiplied, in gradients if the head is quantised
    logit_bytes: int  # of an f32 logit, and of what lies beside it

    @classmethod
    def of(cls, call: HeadCall, local: Local) -> Sizes:
        """Beside a logit lie a nucleus, the gradients of ids, and the likeliest ids with their
        places.
        """
        hidden = local.features[0]
        kernel = local.parameters[0]
        H = hidden.shape[-1]
        N = hidden.size // H
        if call.sequence_parallel:
            N *= call.axes.size(call.axes.tensor)
        logit_bytes = 4
        if local.tokens.nucleus_ids is not None:
            logit_bytes += 1
        if local.tokens.ids is not None:
            logit_bytes += 4
        if call.asked.top_k:
            logit_bytes += 8
        dtype = hidden.dtype
        if call.quantized is None:
            dtype = wider_dtype(dtype, kernel.dtype)
        copies = call.heads * call.profile.logit_copies
        return cls(N, H, kernel.shape[call.v_dim], dtype.itemsize, logit_bytes * copies)


def fitting(N: int, most: int, token_bytes: int, memory: int) -> int:
    """The tokens of equal chunks that fit the memory, if each token takes so many bytes."""
    chunk = min(N, most)
    while chunk > LEAST and chunk * token_bytes > memory:
        chunk = -(-chunk // 2)
    return equal_part(N, chunk)


def equal_part(count: int, most: int, unit: int = LEAST) -> int:
    """The size of equal parts of at most `most`, as few as that allows, in whole units: of 2304
    by 2048 it is 1152.
    """
    if count <= most:
        return count
    size = -(-count // -(-count // most))
    in_units = -(-size // unit) * unit
    if in_units <= most:
        return in_units
    return size


def _check(call: HeadCall, least: int) -> None:
    if call.memory is not None and least > call.memory:
        raise ValueError(
            f"memory: got {call.memory} bytes, expected at least {least} for this head and batch"
        )
