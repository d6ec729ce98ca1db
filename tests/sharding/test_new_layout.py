"""A user's context layout: a name and two formulas.

Once it is registered, everything works with it.
"""

import ast
import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import (
    Layout,
    logical_positions,
    make_parallel_mesh,
    pack,
    physical_places,
    redistribute,
    register_layout,
    scan_affine,
    shift_left,
    unpack,
)
from sharding.axes import LAYOUTS
from sharding.testing import assert_trees_close

ROOT = Path(__file__).parents[2]

C, S, T = 4, 3, 48
SEQUENCES = [np.arange(n) + 100 * i for i, n in enumerate([20, 17, 9, 4, 33, 1, 16, 8])]


class ReversedStripes(Layout):
    """Position t is on shard C-1 - t mod C."""

    name = "reversed_stripes"

    def position_at(self, places, row):
        return places % row.local * row.shards + row.shards - 1 - places // row.local

    def place_of(self, positions, row):
        return (row.shards - 1 - positions % row.shards) * row.local + positions // row.shards


class ContiguousPerSegment(Layout):
    """Each sequence cut into C equal runs, padded where C does not divide it."""

    name = "contiguous_per_segment"
    per_segment = True

    def position_at(self, places, row):
        offset = places % row.local
        start, size = (row.at(offset * row.shards, x) for x in (row.ends - row.sizes, row.sizes))
        return start + places // row.local * (size // row.shards) + offset - start // row.shards

    def place_of(self, positions, row):
        start, size = (row.at(positions, x) for x in (row.ends - row.sizes, row.sizes))
        run = size // row.shards
        return (
            (positions - start) // run * row.local + start // row.shards + (positions - start) % run
        )


@pytest.fixture(params=[ReversedStripes, ContiguousPerSegment])
def layout(request):
    register_layout(request.param())
    yield request.param.name
    del LAYOUTS[request.param.name]


def test_packing_and_back(layout):
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    packed = pack(SEQUENCES, row_length=T, parallel=parallel, num_segments=S)
    chex.assert_trees_all_equal(unpack(packed.place(SEQUENCES), packed), SEQUENCES)
    lengths = np.zeros((packed.rows, S), int)
    lengths[packed.row, packed.slot] = packed.lengths
    held = logical_positions(layout, T, C, lengths)
    np.testing.assert_array_equal(np.broadcast_to(held, packed.order.shape), packed.order)
    np.testing.assert_array_equal(physical_places(layout, T, C, lengths), np.argsort(held, axis=-1))


@pytest.mark.every(5)
@pytest.mark.parametrize("other", list(LAYOUTS))
def test_redistribute(layout, other):
    """There, back, and <A x, y> = <x, A' y>."""
    parallel = make_parallel_mesh("dp=2,cp=4")
    lengths = np.array([[16, 24, 8], [8, 32, 0]])  # multiples of what all of the layouts need
    ids = np.array([np.repeat([1, 2, 3, 0], [*row, T - sum(row)]) for row in lengths])
    x, y = np.random.default_rng(0).integers(-99, 99, size=(2, 2, T)).astype(np.float32)
    here, there = (functools.partial(brought_to, name, lengths) for name in (layout, other))

    def move(x):
        return redistribute(x, parallel, layout, other, here(ids), S)

    moved, pull = jax.jit(lambda x, y: (move(x), jax.linear_transpose(move, x)(y)[0]))(
        here(x), there(y)
    )
    np.testing.assert_array_equal(moved, there(x))
    np.testing.assert_array_equal(pull, here(y))
    np.testing.assert_array_equal(
        redistribute(moved, parallel, other, layout, there(ids), S), here(x)
    )


def brought_to(name, lengths, x):
    """From logical order."""
    return np.take_along_axis(
        x, np.broadcast_to(logical_positions(name, T, C, lengths), x.shape), axis=1
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("reverse", [True, False])
def test_shifts_and_scans(layout, reverse):
    """Values and gradients of one device that holds the rows in order."""
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    packed = pack(SEQUENCES, row_length=T, parallel=parallel, num_segments=S)
    a, b, weights = np.random.default_rng(1).normal(size=(3, packed.rows, T)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(parallel, ids, a, b, weights):
        def loss(a, b):
            y = scan_affine(a, b, parallel, reverse, ids, S)
            z = shift_left({"y": y, "b": b}, parallel, 3, -1, ids, S)
            return sum(jnp.vdot(x, weights) for x in jax.tree.leaves((y, z))), (y, z)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(a, b)

    def physical(x):
        return np.take_along_axis(x, packed.order, axis=1)

    ids = np.take_along_axis(packed.segment_ids, np.argsort(packed.order, axis=1), axis=1)
    expected = jax.tree.map(lambda x: physical(np.asarray(x)), run(None, ids, a, b, weights))
    assert_trees_close(run(parallel, *map(physical, (ids, a, b, weights))), expected)


def test_bad_input(layout):
    with pytest.raises(
        TypeError, match=r"layout: got <class .*ReversedStripes'>, expected an instance"
    ):
        register_layout(ReversedStripes)
    with pytest.raises(
        ValueError,
        match=f"layout: got the name {layout!r}, expected another than contiguous, zigzag",
    ):
        register_layout(LAYOUTS[layout])
    with pytest.raises(ValueError, match=f"target: got 'ring', expected one of .*, {layout}"):
        redistribute(jnp.ones((1, T)), None, layout, "ring")


def test_the_names_of_layouts_are_compared_nowhere():
    """Nowhere but in the registry, and where a layout sets its name."""
    for path in [*(ROOT / "sharding").rglob("*.py"), *(ROOT / "jaxppo").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                compared = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)}
                assert not compared & set(LAYOUTS), f"{path}:{node.lineno}"
