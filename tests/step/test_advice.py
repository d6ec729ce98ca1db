"""Advice from metrics: each rule speaks on a loss's own numbers, and is silent just before; and
four broken runs.
"""

import dataclasses
import itertools
import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import (
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    TokenStats,
    Unusable,
    advantages,
    advise,
    finalize_metrics,
    log_probs_from_hidden,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.mismatch import mismatch_metrics, packing_metrics
from jaxppo.step import advice

ROOT = Path(__file__).parents[2]
OLD = np.log([0.5, 0.2, 0.7, 0.1])
PLAIN = PolicyLossConfig()
WITH_RULE = PolicyLossConfig(unusable=Unusable("weight_0"))
NEAR = PolicyLossConfig(
    off_policy=OffPolicyConfig(rejections=(Rejection("token_k1", low=0.5, high=2.0),))
)


def step_of(now=OLD, old=OLD, sampler=OLD, config=PLAIN):
    """The metrics of the policy loss on a sample of four tokens."""
    given = {
        "advantages": [1.0, -1.0, 1.0, -1.0],
        "old_log_probs": old,
        "rollout_log_probs": sampler,
    }
    batch = RolloutBatch.from_samples([Sample([5, 6, 7, 8, 9], 1, **given)], row_length=5)
    return policy_loss(TokenStats(jnp.asarray([[*now, 0.0]], jnp.float32)), batch, config)[1]


def moved(*by):
    return step_of(now=OLD + np.array(by))


def groups(rewards):
    """The pass rates of groups of two samples."""
    return advantages.pass_rates(
        jnp.asarray([rewards]), jnp.arange(len(rewards), dtype=jnp.int32)[None] // 2
    )


def two_samples(first, behind):
    """The metrics of two samples in one row, of which the trainer finds another log-prob than
    the sampler.
    """
    made = [
        Sample([5, 6, 7], 1, old_log_probs=[-1.0, -1.0 + apart], rollout_log_probs=[-1.0, -1.0])
        for apart in (first, behind)
    ]
    return packing_metrics(RolloutBatch.from_samples(made, row_length=6))


def critic(values):
    mask = jnp.ones((1, 4))
    explained = advantages.explained_variance(
        jnp.asarray([values]), jnp.asarray([[0.0, 1.0, 0.0, 1.0]]), mask
    )
    return {"explained_variance": explained}


# The metrics on which a rule speaks, those near them on which no rule does, and the number of the
# update.
CASES = {
    "nan_loss": (partial(step_of, old=-OLD), step_of, 0),
    "unusable_tokens": (
        partial(step_of, sampler=[OLD[0], np.nan, *OLD[2:]], config=WITH_RULE),
        partial(step_of, config=WITH_RULE),
        0,
    ),
    "equal_rewards": (
        partial(groups, [1, 1, 0, 0, 0.5, 0.5, 0, 1.0]),
        partial(groups, [1, 1, 0, 0, 0.5, 0.2, 0, 1]),
        0,
    ),
    "no_reward": (
        partial(groups, [1, np.nan, np.nan, np.nan]),
        partial(groups, [1, 0.0, np.nan, np.nan]),
        0,
    ),
    "first_update": (
        partial(step_of, old=np.roll(OLD, 1)),
        partial(moved, 0.1, -0.1, 0.1, -0.1),
        0,
    ),
    "old_samples": (partial(moved, -3, 1.5, -3, -3), partial(moved, -0.5, -0.5, 0.3, 0.5), 1),
    "clipped": (partial(moved, 0.25, -0.3, 0.25, 0), partial(moved, 0.25, -0.3, 0.1, 0), 1),
    "far_tokens": (partial(step_of, now=[-20.7, -2, -3, -3], old=[-0.1, -2, -3, -3]), None, 1),
    "sampler": (
        partial(step_of, sampler=OLD / 2),
        partial(step_of, sampler=np.minimum(OLD + 0.12, 0)),
        0,
    ),
    "blind_model": (partial(two_samples, 0.1, -1.0), partial(two_samples, 0.1, 0.2), 0),
    "rejected": (partial(step_of, sampler=OLD - np.array([1, 1, 0, 1]), config=NEAR), None, 0),
    "critic": (partial(critic, [1.0, 0.0, 0.5, 0.5]), partial(critic, [0.5, 0.5, 0.5, 0.5]), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_on_the_numbers_of_a_loss(name):
    wrong, near, update = CASES[name]
    found = {x.rule: x for x in advise(wrong(), update=update)}
    assert name in found
    line = str(found[name])
    assert line.startswith(f"{name}: ")
    assert line.endswith(found[name].page)
    assert found[name].sentence.count(". ") == 0
    if near is not None:
        assert advise(near(), update=update) == []


def test_a_ratio_near_its_clamp_is_not_at_it():
    """19.9 nats, beside the 20.6 of the case above; the samples are old in either."""
    found = advise(step_of(now=[-20.0, -2, -3, -3], old=[-0.1, -2, -3, -3]), update=1)
    assert "far_tokens" not in [x.rule for x in found]


def test_half_of_the_tokens_may_be_rejected():
    found = advise(step_of(sampler=OLD - np.array([1, 1, 0, 0]), config=NEAR))
    assert [x.rule for x in found] == ["sampler"]


def test_a_sampler_that_only_metrics_read():
    """Its NaN is not in the loss, and -inf is not only a large difference."""
    for bad in (np.nan, -np.inf):
        metrics = finalize_metrics(step_of(sampler=[bad, *OLD[1:]]))
        assert np.isfinite(metrics["loss"])
        (found,) = advise(metrics)
        assert found.rule == "unusable_tokens"
        assert "not finite" in found.sentence


def test_metrics_of_sampler_and_trainer_alone():
    made = [
        Sample([5, 6, 7], 1, old_log_probs=[-1.0, -1.0], rollout_log_probs=x)
        for x in ([-1.0, -1.1], [-1.0, -1.6])
    ]
    batches = [RolloutBatch.from_samples([sample], row_length=3) for sample in made]
    assert advise(mismatch_metrics(batches[0])) == []
    (found,) = advise(mismatch_metrics(batches[1]))
    assert found.rule == "sampler"
    # exp(0.6) - 1 - 0.6 is 0.222, and the mean half
    assert "log_prob_abs_diff 0.3, k3_kl 0.11)" in found.sentence


def test_updates_of_a_step():
    """An array holds the updates on the same samples, of which only the first is on fresh ones."""
    two = [finalize_metrics(x) for x in (step_of(), moved(-3, 1.5, -3, -3))]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *two)
    assert [x.rule for x in advise(stacked)] == ["old_samples"]
    assert [x.rule for x in advise(stacked, update=1)] == ["old_samples"]
    assert [x.rule for x in advise(two[1])] == ["first_update"]
    assert [x.rule for x in advise([two[1], two[0]])] == []  # the last step alone
    assert advise({}) == []
    assert advise({"note": "a text that no rule reads"}) == []


def test_rounding():
    """The thresholds are those of tokens that are all as far apart as rounding explains, to the
    last digit.
    """
    far = advice.ROUNDING
    # bf16 has 8 bits: 16 and the next number are 1/8 apart; of logit and log-sum-exp each
    assert far == 2 * 2.0**-4
    share = np.linspace(0, 1, 100_001)  # of tokens at one end, the others at the other end
    alike = (share * np.exp(far) + (1 - share) * np.exp(-far)) ** 2
    alike /= share * np.exp(2 * far) + (1 - share) * np.exp(-2 * far)
    assert pytest.approx(alike.min(), rel=1e-9) == advice.ROUNDING_SAMPLE_SIZE
    assert pytest.approx(math.exp(far) - 1 - far, rel=1e-12) == advice.ROUNDING_K3
    assert math.comb(advice.FEWEST_STEPS, advice.FEWEST_STEPS // 2) == 252
    assert (
        pytest.approx(12.5 / math.sqrt(25 * 11 / 12))
        == advice.RARE
        == pytest.approx(2.61, abs=0.005)
    )


def test_orders_without_a_trend():
    """One of all 252 ways to choose the later five of ten is rare, and of orders of 40 one in
    250.
    """
    orders = [
        [*(set(range(10)) - set(later)), *later] for later in itertools.combinations(range(10), 5)
    ]
    assert sum(advice.trend(np.array(order, float)) >= advice.RARE for order in orders) == 1
    rng = np.random.default_rng(0)
    found = [
        advice.trend(rng.permutation(40.0 * np.arange(40))) >= advice.RARE for _ in range(20_000)
    ]
    assert 0.0025 < np.mean(found) < 0.0055


def history(entropies, rewards):
    """Metrics of steps: entropies that a loss reports, beside rewards."""
    batch = RolloutBatch.from_samples(
        [Sample([5, 6], 1, advantages=[1.0], old_log_probs=[-1.0])], row_length=2
    )

    @jax.jit
    def step(entropy):
        stats = TokenStats(-jnp.ones((1, 2)), jnp.full((1, 2), entropy))
        return finalize_metrics(policy_loss(stats, batch, PolicyLossConfig())[1])

    return [step(jnp.float32(e)) | {"reward": r} for e, r in zip(entropies, rewards, strict=True)]


def test_an_entropy_that_falls():
    falls = np.linspace(2.0, 1.0, 10)
    steps = history(falls, [0.5] * 10)
    (found,) = advise(steps)
    assert found.rule == "entropy"
    assert "Over 10 steps the entropy fell from 1.8 to 1.2 nats" in found.sentence
    passing = [
        {name: x for name, x in step.items() if name != "reward"} | {"pass_rate": 0.5}
        for step in steps
    ]
    assert [x.rule for x in advise(passing)] == ["entropy"]
    assert advise(steps[1:]) == []  # too short to tell a trend from chance
    assert advise(history(falls, falls[::-1])) == []  # the reward rises
    # the halves overlap
    assert advise(history(falls[[0, 1, 2, 3, 5, 4, 6, 7, 8, 9]], [0.5] * 10)) == []
    assert [x.rule for x in advise([{}, *steps])] == []  # a step that does not report it


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        ("loss", "metrics: got str, expected the metrics of a step by name"),
        ([], "metrics: got no steps, expected"),
        ([1.0], "metrics: got list, expected"),
        ({"ppo_kl": "0.1"}, r"metrics\['ppo_kl'\]: got str, expected a number"),
        ({"ppo_kl": None}, r"metrics\['ppo_kl'\]: got NoneType, expected a number"),
        (
            {"ppo_kl": np.ones((2, 2))},
            r"metrics\['ppo_kl'\]: got shape \(2, 2\), expected a number",
        ),
    ],
)
def test_bad_metrics(metrics, error):
    with pytest.raises((TypeError, ValueError), match=error):
        advise(metrics)


def test_bad_calls():
    with pytest.raises(ValueError, match="update: got -1, expected a whole number"):
        advise({}, update=-1)
    with pytest.raises(
        TypeError, match=r"metrics\['ppo_kl'\]: got \w*Tracer, expected a number.* on the host"
    ):
        jax.jit(lambda x: advise({"ppo_kl": x}))(1.0)
    assert advise({"ppo_kl": jnp.bfloat16(0.5)})[0].rule == "first_update"


def slug(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_each_rule_has_its_case_and_its_page():
    names = [rule.name for rule in advice.RULES]
    assert {*names} == {*CASES, "entropy"}
    page = (ROOT / "docs/metrics.md").read_text()
    # of three cells: metrics have two
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| .* \|$", page, re.MULTILINE))
    for rule in advice.RULES:
        path, _, anchor = rule.page.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
        assert not anchor or anchor in [slug(x) for x in headings], rule.page
        assert set(re.findall(r"`(\w+)`", rows[rule.name])) == set(rule.reads)


# A run: a policy with a layer of attention of equal weights learns to write odd tokens.
VOCAB, WIDTH, LENGTH, PROMPTS, SAMPLES = 12, 16, 5, 4, 4


def start():
    keys = jax.random.split(jax.random.key(0))
    return {
        "table": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "kernel": 0.3 * jax.random.normal(keys[1], (WIDTH, VOCAB)),
    }


def hidden_of(params, tokens, sees):
    sees = sees.astype(jnp.float32)
    own = params["table"][tokens]
    return own + sees / jnp.maximum(sees.sum(-1, keepdims=True), 1) @ own


@jax.jit
def engine(params, prompts, key, temperature):
    """Draws responses, each sample alone: tokens and the log-probs of those that were drawn."""
    count = len(prompts)
    tokens = jnp.zeros((count, LENGTH), jnp.int32).at[:, 0].set(prompts)
    drawn_log_probs = jnp.zeros((count, LENGTH))
    sees = jnp.tril(jnp.ones((LENGTH, LENGTH)))[None]
    for i in range(1, LENGTH):
        logits = hidden_of(params, tokens, sees)[:, i - 1] @ params["kernel"] / temperature
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits)
        log_probs = jax.nn.log_softmax(logits)
        tokens = tokens.at[:, i].set(drawn)
        drawn_log_probs = drawn_log_probs.at[:, i].set(
            jnp.take_along_axis(log_probs, drawn[:, None], 1)[:, 0]
        )
    return tokens, drawn_log_probs


@partial(jax.jit, static_argnames="blind")
def learn(params, batch, rate, entropy_coef, *, blind):
    """Two updates on a step's samples, and all metrics of the step."""

    def inputs(params):
        sees = batch.paths.attends(batch.paths)
        if blind:
            sees = jnp.broadcast_to(jnp.tril(jnp.ones(sees.shape[1:], bool)), sees.shape)
        return hidden_of(params, batch.tokens, sees), params["kernel"]

    old = log_probs_from_hidden(*inputs(params), batch.targets).log_probs
    by_sample = advantages.grpo(batch.rewards, **batch.groups)
    given = dataclasses.replace(
        batch, old_log_probs=old, advantages=advantages.spread(by_sample, batch)
    )
    config = PolicyLossConfig(entropy_coef=entropy_coef)

    def update(params, _):
        slope = jax.grad(
            lambda params: policy_loss_from_hidden(*inputs(params), given, config), has_aux=True
        )
        gradients, metrics = slope(params)
        return jax.tree.map(lambda x, g: x - rate * g, params, gradients), finalize_metrics(metrics)

    params, metrics = jax.lax.scan(update, params, length=2)
    metrics |= finalize_metrics(packing_metrics(given))
    return params, metrics | finalize_metrics(advantages.pass_rates(batch.rewards, **batch.groups))


def odd(tokens, i):
    """The share of a response's tokens that are odd."""
    return float(np.mean(tokens[1:] % 2))


def run(steps=2, *, rate=0.3, temperature=1.0, entropy_coef=0.0, reward=odd, blind=False):
    """What `advise` says behind each step, with the history up to it."""
    params = start()
    history = []
    said = []
    for step in range(steps):
        prompts = jnp.repeat(
            1 + (step + jnp.arange(PROMPTS, dtype=jnp.int32)) % (VOCAB - 1), SAMPLES
        )
        tokens, log_probs = map(
            np.asarray, engine(params, prompts, jax.random.key(step), temperature)
        )
        samples = [
            Sample(
                row,
                1,
                reward=reward(row, i),
                group_id=i // SAMPLES,
                rollout_log_probs=log_probs[i, 1:],
            )
            for i, row in enumerate(tokens)
        ]
        batch = RolloutBatch.from_samples(
            samples, row_length=2 * LENGTH, rows=PROMPTS * SAMPLES // 2
        )
        params, metrics = learn(params, batch, rate, entropy_coef, blind=blind)
        rewards = [sample.reward for sample in samples]
        history.append(metrics | {"reward": np.mean(rewards)})
        said.append(advise(history))
    return said


RUNS = {  # what is broken, and the rules that speak behind the last step
    "a task that nobody solves": ({"reward": lambda tokens, i: 0.0}, ["equal_rewards"]),
    "a learning rate that is too large": ({"rate": 3.0, "steps": 1}, ["old_samples", "clipped"]),
    "a sampler with another temperature": ({"temperature": 0.5}, ["sampler"]),
    "a model that attends across samples": ({"blind": True}, ["blind_model", "sampler"]),
    "rewards that are dealt out at random, and a bonus with the wrong sign": (
        {"steps": 20, "reward": lambda tokens, i: float(i % 2), "entropy_coef": -0.3},
        ["entropy"],
    ),
}


@pytest.mark.parametrize("broken", RUNS)
def test_a_broken_run(broken):
    options, rules = RUNS[broken]
    lines = run(**options)[-1]
    print(broken, *lines, sep="\n")
    assert [x.rule for x in lines] == rules


def test_a_sound_run_is_left_alone():
    said = run(steps=10)
    assert said == [[]] * 10
