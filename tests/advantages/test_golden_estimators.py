"""The reference vectors of estimators, value and SFT losses and off-policy correction, on one
device and on a mesh.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import Packing, Padded, Ragged, load_cases, parametrize_cases

from jaxppo import (
    SFT,
    Head,
    Normalizer,
    OffPolicyConfig,
    Rejection,
    Value,
    advantages,
    finalize_metrics,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_stats,
)
from jaxppo.mismatch import mismatch_metrics
from jaxppo.policy.off_policy import correction
from sharding import make_parallel_mesh, segment_sum, shard_call
from sharding.testing import assert_trees_close

MESHES = [None, "dp=2,cp=2,tp=2"]
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
}


def pytest_generate_tests(metafunc):
    parametrize_cases(metafunc, "slime_value", "slime", "value_loss_function")
    parametrize_cases(metafunc, "slime_sft", "slime", "sft_loss_function")
    parametrize_cases(metafunc, "slime_whiten", "slime", "distributed_masked_whiten")
    parametrize_cases(metafunc, "slime_gae", "slime", "get_advantages_and_returns")
    parametrize_cases(metafunc, "slime_reinforce", "slime", "get_reinforce_plus_plus")
    parametrize_cases(metafunc, "slime_log_probs", "slime", "calculate_log_probs_and_entropy")
    parametrize_cases(metafunc, "verl_value", "verl", "compute_value_loss")
    parametrize_cases(metafunc, "verl_gae", "verl", "compute_gae")
    parametrize_cases(metafunc, "verl_outcome", "verl", "_outcome_advantage")
    parametrize_cases(metafunc, "verl_weights", "verl", "compute_rollout_correction_weights")
    parametrize_cases(metafunc, "verl_rejection", "verl", "compute_rollout_rejection_mask")
    parametrize_cases(metafunc, "verl_mismatch", "verl", "compute_offpolicy_metrics")


@pytest.fixture(params=MESHES, ids=["one", "mesh"])
def parallel(request):
    return None if request.param is None else make_parallel_mesh(request.param)


def assert_close(got, expected):
    assert_trees_close(
        jax.tree.map(jnp.asarray, got), jax.tree.map(jnp.asarray, expected), rtol=1e-5, atol=1e-6
    )


def per_sample_sums(batch, parallel):
    """slime adds up sample means, and divides by the number of samples afterwards."""
    normalizer = Normalizer.of(
        SFT(aggregation="sequence_mean_token_mean"), batch, parallel=parallel
    )
    return dataclasses.replace(normalizer, sequences=jnp.float32(1))


def response_packing(case):
    """slime's response arrays alone, packed: (packing, pack, concatenate)."""
    lengths = tuple(map(int, case.inputs["response_lengths"]))
    packing = Packing(lengths)
    cuts = np.cumsum(lengths)[:-1]
    return (
        packing,
        lambda x: packing.pack(np.split(x, cuts)),
        lambda x: np.concatenate(packing.unpack(x)),
    )


def test_slime_value(slime_value, parallel):
    case = slime_value
    ragged = Ragged.of(slime_value)
    spread = {name: ragged.spread(case.inputs[name], np.nan) for name in ("old_values", "returns")}
    loss_mask = ragged.spread(case.inputs["loss_mask"])
    batch = ragged.packing.batch(loss_mask, values=spread["old_values"], returns=spread["returns"])
    values = ragged.packing.pack(ragged.split(case.inputs["values"]))

    def run(values):
        options = {"clip": case.config["value_clip"], "factor": 1.0, "clip_fraction": "outside"}
        loss = Value(aggregation="sequence_mean_token_mean", metric_aggregation="loss", **options)
        return loss_from_stats(
            values, batch, loss, normalizer=per_sample_sums(batch, parallel), parallel=parallel
        )

    (loss, found), grad = jax.jit(jax.value_and_grad(run, has_aux=True))(values)
    assert_close(loss, case.outputs["loss"])
    assert_close(np.concatenate(ragged.packing.unpack(grad)), case.outputs["grad_values"])
    assert_close(found["clip_fraction"].value, np.float32(case.metrics["value_clipfrac"]))


def test_slime_sft(slime_sft, parallel):
    case = slime_sft
    ragged = Ragged.of(slime_sft)
    batch = ragged.batch(case)
    vocab = case.inputs["logits"].shape[1]

    # tp=2 shards have equal size
    def pad(x):
        return np.pad(x, ((0, 0), (0, 0), (0, vocab % 2)))

    def run(logits):
        loss = SFT(aggregation="sequence_mean_token_mean")
        normalizer = per_sample_sums(batch, parallel)
        where = batch.loss_mask > 0
        stats = log_probs_from_logits(
            logits, batch.targets, parallel=parallel, where=where, vocab_size=vocab
        )
        return loss_from_stats(stats, batch, loss, parallel=parallel, normalizer=normalizer)[0]

    loss, grad = jax.jit(jax.value_and_grad(run))(
        pad(ragged.packing.pack(ragged.split(case.inputs["logits"])))
    )
    assert_close(loss, case.outputs["loss"])
    assert_close(grad[..., :vocab], ragged.packing.pack(ragged.split(case.outputs["grad_logits"])))


@pytest.mark.every(7)
@pytest.mark.parametrize("path", ["logits", "hidden"])
def test_slime_log_probs_and_entropy(slime_log_probs, path, parallel):
    case = slime_log_probs
    count = len(case.inputs["targets"])
    options = {
        "entropy": "bonus" if case.config["with_entropy_grad"] else "metric",
        "parallel": parallel,
    }

    def shape(x, fill=0):
        padded = np.pad(x, ((0, 1),) + ((0, 0),) * (x.ndim - 1), constant_values=fill)
        return padded.reshape(2, 4, *x.shape[1:])

    options["where"] = shape(np.ones(count, bool))
    keep = case.inputs.get("keep_mask")

    def run(logits):
        targets = shape(case.inputs["targets"])
        ids = None if keep is None else shape(np.where(keep, np.arange(keep.shape[1]), -1), -1)
        if path == "logits":
            return log_probs_from_logits(logits, targets, nucleus_ids=ids, **options)
        return log_probs_from_hidden(
            logits,
            Head(jnp.eye(logits.shape[-1]), layout="hv"),
            targets,
            nucleus_ids=ids,
            **options,
        )

    @jax.jit
    def step(logits):
        stats, pullback = jax.vjp(run, logits)
        cotangents = (shape(case.inputs[f"cotangent_{name}"]) for name in ("log_probs", "entropy"))
        of_stats = dataclasses.replace(
            stats, **dict(zip(("log_probs", "entropy"), cotangents, strict=True))
        )
        return stats.log_probs, stats.entropy, *pullback(of_stats)

    got = [
        np.asarray(x).reshape(8, -1)[:count].squeeze()
        for x in step(shape(case.inputs["logits"], np.nan))
    ]
    assert_close(got, [case.outputs[name] for name in ("log_probs", "entropy", "grad_logits")])


def test_slime_gae(slime_gae, parallel):
    case = slime_gae
    packing, pack, concatenate = response_packing(case)
    batch = packing.batch([np.ones(n) for n in packing.lengths])  # slime's GAE ignores the mask
    options = {"gamma": case.config["gamma"], "lam": case.config["lambd"], "parallel": parallel}
    gae = jax.jit(functools.partial(advantages.gae, **options))
    got = gae(pack(case.inputs["rewards"]), pack(case.inputs["values"]), batch)
    assert_close(list(map(concatenate, got)), [case.outputs["advantages"], case.outputs["returns"]])


@pytest.mark.every(3)
def test_slime_reinforce_plus_plus(slime_reinforce, parallel):
    case = slime_reinforce
    packing, pack, concatenate = response_packing(case)
    mask = case.inputs.get("loss_mask", np.ones_like(case.inputs["kl"]))
    batch = packing.batch(
        np.split(mask, np.cumsum(packing.lengths)[:-1]), rewards=case.inputs["rewards"]
    )
    kl = {"kl": pack(case.inputs["kl"]), "kl_coef": case.config["kl_coef"], "parallel": parallel}
    if "returns" in case.outputs:
        options = {"gamma": case.config["gamma"], "masked": "discount", "parallel": parallel}

        @jax.jit
        def got(batch):
            return advantages.discounted_returns(
                advantages.token_rewards(batch.rewards, batch, **kl), batch, **options
            )

        got = got(batch)
        expected = case.outputs["returns"] * case.inputs["loss_mask"]
    else:
        # Upstream's rewards already have their group's mean subtracted.
        options = {"whitened": False, "singletons": "reward"}
        group_ids = batch.sample_ids
        estimate = functools.partial(advantages.reinforce_plus_plus_baseline, **kl, **options)
        got = jax.jit(estimate)(batch.rewards, group_ids, batch)
        expected = case.outputs["advantages"]
    assert_close(concatenate(got), expected)


def test_slime_whiten(slime_whiten, parallel):
    case = slime_whiten

    def shape(x):
        return np.pad(x, (0, 40 - x.size)).reshape(4, 10)

    x = shape(case.inputs["values"])
    mask = shape(case.inputs["mask"])
    whiten = functools.partial(
        advantages.whiten, shift_mean=case.config["shift_mean"], parallel=parallel
    )
    got = jax.jit(whiten)(x, mask)
    assert_close(got, shape(case.outputs["whitened"] * case.inputs["mask"]))


@pytest.mark.every(3)
def test_verl_value(verl_value, parallel):
    case = verl_value
    padded = Padded.of(verl_value)
    batch = padded.batch(case, values=list(case.inputs["old_values"]))

    def run(values):
        aggregation = AGGREGATIONS[case.config["loss_agg_mode"]]
        return loss_from_stats(
            values, batch, Value(clip=0.2, aggregation=aggregation), parallel=parallel
        )

    (loss, found), grad = jax.jit(jax.value_and_grad(run, has_aux=True))(
        padded.pack(case.inputs["values"])
    )
    assert_close(loss, case.outputs["loss"])
    assert_close(padded.pad(grad), case.outputs["grad_values"])
    assert_close(found["clip_fraction"].value, case.outputs["clipfrac"])


@pytest.mark.every(3)
def test_verl_gae(verl_gae, parallel):
    case = verl_gae
    padded = Padded.of(verl_gae)
    batch = padded.batch(case)
    options = {"gamma": case.config["gamma"], "lam": case.config["lam"], "parallel": parallel}
    rewards = padded.pack(case.inputs["rewards"])
    mask = batch.loss_mask

    @jax.jit
    def run(rewards, batch):
        advantage, returns = advantages.gae(rewards, batch.values, batch, **options)
        return advantages.whiten(advantage, mask, parallel=parallel), returns

    got = tuple(map(padded.pad, run(rewards, batch)))
    assert_close(
        got,
        tuple(case.outputs[name] * case.inputs["loss_mask"] for name in ("advantages", "returns")),
    )


def verl_estimate(name, case, batch, parallel):
    """Per-sample estimators by upstream's name, then per-token ones."""
    rewards = batch.rewards
    groups = batch.group_ids
    verl = {"singletons": "reward", "parallel": parallel}
    if name == "grpo":
        scale = case.config["norm_adv_by_std_in_grpo"]
        return advantages.grpo(rewards, groups, scale_by_std=scale, **verl)
    if name == "rloo":
        return advantages.rloo(rewards, groups, **verl)
    if name == "opo":
        lengths = segment_sum(batch.loss_mask, batch.segment_ids, batch.num_segments, parallel)
        return advantages.opo(rewards, groups, lengths, **verl)
    if name == "gpg":
        return advantages.gpg(rewards, groups, f_norm=case.config["f_norm"], **verl)
    if name == "grpo_passk":
        return advantages.pass_at_k(rewards, groups, parallel=parallel)
    if name == "remax":
        baselines = Padded.of(case).packing.per_sample(case.inputs["reward_baselines"], np.nan)
        return advantages.remax(rewards, baselines, batch.sample_ids)
    if name == "reinforce_plus_plus_baseline":
        return advantages.reinforce_plus_plus_baseline(rewards, groups, batch, **verl)
    token_rewards = Padded.of(case).pack(case.inputs["rewards"])
    options = {"gamma": case.config["gamma"], "parallel": parallel}
    assert name == "reinforce_plus_plus"
    return advantages.reinforce_plus_plus(token_rewards, batch, **options)


@pytest.mark.every(5)
def test_verl_outcome_advantages(verl_outcome, parallel):
    case = verl_outcome
    padded = Padded.of(verl_outcome)
    batch = padded.batch(
        case, rewards=case.inputs["rewards"].sum(1), group_ids=case.inputs.get("group")
    )
    name = case.function.removeprefix("compute_").removesuffix("_outcome_advantage")
    got = jax.jit(lambda batch: verl_estimate(name, case, batch, parallel))(batch)
    if got.shape == batch.rewards.shape:
        got = advantages.spread(got, batch, parallel=parallel)
    assert_close(padded.pad(got), case.outputs["advantages"] * case.inputs["loss_mask"])


def correct(case, config, parallel):
    padded = Padded.of(case)
    batch = padded.batch(case)

    def per_shard(axes, batch):
        none = jnp.zeros_like(batch.loss_mask)
        segments = batch.segments(axes)
        old = batch.old_log_probs
        policies = {"current": old, "old": old, "rollout": batch.rollout_log_probs}
        return correction(policies, none, batch.loss_mask, segments, config)[0]

    args = {"batch": batch}

    def run():
        return shard_call(
            "correct", per_shard, parallel, args, lambda p: ([batch.specs(p)], p.tokens_spec)
        )

    return padded.pad(jax.jit(run)()) * case.inputs["loss_mask"]


def test_verl_weights(verl_weights, parallel):
    bounds = str(verl_weights.config["rollout_is_threshold"]).split("_")
    low, high = (0.0, float(bounds[0])) if len(bounds) == 1 else map(float, bounds)
    outside = "clamp" if len(bounds) == 1 else "zero"
    config = OffPolicyConfig(
        weights=verl_weights.config["rollout_is"], low=low, high=high, outside=outside
    )
    assert_close(correct(verl_weights, config, parallel), verl_weights.outputs["weights"])


def test_verl_rejection(verl_rejection, parallel):
    c = verl_rejection.config
    pairs = zip(c["rollout_rs"].split(","), c["rollout_rs_threshold"].split(","), strict=True)
    bounds = [(name, [float(x) for x in threshold.split("_")]) for name, threshold in pairs]
    rejections = [
        Rejection(name, *b) if len(b) == 2 else Rejection(name, high=b[0]) for name, b in bounds
    ]
    weights = correct(verl_rejection, OffPolicyConfig(rejections=rejections), parallel)
    assert_close(weights, verl_rejection.outputs["mask"])


def test_verl_mismatch(verl_mismatch, parallel):
    renamed = {
        "training_ppl": "trainer_ppl",
        "training_log_ppl": "trainer_log_ppl",
        "chi2_seq": "chi2_sequence",
    }
    batch = Padded.of(verl_mismatch).batch(verl_mismatch)
    found = finalize_metrics(jax.jit(functools.partial(mismatch_metrics, parallel=parallel))(batch))
    expected = {renamed.get(k, k): np.float32(v) for k, v in verl_mismatch.metrics.items()}
    assert_close({name: found[name] for name in expected}, expected)


def test_every_case_has_a_test(request):
    """Each vector is read by one of the tests over the vectors."""
    patterns = {
        "slime": (
            "policy_loss_function value_loss_function sft_loss_function distributed_masked_whiten "
            "get_advantages_and_returns get_reinforce_plus_plus calculate_log_probs_and_entropy"
        ),
        "verl": (
            "compute_policy_loss kl_penalty compute_value_loss compute_gae _outcome_advantage"
            " compute_rollout_correction_weights compute_rollout_rejection_mask"
            " compute_offpolicy_metrics"
        ),
    }
    for system, functions in patterns.items():
        for case in load_cases(request.config.getoption("golden"), system):
            assert sum(f in case.function for f in functions.split()) == 1, case.name
