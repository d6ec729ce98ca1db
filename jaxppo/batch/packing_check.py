"""One assertion: the hidden states of a sample do not depend on how a batch was packed.

Users import it from `jaxppo.sharding.testing`. It lies here because it makes batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.sharding import LAYOUTS, ParallelMesh, check_parallel, logical_positions

_ADVICE = (
    "none of these; attention must stay within a segment and positions begin anew in each: follow batch.paths and "
    "batch.positions, see docs/your_model.md"
)
Piece = tuple[np.ndarray, int]
"""The tokens of a sequence, and the places that it takes in its row."""


def assert_packing_invariant(
    hidden_fn: Callable[[Any, RolloutBatch], Float[Array, "R T H"]],
    params: Any,
    *,
    vocab_size: int,
    parallel: ParallelMesh | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Checks that a model's hidden states of a sample do not depend on how the sample is packed.

    It packs one sample of random tokens in several ways, and compares the hidden states of its tokens: beside other
    samples, at another place in the row, in a row of twice the length, in each context layout, and beside padding with
    other ids. A model that is blind to segments fails. Its loss does not show it: `ppo_kl` is 0 and `ratio_mean` is 1,
    since old and new log-probs are equally wrong. For each context shard, or two without a mesh, rows have 8 or 16
    tokens, and positions are below 4.

    Args:
      hidden_fn: `hidden_fn(params, batch)` gives the final hidden states `[R, T, H]`, in the batch's order; jitted, if
        it shall be.
      params: the first argument of hidden_fn.
      vocab_size: V; random tokens are below it.
      parallel: the mesh that hidden_fn runs on. Batches are then packed for it and put on it, in its context layout
        alone. Without a mesh hidden_fn runs on rows in the order of every layout on two shards.
      tolerance: the largest difference that is rounding, as a share of the largest hidden state; by default 1e-4, and
        0.03 for hidden states of 16 bits.
      seed: of the random tokens.

    Returns:
      The largest difference of each comparison, as a share of the largest hidden state.

    Raises:
      AssertionError: names everything that the hidden states depend on, and by how much.
      TypeError: `parallel` is not a `ParallelMesh` or None.
      ValueError: hidden states of another shape, or that are not finite.

    Example:
      >>> from jaxppo.sharding.testing import assert_packing_invariant
      >>> table = jax.random.normal(jax.random.key(0), (50, 8))
      >>> def right(table, batch):                              # attention with equal weights, along batch.paths
      ...     seen = batch.paths.attends(batch.paths).astype(float)
      ...     return seen / seen.sum(-1, keepdims=True) @ table[batch.tokens]
      >>> max(assert_packing_invariant(right, table, vocab_size=50).values()) < 1e-5
      True
      >>> def blind(table, batch):                              # a causal mask of the whole row
      ...     seen = jnp.tril(jnp.ones((batch.tokens.shape[1],) * 2))
      ...     return seen / seen.sum(-1, keepdims=True) @ table[batch.tokens]
      >>> assert_packing_invariant(blind, table, vocab_size=50)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      AssertionError: hidden_fn: got hidden states of a sample that depend on what is packed beside it (...
    """
    check_parallel(parallel, "ParallelMesh or None")
    rng, shards = np.random.default_rng(seed), parallel.context_size if parallel else 2
    unit = 2 * shards  # what every layout divides rows and segments by

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, vocab_size, count, dtype=np.int32)

    ours = (tokens(2 * unit), 2 * unit)
    before, after, other_before, other_after = ((tokens(unit - 1), unit) for _ in range(4))  # each ends in padding
    own_layout = parallel.context_layout if parallel else "contiguous"

    def hidden(
        pieces: Sequence[Piece], length: int = 4 * unit, layout: str = own_layout, others: int = 0
    ) -> np.ndarray:
        rows = 2 * (parallel.data_size if parallel else 1)
        padding = np.random.default_rng((seed, others)).integers(0, vocab_size, (rows, length), dtype=np.int32)
        # the rows after the first hold a sequence each, which is other in each comparison of what lies beside
        beside = [(other_before, other_after)[others % 2], ours]
        batch, mine = _batch([pieces, *[beside] * (rows - 1)], padding, layout, shards, at=ours)
        found = hidden_fn(params, batch.put(parallel) if parallel else batch)
        if found.shape[:2] != batch.tokens.shape or found.ndim != 3:
            raise ValueError(f"hidden_fn: got shape {found.shape}, expected {batch.tokens.shape} and the hidden size")
        dtypes.add(jnp.dtype(found.dtype))
        states = np.asarray(found[0].astype(jnp.float32), np.float64)[mine]
        if not np.isfinite(states).all():
            raise ValueError("hidden_fn: got hidden states that are not finite, expected finite ones")
        return states

    dtypes: set[Any] = set()
    usual = hidden([before, ours, after])
    packed = {
        "what is packed beside it": hidden([other_before, ours, other_after], others=2),
        "its place in the row": hidden([ours, before, after]),
        "the row length": hidden([before, ours, after], length=8 * unit),
        "padding": hidden([before, ours, after], others=4),
    }
    if parallel is None:
        # at the end of a row each layout but "contiguous" has later tokens before earlier ones in memory
        layouts = {layout: hidden([before, after, ours], layout=layout) for layout in LAYOUTS}
        last = layouts.pop(own_layout)
        packed |= {f"the context layout {layout!r}": usual + x - last for layout, x in layouts.items()}
    largest = max(np.abs(usual).max(), np.finfo(np.float32).tiny)
    differences = {name: float(np.abs(x - usual).max() / largest) for name, x in packed.items()}
    if tolerance is None:
        tolerance = 1e-4 if all(dtype.itemsize > 2 for dtype in dtypes) else 0.03
    if faults := [f"{name} ({share:.2g} of the largest)" for name, share in differences.items() if share > tolerance]:
        raise AssertionError(
            f"hidden_fn: got hidden states of a sample that depend on {', '.join(faults)}, expected them to depend on "
            f"{_ADVICE}"
        )
    return differences


def _batch(
    rows: Sequence[Sequence[Piece]], padding: np.ndarray, layout: str, shards: int, at: Piece
) -> tuple[RolloutBatch, np.ndarray]:
    """The rows in the order of a layout, and where the tokens of the piece `at` are in the first."""
    tokens, (count, length) = padding.copy(), padding.shape
    segment_ids, positions, mine = (np.zeros((count, length), np.int32) for _ in range(3))
    sizes = np.zeros((count, max(map(len, rows))), np.int64)
    for row, pieces in enumerate(rows):
        start = 0
        for slot, piece in enumerate(pieces):
            ids, places = piece
            where = slice(start, start + len(ids))
            tokens[row, where], segment_ids[row, where], positions[row, where] = ids, slot + 1, np.arange(len(ids))
            mine[row, where] = (piece is at) * (1 + np.arange(len(ids)))
            sizes[row, slot], start = len(ids), start + places
    order = np.broadcast_to(logical_positions(layout, length, shards, sizes), padding.shape)
    tokens, segment_ids, positions, mine = (
        np.take_along_axis(x, order, axis=1) for x in (tokens, segment_ids, positions, mine)
    )
    numbers = np.arange(sizes.size, dtype=np.int32).reshape(sizes.shape)
    arrays: dict[str, Any] = {"tokens": tokens, "targets": tokens, "segment_ids": segment_ids, "positions": positions}
    arrays |= {"loss_mask": np.zeros(padding.shape, np.float32), "sample_ids": np.where(sizes > 0, numbers, -1)}
    found = np.argsort(mine[0], kind="stable")[-len(at[0]) :]
    return RolloutBatch(**arrays, context_layout=layout, context_shards=shards), found
