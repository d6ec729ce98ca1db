"""Losses by row: each client's samples as if they were alone, on meshes, from statistics and
from hidden states.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_steps import step_of

from jaxppo import (
    SFT,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    TokenStats,
    log_probs_from_hidden,
    loss_from_hidden,
    loss_from_stats,
    presets,
)
from jaxppo.losses import Part, by_row, explain_tokens
from jaxppo.losses.explain import by_sample
from jaxppo.policy_losses import SAPO
from sharding import make_parallel_mesh

CLIENTS = {
    "ppo": presets.tinker("ppo"),
    "cispo": presets.tinker("cispo"),
    "sapo": dataclasses.replace(presets.tinker("ppo"), loss=SAPO()),
    "cross_entropy": SFT(aggregation="token_sum"),
}
NUMBERS = {"ppo": {"clip_low": "low", "loss.clip_high": "high"}, "sapo": {"tau_positive": "tau"}}
SUM = "token_sum"
NORMALIZED = PolicyLossConfig(off_policy=OffPolicyConfig("token", batch_normalize=True))
LOW, HIGH, TAU = np.float32([[0.1, 0.3, 0.5], [0.2, 0.25, 1.0], [0.5, 2.0, 3.0]])


def batch_of(mesh, rows=4):
    """Sample i is client i % 5's, the last of whom has no loss; its numbers are those of i % 3."""
    parallel = mesh and make_parallel_mesh(mesh, context_layout="zigzag")
    batch = RolloutBatch.from_samples(
        step_of(5, 12), row_length=32, rows=rows, num_segments=8, parallel=parallel
    )
    owners = np.take_along_axis(batch.sample_ids, np.maximum(batch.segment_ids - 1, 0), -1)
    on = batch.loss_mask > 0
    extras = {"client": np.where(on, owners % 5, 99).astype(np.int32)}
    extras |= {
        name: np.where(on, x[owners % 3], np.nan)
        for name, x in (("low", LOW), ("high", HIGH), ("tau", TAU))
    }
    return dataclasses.replace(batch, extras=extras), owners, parallel


@functools.partial(jax.jit, static_argnames="parallel")
def of_each(x, batch, numbers, *, parallel):
    """The loss of each client with these numbers, and the gradient."""
    clip = {"clip_low": numbers["low"], "clip_high": numbers["high"]}
    losses = dict(CLIENTS)
    losses["ppo"] = dataclasses.replace(
        CLIENTS["ppo"], loss=dataclasses.replace(CLIENTS["ppo"].loss, **clip)
    )
    losses["sapo"] = dataclasses.replace(CLIENTS["sapo"], loss=SAPO(numbers["tau"]))

    def fn(x, loss):
        return loss_from_stats(TokenStats(x), batch, loss, parallel=parallel)[0]

    return {client: jax.value_and_grad(fn)(x, loss) for client, loss in losses.items()}


def alone(x, batch, owners, parallel):
    """The sum of each sample's loss with the numbers of its own, and the gradient."""
    found = []
    for i in range(12):
        if i % 5 == 4:
            continue
        mask = np.where(owners == i, batch.loss_mask, 0)
        mine = dataclasses.replace(batch, loss_mask=mask, extras={})
        numbers = {"low": LOW[i % 3], "high": HIGH[i % 3], "tau": TAU[i % 3]}
        client = [*CLIENTS][i % 5]
        found.append(of_each(x, mine, numbers, parallel=parallel)[client])
    losses, gradients = zip(*found, strict=True)
    return np.sum(losses, axis=0), np.sum(gradients, axis=0)


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_each_sample_as_if_alone(mesh):
    batch, owners, parallel = batch_of(mesh)
    parts = by_row(CLIENTS, "client", NUMBERS)

    @jax.jit
    def run(x):
        return jax.value_and_grad(
            lambda x: loss_from_stats(TokenStats(x), batch, parts, parallel=parallel)[0]
        )(x)

    x = jnp.asarray(batch.returns)
    loss, gradient = run(x)
    expected, wanted = alone(x, batch, owners, parallel)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)
    found = explain_tokens(TokenStats(x), batch, parts, parallel=parallel)
    sums = [by_sample(of, batch, parallel=parallel)["contribution"] for of in found.values()]
    np.testing.assert_allclose(np.sum(sums), expected, rtol=1e-5)


def states_of(batch):
    """Hidden states and a kernel."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(*batch.tokens.shape, 8))
    return np.float32(hidden), np.float32(0.3 * rng.normal(size=(8, 50)))


@functools.cache
def in_two_steps():
    """The loss of all clients after the log-probs, and its gradients by hidden states and
    kernel.
    """
    batch, _, _ = batch_of(None)
    parts = by_row(CLIENTS, "client", NUMBERS)

    def two(hidden, kernel):
        where = batch.loss_mask > 0
        stats = log_probs_from_hidden(hidden, kernel, batch.targets, where=where)
        return loss_from_stats(stats, batch, parts)[0]

    return jax.jit(jax.value_and_grad(two, (0, 1)))(*states_of(batch))


@pytest.mark.parametrize("memory", [2**30, 25_000])
def test_from_hidden_in_one_pass_or_two(memory):
    batch, _, _ = batch_of(None)
    parts = by_row(CLIENTS, "client", NUMBERS)

    def one(hidden, kernel):
        return loss_from_hidden(hidden, kernel, batch, parts, memory=memory)[0]

    got = jax.jit(jax.value_and_grad(one, (0, 1)))(*states_of(batch))
    expected = in_two_steps()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, expected)


OFF_POLICY = OffPolicyConfig(
    "token",
    rejections=(Rejection("seq_mean_k2", high=9.0), Rejection("token_k1", 0.1, 9.0)),
    veto=0.01,
    opsm_delta=0.5,
)
FIELDS = {
    "low": (0.0, 0.3, 0.9),
    "high": (1.5, 2.0, 3.0),
    "veto": (0.2, 0.5, 0.7),
    "opsm_delta": (0.01, 0.1, 1.0),
}
BOUNDS = (0.05, 0.2, 2.0), (0.4, 0.7, 0.9)  # the largest seq_mean_k2, the least ratio of token_k1


def numbers_of(k):
    """The numbers of client k: of the fields, and the two bounds of rejections."""
    return {name: numbers[k] for name, numbers in FIELDS.items()}, BOUNDS[0][k], BOUNDS[1][k]


def corrected(numbers, level="token"):
    """The config with the numbers of a client."""
    fields, highest_k2, lowest_k1 = numbers
    rejections = (
        Rejection("seq_mean_k2", high=highest_k2),
        Rejection("token_k1", lowest_k1, 9.0),
    )
    off_policy = dataclasses.replace(OFF_POLICY, weights=level, rejections=rejections, **fields)
    return PolicyLossConfig(off_policy=off_policy, aggregation=SUM)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_numbers_of_a_correction(mesh, level):
    """Weights, both kinds of rejection, veto and OPSM with bounds of their own, each sample as
    if alone.
    """
    batch, owners, parallel = batch_of(mesh)
    of = {f"off_policy.{name}": numbers for name, numbers in FIELDS.items()}
    of |= {"off_policy.rejections.0.high": BOUNDS[0], "off_policy.rejections.1.low": BOUNDS[1]}
    on = batch.loss_mask > 0
    extras = {
        name: np.where(on, np.float32(numbers)[owners % 3], 0) for name, numbers in of.items()
    }
    extras["client"] = np.where(on, 0, 1).astype(np.int32)
    batch = dataclasses.replace(batch, extras=extras)
    config = PolicyLossConfig(
        off_policy=dataclasses.replace(OFF_POLICY, weights=level), aggregation=SUM
    )
    parts = by_row({"ppo": config}, "client", {"ppo": {name: name for name in of}})
    x = jnp.asarray(batch.old_log_probs) * 0.8

    @jax.jit
    def alone(x, batch, numbers):
        def fn(x):
            config = corrected(numbers, level)
            return loss_from_stats(TokenStats(x), batch, config, parallel=parallel)[0]

        return jax.value_and_grad(fn)(x)

    each = []
    for i in range(12):
        mask = np.where(owners == i, batch.loss_mask, 0)
        mine = dataclasses.replace(batch, loss_mask=mask, extras={})
        each.append(alone(x, mine, numbers_of(i % 3)))
    expected, wanted = (np.sum(found, axis=0) for found in zip(*each, strict=True))

    together = jax.jit(
        jax.value_and_grad(
            lambda x: loss_from_stats(TokenStats(x), batch, parts, parallel=parallel)[0]
        )
    )
    loss, gradient = together(x)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert 0 < np.count_nonzero(gradient) < on.sum()  # some tokens are left out


def test_each_client_has_its_own_denominators():
    batch, owners, _ = batch_of(None)
    parts = by_row({"a": SFT(), "b": SFT()}, "client")
    found = Normalizer.of(parts, batch)
    for i, name in enumerate(parts):
        assert float(found[name].tokens) == batch.loss_mask[owners % 5 == i].sum()


def test_a_number_that_is_not_finite_is_found():
    batch, _, _ = batch_of(None)
    batch.extras["low"][:] = np.nan
    parts = by_row(CLIENTS, "client", NUMBERS)
    assert np.isnan(loss_from_stats(TokenStats(jnp.asarray(batch.returns)), batch, parts)[0])


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (({},), "losses: got none"),
        ((CLIENTS, {"dro": {}}), r"numbers: got \['dro'\]"),
        ((CLIENTS, {"ppo": {"beta": "x"}}), "numbers: got 'beta', expected a number of"),
        (({"a": "ppo"},), "loss: got str"),
        (
            ({"a": corrected(numbers_of(0))}, {"a": {"off_policy.rejections.2.high": "x"}}),
            "numbers: got 'off_p",
        ),
        (({"a": NORMALIZED}, {"a": {"off_policy.high": "x"}}), "numbers: got one of off_policy"),
    ],
)
def test_refusals(given, error):
    losses, *numbers = given
    with pytest.raises((ValueError, TypeError), match=error):
        by_row(losses, "client", *numbers)


def test_a_part_with_a_number_needs_a_mask():
    with pytest.raises((ValueError, TypeError), match="mask: got None"):
        Part(SFT(), equals=1)
