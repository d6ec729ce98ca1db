"""Packs in the thd format: every array beside what `from_samples` makes of the same sequences,
on every layout.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import compilations

from jaxppo import (
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    explain_broken_rules,
    policy_loss,
)
from sharding import make_parallel_mesh

# of two packs; falling, since `from_samples` packs the longest sequence first
LENGTHS = [[7, 5, 2, 1], [9, 4]]
LAYOUTS = ["contiguous", "zigzag", "zigzag_per_segment", "striped"]
N, T, S = 24, 32, 4
PER_TOKEN = ("old_log_probs", "rollout_log_probs", "values")


def sequences(lengths, seed):
    """Tokens, what belongs to each token, and where the response starts."""
    rng = np.random.default_rng(seed)
    made = []
    for i, n in enumerate(lengths):
        values = {name: -rng.exponential(size=n).astype(np.float32) for name in PER_TOKEN}
        start = int(rng.integers(1, n)) if n > 1 else n
        mask = (rng.random(n) < 0.8) & (np.arange(n) >= start)
        made.append(
            (
                rng.integers(1, 50, n),
                values,
                start,
                mask,
                {"rewards": i + 0.5, "group_ids": 7 * seed + i},
            )
        )
    return made


def samples_of(made):
    return [
        Sample(
            tokens,
            response_start=start,
            loss_mask=mask,
            reward=one["rewards"],
            group_id=one["group_ids"],
            **{name: x[start:] for name, x in values.items()},
        )
        for tokens, values, start, mask, one in made
    ]


def pack_of(made, aligned, multiple=1, filled=0, tail=-1):
    """One pack: each sequence padded to a multiple, values at tokens or at the positions that
    predict them.
    """
    arrays = {name: np.zeros(N, np.float32) for name in (*PER_TOKEN, "loss_mask")} | {
        "tokens": np.full(N, 77)
    }
    ends = [0]
    padded = [0]
    for tokens, values, start, mask, _ in made:
        at = padded[-1] + np.arange(len(tokens))
        arrays["tokens"][at] = tokens
        response = np.arange(start, len(tokens))
        for name, x in (values | {"loss_mask": mask}).items():
            arrays[name][padded[-1] + response - (aligned == "target")] = x[start:]
        ends.append(ends[-1] + len(tokens))
        padded.append(padded[-1] - -len(tokens) // multiple * multiple)
    padded = padded[:-1] if tail == "offsets" else padded
    arrays |= {"cu_seqlens": ends} | ({"cu_seqlens_padded": padded} if multiple > 1 else {})
    for name in ("rewards", "group_ids"):
        arrays[name] = [one[name] for *_, one in made] + [9] * filled
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if name in arrays:
            unused = arrays[name][-1] if tail == "last" else -1
            arrays[name] = [*arrays[name], *[unused] * (len(made) + 1 + filled - len(arrays[name]))]
    return {
        name: np.asarray(x, np.float32 if name == "rewards" else None) for name, x in arrays.items()
    }


def batch_of(packs, aligned, parallel=None, **options):
    return RolloutBatch.from_cu_seqlens(
        **packs, aligned=aligned, row_length=T, parallel=parallel, **options
    )


def assert_same_batches(got, expected):
    chex.assert_trees_all_equal(got, jax.tree.map(jnp.asarray, expected))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("aligned", ["token", "target"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("multiple", "filled", "tail"),
    [(1, 0, -1), (2, 2, -1), (3, 1, "last"), (1, 3, "last"), (2, 1, "offsets")],
    ids=str,
)
def test_one_pack_beside_from_samples(multiple, filled, tail, layout, aligned, jitted):
    """Every array in every bit, whatever padding lies in the pack; also where the layout wants
    other padding.
    """
    parallel = make_parallel_mesh("cp=4,tp=2", context_layout=layout)
    made = sequences(LENGTHS[0], seed=multiple)
    packs = pack_of(made, aligned, multiple, filled, tail)

    def make(packs):
        return batch_of(packs, aligned, parallel, num_segments=8)

    batch = (jax.jit(make) if jitted else make)(packs)
    assert_same_batches(
        batch,
        RolloutBatch.from_samples(
            samples_of(made), row_length=T, num_segments=8, parallel=parallel
        ),
    )
    batch.validate(100)


@pytest.mark.every(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packs_of_a_mesh_beside_from_samples(layout):
    """Each pack is a row; its rows are those of a mesh without data axes, and the loss is that
    of all samples.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    alone = make_parallel_mesh("cp=2,tp=2", context_layout=layout, devices=jax.devices()[:4])
    made = [sequences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    each = [pack_of(x, "token", filled=S - len(x)) for x in made]
    batch = batch_of(
        {name: np.stack([x[name] for x in each]) for name in each[0]}, "token", parallel
    )
    rows = [
        RolloutBatch.from_samples(samples_of(x), row_length=T, num_segments=S, parallel=alone)
        for x in made
    ]
    numbers = np.array([[0, 1, 2, 3], [4, 5, -1, -1]])
    expected = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    assert_same_batches(batch, dataclasses.replace(expected, sample_ids=numbers))

    samples = samples_of(itertools.chain(*made))
    packed = RolloutBatch.from_samples(samples, row_length=T, num_segments=S, parallel=parallel)
    config = PolicyLossConfig(aggregation="sequence_mean_token_mean")
    losses = []
    for one in (batch, packed):
        one = dataclasses.replace(one, advantages=one.values)
        losses.append(
            policy_loss(TokenStats(one.rollout_log_probs), one, config, parallel=parallel)[0]
        )
    chex.assert_trees_all_close(*losses, rtol=1e-6)


def test_targets_beyond_the_pack():
    """Megatron's labels: the last position of a sequence may carry loss."""
    packs = {"tokens": [5, 6, 7, 8, 0], "targets": [6, 60, 8, 9, 0], "loss_mask": [1, 1, 0, 1, 0]}
    packs = {name: np.array([x]) for name, x in packs.items()} | {
        "cu_seqlens": np.array([0, 2, 4, -1])
    }
    batch = batch_of(packs, "target")
    assert batch.real_last_targets
    assert batch.targets[0, :5].tolist() == [6, 60, 8, 9, 0]
    assert batch.loss_mask[0, :5].tolist() == [1, 1, 0, 1, 0]
    batch.validate(100)


def test_packs_of_any_size_share_a_program():
    """As verl hands over: other numbers of tokens and of sequences at each step, on the host."""
    made = [sequences(lengths, 0) for lengths in ([7, 5, 2], [9, 4])]
    steps = [
        {name: x[: N - i] if len(x) == N else x for name, x in pack_of(one, "token").items()}
        for i, one in enumerate(made)
    ]
    batch_of(steps[0], "token", num_segments=S)
    assert compilations(lambda: batch_of(steps[1], "token", num_segments=S)) == 0


def test_sequences_that_are_not_there():
    """Whatever the pack says of them: no reward and no id reaches the batch."""
    packs = {
        "tokens": np.arange(1, 5),
        "cu_seqlens": np.array([0, 2, 2, 4, 4]),
        "loss_mask": np.array([0, 1, 0, 1]),
    }
    packs |= {"rewards": np.array([1.0, np.nan, 2.0, 7.0]), "group_ids": np.array([3, 3, 3, 3])}
    batch = batch_of(packs, "token")
    assert batch.rewards.tolist() == [[1, 0, 2, 0]]
    assert batch.group_ids.tolist() == [[3, -1, 3, -1]]
    assert batch.sample_ids.tolist() == [[0, -1, 2, -1]]
    batch.validate(10)


def test_derivatives_and_vmap():
    packs = pack_of(sequences(LENGTHS[0], 0), "token", 2)

    def of(x):
        return batch_of(packs | {"values": x}, "token").values

    slope = jax.grad(lambda x: of(x).sum())(jnp.asarray(packs["values"]))
    assert set(np.unique(slope)) == {0.0, 1.0}
    assert float((slope * packs["values"]).sum()) == pytest.approx(
        float(packs["values"].sum()), rel=1e-6
    )
    twice = jax.vmap(of)(np.stack([packs["values"], 2 * packs["values"]]))
    np.testing.assert_array_equal(2 * twice[0], twice[1])


PACK = {
    "tokens": np.arange(1, 9),
    "cu_seqlens": np.array([0, 5, 8]),
    "loss_mask": np.array([0, 1, 1, 1, 1, 0, 1, 1]),
}
WRONG = {
    "lengths instead of ends": (
        {"cu_seqlens": [5, 3]},
        r"cu_seqlens: got \[5, 3\] in row 0, expected 0, then ends",
    ),
    "falling ends": (
        {"cu_seqlens": [0, 5, 3]},
        r"cu_seqlens: got \[0, 5, 3\] in row 0, expected 0, then ends that do",
    ),
    "a gap": (
        {"cu_seqlens": [0, -1, 8]},
        r"cu_seqlens: got \[0, -1, 8\] in row 0, expected 0, then ends that do not",
    ),
    "ends behind the pack": (
        {"cu_seqlens": [0, 5, 9]},
        "cu_seqlens: got 9 in row 0, expected at most 8, the tokens",
    ),
    "padded ends behind the pack": (
        {"cu_seqlens_padded": [0, 5, 10]},
        "cu_seqlens_padded: got 10 in row 0, expected at most 8, the tokens",
    ),
    "too little room": (
        {"cu_seqlens_padded": [0, 4, 8]},
        (
            r"cu_seqlens_padded: got \[0, 4, 8\] in row 0, expected ends as far apart as those of"
            r" cu_seqlens, or further"
        ),
    ),
    "a short row": (
        {"row_length": 6},
        "cu_seqlens: got 8 in row 0, expected at most row_length=6 positions of a row",
    ),
    "a token in no sequence": (
        {"cu_seqlens": [0, 5, 6]},
        "loss_mask: got 2 in row 0, expected 0 tokens to train on outside the sequences",
    ),
    "a token in the padding": (
        {"cu_seqlens": [0, 3, 6], "cu_seqlens_padded": [0, 4, 8]},
        "loss_mask: got 2 in row 0, expected 0 tokens to train on outside the sequences",
    ),
}


@functools.partial(jax.jit, static_argnums=1)
def jitted_loss(packs, row_length):
    batch = RolloutBatch.from_cu_seqlens(**packs, aligned="token", row_length=row_length)
    batch = dataclasses.replace(batch, advantages=jnp.ones((1, row_length)))
    return policy_loss(
        TokenStats(-jnp.ones((1, row_length))), batch, PolicyLossConfig(ratio_to="current")
    )


@pytest.mark.parametrize("what", WRONG)
def test_what_only_values_show(what):
    """The host raises. Under jit the loss is NaN, and a metric names the rule."""
    change, message = WRONG[what]
    row_length = change.get("row_length", 8)
    packs = PACK | {name: np.array(x) for name, x in change.items() if name != "row_length"}
    for arrays in (packs, jax.tree.map(jnp.asarray, packs)):
        with pytest.raises(ValueError, match=message):
            RolloutBatch.from_cu_seqlens(**arrays, aligned="token", row_length=row_length)
    value, found = jitted_loss(packs, row_length)
    assert np.isnan(value)
    assert "cu_seqlens" in explain_broken_rules(found["broken_rules"].value)[0]
    assert np.isfinite(jitted_loss(PACK, 8)[0])


def test_a_layout_that_pads_each_sequence():
    """Sequences of 5 and 3 fill a row of 8; each a multiple of 8 positions, they need 16."""
    parallel = make_parallel_mesh("cp=4,tp=2", context_layout="zigzag_per_segment")
    with pytest.raises(
        ValueError,
        match=r"got 16 in row 0, expected at most row_length=8 .* padded to a multiple of 8",
    ):
        RolloutBatch.from_cu_seqlens(**PACK, aligned="token", parallel=parallel)
    RolloutBatch.from_cu_seqlens(
        **PACK, aligned="token", parallel=parallel, row_length=16
    ).validate(100)


MISUSE = {
    "no alignment": ({"aligned": None}, "aligned: got None, expected one of 'token', 'target'"),
    "targets at tokens": (
        {"targets": PACK["tokens"]},
        "aligned: got 'token' with targets, expected 'target'",
    ),
    "tokens of three dimensions": (
        {"tokens": np.ones((1, 1, 8), int)},
        r"tokens: got shape \(1, 1, 8\), expected \[N\] or \[R, N\], each at least 1",
    ),
    "ends of no sequence": (
        {"cu_seqlens": np.array([0])},
        r"cu_seqlens: got shape \(1,\), expected \[S \+ 1\]",
    ),
    "a mask of another shape": (
        {"loss_mask": np.ones(7)},
        r"loss_mask: got shape \(1, 7\), expected \(1, 8\)",
    ),
    "rewards per token": (
        {"rewards": np.ones(8)},
        r"rewards: got shape \(1, 8\), expected \(1, 2\)",
    ),
    "other padded ends": (
        {"cu_seqlens_padded": np.array([0, 8])},
        r"cu_seqlens_padded: got shape \(1, 2\), expected \(1, 3\)",
    ),
    "a list": ({"cu_seqlens": [0, 5, 8]}, "cu_seqlens: got list, expected an array"),
    "floats": (
        {"cu_seqlens": np.array([0.0, 5.0, 8.0])},
        "cu_seqlens: got float64, expected integers",
    ),
    "tokens beyond i32": (
        {"tokens": np.array([1] * 7 + [2**32])},
        "tokens: got 4294967296, expected integers of at most",
    ),
    "an unknown array": (
        {"logps": PACK["tokens"]},
        "logps: got an unknown array, expected one of advantages",
    ),
    "too few segments": (
        {"num_segments": 1},
        "num_segments: got 1, expected a whole number of at least 2",
    ),
    "no row": ({"row_length": 0}, "row_length: got 0, expected a whole number of at least 1"),
    "one row for two": (
        {"parallel": "dp=2,cp=2,tp=2"},
        (
            r"tokens: got shape \(1, 8\) in .*from_cu_seqlens, expected dimension 0 to be a"
            r" multiple of 2"
        ),
    ),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse(what):
    change, message = MISUSE[what]
    given = PACK | {"aligned": "token"} | change
    if "parallel" in given:
        given["parallel"] = make_parallel_mesh(given["parallel"])
    with pytest.raises((TypeError, ValueError), match=message):
        RolloutBatch.from_cu_seqlens(**given)
