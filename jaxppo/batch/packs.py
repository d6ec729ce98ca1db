"""Turns packs of sequences, flat tokens with cumulative lengths, into the rows of a batch, on
the host or under jit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxppo.base.arrays import IDS, PER_SEGMENT, check, check_choice, check_count
from jaxppo.batch.extras import PREFIX, Places
from jaxppo.batch.rows import (
    RowArrays,
    Wrong,
    aligned_rows,
    all_arrays,
    check_on_host,
    check_row_array,
    layout_of,
    marked,
    on_whole_rows,
    taken,
    wrong_values,
)
from jaxppo.sharding import ParallelMesh, row_multiple, segment_multiple

Aligned = Literal["token", "target"]
ENDS = ("cu_seqlens", "cu_seqlens_padded")


def rows_of_packs(
    packs: Mapping[str, Any],
    arrays: RowArrays,
    aligned: Aligned,
    row_length: int | None,
    num_segments: int | None,
    parallel: ParallelMesh | None,
) -> dict[str, Array]:
    """See `RolloutBatch.from_cu_seqlens`; each pack becomes one row."""
    check_choice("aligned", aligned, Aligned)
    layout, shards = layout_of(parallel)
    inputs, places = all_arrays(packs, arrays)
    flat = np.ndim(inputs["tokens"]) == 1
    inputs = {name: _one_row(name, x, flat) for name, x in inputs.items()}
    R, N = np.shape(inputs["tokens"])
    S = np.shape(inputs["cu_seqlens"])[1] - 1
    check("cu_seqlens", f"shape {np.shape(packs['cu_seqlens'])}", S > 0, "[S + 1] or [R, S + 1]")
    columns = {**dict.fromkeys(PER_SEGMENT, S), **dict.fromkeys(ENDS, S + 1)}
    for name, x in inputs.items():
        check_row_array(name, x, ((R, columns.get(name, N)),))
    if "targets" in inputs and aligned == "token":
        raise ValueError(
            "aligned: got 'token' with targets, expected 'target': targets stand where they are"
            " predicted"
        )
    if num_segments is None:
        num_segments = S
    check_count("num_segments", num_segments, least=S)
    if row_length is None:
        unit = row_multiple(layout, shards)
        row_length = -(-N // unit) * unit
    check_count("row_length", row_length, least=1)
    multiple = segment_multiple(layout, shards) if shards > 1 else 1
    check_on_host(lambda x: _wrong(np, x, row_length, multiple), inputs, (*ENDS, "loss_mask"))
    # on the host, so that packs of any number of tokens and sequences share a program
    inputs = {
        name: _widened(name, x, row_length - N, num_segments - S) for name, x in inputs.items()
    }
    options = (aligned, multiple, places)
    return on_whole_rows(
        "RolloutBatch.from_cu_seqlens", _unpacked, row_length, inputs, options, parallel
    )


def _one_row(name: str, x: Any, flat: bool) -> Any:
    """`[R, n]`; a flat array is the only pack."""
    if not name.startswith(PREFIX):
        size = "N"
        if name in ENDS:
            size = "S + 1"
        elif name in PER_SEGMENT:
            size = "S"
        shape = np.shape(x)
        good = len(shape) in (1, 2) and 0 not in shape
        check(name, f"shape {shape}", good, f"[{size}] or [R, {size}], each at least 1")
        flat = len(shape) == 1
    if flat:
        return x[None]
    return x


def _widened(name: str, x: Any, tokens: int, segments: int) -> Any:
    """An array with so many tokens or segments more in each row."""
    more = max(0, tokens)
    fill = 0
    if name in ENDS:
        fill = -1
    if name in ENDS or name in PER_SEGMENT:
        more = segments
    if not more:
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    others = ((0, 0),) * (x.ndim - 2)
    return xp.pad(x, ((0, 0), (0, more), *others), constant_values=fill)


def _unpacked(
    axes: Any,
    length: int,
    aligned: Aligned,
    multiple: int,
    extras: Places,
    arrays: dict[str, Array],
) -> dict[str, Array]:
    fills = {what: fill for what, _, fill in extras}
    wrong = [*_wrong(jnp, arrays, length, multiple)]
    tokens = arrays["tokens"].shape[1]
    ends = [arrays[name] for name in ENDS if name in arrays]
    sequences = _sequences(jnp, ends, tokens, multiple)
    num_segments = sequences.lengths.shape[1]

    # the sequences stand one after another, whatever lay between them in the pack
    behind = jnp.cumsum(sequences.sizes, axis=1, dtype=jnp.int32)
    places = jnp.arange(length, dtype=jnp.int32)[None]
    number = (places[:, None] >= behind[:, :, None]).sum(axis=1, dtype=jnp.int32)
    segment = jnp.minimum(number, num_segments - 1)
    positions = places - jnp.take_along_axis(behind - sequences.sizes, segment, axis=1)
    inside = (number < num_segments) & (
        positions < jnp.take_along_axis(sequences.lengths, segment, axis=1)
    )
    source = jnp.take_along_axis(sequences.starts, segment, axis=1) + positions
    source = jnp.clip(source, 0, tokens - 1)
    rows: dict[str, Array] = {}
    for name, x in arrays.items():
        if name in ENDS:
            continue
        if name in PER_SEGMENT:
            fill = -1 if name in IDS else 0
            rows[name] = jnp.where(sequences.lengths > 0, x, jnp.full_like(x, fill))
        else:
            rows[name] = taken(x, source, inside, fills.get(name, 0))
    rows["segment_ids"] = jnp.where(inside, segment + 1, 0)
    rows["positions"] = jnp.where(inside, positions, 0)
    if aligned == "target" and "targets" not in rows:
        follows = jnp.pad(inside[:, 1:] & (positions[:, 1:] > 0), ((0, 0), (0, 1)))
        rows["targets"] = jnp.where(follows, jnp.roll(rows["tokens"], -1, axis=1), 0)
    rows = aligned_rows(axes, length, num_segments, extras, rows)
    return rows | {"loss_mask": marked(rows["loss_mask"], wrong)}


class _Sequences(NamedTuple):
    """Where the sequences of packs lie, `[R, S]` each."""

    starts: Any  # the first token in the pack
    lengths: Any
    room: Any  # the tokens up to the next sequence of the pack
    sizes: Any  # the positions that a sequence takes in the row


def _sequences(xp: Any, ends: list[Any], tokens: int, multiple: int) -> _Sequences:
    """The sequences of packs with these cumulative lengths, without and with padding."""
    # an unused entry repeats the last end; with padding it is the end of the pack, since offsets
    # may lack the last one
    offsets: Any
    if xp is np:
        offsets = np.maximum.accumulate(ends[0], axis=1)
    else:
        offsets = lax.cummax(ends[0].astype(jnp.int32), axis=1)
    lengths = offsets[:, 1:] - offsets[:, :-1]
    if len(ends) == 2:
        padded = ends[1]
        offsets = xp.where(padded < 0, xp.full_like(padded, tokens), padded).astype(xp.int32)
    room = offsets[:, 1:] - offsets[:, :-1]
    sizes = -(-lengths // multiple) * multiple
    return _Sequences(offsets[:, :-1], lengths, room, sizes)


def _wrong(xp: Any, packs: Mapping[str, Any], row_length: int, multiple: int) -> Wrong:
    """What may be wrong with packs; the same on the host and on devices."""
    loss_mask = packs["loss_mask"]
    tokens = loss_mask.shape[1]
    ends = {name: packs[name] for name in ENDS if name in packs}
    for name, x in ends.items():
        used = x >= 0
        falls = used[:, 1:] & (~used[:, :-1] | (x[:, 1:] < x[:, :-1]))
        bad = (x[:, 0] != 0) | falls.any(axis=1)
        yield (
            name,
            bad,
            _values(x),
            "0, then ends that do not decrease, then -1 or the last end where unused",
        )
        most = x.max(axis=1)
        yield name, most > tokens, _values(most), f"at most {tokens}, the tokens of a pack"
    sequences = _sequences(xp, [*ends.values()], tokens, multiple)
    overlap = (sequences.lengths > sequences.room).any(axis=1)
    padded = "cu_seqlens_padded"
    yield (
        padded,
        overlap,
        _values(packs.get(padded)),
        "ends as far apart as those of cu_seqlens, or further",
    )
    needed = sequences.sizes.sum(axis=1, dtype=xp.int32)
    expected = f"at most row_length={row_length} positions of a row"
    if multiple > 1:
        expected += f", each sequence padded to a multiple of {multiple}"
    yield "cu_seqlens", needed > row_length, _values(needed), expected
    yield from wrong_values("loss_mask", loss_mask)
    mask = loss_mask.astype(xp.float32)
    trained = xp.pad((mask != 0).cumsum(axis=1, dtype=xp.int32), ((0, 0), (1, 0)))

    def trained_before(place: Any) -> Any:
        return xp.take_along_axis(trained, xp.clip(place, 0, tokens), axis=1)

    first = trained_before(sequences.starts)
    last = trained_before(sequences.starts + sequences.lengths)
    lost = trained[:, -1] - (last - first).sum(axis=1, dtype=xp.int32)
    yield (
        "loss_mask",
        lost != 0,
        _values(lost),
        "0 tokens to train on outside the sequences of cu_seqlens",
    )


def _values(x: Any) -> Callable[[int], str]:
    return lambda row: f"{x[row].tolist()} in row {row}"
