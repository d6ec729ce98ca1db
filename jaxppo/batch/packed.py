"""Packs samples on the host into the arrays of a batch, optionally with shared prefixes stored once."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any

from jaxppo.base.arrays import check, check_count, check_flag
from jaxppo.batch.same_prompts import check_groups, check_groups_of_hosts
from jaxppo.batch.samples import (
    Sample,
    batch_arrays,
    check_sample_ids,
    check_sample_ids_of_hosts,
    check_samples,
    loads_of,
    whole_pieces,
)
from jaxppo.batch.twins import at_ends, check_twin, rooms
from jaxppo.sharding import ParallelMesh, check_parallel, check_row_length, multihost, pack


def packed_samples(
    samples: Sequence[Sample],
    sizes: dict[str, Any],
    parallel: ParallelMesh | None,
    share_prefixes: bool,
    mtp_depths: int,
    twin: Sequence[Sample] | None,
) -> list[dict[str, Any]]:
    """The arrays of each batch of `RolloutBatch.from_samples`, by name, and K: of one, and of its twin if there is one.

    Args:
      samples: the samples of this process.
      sizes: keyword arguments for `pack`: row_length, num_segments, ...
      parallel: the mesh.
      share_prefixes: see `RolloutBatch.from_samples`.
      mtp_depths: see `RolloutBatch.from_samples`.
      twin: see `RolloutBatch.from_samples`.
    """
    check_parallel(parallel, "ParallelMesh or None")
    with multihost.together(parallel):
        check_samples(samples)
        prompts = check_groups(samples)
        _check_options(share_prefixes, mtp_depths)
        if twin is not None:
            check_twin(samples, twin, share_prefixes, parallel)
        masks, pieces = [sample.mask for sample in samples], whole_pieces(samples)
        if share_prefixes:
            from jaxppo.batch.prefixes import shared_pieces  # imported here because few programs share prefixes

            layout, shards = (parallel.context_layout, parallel.context_size) if parallel else ("contiguous", 1)
            check_row_length(sizes["row_length"], layout, shards)
            limits = {name: sizes[name] for name in ("row_length", "num_segments")}
            pieces = shared_pieces(samples, **limits, mtp_depths=mtp_depths, parallel=parallel)
    packed = pack(
        [range(piece.start, piece.stop) for piece in pieces] if twin is None else rooms(samples, twin),
        parallel=parallel,
        loads=loads_of(pieces, masks),
        bundles=[piece.bundle for piece in pieces],
        **sizes,
    )
    several = parallel is not None and multihost.spans_processes(parallel)
    first = multihost.numbers_before(parallel, len(samples)) if several and parallel else 0
    ids = [first + i if s.sample_id is None else int(s.sample_id) for i, s in enumerate(samples)]
    with multihost.together(parallel):
        check_sample_ids(ids)
        if twin is None:
            made = [batch_arrays(samples, masks, pieces, packed, ids, trees=share_prefixes)]
        else:
            made = [
                batch_arrays(x, [s.mask for s in x], whole_pieces(x), at_ends(packed, x), ids, trees=False)
                for x in (samples, twin)
            ]
    if several and parallel:
        check_groups_of_hosts(prompts)
        check_sample_ids_of_hosts(ids, parallel)
        names = sorted("twin." * i + name for i, x in enumerate(made) for name, array in x.items() if array is not None)
        multihost.check_equal("samples", [*names, f"mtp_depths={mtp_depths}"] if mtp_depths else names)
    _warn_of_many_shapes(
        (*sizes.items(), share_prefixes, mtp_depths, parallel),
        (packed.micro_batches or 1, packed.rows, packed.num_segments),
        len(sizes["buckets"] or ()),
    )
    return [{**arrays, "micro_batches": packed.micro_batches} for arrays in made]


_shapes: dict[str, set[tuple[int, int, int]]] = {}  # (K, R, S) of the batches so far, for each set of options
_warned = False


def _warn_of_many_shapes(options: Hashable, shape: tuple[int, int, int], buckets: int) -> None:
    """Warns once a process, when equal options have led to a third shape: each compiles a jitted step again."""
    global _warned
    if _warned:
        return
    made = _shapes.setdefault(repr(options), set())
    made.add(shape)
    if len(made) <= max(2, buckets):
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


def _check_options(share_prefixes: bool, mtp_depths: int) -> None:
    check_flag("share_prefixes", share_prefixes)
    check_count("mtp_depths", mtp_depths)
    check("mtp_depths", mtp_depths, share_prefixes or mtp_depths == 0, "0 without share_prefixes=True")
