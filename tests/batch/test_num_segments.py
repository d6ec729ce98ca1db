"""Too few segments a row: the error names num_segments, and the number that would do."""

import re

import pytest

from jaxppo import RolloutBatch, Sample
from sharding import make_parallel_mesh, pack

SHORT = [[1, 2]] * 8  # in rows of 8 tokens: 4 in a row, if it may hold so many


@pytest.mark.parametrize(
    "sizes", [{"rows": 2}, {"buckets": (1, 2)}, {"rows": 1, "micro_batches": 2}]
)
def test_the_number_that_would_do(sizes):
    """It said "rows: got 2 in each of 1 micro-batches, expected at least 4 in all", although two
    rows are enough.
    """
    with pytest.raises(
        ValueError, match=r"num_segments: got 2, expected at least 4, the sequences that a row then"
    ):
        pack(SHORT, row_length=8, num_segments=2, **sizes)
    pack(SHORT, row_length=8, num_segments=4, **sizes)
    with pytest.raises(ValueError, match="num_segments: got 3, expected at least 4"):
        pack(SHORT, row_length=8, num_segments=3, **sizes)


def test_rows_that_no_number_makes_enough():
    with pytest.raises(ValueError, match="rows: got 1 in each"):
        pack(SHORT, row_length=8, num_segments=2, rows=1)


def test_on_a_mesh():
    with pytest.raises(ValueError, match="num_segments: got 1, expected at least 2"):
        pack(SHORT, row_length=8, num_segments=1, rows=4, parallel=make_parallel_mesh("dp=4,tp=2"))


def test_a_shared_prefix_takes_a_segment_too():
    """Four samples in two rows of two segments; with a text of the system in common they need
    three in each.
    """
    system = [1, 2, 3]
    samples = [Sample([*system, 10 + i, 4, 5, 6], 4) for i in range(4)]
    options = {"row_length": 14, "rows": 2, "share_prefixes": True}
    for segments in (3, 4):
        RolloutBatch.from_samples(samples, num_segments=segments, **options)
    tight = [Sample([*system, 10 + i, 4, 5, 6], 4) for i in range(6)]
    message = (
        "num_segments: got 3, expected at least 4 with share_prefixes, since a prefix that samples"
        " share"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        RolloutBatch.from_samples(tight, num_segments=3, **options | {"row_length": 18})
    RolloutBatch.from_samples(tight, num_segments=4, **options | {"row_length": 18})
