"""Rows as trees of tokens, responses too: they hold every sample, and each token that samples
share once.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo import RolloutBatch, Sample, TokenStats
from jaxppo.batch.extras import Extra
from jaxppo.batch.token_trees import TokenTrees
from jaxppo.batch.trees import check_recurrent
from sharding import LAYOUTS, make_parallel_mesh

FORKED = [
    Sample(
        [1, 2, 3, 4, 5 + i],
        2,
        sample_id=7 + i,
        reward=float(i),
        group_id=3,
        advantages=[0.5, 1.0, i],
    )
    for i in range(2)
]


def flat(x):
    """The rows of a batch, or of stacked micro-batches."""
    return np.asarray(x).reshape(-1, np.shape(x)[-1])


def paths_of(rows):
    """{sample: (row, the places of its tokens, in their order)}, from segments, positions and
    parents alone.
    """
    segments, positions, ids, parents = (
        flat(x) for x in (rows.segment_ids, rows.positions, rows.sample_ids, rows.parents)
    )
    found = {}
    for row, slot in np.argwhere(ids >= 0).tolist():
        chain = [slot + 1]
        while parents[row, chain[0] - 1]:
            chain.insert(0, parents[row, chain[0] - 1])
        places = np.concatenate([np.flatnonzero(segments[row] == number) for number in chain])
        found[int(ids[row, slot])] = row, places[np.argsort(positions[row, places])]
    return found


def rows_of(x, leading):
    """An array of a batch, `[KR, T, ...]`."""
    return np.asarray(x).reshape(-1, *np.shape(x)[leading - 1 :])


def test_by_hand():
    """The samples share the prompt 1 2 and the response tokens 3 4; 4, which predicts 5 and 6,
    begins each branch.
    """
    trees = TokenTrees.from_samples(FORKED, row_length=8)
    rows = {
        "tokens": [[1, 2, 3, 4, 5, 4, 6, 0]],
        "targets": [[2, 3, 4, 5, 0, 6, 0, 0]],
        "segment_ids": [[1, 1, 1, 2, 2, 3, 3, 0]],
        "positions": [[0, 1, 2, 3, 4, 3, 4, 0]],
        "loss_mask": [[0, 1, 1, 1, 0, 1, 0, 0]],
        "parents": [[0, 1, 1, 0]],
        "sample_ids": [[-1, 7, 8, -1]],
    }
    batch = {
        "tokens": [[2, 3, 4, 5, 2, 3, 4, 6, *[0] * 8]],
        "segment_ids": [[*[1] * 4, *[2] * 4, *[0] * 8]],
        "loss_mask": [[1, 1, 1, 0, 1, 1, 1, 0, *[0] * 8]],
        "advantages": [[0.5, 1, 0, 0, 0.5, 1, 1, 0, *[0] * 8]],
        "sample_ids": [[7, 8, -1, -1]],
        "group_ids": [[3, 3, -1, -1]],
        "rewards": [[0, 1, 0, 0]],
    }
    for which, expected in ((trees.rows, rows), (trees.batch, batch)):
        for name, x in expected.items():
            np.testing.assert_array_equal(getattr(which, name), x, err_msg=name)
    assert trees.places.tolist() == [[1, 2, 3, 4, 1, 2, 5, 6, *[0] * 8]]
    for name in ("advantages", "rewards", "group_ids"):
        assert getattr(trees.rows, name) is None
    assert trees.batch.parents is None
    trees.batch.validate(10)


def test_a_turn_whose_prompt_holds_the_turn_before():
    """All of the first sample is a prefix of the second, but for the copy of its last token."""
    turns = [Sample([1, 5, 6], 1), Sample([1, 5, 6, 2, 7], 4)]
    trees = TokenTrees.from_samples(turns, row_length=8)
    assert trees.rows.tokens.tolist() == [[1, 5, 6, 6, 2, 7, 0, 0]]
    assert trees.rows.loss_mask.astype(int).tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    alone = RolloutBatch.from_samples(turns, row_length=8, share_prefixes=True)
    assert (alone.segment_ids > 0).sum() == 8  # prompts have nothing in common but a token


SAMPLES = st.lists(
    st.tuples(
        st.lists(st.integers(1, 2), min_size=1, max_size=9),
        st.integers(1, 9),
        st.integers(0, 2**9 - 1),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=60)
@given(
    SAMPLES,
    st.sampled_from([None, 1, 2]),
    st.sampled_from([16, 24, 120]),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_every_sample_can_be_read(layout, drawn, micro_batches, length, most, by_head):
    parallel = make_parallel_mesh("dp=4,cp=2", context_layout=layout)
    samples = []
    for tokens, start, bits in drawn:
        start = min(start, len(tokens))
        mask = [int(t >= start and bits >> t & 1) for t in range(len(tokens))]
        ids = [[t, sum(tokens[:k]) % 2] for k, t in enumerate(tokens[start:], start)]
        extras = {
            "ids": Extra(np.array(ids, int).reshape(-1, 2), fill=-1),
            "read": Extra(
                np.array([bits >> t & 1 if bits % 5 == 0 else 1 for t in tokens]),
                at="input",
                fill=-1,
            ),
        }
        samples.append(Sample(tokens, start, loss_mask=mask, extras=extras))
    options = {
        "row_length": length,
        "parallel": parallel,
        "micro_batches": micro_batches,
        "num_segments": most,
    }
    trees = TokenTrees.from_samples(samples, head_extras=["ids"] if by_head else [], **options)
    rows = trees.rows
    batch = trees.batch
    batch.validate(100)
    dataclasses.replace(rows, loss_mask=np.zeros_like(rows.loss_mask)).validate(100)
    assert sorted(batch.sample_ids[batch.sample_ids >= 0].tolist()) == [*range(len(samples))]

    paths = paths_of(rows)
    assert sorted(paths) == [*range(len(samples))]
    leading = rows.tokens.ndim
    places = flat(trees.places)
    expected = np.zeros_like(flat(rows.loss_mask))
    for row, slot in np.argwhere(flat(batch.sample_ids) >= 0).tolist():
        number = int(flat(batch.sample_ids)[row, slot])
        sample, (its_row, path) = samples[number], paths[number]
        assert its_row == row
        np.testing.assert_array_equal(flat(rows.tokens)[row, path], sample.tokens)
        np.testing.assert_array_equal(flat(rows.positions)[row, path], np.arange(len(path)))
        np.testing.assert_array_equal(
            rows_of(rows.extras["read"], leading)[row, path], sample.extras["read"].values
        )
        own = np.flatnonzero(flat(batch.segment_ids)[row] == slot + 1)
        own = own[np.argsort(flat(batch.positions)[row, own])]
        np.testing.assert_array_equal(places[row, own], path[sample.start - 1 :])
        np.testing.assert_array_equal(
            flat(batch.tokens)[row, own], sample.tokens[sample.start - 1 :]
        )
        np.testing.assert_array_equal(
            flat(batch.loss_mask)[row, own], [*sample.mask[sample.start :], 0]
        )
        trained = np.flatnonzero(sample.mask)
        np.testing.assert_array_equal(
            flat(rows.targets)[row, path[trained - 1]], np.array(sample.tokens)[trained]
        )
        values = sample.extras["ids"].values
        np.testing.assert_array_equal(rows_of(batch.extras["ids"], leading)[row, own[:-1]], values)
        if by_head:
            of_head = rows_of(rows.extras["ids"], leading)[row, path[trained - 1]]
            np.testing.assert_array_equal(of_head, values[trained - sample.start])
        expected[row, path[trained - 1]] = 1
    # the head computes what is read, and nothing else
    np.testing.assert_array_equal(flat(rows.loss_mask), expected)
    whole = sum(len(s.tokens) for s in samples)
    if layout == "contiguous" and whole <= length == 120 and most is None and not by_head:
        prompts = RolloutBatch.from_samples(samples, share_prefixes=True, **options)
        assert (rows.segment_ids > 0).sum() <= (prompts.segment_ids > 0).sum() <= whole


@pytest.mark.parametrize("micro_batches", [None, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_to_batch(layout, micro_batches):
    """Statistics, also of several dimensions, are those at the places, on a mesh as on the host;
    None stays None.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    samples = [
        dataclasses.replace(s, sample_id=i) for i, s in enumerate([*FORKED, *FORKED, FORKED[0]])
    ]
    trees = TokenTrees.from_samples(
        samples, row_length=24, parallel=parallel, micro_batches=micro_batches
    )
    rng = np.random.default_rng(0)
    shape = trees.rows.tokens.shape
    ids = rng.integers(0, 9, (*shape, 3)).astype(np.int32)
    stats = TokenStats(rng.normal(size=shape).astype(np.float32), ids=ids)
    for of in (trees, trees.put(parallel)):
        found = of.to_batch(stats, parallel=parallel)
        expected = np.take_along_axis(flat(stats.log_probs), flat(trees.places), axis=1)
        np.testing.assert_array_equal(flat(found.log_probs), expected)
        by_id = np.take_along_axis(
            ids.reshape(-1, shape[-1], 3), flat(trees.places)[..., None], axis=1
        )
        np.testing.assert_array_equal(np.asarray(found.ids).reshape(by_id.shape), by_id)
        assert found.entropy is None
    assert trees.put(parallel).places.sharding.spec == trees.specs(parallel).places


def test_the_gradient_is_the_sum_over_those_that_read():
    trees = TokenTrees.from_samples(FORKED, row_length=8)
    weights = np.arange(16.0, dtype=np.float32)[None]
    gradient = jax.grad(lambda x: (trees.to_batch(x) * weights).sum())(jnp.zeros((1, 8)))
    padding = sum(range(8, 16))
    assert gradient.tolist() == [[padding, 0 + 4, 1 + 5, 2, 3, 6, 7, 0]]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_in_a_shard_map(layout):
    """Each device holds its part of the rows and of the batch; gradients meet at the one place
    that they read.
    """
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    samples = [dataclasses.replace(s, sample_id=i) for i, s in enumerate([*FORKED, *FORKED])]
    trees = TokenTrees.from_samples(samples, row_length=16, parallel=parallel)
    weights = np.random.default_rng(0).normal(size=trees.places.shape).astype(np.float32)
    specs = (parallel.tokens_spec, parallel.tokens_spec, trees.specs(parallel))

    def total(x, weights, trees):
        def on_shards(x, weights, trees):
            return trees.to_batch(x, parallel=parallel.axes) * weights

        whole = jax.shard_map(
            on_shards, mesh=parallel.mesh, in_specs=specs, out_specs=parallel.tokens_spec
        )
        return whole(x, weights, trees).sum()

    gradient = jax.jit(jax.grad(total))(jnp.zeros(trees.rows.tokens.shape), weights, trees)
    expected = np.zeros(gradient.shape)
    np.add.at(expected, (np.arange(len(expected))[:, None], trees.places), weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_the_length_of_the_batch():
    """The rows' length, doubled or halved until it holds the responses, and another one; or what
    is said.
    """
    assert TokenTrees.from_samples(FORKED, row_length=8).batch.tokens.shape == (1, 16)
    many = [dataclasses.replace(FORKED[0], sample_id=i) for i in range(5)]
    assert TokenTrees.from_samples(many, row_length=12).batch.tokens.shape == (1, 24)
    short = TokenTrees.from_samples([Sample([*range(32)], 30)], row_length=32)
    assert short.batch.tokens.tolist() == [[29, 30, 31, 0]]
    assert TokenTrees.from_samples(
        FORKED, row_length=8, batch_row_length=20
    ).batch.tokens.shape == (1, 20)
    parallel = make_parallel_mesh("cp=8", context_layout="zigzag")
    on_mesh = TokenTrees.from_samples([Sample([*range(32)], 30)], row_length=64, parallel=parallel)
    assert on_mesh.batch.tokens.shape == (1, 16)


def with_ids(*ids):
    return [
        dataclasses.replace(s, extras={"ids": Extra(x, fill=-1)})
        for s, x in zip(FORKED, ids, strict=True)
    ]


def test_what_the_head_reads_ends_what_is_shared():
    """Token 4 has other ids in the two samples, so 3 is the last shared one, and predicts both
    of them.
    """
    samples = with_ids([[9, 8], [7, 6], [5, 4]], [[9, 8], [6, 7], [5, 4]])
    trees = TokenTrees.from_samples(samples, row_length=12, head_extras=["ids"])
    assert trees.rows.tokens.tolist() == [[1, 2, 3, 4, 5, 3, 4, 6, 0, 0, 0, 0]]
    none = [-1, -1]
    ids = [none, [9, 8], [7, 6], [5, 4], none, [6, 7], [5, 4], *[none] * 5]
    assert trees.rows.extras["ids"].tolist() == [ids]
    # nobody reads them there
    assert TokenTrees.from_samples(samples, row_length=12).rows.extras == {}


def test_ids_of_tokens_that_do_not_train_do_not_matter():
    """The second sample does not train on 4, so its ids there are not read, and those of the
    first stand for both.
    """
    first, second = with_ids([[9, 8], [7, 6], [5, 4]], [[9, 8], [0, 0], [5, 4]])
    second = dataclasses.replace(second, loss_mask=[0, 0, 1, 0, 1])
    for samples in ([first, second], [second, first]):
        trees = TokenTrees.from_samples(samples, row_length=12, head_extras=["ids"])
        assert (trees.rows.segment_ids > 0).sum() == 7
        assert trees.rows.extras["ids"][0, 2].tolist() == [7, 6]


REFUSED = {
    "the rows' own length": (
        {"batch_row_length": 8},
        "batch_row_length: got 8, expected another than row_length",
    ),
    "too short": (
        {"batch_row_length": 7},
        "batch_row_length: got 7, expected at least 8, the tokens of all responses",
    ),
    "half": ({"batch_row_length": 9.5}, "batch_row_length: got 9.5, expected"),
    "no extra": (
        {"head_extras": ["ids"]},
        r"head_extras: got 'ids', expected some of the extras .* have, \['own'\]",
    ),
    "at the input": (
        {"head_extras": ["read"]},
        r"head_extras: got 'read', expected some of the extras",
    ),
    "text": ({"head_extras": "own"}, "head_extras: got str, expected names of extras"),
    "no name": ({"head_extras": [3]}, "head_extras: got int, expected"),
    "long": (
        {"row_length": 4},
        r"samples: got 5 tokens \(5 with .*\) in sample 0, expected at most",
    ),
    "segments": ({"num_segments": 0}, "num_segments: got 0, expected a whole number of at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, message = REFUSED[case]
    extras = {"own": [1.0, 2.0, 3.0], "read": Extra([1, 2, 3, 4, 5], at="input")}
    samples = [dataclasses.replace(s, extras=extras) for s in FORKED]
    with pytest.raises((TypeError, ValueError), match=message):
        TokenTrees.from_samples(samples, **{"row_length": 8} | options)


def test_statistics_that_are_not_of_the_rows():
    trees = TokenTrees.from_samples(FORKED, row_length=8)
    for x, message in (
        (
            TokenStats(jnp.zeros((1, 16))),
            r"stats.log_probs: got shape \(1, 16\), expected \(1, 8\) and more",
        ),
        (
            {"values": jnp.zeros(8)},
            r"stats\['values'\]: got shape \(8,\), expected \(1, 8\) and more",
        ),
        ([1.0], r"stats\[0\]: got float, expected an array"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trees.to_batch(x)
    parallel = make_parallel_mesh("cp=8", context_layout="zigzag")
    with pytest.raises(
        ValueError, match="batch: got rows packed for context layout 'contiguous' over 1 shards"
    ):
        trees.to_batch(jnp.zeros((1, 8)), parallel=parallel)


def test_recurrent_models():
    trees = TokenTrees.from_samples(FORKED, row_length=8)
    with pytest.raises(
        ValueError, match="batch: got rows packed as trees for a model with recurrent state"
    ):
        check_recurrent(types.SimpleNamespace(recurrent=True), trees.rows)
