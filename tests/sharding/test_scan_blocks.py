"""`scan_affine` over rows of many blocks: the serial loop's numbers, NaN in its place, a program
that stays small.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import logical_positions, make_parallel_mesh, scan_affine
from sharding.layouts.runs import BLOCK

T = 5 * BLOCK + 3 * 4 * 8  # the blocks do not divide the row, nor what a shard holds of it
IDS = np.repeat([1, 2, 3, 4, 0], [1, 3 * BLOCK, BLOCK // 2, T - 4 * BLOCK, BLOCK // 2 - 1])[None]
CASES = [("cp=1", "contiguous"), ("cp=2", "zigzag"), ("cp=2", "striped"), ("cp=4", "contiguous")]


def serial(a, b, reverse):
    """y of `[1, T]` in float64."""
    y = np.zeros(T)
    step = 1 if reverse else -1
    for t in range(T)[::-step]:
        linked = 0 <= t + step < T and IDS[0, t + step] == IDS[0, t]
        if IDS[0, t]:
            y[t] = (a[0, t] * y[t + step] if linked else 0) + b[0, t]
    return y[None]


def on(mesh, layout):
    """The mesh, and a function that puts a row in its order."""
    shards = int(mesh[-1])
    parallel = make_parallel_mesh(mesh, context_layout=layout, devices=jax.devices()[:shards])
    order = logical_positions(layout, T, shards).reshape(1, -1)
    return parallel, lambda x: np.take_along_axis(np.asarray(x), order, axis=1)


@pytest.mark.every(5)
@pytest.mark.parametrize(("mesh", "layout"), CASES)
@pytest.mark.parametrize("reverse", [True, False])
def test_many_blocks_are_the_serial_loop(mesh, layout, reverse):
    """In f64; the gradient by b, alone, is the scan of the weights the other way, with a of the
    neighbour.
    """
    parallel, put = on(mesh, layout)
    rng = np.random.default_rng(0)
    a, b, weight = rng.uniform(-1, 1, size=(3, 1, T))

    def weighed(b, a, weight, ids):
        y = scan_affine(a, b, parallel, reverse, ids)
        return jnp.vdot(y, weight), y

    with jax.enable_x64(True):
        run = jax.jit(jax.grad(weighed, has_aux=True))
        gradient, y = run(*map(put, (b, a, weight, IDS)))
    np.testing.assert_allclose(y, put(serial(a, b, reverse)), rtol=1e-12, atol=1e-12)
    expected = serial(np.roll(a, 1 if reverse else -1, axis=1), weight, not reverse)
    np.testing.assert_allclose(
        gradient, put(np.where(IDS > 0, expected, 0)), rtol=1e-12, atol=1e-12
    )


@pytest.mark.every(7)
@pytest.mark.parametrize(("mesh", "layout"), CASES)
@pytest.mark.parametrize("place", [0, BLOCK, 2 * BLOCK - 1, 3 * BLOCK + 1, T - BLOCK, T - 1])
def test_nan_reaches_what_depends_on_it(mesh, layout, place):
    """Bit by bit: what lies before it in its own sequence is NaN, nothing else is touched."""
    parallel, put = on(mesh, layout)
    b = np.random.default_rng(1).normal(size=(1, T)).astype(np.float32)
    spoiled = b.copy()
    spoiled[0, place] = np.nan
    clean, got = (scan_affine(0.9, put(x), parallel, True, put(IDS)) for x in (b, spoiled))
    places = np.arange(T)[None]
    reached = put((places <= place) & (IDS[0, place] == IDS) & (IDS > 0))
    np.testing.assert_array_equal(got, np.where(reached, np.nan, clean), equal_nan=True)


def test_the_program_does_not_grow_with_the_row():
    """Unrolled by level, it would have five times as many lines at a million positions as at a
    thousand.
    """

    def lines(length):
        row = jax.ShapeDtypeStruct((1, length), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        scan = jax.jit(lambda a, b, ids: scan_affine(a, b, segment_ids=ids))
        return len(scan.lower(row, row, ids).as_text().splitlines())

    assert lines(2**20) < 1.5 * lines(2**11)
