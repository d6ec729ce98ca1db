"""`from_samples` warns once, when equal options have led to a third shape."""

import warnings

import numpy as np
import pytest

from jaxppo import RolloutBatch, Sample
from jaxppo.batch import packed


@pytest.fixture(autouse=True)
def nothing_made_before(monkeypatch):
    monkeypatch.setattr(packed, "_shapes", {})
    monkeypatch.setattr(packed, "_warned", False)


def pack(*lengths, **sizes):
    return RolloutBatch.from_samples(
        [Sample(np.ones(n, int), 1) for n in lengths], **{"row_length": 8} | sizes
    )


def said(steps, **sizes):
    """The messages of steps with samples of these lengths, and the line that they name."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for lengths in steps:
            pack(*lengths, **sizes)
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


def test_ragged_samples_and_defaults():
    steps = [[8], [8, 8], [8, 8], [8, 4, 4], [8, 8, 8], [8] * 9]
    (message,) = said(steps)
    assert (
        message
        == "RolloutBatch.from_samples: got batches of 3 shapes from the same options (R = 1, 2; S ="
        " 1, 2), expected few, since a jitted step compiles again for each; give rows= (or a"
        " short list of buckets=) and num_segments="
    )


def test_what_differs_is_named():
    (message,) = said([[8], [8, 8], [8, 8, 8]], num_segments=2)
    assert "(R = 1, 2, 3)" in message
    assert message.endswith("; give rows= (or a short list of buckets=)")


@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 9, "num_segments": 8},
        {"buckets": [1, 2, 3, 9], "num_segments": 2},  # four shapes that were asked for
    ],
)
def test_no_word_where_shapes_are_fixed(sizes):
    assert said([[8], [8, 8], [8, 4, 4], [8, 8, 8], [8] * 9], **sizes) == []


def test_other_options_are_other_batches():
    """A run packs for training, for evaluation, and for a third use."""
    assert [said([[8], [8, 8]], row_length=length) for length in (8, 16, 32)] == [[], [], []]
