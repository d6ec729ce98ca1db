"""A check before the first step: a model keeps the samples of a row apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxppo.base.arrays import check, check_count, check_type, plain_number
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.sharding import (
    LAYOUTS,
    Packed,
    ParallelMesh,
    check_parallel,
    logical_positions,
    multihost,
    unpack,
)

_ADVICE = (
    "none of these; attention must stay within a segment and positions begin anew in each: follow"
    " batch.paths and batch.positions, see docs/your_model.md"
)
Piece = tuple[np.ndarray, int]  # the tokens of a sequence, and the places that it takes in its row


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

    Call it before the first step; on a mesh it runs two small programs. It packs a sample of random
    tokens beside other samples, at another place in the row, in a row of twice the length, in each
    context layout, and beside padding with other ids, and compares the hidden states of its tokens.
    A model that is blind to segments fails. Its loss does not show it: `ppo_kl` is 0 and
    `ratio_mean` is 1, since old and new log-probs are equally wrong. For each context shard, or two
    without a mesh, rows have 8 or 16 tokens, and positions are below 4. Where the mesh spans
    processes, all must call it together.

    Args:
      hidden_fn: `hidden_fn(params, batch)` gives the final hidden states `[R, T, H]`, in the
        batch's order; jitted, if it shall be.
      params: the first argument of hidden_fn.
      vocab_size: V; random tokens are below it.
      parallel: the mesh that hidden_fn runs on, with batches in its context layout alone. Without a
        mesh hidden_fn runs on rows in the order of every layout on two shards.
      tolerance: the largest difference that is rounding, as a share of the largest hidden state; by
        default 1e-4, and 0.03 for hidden states of 16 bits.
      seed: of the random tokens.

    Returns:
      The largest difference of each comparison, as a share of the largest hidden state.

    Raises:
      AssertionError: names everything that the hidden states depend on, and by how much.
      TypeError, ValueError: arguments that are none of these; hidden states of another shape, or
        that are not finite.

    Example:
      >>> from jaxppo import assert_packing_invariant
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
    check_type("hidden_fn", hidden_fn, callable(hidden_fn), "a function of (params, batch)")
    check_parallel(parallel, "ParallelMesh or None")
    check_count("vocab_size", vocab_size, least=1)
    check_count("seed", seed)
    if tolerance is not None:
        tolerance = plain_number("tolerance", tolerance, least=0)
    trial = _Trial(hidden_fn, params, vocab_size, parallel, seed)
    own_layout = parallel.context_layout if parallel else "contiguous"
    length = 4 * trial.unit
    before, after, other_before, other_after = trial.others
    usual = trial.hidden([before, trial.ours, after], length, own_layout)
    states = {
        "what is packed beside it": trial.hidden(
            [other_before, trial.ours, other_after],
            length,
            own_layout,
            padding=2,
            neighbour=other_after,
        ),
        "its place in the row": trial.hidden([trial.ours, before, after], length, own_layout),
        "the row length": trial.hidden([before, trial.ours, after], 2 * length, own_layout),
        "padding": trial.hidden([before, trial.ours, after], length, own_layout, padding=4),
    }
    if parallel is None:
        # at the end of a row each layout but "contiguous" has later tokens before earlier ones in
        # memory
        layouts = {
            layout: trial.hidden([before, after, trial.ours], length, layout) for layout in LAYOUTS
        }
        last = layouts.pop(own_layout)
        states |= {
            f"the context layout {layout!r}": usual + x - last for layout, x in layouts.items()
        }
    largest = max(np.abs(usual).max(), np.finfo(np.float32).tiny)
    differences = {name: float(np.abs(x - usual).max() / largest) for name, x in states.items()}
    if tolerance is None:
        tolerance = 1e-4 if all(dtype.itemsize > 2 for dtype in trial.dtypes) else 0.03
    faults = [
        f"{name} ({share:.2g} of the largest)"
        for name, share in differences.items()
        if share > tolerance
    ]
    if faults:
        raise AssertionError(
            f"hidden_fn: got hidden states of a sample that depend on {', '.join(faults)}, expected"
            f" them to depend on {_ADVICE}"
        )
    return differences


class _Trial:
    """A sample of random tokens, others to be packed beside it, and the model that runs on them."""

    def __init__(
        self,
        hidden_fn: Callable[[Any, RolloutBatch], Float[Array, "R T H"]],
        params: Any,
        vocab_size: int,
        parallel: ParallelMesh | None,
        seed: int,
    ) -> None:
        self.hidden_fn = hidden_fn
        self.params = params
        self.vocab_size = vocab_size
        self.parallel = parallel
        self.seed = seed
        self.dtypes: set[Any] = set()  # of the hidden states
        self.shards = parallel.context_size if parallel else 2
        self.unit = 2 * self.shards  # what every layout divides rows and segments by
        rng = np.random.default_rng(seed)

        def piece(length: int, places: int) -> Piece:
            return rng.integers(0, vocab_size, length, dtype=np.int32), places

        self.ours = piece(2 * self.unit, 2 * self.unit)
        self.others = [piece(self.unit - 1, self.unit) for _ in range(4)]  # each ends in padding

    def hidden(
        self,
        pieces: Sequence[Piece],
        length: int,
        layout: str,
        *,
        padding: int = 0,
        neighbour: Piece | None = None,
    ) -> np.ndarray:
        """The hidden states of our sample where the first row holds these pieces.

        `padding` seeds what pads rows. The other rows hold a neighbour, by default always the same,
        and our sample.
        """
        data_size = self.parallel.data_size if self.parallel else 1
        rows = 2 * data_size
        rng = np.random.default_rng((self.seed, padding))
        padding_ids = rng.integers(0, self.vocab_size, (rows, length), dtype=np.int32)
        if neighbour is None:
            neighbour = self.others[2]
        batch, packed = _batch(
            [pieces, *[[neighbour, self.ours]] * (rows - 1)], padding_ids, layout, self.shards
        )
        hidden = self.hidden_fn(self.params, _put(batch, self.parallel) if self.parallel else batch)
        good = hidden.ndim == 3 and hidden.shape[:2] == batch.tokens.shape
        check(
            "hidden_fn", f"shape {hidden.shape}", good, f"{batch.tokens.shape} and the hidden size"
        )
        self.dtypes.add(jnp.dtype(hidden.dtype))
        number = next(i for i, piece in enumerate(pieces) if piece is self.ours)
        whole = multihost.whole(hidden).astype(jnp.float32)
        states = unpack(whole, packed)[number].astype(np.float64)
        check(
            "hidden_fn",
            "hidden states that are not finite",
            bool(np.isfinite(states).all()),
            "finite ones",
        )
        return states


def _put(batch: RolloutBatch, parallel: ParallelMesh) -> RolloutBatch:
    """The batch on the mesh, of which each process brings the two rows of each of its own data
    shards.
    """
    own = np.repeat(2 * np.array(multihost.local_data_shards(parallel)), 2)
    own[1::2] += 1
    return jax.tree.map(lambda x: x[own], batch).put(parallel)


def _batch(
    rows: Sequence[Sequence[Piece]], padding: np.ndarray, layout: str, shards: int
) -> tuple[RolloutBatch, Packed]:
    """The rows in the order of a layout, and the places of their sequences."""
    ids = [tokens for row in rows for tokens, _ in row]
    lengths = np.array([len(tokens) for tokens in ids], np.int32)
    row = np.repeat(np.arange(len(rows)), [len(pieces) for pieces in rows])
    slot = np.concatenate([np.arange(len(pieces)) for pieces in rows])
    start = np.concatenate(
        [np.cumsum([0, *(places for _, places in pieces[:-1])]) for pieces in rows]
    )
    sizes = np.zeros((len(rows), slot.max() + 1), np.int64)
    sizes[row, slot] = lengths
    order = np.broadcast_to(
        logical_positions(layout, padding.shape[1], shards, sizes), padding.shape
    )
    packed = Packed(lengths, row, slot, start, sizes.shape[1], len(rows), None, order)
    segment_ids = packed.segment_ids
    tokens = np.where(
        segment_ids > 0, packed.place(ids), np.take_along_axis(padding, order, axis=1)
    )
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "targets": tokens,
        "segment_ids": segment_ids,
        "positions": packed.positions,
        "loss_mask": np.zeros(padding.shape, np.float32),
        "sample_ids": packed.place_segments(range(len(ids)), -1, np.int32),
    }
    return RolloutBatch(**arrays, context_layout=layout, context_shards=shards), packed
