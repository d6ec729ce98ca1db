"""The sizes of chunks and blocks, from the memory that a call may take. They change results by rounding only.

A chunk is some of a device's tokens, by all of its columns. A group is some chunks, whose gradients of logits exist at
once. A block, in the second of two passes, is some columns.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxppo.head.call import HeadCall
from jaxppo.head.door import Local
from jaxppo.sharding import wider_dtype

LEAST = 8  # tokens of a chunk
UNIT = 128  # columns, to which blocks and shares are rounded: the lanes of a TPU's register
LEAST_GROUP = 128  # tokens


def chunk_of_forward(call: HeadCall, local: Local) -> int:
    """The tokens of a chunk. Raises if no chunk fits the memory."""
    N, H, V, number, logit = Sizes.of(call, local)
    token = logit * V
    if call.deterministic:
        fixed = call.profile.fixed_chunk
        _check(call, fixed * token // call.profile.tiles // max(1, call.eighths))
        return fixed
    _check(call, min(N, LEAST) * token)
    memory = call.memory or max(call.profile.tile, 256 * token)
    if call.memory and local.counts is not None:
        memory -= number * N * H  # tokens in order
    return fitting(N, call.profile.tokens, token, memory)


def chunk_of_one_pass(call: HeadCall, local: Local) -> tuple[int, int] | None:
    """The tokens of a chunk and of a group of chunks; None if one pass does not fit the memory."""
    if call.deterministic:
        return None
    N, H, V, number, logit = Sizes.of(call, local)
    token = logit * V
    memory = call.memory or call.profile.memory
    if call.h_names:
        memory -= number * call.axes.size(call.h_names) * local.parameters[0].size
    memory -= 2 * number * N * H  # tokens in order and their gradients
    messages = 0  # around a ring, behind the chunks: half as much as the kernel's gradient
    if call.profile.ring and (call.h_names or 1 < call.axes.size(call.axes.tokens) <= call.profile.ring):
        messages = 2 * H * V
    group = N
    most = call.profile.tokens
    if call.profile.group < N:
        group = even(N, call.profile.group // 2)
    while True:
        # the gradients of a group's logits, and f32 gradients of the kernel: of a share, or of all for several groups
        kernel = 4 * H * V
        if group == N:
            kernel //= 4
        else:
            most = call.profile.tokens // 2  # so that several groups take little more memory than one
        room = memory - number * group * V - kernel
        if room >= max(min(N, 4 * LEAST) * token, messages):
            chunk = fitting(group, most, token, room)
            return chunk, -(-group // chunk) * chunk
        if group <= LEAST_GROUP or not call.profile.groups:
            return None
        group = even(N, group // 2)


def chunk_of_kept(call: HeadCall, local: Local) -> int | None:
    """The tokens of a chunk of a walk that keeps its products in f32; None if they do not fit the memory.

    Beside them the gradients follow as in one pass, of all tokens in one group.
    """
    N, _, V, _, _ = Sizes.of(call, local)
    memory = (call.memory or call.profile.memory) - 4 * N * V
    most = call.profile.tokens
    if local.counts is None:
        most = N  # a single chunk is what is kept, and not copied there
    profile = dataclasses.replace(call.profile, tokens=most, group=N, groups=False)
    sizes = chunk_of_one_pass(dataclasses.replace(call, memory=max(1, memory), profile=profile), local)
    if sizes is None:
        return None
    return sizes[0]


def block_of_second(call: HeadCall, local: Local) -> tuple[int, int]:
    """The tokens and the columns of a tile of the second pass. Raises if no tile fits the memory."""
    N, H, V, number, logit = Sizes.of(call, local)
    columns = call.profile.columns
    most = call.profile.rows
    if local.counts is not None:
        columns = call.profile.columns_with_mask or columns
        most = call.profile.tokens  # work that follows a mask can stop behind a chunk only
    columns = min(V, columns)
    chunk = even(N, most)
    if call.deterministic:
        chunk = call.profile.fixed_chunk

    def need(chunk: int, columns: int) -> int:  # a tile, a block's gradients of logits and of columns, and of features
        return chunk * columns * (logit + number) + (4 * H + number * N) * columns + 4 * N * H

    _check(call, need(min(chunk, LEAST), min(V, LEAST)))
    memory = call.memory or need(chunk, columns)
    while need(chunk, columns) > memory:
        if columns > LEAST and (columns > chunk or chunk <= LEAST):
            columns = max(LEAST, columns // 2)
        else:
            chunk = max(LEAST, chunk // 2)
    if not call.deterministic:
        chunk = even(N, chunk)
    unit = LEAST
    if columns >= UNIT:
        unit = UNIT
    return chunk, even(V, columns, unit)


class Sizes(NamedTuple):
    """The sizes of a device's arrays."""

    N: int  # tokens
    H: int  # features
    V: int  # columns
    number: int  # bytes of a number that is multiplied
    logit: int  # bytes of an f32 logit, and of what lies beside it

    @classmethod
    def of(cls, call: HeadCall, local: Local) -> Sizes:
        """Beside a logit lie a nucleus, the gradients of ids, and the likeliest ids with their places."""
        hidden = local.features[0]
        kernel = local.parameters[0]
        H = hidden.shape[-1]
        N = hidden.size // H
        if call.sequence_parallel:
            N *= call.axes.size(call.axes.tensor)
        logit = 4
        if local.tokens.nucleus_ids is not None:
            logit += 1
        if local.tokens.ids is not None:
            logit += 4
        if call.asked.top_k:
            logit += 8
        number = wider_dtype(hidden.dtype, kernel.dtype).itemsize
        return cls(N, H, kernel.shape[call.v_dim], number, logit * call.heads * call.profile.tiles)


def fitting(N: int, most: int, token: int, memory: int) -> int:
    """The tokens of equal chunks that fit the memory, if each token takes so many bytes."""
    chunk = min(N, most)
    while chunk > LEAST and chunk * token > memory:
        chunk = -(-chunk // 2)
    return even(N, chunk)


def even(count: int, most: int, unit: int = LEAST) -> int:
    """The size of equal parts of at most `most`, as few as that allows, in whole units: of 2304 by 2048 it is 1152."""
    if count <= most:
        return count
    size = -(-count // -(-count // most))
    in_units = -(-size // unit) * unit
    if in_units <= most:
        return in_units
    return size


def _check(call: HeadCall, least: int) -> None:
    if call.memory is not None and least > call.memory:
        raise ValueError(f"memory: got {call.memory} bytes, expected at least {least} for this head and batch")
