"""Packed rows that are hard to get right: full ones, prompts only, padding only, empty
responses, holes in the mask.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo import RolloutBatch
from sharding import logical_positions, make_parallel_mesh

R, T, S = 8, 32, 4
# Multiples of 8, so that every context layout over 4 shards can hold them.
LENGTHS = np.array(
    [
        [32, 0, 0, 0],
        [16, 0, 0, 0],
        [0] * 4,
        [8, 8, 8, 8],
        [8, 16, 0, 0],
        [0] * 4,
        [8, 0, 0, 0],
        [24, 8, 0, 0],
    ]
)
MESHES = ["dp=8,cp=1,tp=1", "dp=1,cp=8,tp=1", "dp=2,cp=2,tp=2"]
LAYOUTS = ["contiguous", "zigzag", "zigzag_per_segment", "striped"]


def hard_batch(seed=0, **more):
    """A batch in logical order, NaN outside the mask, and one more such array to differentiate
    by.
    """
    rng = np.random.default_rng(seed)
    segment_ids = np.zeros((R, T), int)
    positions = np.zeros((R, T), int)
    mask = np.zeros((R, T), np.float32)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for s, length in enumerate(lengths):
            place = slice(start, start + length)
            segment_ids[row, place], positions[row, place] = s + 1, np.arange(length)
            start += length
    mask[0, 1:31] = 1
    mask[3] = np.tile([0, 1, 1, 1, 0, 1, 1, 0], 4)
    mask[4, 3:6], mask[4, 9:23], mask[4, 15:18] = 1, 1, 0
    mask[6, :2] = 1
    mask[7, 20:23] = 1  # the row also has an empty response

    def array():
        return np.where(mask > 0, rng.normal(size=(R, T)), np.nan).astype(np.float32)

    ids = np.where(LENGTHS > 0, np.arange(R * S).reshape(R, S), -1)
    groups = np.where(ids >= 0, ids % 3, -1)
    names = (
        "advantages",
        "old_log_probs",
        "ref_log_probs",
        "rollout_log_probs",
        "values",
        "returns",
    )
    fields = (
        {name: -jnp.abs(array()) if name.endswith("log_probs") else array() for name in names}
        | {"rewards": rng.normal(size=(R, S)).astype(np.float32)}
        | more
    )
    zeros = np.zeros((R, T), int)
    batch = RolloutBatch(zeros, zeros, segment_ids, positions, mask, ids, groups, ids, **fields)
    return jax.tree.map(jnp.asarray, batch), -jnp.abs(array())


def sequences(batch):
    """The (row, positions) of every sequence, in logical order."""
    for row in range(R):
        for s in range(S):
            where = np.flatnonzero(np.asarray(batch.segment_ids[row]) == s + 1)
            if where.size:
                yield row, s, where


def layouts_on(mesh="dp=2,cp=4,tp=1", layouts=LAYOUTS):
    """For each layout: (layout, parallel, logical -> physical, physical -> logical), two maps of
    `[R, T]`.
    """
    for layout in layouts:
        parallel = make_parallel_mesh(mesh, context_layout=layout)
        per_segment = LENGTHS if layout == "zigzag_per_segment" else None
        order = np.broadcast_to(
            logical_positions(layout, T, parallel.context_size, per_segment), (R, T)
        )

        def to_physical(tree, order=order, parallel=parallel):
            def place(x):
                return (
                    jnp.asarray(np.take_along_axis(np.asarray(x), order, 1))
                    if x.shape == (R, T)
                    else x
                )

            placed = jax.tree.map(place, tree)
            if isinstance(tree, RolloutBatch):
                shards = parallel.context_size
                return dataclasses.replace(
                    placed, context_layout=parallel.context_layout, context_shards=shards
                )
            return placed

        def to_logical(x, order=order):
            return (
                np.take_along_axis(np.asarray(x), np.argsort(order, 1), 1)
                if x.shape == (R, T)
                else np.asarray(x)
            )

        yield layout, parallel, to_physical, to_logical
