"""Packing sequences into rows, on the host, and the batch made of them."""

import dataclasses

import chex
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo import RolloutBatch, Sample
from sharding import make_parallel_mesh, pack, unpack
from sharding.axes import LAYOUTS

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=30)
@given(LENGTHS, st.sampled_from([None, 1, 3]))
def test_every_sequence_comes_back_whole(layout, lengths, micro_batches):
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    sequences = [np.arange(n) + 100 * i for i, n in enumerate(lengths)]
    packed = pack(sequences, row_length=40, parallel=parallel, micro_batches=micro_batches)
    rows = packed.place(sequences, fill=-1)
    assert (rows >= 0).sum() == sum(lengths) == (packed.segment_ids > 0).sum()
    assert rows.shape[-2] % 2 == 0
    assert rows.shape[:-2] == (() if micro_batches is None else (micro_batches,))
    chex.assert_trees_all_equal(unpack(rows, packed), sequences)
    trailing = [np.stack([s, -s], axis=-1) for s in sequences]
    chex.assert_trees_all_equal(unpack(packed.place(trailing), packed), trailing)


def test_first_fit_decreasing_fills_rows():
    """Longest first: 6, 5 | 5, 4, 2 fill two rows of 11; in the order given they would need
    three.
    """
    packed = pack([range(n) for n in (2, 5, 5, 4, 6)], row_length=11)
    assert packed.rows == 2
    assert packed.num_segments == 4


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.sampled_from([None, 1, 2, 3]))
def test_each_sequence_goes_to_the_first_row_it_fits(lengths, most):
    """Longest first, ties in order; with loads of 0 and one row a device, rows are dealt in the
    order of the bins.
    """
    packed = pack(
        [range(n) for n in lengths], row_length=12, num_segments=most, loads=[0] * len(lengths)
    )
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [
            row
            for row in rows
            if sum(lengths[j] for j in row) + lengths[i] <= 12 and len(row) < (most or 99)
        ]
        if not fits:
            fits = [[]]
            rows.append(fits[0])
        assert packed.slot[i] == len(fits[0])
        assert packed.start[i] == sum(lengths[j] for j in fits[0])
        fits[0].append(i)
    assert packed.rows == len(rows)
    for row in rows:
        assert len({int(packed.row[i]) for i in row}) == 1


def test_values_that_begin_within_their_sequence():
    packed = pack([range(3), range(2)], row_length=6)
    assert packed.place([[7, 8], [9]], starts=[1, 0]).tolist() == [[0, 7, 8, 9, 0, 0]]
    with pytest.raises(
        ValueError, match=r"values\[1\]: got shape \(2,\), expected at most 1 numbers"
    ):
        packed.place([[7], [8, 9]], starts=[0, 1])


def test_a_thousand_batches_share_a_handful_of_shapes():
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(1000):
        lengths = rng.integers(1, 65, size=rng.integers(1, 60))
        packed = pack([range(n) for n in lengths], row_length=64, buckets=(8, 16, 32, 64))
        shapes.add((packed.rows, packed.num_segments))
    assert len(shapes) <= 16, shapes


def test_rows_are_dealt_by_loss_tokens():
    """Rows with 40, 30, 20, 10 loss tokens on two devices: 40 + 10 and 30 + 20, not 70 and 30."""
    parallel = make_parallel_mesh("dp=2,cp=4")
    packed = pack([range(40)] * 4, row_length=40, parallel=parallel, loads=[40, 30, 20, 10])
    assert packed.row[0] // 2 == packed.row[3] // 2 != packed.row[1] // 2 == packed.row[2] // 2


def test_token_budget_gives_micro_batches(monkeypatch):
    parallel = make_parallel_mesh("dp=2,cp=4")
    packed = pack([range(40)] * 9, row_length=40, parallel=parallel, max_tokens=20)
    # 20 places a device are 2 rows on each of 2, so 9 rows take 3
    assert packed.positions.shape == (3, 4, 40)
    assert packed.positions[0].size // 8 <= 20
    assert pack([range(40)], row_length=40, max_tokens=40, micro_batches=3).positions.shape == (
        3,
        1,
        40,
    )
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("sharding.packing.spans_processes", lambda parallel: True)
        # 18 rows on another host
        elsewhere.setattr("sharding.packing.agree", lambda sizes: (sizes[0] + 4, sizes[1]))
        assert pack(
            [range(40)] * 9, row_length=40, parallel=parallel, max_tokens=20
        ).positions.shape == (5, 4, 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sequences": [range(3), range(50)]},
            "sequences: got 50 tokens .* in sequence 1, expected at most row_length=48",
        ),
        (
            {"row_length": 50},
            "row_length: got 50, expected a multiple of 8 .*'zigzag'.* the next that works is 56",
        ),
        ({"rows": 3}, "rows: got 3, expected a multiple of 2"),
        (
            {"rows": 2, "sequences": [range(48)] * 3},
            "rows: got 2 in each of 1 micro-batches, expected at least 4",
        ),
        (
            {"buckets": (2, 4), "sequences": [range(48)] * 5},
            r"buckets: got \(2, 4\), expected one of at least 6 rows",
        ),
        ({"buckets": (2, 4), "rows": 2}, "rows, buckets: got all of them, expected one at most"),
        ({"max_tokens": 11}, "max_tokens: got 11, expected at least 12, one row"),
        ({"num_segments": 0}, "num_segments: got 0, expected at least 1"),
        (
            {"loads": [1.0, 2.0]},
            r"loads: got shape \(2,\), expected one of each of the 1 sequences",
        ),
    ],
)
def test_bad_packing(options, message):
    arguments = {"sequences": [range(3)], "row_length": 48} | options
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout="zigzag")
    with pytest.raises(ValueError, match=message):
        pack(arguments.pop("sequences"), parallel=parallel, **arguments)


def test_unpack_of_other_rows():
    with pytest.raises(ValueError, match=r"array: got shape \(3, 8\), expected \(1, 8\)"):
        unpack(np.zeros((3, 8)), pack([range(4)], row_length=8))


def samples():
    """Three rollouts: a response, a response with a tool's tokens in it, and an empty response."""
    return [
        Sample([3, 4, 5, 6, 7], response_start=2, reward=1.0, group_id=0, values=[0.1, 0.2, 0.3]),
        Sample(
            [3, 9, 1, 2], loss_mask=[0, 1, 0, 1], reward=2.0, group_id=0, values=[0.4, 0.5, 0.6]
        ),
        Sample([5, 5], response_start=2, reward=3.0, group_id=1, values=[]),
    ]


def test_batch_speaks_of_the_next_token():
    batch = RolloutBatch.from_samples(samples(), row_length=12)
    assert batch.tokens.tolist() == [[3, 4, 5, 6, 7, 3, 9, 1, 2, 5, 5, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 0]]
    assert batch.targets.tolist() == [[4, 5, 6, 7, 0, 9, 1, 2, 0, 5, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0]]
    np.testing.assert_allclose(
        batch.values, [[0, 0.1, 0.2, 0.3, 0, 0.4, 0.5, 0.6, 0, 0, 0, 0]], rtol=1e-6
    )
    assert batch.rewards.tolist() == [[1, 2, 3, 0]]
    assert batch.group_ids.tolist() == [[0, 0, 1, -1]]
    assert batch.sample_ids.tolist() == batch.rollouts.tolist() == [[0, 1, 2, -1]]
    assert batch.rollout_ids is None
    assert batch.advantages is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}])
def test_batches_from_samples_are_valid(layout, options):
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    batch = RolloutBatch.from_samples(samples(), row_length=24, parallel=parallel, **options)
    batch.validate(vocab_size=10)
    spec = batch.specs(parallel)
    assert spec.tokens == (
        parallel.tokens_spec if not options else type(spec.tokens)(None, *parallel.tokens_spec)
    )
    assert spec.advantages is None


def broken(field, row, place, value):
    def breaking(batch):
        array = np.array(getattr(batch, field))
        array[row, place] = value
        return dataclasses.replace(batch, **{field: array})

    return breaking


@pytest.mark.parametrize(
    ("breaking", "message"),
    [
        (
            broken("tokens", 0, 2, 10),
            "tokens: got 10 at row 0, position 2, expected at least 0, and at most 9",
        ),
        (broken("targets", 0, 3, -100), "targets: got -100 at row 0, position 3, expected 0 to 9"),
        (
            broken("targets", 0, 3, 2),
            "targets: got 2 at row 0, position 3, expected the next token of the sequence",
        ),
        (
            broken("values", 0, 5, np.nan),
            "values: got nan at row 0, position 5, expected finite numbers where loss_mask is 1",
        ),
        (
            broken("loss_mask", 0, 11, 1),
            "loss_mask: got 1.0 at row 0, position 11, expected 0 where segment_ids is 0",
        ),
        (
            broken("loss_mask", 0, 1, 0.5),
            "loss_mask: got 0.5 at row 0, position 1, expected 0 or 1",
        ),
        (
            broken("segment_ids", 0, 2, 3),
            "segment_ids: got 1 at row 0, position 3, expected each sequence to be contiguous",
        ),
        (
            broken("segment_ids", 0, 2, 0),
            "segment_ids: got 1 at row 0, position 3, expected each sequence to be contiguous",
        ),
        (
            broken("segment_ids", 0, 2, 9),
            "segment_ids: got 9 at row 0, position 2, expected 0 to 4",
        ),
        (
            broken("positions", 0, 7, 3),
            "positions: got 3 at row 0, position 7, expected 0, 1, ... in each sequence",
        ),
        (
            broken("sample_ids", 0, 1, -1),
            "sample_ids: got -1 at row 0, segment 1, expected at least 0",
        ),
        (
            broken("rewards", 0, 2, np.inf),
            "rewards: got inf at row 0, segment 2, expected a finite number",
        ),
    ],
)
def test_validate_names_the_place(breaking, message):
    batch = RolloutBatch.from_samples(samples(), row_length=12)
    batch.validate(vocab_size=10)
    with pytest.raises(ValueError, match=message):
        breaking(batch).validate(vocab_size=10)


def test_nan_without_loss_is_fine():
    batch = RolloutBatch.from_samples(samples(), row_length=12)
    broken("values", 0, 6, np.nan)(batch).validate(vocab_size=10)
    broken("targets", 0, 6, -100)(batch).validate(vocab_size=10)


def test_validate_finds_unpadded_segments():
    batch = RolloutBatch.from_samples(samples(), row_length=24)
    batch = dataclasses.replace(batch, context_layout="zigzag_per_segment", context_shards=4)
    with pytest.raises(ValueError, match=r"(segment_ids|positions): got .* at row 0, position"):
        batch.validate(vocab_size=10)


def test_validate_shapes_and_dtypes():
    batch = RolloutBatch.from_samples(samples(), row_length=12)
    with pytest.raises(
        ValueError, match=r"targets: got shape \(1, 11\), expected \(1, 12\), as the rows"
    ):
        dataclasses.replace(batch, targets=batch.targets[:, 1:]).validate(10)
    with pytest.raises(TypeError, match="tokens: got dtype float32, expected integers"):
        dataclasses.replace(batch, tokens=batch.tokens.astype(np.float32)).validate(10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "response_start, loss_mask: got None for both"),
        ({"response_start": 0}, "response_start: got 0, expected 1 to 3"),
        ({"response_start": 4}, "response_start: got 4, expected 1 to 3"),
        ({"loss_mask": [1, 1]}, r"loss_mask: got shape \(2,\), expected \(3,\) like tokens"),
        (
            {"loss_mask": [0, 1, 1], "response_start": 2},
            "loss_mask: got 1 at token 1, expected 0 before 2",
        ),
        (
            {"response_start": 1, "values": [0.0]},
            r"values: got shape \(1,\), expected \(2,\), one for each response token",
        ),
    ],
)
def test_bad_samples(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sample([1, 2, 3], **arguments)


def test_values_in_some_samples_only():
    some = [Sample([1, 2], response_start=1, values=[1.0]), Sample([1, 2], response_start=1)]
    with pytest.raises(
        ValueError, match="values: got None in sample 1, expected a value in all samples or in none"
    ):
        RolloutBatch.from_samples(some, row_length=4)


@pytest.mark.parametrize(
    ("lengths", "row_length", "data", "micro_batches"),
    [
        ([5] * 24, 64, 4, 3),  # the fewest rows are two
        ([9, 8, 7, 6, 5, 4, 3, 2] * 4, 48, 4, 3),
        ([12] * 12, 12, 4, 3),  # no row is spare
        ([7] * 5, 8, 4, 3),  # fewer sequences than rows
    ],
)
def test_micro_batches_and_devices_have_even_loads(lengths, row_length, data, micro_batches):
    """Rows that need not be empty are not: of all sequences in one micro-batch the other steps
    learn nothing.
    """
    parallel = make_parallel_mesh(f"dp={data},cp=2")
    sequences = [np.full(n, i + 1) for i, n in enumerate(lengths)]
    packed = pack(
        sequences, row_length=row_length, parallel=parallel, rows=data, micro_batches=micro_batches
    )
    rows = packed.place(sequences)
    assert sorted(x for x in rows.ravel().tolist() if x) == sorted(
        np.concatenate(sequences).tolist()
    )
    loads = (rows > 0).sum(-1)
    longest = max(lengths)
    shares = sum(lengths) / micro_batches
    assert np.abs(loads.sum(-1) - shares).max() <= longest
    if len(lengths) >= loads.size:
        assert np.ptp(loads, axis=-1).max() <= longest
        assert loads.min() > 0


def test_bundles_that_fit_the_fewest_rows_alone_are_packed_so():
    """Spread over four rows, the bundle of 1 + 0 + 0 tokens would find no row with three free
    segments.
    """
    lengths = [3, 3, 3, 1, 0, 0, 7, 7, 4]
    bundles = [0, 0, 0, 1, 1, 1, 2, 3, 4]
    loads = [3, 0, 0, 2, 0, 0, 0, 5, 6]
    packed = pack(
        [range(n) for n in lengths],
        row_length=19,
        rows=4,
        num_segments=3,
        bundles=bundles,
        loads=loads,
    )
    assert np.bincount(packed.row).max() <= 3
    assert np.bincount(packed.row, lengths).max() <= 19
