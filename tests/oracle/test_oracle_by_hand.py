"""The oracle against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from oracle import OracleHead, OracleSample, advantages, policy_loss
from oracle.head import likeliest_ids, logit_gradient, logits, set_entropy, token_stats
from oracle.kl import adaptive_kl_coef, kl_penalty
from oracle.off_policy import correction
from oracle.other_losses import divergence, mtp_loss, sampled_tail, sft_loss, shifted, value_loss
from oracle.policy_losses import LOSSES, Tokens
from oracle.samples import sample_weights
from oracle.step import clip_cov_candidates, highest


def tokens(ratios, a, **more):
    lp = np.log(np.array(ratios, np.float64)) - 3.0
    return Tokens(lp, np.full(len(lp), -3.0), np.array(a, np.float64), lp, **more)


def check(name, t, expected, options=None, **indicators):
    got = LOSSES[name](t, **(options or {}))
    np.testing.assert_allclose(got.values, expected, rtol=1e-12)
    for key, value in indicators.items():
        np.testing.assert_array_equal(got.indicators[key], value)


def test_token_losses():
    t = tokens([1.5, 0.5, 1.5, 0.5, 4.0], [2, 2, -2, -2, -1])
    clip = {"clip_low": 0.25, "clip_high": 0.25}
    check("ppo", t, [-2.5, -1, 3, 1.5, 4], clip, clip_fraction=[1, 0, 0, 1, 0])
    check(
        "ppo",
        t,
        [-2.5, -1, 3, 1.5, 3],
        {**clip, "dual_clip": 3.0},
        clip_fraction_lower=[0, 0, 0, 0, 1],
    )
    check(
        "cispo",
        t,
        [-1.25, -0.75, 1.25, 0.75, 1.25] * np.abs(t.advantages) * t.log_probs,
        clip,
        clip_fraction=np.ones(5),
    )
    check("reinforce", t, -t.advantages * t.log_probs)
    check(
        "dro",
        t,
        -t.advantages * t.log_probs + np.log([1.5, 0.5, 1.5, 0.5, 4.0]) ** 2,
        {"beta": 2.0},
    )

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    expected = [
        -4 * sigmoid(1.0),
        -4 * sigmoid(-1.0),
        2 * sigmoid(2.0),
        2 * sigmoid(-2.0),
        sigmoid(12.0),
    ]
    check("sapo", t, expected, {"tau_positive": 2.0, "tau_negative": 4.0})


def test_losses_with_a_soft_weight_or_a_mask_by_probability():
    t = tokens([2.0, 0.25], [1, -3])  # w = 0.5
    up = 0.5**2 * np.exp(1.5)
    down = 0.5**3 * np.exp(1.0)
    check("vespo", t, [-up * t.log_probs[0], 3 * down * t.log_probs[1]])
    gate = 1 / (1 + np.exp(1 - 0.5**0.5))  # s = sqrt(0.5)
    sapo = {"level": "sequence", "tau_negative": 1.0}
    check("sapo", t, [-4 * gate, 12 * gate], sapo)
    cispo = {"level": "sequence", "clip_low": 0.25, "unified_mask": True}
    check("cispo", t, [-0.75 * t.log_probs[0], 0], cispo, masked_fraction=[0, 1])
    q = np.exp(-3.0)
    mask = {"clip_low": 0.5 * q, "clip_high": 0.5 * q, "pull": 1.0}
    check("probability_mask", t, np.log([2.0, 0.25]) ** 2, mask, clip_fraction=[1, 1])
    check("probability_mask", t, [-1.5, 0.75], {"ratio_cap": 1.5}, clip_fraction=[0, 0])


def test_flipped_weights():
    """Where A > 0 the loss is -A / c, with c = min(r, 1.25); beyond a weight of 2.5 it is -A 2.5
    log_prob.
    """
    t = tokens([1.5, 0.5, 0.25, 1.5, 0.5, 4.0, 4.0], [2, 2, 2, -2, -2, -1, 0])
    soft = 2.5 * t.log_probs
    numbers = {"clip_low": 0.25, "clip_high": 0.25, "dual_clip": 2.5}
    expected = [-1.6, -4, -2 * soft[2], 3, 1.5, soft[5], 0]
    indicators = {"clip_fraction": [1, 0, 0, 0, 1, 0, 0], "heavy_fraction": [0, 0, 1, 0, 0, 1, 0]}
    check("aspo", t, expected, numbers, **indicators)
    np.testing.assert_allclose(
        LOSSES["aspo"](t, **numbers).jacobian, [0, -4, -5, 3, 0, 2.5, 0], rtol=1e-12
    )


def test_kl_penalties_by_hand():
    """Two tokens, d = log 2 and -log 2; the sequence's ratio to the old policy is 4, its tokens'
    2 and 8.
    """
    ln2 = np.log(2)
    x = np.array([-1.0, -2.0])
    given = (x, x - [ln2, -ln2], "k1")
    old = x - [ln2, 3 * ln2]
    for importance, value, slope in (
        ("none", [ln2, -ln2], [1, 1]),
        ("token", [2 * ln2, -8 * ln2], [2 + 2 * ln2, 8 - 8 * ln2]),
        ("sequence", [4 * ln2, -4 * ln2], [4, 4]),  # the terms by the ratio cancel
        ("score", [ln2, -ln2], [1 + ln2, 1 - ln2]),
    ):
        found = kl_penalty(*given, importance, old, x)
        np.testing.assert_allclose(found, (value, slope), rtol=1e-12)


def test_sequence_losses():
    t = tokens([2.0, 8.0], [1, -3])  # s = 4
    check("gspo", t, [-1.25, 12], {"clip_high": 0.25}, clip_fraction=[1, 0])
    check("gspo", t, [-1.25, 6], {"clip_high": 0.25, "dual_clip": 2.0}, clip_fraction_lower=[0, 1])
    np.testing.assert_allclose(LOSSES["gspo"](t, clip_high=9.0).jacobian, [[-2, -2], [6, 6]])
    np.testing.assert_allclose(
        LOSSES["gspo"](t, clip_high=9.0, gradient="token").jacobian, [-4, 12]
    )
    # the mean advantage is -1; token 0 is bounded above at 0.1, token 1 not below: exp((0.1 + log
    # 8) / 2)
    value = 8**0.5 * np.exp(0.05)
    check(
        "gmpo", t, [value] * 2, {"clip_high": 0.1}, clip_fraction=[1, 0], clip_fraction_lower=[0, 1]
    )
    np.testing.assert_allclose(
        LOSSES["gmpo"](t, clip_high=0.1).jacobian, [[0, value / 2]] * 2, rtol=1e-12
    )
    check(
        "gmpo",
        tokens([2.0, 8.0], [0, 3]),
        [-1.5 * 8**0.5] * 2,
        {"clip_high": 3.0},
        clip_fraction=[0, 0],
    )
    check("gmpo", tokens([2.0, 8.0], [1, 3]), [-8, -8], {"clip_high": 3.0})
    check(
        "gmpo",
        tokens([0.25, 1.0], [-2, -2]),
        [2 * 0.5**0.5] * 2,
        {"clip_low": np.log(2)},
        clip_fraction_lower=[1, 0],
    )
    check(
        "gmpo",
        tokens([2.0, 8.0], [1, 3]),
        [-2 * 8**0.5] * 2,
        {"clip_high": np.log(4.0)},
        clip_fraction=[0, 1],
    )


def test_divergences_of_dppo():
    p = np.array([0.6, 0.3, 0.6, 0.3])
    q = np.array([0.3, 0.6, 0.3, 0.6])
    t = Tokens(np.log(p), np.log(q), np.array([1.0, 1, -1, -1]), np.log(p))
    plain = -t.advantages * (p / q) * np.log(p)
    check(
        "dppo_tv",
        t,
        plain * [0, 1, 1, 0],
        {"clip_low": 0.29, "clip_high": 0.29},
        clip_fraction=[1, 0, 0, 1],
    )
    check("dppo_tv", t, plain, {"clip_low": 0.31, "clip_high": 0.31}, clip_fraction=np.zeros(4))
    check("dppo_tv", t, plain * [0.5, 1, 0.5, 1], {"clip_low": 1, "clip_high": 1, "ratio_cap": 1.0})
    # of Bernoulli(0.3) from Bernoulli(0.6): 0.1838
    kl = 0.3 * np.log(0.3 / 0.6) + 0.7 * np.log(0.7 / 0.4)
    other = 0.6 * np.log(0.6 / 0.3) + 0.4 * np.log(0.4 / 0.7)  # 0.1920
    between = (kl + other) / 2
    below = kl - 1e-6
    check("dppo_kl", t, plain * [1, 1, 1, 0], {"clip_low": between, "clip_high": between})
    check("dppo_kl", t, plain * [0, 1, 1, 0], {"clip_low": below, "clip_high": below})


def test_selected_tokens():
    t = tokens([2.0, 0.5], [1, -1], selected=np.array([1, 0]))
    check("clip_cov", t, [0, 0.8], clip_fraction=[1, 0])
    check("kl_cov", t, [-2 + 0.5 * np.log(2), 0.5], {"coef": 0.5}, penalised_fraction=[1, 0])
    x = [np.array([-1.0, 0.0]), np.array([2.0, 5.0])]
    samples = [
        OracleSample([1, 1], lp, advantages=lp, old_log_probs=lp) for lp in x
    ]  # means 1.5; covariances 6.25 2.25 0.25 12.25
    assert [list(s) for s in highest(samples, 0.5)] == [[True, False], [False, True]]
    assert [list(s) for s in clip_cov_candidates(samples, {}, 1.0, 7.0)] == [
        [True, True],
        [False, False],
    ]


def test_rollouts_share_a_denominator():
    samples = [OracleSample([1], rollout_id=r) for r in (7, 7, 7, 9)]
    np.testing.assert_allclose(1 / sample_weights(samples, "rollout_mean") / 2, [3, 3, 3, 1])


def test_aggregations():
    samples = [
        OracleSample(m, rollout_id=r)
        for m, r in (([1, 1, 0], 4), ([0, 0], 5), ([1, 1, 1, 1], 4), ([1, 1], 6))
    ]
    expected = {
        "token_mean": [1 / 8] * 4,
        "token_sum": [1] * 4,
        "sequence_mean_token_sum": [1 / 3] * 4,
        "sequence_mean_token_mean": [1 / 6, 1 / 3, 1 / 12, 1 / 6],
        "sequence_mean_token_sum_norm": [1 / 15] * 4,
        "rollout_mean": [1 / 12, 1 / 2, 1 / 12, 1 / 4],
    }
    for name, weights in expected.items():
        np.testing.assert_allclose(sample_weights(samples, name, 5.0), weights, err_msg=name)


def test_step():
    """Two tokens A = 1, ratios 1 and 1.5; then one A = -1, ratio 1; correction 1, 2 and
    (rejected) 8 over 2.
    """
    lp = [np.log([0.5, 0.6]), np.log([0.25])]
    old = [np.log([0.5, 0.4]), np.log([0.25])]
    rollout = [old[0] - np.log([1.0, 8.0]), old[1] - np.log([20.0])]
    a = [np.ones(2), -np.ones(1)]
    h = [np.array([1.0, 2.0]), np.array([4.0])]
    samples = [
        OracleSample(np.ones(len(x)), x, e, o, x - 1, r, b)
        for x, e, o, r, b in zip(lp, h, old, rollout, a, strict=True)
    ]
    config = {
        "loss": {"name": "ppo", "clip_high": 0.2},
        "kl": {"coef": 0.1, "estimator": "k1"},
        "entropy_coef": 0.5,
        "aggregation": "sequence_mean_token_mean",
        "off_policy": {
            "weights": "token",
            "high": 2.0,
            "rejections": ({"statistic": "token_k1", "low": 0.1},),
        },
    }
    loss, by_log_probs, by_entropy, metrics = policy_loss(samples, config)[:4]
    expected = {
        "loss": ((-1 + 0.1 - 0.5) + (-2.4 + 0.1 - 1.0)) / 4 + (0.1 - 2.0) / 2,
        "pg_loss": -3.4 / 4,
        "entropy": 7 / 3,
        "kl": 1.0,
        "ppo_kl": -np.log(1.5) / 3,
        "ratio_mean": 3.5 / 3,
        "ratio_min": 1.0,
        "ratio_max": 1.5,
        "effective_sample_size": 3.5**2 / (3 * (1 + 2.25 + 1)),
        "clip_fraction": 1 / 3,
        "tis": 29 / 3,
        "tis_abs": 26 / 3,
        "tis_clipfrac": 2 / 3,
        "rejected_fraction": 1 / 3,
        "sampler_log_prob_abs_diff": (np.log(8) + np.log(20)) / 3,
        "sampler_k3": (7 - np.log(8) + 19 - np.log(20)) / 3,
        "rollout_capped": 0.0,
    }
    assert metrics.keys() == expected.keys()
    assert loss == metrics["loss"]
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-12, err_msg=name)
    np.testing.assert_allclose(
        np.concatenate(by_log_probs), [(-1 + 0.1) / 4, 0.1 / 4, 0.1 / 2], atol=1e-15
    )
    np.testing.assert_allclose(np.concatenate(by_entropy), [-1 / 8, -1 / 8, -1 / 4], atol=1e-15)


def test_corrections():
    d = [np.log([2.0, 0.5, 4.0]), np.log([0.125])]
    zero = [np.zeros(3), np.zeros(1)]
    a = [np.ones(3), -np.ones(1)]
    masks = [[1, 0, 1, 1], [1]]
    policies = {"current": zero, "old": d, "rollout": zero}

    def weights(**options):
        return [c.weights for c in correction(policies, a, masks, options)]

    def accepted(**options):
        return np.concatenate(
            [c.accepted for c in correction(policies, a, masks, options)]
        ).tolist()

    def close(got, expected):
        np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-12)

    close(weights(weights="token", low=0.25), [2, 0.5, 2, 0.25])
    close(weights(weights="token", low=0.25, outside="zero"), [2, 0.5, 0, 0])
    close(weights(weights="sequence", high=9.0), [4, 4, 4, 0.125])
    close(weights(weights="geometric"), [4 ** (1 / 3)] * 3 + [0.125])
    close(
        weights(weights="sequence", high=9.0, batch_normalize=True),
        np.array([4, 4, 4, 0.125]) / 2.0625,
    )
    close(
        weights(weights="token", low=0.25, batch_normalize=True),
        np.array([2, 0.5, 2, 0.25]) / (4.75 / 4),
    )
    assert accepted(rejections=[{"statistic": "token_k1", "low": 0.3, "high": 3.0}]) == [1, 1, 0, 0]
    assert accepted(rejections=[{"statistic": "token_k2", "high": 0.5}]) == [1, 1, 0, 0]
    assert accepted(rejections=[{"statistic": "seq_sum_k1", "high": 5.0}]) == [1, 1, 1, 0]
    assert accepted(rejections=[{"statistic": "seq_mean_k1", "low": 0.7}]) == [0, 0, 0, 1]
    assert accepted(rejections=[{"statistic": "seq_max_k1", "low": 1.9, "high": 2.1}]) == [
        1,
        1,
        1,
        0,
    ]
    k3 = np.array([1, -0.5, 3, -0.875]) - np.log([2, 0.5, 4, 0.125])
    assert accepted(
        rejections=[
            {"statistic": "seq_sum_k3", "low": k3[:3].sum() - 1e-9, "high": k3[:3].sum() + 1e-9}
        ]
    ) == [1, 1, 1, 0]
    # the largest rho is 4
    assert accepted(rejections=[{"statistic": "seq_min_k1", "low": 0.3}]) == [0, 0, 0, 1]
    # the smallest is 1/2, 1/8
    assert accepted(rejections=[{"statistic": "seq_max_k1", "high": 4.0}]) == [1, 1, 1, 0]
    # runs of loss tokens: 2; 0.5 and 4, whose geometric mean is sqrt 2; 0.125. Differences to 1: 1,
    # -0.5, 3, -0.875
    assert accepted(rejections=[{"statistic": "run_mean_k1", "low": 0.6, "high": 0.8}]) == [
        0,
        1,
        1,
        0,
    ]
    assert accepted(rejections=[{"statistic": "run_mean_diff", "low": 1.2, "high": 1.3}]) == [
        0,
        1,
        1,
        0,
    ]
    assert accepted(rejections=[{"statistic": "seq_sum_diff", "low": 3.4, "high": 3.6}]) == [
        1,
        1,
        1,
        0,
    ]
    assert accepted(rejections=[{"statistic": "token_diff", "high": 1.1}]) == [1, 1, 0, 1]
    assert accepted(
        rejections=[{"statistic": "token_k1", "low": 1.1, "compares": "current/old"}]
    ) == [1, 0, 1, 0]
    assert accepted(veto=0.3) == [1, 1, 1, 0]
    assert accepted(veto=0.6) == [0, 0, 0, 0]
    below = {"current": [x - 3 for x in zero], "old": zero, "rollout": None}
    masked = correction(below, a, masks, {"opsm_delta": 2.0})
    close([c.weights for c in masked], [1, 1, 1, 0])
    assert [list(c.indicators["opsm_clipfrac"]) for c in masked] == [[0, 0, 0], [1]]
    assert accepted(opsm_delta=2.0) == [1, 1, 1, 1]
    # exp(d) - 1 - d in place of expm1 would be 8e-17 off, and reject
    tiny = [np.full(3, 1e-9), np.zeros(1)]
    rejections = [{"statistic": "token_k3", "high": 1e-17}]
    assert correction(policies | {"old": tiny}, a, masks, {"rejections": rejections})[
        0
    ].accepted.all()


def test_opsm_over_the_response():
    """slime counts the masked tokens of the sequence too: three of two loss tokens."""
    c = correction(
        {"current": [np.zeros(2)], "old": [np.ones(2)], "rollout": None},
        [-np.ones(2)],
        [[1, 0, 1, 0]],
        {"opsm_delta": 0.5, "opsm_fraction": "response"},
    )
    np.testing.assert_allclose(c[0].indicators["opsm_clipfrac"], [1.5, 1.5])


OUT = {"policy": "weight_0", "denominators": "out", "penalties": "out"}
UNUSABLE = {  # the losses below under each rule
    "ratio_1": (
        {"policy": "ratio_1", "denominators": "in", "penalties": "in"},
        [-8, -8 + 1.5, -8 * 4 ** (1 / 3)],
        3,
    ),
    "weight_0": (
        {"policy": "weight_0", "denominators": "in", "penalties": "in"},
        [-4, -4 + 1.5, -4 * 4 ** (1 / 3)],
        3,
    ),
    "no penalties": (OUT | {"denominators": "in"}, [-4, -4 + 1, -4 * 4 ** (1 / 3)], 3),
    "out": (OUT, [-4, -4 + 1, -4 * 2], 2),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_tokens(name):
    """A = 1, 4, 3 at ratios of 1; with k1 of 0.5 to the reference; as GSPO at ratios of 2.

    The second is not known.
    """
    rule, losses, count = UNUSABLE[name]
    known = {"advantages": np.array([1.0, 4, 3]), "ref_log_probs": np.full(3, -1.5)}
    s = OracleSample(
        np.ones(3), np.full(3, -1.0), rollout_log_probs=np.array([-1, np.nan, -1]), **known
    )
    config = {"ratio_to": "rollout", "unusable": rule}
    twice = replace(s, rollout_log_probs=np.array([-1 - np.log(2), -np.inf, -1 - np.log(2)]))
    gspo = {"loss": {"name": "gspo", "clip_low": 1.0, "clip_high": 9.0}}
    found = [
        policy_loss([s], config).loss,
        policy_loss([s], config | {"kl": {"coef": 1.0, "estimator": "k1"}}).loss,
        policy_loss([twice], config | gspo).loss,
    ]
    np.testing.assert_allclose(found, np.array(losses) / count, rtol=1e-12)
    # the third has no loss under any rule, and is counted
    lacks = replace(s, log_probs=np.array([-1, -1, -np.inf]))
    loss = policy_loss([lacks], config)
    policy = {"ratio_1": -5.0}.get(name, -1.0)
    np.testing.assert_allclose(loss.loss, policy / count, rtol=1e-12)
    assert loss.metrics["unusable_tokens"] == 2
    assert loss.by_log_probs[0][2] == 0


def test_head_statistics():
    s = token_stats(np.log([[1.0, 2, 4, 4], [1, 1, 1, 1]]), [2, 0], np.array([[0, 1], [3, -1]]))
    np.testing.assert_allclose(s.log_probs, np.log([4 / 7, 1 / 2]))
    np.testing.assert_allclose(s.log_z, np.log([11, 4]))
    np.testing.assert_allclose(
        s.entropy, [np.log(11) - (2 * np.log(2) + 16 * np.log(2)) / 11, np.log(4)]
    )
    np.testing.assert_allclose(s.mean_logit, [np.log(32) / 4, 0])
    # ties count
    assert token_stats([[0.0, 1.0, 1.0]] * 3, [0, 1, 2]).likeliest.tolist() == [False, True, True]
    kernel = np.array([[1.0, 2, 3]])
    head = OracleHead(
        kernel, np.array([1.0, 0, 9]), np.array([[2.0]]), np.array([[0.0, 1, 9]]), 3.0, 10.0, 0.5, 2
    )
    np.testing.assert_allclose(
        logits([[2.0]], head, 4.0), [[10 * np.tanh(0.15) / 4, 10 * np.tanh(0.8) / 4]]
    )
    wide = token_stats([[1e4, -np.inf, 1e4]], [0])
    np.testing.assert_allclose([wide.log_probs[0], wide.entropy[0]], [-np.log(2), np.log(2)])
    assert np.isfinite(logit_gradient([[1e4, -np.inf, 1e4]], [0], 1.0, 1.0)).all()


def test_some_of_a_vocabulary():
    z = np.array([[0.0, 2, -np.inf, 2, 1], [3, *[-np.inf] * 4]])
    assert likeliest_ids(z, 3).tolist() == [[1, 3, 4], [0, -1, -1]]
    found, dz = set_entropy(np.log([[1.0, 2, 5, 2], [1, 2, 3, 4]]), [[1, 3, -1], [-1, -1, -1]])
    np.testing.assert_allclose(found, [np.log(2), 0])
    np.testing.assert_allclose(dz, 0, atol=1e-12)  # the highest there is, and nothing
    _, dz = set_entropy(np.log([[1.0, 3]]), [[0, 1]])
    np.testing.assert_allclose(dz[0], [3 / 16 * np.log(3), -3 / 16 * np.log(3)])


def test_returns():
    mask = [0, 1, 1, 0, 1, 0]
    r = np.array([np.nan, 1, 2, np.nan, 4, np.nan])
    np.testing.assert_allclose(advantages.discounted_returns(r, mask, 0.5), [0, 3, 4, 0, 4, 0])
    np.testing.assert_allclose(
        advantages.discounted_returns(r, mask, 0.5, "discount"), [0, 2.5, 3, 0, 4, 0]
    )
    a, g = advantages.gae(r, r, mask, 0.5, 0.5, 1.0)  # deltas 1, 2, 0 where V = r
    np.testing.assert_allclose(a, [0, 1.5, 2, 0, 0, 0])
    np.testing.assert_allclose(g, [0, 3, 4, 0, 4, 0])
    kl = np.array([np.nan, 1, 0, np.nan, 2, np.nan])
    np.testing.assert_allclose(
        advantages.token_rewards(5.0, mask, kl, 0.1), [0, -0.1, 0, 0, 4.8, 0]
    )
    np.testing.assert_allclose(advantages.token_rewards(5.0, [0, 0]), [0, 0])


def test_groups():
    r = [1.0, 0.0, 0.5, 0.25]
    g = [7, 7, 8, 7]
    mean = 1.25 / 3
    std = np.std([1.0, 0.0, 0.25], ddof=1)
    centred = np.array([1 - mean, -mean, 0, 0.25 - mean])
    np.testing.assert_allclose(advantages.dr_grpo(r, g), centred)
    np.testing.assert_allclose(
        advantages.dr_grpo(r, g, singletons="reward"), centred + np.array([0, 0, 0.5, 0])
    )
    np.testing.assert_allclose(advantages.grpo(r, g), centred / (std + 1e-6))
    np.testing.assert_allclose(advantages.grpo(r, g, singletons="reward")[2], 0.5 / (1 + 1e-6))
    np.testing.assert_allclose(advantages.rloo(r, g), centred * 1.5)
    np.testing.assert_allclose(
        advantages.opo(r, g, [1, 2, 9, 4]), [1 - 2 / 7, -2 / 7, 0, 0.25 - 2 / 7]
    )
    np.testing.assert_allclose(
        advantages.opo([1, 0, 1, 0], [1, 1, 2, 2], [0, 1, 0, 0]), [1, 0, 0, 0]
    )
    np.testing.assert_allclose(advantages.pass_at_k(r, g, scale_by_std=False), [0.75, 0, 0, 0])
    np.testing.assert_allclose(advantages.pass_at_k([1, 1, 0], [1, 1, 1]), [0, 0, 0])
    np.testing.assert_allclose(advantages.gpg(r, g, f_norm=2.0), centred * (4 / 3) / 2)
    np.testing.assert_allclose(advantages.remax([1, 2], [0.25, 3]), [0.75, -1])
    others = [1 - 0.125, (-0.625), 0, 0.25 - 0.5] / np.array(
        [0.125 * 2**0.5, 0.375 * 2**0.5, 1, 0.5**0.5]
    )
    np.testing.assert_allclose(advantages.rloo(r, g, scale_by_std=True, epsilon=0.0), others)
    np.testing.assert_allclose(advantages.rloo([1, 0, 0], [7, 7, 7], scale_by_std=True)[0], 1)
    np.testing.assert_allclose(advantages.maxrl(r, g), [1 / mean - 1, -1, 0, 0.25 / mean - 1])
    np.testing.assert_allclose(
        advantages.maxrl([0, 0, -1, 0], [7, 7, 8, 8]), [0, 0, np.nan, np.nan], equal_nan=True
    )
    levels = advantages.standardize([1, 0, 4, 2, 3], [7, 7, 8, 8, 9], std="group", epsilon=0.0)
    np.testing.assert_allclose(levels, [-(0.2**0.5), -2 * 0.2**0.5, 1, 0, 1])
    found = advantages.overlong_penalty([3, 4, 5, 6, 7], max_length=6, buffer=2, factor=2.0)
    np.testing.assert_allclose(found, [0, 0, -1, -2, -2])


def test_several_rewards():
    r = [[1.0, 0.0], [0.0, 100.0]]
    g = [7, 7]
    masks = [[1, 1, 1], [0, 1]]
    plain = advantages.gdpo(r, g, masks, weights=[1.0, 0.5], whitened=None, epsilon=0.0)
    np.testing.assert_allclose(np.concatenate(plain), np.array([0.5, 0.5, 0.5, 0, -0.5]) * 0.5**0.5)
    over_samples = advantages.gdpo(r, g, masks, weights=[1.0, 0.5], whitened="samples", epsilon=0.0)
    np.testing.assert_allclose(np.concatenate(over_samples), np.array([1, 1, 1, 0, -1]) * 0.5**0.5)
    # over tokens: three of one sample, one of the other, mean half of it and variance 1 over n - 1
    on_tokens = advantages.gdpo(r, g, masks, weights=[1.0, 0.5], epsilon=0.0)
    np.testing.assert_allclose(np.concatenate(on_tokens), [0.5, 0.5, 0.5, 0, -1.5])
    got = advantages.explained_variance([[1.0, 9.0], [2.0]], [[2.0, np.nan], [4.0]], [[1, 0], [1]])
    np.testing.assert_allclose(got, 0.75)


def test_lambda_by_length():
    r = np.array([1.0, 0.0, 2.0])
    got, _ = advantages.gae(r, 0 * r, [1, 1, 1], 1.0, 0.9, length_alpha=2 / 3)  # lambda 1 - 1 / 2
    np.testing.assert_allclose(got, [1.5, 1, 2])
    got, _ = advantages.gae(r, 0 * r, [1, 1, 1], 1.0, 0.9, length_alpha=0.05)  # at least 0
    np.testing.assert_allclose(got, r)


def test_whitening():
    x = [np.array([999.9990, np.nan]), np.array([1000.0, 1000.0010])]
    got = np.concatenate(advantages.whiten(x, [[1, 0], [1, 1]], epsilon=0.0))
    np.testing.assert_allclose(got, [-1, 0, 0, 1], atol=1e-9)
    kept = np.concatenate(advantages.whiten(x, [[1, 0], [1, 1]], epsilon=0.0, shift_mean=False))
    np.testing.assert_allclose(kept, [999, 0, 1000, 1001], rtol=1e-12)
    got = advantages.reinforce_plus_plus_baseline(
        [3.0, 1.0], [0, 0], [[1], [1]], kls=[[0.5], [0.5]], kl_coef=2.0
    )
    np.testing.assert_allclose(np.concatenate(got), [0.5**0.5, -(0.5**0.5)], rtol=1e-9)
    got = advantages.on_policy_distillation(
        [1.0, np.nan], [-2.0, np.nan], [-1.5, np.nan], [1, 0], 2.0
    )
    np.testing.assert_allclose(got, [2, 0])
    own = np.log([0.5, 0.2, 1.0, 0.4])
    teacher = np.log([0.8, 0.1, 0.5, 0.3])
    got = advantages.importance_weighted_distillation(own, teacher, [1, 1, 0, 1])
    weights = [1.5, 1.338023, 1.099144]
    d = [0.470004, -0.693147, -0.287682]
    np.testing.assert_allclose(got[[0, 1, 3]], np.multiply(weights, d), rtol=2e-6)
    np.testing.assert_allclose(-(got * own)[[0, 1, 3]].mean(), -0.431243, rtol=1e-5)


def test_a_teacher_that_is_mixed_with_the_policy():
    """p = 0.4 against 0.8, 0.1 and nothing: 0.2 of the teacher and 0.8 of the policy are 1.2,
    0.85 and 0.8 times p.
    """
    own = np.log([0.4, 0.4, 1.0, 0.4])
    teacher = np.log([0.8, 0.1, 0.5, 1e-300])
    got = advantages.on_policy_distillation(np.zeros(4), own, teacher, [1, 1, 0, 1], alpha=0.2)
    np.testing.assert_allclose(got, [*np.log([1.2, 0.85]), 0, np.log(0.8)], rtol=1e-12)
    got = advantages.trust_region_credit(own, teacher, [1, 1, 0, 1], 0.2)
    later = [(np.log(0.85) + np.log(0.8)) / 2, np.log(0.8), 0, 0]
    np.testing.assert_allclose(
        got, np.add([*np.log([1.2, 0.85]), 0, np.log(0.8)], later), rtol=1e-12
    )


def test_a_sampled_tail():
    """One id with p = 0.5 and q = 0.4; the drawn token has 0.3 and 0.4, or is that id."""
    of_id = 0.5 * np.log(1.25) - 0.1
    ratio = np.log(0.75)
    value, slopes = sampled_tail(np.log([0.5, 0.3]), np.log([0.4, 0.4]), -1)
    np.testing.assert_allclose(
        [value, *slopes], [of_id + 1 / 3 + ratio, 0.5 * np.log(1.25), ratio], rtol=1e-12
    )
    np.testing.assert_allclose(value, 0.057223, rtol=1e-5)
    value, slopes = sampled_tail(np.log([0.5, 0.5]), np.log([0.4, 0.4]), 0)
    np.testing.assert_allclose([value, *slopes], [of_id, 0.5 * np.log(1.25), 0], rtol=1e-12)


def test_other_losses():
    s = OracleSample(
        [1, 1, 1],
        values=np.zeros(3),
        returns=np.array([1.0, 1, -1]),
        new_values=np.array([0.1, 0.5, 0.5]),
    )
    loss, gradients, metrics = value_loss([s], clip=0.2)
    np.testing.assert_allclose(loss, (0.81 + 0.64 + 2.25) / 6)
    np.testing.assert_allclose(gradients[0], [-0.3, 0, 0.5])
    assert metrics["clip_fraction"] == 1 / 3
    assert value_loss([s], clip_fraction="outside")[2]["clip_fraction"] == 2 / 3
    s = OracleSample([1], np.array([-2.0]), log_z=np.array([3.0]), mean_logit=np.array([-1.0]))
    np.testing.assert_allclose(sft_loss([s], label_smoothing=0.25, z_loss=0.5)[0], 1.5 + 1 + 4.5)
    ahead = shifted(OracleSample([1, 0, 1, 1], targets=np.array([5, 6, 7, 8])), 1)
    np.testing.assert_array_equal([ahead.targets, ahead.here], [[6, 7, 8, 0], [0, 1, 1, 0]])
    flat = OracleHead(np.zeros((2, 8)))
    s = OracleSample([1, 1, 1, 0], targets=np.array([1, 2, 3, -100]))
    loss, _, _, metrics = mtp_loss([s], [[np.zeros((4, 2))]] * 2, flat, coef=0.5)
    np.testing.assert_allclose([loss, metrics["mtp_2_nll"]], [0.5 * np.log(8), np.log(8)])
    assert abs(adaptive_kl_coef(0.1, 6.0, 3.0, 1000) - 0.102) < 1e-12
    p = np.array([0.5, 0.5])
    q = np.array([0.25, 0.75])
    by_hand = {
        "reverse_kl": np.sum(p * np.log(p / q)),
        "forward_kl": np.sum(q * np.log(q / p)),
        "jensen_shannon": np.sum(
            0.5 * p * np.log(p / (p + q) * 2) + 0.5 * q * np.log(q / (p + q) * 2)
        ),
    }
    for kind, value in by_hand.items():
        np.testing.assert_allclose(
            divergence(np.log(p)[None], np.log(q)[None] + 3, kind)[0], [value]
        )
