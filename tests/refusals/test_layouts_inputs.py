"""What the functions on rows and layouts refuse: each error names the argument, what came and
what was expected.
"""

from functools import partial

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

ZIGZAG = make_parallel_mesh("dp=2,cp=4", context_layout="zigzag")
PER_SEGMENT = make_parallel_mesh("dp=2,cp=4", context_layout="zigzag_per_segment")
ROWS = np.ones((2, 48), np.float32)
IDS = np.ones((2, 48), np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            partial(redistribute, ROWS, ZIGZAG, "zigzag", "ring"),
            "target: got 'ring', expected one of contiguous, zigzag",
        ),
        (
            partial(redistribute, ROWS[0], ZIGZAG, "zigzag", "striped"),
            r"x: got shape \(48,\), expected \[R, T, ...\]",
        ),
        (
            partial(redistribute, ROWS[:, :44], ZIGZAG, "contiguous", "zigzag"),
            (
                "row length in redistribute: got 44, expected a multiple of 8 for layout 'zigzag'"
                " over 4 .* works is 48"
            ),
        ),
        (
            partial(redistribute, ROWS, ZIGZAG, "zigzag", "zigzag_per_segment"),
            (
                "segment_ids: got None in redistribute, expected it for context layout"
                " 'zigzag_per_segment'"
            ),
        ),
        (
            partial(redistribute, [ROWS, ROWS[:, 8:]], ZIGZAG, "zigzag", "striped"),
            r"x\[1\]: got shape \(2, 40\)",
        ),
        (partial(shift_left, ROWS, ZIGZAG, by=-1), "by: got -1, expected at least 0"),
        (partial(shift_left, ROWS, PER_SEGMENT), "segment_ids: got None in shift_left"),
        (
            partial(shift_left, ROWS, PER_SEGMENT, segment_ids=IDS),
            "num_segments: got None in shift_left",
        ),
        (
            partial(shift_left, ROWS, ZIGZAG, segment_ids=IDS[:, 8:]),
            r"x: got shape \(2, 48\), .* \[R, T\] = \(2, 40\)",
        ),
        (
            partial(shift_left, ROWS, ZIGZAG, segment_ids=ROWS),
            r"segment_ids: got float32\(2, 48\), expected integers",
        ),
        (
            partial(scan_affine, ROWS[:, 8:], ROWS, ZIGZAG),
            r"a, b: got shapes \(2, 40\) and \(2, 48\)",
        ),
        (partial(scan_affine, ROWS, ROWS, PER_SEGMENT), "segment_ids: got None in scan_affine"),
        (
            partial(scan_affine, 1.0, ROWS[:, :44], ZIGZAG),
            "row length in scan_affine: got 44, .* works is 48",
        ),
        (
            partial(logical_positions, "striped", 30, 4),
            "row_length: got 30, expected a multiple of 4 .* works is 32",
        ),
        (
            partial(scan_affine, 1.0, ROWS[:, :0]),
            r"b: got shape \(2, 0\), expected \[R, T, ...\]",
        ),
        (
            partial(scan_affine, 1.0, ROWS[:0], ZIGZAG),
            r"b: got shape \(0, 48\), expected .* at least 1",
        ),
        (
            partial(shift_left, {"y": ROWS[:, :0]}, ZIGZAG),
            r"x\['y'\]: got shape \(2, 0\), expected .* at least 1",
        ),
        (
            partial(redistribute, ROWS[:0], ZIGZAG, "zigzag", "striped"),
            r"x: got shape \(0, 48\), .* at least 1",
        ),
        (
            partial(shift_left, ROWS.tolist(), ZIGZAG),
            r"x\[0\]\[0\]: got shape \(\), expected \[R, T, ...\]",
        ),
        (
            partial(shift_left, ROWS, ZIGZAG, segment_ids=IDS.tolist()),
            r"segment_ids: got list\(2, 48\), expected integers",
        ),
        (partial(shift_left, ROWS, fill=ROWS), r"fill: got shape \(2, 48\), expected a scalar"),
        (
            partial(shift_left, IDS.astype(np.uint8), fill=-1),
            "fill: got -1, expected a number that uint8 holds",
        ),
        (
            partial(shift_left, IDS, fill=np.nan),
            "fill: got nan, expected a number that int32 holds",
        ),
        (partial(shift_left, IDS, fill=0.5), "fill: got 0.5, expected a number that int32 holds"),
        (
            partial(shift_left, {"a": ROWS, "b": IDS > 0}, fill=2),
            "fill: got 2, expected a number that bool holds",
        ),
        (
            partial(shift_left, ROWS.astype(jnp.float16), fill=1e6),
            "fill: got 1000000.0, .* that float16 holds",
        ),
        (
            partial(jax.jit(partial(shift_left, IDS)), fill=0.5),
            "fill: got .*Tracer.* that int32 holds",
        ),
        (
            partial(shift_left, np.ones((2, 48, 0), np.float32)),
            r"x: got shape \(2, 48, 0\), expected .* each at least 1",
        ),
        (
            partial(shift_left, np.ones((2, 48, 3, 0), np.float32), ZIGZAG),
            r"x: got shape \(2, 48, 3, 0\), expected",
        ),
        (
            partial(redistribute, np.ones((2, 48, 0), np.float32), ZIGZAG, "contiguous", "zigzag"),
            r"x: got shape \(2, 48, 0\), expected .* each at least 1",
        ),
        (
            partial(shift_left, ROWS, ZIGZAG.mesh),
            "parallel: got Mesh, expected ParallelMesh, ShardAxes or None",
        ),
        (partial(shift_left, ROWS, by=1.5), "by: got 1.5, expected a static integer of at least 0"),
        (
            partial(jax.jit(partial(shift_left, ROWS)), by=1),
            "by: got .*Tracer.*, expected a static integer",
        ),
        (
            partial(scan_affine, 1.0, ROWS, segment_ids=ROWS),
            r"segment_ids: got float32\(2, 48\), expected integers",
        ),
        (
            partial(scan_affine, 1.0, ROWS, PER_SEGMENT, segment_ids=IDS, num_segments=2.0),
            "num_segments: got 2.0, expected a static int",
        ),
        (
            partial(scan_affine, 1.0, ROWS, PER_SEGMENT, segment_ids=IDS, num_segments=0),
            "num_segments: got 0, expected at least 1",
        ),
        (partial(segment_sum, ROWS, IDS, 2.0), "num_segments: got 2.0, expected a static integer"),
        (
            partial(segment_sum, ROWS, ROWS, 2),
            r"segment_ids: got float32\(2, 48\), expected integers \[R, T\]",
        ),
        (partial(logical_positions, "zigzag", 0, 4), "row_length: got 0, expected at least 1"),
        (
            partial(logical_positions, "zigzag", 8.0, 4),
            "row_length: got 8.0, expected a static integer",
        ),
        (partial(logical_positions, "zigzag", 8, 0), "shards: got 0, expected at least 1"),
        (
            partial(logical_positions, "zigzag_per_segment", 8, 4),
            "segment_lengths: got None, expected",
        ),
        (
            partial(logical_positions, "zigzag_per_segment", 8, 4, np.array([[-3, 8]])),
            r"segment_lengths: got \[\[-3  8\]\]",
        ),
        (
            partial(logical_positions, "zigzag_per_segment", 48, 4, np.array([[8, 0], [40, 9]])),
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
    x = np.ones((2, 48), jnp.dtype(dtype))
    found = shift_left(x, fill=fill)
    on_mesh = shift_left(x, ZIGZAG, fill=fill)
    assert found.dtype == on_mesh.dtype == x.dtype
    is_nan = bool(np.isnan(fill))
    expected = np.full(2, fill, jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(found)[:, -1], expected, equal_nan=is_nan)
    if dtype in ("float32", "bfloat16"):
        traced = jax.jit(shift_left)(x, fill=fill)
        np.testing.assert_array_equal(traced, found, equal_nan=is_nan)
