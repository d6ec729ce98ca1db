"""Shared prompts that carry arrays of their own: what a sample's tokens were read with is what
its path holds.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo import SFT, RolloutBatch, Sample, TokenStats, loss_from_stats
from jaxppo.batch.extras import Extra
from jaxppo.mismatch.routing import routed_experts
from sharding import LAYOUTS, make_parallel_mesh

PROMPT = [1, 2, 3, 4]


def sample(i, rows, fill=0, tokens=(*PROMPT, 50), start=4):
    return Sample(
        [*tokens[:-1], tokens[-1] + i], start, extras={"x": Extra(rows, at="input", fill=fill)}
    )


def read(batch, name="x"):
    """{sample: (its tokens, what was read with each)} along the paths of a batch of one or more
    rows.
    """
    rows = {
        n: np.asarray(getattr(batch, n))
        for n in ("tokens", "segment_ids", "positions", "sample_ids", "parents")
    }
    found = {}
    for row, slot in np.argwhere(rows["sample_ids"] >= 0):
        chain = [slot + 1]
        while rows["parents"][row, chain[0] - 1]:
            chain.insert(0, rows["parents"][row, chain[0] - 1])
        at = np.concatenate(
            [np.flatnonzero(rows["segment_ids"][row] == number) for number in chain]
        )
        at = at[np.argsort(rows["positions"][row, at])]
        extra = np.asarray(batch.extras[name])[row, at]
        found[int(rows["sample_ids"][row, slot])] = rows["tokens"][row, at].tolist(), extra.tolist()
    return found


def shared(*samples, **options):
    return RolloutBatch.from_samples(
        samples, **{"row_length": 16, "rows": 1, "share_prefixes": True} | options
    )


DIFFER = {
    "two images behind one placeholder": ([0, 1.5, 0, 0, 0], [0, 2.5, 0, 0, 0], 0),
    "an image, and none": ([0, 1.5, 0, 0, 0], [0, 0, 0, 0, 0], 0),
    "grids of positions": (
        [[0, 0], [1, 1], [1, 2], [2, 2], [3, 3]],
        [[0, 0], [1, 1], [2, 1], [2, 2], [3, 3]],
        0,
    ),
    "adapters": ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0], 0),
    "an adapter, and none where the fill is another": ([1, 1, 1, 1, 1], [-1, -1, -1, -1, -1], -2),
    "experts": ([[3, 1]] * 5, [[3, 1], [3, 2], [3, 1], [3, 1], [3, 1]], -1),
}


@pytest.mark.parametrize("case", DIFFER)
def test_what_differs_is_not_shared(case):
    """One sample's arrays stood for both: of two images behind one placeholder the first was
    read twice.
    """
    first, second, fill = DIFFER[case]
    found = read(shared(sample(0, first, fill), sample(1, second, fill)))
    assert found == {0: ([*PROMPT, 50], first), 1: ([*PROMPT, 51], second)}


def test_the_loss_is_that_of_samples_packed_whole():
    """The log-prob of a token is a function of what its path has read so far: -1.7 for both with
    one image for two.
    """
    samples = [sample(0, [0, 0.1, 0, 0, 0]), sample(1, [0, 1.6, 0, 0, 0])]

    def loss(batch):
        log_probs = np.zeros(batch.tokens.shape, np.float32)
        for i, (tokens, rows) in read(batch).items() if batch.parents is not None else whole(batch):
            row, slot = np.argwhere(np.asarray(batch.sample_ids) == i)[0]
            place = (np.asarray(batch.segment_ids)[row] == slot + 1) & (batch.loss_mask[row] > 0)
            log_probs[row, place] = -sum(rows[: len(tokens) - 1])
        return float(loss_from_stats(TokenStats(jnp.asarray(log_probs)), batch, SFT())[0])

    def whole(batch):
        for i in range(2):
            row, slot = np.argwhere(np.asarray(batch.sample_ids) == i)[0]
            at = np.asarray(batch.segment_ids)[row] == slot + 1
            yield i, (batch.tokens[row, at].tolist(), batch.extras["x"][row, at].tolist())

    expected = (0.1 + 1.6) / 2
    assert loss(RolloutBatch.from_samples(samples, row_length=16)) == pytest.approx(
        expected, rel=1e-6
    )
    assert loss(shared(*samples)) == pytest.approx(expected, rel=1e-6)


def test_a_prefix_is_shared_as_far_as_extras_agree():
    """Tokens 1 2 3 agree, and the last of what agrees begins each branch."""
    batch = shared(sample(0, [7, 7, 7, 8, 9]), sample(1, [7, 7, 7, 6, 5]))
    assert batch.tokens[0, :8].tolist() == [1, 2, 3, 4, 50, 3, 4, 51]
    assert batch.extras["x"][0, :8].tolist() == [7, 7, 7, 8, 9, 7, 6, 5]
    same = shared(sample(0, [7, 7, 7, 8, 9]), sample(1, [7, 7, 7, 8, 5]))
    assert same.tokens[0, :8].tolist() == [1, 2, 3, 4, 50, 4, 51, 0]
    assert same.extras["x"][0, :8].tolist() == [7, 7, 7, 8, 9, 8, 5, 0]


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_rows_that_a_prefix_cache_left_out_yield(order):
    """Rows of -1 stood for the real ones where the sample that had none came first; now the
    prompt is stored once.
    """
    real = [[5, 6], [7, 8], [9, 5], [6, 7]]
    cached = [[-1, -1]] * 3 + [[6, 7]]
    each = [real, cached, [[-1, -1]] * 4]
    samples = [
        Sample(
            [*PROMPT, 50 + i],
            4,
            sample_id=i,
            extras={"x": routed_experts([[r] for r in each[i]], tokens=5)},
        )
        for i in order
    ]
    batch = shared(*samples)
    assert (np.asarray(batch.segment_ids) > 0).sum() == 3 + 3 * 2
    for tokens, rows in read(batch).values():
        assert tokens[:4] == PROMPT
        assert rows == [[r] for r in [*real, [-1, -1]]]


def test_rows_that_nobody_has_stay_unknown():
    batch = shared(*[sample(i, [[-1, -1]] * 2 + [[3, 4]] * 3, fill=-1) for i in range(2)])
    assert all(rows == [[-1, -1]] * 2 + [[3, 4]] * 3 for _, rows in read(batch).values())
    assert (np.asarray(batch.segment_ids) > 0).sum() == 3 + 2 * 2


VALUES = st.lists(st.tuples(st.integers(1, 2), st.integers(-1, 1)), min_size=1, max_size=6)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(VALUES, st.integers(1, 3)), min_size=1, max_size=8),
    st.integers(0, 2),
    st.booleans(),
)
def test_every_sample_reads_its_own(layout, drawn, depths, with_gaps):
    """Against the samples: equal everywhere, but where a sample has -1 and a gap is a gap."""
    fill = -1 if with_gaps else 0
    samples = []
    expected = {}
    for i, (prompt, n) in enumerate(drawn):
        tokens = [t for t, _ in prompt] + [10 + i] * n
        rows = [x for _, x in prompt] + [5] * n
        samples.append(
            Sample(tokens, len(prompt), extras={"x": Extra(rows, at="input", fill=fill)})
        )
        expected[i] = tokens, rows
    parallel = make_parallel_mesh("dp=4,cp=2", context_layout=layout)
    batch = RolloutBatch.from_samples(
        samples, row_length=24, parallel=parallel, share_prefixes=True, mtp_depths=depths
    )
    batch.validate(100)
    found = read(batch)
    for i, (tokens, rows) in expected.items():
        assert found[i][0] == tokens
        got = np.array(found[i][1])
        same = got == rows
        assert same.all() if not with_gaps else (same | (np.array(rows) == -1)).all()
        # a gap is filled by a sample that reads the same tokens with the same values so far, gaps
        # aside
        for at in np.flatnonzero(~same):
            donors = [
                r
                for t, r in expected.values()
                if t[: at + 1] == tokens[: at + 1] and r[at] == got[at]
            ]
            assert donors


def test_arrays_that_come_later_must_agree():
    """`place` took those of the first sample behind a shared prefix, without a word."""
    samples = [Sample([*PROMPT, 50 + i], 4, sample_id=i) for i in range(2)]
    batch = RolloutBatch.from_samples(samples, row_length=16, share_prefixes=True)
    rows = {0: [7, 7, 7, 8, 9], 1: [7, 6, 7, 8, 5]}
    expected = (
        r"values\[1\]: got 6 at token 1 of the prefix that it shares with sample 0, expected 7, as"
    )
    with pytest.raises(ValueError, match=expected):
        batch.place(rows, at="input")
    known = batch.place(rows | {0: [7, -1, 7, 8, 9], 1: [-1, 6, 7, 8, 5]}, at="input", fill=-1)
    assert known[0, :8].tolist() == [7, 6, 7, 8, 9, 8, 5, -1]
    # 0 is a value, such as an adapter's number
    with pytest.raises(ValueError, match=r"values\[1\]: got 0 at token 1"):
        batch.place(rows | {1: [7, 0, 7, 8, 5]}, at="input")
