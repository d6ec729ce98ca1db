"""Packs samples as trees of tokens on the host: rows that store each shared token once, and each
sample's response.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jaxppo.base.arrays import PER_TOKEN_VALUES, check, check_count, check_type
from jaxppo.batch.extras import PREFIX, check_name, common_dtype
from jaxppo.batch.packed import RowSizes, check_hosts, hosts_of, sample_ids_of, warn_of_many_shapes
from jaxppo.batch.prefixes import shared_pieces
from jaxppo.batch.rows import layout_of
from jaxppo.batch.same_prompts import check_groups
from jaxppo.batch.samples import (
    Piece,
    Sample,
    batch_arrays,
    check_sample_ids,
    check_samples,
    extras_of,
    whole_pieces,
)
from jaxppo.batch.shared_rows import Codes, known_codes, prompts_of, with_known, with_targets
from jaxppo.sharding import (
    Packed,
    ParallelMesh,
    check_parallel,
    check_row_length,
    logical_positions,
    multihost,
    pack,
    row_multiple,
    segment_multiple,
)


class PackedTrees(NamedTuple):
    """The arrays by name, and K, of the rows of trees and of the batch of responses; where these
    are in the rows.
    """

    rows: dict[str, Any]
    batch: dict[str, Any]
    places: Int[np.ndarray, "*K R U"]


def packed_trees(
    samples: Sequence[Sample],
    row_length: int,
    batch_row_length: int | None,
    sizes: RowSizes,
    parallel: ParallelMesh | None,
    head_extras: Sequence[str],
) -> PackedTrees:
    """See `TokenTrees.from_samples`."""
    check_parallel(parallel, "ParallelMesh or None")
    hosts = hosts_of(parallel)
    with multihost.together(parallel):
        check_samples(samples)
        prompts = check_groups(samples)
        _check_options(samples, row_length, batch_row_length, sizes, parallel, head_extras)
        samples = with_known(samples, responses=True)
        codes = _codes(samples, head_extras)
        pieces = shared_pieces(samples, codes, row_length, sizes.get("num_segments"), 0, parallel)
        targets = _Targets.of(samples, pieces)
    packed = pack(
        [range(piece.start, piece.stop) for piece in pieces],
        row_length=row_length,
        parallel=parallel,
        loads=[float(mask.sum()) for mask in targets.masks()],
        bundles=[piece.bundle for piece in pieces],
        **sizes,
    )
    ids = sample_ids_of(samples, hosts)
    responses = [_behind_prompt(sample) for sample in samples]
    rooms = _Rooms.of(responses, targets.paths, packed, parallel)
    length = _batch_row_length(int(rooms.ends.max()), batch_row_length, row_length, parallel)
    beside = rooms.packed(packed, length, parallel)
    with multihost.together(parallel):
        check_sample_ids(ids)
        rows = _arrays_of_rows(samples, targets, packed, ids, head_extras)
        batch = batch_arrays(responses, whole_pieces(responses), beside, ids, False)
    if hosts:
        check_hosts(hosts, prompts, ids, [{**rows, **batch}], 0)
    places = beside.place(_places(samples, targets, packed), 0, np.int32)
    options = repr((row_length, batch_row_length, sorted(sizes.items()), parallel))
    shape = (packed.micro_batches or 1, packed.rows, packed.num_segments, length)
    warn_of_many_shapes("TokenTrees.from_samples", options, shape, len(sizes.get("buckets") or ()))
    count = packed.micro_batches
    return PackedTrees({**rows, "micro_batches": count}, {**batch, "micro_batches": count}, places)


def _arrays_of_rows(
    samples: Sequence[Sample],
    targets: _Targets,
    packed: Packed,
    ids: Sequence[int],
    head_extras: Sequence[str],
) -> dict[str, Any]:
    """What models and heads read: tokens, and where a token of any sample trains."""
    rows: dict[str, Any] = batch_arrays(
        [_read_by_models(sample) for sample in samples], targets.pieces, packed, ids, True
    )
    rows["loss_mask"] = packed.place(targets.masks(), 0, np.float32)
    for name in head_extras:
        rows[PREFIX + name] = _placed_head_extra(name, samples, targets, packed)
    return rows


def _check_options(
    samples: Sequence[Sample],
    row_length: int,
    batch_row_length: int | None,
    sizes: RowSizes,
    parallel: ParallelMesh | None,
    head_extras: Sequence[str],
) -> None:
    layout, shards = layout_of(parallel)
    check_row_length(row_length, layout, shards)
    num_segments = sizes.get("num_segments")
    if num_segments is not None:
        check_count("num_segments", num_segments, least=1)
    if batch_row_length is not None:
        check_row_length(batch_row_length, layout, shards, "batch_row_length")
        expected = (
            "another than row_length, so that statistics of rows do not pass for statistics of the"
            " batch"
        )
        check("batch_row_length", batch_row_length, batch_row_length != row_length, expected)
    several = isinstance(head_extras, Sequence) and not isinstance(head_extras, str)
    check_type("head_extras", head_extras, several, "names of extras")
    extras = extras_of(samples)
    predicting = [name for name, of_samples in extras.items() if of_samples[0].at == "predicting"]
    for name in head_extras:
        check_name("head_extras", name)
        expected = f'some of the extras at "predicting" that the samples have, {predicting}'
        check("head_extras", repr(name), name in predicting, expected)


def _codes(samples: Sequence[Sample], head_extras: Sequence[str]) -> list[Codes]:
    """What models and heads read with each token of whole samples."""
    of_models = prompts_of(samples, responses=True).codes
    if not head_extras:
        return of_models
    codes = with_targets(of_models, samples, head_extras)
    return known_codes(codes, first=of_models[0].shape[1])


class _Targets(NamedTuple):
    """Which positions of the pieces predict a token that a sample trains on."""

    pieces: Sequence[Piece]
    paths: list[list[int]]  # the numbers of the pieces that each sample consists of
    trained: list[Bool[np.ndarray, " n"]]  # for each position of each sample

    @classmethod
    def of(cls, samples: Sequence[Sample], pieces: Sequence[Piece]) -> _Targets:
        trained = [
            np.append(sample.mask[1:] > 0, False)[: len(sample.tokens)] for sample in samples
        ]
        paths: dict[int, list[int]] = {}
        for number, piece in enumerate(pieces):
            if piece.shared:
                continue
            path = [number]
            while (parent := pieces[path[-1]].parent) is not None:
                path.append(parent)
            paths[piece.sample] = path[::-1]
        return cls(pieces, [paths[i] for i in range(len(samples))], trained)

    def masks(self) -> list[Shaped[np.ndarray, " n"]]:
        """For each piece 1 where a token of any sample trains, else 0."""
        return self.merged([trains.astype(np.float32) for trains in self.trained], 0)

    def merged(
        self, values: Sequence[Shaped[np.ndarray, "n ..."]], fill: float
    ) -> list[Shaped[np.ndarray, "n ..."]]:
        """For each piece the values at positions that train a sample, which are equal in all of
        them; else the fill.

        `values` are those of whole samples.
        """
        shape = values[0].shape[1:]
        merged = [
            np.full((piece.stop - piece.start, *shape), fill, values[0].dtype)
            for piece in self.pieces
        ]
        for own, trains, path in zip(values, self.trained, self.paths, strict=True):
            for number in path:
                span = slice(self.pieces[number].start, self.pieces[number].stop)
                here = trains[span]
                merged[number][here] = own[span][here]
        return merged


def _read_by_models(sample: Sample) -> Sample:
    """The sample without what a model does not read."""
    extras = {name: extra for name, extra in (sample.extras or {}).items() if extra.at == "input"}
    nothing: dict[str, Any] = dict.fromkeys(
        (*PER_TOKEN_VALUES, "reward", "group_id", "rollout_id", "nucleus")
    )
    return dataclasses.replace(sample, extras=extras, **nothing)


def _behind_prompt(sample: Sample) -> Sample:
    """The response behind the last token of its prompt, which predicts it: all that losses read."""
    first = max(sample.start - 1, 0)
    extras = {
        name: extra for name, extra in (sample.extras or {}).items() if extra.at == "predicting"
    }
    tokens = np.asarray(sample.tokens)[first:]
    return dataclasses.replace(
        sample,
        tokens=tokens,
        response_start=sample.start - first,
        loss_mask=sample.mask[first:],
        extras=extras,
    )


def _placed_head_extra(
    name: str, samples: Sequence[Sample], targets: _Targets, packed: Packed
) -> Shaped[np.ndarray, "*K R T ..."]:
    """An extra at the positions that predict a token which a sample trains on."""
    extras = extras_of(samples)[name]
    dtype = common_dtype(f"extras[{name!r}]", [extra.values for extra in extras])
    fill = extras[0].fill
    values = []
    for sample, extra in zip(samples, extras, strict=True):
        count = len(sample.tokens)
        own = np.full((count, *extra.values.shape[1:]), fill, dtype)
        own[sample.start - 1 : count - 1] = extra.values
        values.append(own)
    return packed.place(targets.merged(values, fill), fill, dtype)


class _Rooms(NamedTuple):
    """Where the responses of each row stand in the batch's row beside it: one behind the other,
    as in the tree.
    """

    lengths: Int[np.ndarray, " N"]
    row: Int[np.ndarray, " N"]
    slot: Int[np.ndarray, " N"]
    start: Int[np.ndarray, " N"]
    ends: Int[np.ndarray, " KR"]  # the positions that the responses of each row take

    @classmethod
    def of(
        cls,
        responses: Sequence[Sample],
        paths: Sequence[Sequence[int]],
        packed: Packed,
        parallel: ParallelMesh | None,
    ) -> _Rooms:
        multiple = segment_multiple(*layout_of(parallel))
        lengths = np.array([len(response.tokens) for response in responses], np.int32)
        # the piece of each sample that no other one has
        own = np.array([path[-1] for path in paths])
        row = packed.row[own]
        slot = np.zeros(len(responses), np.int32)
        start = np.zeros(len(responses), np.int32)
        counts = np.zeros(packed.order.shape[0], np.int32)
        ends = np.zeros(packed.order.shape[0], np.int32)
        for i in np.lexsort((packed.start[own], row)).tolist():
            slot[i] = counts[row[i]]
            start[i] = ends[row[i]]
            counts[row[i]] += 1
            ends[row[i]] += -(-lengths[i] // multiple) * multiple
        return cls(lengths, row, slot, start, ends)

    def packed(self, trees: Packed, length: int, parallel: ParallelMesh | None) -> Packed:
        """The places of the responses in rows of this length."""
        rows = trees.order.shape[0]
        sizes = np.zeros((rows, trees.num_segments), np.int64)
        sizes[self.row, self.slot] = self.lengths
        layout, shards = layout_of(parallel)
        order = np.broadcast_to(logical_positions(layout, length, shards, sizes), (rows, length))
        return dataclasses.replace(
            trees, lengths=self.lengths, row=self.row, slot=self.slot, start=self.start, order=order
        )


def _batch_row_length(
    least: int, given: int | None, row_length: int, parallel: ParallelMesh | None
) -> int:
    """U: by default the row length, halved or doubled until it is just long enough, and not the
    row length itself.
    """
    if hosts_of(parallel):
        multihost.check_equal("batch_row_length", given)
        (least,) = multihost.agree((least,))
    if given is not None:
        check(
            "batch_row_length",
            given,
            least <= given,
            f"at least {least}, the tokens of all responses of one row",
        )
        return given
    twice = 2 * row_multiple(*layout_of(parallel))
    length = row_length
    while length % twice == 0 and length // 2 >= least:
        length //= 2
    while length < least or length == row_length:
        length *= 2
    return length


def _places(
    samples: Sequence[Sample], targets: _Targets, packed: Packed
) -> list[Int[np.ndarray, " n"]]:
    """For each token of each response, and the one before it, its place in the row of its tree."""
    place_of = np.argsort(packed.order, axis=1, kind="stable").astype(np.int32)
    places = []
    for sample, path in zip(samples, targets.paths, strict=True):
        positions = []
        for number in path:
            piece = targets.pieces[number]
            positions.append(packed.start[number] + np.arange(piece.stop - piece.start))
        own = place_of[packed.row[path[0]], np.concatenate(positions)]
        places.append(own[max(sample.start - 1, 0) :])
    return places
