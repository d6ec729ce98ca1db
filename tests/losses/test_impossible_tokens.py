"""Tokens that a policy gives a log-prob of -inf: the loss is NaN, or leaves them out, on every path."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import OracleHead
from oracle.step import with_stats
from policy_steps import quick_jit
from random_losses import BASE, check_metrics, of_jaxppo
from random_steps import Drawn, Place, Step, agree, batch_of, step_samples, to_rows, to_samples
from tables import sampled

from jaxppo import (
    KL,
    Head,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    TokenStats,
    accumulate_gradients,
    explain_broken_rules,
    finalize_metrics,
    log_probs_from_hidden,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.losses.covariance import covariance_mask
from jaxppo.losses.policy_tokens import PolicyTokenLoss
from jaxppo.policy_losses import KLCov
from sharding.audit import audit

H, V = 6, 40
GONE = (3, 7, 8, 30)  # columns of bias -inf
STEP = Step(
    tuple(Drawn(2 + i % 2, (1, 1, 0, 1, 1, 1, 1, 0, 1)[i % 4 :], i, 7 + i // 2, i // 2) for i in range(8)),
    5,
    0.3,
    "by token",
    float("nan"),
)
CONFIG = BASE | {"kl": {"coef": 0.25, "estimator": "k3", "importance": "token"}, "impossible_tokens": "leave_out"}
TIS = {"weights": "token", "low": 0.0, "high": 1.25, "outside": "clamp", "rejections": ()}
CONFIGS = {
    "ppo": {},
    "metrics as the loss": {"metric_aggregation": "loss", "aggregation": "rollout_mean"},
    "gspo": {"loss": {"name": "gspo", "clip_low": 0.01, "clip_high": 0.02}},
    "gmpo": {"loss": {"name": "gmpo", "clip_low": 0.1, "clip_high": 0.2}},
    "dppo_kl": {"loss": {"name": "dppo_kl", "clip_low": 0.05, "clip_high": 0.1, "ratio_cap": 5.0}},
    "over the sampler": {"ratio_to": "rollout"},
    "on policy": {"ratio_to": "current", "loss": {"name": "cispo", "clip_low": 0.2, "clip_high": 0.25}},
    "weights of tokens": {"off_policy": TIS | {"batch_normalize": True}},
    "weights of sequences": {"off_policy": TIS | {"weights": "sequence", "batch_normalize": True}},
    "rejected sequences": {
        "off_policy": {"rejections": ({"statistic": "seq_mean_k3", "low": 0.0, "high": 0.04},), "opsm_delta": 0.0}
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
CASES = [(config, path) for config in CONFIGS for path in PATHS]


def make_step():
    """Samples with hidden states, their statistics, and the head. The head makes some targets impossible."""
    rng = np.random.default_rng(0)
    kernel, bias = (rng.normal(size=n).astype(np.float32) for n in ((H, V), V))
    bias[list(GONE)] = -np.inf
    head = OracleHead(kernel.astype(np.float64), bias.astype(np.float64))
    samples = []
    for s in step_samples(STEP, impossible=True):
        targets = rng.integers(0, V, len(s.mask))
        found = dataclasses.replace(s, hidden=rng.normal(size=(len(s.mask), H)).astype(np.float32), targets=targets)
        # old log-probs near the policy's, except for those of -inf
        own = with_stats([found], head)[0].log_probs
        near = {}
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
            moved = np.where(np.isfinite(own), own, -1) + 0.3 * rng.normal(size=len(own))
            near[name] = np.where(np.isneginf(getattr(s, name)), -np.inf, np.minimum(moved, -0.01).astype(np.float32))
        samples.append(dataclasses.replace(found, **near))
    return samples, head


SAMPLES, HEAD = make_step()


def program(config: PolicyLossConfig, path: str, place: Place):
    """A function of (params, batch): loss, gradients by hidden states, kernel and bias, and metrics."""
    parallel, memory = place.parallel, PATHS[path].get("memory")

    def loss_of(params, batch, normalizer):
        head, options = Head(params["kernel"], params["bias"]), {"parallel": parallel}
        if memory is not None:
            options |= {"normalizer": normalizer, "memory": memory}
            return policy_loss_from_hidden(params["hidden"], head, batch, config, **options)
        where, entropy = batch.loss_mask > 0, config.entropy_mode
        stats = log_probs_from_hidden(params["hidden"], head, batch.targets, entropy=entropy, where=where, **options)
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
    return Place(options.get("mesh"), False, "contiguous", False, 16, 8, 2, options.get("micro_batches"))


def given_to(path: str):
    """The parameters and the batch."""
    batch = batch_of(STEP, SAMPLES, place_of(path))
    hidden = to_rows(batch, SAMPLES, [s.hidden for s in SAMPLES], np.nan)
    return {"hidden": hidden, "kernel": HEAD.kernel.astype(np.float32), "bias": HEAD.bias.astype(np.float32)}, batch


@pytest.mark.every(10)
@pytest.mark.parametrize(("name", "path"), sampled(CASES, lambda i, case: (i // 6 + i) % 6 in (1, 3) or i < 6))
def test_they_are_left_out(name, path):
    config = CONFIG | CONFIGS[name]
    params, batch = given_to(path)
    loss, gradient, found = quick_jit(program(of_jaxppo(config), path, place_of(path)))(params, batch)
    expected, by_hidden, by_head = oracle.policy_loss_from_hidden(SAMPLES, HEAD, config)
    assert 5 < expected.metrics["impossible_tokens"] < sum(s.count for s in SAMPLES) - 5
    check_metrics(loss, found, expected, config, 3e-5)
    size = 10 * expected.weights.max()
    for i, (x, y) in enumerate(zip(to_samples(batch, SAMPLES, gradient["hidden"]), by_hidden, strict=True)):
        agree(f"gradient of hidden states of sample {i}", x, y, size, 3e-5)
    for what in ("kernel", "bias"):
        agree(f"gradient of {what}", gradient[what], getattr(by_head, what), size, 3e-5)


def test_by_default_each_of_them_makes_the_loss_nan():
    batch = batch_of(STEP, SAMPLES, place_of("statistics"))
    of_all = np.full_like(batch.loss_mask, -1)
    sound = dataclasses.replace(batch, old_log_probs=of_all, rollout_log_probs=of_all)
    log_probs = jnp.full(batch.loss_mask.shape, -1.0)
    at = tuple(np.argwhere(batch.loss_mask > 0)[3])
    spoilt = {name: np.array(sound.old_log_probs) for name in ("log_probs", "old_log_probs", "rollout_log_probs")}
    for x in spoilt.values():
        x[at] = -np.inf
    ways = {
        "log_probs": (TokenStats(jnp.asarray(spoilt["log_probs"])), sound),
        "old_log_probs": (TokenStats(log_probs), dataclasses.replace(sound, old_log_probs=spoilt["old_log_probs"])),
        "rollout_log_probs": (
            TokenStats(log_probs),
            dataclasses.replace(sound, rollout_log_probs=spoilt["rollout_log_probs"]),
        ),
    }
    for name, (stats, batch) in ways.items():
        ratio_to = "rollout" if name == "rollout_log_probs" else "old"
        loss, found = policy_loss(stats, batch, PolicyLossConfig(ratio_to=ratio_to))
        assert np.isnan(loss), name
        assert "impossible_tokens" not in found
        (line,) = explain_broken_rules(found["broken_rules"].value)
        assert line.startswith(f"{name}: expected finite log-probs")
        assert "see PolicyLossConfig.impossible_tokens" in line
        kept, found = policy_loss(stats, batch, PolicyLossConfig(impossible_tokens="leave_out"))
        assert np.isfinite(kept), name
        assert (float(found["impossible_tokens"].value), int(found["broken_rules"].value)) == (1.0, 0)
    loss, found = policy_loss(*ways["rollout_log_probs"], PolicyLossConfig())  # which only metrics read
    assert np.isfinite(loss)
    assert not np.isfinite(found["sampler_k3"].value)


def test_what_else_is_broken_still_is():
    """NaN is not -inf, and a token is not left out because of the reference's -inf."""
    samples = [Sample([1, 2, 3, 4], 1, advantages=[1.0] * 3, old_log_probs=[-1.0] * 3, ref_log_probs=[-1.0] * 3)]
    batch = RolloutBatch.from_samples(samples, row_length=4)
    config = PolicyLossConfig(kl=KL(0.1), impossible_tokens="leave_out")
    log_probs = jnp.full((1, 4), -1.0)
    nan, low = (log_probs.at[0, 1].set(x) for x in (jnp.nan, -jnp.inf))
    for stats, its in ((nan, batch), (log_probs, dataclasses.replace(batch, ref_log_probs=low))):
        loss, found = policy_loss(TokenStats(stats), its, config)
        assert np.isnan(loss)
        assert "log_probs: expected finite" in explain_broken_rules(found["broken_rules"].value)[0]
    loss, _ = policy_loss(TokenStats(low), dataclasses.replace(batch, ref_log_probs=low), config)
    assert float(loss) == pytest.approx(-2 / 3)


def test_a_step_of_impossible_tokens_alone_is_zero():
    batch = batch_of(STEP, SAMPLES, place_of("statistics"))
    stats = TokenStats(jnp.full(batch.loss_mask.shape, -jnp.inf), jnp.ones(batch.loss_mask.shape))
    config = PolicyLossConfig(entropy_coef=0.1, impossible_tokens="leave_out")
    (loss, found), gradient = jax.value_and_grad(policy_loss, has_aux=True)(stats, batch, config)
    assert float(loss) == 0
    assert not any(np.any(x) for x in jax.tree.leaves(gradient))
    assert float(found["impossible_tokens"].value) == batch.loss_mask.sum()
    assert float(found["ratio_mean"].value) == 0


def test_selection_leaves_them_out():
    """The first of the three others has the highest covariance, (-1 - 1)(-2 + 4/3); one is picked, and not two."""
    samples = [Sample([1, 2, 3, 4, 5], 1, advantages=[9.0, -1.0, 2.0, 2.0], old_log_probs=[-1.0] * 4)]
    batch = RolloutBatch.from_samples(samples, row_length=5)
    stats = TokenStats(jnp.array([[-jnp.inf, -2.0, -1.0, -1.0, 0.0]]))
    config = PolicyLossConfig(KLCov(share=0.5), impossible_tokens="leave_out")
    assert covariance_mask(stats, batch, config, jax.random.key(0)).tolist() == [[0, 1, 0, 0, 0]]


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
    """Not with weights of sequences: they would include a token before the pass finds it impossible."""
    config = PolicyLossConfig(off_policy=off_policy, impossible_tokens="leave_out")
    assert PolicyTokenLoss(config).token_local is one_pass
    assert PolicyTokenLoss(dataclasses.replace(config, impossible_tokens="nan")).token_local


def test_an_option_that_is_none():
    with pytest.raises(ValueError, match=r"impossible_tokens: got 'mask', expected one of 'nan', 'leave_out'"):
        PolicyLossConfig(impossible_tokens="mask")


def test_the_paths_are_what_they_say():
    for path in ("one pass", "two passes"):
        notes = audit(program(of_jaxppo(CONFIG), path, place_of(path)), *given_to(path)).notes
        assert notes[0].startswith(path), notes
