"""What the functions on rows and layouts refuse: each error names the argument, what came and
what was expected.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import (
    logical_positions,
    make_parallel_mesh,
    redistribute,
    scan_affine,
    segment_sum,
    shift_left,
)


def zigzag():
    return make_parallel_mesh("dp=2,cp=4", context_layout="zigzag")


def per_segment():
    return make_parallel_mesh("dp=2,cp=4", context_layout="zigzag_per_segment")


ROWS = np.ones((2, 48), np.float32)
IDS = np.ones((2, 48), np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: redistribute(ROWS, zigzag(), "zigzag", "ring"),
            "target: got 'ring', expected one of contiguous, zigzag",
        ),
        (
            lambda: redistribute(ROWS[0], zigzag(), "zigzag", "striped"),
            r"x: got shape \(48,\), expected \[R, T, ...\]",
        ),
        (
            lambda: redistribute(ROWS[:, :44], zigzag(), "contiguous", "zigzag"),
            (
                "row length in redistribute: got 44, expected a multiple of 8 for layout 'zigzag'"
                " over 4 .* works is 48"
            ),
        ),
        (
            lambda: redistribute(ROWS, zigzag(), "zigzag", "zigzag_per_segment"),
            (
                "segment_ids: got None in redistribute, expected it for context layout"
                " 'zigzag_per_segment'"
            ),
        ),
        (
            lambda: redistribute([ROWS, ROWS[:, 8:]], zigzag(), "zigzag", "striped"),
            r"x\[1\]: got shape \(2, 40\)",
        ),
        (lambda: shift_left(ROWS, zigzag(), by=-1), "by: got -1, expected at least 0"),
        (lambda: shift_left(ROWS, per_segment()), "segment_ids: got None in shift_left"),
        (
            lambda: shift_left(ROWS, per_segment(), 1, 0, IDS),
            "num_segments: got None in shift_left",
        ),
        (
            lambda: shift_left(ROWS, zigzag(), 1, 0, IDS[:, 8:]),
            r"x: got shape \(2, 48\), .* \[R, T\] = \(2, 40\)",
        ),
        (
            lambda: shift_left(ROWS, zigzag(), 1, 0, ROWS),
            r"segment_ids: got float32\(2, 48\), expected integers",
        ),
        (
            lambda: scan_affine(ROWS[:, 8:], ROWS, zigzag()),
            r"a, b: got shapes \(2, 40\) and \(2, 48\)",
        ),
        (lambda: scan_affine(ROWS, ROWS, per_segment()), "segment_ids: got None in scan_affine"),
        (
            lambda: scan_affine(1.0, ROWS[:, :44], zigzag()),
            "row length in scan_affine: got 44, .* works is 48",
        ),
        (
            lambda: logical_positions("striped", 30, 4),
            "row_length: got 30, expected a multiple of 4 .* works is 32",
        ),
        (
            lambda: scan_affine(1.0, ROWS[:, :0]),
            r"b: got shape \(2, 0\), expected \[R, T, ...\]",
        ),
        (
            lambda: scan_affine(1.0, ROWS[:0], zigzag()),
            r"b: got shape \(0, 48\), expected .* at least 1",
        ),
        (
            lambda: shift_left({"y": ROWS[:, :0]}, zigzag()),
            r"x\['y'\]: got shape \(2, 0\), expected .* at least 1",
        ),
        (
            lambda: redistribute(ROWS[:0], zigzag(), "zigzag", "striped"),
            r"x: got shape \(0, 48\), .* at least 1",
        ),
        (
            lambda: shift_left(ROWS.tolist(), zigzag()),
            r"x\[0\]\[0\]: got shape \(\), expected \[R, T, ...\]",
        ),
        (
            lambda: shift_left(ROWS, zigzag(), 1, 0, IDS.tolist()),
            r"segment_ids: got list\(2, 48\), expected integers",
        ),
        (lambda: shift_left(ROWS, fill=ROWS), r"fill: got shape \(2, 48\), expected a scalar"),
        (
            lambda: shift_left(IDS.astype(np.uint8), fill=-1),
            "fill: got -1, expected a number that uint8 holds",
        ),
        (lambda: shift_left(IDS, fill=np.nan), "fill: got nan, expected a number that int32 holds"),
        (lambda: shift_left(IDS, fill=0.5), "fill: got 0.5, expected a number that int32 holds"),
        (
            lambda: shift_left({"a": ROWS, "b": IDS > 0}, fill=2),
            "fill: got 2, expected a number that bool holds",
        ),
        (
            lambda: shift_left(ROWS.astype(jnp.float16), fill=1e6),
            "fill: got 1000000.0, .* that float16 holds",
        ),
        (
            lambda: jax.jit(lambda x: shift_left(IDS, fill=x))(0.5),
            "fill: got .*Tracer.* that int32 holds",
        ),
        (
            lambda: shift_left(jnp.ones((2, 48, 0))),
            r"x: got shape \(2, 48, 0\), expected .* each at least 1",
        ),
        (
            lambda: shift_left(jnp.ones((2, 48, 3, 0)), zigzag()),
            r"x: got shape \(2, 48, 3, 0\), expected",
        ),
        (
            lambda: redistribute(jnp.ones((2, 48, 0)), zigzag(), "contiguous", "zigzag"),
            r"x: got shape \(2, 48, 0\), expected .* each at least 1",
        ),
        (
            lambda: shift_left(ROWS, zigzag().mesh),
            "parallel: got Mesh, expected ParallelMesh, ShardAxes or None",
        ),
        (lambda: shift_left(ROWS, by=1.5), "by: got 1.5, expected a static integer of at least 0"),
        (
            lambda: jax.jit(lambda by: shift_left(ROWS, by=by))(1),
            "by: got .*Tracer.*, expected a static integer",
        ),
        (
            lambda: scan_affine(1.0, ROWS, None, True, ROWS),
            r"segment_ids: got float32\(2, 48\), expected integers",
        ),
        (
            lambda: scan_affine(1.0, ROWS, per_segment(), True, IDS, 2.0),
            "num_segments: got 2.0, expected a static int",
        ),
        (
            lambda: scan_affine(1.0, ROWS, per_segment(), True, IDS, 0),
            "num_segments: got 0, expected at least 1",
        ),
        (lambda: segment_sum(ROWS, IDS, 2.0), "num_segments: got 2.0, expected a static integer"),
        (
            lambda: segment_sum(ROWS, ROWS, 2),
            r"segment_ids: got float32\(2, 48\), expected integers \[R, T\]",
        ),
        (lambda: logical_positions("zigzag", 0, 4), "row_length: got 0, expected at least 1"),
        (
            lambda: logical_positions("zigzag", 8.0, 4),
            "row_length: got 8.0, expected a static integer",
        ),
        (lambda: logical_positions("zigzag", 8, 0), "shards: got 0, expected at least 1"),
        (
            lambda: logical_positions("zigzag_per_segment", 8, 4),
            "segment_lengths: got None, expected",
        ),
        (
            lambda: logical_positions("zigzag_per_segment", 8, 4, np.array([[-3, 8]])),
            r"segment_lengths: got \[\[-3  8\]\]",
        ),
        (
            lambda: logical_positions("zigzag_per_segment", 48, 4, np.array([[8, 0], [40, 9]])),
            (
                "segment_lengths: got 56 positions in row 1, each sequence padded to a multiple of"
                " 8, expected at most 48"
            ),
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("float32", np.nan),
        ("bfloat16", -np.inf),
        ("bfloat16", 0.1),
        ("uint8", 255),
        ("int8", -1),
        ("bool", True),
        ("int32", 1.0),
    ],
)
def test_a_fill_that_fits(dtype, fill):
    x = jnp.ones((2, 48), dtype)
    for got in (shift_left(x, fill=fill), shift_left(x, zigzag(), fill=fill)):
        assert got.dtype == x.dtype
    is_nan = bool(np.isnan(fill))
    expected = np.full(2, fill, jnp.dtype(dtype))
    np.testing.assert_array_equal(shift_left(x, fill=fill)[:, -1], expected, equal_nan=is_nan)
    traced = jax.jit(lambda x, fill: shift_left(x, fill=fill))
    if dtype in ("float32", "bfloat16"):
        np.testing.assert_array_equal(traced(x, fill), shift_left(x, fill=fill), equal_nan=is_nan)
