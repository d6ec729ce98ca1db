"""Routed experts: they stay with the token that was read on every layout, and the report counts
what differs.
"""

import base64
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import step_of

from jaxppo import RolloutBatch, Sample, finalize_metrics
from jaxppo.mismatch.routing import routed_experts, routing_metrics
from sharding import make_parallel_mesh

LAYERS, K, EXPERTS = 3, 2, 8
PLACES = [
    (None, "contiguous"), ("dp=2,cp=2,tp=2", "zigzag"), ("dp=2,cp=4", "zigzag_per_segment"), ("cp=8", "striped"),
]  # fmt: skip


def chosen(sample, index, alike=0):
    """Ids, of each token that was read, that tell sample, position, layer and slot apart.

    The first rows, `alike` of them, are the same for all samples of a group.
    """
    n = len(sample.tokens) - 1
    rng = np.random.default_rng((index, n))
    rows = np.argsort(rng.random((n, LAYERS, EXPERTS)), axis=-1)[..., :K]
    rows[: n // 4, 1] = -1  # a layer without a choice
    of_group = np.random.default_rng(index // 3).random((alike, LAYERS, EXPERTS))
    rows[:alike] = np.argsort(of_group, axis=-1)[..., :K]
    return rows


def samples_of(prompt=0):
    """Their prompts begin with so many more tokens, which those of a group share."""
    return [
        dataclasses.replace(
            s,
            tokens=[i // 3] * prompt + list(s.tokens),
            response_start=s.start + prompt,
            loss_mask=[0] * prompt + list(s.loss_mask),
        )
        for i, s in enumerate(step_of(2))
    ]


def batch_of(mesh, layout, prompt=0, alike=0, **options):
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    samples = [
        Sample(
            **vars(s)
            | {"extras": {"routed_experts": routed_experts(chosen(s, i, alike), len(s.tokens))}}
        )
        for i, s in enumerate(samples_of(prompt))
    ]
    batch = RolloutBatch.from_samples(
        samples, row_length=32 + 4 * prompt, rows=4, num_segments=9, parallel=parallel, **options
    )
    return batch, parallel


@pytest.mark.parametrize(("mesh", "layout"), PLACES)
def test_rows_stay_with_the_token_that_was_read(mesh, layout):
    batch, _ = batch_of(mesh, layout)
    found = batch.extras["routed_experts"]
    expected = np.full(found.shape, -1)
    for row, t in zip(*np.nonzero(batch.segment_ids), strict=True):
        index = batch.sample_ids[row, batch.segment_ids[row, t] - 1]
        rows = chosen(step_of(2)[index], index)
        position = batch.positions[row, t]
        if position < len(rows):
            expected[row, t] = rows[position]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("alike", [24, 0])
@pytest.mark.parametrize(("mesh", "layout"), PLACES)
def test_rows_of_a_prefix_are_those_of_all_its_samples(mesh, layout, alike):
    """Samples that were routed otherwise, in other batches, share no prefix; a branch has its
    own rows.
    """
    batch, _ = batch_of(mesh, layout, prompt=24, alike=alike, share_prefixes=True)
    samples = samples_of(24)
    ends = np.asarray(batch.paths.ends)
    rows_of = [chosen(s, i, alike) for i, s in enumerate(samples)]
    rows_of = [np.concatenate([x, np.full((1, *x.shape[1:]), -1)]) for x in rows_of]
    shared = 0
    segments = {
        (row, int(s)) for row, ids in enumerate(np.asarray(batch.segment_ids)) for s in ids if s
    }
    for row, segment in segments:
        at = batch.segment_ids[row] == segment
        behind = batch.sample_ids[row, segment - 1 : ends[row, at][0]]
        found = batch.extras["routed_experts"][row, at]
        positions = batch.positions[row, at]
        same = [np.array_equal(found, rows_of[i][positions]) for i in behind if i >= 0]
        assert same
        assert all(same)
        shared += len(same) > 1
    assert (shared > 0) == (alike > 0)


@pytest.mark.parametrize(("mesh", "layout"), PLACES)
def test_the_report(mesh, layout):
    """Against float64 numpy on all tokens: ids that the trainer would not choose, and the gap
    that replay closes.
    """
    batch, parallel = batch_of(mesh, layout)
    sampled = np.asarray(batch.extras["routed_experts"])
    ids = np.asarray(batch.sample_ids)[
        np.arange(len(sampled))[:, None], np.maximum(batch.segment_ids - 1, 0)
    ]
    own = np.stack([(ids + batch.positions * 3 + i) % EXPERTS for i in range(LAYERS * K)], -1)
    own = own.reshape(sampled.shape).astype(np.int32)
    native = batch.returns
    replayed = 0.9 * batch.rollout_log_probs + 0.1 * batch.returns
    found = jax.jit(
        lambda own: finalize_metrics(
            routing_metrics(
                own, batch, log_probs=native, replayed_log_probs=replayed, parallel=parallel
            )
        )
    )(own)
    inside = batch.segment_ids > 0
    there = (sampled[..., 0] != -1) & (batch.segment_ids > 0)[..., None]
    missed = np.array(
        [[x not in own[at] for x in sampled[at]] for at in np.ndindex(*sampled.shape[:3])]
    )
    missed = missed.reshape(sampled.shape)
    expected = {
        "choices_differ": missed[there].mean(),
        "missing_rows": 1 - there.any(-1)[inside].mean(),
    }
    for layer in range(LAYERS):
        of = missed[:, :, layer][there[..., layer]]
        expected |= {
            f"layer_{layer}_choices_differ": of.mean(),
            f"layer_{layer}_tokens_differ": of.any(-1).mean(),
        }
    on = batch.loss_mask > 0
    gaps = [np.abs(np.float64(x) - batch.rollout_log_probs)[on].mean() for x in (native, replayed)]
    expected |= {
        "log_prob_gap": gaps[0],
        "log_prob_gap_replayed": gaps[1],
        "gap_explained": 1 - gaps[1] / gaps[0],
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(found["gap_explained"], 0.9, rtol=1e-3)


def test_what_engines_return():
    rows = np.arange(12).reshape(3, 2, 2)
    text = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    for given in (rows, rows.tolist(), rows.astype(np.int16)):
        np.testing.assert_array_equal(routed_experts(given, 4).values[:3], rows)
    for given in (text, rows.astype("<i4").tobytes()):
        found = routed_experts(given, 4, layers=2, top_k=2)
        np.testing.assert_array_equal(found.values, np.concatenate([rows, -np.ones((1, 2, 2))]))
        assert (found.at, found.fill) == ("input", -1)
    # an engine that has a row for the last token too
    assert len(routed_experts(rows, 3).values) == 3


@pytest.mark.parametrize(
    ("rows", "options", "error"),
    [
        (np.zeros((5, 2, 2), int), {}, r"rows: got shape \(5, 2, 2\), expected \[3, layers, k\]"),
        (np.zeros((3, 2)), {}, "rows: got float64, .*, expected integers"),
        (np.full((3, 2, 2), -2), {}, "rows: got -2, expected integers of -1 to"),
        (np.array([[[1, -1]]] * 3), {}, r"rows: got -1 in a part of a row at \(0, 0\)"),
        (
            b"12345678",
            {"layers": 3, "top_k": 1},
            "rows: got 2 numbers, expected a multiple of layers",
        ),
    ],
)
def test_refused_rows(rows, options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        routed_experts(rows, 4, **options)


def test_refused_reports():
    batch, _ = batch_of(None, "contiguous")
    own = jnp.asarray(batch.extras["routed_experts"])
    with pytest.raises(ValueError, match="own: got"):
        routing_metrics(own[..., :1], batch)
    with pytest.raises(ValueError, match="replayed_log_probs: got None"):
        routing_metrics(own, batch, log_probs=batch.returns)
    with pytest.raises(
        ValueError, match=r"batch.extras: got \['routed_experts'\], expected 'experts' among them"
    ):
        routing_metrics(own, batch, name="experts")


V, H = 20, 12


def mixture(params, tokens, forced, rounded=None):
    """A mixture of experts of one layer: its log-probs of the next token, and its own choices.

    With `rounded` the router scores are rounded, as those of a sampler in another precision are.
    """
    x = params["embed"][tokens]
    scores = jax.nn.softmax(x @ params["router"], axis=-1)
    own = jax.lax.top_k(scores if rounded is None else jnp.round(scores * rounded) / rounded, K)[1]
    ids = jnp.where(forced == -1, own, forced)
    weights = jnp.take_along_axis(scores, ids, axis=-1)  # today's scores of the replayed experts
    weights = weights / weights.sum(axis=-1, keepdims=True)
    of_all = jnp.einsum("rth,ehd->rted", x, params["experts"])
    y = jnp.take_along_axis(of_all, ids[..., None], axis=2)
    hidden = x + (weights[..., None] * jnp.tanh(y)).sum(axis=2)
    return jax.nn.log_softmax(hidden @ params["head"]), own


@pytest.mark.parametrize(
    ("mesh", "layout"), [pytest.param(*PLACES[0], marks=pytest.mark.nightly), PLACES[1]]
)
def test_replay_closes_the_gap_of_a_sampler_that_routes_otherwise(mesh, layout):
    """The router keeps its gradient. Without replay the log-probs differ where the choices do."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"embed": (50, H), "router": (H, EXPERTS), "experts": (EXPERTS, H, H), "head": (H, V)}
    params = {
        name: jax.random.normal(k, s) for k, (name, s) in zip(keys, shapes.items(), strict=True)
    }
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)
    step = step_of(2)
    # the model reads each token alone, so that padding changes nothing
    padded = np.zeros((len(step), max(len(s.tokens) for s in step)), np.int32)
    for row, s in zip(padded, step, strict=True):
        row[: len(s.tokens)] = np.asarray(s.tokens) % V
    sampler = jax.jit(functools.partial(mixture, rounded=4))
    of_sampler = sampler(params, padded, np.full((*padded.shape, K), -1))
    samples = []
    for s, tokens, log_probs, chosen_ids in zip(
        step, padded, *map(np.asarray, of_sampler), strict=True
    ):
        n = len(s.tokens)
        sampled = np.take_along_axis(log_probs[: n - 1], tokens[1:n, None], -1)[:, 0]
        rows = routed_experts(chosen_ids[: n - 1, None], n)
        own = {"tokens": tokens[:n], "rollout_log_probs": sampled[s.start - 1 :]}
        samples.append(Sample(**vars(s) | own | {"extras": {"routed_experts": rows}}))
    batch = RolloutBatch.from_samples(
        samples, row_length=32, rows=4, num_segments=9, parallel=parallel
    )
    forced = np.asarray(batch.extras["routed_experts"])

    @jax.jit
    def scored(params, forced):
        log_probs, own = mixture(params, batch.tokens, forced)
        return jnp.take_along_axis(log_probs, batch.targets[..., None] % V, axis=-1)[..., 0], own

    @jax.jit
    def report(own, native, replayed):
        log_probs = {"log_probs": native, "replayed_log_probs": replayed}
        found = routing_metrics(own[:, :, None], batch, **log_probs, parallel=parallel)
        return finalize_metrics(found)

    @jax.jit
    @jax.grad
    def gradient_of(params):
        log_probs, _ = scored(params, forced[:, :, 0])
        return jnp.where(batch.loss_mask > 0, log_probs, 0).sum()

    native, own = scored(params, np.full((*forced.shape[:2], K), -1))
    replayed, _ = scored(params, forced[:, :, 0])
    found = report(own, native, replayed)
    assert found["choices_differ"] > 0.1
    assert found["log_prob_gap"] > 0.01
    assert found["log_prob_gap_replayed"] < 1e-5
    np.testing.assert_allclose(found["gap_explained"], 1, atol=1e-3)
    assert np.abs(gradient_of(params)["router"]).max() > 0.01
