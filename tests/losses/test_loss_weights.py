"""`loss_weights` of a batch: factors of a token's whole loss, and sums of them as denominators."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import OracleHead
from oracle.step import with_stats
from policy_steps import normalizer_of, quick_jit, step_of
from random_losses import BASE, check_metrics, of_jaxppo
from random_steps import (
    Drawn,
    Place,
    Step,
    agree,
    batch_of,
    step_samples,
    to_rows,
    to_samples,
    with_weights,
)

from jaxppo import (
    SFT,
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    accumulate_gradients,
    explain_broken_rules,
    finalize_metrics,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.losses import preference
from jaxppo.losses.mtp import MTP, mtp_loss
from jaxppo.policy_losses import by_name
from sharding.audit import audit

H, V = 6, 40
STEP = Step(
    tuple(
        Drawn(2 + i % 2, (1, 1, 0, 1, 1, 1, 1, 0, 1)[i % 4 :], i, 7 + i // 2, i // 2)
        for i in range(8)
    ),
    6,
    0.3,
    "by token",
    float("nan"),
)
CONFIG = BASE | {
    "kl": {"coef": 0.25, "estimator": "k3", "importance": "sequence"},
    "metric_aggregation": "loss",
}
CONFIGS = {
    "ppo": {
        "kl": {"coef": 0.25, "estimator": "k3", "importance": "none"},
        "metric_aggregation": "token_mean",
    },
    "gspo": {"loss": {"name": "gspo", "clip_low": 0.01, "clip_high": 0.02}},
}
PATHS = {
    "one pass": {"memory": 2**30},
    "two passes": {"memory": 18_000},
    "micro-batches": {"memory": 2**30, "micro_batches": 2},
    "mesh": {"memory": 2**30, "mesh": "dp=2,cp=2,tp=2"},
}
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "rollout_mean", "sequence_mean_token_sum")


def make_step():
    rng = np.random.default_rng(0)
    head = OracleHead(rng.normal(size=(H, V)).astype(np.float32).astype(np.float64))
    samples = []
    for s in step_samples(STEP):
        hidden = rng.normal(size=(len(s.mask), H)).astype(np.float32)
        targets = rng.integers(0, V, len(s.mask))
        found = dataclasses.replace(s, hidden=hidden, targets=targets)
        own = with_stats([found], head)[0].log_probs

        def near(own=own):
            return np.minimum(own + 0.3 * rng.normal(size=len(own)), -0.01).astype(np.float32)

        samples.append(
            dataclasses.replace(
                found, old_log_probs=near(), ref_log_probs=near(), rollout_log_probs=near()
            )
        )
    return with_weights(STEP, samples), head


SAMPLES, HEAD = make_step()


@pytest.mark.every(7)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("name", "path", "aggregation"),
    [(n, p, AGGREGATIONS[(i + j) % 4]) for i, n in enumerate(CONFIGS) for j, p in enumerate(PATHS)],
)
def test_the_whole_loss_of_a_token_is_weighed(name, path, aggregation, weighted):
    config = (
        CONFIG | CONFIGS[name] | {"aggregation": aggregation, "weighted_denominators": weighted}
    )
    mine = of_jaxppo(config)
    options = dict(PATHS[path])
    place = Place(
        options.pop("mesh", None),
        False,
        "contiguous",
        False,
        16,
        8,
        2,
        options.pop("micro_batches", None),
    )
    batch = dataclasses.replace(batch_of(STEP, SAMPLES, place), weighted_denominators=weighted)
    params = {"hidden": to_rows(batch, SAMPLES, [s.hidden for s in SAMPLES], np.nan)}
    params["kernel"] = HEAD.kernel.astype(np.float32)

    def loss_of(params, batch, normalizer):
        more = {"parallel": place.parallel, "normalizer": normalizer, **options}
        return policy_loss_from_hidden(params["hidden"], params["kernel"], batch, mine, **more)

    def run(params, batch):
        if place.micro_batches is None:
            return jax.value_and_grad(loss_of, has_aux=True)(params, batch, None)
        normalizer = normalizer_of(batch, aggregation, parallel=place.parallel)

        def part(params, given):
            here, batch, normalizer = given
            own = jnp.where(here[:, None, None, None] > 0, params["hidden"], 0).sum(axis=0)
            return loss_of(params | {"hidden": own}, batch, normalizer)

        return accumulate_gradients(part, (jnp.eye(place.micro_batches), batch, normalizer))(params)

    @quick_jit
    def numbers_of(params, batch):
        (loss, found), gradient = run(params, batch)
        return loss, finalize_metrics(found), gradient

    loss, found, gradient = numbers_of(params, batch)
    expected, by_hidden, by_head = oracle.policy_loss_from_hidden(SAMPLES, HEAD, config)
    check_metrics(loss, found, expected, config, 3e-5)
    size = 10 * expected.weights.max()
    for i, (x, y) in enumerate(
        zip(to_samples(batch, SAMPLES, gradient["hidden"]), by_hidden, strict=True)
    ):
        agree(f"gradient of hidden states of sample {i}", x, y, size, 3e-5)
    agree("gradient of the kernel", gradient["kernel"], by_head.kernel, size, 3e-5)


BATCH = RolloutBatch.from_samples(step_of(3), row_length=24, rows=2)
ON = BATCH.loss_mask > 0


@functools.partial(jax.jit, static_argnums=1)
def sft(batch, aggregation):
    return loss_from_stats(
        TokenStats(jnp.asarray(batch.old_log_probs)), batch, SFT(aggregation=aggregation)
    )


@functools.partial(jax.jit, static_argnums=1)
def value(batch, aggregation):
    return loss_from_stats(jnp.asarray(batch.returns) + 0.5, batch, Value(aggregation=aggregation))


@functools.partial(jax.jit, static_argnums=1)
def mtp(batch, aggregation):
    hidden = jax.random.normal(jax.random.key(0), (2, *batch.tokens.shape, 4))
    return mtp_loss(
        hidden, jax.random.normal(jax.random.key(1), (4, 50)), batch, MTP(aggregation=aggregation)
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("aggregation", ["token_mean", "token_sum"])
@pytest.mark.parametrize("loss", [sft, value, mtp])
def test_other_losses_too(loss, aggregation):
    """A loss with weights is the sum, over the weights, of the loss on the tokens with that
    weight.
    """
    rng = np.random.default_rng(0)
    weights = np.where(ON, rng.choice([0.0, 0.5, 2.0], BATCH.loss_mask.shape), np.nan).astype(
        np.float32
    )
    weighed = loss(dataclasses.replace(BATCH, loss_weights=weights), aggregation)[0]
    expected = 0.0
    for w in (0.5, 2.0):
        zeros_and_ones = np.where(ON, weights == w, np.nan).astype(np.float32)
        expected += (
            w * loss(dataclasses.replace(BATCH, loss_weights=zeros_and_ones), aggregation)[0]
        )
        if loss is not mtp:  # mtp has another mask
            part = dataclasses.replace(BATCH, loss_mask=BATCH.loss_mask * (weights == w))
            share = (
                part.loss_mask.sum() / BATCH.loss_mask.sum() if aggregation == "token_mean" else 1
            )
            found = loss(dataclasses.replace(BATCH, loss_weights=zeros_and_ones), aggregation)[0]
            np.testing.assert_allclose(found, loss(part, aggregation)[0] * share, rtol=1e-5)
    np.testing.assert_allclose(weighed, expected, rtol=1e-5)
    assert abs(weighed / loss(BATCH, aggregation)[0] - 1) > 0.01


def test_a_depth_weighs_the_token_that_it_predicts():
    ids = np.array([[1, 1, 1, 1]])
    targets = np.array([[1, 2, 3, 0]])
    mask = np.float32([[1, 1, 1, 0]])
    # of targets 1, 2, 3; depth 1 predicts the last two
    weights = np.float32([[7, 2, 3, np.nan]])
    rows = ids, targets, ids, np.arange(4)[None], mask, np.array([[0]])
    batch = RolloutBatch(*rows, loss_weights=weights)
    hidden, kernel = np.zeros((1, 1, 4, 2), np.float32), np.zeros((2, 8), np.float32)

    @quick_jit
    def run(hidden, kernel, batch):
        return mtp_loss(hidden, kernel, batch, MTP(coef=1.0, aggregation="token_sum"))[0]

    loss = run(hidden, kernel, batch)
    np.testing.assert_allclose(loss, 5 * np.log(8), rtol=1e-6)


def test_a_weight_of_0_leaves_a_token_out_of_weighted_denominators():
    weights = (np.arange(BATCH.tokens.shape[1]) % 2 * np.ones((2, 1))).astype(np.float32)
    part = dataclasses.replace(BATCH, loss_mask=BATCH.loss_mask * weights)
    weighed = dataclasses.replace(BATCH, loss_weights=weights, weighted_denominators=True)
    for aggregation in (
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "rollout_mean",
    ):
        np.testing.assert_allclose(
            sft(weighed, aggregation)[0], sft(part, aggregation)[0], rtol=1e-6
        )


def test_a_number_weighs_a_sample():
    samples = [Sample([5, 6, 7, 8], response_start=2, loss_weights=w) for w in (0.5, [1.0, 3.0])]
    batch = RolloutBatch.from_samples(samples, row_length=4)
    assert batch.loss_weights.tolist() == [[0, 0.5, 0.5, 0], [0, 1, 3, 0]]
    x = jnp.array([[1, 1], [1, 1]])
    padded = RolloutBatch.from_padded(x, x, x, loss_weights=jnp.array([0.5, 2.0]))
    assert padded.loss_weights.tolist() == [[0, 0.5, 0.5, 0], [0, 2, 2, 0]]


def test_one_pass_stays_one_pass():
    hidden = jnp.ones((*BATCH.tokens.shape, 4))
    kernel = jnp.ones((4, 50))

    def run(h, w, b):
        return policy_loss_from_hidden(h, w, b, PolicyLossConfig(by_name("ppo")))[0]

    flops = [
        audit(jax.grad(run, (0, 1)), hidden, kernel, batch).flops
        for batch in (BATCH, dataclasses.replace(BATCH, loss_weights=BATCH.loss_mask))
    ]
    assert flops[0] == flops[1]


def test_bad_weights():
    for bad in (-1.0, np.nan, np.inf):
        weights = np.where(np.arange(24) == np.argwhere(ON)[0][1], bad, BATCH.loss_mask).astype(
            np.float32
        )
        batch = dataclasses.replace(BATCH, loss_weights=weights)
        loss, found = sft(batch, "token_sum")
        assert np.isnan(loss)
        assert explain_broken_rules(found["broken_rules"].value)[0].startswith(
            "loss_weights: expected finite weights"
        )
        with pytest.raises(
            ValueError,
            match=r"loss_weights: got .* at row 0, position \d+, expected finite weights",
        ):
            batch.validate(50)
    one = dataclasses.replace(BATCH, weighted_denominators=True)
    with pytest.raises(
        ValueError, match=r"batch.loss_weights: got None, expected f32\[R, T\] with weighted_denom"
    ):
        sft(one, "token_mean")
    normalizer = Normalizer.of(SFT(), BATCH)
    one = dataclasses.replace(one, loss_weights=BATCH.loss_mask)
    with pytest.raises(
        ValueError,
        match="normalizer: got one of weighted_denominators=False, expected the batch's, T",
    ):
        policy_loss(
            TokenStats(jnp.asarray(BATCH.returns)), one, PolicyLossConfig(), normalizer=normalizer
        )
    stats = TokenStats(jnp.asarray(BATCH.returns))
    one = dataclasses.replace(
        one, rewards=jnp.zeros(BATCH.sample_ids.shape), group_ids=BATCH.sample_ids
    )
    with pytest.raises(
        ValueError,
        match=r"batch\.loss_weights: got an array, expected None: a loss of whole samples",
    ):
        loss_from_stats(stats, one, preference.DPO())
    with pytest.raises(
        ValueError,
        match=r"batch\.loss_weights: got an array, expected None: a loss of whole samples",
    ):
        loss_from_stats(stats.log_probs, one, preference.BradleyTerry())
