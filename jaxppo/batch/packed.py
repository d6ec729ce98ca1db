"""Packs samples on the host into the arrays of a batch, optionally with shared prefixes stored once."""

from __future__ import annotations

import bisect
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Required, TypedDict

import numpy as np

from jaxppo.base.arrays import check, check_count, check_flag
from jaxppo.batch.host import is_whole
from jaxppo.batch.same_prompts import check_groups, check_groups_of_hosts
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
    """The arrays by name, and K, of the batch of `RolloutBatch.from_samples`, and of its twin if there is one."""
    check_parallel(parallel, "ParallelMesh or None")
    with multihost.together(parallel):
        check_samples(samples)
        prompts = check_groups(samples)
        check_flag("share_prefixes", share_prefixes)
        check_count("mtp_depths", mtp_depths)
        check("mtp_depths", mtp_depths, share_prefixes or mtp_depths == 0, "0 without share_prefixes=True")
        if twin is not None:
            _check_twin(samples, twin, share_prefixes, parallel)
        pieces = whole_pieces(samples)
        if share_prefixes:
            # imported here because few programs share prefixes
            from jaxppo.batch.prefixes import shared_pieces
            from jaxppo.batch.shared_rows import with_known

            samples = with_known(samples)
            pieces = shared_pieces(samples, row_length, sizes.get("num_segments"), mtp_depths, parallel)
        places = [range(piece.start, piece.stop) for piece in pieces]
        if twin is not None:  # a sample and its twin have the same room, that of the longer
            places = [max(room, range(len(other.tokens)), key=len) for room, other in zip(places, twin, strict=True)]
    hosts = parallel if parallel and multihost.spans_processes(parallel) else None
    if share_prefixes and sizes.get("num_segments") is not None and not hosts:
        _check_num_segments(samples, row_length, sizes, mtp_depths, parallel)
    packed = _packed(places, pieces, samples, row_length, parallel, sizes)
    first = multihost.numbers_before(hosts, len(samples)) if hosts else 0
    ids = [first + i if s.sample_id is None else int(s.sample_id) for i, s in enumerate(samples)]
    with multihost.together(parallel):
        check_sample_ids(ids)
        each = [(samples, pieces, packed)]
        if twin is not None:
            each = [(x, whole_pieces(x), _at_ends(packed, x)) for x in (samples, twin)]
        made = [batch_arrays(*of_batch, ids, share_prefixes) for of_batch in each]
    if hosts:
        check_groups_of_hosts(prompts)
        check_sample_ids_of_hosts(ids, hosts)
        names = sorted("twin." * i + name for i, x in enumerate(made) for name, array in x.items() if array is not None)
        multihost.check_equal("samples", [*names, f"mtp_depths={mtp_depths}"] if mtp_depths else names)
    _warn_of_many_shapes(
        repr((row_length, sorted(sizes.items()), share_prefixes, mtp_depths, parallel)),
        (packed.micro_batches or 1, packed.rows, packed.num_segments),
        len(sizes.get("buckets") or ()),
    )
    return [{**arrays, "micro_batches": packed.micro_batches} for arrays in made]


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
        loads=[0.0 if piece.shared else float(samples[piece.sample].mask.sum()) for piece in pieces],
        bundles=[piece.bundle for piece in pieces],
        **sizes,
    )


def _check_num_segments(
    samples: Sequence[Sample], row_length: int, sizes: RowSizes, mtp_depths: int, parallel: ParallelMesh | None
) -> None:
    """Raises where trees do not fit the rows, but would with more segments in a row: a shared prefix takes one too."""
    from jaxppo.batch.prefixes import shared_pieces

    def fits(segments: int) -> bool:
        pieces = shared_pieces(samples, row_length, segments, mtp_depths, parallel)
        places = [range(piece.start, piece.stop) for piece in pieces]
        try:
            _packed(places, pieces, samples, row_length, parallel, {**sizes, "num_segments": segments})
        except ValueError:
            return False
        return True

    given = sizes["num_segments"]
    if not is_whole(given) or given < 1 or fits(given):
        return
    more = range(given + 1, 2 * len(samples) + 1)
    least = bisect.bisect_left(more, True, key=fits)
    if least < len(more):
        expected = f"at least {more[least]} with share_prefixes, since a prefix that samples share takes a segment too"
        raise ValueError(f"num_segments: got {given}, expected {expected}")


def _check_twin(
    samples: Sequence[Sample], twin: Sequence[Sample], share_prefixes: bool, parallel: ParallelMesh | None
) -> None:
    """Raises unless the twin has the samples' responses, and both can be packed with these at the same positions."""
    check_samples(twin, "twin")
    check("twin", f"{len(twin)} samples", len(twin) == len(samples), f"{len(samples)}, one for each of samples")
    for i, (sample, other) in enumerate(zip(samples, twin, strict=True)):
        mine, theirs = (np.asarray(x.tokens)[x.start :] for x in (sample, other))
        here, as_in = f"in sample {i}", f"as in samples[{i}]"
        good = len(mine) == len(theirs)
        check("twin", f"a response of {len(theirs)} tokens {here}", good, f"that of samples[{i}], {len(mine)} tokens")
        if (mine != theirs).any():
            at = int(np.argmax(mine != theirs))
            got = f"{theirs[at]} as response token {at} of sample {i}"
            raise ValueError(f"twin: got {got}, expected {mine[at]}, {as_in}")
        good = other.sample_id in (None, sample.sample_id)
        check("twin", f"sample_id {other.sample_id} {here}", good, f"{sample.sample_id}, {as_in}")
    check("share_prefixes", share_prefixes, not share_prefixes, "False with a twin, whose prompts are other ones")
    if parallel is not None:
        good = segment_multiple(parallel.context_layout, parallel.context_size) == 1
        expected = "another: it places the tokens of a sequence by the sequence's length, which differs between twins"
        check("parallel", f"context layout {parallel.context_layout!r} with a twin", good, expected)


def _at_ends(packed: Packed, samples: Sequence[Sample]) -> Packed:
    """The places of samples that end where their rooms end; what is free before the shorter one stays padding."""
    lengths = np.array([len(sample.tokens) for sample in samples], np.int32)
    return dataclasses.replace(packed, lengths=lengths, start=packed.start + packed.lengths - lengths)


_shapes: dict[str, set[tuple[int, int, int]]] = {}  # (K, R, S) of the batches so far, for each set of options
_warned = False


def _warn_of_many_shapes(options: str, shape: tuple[int, int, int], buckets: int) -> None:
    """Warns once a process, when equal options have led to a third shape: each compiles a jitted step again."""
    global _warned
    made = _shapes.setdefault(options, set())
    made.add(shape)
    if _warned or len(made) <= max(2, buckets):
        return
    _warned = True
    sizes = dict(zip("KRS", map(set, zip(*made, strict=True)), strict=True))
    fixes = {"K": "micro_batches=", "R": "rows= (or a short list of buckets=)", "S": "num_segments="}
    differ = [name for name, values in sizes.items() if len(values) > 1]
    found = "; ".join(f"{name} = {', '.join(map(str, sorted(sizes[name])))}" for name in differ)
    warnings.warn(
        f"RolloutBatch.from_samples: got batches of {len(made)} shapes from the same options ({found}), expected few, "
        f"since a jitted step compiles again for each; give {' and '.join(fixes[name] for name in differ)}",
        stacklevel=4,
    )
