"""Checks of the oracle: every gradient by finite differences, and changes that must not matter.

See test_oracle_by_hand.py and test_oracle_golden.py for its values.
"""

from dataclasses import fields, replace

import numpy as np
import pytest

from oracle import OracleHead, OracleSample, policy_loss, policy_loss_from_hidden
from oracle.head import head_gradient, logit_gradient, logits, token_stats
from oracle.kl import ESTIMATORS, kl_divergence
from oracle.other_losses import divergence, mismatch_metrics, mtp_loss, sft_loss, value_loss
from oracle.policy_losses import LOSSES, Tokens
from oracle.step import through_head, with_stats

AGGREGATIONS = [
    {"aggregation": "token_mean"},
    {"aggregation": "token_sum"},
    {"aggregation": "sequence_mean_token_sum"},
    {"aggregation": "sequence_mean_token_mean"},
    {"aggregation": "sequence_mean_token_sum_norm", "aggregation_norm": 7.0},
    {"aggregation": "rollout_mean"},
]
OFF_POLICY = {
    "token": {"weights": "token", "low": 0.7, "high": 1.3},
    "icepop": {"weights": "token", "low": 0.7, "high": 1.3, "outside": "zero"},
    "sequence": {"weights": "sequence", "high": 1.5, "batch_normalize": True},
    "geometric": {"weights": "geometric", "low": 0.9, "high": 1.1, "compares": "current/rollout"},
    "rejections": {
        "rejections": (
            {"statistic": "token_k1", "low": 0.6, "high": 1.6},
            {"statistic": "seq_mean_k3", "high": 0.2},
        ),
        "veto": 0.2,
    },
    "opsm": {"opsm_delta": 0.01, "opsm_compares": "current/rollout"},
    "runs": {
        "rejections": (
            {"statistic": "run_mean_k1", "low": 0.7, "high": 1.3, "compares": "current/rollout"},
            {"statistic": "seq_min_k1", "low": 0.4},
            {"statistic": "run_mean_diff", "low": -0.2, "high": 0.2},
        )
    },
}
VARIANTS = [
    *({"loss": name} for name in LOSSES),
    {"loss": {"name": "ppo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}},
    {"loss": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.3, "dual_clip": 1.2}},
    {"loss": {"name": "gspo", "gradient": "token", "clip_low": 0.3, "clip_high": 0.9}},
    {"loss": {"name": "gspo", "clip_low": 0.9, "clip_high": 9.0}},
    {"loss": {"name": "sapo", "tau_positive": 2.0, "tau_negative": 3.0}},
    {"loss": {"name": "sapo", "tau_positive": 2.0, "level": "sequence"}},
    {"loss": {"name": "cispo", "clip_low": 0.05, "clip_high": 0.1, "unified_mask": True}},
    {
        "loss": {
            "name": "cispo",
            "clip_low": 0.05,
            "clip_high": 0.1,
            "level": "sequence",
            "unified_mask": True,
        }
    },
    {
        "loss": {
            "name": "probability_mask",
            "clip_low": 0.02,
            "clip_high": 0.05,
            "ratio_cap": 1.2,
            "pull": 0.1,
        }
    },
    {"loss": {"name": "aspo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2}},
    {"loss": {"name": "gmpo", "clip_low": 0.4, "clip_high": 0.5}},
    *(
        {"kl": {"coef": 0.3, "estimator": e, "importance": i}}
        for e in ESTIMATORS
        if "+" not in e
        for i in ("none", "token", "sequence", "score")
    ),
    *(a | {"kl": {"coef": 0.1}, "entropy_coef": 0.2} for a in AGGREGATIONS),
    *(
        {"loss": loss, "off_policy": o, "entropy_coef": 0.1}
        for o in OFF_POLICY.values()
        for loss in ("ppo", "gspo")
    ),
    *({"ratio_to": r, "kl": {"coef": 0.2, "importance": "token"}} for r in ("rollout", "current")),
]

RULES = [
    {"policy": policy, "denominators": "in", "penalties": penalties}
    for policy in ("weight_0", "ratio_1")
    for penalties in ("in", "out")
]
RULES += [{"policy": "weight_0", "denominators": "out", "penalties": "out"}]
OF_REFERENCE = {"coef": 0.3, "estimator": "k3", "importance": "token"}
UNUSABLE_VARIANTS = [
    *({"loss": name} for name in ("ppo", "gspo", "cispo", "gmpo", "sapo")),
    {"kl": OF_REFERENCE, "entropy_coef": 0.1},
    {"kl": OF_REFERENCE | {"importance": "sequence", "estimator": "k2"}, "entropy_coef": 0.1},
    {
        "ratio_to": "rollout",
        "kl": OF_REFERENCE | {"importance": "sequence", "compares": "current/rollout"},
    },
    *({"off_policy": options, "loss": "reinforce"} for options in OFF_POLICY.values()),
]


def make_step(seed=0, spread=0.4):
    """Uneven samples with masked tokens, one without any loss token, two in one rollout; NaN
    where nothing is read.
    """
    rng = np.random.default_rng(seed)
    masks = [[0, 1, 1, 0, 1], [1, 1], [0, 0, 0], [1, 0, 1, 1, 1, 1, 0], [1]]
    samples = []
    for i, mask in enumerate(masks):
        here = np.array(mask) > 0

        def hide(x, here=here):
            return np.where(here, x, np.nan)

        def near(x, hide=hide):
            return hide(x + spread * rng.normal(size=len(x)))

        log_probs = hide(-rng.exponential(1.0, len(mask)) - 0.1)
        values = hide(rng.normal(size=len(mask)))
        old, ref, rollout = (np.minimum(near(log_probs), -0.01) for _ in range(3))
        samples.append(
            OracleSample(
                mask,
                log_probs,
                hide(rng.uniform(0, 3, len(mask))),
                old,
                ref,
                rollout,
                hide(rng.normal(size=len(mask))),
                values,
                near(values),
                near(values),
                selected=rng.random(len(mask)) < 0.4,
                rollout_id=[7, 9, 7, 7, 9][i],
                sample_id=i,
            )
        )
    return samples


def unusable(samples):
    """The step with log-probs that are not finite: in some samples, in one with a single token,
    and of each policy.
    """

    def at(s, name, place, value):
        x = np.array(getattr(s, name))
        x[place] = value
        return replace(s, **{name: x})

    samples = list(samples)
    samples[0] = at(samples[0], "rollout_log_probs", 1, np.nan)
    samples[3] = at(at(samples[3], "old_log_probs", 2, -np.inf), "rollout_log_probs", 5, np.inf)
    samples[3] = at(samples[3], "log_probs", 4, -np.inf)
    samples[4] = at(samples[4], "rollout_log_probs", 0, np.nan)
    return samples


def slopes(f, x, step=1e-6):
    """Central differences of the scalar f by every entry of the array x that is finite; NaN
    entries read 0.
    """
    out = np.zeros(np.shape(x))
    for place in np.ndindex(*out.shape):
        if np.isfinite(x[place]):
            ends = []
            for sign in (1, -1):
                moved = np.array(x, np.float64)
                moved[place] += sign * step
                ends.append(f(moved))
            out[place] = (ends[0] - ends[1]) / (2 * step)
    return out


def changed(samples, i, **new):
    """The samples with fields of the i-th replaced."""
    return [replace(s, **new) if j == i else s for j, s in enumerate(samples)]


def agree(got, expected, tolerance=2e-8):
    np.testing.assert_allclose(
        got, expected, rtol=1e-6, atol=tolerance * max(1.0, np.max(np.abs(expected), initial=0))
    )


class TestGradients:
    @pytest.mark.every(3)
    @pytest.mark.parametrize("config", VARIANTS, ids=str)
    def test_policy_loss(self, config):
        samples = make_step()
        held = [s.log_probs for s in samples]
        result = policy_loss(samples, config)
        for i, s in enumerate(samples):
            by_log_probs = slopes(
                lambda x, i=i: policy_loss(changed(samples, i, log_probs=x), config, held).loss,
                held[i],
            )
            by_entropy = slopes(
                lambda x, i=i: policy_loss(changed(samples, i, entropy=x), config).loss, s.entropy
            )
            agree(result.by_log_probs[i], by_log_probs)
            agree(result.by_entropy[i], by_entropy)

    @pytest.mark.every(4)
    @pytest.mark.parametrize("config", UNUSABLE_VARIANTS, ids=str)
    @pytest.mark.parametrize("rule", RULES, ids=str)
    def test_unusable_tokens(self, rule, config):
        samples = unusable(make_step())
        config = config | {"unusable": rule, "aggregation": "sequence_mean_token_mean"}
        held = [s.log_probs for s in samples]
        result = policy_loss(samples, config)
        assert np.isfinite(result.loss)
        for i, s in enumerate(samples):
            by_log_probs = slopes(
                lambda x, i=i: policy_loss(changed(samples, i, log_probs=x), config, held).loss,
                held[i],
            )
            by_entropy = slopes(
                lambda x, i=i: policy_loss(changed(samples, i, entropy=x), config).loss, s.entropy
            )
            agree(result.by_log_probs[i], by_log_probs)
            agree(result.by_entropy[i], by_entropy)

    @pytest.mark.parametrize("shift", [-25.0, 25.0])
    @pytest.mark.parametrize("name", LOSSES)
    def test_policy_losses_far_from_the_old_policy(self, name, shift):
        """Beyond a log-ratio of 20 exp is constant, and its gradient 0: each loss by each
        log-prob of its sequence.
        """
        rng = np.random.default_rng(7)
        x = -30 * rng.random(4) - 30
        a = np.array([1.0, -2, 0.5, -1])
        selected = np.array([1, 0, 0, 1])
        old = x - shift * np.array([1, 1, 0.02, 1.2])
        options = {"gspo": {"clip_high": 1e9}}.get(name, {})
        variants = [options, {**options, "gradient": "token"}] if name == "gspo" else [options]
        for each in variants:

            def loss(y, each=each):
                return LOSSES[name](Tokens(y, old, a, x, selected), **each)

            values, jacobian, _ = loss(x)
            assert np.isfinite(values).all()
            expected = [
                slopes(lambda y, t=t, loss=loss: loss(y).values[t], x) for t in range(len(x))
            ]
            full = jacobian if jacobian.ndim == 2 else np.diag(jacobian)
            rounding = 1e-9 * np.maximum(1.0, np.abs(values))[:, None]
            assert (np.abs(full - expected) <= 1e-6 * np.abs(full) + rounding).all(), each

    @pytest.mark.parametrize("importance", [False, True])
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_kl_at_any_log_ratio(self, estimator, importance):
        d = np.array([-100.0, -25.0, -19.0, -3.0, -0.5, 0.3, 5.0, 15.0, 25.0, 100.0])
        ref = np.full(len(d), -1.5)
        sampling = d - 1.5 - np.linspace(-1, 1, len(d)) if importance else None
        value, slope = kl_divergence(ref + d, ref, estimator, sampling)
        assert np.isfinite([value, slope]).all()
        w = np.exp(ref + d - sampling) if importance else np.ones(len(d))
        if "+" in estimator:
            expected = w * d
        else:  # one token at a time: beside a value of 1e10 the slope of another is lost
            each = [None if sampling is None else sampling[i : i + 1] for i in range(len(d))]

            def moved(x, i):
                return kl_divergence(x, ref[i : i + 1], estimator, each[i])[0][0]

            expected = [
                slopes(lambda x, i=i: moved(x, i), (ref + d)[i : i + 1])[0] for i in range(len(d))
            ]
        rounding = 1e-9 * np.maximum(1.0, np.abs(value))  # of a difference of values over 2e-6
        assert (np.abs(slope - expected) <= 1e-6 * np.abs(slope) + rounding).all()
        agree(kl_divergence(ref + d, ref, estimator.removesuffix("+"), sampling)[0], value)

    @pytest.mark.parametrize("nucleus", [None, "ids", "mask"])
    def test_logits(self, nucleus):
        rng = np.random.default_rng(1)
        z = rng.normal(size=(3, 6)) * 2
        y = np.array([0, 5, 2])
        g, e, c, u = rng.normal(size=(4, 3))
        if nucleus == "ids":
            nucleus = np.array([[0, 1, -1], [2, 3, -1], [-1, -1, -1]])
        elif nucleus == "mask":
            nucleus = rng.random((3, 6)) < 0.5

        def weigh(x):
            s = token_stats(x, y, nucleus)
            return np.sum(g * s.log_probs + e * s.entropy + c * s.log_z + u * s.mean_logit)

        agree(logit_gradient(z, y, g, e, c, u, nucleus), slopes(weigh, z))

    @pytest.mark.parametrize("softcap", [None, 2.5])
    def test_head(self, softcap):
        rng = np.random.default_rng(2)
        arrays = {
            "kernel": rng.normal(size=(4, 7)),
            "bias": rng.normal(size=7),
            "a": rng.normal(size=(4, 2)),
            "b": rng.normal(size=(2, 7)),
        }
        for name in ("kernel", "bias", "b"):  # columns that do not exist
            arrays[name][..., 5:] = np.nan
        head = OracleHead(**arrays, lora_scale=0.5, softcap=softcap, scale=0.7, vocab_size=5)
        hidden = rng.normal(size=(3, 4))
        temperature = np.array([1.0, 0.5, 2.0])
        weights = rng.normal(size=(3, 5))
        by_hidden, by_head = head_gradient(hidden, head, weights, temperature)
        agree(by_hidden, slopes(lambda x: np.sum(weights * logits(x, head, temperature)), hidden))
        for name, x in arrays.items():
            moved = slopes(
                lambda x, name=name: np.sum(
                    weights * logits(hidden, replace(head, **{name: x}), temperature)
                ),
                x,
            )
            agree(getattr(by_head, name), moved)

    def test_policy_loss_from_hidden(self):
        rng = np.random.default_rng(3)
        head = OracleHead(0.5 * rng.normal(size=(3, 6)), softcap=4.0)
        samples = [
            replace(
                s,
                hidden=np.where(s.here[:, None], rng.normal(size=(len(s.mask), 3)), np.nan),
                targets=np.where(s.here, rng.integers(0, 6, len(s.mask)), -100),
                nucleus_ids=rng.integers(-1, 6, (len(s.mask), 2)),
                temperature=rng.uniform(0.5, 2, len(s.mask)),
            )
            for s in make_step()
        ]
        config = {
            "loss": "gspo",
            "entropy_coef": 0.3,
            "kl": {"coef": 0.2},
            "aggregation": "rollout_mean",
        }
        result, by_hidden, by_head = policy_loss_from_hidden(samples, head, config)

        def loss(s, h):
            return policy_loss_from_hidden(s, h, config)[0].loss

        assert result.loss == loss(samples, head)
        for i, s in enumerate(samples):
            agree(
                by_hidden[i],
                slopes(lambda x, i=i: loss(changed(samples, i, hidden=x), head), s.hidden),
            )
        agree(by_head.kernel, slopes(lambda x: loss(samples, replace(head, kernel=x)), head.kernel))

    @pytest.mark.parametrize("clip", [None, 0.2])
    def test_value_loss(self, clip):
        samples = make_step()
        options = {"clip": clip, "factor": 0.7, "aggregation": "sequence_mean_token_mean"}
        _, gradients, _ = value_loss(samples, **options)
        for i, s in enumerate(samples):
            moved = slopes(
                lambda x, i=i: value_loss(changed(samples, i, new_values=x), **options)[0],
                s.new_values,
            )
            agree(gradients[i], moved)

    def test_sft_loss_to_hidden(self):
        rng = np.random.default_rng(4)
        head = OracleHead(rng.normal(size=(3, 6)))
        samples = [
            OracleSample(m, hidden=rng.normal(size=(len(m), 3)), targets=rng.integers(0, 6, len(m)))
            for m in ([1, 0, 1], [1, 1])
        ]
        options = {
            "label_smoothing": 0.2,
            "z_loss": 0.05,
            "aggregation": "sequence_mean_token_mean",
        }
        _, by_stats, _ = sft_loss(with_stats(samples, head), **options)
        by_hidden, by_head = through_head(samples, head, by_stats)
        # a token adds one term to each number of the kernel's gradient
        alone = [replace(samples[0], mask=np.eye(3)[i]) for i in (0, 2)]
        tokens = [{name: g[i : i + 1] for name, g in by_stats[0].items()} for i in range(2)]
        terms = through_head(samples[:1], head, by_stats[:1], sizes=True)[1].kernel
        agree(
            terms,
            sum(
                np.abs(through_head([s], head, [g])[1].kernel)
                for s, g in zip(alone, tokens, strict=True)
            ),
        )

        def loss(s, h):
            return sft_loss(with_stats(s, h), **options)[0]

        agree(by_head.kernel, slopes(lambda x: loss(samples, replace(head, kernel=x)), head.kernel))
        agree(
            by_hidden[0],
            slopes(lambda x: loss(changed(samples, 0, hidden=x), head), samples[0].hidden),
        )

    def test_mtp_loss(self):
        rng = np.random.default_rng(5)
        heads = [
            OracleHead(rng.normal(size=(3, 6))),
            OracleHead(rng.normal(size=(3, 6)), softcap=3.0),
        ]
        samples = [
            OracleSample(m, targets=rng.integers(0, 6, len(m))) for m in ([0, 1, 1, 0, 1], [1])
        ]
        hidden = [[rng.normal(size=(len(s.mask), 3)) for s in samples] for _ in heads]
        _, by_hidden, by_head, _ = mtp_loss(samples, hidden, heads, coef=0.7)

        def loss(k, states, kernel):
            """With the first sample's hidden states and the kernel of depth k replaced."""
            moved = [[states, h[1]] if j == k else h for j, h in enumerate(hidden)]
            others = [replace(h, kernel=kernel) if j == k else h for j, h in enumerate(heads)]
            return mtp_loss(samples, moved, others, coef=0.7)[0]

        for k, head in enumerate(heads):
            mine = hidden[k][0]
            agree(
                by_hidden[k][0], slopes(lambda x, k=k, kernel=head.kernel: loss(k, x, kernel), mine)
            )
            agree(
                by_head[k].kernel, slopes(lambda x, k=k, mine=mine: loss(k, mine, x), head.kernel)
            )

    @pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jensen_shannon"])
    def test_divergence(self, kind):
        rng = np.random.default_rng(6)
        student = rng.normal(size=(3, 5))
        teacher = rng.normal(size=(3, 5))
        weights = rng.normal(size=3)
        value, gradient = divergence(student, teacher, kind, 0.3)
        assert (value > 0).all()
        moved = slopes(lambda x: np.sum(weights * divergence(x, teacher, kind, 0.3)[0]), student)
        agree(weights[:, None] * gradient, moved)
        agree(divergence(teacher, teacher, kind, 0.3)[0], np.zeros(3))


class TestInvariances:
    @pytest.mark.parametrize("config", VARIANTS, ids=str)
    def test_order_of_samples(self, config):
        samples = make_step()
        forward = policy_loss(samples, config)
        backward = policy_loss(samples[::-1], config)
        for name, value in forward.metrics.items():
            np.testing.assert_allclose(backward.metrics[name], value, rtol=1e-12, err_msg=name)
        for one, other in zip(forward.by_log_probs, backward.by_log_probs[::-1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15)

    def test_masked_positions_never_matter(self):
        config = {
            "loss": "gspo",
            "kl": {"coef": 0.1},
            "entropy_coef": 0.1,
            "off_policy": OFF_POLICY["token"],
        }
        samples = make_step()
        bare = []
        for s in samples:
            arrays = {f.name: getattr(s, f.name) for f in fields(s)}
            bare.append(
                OracleSample(
                    **{
                        k: np.asarray(v)[s.here] if np.ndim(v) == 1 else v
                        for k, v in arrays.items()
                    }
                )
            )
        with_holes = policy_loss(samples, config)
        without = policy_loss(bare, config)
        assert with_holes.metrics == without.metrics
        assert not any(np.isnan(g).any() for g in with_holes.by_log_probs)

    def test_a_step_without_loss_tokens(self):
        samples = [replace(s, mask=np.zeros(len(s.mask))) for s in make_step()]
        for config in VARIANTS:
            result = policy_loss(samples, config)
            assert result.loss == result.metrics["ratio_mean"] == 0
            assert result.metrics["ratio_min"] == np.inf
            assert not any(g.any() for g in result.by_log_probs)

    def test_an_unknown_option_is_an_error(self):
        samples = make_step()
        for config in ({"aggregate": "token_sum"}, {"off_policy": {"wieghts": "token"}}):
            with pytest.raises(ValueError, match="got"):
                policy_loss(samples, config)
        with pytest.raises(TypeError):
            policy_loss(samples, {"loss": {"name": "ppo", "beta": 1.0}})

    def test_mismatch_of_equal_policies(self):
        samples = [replace(s, rollout_log_probs=s.old_log_probs) for s in make_step()]
        got = mismatch_metrics(samples)
        for name in (
            "kl",
            "k3_kl",
            "chi2_token",
            "chi2_sequence",
            "log_ppl_diff",
            "log_prob_abs_diff",
        ):
            assert got[name] == 0
        assert got["ppl_ratio"] == 1
        assert got["trainer_ppl"] == got["rollout_ppl"] > 1
