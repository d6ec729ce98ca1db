"""Loss tokens with a log-prob that is not finite: each rule for them against the oracle, on every
path.

In the step below the sampler or the old policy has NaN, inf or -inf at some tokens. The head makes
others impossible.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import OracleHead
from oracle.step import with_stats
from policy_steps import quick_jit
from random_losses import BASE, RULES, check_metrics, of_jaxppo
from random_steps import Drawn, Place, Step, agree, batch_of, step_samples, to_rows, to_samples

from jaxppo import (
    GSPO,
    KL,
    PPO,
    Head,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    TokenStats,
    Unusable,
    accumulate_gradients,
    explain_broken_rules,
    finalize_metrics,
    log_probs_from_hidden,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.losses import Part, ReferenceKL, explain_tokens
from jaxppo.losses.covariance import covariance_mask
from jaxppo.losses.explain import by_sample
from jaxppo.losses.policy_tokens import PolicyTokenLoss
from jaxppo.policy_losses import KLCov
from sharding.audit.program import notes

H, V = 6, 40
GONE = (3, 7, 8, 30)  # columns of bias -inf
STEP = Step(
    tuple(
        Drawn(2 + i % 2, (1, 1, 0, 1, 1, 1, 1, 0, 1)[i % 4 :], i, 7 + i // 2, i // 2)
        for i in range(8)
    ),
    5,
    0.3,
    "by token",
    float("nan"),
)
CONFIG = BASE | {"kl": {"coef": 0.25, "estimator": "k3", "importance": "token"}}
TIS = {"weights": "token", "low": 0.0, "high": 1.25, "outside": "clamp", "rejections": ()}
CONFIGS = {
    "ppo": {},
    "metrics as the loss": {"metric_aggregation": "loss", "aggregation": "rollout_mean"},
    "gspo": {"loss": {"name": "gspo", "clip_low": 0.01, "clip_high": 0.02}},
    "gmpo": {"loss": {"name": "gmpo", "clip_low": 0.1, "clip_high": 0.2}},
    "dppo_kl": {"loss": {"name": "dppo_kl", "clip_low": 0.05, "clip_high": 0.1, "ratio_cap": 5.0}},
    "over the sampler": {"ratio_to": "rollout"},
    "on policy": {
        "ratio_to": "current",
        "loss": {"name": "cispo", "clip_low": 0.2, "clip_high": 0.25},
    },
    "weights of tokens": {"off_policy": TIS | {"batch_normalize": True}},
    "weights of sequences": {"off_policy": TIS | {"weights": "sequence", "batch_normalize": True}},
    "rejected sequences": {
        "off_policy": {
            "rejections": ({"statistic": "seq_mean_k3", "low": 0.0, "high": 0.04},),
            "opsm_delta": 0.0,
        }
    },
    "a mean of sequence means": {
        "ratio_to": "rollout",
        "aggregation": "sequence_mean_token_mean",
        "kl": {
            "coef": 0.25,
            "estimator": "k2",
            "importance": "sequence",
            "compares": "current/rollout",
        },
    },
}
PATHS = {
    "statistics": {},
    "one pass": {"memory": 2**30},
    "two passes": {"memory": 18_000},
    "micro-batches": {"memory": 2**30, "micro_batches": 2},
    "mesh": {"memory": 2**30, "mesh": "dp=2,cp=2,tp=2"},
    "mesh, statistics": {"mesh": "dp=2,cp=2,tp=2"},
}
# every config on every path; the rules take turns, and each meets each path and each config
CASES = [
    (config, path, tuple(RULES)[(i + j) % len(RULES)])
    for i, config in enumerate(CONFIGS)
    for j, path in enumerate(PATHS)
]


def make_step():
    """Samples with hidden states, their statistics, and the head."""
    rng = np.random.default_rng(0)
    kernel, bias = (rng.normal(size=n).astype(np.float32) for n in ((H, V), V))
    bias[list(GONE)] = -np.inf
    head = OracleHead(kernel.astype(np.float64), bias.astype(np.float64))
    samples = []
    for s in step_samples(STEP, unusable=True):
        targets = rng.integers(0, V, len(s.mask))
        found = dataclasses.replace(
            s, hidden=rng.normal(size=(len(s.mask), H)).astype(np.float32), targets=targets
        )
        # old log-probs near the policy's, where they are finite
        own = with_stats([found], head)[0].log_probs
        near = {}
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
            moved = np.where(np.isfinite(own), own, -1) + 0.3 * rng.normal(size=len(own))
            given = getattr(s, name)
            near[name] = np.where(
                np.isfinite(given), np.minimum(moved, -0.01).astype(np.float32), given
            )
        samples.append(dataclasses.replace(found, **near))
    return samples, head


SAMPLES, HEAD = make_step()


def program(config: PolicyLossConfig, path: str, place: Place):
    """A function of (params, batch): loss, gradients by hidden states, kernel and bias, and
    metrics.
    """
    parallel = place.parallel
    memory = PATHS[path].get("memory")

    def loss_of(params, batch, normalizer):
        head = Head(params["kernel"], params["bias"])
        options = {"parallel": parallel}
        if memory is not None:
            options |= {"normalizer": normalizer, "memory": memory}
            return policy_loss_from_hidden(params["hidden"], head, batch, config, **options)
        where = batch.loss_mask > 0
        entropy = config.entropy_mode
        stats = log_probs_from_hidden(
            params["hidden"], head, batch.targets, entropy=entropy, where=where, **options
        )
        return policy_loss(stats, batch, config, normalizer=normalizer, **options)

    def run(params, batch):
        if place.micro_batches is None:
            (loss, found), gradient = jax.value_and_grad(loss_of, has_aux=True)(params, batch, None)
            return loss, gradient, finalize_metrics(found)
        normalizer = Normalizer.of(config, batch, parallel=parallel)

        def part(params, given):
            place, batch, normalizer = given
            own = jnp.where(place[:, None, None, None] > 0, params["hidden"], 0).sum(axis=0)
            return loss_of(params | {"hidden": own}, batch, normalizer)

        given = jnp.eye(place.micro_batches), batch, normalizer
        (loss, found), gradient = accumulate_gradients(part, given)(params)
        return loss, gradient, finalize_metrics(found)

    return run


def place_of(path: str) -> Place:
    options = PATHS[path]
    return Place(
        options.get("mesh"), False, "contiguous", False, 16, 8, 2, options.get("micro_batches")
    )


def given_to(path: str):
    """The parameters and the batch."""
    batch = batch_of(STEP, SAMPLES, place_of(path))
    hidden = to_rows(batch, SAMPLES, [s.hidden for s in SAMPLES], np.nan)
    return {
        "hidden": hidden,
        "kernel": HEAD.kernel.astype(np.float32),
        "bias": HEAD.bias.astype(np.float32),
    }, batch


@pytest.mark.every(9)
@pytest.mark.parametrize(("name", "path", "rule"), CASES)
def test_each_rule(name, path, rule):
    config = CONFIG | CONFIGS[name] | {"unusable": RULES[rule]}
    params, batch = given_to(path)
    loss, gradient, found = quick_jit(program(of_jaxppo(config), path, place_of(path)))(
        params, batch
    )
    expected, by_hidden, by_head = oracle.policy_loss_from_hidden(SAMPLES, HEAD, config)
    assert 5 < expected.metrics["unusable_tokens"] < sum(s.count for s in SAMPLES) - 5
    check_metrics(loss, found, expected, config, 3e-5)
    size = 10 * expected.weights.max()
    for i, (x, y) in enumerate(
        zip(to_samples(batch, SAMPLES, gradient["hidden"]), by_hidden, strict=True)
    ):
        agree(f"gradient of hidden states of sample {i}", x, y, size, 3e-5)
    for what in ("kernel", "bias"):
        agree(f"gradient of {what}", gradient[what], getattr(by_head, what), size, 3e-5)


WEIGHT_0 = Unusable("weight_0")
RATIO_1 = Unusable("ratio_1")
NO_LOSS = Unusable("weight_0", penalties="out")
OUT = Unusable("weight_0", denominators="out", penalties="out")
EVERY = (WEIGHT_0, NO_LOSS, OUT, RATIO_1, Unusable("ratio_1", penalties="out"))


@functools.partial(jax.jit, static_argnames=("config", "rules"))
def of_rules(stats, batch, config, rules=EVERY):
    """((loss, metrics), gradient) of the config with each of these rules: one program for all."""
    slopes = jax.value_and_grad(policy_loss, has_aux=True)
    return [slopes(stats, batch, dataclasses.replace(config, unusable=rule)) for rule in rules]


@functools.partial(jax.jit, static_argnames=("config", "rules"))
def losses_of_rules(stats, batch, config, rules=EVERY):
    """(loss, metrics) of the config with each of these rules."""
    return [policy_loss(stats, batch, dataclasses.replace(config, unusable=x)) for x in rules]


def of_rule(rule, stats, batch, config):
    """What `of_rules` has for one of `EVERY`."""
    return of_rules(stats, batch, config)[EVERY.index(rule)]


NAN = float("nan")
INF = float("inf")
NOT_FINITE = [
    ("log_probs", -INF),
    *((name, x) for name in ("old_log_probs", "rollout_log_probs") for x in (NAN, INF, -INF)),
]


@pytest.mark.parametrize(("name", "value"), NOT_FINITE)
def test_by_default_each_of_them_makes_the_loss_nan(name, value):
    batch = batch_of(STEP, SAMPLES, place_of("statistics"))
    of_all = np.full_like(batch.loss_mask, -1)
    arrays = dict.fromkeys(("log_probs", "old_log_probs", "rollout_log_probs"), of_all)
    spoilt = of_all.copy()
    spoilt[tuple(np.argwhere(batch.loss_mask > 0)[3])] = value
    arrays[name] = spoilt
    stats = TokenStats(arrays.pop("log_probs"))
    batch = dataclasses.replace(batch, **arrays)
    ratio_to = "rollout" if name == "rollout_log_probs" else "old"
    config = PolicyLossConfig(ratio_to=ratio_to)
    (loss, found), *by_rule = losses_of_rules(stats, batch, config, ("nan", *EVERY))
    assert np.isnan(loss)
    assert "unusable_tokens" not in found
    (line,) = explain_broken_rules(found["broken_rules"].value)
    assert line.startswith(f"{name}: expected finite log-probs")
    assert "see PolicyLossConfig.unusable" in line
    for kept, found in by_rule:
        assert np.isfinite(kept)
        assert (float(found["unusable_tokens"].value), int(found["broken_rules"].value)) == (1.0, 0)
    if name == "rollout_log_probs":  # which only metrics read
        loss, found = policy_loss(stats, batch, PolicyLossConfig())
        assert np.isfinite(loss)
        assert not np.isfinite(found["sampler_k3"].value)


LOG_2 = np.log(2.0)


def three(**more):
    """A sample of three tokens, A = 1, 4, 3.

    The sampler's log-probs are log 2 below -1, but the second is NaN.
    """
    given = {
        "advantages": [1.0, 4.0, 3.0],
        "rollout_log_probs": [-1 - LOG_2, NAN, -1 - LOG_2],
        **more,
    }
    return RolloutBatch.from_samples([Sample([5, 6, 7, 8], 1, **given)], row_length=4)


THREE = TokenStats(
    jnp.array([[-1.0, -1.0, -1.0, 0.0]]), jnp.full((1, 4), 2.0), entropy_mode="bonus"
)
FREE = PPO(clip_low=1.0, clip_high=9.0)
SYSTEMS = {  # the loss and its slopes by the log-probs, by hand; ratios are 2 where they are known
    "trl": ([2.0, 4.0, 6.0], 3),
    "tunix": ([2.0, 0.0, 6.0], 3),
    "torchtitan": ([2.0, 0.0, 6.0], 2),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_rule_of_a_system(system):
    worth, count = SYSTEMS[system]
    config = PolicyLossConfig(FREE, ratio_to="rollout")
    (loss, found), gradient = of_rule(Unusable.of(system), THREE, three(), config)
    np.testing.assert_allclose(loss, -sum(worth) / count, rtol=1e-6)
    np.testing.assert_allclose(gradient.log_probs[0], [-w / count for w in worth] + [0], rtol=1e-6)
    assert float(found["unusable_tokens"].value) == 1
    ratios = {"trl": [2, 1, 2], "tunix": [2, 1, 2], "torchtitan": [2, 2]}[system]
    np.testing.assert_allclose(found["ratio_mean"].value, np.mean(ratios), rtol=1e-6)
    np.testing.assert_allclose(found["ratio_min"].value, min(ratios), rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (WEIGHT_0, (-8 + 3 * 0.25 * 0.5 - 3 * 0.1 * 2) / 3),
        (NO_LOSS, (-8 + 2 * 0.25 * 0.5 - 2 * 0.1 * 2) / 3),
        (OUT, (-8 + 2 * 0.25 * 0.5 - 2 * 0.1 * 2) / 2),
        (RATIO_1, (-12 + 3 * 0.25 * 0.5 - 3 * 0.1 * 2) / 3),
        (Unusable("ratio_1", penalties="out"), (-12 + 2 * 0.25 * 0.5 - 2 * 0.1 * 2) / 3),
    ],
)
def test_penalties_that_are_kept_or_not(rule, expected):
    """k1 is 0.5 at each token and the entropy 2; without a penalty the reference may be anything
    at that token.
    """
    refs = [-1.5, -1.5 if rule.penalties == "in" else NAN, -1.5]
    config = PolicyLossConfig(FREE, kl=KL(0.25, "k1"), entropy_coef=0.1, ratio_to="rollout")
    (loss, found), gradient = of_rule(rule, THREE, three(ref_log_probs=refs), config)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    count = 2 if rule == OUT else 3
    penalised = float(rule.penalties == "in")
    slopes = [-2 + 0.25, -4 * (rule.policy == "ratio_1") + 0.25 * penalised, -6 + 0.25, 0]
    np.testing.assert_allclose(gradient.log_probs[0], np.array(slopes) / count, rtol=1e-6)
    np.testing.assert_allclose(
        gradient.entropy[0], -0.1 * np.array([1, penalised, 1, 0]) / count, rtol=1e-6
    )
    np.testing.assert_allclose(found["kl"].value, 0.5 * (2 + penalised) / count, rtol=1e-6)
    np.testing.assert_allclose(found["entropy"].value, 2.0 * (2 + penalised) / count, rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(WEIGHT_0, -4 * 2 ** (2 / 3) / 3), (RATIO_1, -8 * 2 ** (2 / 3) / 3), (OUT, -4 * 2 / 2)],
)
def test_the_mean_over_a_sequence(rule, expected):
    """The ratio of the sequence has the logarithm 2/3 log 2 if the token counts, as in TRL and
    Tunix, else log 2.
    """
    geometric = OffPolicyConfig("geometric", high=9.0, compares="current/rollout")
    configs = (
        PolicyLossConfig(GSPO(1.0, 9.0), ratio_to="rollout"),
        PolicyLossConfig(FREE, ratio_to="current", off_policy=geometric),
    )
    rules = (WEIGHT_0, RATIO_1, OUT)
    for config in configs:
        loss, _ = losses_of_rules(THREE, three(), config, rules)[rules.index(rule)]
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_only_ratios_that_read_the_log_prob_are_1():
    """TRL's weight of its sampler is 1 at the second token, and its ratio over the old policy
    stays 2.
    """
    batch = three(old_log_probs=[-1 - LOG_2] * 3)
    token = OffPolicyConfig("token", high=9.0)
    config = PolicyLossConfig(FREE, off_policy=token, unusable=Unusable.of("trl"))
    loss, found = policy_loss(THREE, batch, config)
    np.testing.assert_allclose(loss, -(2 + 8 + 6) / 3, rtol=1e-6)
    assert float(found["tis"].value) == 1  # old and sampler are equal at the others
    assert float(found["ratio_min"].value) == float(found["ratio_max"].value) == pytest.approx(2)


# two of three tokens are usable, none of one, and one of two: the weights in the first and the last
OF_SEQUENCES = {
    "token_mean": (1 / 3, 1 / 3),
    "sequence_mean_token_sum": (1 / 2, 1 / 2),
    "sequence_mean_token_mean": (1 / 4, 1 / 2),
    "rollout_mean": (1 / 4, 1 / 2),  # the first two are of one rollout
}


@pytest.mark.parametrize("aggregation", OF_SEQUENCES)
def test_the_denominators_of_a_step_whose_parts_lack_tokens(aggregation):
    """In one batch, and in three micro-batches of which one has no usable token at all."""
    lacking = ([-1.0, NAN, -1.0], [NAN], [INF, -1.0])
    samples = [
        Sample(
            [1, *range(2, 2 + len(x))],
            1,
            advantages=[1.0] * len(x),
            rollout_log_probs=x,
            rollout_id=r,
        )
        for x, r in zip(lacking, (7, 7, 9), strict=True)
    ]
    config = PolicyLossConfig(ratio_to="rollout", aggregation=aggregation, unusable=OUT)
    first, last = OF_SEQUENCES[aggregation]
    expected = -(2 * first + last)
    whole = RolloutBatch.from_samples(samples, row_length=4, rows=3)

    def loss_fn(shift, part):
        batch, normalizer = part
        stats = TokenStats(jnp.where(batch.loss_mask > 0, -1.0, 0.0) + shift)
        return policy_loss(stats, batch, config, normalizer=normalizer)

    @quick_jit
    def run(shift, whole, parts):
        """The loss, its metrics and its slope by a shift of all log-probs, in both ways."""
        at_once = jax.value_and_grad(loss_fn, has_aux=True)(shift, (whole, None))
        normalizer = Normalizer.of(config, parts)
        return at_once, accumulate_gradients(loss_fn, (parts, normalizer))(shift)

    parts = RolloutBatch.from_samples(samples, row_length=4, rows=1, micro_batches=3)
    ((loss, found), slope), ((sum_of_parts, in_parts), slope_of_parts) = run(
        np.float32(0), whole, parts
    )
    np.testing.assert_allclose([loss, slope], expected, rtol=1e-6)
    np.testing.assert_allclose([sum_of_parts, slope_of_parts], expected, rtol=1e-6)
    assert float(found["unusable_tokens"].value) == float(in_parts["unusable_tokens"].value) == 3
    assert int(in_parts["broken_rules"].value) == 0


def test_denominators_that_are_sums_of_weights():
    """Weights of 0.5, 8 and 2; the sum of those of usable tokens is 2.5."""
    batch = dataclasses.replace(three(loss_weights=[0.5, 8.0, 2.0]), weighted_denominators=True)
    config = PolicyLossConfig(FREE, ratio_to="rollout", unusable=OUT)
    np.testing.assert_allclose(
        policy_loss(THREE, batch, config)[0], -(0.5 * 2 + 2 * 6) / 2.5, rtol=1e-6
    )


def test_a_normalizer_of_another_rule():
    """Its denominators would count other tokens. Rules that count the same tokens may share one."""
    batch = three()
    configs = {rule: PolicyLossConfig(FREE, ratio_to="rollout", unusable=rule) for rule in EVERY}
    kept = Normalizer.of(configs[WEIGHT_0], batch)
    assert float(kept.tokens) == 3
    assert float(Normalizer.of(configs[OUT], batch).tokens) == 2
    np.testing.assert_allclose(
        policy_loss(THREE, batch, configs[RATIO_1], normalizer=kept)[0], -4, rtol=1e-6
    )
    message = r"normalizer: got one of out_of_denominators=\(\), expected \('rollout_log_probs',\)"
    with pytest.raises(ValueError, match=message):
        policy_loss(THREE, batch, configs[OUT], normalizer=kept)
    with pytest.raises(
        ValueError,
        match=r"normalizer: got one of out_of_denominators=\('rollout_log_probs',\), exp",
    ):
        policy_loss(THREE, batch, configs[NO_LOSS], normalizer=Normalizer.of(configs[OUT], batch))
    blind = Normalizer.of(configs[OUT], dataclasses.replace(batch, rollout_log_probs=None))
    # would be -8/3 for -8/2
    loss, found = policy_loss(THREE, batch, configs[OUT], normalizer=blind)
    assert np.isnan(loss)
    assert "normalizer_of_another_step" in explain_broken_rules(found["broken_rules"].value)[0]


@pytest.mark.parametrize("rule", EVERY)
def test_what_else_is_broken_still_is(rule):
    """NaN of the current policy is never excused, and a token is not unusable because of the
    reference's -inf.
    """
    samples = [
        Sample(
            [1, 2, 3, 4],
            1,
            advantages=[1.0] * 3,
            old_log_probs=[-1.0] * 3,
            ref_log_probs=[-1.0] * 3,
        )
    ]
    batch = RolloutBatch.from_samples(samples, row_length=4)
    config = PolicyLossConfig(kl=KL(0.1))
    log_probs, nan, inf, low, high = np.full((5, 1, 4), -1.0, np.float32)
    nan[0, 1], inf[0, 1], low[0, 1], high[0, 1] = NAN, INF, -INF, 0.5
    unsound = dataclasses.replace(batch, ref_log_probs=low)
    above = dataclasses.replace(batch, old_log_probs=high)
    for stats, its in ((nan, batch), (inf, batch), (log_probs, unsound), (log_probs, above)):
        loss, found = losses_of_rules(TokenStats(stats), its, config)[EVERY.index(rule)]
        assert np.isnan(loss)
        assert "log_probs: expected finite" in explain_broken_rules(found["broken_rules"].value)[0]
    loss, found = losses_of_rules(TokenStats(low), unsound, config)[EVERY.index(rule)]
    # the denominators are those before the step
    np.testing.assert_allclose(loss, -2 / 3, rtol=1e-6)
    assert float(found["unusable_tokens"].value) == 1


@pytest.mark.parametrize("rule", EVERY)
def test_a_step_of_impossible_tokens_alone_is_zero(rule):
    batch = batch_of(STEP, SAMPLES, place_of("statistics"))
    one = np.ones(batch.loss_mask.shape, np.float32)
    config = PolicyLossConfig(entropy_coef=0.1)
    (loss, found), gradient = of_rule(rule, TokenStats(-INF * one, one), batch, config)
    assert float(loss) == 0
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(gradient))
    assert float(found["unusable_tokens"].value) == batch.loss_mask.sum()
    assert float(found["ratio_mean"].value) == 0


@pytest.mark.parametrize("rule", EVERY)
def test_a_step_of_which_the_sampler_knows_nothing(rule):
    batch = three(rollout_log_probs=[NAN] * 3)
    config = PolicyLossConfig(ratio_to="rollout", aggregation="sequence_mean_token_mean")
    (loss, found), gradient = of_rule(rule, THREE, batch, config)
    worth = np.array([1.0, 4.0, 3.0, 0.0]) * (rule.policy == "ratio_1")
    np.testing.assert_allclose(loss, -worth.sum() / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient.log_probs[0], -worth / 3, rtol=1e-6)
    assert float(found["unusable_tokens"].value) == 3


def test_a_part_with_a_rule_and_one_that_needs_none():
    """The divergence to the reference is over all tokens, in the denominators too."""
    batch = three(ref_log_probs=[-1.5] * 3)
    config = PolicyLossConfig(FREE, ratio_to="rollout", unusable=OUT)
    parts = {"policy": config, "reference": Part(ReferenceKL("k1"), coef=0.25)}
    for normalizer in (None, Normalizer.of(parts, batch)):
        loss, found = loss_from_stats(THREE, batch, parts, normalizer=normalizer)
        np.testing.assert_allclose(loss, -8 / 2 + 0.25 * 0.5, rtol=1e-6)
        assert float(found["policy/unusable_tokens"].value) == 1
        assert "reference/unusable_tokens" not in found


REASONS = {
    WEIGHT_0: ["", "unusable", "unusable", "masked"],
    NO_LOSS: ["", "unusable", "unusable", "masked"],
    OUT: ["", "unusable", "unusable", "masked"],
    RATIO_1: ["", "", "unusable", "masked"],
}


@jax.jit
def explained_by_rule(stats, batch):
    """The explanation and the loss with each rule of `REASONS`."""
    config = PolicyLossConfig(FREE, kl=KL(0.25, "k1"), ratio_to="rollout")
    found = []
    for rule in REASONS:
        of_rule = dataclasses.replace(config, unusable=rule)
        explained = explain_tokens(stats, batch, of_rule)
        found.append((explained, policy_loss(stats, batch, of_rule)))
    return found


@pytest.mark.parametrize("rule", REASONS)
def test_the_reason_in_explained_tokens(rule):
    """The sampler has no log-prob of the second token; the current policy finds the third
    impossible.
    """
    batch = three(ref_log_probs=[-1.5] * 3)
    stats = TokenStats(np.float32([[-1.0, -1.0, -INF, 0.0]]))
    found, (loss, metrics) = explained_by_rule(stats, batch)[[*REASONS].index(rule)]
    assert found.reason_names() == [REASONS[rule]]
    np.testing.assert_allclose(found.arrays["contribution"].sum(), loss, rtol=1e-6)
    assert float(metrics["unusable_tokens"].value) == 2
    assert float(by_sample(found, batch)["unusable"][0, 0]) == REASONS[rule].count("unusable")
    trained = np.asarray(found.arrays["gradient"][0]) != 0
    assert trained.tolist() == [True, rule.penalties == "in", False, False]


def test_selection_leaves_them_out():
    """The first of the three others has the highest covariance, (-1 - 1)(-2 + 4/3); one is
    picked, and not two.
    """
    samples = [
        Sample([1, 2, 3, 4, 5], 1, advantages=[9.0, -1.0, 2.0, 2.0], old_log_probs=[-1.0] * 4)
    ]
    batch = RolloutBatch.from_samples(samples, row_length=5)
    stats = TokenStats(jnp.array([[-jnp.inf, -2.0, -1.0, -1.0, 0.0]]))
    for rule in EVERY:
        config = PolicyLossConfig(KLCov(share=0.5), unusable=rule)
        assert covariance_mask(stats, batch, config, jax.random.key(0)).tolist() == [
            [0, 1, 0, 0, 0]
        ]


@pytest.mark.parametrize(("rule", "picked"), [(WEIGHT_0, 1), (NO_LOSS, 1), (OUT, 1), (RATIO_1, 0)])
def test_a_selection_is_of_tokens_with_a_policy_loss(rule, picked):
    """With the first token its covariance is the highest, (9 - 3)(0 + 1); without it, that of
    the second, as above.
    """
    old = [NAN, -1.0, -1.0, -1.0]
    samples = [Sample([1, 2, 3, 4, 5], 1, advantages=[9.0, -1.0, 2.0, 2.0], old_log_probs=old)]
    batch = RolloutBatch.from_samples(samples, row_length=5)
    stats = TokenStats(jnp.array([[0.0, -2.0, -1.0, -1.0, 0.0]]))
    config = PolicyLossConfig(KLCov(share=0.4), unusable=rule)
    found = covariance_mask(stats, batch, config, jax.random.key(0))
    assert np.flatnonzero(found).tolist() == [picked]


@pytest.mark.parametrize(
    ("off_policy", "one_pass"),
    [
        (None, True),
        (OffPolicyConfig(weights="token", rejections=(Rejection("token_k3", high=1.0),)), True),
        (OffPolicyConfig(weights="geometric"), False),
        (OffPolicyConfig(rejections=(Rejection("seq_max_k2", high=1.0),)), False),
        (OffPolicyConfig(veto=0.1), False),
    ],
)
def test_one_pass_where_a_token_left_out_changes_no_other(off_policy, one_pass):
    """Not with weights of sequences: they would include a token before the pass finds it
    impossible.
    """
    for rule in EVERY:
        config = PolicyLossConfig(off_policy=off_policy, unusable=rule)
        assert PolicyTokenLoss(config).token_local is one_pass
    assert PolicyTokenLoss(dataclasses.replace(config, unusable="nan")).token_local


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            functools.partial(PolicyLossConfig, unusable="mask"),
            "unusable: got 'mask', expected 'nan' or an instance of Unusable",
        ),
        (
            functools.partial(PolicyLossConfig, unusable="trl"),
            r"unusable: got 'trl', .*; Unusable.of\('trl'\) is one",
        ),
        (
            functools.partial(PolicyLossConfig, unusable=None),
            "unusable: got None, expected 'nan' or an instance of Unusable",
        ),
        (
            functools.partial(Unusable, "drop"),
            "policy: got 'drop', expected one of 'weight_0', 'ratio_1'",
        ),
        (
            functools.partial(Unusable, penalties="left"),
            "penalties: got 'left', expected one of 'in', 'out'",
        ),
        (
            functools.partial(Unusable.of, "verl"),
            "system: got 'verl', expected one of 'trl', 'tunix', 'torchtitan'",
        ),
        (
            functools.partial(Unusable, "ratio_1", denominators="out", penalties="out"),
            (
                "denominators: got 'out' with policy='ratio_1', penalties='out', expected 'in'"
                " unless policy='weight_0'"
            ),
        ),
        (
            functools.partial(Unusable, denominators="out"),
            "denominators: got 'out' with policy='weight_0', penalties='in', expected 'in' unless",
        ),
    ],
)
def test_a_rule_that_is_none(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_an_option_of_the_rule_beside_it():
    with pytest.raises(
        TypeError,
        match=r"penalties: got 'out' for PolicyLossConfig, expected it in unusable=Unusable",
    ):
        PolicyLossConfig(penalties="out")


def test_the_paths_are_what_they_say():
    config = of_jaxppo(CONFIG | {"unusable": RULES["weight_0"]})
    for path in ("one pass", "two passes"):
        traced = jax.make_jaxpr(program(config, path, place_of(path)))(*given_to(path))
        assert notes(traced)[0].startswith(path)
