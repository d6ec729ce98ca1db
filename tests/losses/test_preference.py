"""Losses of pairs: the oracle's, wherever the samples of a pair lie; what is no pair; what is
refused.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from policy_steps import quick_jit, with_garbage
from preference_steps import COUNT, LOSSES, MESHES, check, step_of, whole
from tables import sampled

from jaxppo import (
    SFT,
    Normalizer,
    RolloutBatch,
    TokenStats,
    accumulate_gradients,
    explain_broken_rules,
    finalize_metrics,
    log_probs_from_hidden,
    loss_from_hidden,
    loss_from_stats,
)
from jaxppo.losses import Part, preference
from sharding import make_parallel_mesh
from sharding.audit.program import hang_risks, notes
from sharding.testing import assert_trees_close


@pytest.mark.every(5)
@pytest.mark.parametrize("name", LOSSES)
def test_the_oracle_on_one_device(name):
    samples = step_of(0)
    batch = RolloutBatch.from_samples(samples, row_length=24, rows=8, num_segments=6)
    check(name, samples, batch, whole(name)(with_garbage(batch, np.nan)))


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("name", "mesh"), sampled(itertools.product(LOSSES, MESHES), lambda i, _: (i + i // 4) % 4 == 0)
)
def test_the_oracle_wherever_pairs_lie(name, mesh):
    samples = step_of(0)
    layout = MESHES[mesh]
    order = np.random.default_rng(1).permutation(COUNT)
    options = {"parallel": make_parallel_mesh(mesh, context_layout=layout), "num_segments": 6}
    batch = RolloutBatch.from_samples([samples[i] for i in order], row_length=32, rows=8, **options)
    check(name, samples, batch, whole(name, mesh, layout)(with_garbage(batch, np.inf)))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "mesh"), [("dpo", "dp=2,cp=2,tp=2"), ("orpo", None), ("kto", "dp=2,cp=2,tp=2")]
)
def test_micro_batches_add_up(name, mesh):
    """Micro-batches of four pairs, one and one: the mean of their means is another number."""
    samples = step_of(2)
    parallel = mesh and make_parallel_mesh(mesh)

    def of(*groups):
        return [s for s in samples if s.group_id // 7 in groups]

    pack = functools.partial(
        RolloutBatch.from_samples, row_length=24, rows=4, num_segments=6, parallel=parallel
    )
    batches = jax.tree.map(
        lambda *x: np.stack(x), *(pack(of(*g)) for g in ((0, 2, 3, 5), (1,), (4,)))
    )

    def run(batches):
        normalizer = Normalizer.of(
            SFT(aggregation="sequence_mean_token_mean"), batches, parallel=parallel
        )
        places = jnp.eye(3)

        def loss_fn(x, given):
            place, batch, part = given
            stats = TokenStats((x * place[:, None, None]).sum(axis=0))
            options = {"parallel": parallel, "normalizer": part}
            return loss_from_stats(stats, batch, LOSSES[name], **options)

        (loss, found), gradient = accumulate_gradients(loss_fn, (places, batches, normalizer))(
            batches.returns
        )
        return loss, gradient, finalize_metrics(found)

    check(name, samples, batches, quick_jit(run)(batches))


def test_the_constructor_keeps_pairs_together():
    samples = step_of(3)
    batches = preference.micro_batches_of_pairs(samples, 4, row_length=24)
    assert batches.micro_batches == len(batches.tokens) == 4
    batches.validate(
        vocab_size=50,
        normalizer=Normalizer.of(SFT(aggregation="sequence_mean_token_mean"), batches),
    )
    held = [set(x[x >= 0].tolist()) for x in batches.group_ids]
    assert sorted(g for groups in held for g in groups) == [0, 7, 14, 21, 28, 35]
    tokens = (batches.segment_ids > 0).sum(axis=(1, 2))
    assert tokens.max() - tokens.min() <= 24
    with pytest.raises(
        ValueError, match="micro_batches: got 7, expected 1 to 6, the number of pairs"
    ):
        preference.micro_batches_of_pairs(samples, 7, row_length=24)


BROKEN = {
    "a sample without its pair": lambda s: s[:-1],
    "three of one group": lambda s: [*s, dataclasses.replace(s[0], sample_id=99, reward=9.0)],
    "equal rewards": lambda s: [dataclasses.replace(x, reward=1.0) for x in s],
    "no loss token in one": lambda s: [
        dataclasses.replace(s[0], loss_mask=np.zeros(len(s[0].tokens))),
        *s[1:],
    ],
}


@pytest.mark.every(4)
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("how", BROKEN)
def test_what_is_no_pair_is_nan(how, mesh):
    """All other pairs are sound; a mean over those would be a plausible number."""
    samples = BROKEN[how](step_of(4))
    options = {"parallel": mesh and make_parallel_mesh(mesh), "num_segments": 7}
    batch = RolloutBatch.from_samples(samples, row_length=24, rows=8, **options)
    loss, gradient, found = whole("dpo", mesh)(batch)
    assert np.isnan(loss)
    assert np.isnan(gradient).any()
    (text,) = explain_broken_rules(found["broken_rules"])
    assert text.startswith("pairs: expected of each pair two samples")


def test_a_pair_in_two_micro_batches_is_nan():
    samples = step_of(4)
    parts = [samples[:6], samples[6:]]  # each has one sample of every pair
    batches = [RolloutBatch.from_samples(x, row_length=24, rows=4, num_segments=6) for x in parts]
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    normalizer = Normalizer.of(SFT(aggregation="sequence_mean_token_mean"), stacked)

    def loss_fn(x, given):
        return loss_from_stats(
            TokenStats(x * given[0].returns), given[0], preference.DPO(), normalizer=given[1]
        )

    step = jax.jit(accumulate_gradients(loss_fn, (stacked, normalizer)))
    (loss, found), _ = step(np.float32(1))
    assert np.isnan(loss)
    assert explain_broken_rules(found["broken_rules"].value)[0].startswith("pairs")


@pytest.mark.every(2)
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_from_hidden(mesh):
    """The two public functions one after the other, gradients of hidden states and kernel too."""
    parallel = mesh and make_parallel_mesh(mesh)
    batch = RolloutBatch.from_samples(
        step_of(6), row_length=24, rows=8, num_segments=6, parallel=parallel
    )
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(*batch.tokens.shape, 6)).astype(np.float32)
    kernel = rng.normal(size=(6, 50)).astype(np.float32)
    options = {"parallel": parallel, "temperature": 0.8}

    def two(hidden, kernel, batch):
        stats = log_probs_from_hidden(
            hidden, kernel, batch.targets, where=batch.loss_mask > 0, **options
        )
        return loss_from_stats(stats, batch, LOSSES["dpo"], parallel=parallel)

    def one(hidden, kernel, batch):
        return loss_from_hidden(hidden, kernel, batch, LOSSES["dpo"], **options)

    def traced(fn):
        def run(hidden, kernel):
            slopes = jax.value_and_grad(fn, (0, 1), has_aux=True)
            (loss, found), gradients = slopes(hidden, kernel, batch)
            return loss, finalize_metrics(found), gradients

        return jax.jit(run).trace(hidden, kernel)

    in_one = traced(one)
    found, expected = (x.lower().compile()(hidden, kernel) for x in (in_one, traced(two)))
    assert_trees_close(found, expected, 1e-5)
    assert hang_risks(in_one.jaxpr) == []
    assert "two passes" in notes(in_one.jaxpr)[0]


@pytest.mark.parametrize("explicit", [False, True])
def test_inside_the_users_own_shard_map(explicit):
    """As a call on the mesh: pairs are found over the data axes that the caller's shards lie on."""
    samples = step_of(0)
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", explicit=explicit)
    batch = RolloutBatch.from_samples(
        samples, row_length=24, rows=8, num_segments=6, parallel=parallel
    )
    specs = batch.specs(parallel)
    placed = jax.device_put(batch, jax.tree.map(parallel.sharding, specs))

    def run(batch, parallel):
        def fn(x):
            return loss_from_stats(TokenStats(x), batch, LOSSES["dpo"], parallel=parallel)

        (loss, found), gradient = jax.value_and_grad(fn, has_aux=True)(batch.returns)
        return loss, gradient, finalize_metrics(found)

    own = functools.partial(run, parallel=parallel.axes)
    out = (P(), specs.returns, P())
    inside = jax.shard_map(own, mesh=parallel.mesh, in_specs=(specs,), out_specs=out)
    check("dpo", samples, batch, jax.jit(inside)(placed))
    check("dpo", samples, batch, jax.jit(functools.partial(run, parallel=parallel))(placed))


def test_odds_of_a_certain_response_are_finite():
    samples = preference.samples_of_pairs([[1]], chosen=[[2, 3]], rejected=[[4]])
    batch = RolloutBatch.from_samples(samples, row_length=5)

    def run(x):
        return loss_from_stats(TokenStats(x), batch, preference.ORPO())[0]

    loss, gradient = jax.jit(jax.value_and_grad(run))(np.float32([[0, 0, 0, -90, 0]]))
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


@functools.partial(jax.jit, static_argnums=1)
def with_a_likelihood(batch, nll):
    """DPO with a likelihood of its own, with the same one as a part, and with a mean of tokens as
    a part.
    """
    stats = TokenStats(batch.returns)
    losses = [preference.DPO(nll_coef=0.5, nll=nll)]
    for aggregation in (nll, "token_mean"):
        sft = Part(SFT(aggregation=aggregation), coef=0.5, mask="chosen")
        losses.append({"dpo": preference.DPO(), "sft": sft})
    return [loss_from_stats(stats, batch, loss)[0] for loss in losses]


@pytest.mark.parametrize("nll", ["sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_the_likelihood_is_that_of_sft_with_this_aggregation(nll):
    """One name, one number: a "token_mean" over the chosen responses is a part of its own, and
    another number.
    """
    batch = RolloutBatch.from_samples(step_of(0), row_length=24, rows=8, num_segments=6)
    owners = np.take_along_axis(batch.rewards, np.maximum(batch.segment_ids - 1, 0), -1)
    groups = np.take_along_axis(batch.group_ids, np.maximum(batch.segment_ids - 1, 0), -1)
    best = {
        g: batch.rewards[batch.group_ids == g].max()
        for g in np.unique(batch.group_ids[batch.group_ids >= 0])
    }
    chosen = (batch.loss_mask > 0) & (owners == np.vectorize(lambda g: best.get(g, np.inf))(groups))
    batch = dataclasses.replace(batch, extras={"chosen": chosen.astype(np.float32)})
    got, same, other = with_a_likelihood(batch, nll)
    np.testing.assert_allclose(got, same, rtol=1e-6)
    assert abs(got - other) > 0.01


def test_refusals():
    batch = RolloutBatch.from_samples(step_of(0), row_length=24, rows=8)
    stats = TokenStats(batch.returns)
    loss = preference.DPO()
    for name, what in {
        "rewards": loss,
        "group_ids": preference.SimPO(),
        "ref_log_probs": preference.KTO(0.0),
    }.items():
        with pytest.raises(ValueError, match=rf"batch.{name}: got None, expected"):
            loss_from_stats(stats, dataclasses.replace(batch, **{name: None}), what)
    with pytest.raises(
        TypeError, match="loss: got str, expected a PolicyLossConfig, a policy loss, SFT"
    ):
        loss_from_stats(stats, batch, "dpo")
    with pytest.raises(TypeError, match="stats: got ndarray, expected TokenStats"):
        loss_from_stats(batch.returns, batch, loss)
    with pytest.raises(ValueError, match=r"stats.log_probs: got shape \(4, 24\)"):
        loss_from_stats(TokenStats(batch.returns[:4]), batch, loss)
    with pytest.raises(
        ValueError, match="normalizer: got one of aggregation 'token_mean', expected 'sequence_mean"
    ):
        loss_from_stats(stats, batch, loss, normalizer=Normalizer.of(SFT(), batch))
    part = dataclasses.replace(batch, micro_batches=2)
    with pytest.raises(ValueError, match="normalizer: got None for one of 2 micro-batches"):
        loss_from_stats(stats, part, loss)
    with pytest.raises(ValueError, match="scores: got shape"):
        loss_from_stats(jnp.ones((4, 24)), batch, preference.BradleyTerry())
    with pytest.raises(TypeError, match="stats: got ArrayImpl, expected TokenStats"):
        loss_from_stats(jnp.ones((8, 24)), batch, loss)
    not_above_0 = "beta: got 0, expected a finite number above 0"
    for make, options, message in [
        (preference.DPO, {"beta": -1}, "beta: got -1"),
        (preference.DPO, {"beta": 0}, not_above_0),
        (preference.SimPO, {"beta": 0}, not_above_0),
        (preference.AOT, {"beta": 0}, not_above_0),
        (preference.KTO, {"reference_point": 0.0, "beta": 0}, not_above_0),
        (preference.IPO, {"beta": 0}, not_above_0),
        (preference.DPO, {"label_smoothing": 0.6}, "label_smoothing: got 0.6"),
        (preference.DPO, {"nll": "mean"}, "nll: got 'mean', expected one of 'sequence_mean_token"),
        (preference.SimPO, {"nll_coef": -0.1}, "nll_coef: got -0.1"),
        (preference.KTO, {"reference_point": float("nan")}, "reference_point: got nan"),
        (preference.BradleyTerry, {"margin": -1}, "margin: got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(**options)
    for rejected, options, message in [
        ([], {}, "rejected: got 0, expected 1, as many as prompts"),
        ([[]], {}, r"rejected\[0\]: got no token"),
        ([[3]], {"margins": [0.0]}, r"margins\[0\]: got 0.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            preference.samples_of_pairs([[1]], [[2]], rejected, **options)
    with pytest.raises(ValueError, match="samples: got the group 0 alone"):
        preference.mismatched_samples(step_of(0)[:1])
