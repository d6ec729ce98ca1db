"""Recorded nuclei in both ways to log-probs, in any layout; forward passes over micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import (
    RolloutBatch,
    Sample,
    TokenStats,
    compute_log_probs,
    log_probs_from_hidden,
    log_probs_from_logits,
)
from jaxppo.batch.nucleus import pack_nucleus_ids
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

V, H, T = 96, 8, 32
RNG = np.random.default_rng(2)
SAMPLES = [
    Sample(RNG.integers(0, V, n).tolist(), response_start=start, sample_id=100 + i)
    for i, (n, start) in enumerate([(16, 5), (9, 1), (7, 7), (16, 12), (24, 3)])
]


def nuclei(sample):
    """0 to 5 ids for each response token. Every second nucleus lacks the sampled token."""
    sampled = sample.tokens[sample.response_start :]
    some = [RNG.integers(0, V, RNG.integers(0, 5)) for _ in sampled]
    return [
        np.unique(np.append(ids, [y] * (j % 2))).astype(int)
        for j, (ids, y) in enumerate(zip(some, sampled, strict=True))
    ]


RECORDED = [nuclei(sample) for sample in SAMPLES]
LAYOUTS = ["contiguous", "zigzag", "zigzag_per_segment", "striped"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_nucleus_stands_where_its_token_is_predicted(layout):
    parallel = make_parallel_mesh("dp=2,cp=4,tp=1", context_layout=layout)
    batch = RolloutBatch.from_samples(SAMPLES, row_length=T, parallel=parallel)
    ids = pack_nucleus_ids(RECORDED, SAMPLES, batch)
    assert ids.shape == (*batch.tokens.shape, 8)
    found = 0
    for row, t in np.ndindex(batch.tokens.shape):
        recorded = sorted(ids[row, t][ids[row, t] >= 0].tolist())
        if batch.loss_mask[row, t] == 0:
            assert not recorded
            continue
        sample = batch.sample_ids[row, batch.segment_ids[row, t] - 1] - 100
        j = batch.positions[row, t] + 1 - SAMPLES[sample].response_start
        assert recorded == RECORDED[sample][j].tolist()
        found += 1
    assert found == sum(map(len, RECORDED))


def test_rows_of_padding_alone():
    """As on a process of a pod that has no sample."""
    empty = np.zeros((1, T), np.int32)
    batch = RolloutBatch(empty, empty, empty, empty, empty * 1.0, np.full((1, 2), -1, np.int32))
    ids = pack_nucleus_ids(RECORDED, SAMPLES, batch, width=8)
    assert ids.shape == (1, T, 8)
    assert (ids == -1).all()


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_both_paths_renormalise_over_the_nucleus_and_the_sampled_token(mesh):
    parallel = mesh and make_parallel_mesh(mesh)
    batch = RolloutBatch.from_samples(SAMPLES, row_length=T, rows=4)
    rows = batch.tokens.shape[0]
    hidden = jnp.asarray(RNG.normal(size=(rows, T, H)), jnp.float32)
    kernel = jnp.asarray(RNG.normal(size=(H, V)), jnp.float32)
    where = batch.loss_mask > 0

    @jax.jit
    def run(hidden, ids):
        options = {"where": where, "parallel": parallel}
        logits = jnp.matmul(hidden, kernel, precision="highest")
        from_logits = log_probs_from_logits(
            logits, batch.targets, nucleus_ids=ids, **options
        ).log_probs
        from_hidden = log_probs_from_hidden(
            hidden, kernel, batch.targets, nucleus_ids=ids, **options
        ).log_probs
        return from_logits, from_hidden

    log_probs = list(run(hidden, pack_nucleus_ids(RECORDED, SAMPLES, batch)))
    logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)
    expected = np.zeros((rows, T))
    for row, t in zip(*np.nonzero(where), strict=True):
        sample = SAMPLES[batch.sample_ids[row, batch.segment_ids[row, t] - 1] - 100]
        j = batch.positions[row, t] + 1 - sample.response_start
        recorded = RECORDED[SAMPLES.index(sample)][j]
        z = logits[row, t]
        y = batch.targets[row, t]
        expected[row, t] = z[y] - np.log(np.exp(z[np.union1d(recorded, y)]).sum())
    assert_trees_close(log_probs, [expected, expected], rtol=1e-5, atol=2e-6)


def test_compute_log_probs_of_micro_batches_is_that_of_the_batch():
    batch = jax.tree.map(jnp.asarray, RolloutBatch.from_samples(SAMPLES, row_length=T, rows=4))
    stacked = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    table = jnp.asarray(RNG.normal(size=(V, V)), jnp.float32)
    calls = []

    def apply(table, batch):
        calls.append(1)
        return log_probs_from_logits(table[batch.tokens], batch.targets, entropy="metric")

    whole = compute_log_probs(apply, table, batch)
    got = jax.jit(lambda table, batch: compute_log_probs(apply, table, batch))(table, stacked)
    assert_trees_close(jax.tree.map(lambda x: x.reshape(4, T), got), whole)
    assert len(calls) == 2  # traced once for all micro-batches
    assert (
        jax.grad(lambda table: compute_log_probs(apply, table, batch).log_probs.sum())(table) == 0
    ).all()


def test_bad_input():
    batch = RolloutBatch.from_samples(SAMPLES, row_length=T)
    with pytest.raises(
        ValueError, match=r"recorded\[1\]: got 3 nuclei, expected 8, one a response token"
    ):
        pack_nucleus_ids([RECORDED[0], RECORDED[1][:3], *RECORDED[2:]], SAMPLES, batch)
    with pytest.raises(ValueError, match="width: got 1, expected at least 5"):
        pack_nucleus_ids(RECORDED, SAMPLES, batch, width=1)
    with pytest.raises(ValueError, match=r"samples: got none with sample_id 10[0-4]"):
        pack_nucleus_ids(RECORDED[:1], SAMPLES[:1], batch)
    with pytest.raises(ValueError, match="recorded: got 5 samples, expected 2"):
        pack_nucleus_ids(RECORDED, SAMPLES[:2], batch)
    logits = jnp.zeros((2, 4, 96))
    targets = jnp.zeros((2, 4), int)
    with pytest.raises(ValueError, match=r"nucleus_ids: got shape \(4, 1\), expected \[R, T, K\]"):
        log_probs_from_logits(logits, targets, nucleus_ids=jnp.zeros((4, 1), int))
    with pytest.raises(
        TypeError, match="apply: got ndarray, expected a function that returns TokenStats"
    ):
        compute_log_probs(lambda params, batch: batch.loss_mask, None, batch)
    with pytest.raises(ValueError, match="apply: got log-probs of shape"):
        compute_log_probs(lambda params, batch: TokenStats(jnp.zeros(3)), None, batch)
