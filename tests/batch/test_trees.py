"""Rows packed as trees: they hold every sample, shared tokens have no loss, and no shared token
is packed twice.
"""

import dataclasses
import itertools
import re
import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_prompts import three_levels

from jaxppo import (
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    explain_broken_rules,
    policy_loss,
)
from jaxppo.batch.trees import check_recurrent
from sharding import logical_positions, make_parallel_mesh, pack
from sharding.axes import LAYOUTS

GROUP = [
    Sample([1, 2, 3, 4, 50 + i], response_start=4, sample_id=i, reward=float(i), group_id=7)
    for i in range(2)
]


def test_by_hand():
    """The prompt is 1 2 3 4; 4, which predicts the responses, begins each branch."""
    batch = RolloutBatch.from_samples(GROUP, row_length=8, share_prefixes=True)
    expected = {
        "tokens": [[1, 2, 3, 4, 50, 4, 51, 0]],
        "targets": [[2, 3, 4, 50, 0, 51, 0, 0]],
        "segment_ids": [[1, 1, 1, 2, 2, 3, 3, 0]],
        "positions": [[0, 1, 2, 3, 4, 3, 4, 0]],
        "loss_mask": [[0, 0, 0, 1, 0, 1, 0, 0]],
        "parents": [[0, 1, 1, 0]],
        "sample_ids": [[-1, 0, 1, -1]],
        "group_ids": [[-1, 7, 7, -1]],
        "rewards": [[0, 0, 1, 0]],
    }
    for name, x in expected.items():
        np.testing.assert_array_equal(getattr(batch, name), x, err_msg=name)
    batch.validate(52)
    deeper = RolloutBatch.from_samples(GROUP, row_length=8, share_prefixes=True, mtp_depths=1)
    assert deeper.tokens.tolist() == [[1, 2, 3, 4, 50, 3, 4, 51]]
    none = RolloutBatch.from_samples(GROUP, row_length=10, share_prefixes=True, mtp_depths=3)
    assert none.tokens.tolist() == [[1, 2, 3, 4, 50, 1, 2, 3, 4, 51]]
    assert none.parents.tolist() == [[0, 0]]


def paths_of(batch):
    """{sample: (row, the logical positions of its path)}, computed from segments and parents
    alone.
    """

    def flat(x):
        return np.asarray(x).reshape(-1, x.shape[-1])

    segments = flat(batch.segment_ids)
    ids = flat(batch.sample_ids)
    parents = flat(batch.parents)
    found = {}
    for row, slot in np.argwhere(ids >= 0):
        chain = [slot + 1]
        while parents[row, chain[0] - 1]:
            chain.insert(0, parents[row, chain[0] - 1])
        found[int(ids[row, slot])] = (
            row,
            [np.flatnonzero(segments[row] == number) for number in chain],
        )
    return found


def fewest_tokens(samples, overlap):
    """The fewest tokens for these prompts: a common prefix counts once."""
    shared = {tuple(s.tokens[:end]) for s in samples for end in range(1 + overlap, s.start + 1)}
    return len(shared) + sum(len(s.tokens) - max(s.start - overlap, 0) for s in samples)


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=7), st.integers(0, 5)),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=60)
@given(
    PROMPTS,
    st.integers(0, 2),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([16, 24, 120]),
    st.sampled_from([None, 1, 3]),
)
def test_every_sample_can_be_read(layout, drawn, depths, micro_batches, length, most):
    parallel = make_parallel_mesh("dp=4,cp=2", context_layout=layout)
    samples = [
        Sample(
            [*prompt, *range(10, 10 + n)],
            response_start=len(prompt),
            values=np.arange(n) + 100.0 * i,
            reward=float(i),
        )
        for i, (prompt, n) in enumerate(drawn)
    ]
    options = {
        "row_length": length,
        "parallel": parallel,
        "micro_batches": micro_batches,
        "num_segments": most,
    }
    batch = RolloutBatch.from_samples(samples, share_prefixes=True, mtp_depths=depths, **options)
    batch.validate(100)

    def flat(x):
        return np.asarray(x).reshape(-1, x.shape[-1])

    tokens, targets, mask, values, positions = (
        flat(x)
        for x in (batch.tokens, batch.targets, batch.loss_mask, batch.values, batch.positions)
    )
    found = paths_of(batch)
    assert sorted(found) == [*range(len(samples))]
    for i, sample in enumerate(samples):
        row, chain = found[i]
        chain = [part[np.argsort(positions[row, part])] for part in chain]
        places = np.concatenate(chain) if chain else np.zeros(0, int)
        np.testing.assert_array_equal(tokens[row, places], sample.tokens)
        np.testing.assert_array_equal(positions[row, places], np.arange(len(sample.tokens)))
        np.testing.assert_array_equal(mask[row, places], [*sample.mask[1:], 0])
        own = places[len(places) - len(chain[-1]) :]
        trained = mask[row, places] > 0
        assert trained.sum() == (mask[row, own] > 0).sum()
        np.testing.assert_array_equal(targets[row, places][trained], sample.tokens[sample.start :])
        np.testing.assert_array_equal(values[row, places][trained], sample.values)
        # each target of each depth is predicted in the branch
        assert len(own) >= min(len(sample.tokens), len(sample.tokens) - sample.start + 1 + depths)
    if layout == "contiguous" and length == 120 and most is None and micro_batches is None:
        assert (batch.segment_ids > 0).sum() == fewest_tokens(
            samples, 1 + depths
        ) or batch.tokens.shape[0] > 4


def least_by_search(samples, length):
    """The fewest tokens of any split of the samples over rows, by trying all."""

    def splits(rest):
        if not rest:
            yield []
            return
        for size in range(len(rest)):
            for others in itertools.combinations(rest[1:], size):
                left = [i for i in rest[1:] if i not in others]
                yield from ([(rest[0], *others), *more] for more in splits(left))

    cost = {}
    for size in range(1, len(samples) + 1):
        for some in itertools.combinations(range(len(samples)), size):
            cost[some] = fewest_tokens([samples[i] for i in some], 1)
    return min(
        sum(cost[some] for some in split)
        for split in splits([*range(len(samples))])
        if max(cost[s] for s in split) <= length
    )


def test_a_tree_is_cut_where_it_costs_least():
    """It is cut near the root: two rows hold the system's tokens, and each holds only its own
    samples' tools.
    """
    system = [1] * 3
    tools = [[2] * 9, [3] * 8]
    samples = [
        Sample(
            [*system, *tools[i // 3], 4, 5 + i], response_start=len(system) + len(tools[i // 3]) + 1
        )
        for i in range(6)
    ]
    batch = RolloutBatch.from_samples(samples, row_length=24, share_prefixes=True)
    # the system twice, no tools twice
    assert (batch.segment_ids > 0).sum(axis=1).tolist() == [12 + 6, 11 + 6]
    rng = np.random.default_rng(0)
    best = 0
    for _ in range(60):
        samples = [
            Sample([*rng.integers(1, 3, 7), *[9] * rng.integers(1, 4)], response_start=7)
            for _ in range(6)
        ]
        packed = RolloutBatch.from_samples(samples, row_length=18, share_prefixes=True)
        packed.validate(20)
        got = int((packed.segment_ids > 0).sum())
        least = least_by_search(samples, 18)
        assert least <= got <= 1.25 * least
        best += got == least
    assert best >= 50


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_sees_whom(layout):
    """A token sees the tokens of its own sample up to itself, and none of a sibling."""
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    samples = three_levels(0)
    batch = RolloutBatch.from_samples(
        samples, row_length=160, parallel=parallel, share_prefixes=True
    )
    expected = np.zeros((*batch.tokens.shape, batch.tokens.shape[1]), bool)
    for row, chain in paths_of(batch).values():
        places = np.concatenate([part[np.argsort(batch.positions[row, part])] for part in chain])
        expected[row, places[:, None], places] |= np.tril(np.ones((len(places),) * 2, bool))
    # no shared token sees its branches
    shared = np.take_along_axis(batch.sample_ids, np.maximum(batch.segment_ids - 1, 0), axis=1) < 0
    assert (shared & (batch.segment_ids > 0)).sum() > 8
    real = (batch.segment_ids > 0)[:, :, None] & (batch.segment_ids > 0)[:, None, :]
    found = np.asarray(batch.paths.attends(batch.paths))
    np.testing.assert_array_equal(found & real, expected)
    assert not (found & ~real)[batch.segment_ids > 0].any()  # nobody sees padding
    part = jax.tree.map(lambda x: x[:, 8:24], batch.paths)
    np.testing.assert_array_equal(part.attends(batch.paths), found[:, 8:24])


def test_rows_without_parents_are_seen_as_before():
    batch = RolloutBatch.from_samples(GROUP, row_length=12)
    assert batch.paths.ends is None
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    causal = batch.positions[:, :, None] >= batch.positions[:, None, :]
    np.testing.assert_array_equal(batch.paths.attends(batch.paths), same & causal)


TREE = RolloutBatch.from_samples(three_levels(0), row_length=160, share_prefixes=True)


def changed(name, at, value):
    x = np.array(getattr(TREE, name))
    x[at] = value
    return dataclasses.replace(TREE, **{name: x})


def first(x):
    return tuple(int(i) for i in np.argwhere(x)[0])


BRANCH = first(TREE.parents > 1)
OWN = BRANCH[1] + 1
IN_SHARED = first(TREE.segment_ids == 1)
LAST = (0, int(np.flatnonzero(TREE.segment_ids[0] == OWN)[-1]))
BROKEN = {
    "itself": (changed("parents", BRANCH, OWN), "parents", True),
    "a cycle": (changed("parents", (0, 0), OWN), "parents", True),
    "one behind it": (changed("parents", BRANCH, OWN + 1), "parents", True),
    "a sibling of an ancestor": (
        changed("parents", (0, int(TREE.parents[0].argmax()) + 2), OWN - 1),
        "parents",
        True,
    ),
    "another row's": (changed("parents", BRANCH, TREE.num_segments + 3), "parents", True),
    "none": (changed("parents", BRANCH, -1), "parents", True),
    "positions from 0": (
        changed("positions", TREE.segment_ids == OWN, range((TREE.segment_ids == OWN).sum())),
        "positions",
        False,
    ),
    "loss on a shared token": (changed("loss_mask", IN_SHARED, 1), "loss_without_sample", True),
    "loss at a branch's end": (changed("loss_mask", LAST, 1), "loss_mask_on_last_position", True),
    "a sample without an id": (changed("sample_ids", first(TREE.sample_ids >= 0), -1), "", True),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_trees(case):
    batch, rule, on_device = BROKEN[case]
    stats = TokenStats(TREE.returns)
    with pytest.raises(ValueError, match=r"got .* at row 0"):
        batch.validate(60)
    loss, found = policy_loss(stats, batch, PolicyLossConfig())
    assert np.isnan(loss) == on_device
    if on_device:
        assert any(
            line.startswith(f"{rule or 'loss_without_sample'}: ")
            for line in explain_broken_rules(found["broken_rules"].value)
        )
    assert np.isfinite(policy_loss(stats, TREE, PolicyLossConfig())[0])
    TREE.validate(60)


def test_a_parent_that_is_not_there():
    whole = RolloutBatch.from_samples(GROUP[:1], row_length=8, num_segments=3)
    wrong = dataclasses.replace(
        whole,
        segment_ids=3 * whole.segment_ids,
        sample_ids=np.array([[-1, -1, 0]], np.int32),
        parents=np.array([[0, 0, 2]]),
    )
    with pytest.raises(
        ValueError,
        match=(
            "parents: got 2 at row 0, segment 2, expected the number of a segment that this row"
            " holds"
        ),
    ):
        wrong.validate(100)


REFUSED = {
    "text": ({"share_prefixes": "yes"}, "share_prefixes: got 'yes', expected True or False"),
    "depths below 0": (
        {"share_prefixes": True, "mtp_depths": -1},
        "mtp_depths: got -1, expected a whole number of at least 0",
    ),
    "depths of nothing": (
        {"mtp_depths": 2},
        "mtp_depths: got 2, expected 0 without share_prefixes=True",
    ),
    "long": (
        {"share_prefixes": True, "row_length": 4},
        r"samples: got 5 tokens \(5 with .*\) in sample 0, expected at most",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        RolloutBatch.from_samples(GROUP, **{"row_length": 8} | options)


def test_recurrent_models():
    with pytest.raises(ValueError, match=re.escape("expected share_prefixes=False")):
        check_recurrent(types.SimpleNamespace(recurrent=True), TREE)
    check_recurrent(types.SimpleNamespace(recurrent=False), TREE)
    check_recurrent(object(), TREE)
    check_recurrent(
        types.SimpleNamespace(recurrent=True), RolloutBatch.from_samples(GROUP, row_length=8)
    )


def test_bundles_stay_together():
    packed = pack(
        [range(n) for n in (3, 1, 2, 5, 2)], row_length=8, bundles=[0, 0, 1, 2, 1], num_segments=2
    )
    assert (
        packed.row.tolist() == [0, 0, 0, 2, 0]
        or len({*packed.row[:2]}) == len({*packed.row[[2, 4]]}) == 1
    )
    assert packed.slot.tolist()[:2] == [0, 1]
    assert packed.start[1] == packed.start[0] + 3
    assert packed.start[4] == packed.start[2] + 2
    for bundles, message in (
        ([0, 2], "bundles: got"),
        ([0, 0], "bundles: got 10 tokens in bundle 0, expected at most 8"),
    ):
        with pytest.raises(ValueError, match=message):
            pack([range(5), range(5)], row_length=8, bundles=bundles)
    with pytest.raises(
        ValueError, match="bundles: got 2 sequences in bundle 0, expected at most 1"
    ):
        pack([range(2), range(2)], row_length=8, bundles=[0, 0], num_segments=1)


def test_layouts_keep_the_order():
    parallel = make_parallel_mesh("cp=8", context_layout="striped")
    batch = RolloutBatch.from_samples(GROUP, row_length=8, parallel=parallel, share_prefixes=True)
    plain = RolloutBatch.from_samples(GROUP, row_length=8, share_prefixes=True)
    np.testing.assert_array_equal(batch.tokens, plain.tokens[:, logical_positions("striped", 8, 8)])
