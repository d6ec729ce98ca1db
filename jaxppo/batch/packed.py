"""Packs samples on the host into the arrays of a batch, optionally with shared prefixes stored
once.
"""

from __future__ import annotations

import bisect
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict

import numpy as np

from jaxppo.base.arrays import check, check_count, check_flag
from jaxppo.batch.host import is_whole
from jaxppo.batch.same_prompts import Prompts, check_groups, check_groups_of_hosts
from jaxppo.batch.samples import (
    Piece,
    Sample,
    batch_arrays,
    check_sample_ids,
    check_sample_ids_of_hosts,
    check_samples,
    whole_pieces,
)
from jaxppo.sharding import (
    Packed,
    ParallelMesh,
    check_parallel,
    multihost,
    pack,
    segment_multiple,
)


class RowSizes(TypedDict, total=False):
    """The optional sizes of `RolloutBatch.from_samples`."""

    rows: int | None
    buckets: Sequence[int] | None
    micro_batches: int | None
    max_tokens: int | None
    num_segments: int | None


class Packing(RowSizes, total=False):
    """The options of `RolloutBatch.from_samples`."""

    row_length: Required[int]
    parallel: ParallelMesh | None
    share_prefixes: bool
    mtp_depths: int


def packed_samples(
    samples: Sequence[Sample],
    row_length: int,
    sizes: RowSizes,
    parallel: ParallelMesh | None,
    share_prefixes: bool,
    mtp_depths: int,
    twin: Sequence[Sample] | None,
) -> list[dict[str, Any]]:
    """The arrays by name, and K, of the batch of `RolloutBatch.from_samples`, and of its twin if
    there is one.
    """
    check_parallel(parallel, "ParallelMesh or None")
    with multihost.together(parallel):
        prompts = _check(samples, share_prefixes, mtp_depths)
        if twin is not None:
            _check_twin(samples, twin, share_prefixes, parallel)
        pieces = whole_pieces(samples)
        if share_prefixes:
            # imported here because few programs share prefixes
            from jaxppo.batch.prefixes import shared_pieces
            from jaxppo.batch.shared_rows import prompts_of, with_known

            samples = with_known(samples)
            codes = prompts_of(samples).codes
            pieces = shared_pieces(
                samples, codes, row_length, sizes.get("num_segments"), mtp_depths, parallel
            )
        places = _rooms(pieces, twin)
    hosts = hosts_of(parallel)
    if share_prefixes and sizes.get("num_segments") is not None and not hosts:
        _check_num_segments(samples, row_length, sizes, mtp_depths, parallel)
    packed = _packed(places, pieces, samples, row_length, parallel, sizes)
    ids = sample_ids_of(samples, hosts)
    with multihost.together(parallel):
        check_sample_ids(ids)
        batches = _batches(samples, twin, pieces, packed, ids, share_prefixes)
    if hosts:
        check_hosts(hosts, prompts, ids, batches, mtp_depths)
    options = repr((row_length, sorted(sizes.items()), share_prefixes, mtp_depths, parallel))
    shape = (packed.micro_batches or 1, packed.rows, packed.num_segments)
    warn_of_many_shapes(
        "RolloutBatch.from_samples", options, shape, len(sizes.get("buckets") or ())
    )
    return [{**arrays, "micro_batches": packed.micro_batches} for arrays in batches]


def _check(samples: Sequence[Sample], share_prefixes: bool, mtp_depths: int) -> Prompts:
    """Checks samples and options; returns the prompts."""
    check_samples(samples)
    prompts = check_groups(samples)
    check_flag("share_prefixes", share_prefixes)
    check_count("mtp_depths", mtp_depths)
    check(
        "mtp_depths", mtp_depths, share_prefixes or mtp_depths == 0, "0 without share_prefixes=True"
    )
    return prompts


def _rooms(pieces: Sequence[Piece], twin: Sequence[Sample] | None) -> list[range]:
    """The tokens of each piece; a sample and its twin have the same room, that of the longer."""
    places = [range(piece.start, piece.stop) for piece in pieces]
    if twin is None:
        return places
    others = [range(len(sample.tokens)) for sample in twin]
    return [max(own, other, key=len) for own, other in zip(places, others, strict=True)]


def _batches(
    samples: Sequence[Sample],
    twin: Sequence[Sample] | None,
    pieces: Sequence[Piece],
    packed: Packed,
    ids: Sequence[int],
    share_prefixes: bool,
) -> list[dict[str, np.ndarray | None]]:
    """The arrays of the batch, and of its twin if there is one."""
    if twin is None:
        return [batch_arrays(samples, pieces, packed, ids, share_prefixes)]
    both = []
    for several in (samples, twin):
        arrays = batch_arrays(
            several, whole_pieces(several), _at_ends(packed, several), ids, share_prefixes
        )
        both.append(arrays)
    return both


def hosts_of(parallel: ParallelMesh | None) -> ParallelMesh | None:
    """The mesh, if devices of several processes are in it."""
    if parallel is not None and multihost.spans_processes(parallel):
        return parallel
    return None


def sample_ids_of(samples: Sequence[Sample], hosts: ParallelMesh | None) -> list[int]:
    """The id of each sample; by default its number among the samples of all hosts, which must
    call this together.
    """
    first = 0
    if hosts is not None:
        first = multihost.numbers_before(hosts, len(samples))
    return [
        first + i if sample.sample_id is None else int(sample.sample_id)
        for i, sample in enumerate(samples)
    ]


def check_hosts(
    hosts: ParallelMesh,
    prompts: Prompts,
    ids: Sequence[int],
    batches: Sequence[Mapping[str, Any]],
    mtp_depths: int,
) -> None:
    """Raises where hosts have one group for two prompts, one id for two samples, or other
    arrays; all must call it.
    """
    check_groups_of_hosts(prompts)
    check_sample_ids_of_hosts(ids, hosts)
    names = []
    for prefix, arrays in zip(("", "twin."), batches, strict=False):
        names += [prefix + name for name, array in arrays.items() if array is not None]
    names.sort()
    if mtp_depths:
        names.append(f"mtp_depths={mtp_depths}")
    multihost.check_equal("samples", names)


def _packed(
    places: Sequence[range],
    pieces: Sequence[Piece],
    samples: Sequence[Sample],
    row_length: int,
    parallel: ParallelMesh | None,
    sizes: RowSizes,
) -> Packed:
    return pack(
        places,
        row_length=row_length,
        parallel=parallel,
        loads=[
            0.0 if piece.shared else float(samples[piece.sample].mask.sum()) for piece in pieces
        ],
        bundles=[piece.bundle for piece in pieces],
        **sizes,
    )


def _check_num_segments(
    samples: Sequence[Sample],
    row_length: int,
    sizes: RowSizes,
    mtp_depths: int,
    parallel: ParallelMesh | None,
) -> None:
    """Raises where trees do not fit the rows, but would with more segments in a row: a shared
    prefix takes one too.
    """
    from jaxppo.batch.prefixes import shared_pieces
    from jaxppo.batch.shared_rows import prompts_of

    codes = prompts_of(samples).codes

    def fits(segments: int) -> bool:
        pieces = shared_pieces(samples, codes, row_length, segments, mtp_depths, parallel)
        places = [range(piece.start, piece.stop) for piece in pieces]
        try:
            _packed(
                places, pieces, samples, row_length, parallel, {**sizes, "num_segments": segments}
            )
        except ValueError:
            return False
        return True

    num_segments = sizes["num_segments"]
    if not is_whole(num_segments) or num_segments < 1 or fits(num_segments):
        return
    more = range(num_segments + 1, 2 * len(samples) + 1)
    least = bisect.bisect_left(more, True, key=fits)
    if least < len(more):
        expected = (
            f"at least {more[least]} with share_prefixes, since a prefix that samples share takes a"
            " segment too"
        )
        raise ValueError(f"num_segments: got {num_segments}, expected {expected}")


def _check_twin(
    samples: Sequence[Sample],
    twin: Sequence[Sample],
    share_prefixes: bool,
    parallel: ParallelMesh | None,
) -> None:
    """Raises unless the twin has the samples' responses, and both can be packed with these at
    the same positions.
    """
    check_samples(twin, "twin")
    check(
        "twin",
        f"{len(twin)} samples",
        len(twin) == len(samples),
        f"{len(samples)}, one for each of samples",
    )
    for i, (sample, other) in enumerate(zip(samples, twin, strict=True)):
        own = np.asarray(sample.tokens)[sample.start :]
        theirs = np.asarray(other.tokens)[other.start :]
        expected = f"that of samples[{i}], {len(own)} tokens"
        check(
            "twin",
            f"a response of {len(theirs)} tokens in sample {i}",
            len(own) == len(theirs),
            expected,
        )
        if (own != theirs).any():
            k = int(np.argmax(own != theirs))
            got = f"{theirs[k]} as response token {k} of sample {i}"
            raise ValueError(f"twin: got {got}, expected {own[k]}, as in samples[{i}]")
        good = other.sample_id in (None, sample.sample_id)
        expected = f"{sample.sample_id}, as in samples[{i}]"
        check("twin", f"sample_id {other.sample_id} in sample {i}", good, expected)
    check(
        "share_prefixes",
        share_prefixes,
        not share_prefixes,
        "False with a twin, whose prompts are other ones",
    )
    if parallel is not None:
        good = segment_multiple(parallel.context_layout, parallel.context_size) == 1
        expected = (
            "another: it places the tokens of a sequence by the sequence's length, which differs"
            " between twins"
        )
        check("parallel", f"context layout {parallel.context_layout!r} with a twin", good, expected)


def _at_ends(packed: Packed, samples: Sequence[Sample]) -> Packed:
    """The places of samples that end where their rooms end; what is free before the shorter one
    stays padding.
    """
    lengths = np.array([len(sample.tokens) for sample in samples], np.int32)
    return dataclasses.replace(
        packed, lengths=lengths, start=packed.start + packed.lengths - lengths
    )


# (K, R, S) of the batches so far, for each set of options
_shapes: dict[str, set[tuple[int, ...]]] = {}
_warned = False


def warn_of_many_shapes(name: str, options: str, shape: tuple[int, ...], buckets: int) -> None:
    """Warns once a process, when equal options have led to a third shape: each compiles a jitted
    step again.

    `name` is the function's that the user called, and `shape` is (K, R, S), or (K, R, S, U) of
    `TokenTrees`.
    """
    global _warned
    shapes = _shapes.setdefault(f"{name}: {options}", set())
    shapes.add(shape)
    if _warned or len(shapes) <= max(2, buckets):
        return
    _warned = True
    options_of = {
        "K": "micro_batches=",
        "R": "rows= (or a short list of buckets=)",
        "S": "num_segments=",
        "U": "batch_row_length=",
    }
    differ = []
    fixes = []
    for (size, option), sizes in zip(options_of.items(), zip(*shapes, strict=True), strict=False):
        if len(set(sizes)) > 1:
            differ.append(f"{size} = {', '.join(map(str, sorted(set(sizes))))}")
            fixes.append(option)
    warnings.warn(
        f"{name}: got batches of {len(shapes)} shapes from the same options ({'; '.join(differ)}), "
        f"expected few, since a jitted step compiles again for each; give {' and '.join(fixes)}",
        stacklevel=4,
    )
