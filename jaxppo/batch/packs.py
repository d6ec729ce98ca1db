"""Turns packs of sequences, flat tokens with cumulative lengths, into the rows of a batch, on the host or under jit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

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
    of_whole_rows,
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
    given, places = all_arrays(packs, arrays)
    flat = np.ndim(given["tokens"]) == 1
    given = {name: _one_row(name, x, flat) for name, x in given.items()}
    (R, N), S = np.shape(given["tokens"]), np.shape(given["cu_seqlens"])[1] - 1
    check("cu_seqlens", f"shape {np.shape(packs['cu_seqlens'])}", S > 0, "[S + 1] or [R, S + 1]")
    for name, x in given.items():
        check_row_array(name, x, ((R, S + 1 if name in ENDS else S if name in PER_SEGMENT else N),))
    if "targets" in given and aligned == "token":
        raise ValueError("aligned: got 'token' with targets, expected 'target': targets stand where they are predicted")
    num_segments = S if num_segments is None else num_segments
    check_count("num_segments", num_segments, least=S)
    if row_length is None:
        row_length = -(-N // row_multiple(layout, shards)) * row_multiple(layout, shards)
    check_count("row_length", row_length, least=1)
    multiple = segment_multiple(layout, shards) if shards > 1 else 1
    check_on_host(lambda x: _wrong(np, x, row_length, multiple), given, (*ENDS, "loss_mask"))
    # on the host, so that packs of any number of tokens and sequences share a program
    wider = dict.fromkeys((*ENDS, *PER_SEGMENT), num_segments - S)
    given = {name: _widened(x, wider.get(name, max(0, row_length - N)), name in ENDS) for name, x in given.items()}
    options = (aligned, multiple, places)
    return of_whole_rows("RolloutBatch.from_cu_seqlens", _unpacked, row_length, given, options, parallel)


def _one_row(name: str, x: Any, flat: bool) -> Any:
    """`[R, n]`; a flat array is the only pack."""
    if name.startswith(PREFIX):
        return x[None] if flat else x
    size = "S + 1" if name in ENDS else "S" if name in PER_SEGMENT else "N"
    good = np.ndim(x) in (1, 2) and 0 not in np.shape(x)
    check(name, f"shape {np.shape(x)}", good, f"[{size}] or [R, {size}], each at least 1")
    return x if np.ndim(x) == 2 else x[None]


def _widened(x: Any, by: int, ends: bool) -> Any:
    xp = np if isinstance(x, np.ndarray) else jnp
    more = ((0, 0),) * (x.ndim - 2)
    return xp.pad(x, ((0, 0), (0, by), *more), constant_values=-1 if ends else 0) if by else x


def _unpacked(
    axes: Any, length: int, aligned: Aligned, multiple: int, extras: Places, arrays: dict[str, Array]
) -> dict[str, Array]:
    fills = {what: fill for what, _, fill in extras}
    wrong = [*_wrong(jnp, arrays, length, multiple)]
    ends = [arrays.pop(name) for name in ENDS if name in arrays]
    starts, lengths, _, sizes = _places(jnp, ends, arrays["tokens"].shape[1], multiple)
    num_segments = lengths.shape[1]

    # the sequences stand one after another, whatever lay between them in the pack
    behind = jnp.cumsum(sizes, axis=1, dtype=jnp.int32)
    places = jnp.arange(length, dtype=jnp.int32)[None]
    of_place = (places[:, None] >= behind[:, :, None]).sum(axis=1, dtype=jnp.int32)
    segment = jnp.minimum(of_place, num_segments - 1)
    positions = places - jnp.take_along_axis(behind - sizes, segment, axis=1)
    inside = (of_place < num_segments) & (positions < jnp.take_along_axis(lengths, segment, axis=1))
    source = jnp.clip(jnp.take_along_axis(starts, segment, axis=1) + positions, 0, arrays["tokens"].shape[1] - 1)

    def of_segments(name: str, x: Array) -> Array:
        return jnp.where(lengths > 0, x, jnp.full_like(x, -1 if name in IDS else 0))

    rows = {
        name: of_segments(name, x) if name in PER_SEGMENT else taken(x, source, inside, fills.get(name, 0))
        for name, x in arrays.items()
    }
    rows |= {"segment_ids": jnp.where(inside, segment + 1, 0), "positions": jnp.where(inside, positions, 0)}
    if aligned == "target" and "targets" not in rows:
        follows = jnp.pad(inside[:, 1:] & (positions[:, 1:] > 0), ((0, 0), (0, 1)))
        rows["targets"] = jnp.where(follows, jnp.roll(rows["tokens"], -1, axis=1), 0)
    made = aligned_rows(axes, length, num_segments, extras, rows)
    return made | {"loss_mask": marked(made["loss_mask"], wrong)}


def _places(xp: Any, ends: list[Any], tokens: int, multiple: int) -> tuple[Any, Any, Any, Any]:
    """Four `[R, S]`: a sequence's first token in the pack, its length, its room there, and what it takes in the row."""
    # an unused entry repeats the last end; with padding it is the end of the pack, since offsets may lack the last one
    filled = np.maximum.accumulate(ends[0], axis=1) if xp is np else lax.cummax(ends[0].astype(jnp.int32), axis=1)
    lengths = filled[:, 1:] - filled[:, :-1]
    if len(ends) == 2:
        filled = xp.where(ends[1] < 0, xp.full_like(ends[1], tokens), ends[1]).astype(xp.int32)
    return filled[:, :-1], lengths, filled[:, 1:] - filled[:, :-1], -(-lengths // multiple) * multiple


def _wrong(xp: Any, packs: Mapping[str, Any], row_length: int, multiple: int) -> Wrong:
    """What may be wrong with packs; the same on the host and on devices."""
    tokens, ends = packs["loss_mask"].shape[1], {name: packs[name] for name in ENDS if name in packs}
    for name, x in ends.items():
        used = x >= 0
        falls = used[:, 1:] & (~used[:, :-1] | (x[:, 1:] < x[:, :-1]))
        expected = "0, then ends that do not decrease, then -1 or the last end where unused"
        yield name, (x[:, 0] != 0) | falls.any(axis=1), _values(x), expected
        most = x.max(axis=1)
        yield name, most > tokens, _values(most), f"at most {tokens}, the tokens of a pack"
    starts, lengths, room, sizes = _places(xp, [*ends.values()], tokens, multiple)
    far = "ends as far apart as those of cu_seqlens, or further"
    yield ENDS[-1], (lengths > room).any(axis=1), _values(packs.get(ENDS[-1])), far
    needed = sizes.sum(axis=1, dtype=xp.int32)
    of = f", each sequence padded to a multiple of {multiple}" if multiple > 1 else ""
    fits = f"at most row_length={row_length} positions of a row{of}"
    yield ENDS[0], needed > row_length, _values(needed), fits
    yield from wrong_values("loss_mask", packs["loss_mask"])
    mask = packs["loss_mask"].astype(xp.float32)
    trains = xp.pad((mask != 0).cumsum(axis=1, dtype=xp.int32), ((0, 0), (1, 0)))
    first, last = (xp.take_along_axis(trains, xp.clip(x, 0, tokens), axis=1) for x in (starts, starts + lengths))
    lost = trains[:, -1] - (last - first).sum(axis=1, dtype=xp.int32)
    yield "loss_mask", lost != 0, _values(lost), "0 tokens to train on outside the sequences of cu_seqlens"


def _values(x: Any) -> Callable[[int], str]:
    return lambda row: f"{x[row].tolist()} in row {row}"
