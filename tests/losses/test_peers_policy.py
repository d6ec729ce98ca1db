"""Policy losses and KL weights as other systems computed them, on one device and on a mesh."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import Case, Padded
from policy_steps import quick_jit

from jaxppo import (
    CISPO,
    GSPO,
    KL,
    PPO,
    SAPO,
    SFT,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    advantages,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
    presets,
)
from jaxppo.policy_losses import DRO, VESPO, ProbabilityMask, Reinforce
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

MESHES = [None, "dp=2,cp=2,tp=2"]
RECORDS = json.loads(
    (Path(__file__).parents[1] / "golden" / "peers" / "policy_losses.json").read_text()
)


def of(*systems):
    found = [r for r in RECORDS if r["system"] in systems]
    return pytest.mark.parametrize(
        "record", found, ids=[f"{r['system']} {r['call']}" for r in found]
    )


def case_of(record) -> Case:
    arrays = [
        {k: np.asarray(v, np.float32) for k, v in record[side].items()} for side in ("in", "grad")
    ]
    return Case(record["system"], str(record["call"]), "", record["options"], *arrays)


def trl(options) -> PolicyLossConfig:
    """Their fuzz's epsilon is 0.2 and 0.28, CISPO's upper bound 5, the sampler's cap 1.5."""
    kind = options["kind"]
    level = options["level"]
    clipped = (GSPO if level == "sequence" else PPO)(0.2, 0.28, options["delta"])
    loss = {
        "cispo": CISPO(clip_high=4.0, level=level),
        "sapo": SAPO(level=level),
        "vespo": VESPO(),
    }.get(kind, clipped)
    aggregation = {"grpo": "sequence_mean_token_mean", "dr_grpo": "sequence_mean_token_sum_norm"}
    aggregation |= {"sapo": "sequence_mean_token_mean", "luspo": "sequence_mean_token_sum"}
    off_policy = {}
    if options.get("vllm") is not None and kind != "vespo":  # whose ratio is over the sampler
        off_policy |= {"weights": options["vllm"], "high": 1.5}
    # by the drift from the sampler where there is one, whatever the ratio is over
    if options.get("opsm") is not None:
        compares = "current/old" if options["vllm"] is None else "current/rollout"
        off_policy |= {"opsm_delta": options["opsm"], "opsm_compares": compares}
    return PolicyLossConfig(
        loss,
        kl=KL(options["beta"], "k3", level if options.get("bias") else "none"),
        ratio_to="rollout" if options.get("vllm") and kind == "vespo" else "old",
        aggregation=aggregation.get(kind, "token_mean"),
        aggregation_norm=7.0 if kind == "dr_grpo" else None,
        off_policy=OffPolicyConfig(**off_policy) if off_policy else None,
    )


def nemo(options) -> PolicyLossConfig:
    bounds = options["ratio_clip_min"], options["ratio_clip_max"]
    weight = (
        ("token", "current/rollout")
        if options.get("use_on_policy_kl_approximation")
        else ("score",)
    )
    return PolicyLossConfig(
        CISPO(*bounds) if options["use_cispo"] else PPO(*bounds, options["ratio_clip_c"]),
        kl=KL(options["reference_policy_kl_penalty"], options["reference_policy_kl_type"], *weight),
        ratio_to="current" if options["force_on_policy_ratio"] else "old",
        aggregation=(
            "token_mean" if options["loss_type"] == "TOKEN_LEVEL" else "sequence_mean_token_mean"
        ),
    )


def check(record, config, mesh, step=lambda batch, log_probs: batch):
    """`step` is the batch as an update has it, whose log-probs are given."""
    case = case_of(record)
    parallel = mesh and make_parallel_mesh(mesh)
    padded = Padded.of(case)
    batch = padded.batch(case, rewards=case.inputs.get("rewards"))
    nll_coef = record["options"].get("positive_example_nll_weight", 0.0)

    def run(x):
        loss = policy_loss(TokenStats(x), step(batch, x), config, parallel=parallel)[0]
        return loss + nll_coef * positive_nll(x, batch, parallel) if nll_coef else loss

    found, gradient = quick_jit(jax.value_and_grad(run))(padded.pack(case.inputs["log_probs"]))
    scale = np.abs(case.outputs["log_probs"]).max()
    assert_trees_close(
        np.float32(found), np.float32(record["loss"]), rtol=1e-5, atol=2e-6, context="loss"
    )
    assert_trees_close(
        padded.pad(gradient),
        case.outputs["log_probs"],
        rtol=1e-5,
        atol=2e-6 * scale,
        context="gradient",
    )


def positive_nll(log_probs, batch, parallel):
    """The negative log-likelihood of the samples with a reward above 0: the part "written" of
    the recipe.
    """
    positive = advantages.spread((batch.rewards > 0).astype(np.float32), batch, parallel=parallel)
    masked = dataclasses.replace(batch, loss_mask=batch.loss_mask * positive)
    return loss_from_stats(TokenStats(log_probs), masked, SFT(), parallel=parallel)[0]


@pytest.mark.every(5)
@pytest.mark.parametrize("mesh", MESHES)
@of("trl")
def test_trl(record, mesh):
    check(record, trl(record["options"]), mesh)


@pytest.mark.every(5)
@pytest.mark.parametrize("mesh", MESHES)
@of("nemo")
def test_nemo_kl(record, mesh):
    """exp(x - sg x) on the estimate: the value of k2 is d^2 / 2, its gradient d^2 / 2 + d."""
    check(record, nemo(record["options"]), mesh)


@pytest.mark.every(5)
@pytest.mark.parametrize("mesh", MESHES)
@of("prime-rl")
def test_prime_rl(record, mesh):
    """The vectors are of August 2026: the square was on, and the mask of "default" asked for the
    sign of A.

    Their default dropped A > 0 with p - q > 0.15 and A < 0 with p - q < -0.1. In the first call
    that is the token at -0.18, and not the one at -0.152 with A > 0; in the others it is none.
    Bounds on either side say the same of them.
    """
    config = dataclasses.replace(presets.prime_rl_default(), aggregation="token_sum")
    if record["options"]["kind"] == "default":
        low = 0.16 if record["call"] == 0 else 0.3
        check(
            record,
            dataclasses.replace(
                config, loss=ProbabilityMask(low, 0.3, pull=record["options"]["kl_tau"])
            ),
            mesh,
        )
    else:
        loss = dataclasses.replace(presets.prime_rl_ref_kl().loss, pull=1e-3)
        check(record, dataclasses.replace(config, loss=loss), mesh, towards_the_reference)


def towards_the_reference(batch, log_probs):
    zeros = np.zeros_like(batch.loss_mask)
    reward = advantages.on_policy_distillation(
        zeros, log_probs, batch.ref_log_probs, batch.loss_mask
    )
    return dataclasses.replace(batch, advantages=reward)


@pytest.mark.parametrize("mesh", MESHES)
@of("skyrl")
def test_importance_sampling(record, mesh):
    """SkyRL's has the trainer's old log-probs below the ratio, Tinker's the sampler's."""
    check(record, dataclasses.replace(presets.importance_sampling(), ratio_to="old"), mesh)


@pytest.mark.parametrize("mesh", MESHES)
@of("liger")
def test_liger(record, mesh):
    """From hidden states, to the gradients of those and of the kernel."""
    case = case_of(record)
    parallel = mesh and make_parallel_mesh(mesh)
    padded = Padded.of(case)
    config = trl({**record["options"], "bias": False})
    batch = padded.batch(case, tokens=None)
    batch = dataclasses.replace(
        batch, targets=padded.pack(case.inputs["targets"], 0).astype(np.int32)
    )
    hidden = padded.packing.pack(list(case.inputs["hidden"]), 0)

    def run(hidden, kernel):
        return policy_loss_from_hidden(hidden, kernel, batch, config, parallel=parallel)[0]

    found, (by_hidden, by_kernel) = quick_jit(jax.value_and_grad(run, (0, 1)))(
        hidden, case.inputs["kernel"]
    )
    # which cancel
    terms = np.log(case.inputs["kernel"].shape[1]) * np.abs(case.inputs["advantages"]).max()
    np.testing.assert_allclose(found, record["loss"], rtol=1e-5, atol=1e-6 * terms)
    expected = [
        x[: len(y)]
        for x, y in zip(case.outputs["hidden"], padded.packing.unpack(by_hidden), strict=True)
    ]
    assert_trees_close(
        padded.packing.unpack(by_hidden), expected, rtol=2e-5, atol=5e-6, context="hidden"
    )
    assert_trees_close(
        np.asarray(by_kernel), case.outputs["kernel"], rtol=2e-5, atol=5e-6, context="kernel"
    )


@pytest.mark.parametrize("mesh", MESHES)
@of("skyrl rollout_is")
def test_skyrl_rollout_is(record, mesh):
    """Its reduction is in the advantages, so that the loss is a sum."""
    check(record, dataclasses.replace(presets.rollout_is(), aggregation="token_sum"), mesh)


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("importance_sampling", {}, -6.75),
        ("ppo", {}, -1.9),
        ("cispo", {}, 2.510483),
        # SkyRL's numbers
        ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, 1.528345),
        ("dro", {"beta": 0.05}, 1.702954),
        ("dro", {"beta": 1.0}, 3.479762),
    ],
)
def test_tinker_by_hand(name, numbers, expected):
    """p = (.5, .2, .6, .3), q = (.4, .4, .1, .3), A = (1, 1, 1, -1)."""
    p = np.log([0.5, 0.2, 0.6, 0.3])
    q = np.log([0.4, 0.4, 0.1, 0.3])
    sample = Sample([0, 1, 2, 3, 4], 1, advantages=[1.0, 1.0, 1.0, -1.0], rollout_log_probs=q)
    batch = RolloutBatch.from_samples([sample], row_length=5)
    stats = TokenStats(np.float32([[*p, 0.0]]))
    loss, _ = policy_loss(stats, batch, presets.tinker(name, **numbers))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"loss_fn: got 'stable_reinforce'"):
        presets.tinker("stable_reinforce")
    with pytest.raises(ValueError, match="clip_low_threshold: got None"):
        presets.tinker("gspo", clip_high_threshold=1.2)
    with pytest.raises(ValueError, match="beta: got None"):
        presets.tinker("dro")


def test_tinker_gspo_by_hand():
    """The policies above, A = (1, 0, 1, -1): s is the fourth root of 1.25 * 0.5 * 6 * 1, the token
    without A included.

    Another sample of one token, p = 0.3 and q = 0.2, has s = 1.5.
    """
    p = np.log([0.5, 0.2, 0.6, 0.3])
    q = np.log([0.4, 0.4, 0.1, 0.3])
    samples = [Sample([0, 1, 2, 3, 4], 1, advantages=[1.0, 0.0, 1.0, -1.0], rollout_log_probs=q)]
    samples.append(Sample([0, 1], 1, advantages=[-2.0], rollout_log_probs=np.log([0.2])))
    batch = RolloutBatch.from_samples(samples, row_length=8)
    x = jnp.zeros((1, 8), jnp.float32).at[0, :4].set(p).at[0, 5].set(np.log(0.3))
    s = 3.75**0.25
    numbers = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.4}

    def loss(x, high):
        config = presets.tinker("gspo", **numbers | {"clip_high_threshold": high})
        return policy_loss(TokenStats(x), batch, config)[0]

    value, slope = jax.value_and_grad(loss)(x, 1.4)
    np.testing.assert_allclose(value, -2 * s + s + 2 * 1.5, rtol=1e-5)
    np.testing.assert_allclose(slope[0], [-s, 0, -s, s, 0, 2 * 1.5, 0, 0], rtol=1e-5)
    value, slope = jax.value_and_grad(loss)(x, 1.2)
    np.testing.assert_allclose(value, -2 * 1.2 + s + 2 * 1.5, rtol=1e-5)
    np.testing.assert_allclose(slope[0], [0, 0, 0, s, 0, 2 * 1.5, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
@of("nemo seq-mask-tis")
def test_nemo_sequence_mask(record, mesh):
    """Two of the four sequences, whose geometric means are 1.14 and 0.82, are out of bounds and
    have no loss.
    """
    check(record, presets.sequence_masked_importance_sampling(**record["options"]), mesh)


@pytest.mark.parametrize("mesh", MESHES)
@of("areal gspo")
def test_areal_gspo(record, mesh):
    """The advantages of a sequence are their mean there, the loss a mean over tokens."""
    clip = record["options"]["eps_clip"]
    given = record["in"]
    mask = np.asarray(given["loss_mask"])
    x = np.asarray(given["advantages"])
    mean = (x * mask).sum(axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True)
    moved = record | {"in": given | {"advantages": np.broadcast_to(mean, x.shape)}}
    check(moved, PolicyLossConfig(GSPO(clip, clip), aggregation="token_mean"), mesh)


def openrlhf(options) -> PolicyLossConfig:
    """`policy_loss_type`, `eps_clip_low_high`, `dual_clip`, `vllm_is_correction_type`.

    With the correction the ratio of gspo is over the sampler, and nothing is weighed.
    """
    clips = options["clip_eps_low"], options["clip_eps_high"], options["dual_clip"]
    of_vllm = None
    gspo = options["policy_loss_type"] == "gspo"
    if options["enable_vllm_is_correction"] and not gspo:
        assert options["vllm_is_correction_type"] == "icepop"
        low, high = options["vllm_is_truncated_threshold"]
        of_vllm = OffPolicyConfig(weights="token", low=low, high=high, outside="zero")
    return PolicyLossConfig(
        (GSPO if gspo else PPO)(*clips),
        ratio_to="rollout" if gspo and options["enable_vllm_is_correction"] else "old",
        aggregation="token_mean" if options["token_level_loss"] else "sequence_mean_token_mean",
        off_policy=of_vllm,
    )


@pytest.mark.every(5)
@pytest.mark.parametrize("mesh", MESHES)
@of("openrlhf")
def test_openrlhf(record, mesh):
    check(record, openrlhf(record["options"]), mesh)


def one_token(x, advantage=1.0, old=-1.0):
    """A batch of one token of that old log-prob, and its statistics now."""
    ids = np.ones((1, 1), np.int32)
    one = np.ones((1, 1), np.float32)
    values = {"old_log_probs": old * one, "advantages": advantage * one}
    batch = RolloutBatch(ids, ids, ids, 0 * ids, one, 0 * ids, **values, real_last_targets=True)
    return TokenStats(np.float32([[x]])), batch


@pytest.mark.parametrize(("ratio", "kept"), [(0.45, False), (0.6, True), (1.4, True), (1.8, False)])
def test_bounds_of_a_sequence_are_of_trainer_over_sampler(ratio, kept):
    """Bounds of 0.5 and 1.5: by their inverses 1.8 would be kept, and 0.6 not.

    What is kept is not bounded.
    """
    stats, batch = one_token(-1.0)
    batch = dataclasses.replace(
        batch, rollout_log_probs=batch.old_log_probs - np.float32(np.log(ratio))
    )
    loss, _ = policy_loss(stats, batch, presets.sequence_masked_importance_sampling(0.5, 1.5))
    np.testing.assert_allclose(loss, -ratio * kept, rtol=1e-6)


def test_roll_by_hand():
    """kimi15: -A x + tau / 2 (x - x_o)^2. tis: -sg(clip(r, 0, 1)) A x.

    Dual clip: at most -A (1 + 2 pg_clip).
    """
    for x in (-1.5, -0.7):
        stats, batch = one_token(x)
        loss, _ = policy_loss(stats, batch, PolicyLossConfig(DRO(beta=0.1)))
        np.testing.assert_allclose(loss, -x + 0.05 * (x + 1) ** 2, rtol=1e-6)
        loss, _ = policy_loss(stats, batch, PolicyLossConfig(CISPO(clip_low=1, clip_high=0)))
        np.testing.assert_allclose(loss, -min(np.exp(x + 1), 1) * x, rtol=1e-6)
    config = PolicyLossConfig(PPO(0.2, 0.2, dual_clip=1 + 2 * 0.2))
    for x, expected in ((-0.9, np.exp(0.1)), (-0.3, 1.4)):
        np.testing.assert_allclose(policy_loss(*one_token(x, -1.0), config)[0], expected, rtol=1e-6)


def test_skyrl_prompt_mean():
    """The mean over prompts of the mean over all tokens of a prompt's responses: rollouts that
    are prompts.
    """
    rng = np.random.default_rng(0)
    lengths = (5, 2, 3, 1)
    groups = (4, 4, 9, 9)
    samples = [
        Sample(
            [1] * (n + 1), 1, group_id=g, advantages=rng.normal(size=n), old_log_probs=-np.ones(n)
        )
        for n, g in zip(lengths, groups, strict=True)
    ]
    batch = RolloutBatch.from_samples(samples, row_length=24)
    batch = dataclasses.replace(batch, rollout_ids=batch.group_ids)
    config = PolicyLossConfig(Reinforce(), ratio_to="current", aggregation="rollout_mean")
    loss, _ = policy_loss(TokenStats(-np.ones_like(batch.loss_mask)), batch, config)
    of_prompt = [
        np.concatenate([s.advantages for s in samples if s.group_id == g]).mean() for g in (4, 9)
    ]
    np.testing.assert_allclose(loss, np.mean(of_prompt), rtol=1e-6)
