"""The oracle against float32 reference vectors of slime and verl."""

from dataclasses import replace

import numpy as np
from golden_data import Case, parametrize_cases

from oracle import OracleSample, advantages, policy_loss
from oracle.head import logit_gradient, token_stats
from oracle.kl import kl_divergence
from oracle.off_policy import correction
from oracle.other_losses import mismatch_metrics, sft_loss, value_loss
from oracle.step import clip_cov_candidates, highest

OTHERS = {
    "slime_value": ("slime", "value_loss_function"),
    "slime_sft": ("slime", "sft_loss_function"),
    "slime_stats": ("slime", "calculate_log_probs_and_entropy"),
    "slime_gae": ("slime", "get_advantages_and_returns_batch"),
    "slime_whiten": ("slime", "distributed_masked_whiten"),
    "slime_rpp": ("slime", "reinforce_plus_plus"),
    "verl_value": ("verl", "compute_value_loss"),
    "verl_gae": ("verl", "compute_gae"),
    "verl_outcome": ("verl", "outcome_advantage"),
    "verl_weights": ("verl", "correction_weights"),
    "verl_rejection": ("verl", "rejection_mask"),
    "verl_mismatch": ("verl", "offpolicy_metrics"),
}
METRICS = {
    "loss": "loss",
    "pg_loss": "pg_loss",
    "entropy_loss": "entropy",
    "pg_clipfrac": "clip_fraction",
    "pg_clipfrac_lower": "clip_fraction_lower",
    "ppo_kl": "ppo_kl",
    "kl_loss": "kl",
    "train_rollout_logprob_abs_diff": "sampler_log_prob_abs_diff",
    "ois": "ratio_mean",
    "tis": "tis",
    "tis_clipfrac": "tis_clipfrac",
    "tis_abs": "tis_abs",
    "opsm_clipfrac": "opsm_clipfrac",
}
LOG_PROB_SUMS = ("ppo_kl", "train_rollout_logprob_abs_diff")


def pytest_generate_tests(metafunc):
    parametrize_cases(metafunc, "slime_case", "slime", "policy_loss_function")
    parametrize_cases(metafunc, "verl_case", "verl", "compute_policy_loss")
    parametrize_cases(metafunc, "kl_case", "verl", "kl_penalty")
    for argument, (system, function) in OTHERS.items():
        parametrize_cases(metafunc, argument, system, function)


def alike(got, expected, context="", terms=0.0):
    """Compares within float32: 1e-5 of each number, 2e-6 of the largest, or of the `terms` of a
    sum.
    """
    expected = np.asarray(expected, np.float64)
    scale = np.max(np.abs(expected), initial=terms)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6 * scale + 1e-9, err_msg=context)


def response(case, flat):
    """slime's arrays over response tokens, by sample."""
    return np.split(flat, np.cumsum(case.inputs["response_lengths"])[:-1])


def slime_samples(case: Case):
    """Samples of response tokens with their statistics, and (logits, targets, nucleus) of each."""
    temperature = case.config["rollout_temperature"]
    samples = []
    heads = []
    end = 0
    parts = {
        k: response(case, case.inputs[k])
        for k in ("loss_mask", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    }
    keep = response(case, case.inputs["keep_mask"]) if "keep_mask" in case.inputs else None
    denominators = case.inputs["sample_denominators"]
    rollout, filled = 0, 0.0
    for i, (total, n) in enumerate(
        zip(case.inputs["total_lengths"], case.inputs["response_lengths"], strict=True)
    ):
        end += total
        z = case.inputs["logits"][end - n - 1 : end - 1] / temperature
        y = case.inputs["tokens"][end - n : end]
        nucleus = None if keep is None else keep[i]
        stats = token_stats(z, y, nucleus)
        mine = {k: v[i] for k, v in parts.items() if k != "loss_mask"}
        samples.append(
            OracleSample(
                parts["loss_mask"][i], stats.log_probs, stats.entropy, rollout_id=rollout, **mine
            )
        )
        heads.append((z, y, nucleus, slice(end - n - 1, end - 1)))
        filled += parts["loss_mask"][i].sum()
        if filled == denominators[i]:
            rollout = rollout + 1
            filled = 0.0
    return samples, heads


def slime_config(c):
    name = {"grpo": "ppo"}.get(c["advantage_estimator"], c["advantage_estimator"])
    clips = {"clip_low": c["eps_clip"], "clip_high": c["eps_clip_high"]}
    off_policy = None
    if c["use_tis"]:
        bounds = {"low": c["tis_clip_low"], "high": c["tis_clip"]}
        off_policy = {"weights": "token", "outside": "zero" if c["icepop"] else "clamp", **bounds}
    if c["use_opsm"]:
        off_policy = {"opsm_delta": c["opsm_delta"], "opsm_fraction": "response"}
    return {
        "loss": {
            "name": name,
            **clips,
            **({} if name == "cispo" else {"dual_clip": c["eps_clip_c"]}),
        },
        "kl": {
            "coef": c["kl_loss_coef"] if c["use_kl_loss"] else 0.0,
            "estimator": c["kl_loss_type"],
            "importance": "token" if c["use_unbiased_kl"] else "none",
            "compares": "current/rollout" if c["use_rollout_logprobs"] else "current/old",
        },
        "entropy_coef": c["entropy_coef"],
        "ratio_to": "rollout" if c["use_rollout_logprobs"] else "old",
        "aggregation": "token_sum" if c["calculate_per_token_loss"] else "rollout_mean",
        "metric_aggregation": "loss",
        "off_policy": off_policy,
    }


def test_slime_policy_loss(slime_case):
    c, (samples, heads) = slime_case.config, slime_samples(slime_case)
    config = slime_config(c)
    halved = np.ones(len(samples))
    if slime_case.name == "gspo":
        # This vector's forward has lost its clamp (-2.69871 is the loss of plain ratios, -2.52407
        # that of clipped ones) and its backward has not: a maximum shares its gradient between the
        # two sides of a tie.
        ratios = [np.exp(np.mean(s.at("log_probs") - s.at("old_log_probs"))) for s in samples]
        halved = np.array([0.5 if not 0.97 <= r <= 1.04 else 1.0 for r in ratios])
        config["loss"] |= {"clip_low": 1.0, "clip_high": 1e9}
    result = policy_loss(samples, config)
    # slime adds up samples and rollouts, and leaves the division by their number to the gradient's
    # scale
    scale = 1.0 if c["calculate_per_token_loss"] else len({s.rollout_id for s in samples})
    alike(np.concatenate([s.log_probs for s in samples]), slime_case.outputs["log_probs"])
    alike(np.concatenate([s.entropy for s in samples]), slime_case.outputs["entropy"])
    by_logits = np.zeros(slime_case.inputs["logits"].shape)
    for i, (z, y, nucleus, where) in enumerate(heads):
        dz = logit_gradient(z, y, result.by_log_probs[i], result.by_entropy[i], nucleus=nucleus)
        by_logits[where] = dz / c["rollout_temperature"] * scale * halved[i]
    alike(by_logits, slime_case.outputs["grad_logits"])
    for name, value in slime_case.metrics.items():
        terms = np.max(np.abs(slime_case.outputs["log_probs"])) if name in LOG_PROB_SUMS else 0.0
        alike(result.metrics[METRICS[name]] * scale, value, name, terms)


def verl_samples(case, **more):
    names = ("advantages", "log_probs", "old_log_probs", "rollout_log_probs", "returns")
    found = {k: case.inputs[k] for k in names if k in case.inputs} | more
    return [
        OracleSample(m, **{k: v[i] for k, v in found.items()})
        for i, m in enumerate(case.inputs["loss_mask"])
    ]


def verl_config(c):
    # 0.2, whatever clip_ratio is
    low, high = (c.get(k, 0.2) for k in ("clip_ratio_low", "clip_ratio_high"))
    clips = {"clip_low": low, "clip_high": high}
    loss = {
        "vanilla": {"name": "ppo", "dual_clip": c.get("clip_ratio_c"), **clips},
        "gspo": {"name": "gspo", "gradient": "token", **clips},
        "sapo": {
            "name": "sapo",
            "tau_positive": c.get("tau_pos"),
            "tau_negative": c.get("tau_neg"),
        },
        "cispo": {"name": "cispo", **clips},
        "dppo_tv": {"name": "dppo_tv", "ratio_cap": c.get("clip_ratio_c"), **clips},
        "dppo_kl": {"name": "dppo_kl", "ratio_cap": c.get("clip_ratio_c"), **clips},
        "geo_mean": {"name": "gmpo", **clips},
        "gpg": {"name": "reinforce"},
        "dro": {"name": "dro", "beta": c.get("dro_beta")},
        "kl_cov": {"name": "kl_cov", "coef": c.get("ppo_kl_coef")},
        "clip_cov": {"name": "clip_cov", **clips},
    }[c["loss_mode"]]
    # verl's gmpo takes the mean of sequences, whatever is asked for
    aggregation = "seq-mean-token-mean" if loss["name"] == "gmpo" else c["loss_agg_mode"]
    return {"loss": loss, "aggregation": aggregation.replace("-", "_").replace("seq_", "sequence_")}


def test_verl_policy_loss(verl_case):
    c = verl_case.config
    config = verl_config(verl_case.config)
    more = {}
    if "rollout_is_weights" in verl_case.inputs:
        more["rollout_log_probs"] = verl_case.inputs["old_log_probs"] - np.log(
            verl_case.inputs["rollout_is_weights"]
        )
        config["off_policy"] = {"weights": "token", "high": np.inf}
    samples = verl_samples(verl_case, **more)
    if c["loss_mode"] == "kl_cov":
        samples = [
            replace(s, selected=x)
            for s, x in zip(samples, highest(samples, c["kl_cov_ratio"]), strict=True)
        ]
    if c["loss_mode"] == "clip_cov":  # the case takes every candidate
        candidates = clip_cov_candidates(samples, config, c["clip_cov_lb"], c["clip_cov_ub"])
        samples = [replace(s, selected=x) for s, x in zip(samples, candidates, strict=True)]
    config["aggregation_norm"] = verl_case.inputs["loss_mask"].shape[1]
    result = policy_loss(samples, config)
    alike(result.loss, verl_case.outputs["loss"])
    alike(np.stack(result.by_log_probs), verl_case.outputs["grad_log_probs"])
    for name, value in verl_case.metrics.items():
        mine = "ppo_kl_abs" if c["loss_mode"] == "kl_cov" else METRICS[name]
        if mine not in result.metrics:
            assert value == 0, mine  # a clip that the loss does not have
        else:
            alike(result.metrics[mine], value, name, terms=1.0 if name in LOG_PROB_SUMS else 0.0)


def test_verl_kl(kl_case):
    name = {"kl": "k1", "mse": "k2"}.get(kl_case.config["kl_penalty"], kl_case.config["kl_penalty"])
    value, slope = kl_divergence(
        *(kl_case.inputs[k].astype(np.float64) for k in ("log_probs", "ref_log_probs")), name
    )
    mask = kl_case.inputs["loss_mask"]
    alike(value, kl_case.outputs["kl"])
    alike(slope * mask, kl_case.outputs["grad_log_probs"] * mask)


def rows(case, name):
    """verl's array, a float64 row a sample."""
    return list(case.inputs[name].astype(np.float64))


def test_slime_value(slime_value):
    i = slime_value.inputs
    end = 0
    samples = []
    places = []
    parts = {k: response(slime_value, i[k]) for k in ("loss_mask", "old_values", "returns")}
    for k, (total, n) in enumerate(zip(i["total_lengths"], i["response_lengths"], strict=True)):
        end += total
        places.append(slice(end - n - 1, end - 1))
        values = {
            "values": parts["old_values"][k],
            "returns": parts["returns"][k],
            "new_values": i["values"][places[-1]],
        }
        samples.append(OracleSample(parts["loss_mask"][k], **values))
    options = {
        "aggregation": "sequence_mean_token_mean",
        "metric_aggregation": "loss",
        "clip_fraction": "outside",
    }
    loss, gradients, metrics = value_loss(
        samples, clip=slime_value.config["value_clip"], factor=1.0, **options
    )
    by_values = np.zeros(len(i["values"]))
    for place, gradient in zip(places, gradients, strict=True):
        by_values[place] = gradient * len(samples)
    alike(loss * len(samples), slime_value.outputs["loss"])
    alike(by_values, slime_value.outputs["grad_values"])
    alike(metrics["clip_fraction"] * len(samples), slime_value.metrics["value_clipfrac"])


def test_verl_value(verl_value):
    i = verl_value.inputs
    arrays = zip(i["loss_mask"], i["old_values"], i["returns"], i["values"], strict=True)
    samples = [OracleSample(m, values=old, returns=g, new_values=v) for m, old, g, v in arrays]
    aggregation = verl_value.config["loss_agg_mode"].replace("-", "_").replace("seq_", "sequence_")
    loss, gradients, metrics = value_loss(
        samples, clip=verl_value.config["cliprange_value"], aggregation=aggregation
    )
    alike(loss, verl_value.outputs["loss"])
    alike(np.stack(gradients), verl_value.outputs["grad_values"])
    alike(metrics["clip_fraction"], verl_value.outputs["clipfrac"])


def test_slime_sft(slime_sft):
    i = slime_sft.inputs
    end = 0
    samples = []
    places = []
    masks = response(slime_sft, i["loss_mask"])
    for mask, total, n in zip(masks, i["total_lengths"], i["response_lengths"], strict=True):
        end += total
        places.append((slice(end - n - 1, end - 1), i["tokens"][end - n : end]))
        samples.append(
            OracleSample(mask, token_stats(i["logits"][places[-1][0]], places[-1][1]).log_probs)
        )
    loss, gradients, _ = sft_loss(samples, aggregation="sequence_mean_token_mean")
    by_logits = np.zeros(i["logits"].shape)
    for (place, y), s, gradient in zip(places, samples, gradients, strict=True):
        g = {k: s.scatter(x) for k, x in gradient.items()}
        by_logits[place] = logit_gradient(i["logits"][place], y, **g) * len(samples)
    alike(loss * len(samples), slime_sft.outputs["loss"])
    alike(by_logits, slime_sft.outputs["grad_logits"])


def test_slime_log_probs_and_entropy(slime_stats):
    i = slime_stats.inputs
    keep = i.get("keep_mask")
    e = i["cotangent_entropy"] * slime_stats.config["with_entropy_grad"]
    stats = token_stats(i["logits"], i["targets"], keep)
    alike(stats.log_probs, slime_stats.outputs["log_probs"])
    alike(stats.entropy, slime_stats.outputs["entropy"])
    by_logits = logit_gradient(i["logits"], i["targets"], i["cotangent_log_probs"], e, nucleus=keep)
    alike(by_logits, slime_stats.outputs["grad_logits"])


def test_slime_gae(slime_gae):
    r, v = (response(slime_gae, slime_gae.inputs[k]) for k in ("rewards", "values"))
    c = slime_gae.config
    found = [
        advantages.gae(a, b, np.ones(len(a)), c["gamma"], c["lambd"])
        for a, b in zip(r, v, strict=True)
    ]
    for k, name in enumerate(("advantages", "returns")):
        alike(np.concatenate([x[k] for x in found]), slime_gae.outputs[name])


def test_slime_whiten(slime_whiten):
    i = slime_whiten.inputs
    mask = slime_whiten.inputs["mask"]
    (got,) = advantages.whiten([i["values"]], [mask], shift_mean=slime_whiten.config["shift_mean"])
    alike(got, slime_whiten.outputs["whitened"] * mask)


def test_slime_reinforce_plus_plus(slime_rpp):
    i = slime_rpp.inputs
    c = slime_rpp.config
    found = []
    masks = None
    kls = response(slime_rpp, i["kl"])
    if "baseline" in slime_rpp.name:  # its rewards are centred before
        every = [np.ones(len(x)) for x in kls]
        options = {"kls": kls, "kl_coef": c["kl_coef"], "whitened": False, "singletons": "reward"}
        found = advantages.reinforce_plus_plus_baseline(
            i["rewards"], range(len(kls)), every, **options
        )
        alike(np.concatenate(found), slime_rpp.outputs["advantages"])
        return
    masks = response(slime_rpp, i["loss_mask"])
    for reward, kl, mask in zip(i["rewards"], kls, masks, strict=True):
        r = advantages.token_rewards(reward, mask, kl, c["kl_coef"])
        found.append(advantages.discounted_returns(r, mask, c["gamma"], "discount"))
    # slime fills masked ones too
    alike(np.concatenate(found), slime_rpp.outputs["returns"] * np.concatenate(masks))


def test_verl_gae(verl_gae):
    c = verl_gae.config
    masks = rows(verl_gae, "loss_mask")
    arrays = zip(rows(verl_gae, "rewards"), rows(verl_gae, "values"), masks, strict=True)
    found = [advantages.gae(r, v, m, c["gamma"], c["lam"]) for r, v, m in arrays]
    whitened = advantages.whiten([a for a, _ in found], masks, epsilon=1e-8)
    alike(np.stack(whitened), verl_gae.outputs["advantages"] * np.stack(masks))
    alike(np.stack([g for _, g in found]), verl_gae.outputs["returns"] * np.stack(masks))


def test_verl_outcome_advantages(verl_outcome):
    i = verl_outcome.inputs
    c = verl_outcome.config
    masks = rows(verl_outcome, "loss_mask")
    token_rewards = rows(verl_outcome, "rewards")
    rewards = [r.sum() for r in token_rewards]
    groups = i.get("group")
    alone = {"singletons": "reward"}
    lengths = [m.sum() for m in masks]
    by_sample = {
        "grpo-stdTrue": lambda: advantages.grpo(rewards, groups, **alone),
        "grpo-stdFalse": lambda: advantages.dr_grpo(rewards, groups, **alone),
        "grpo_passk": lambda: advantages.pass_at_k(rewards, groups),
        "rloo": lambda: advantages.rloo(rewards, groups, **alone),
        "opo": lambda: advantages.opo(rewards, groups, lengths, **alone),
        "gpg-advantage": lambda: advantages.gpg(rewards, groups, f_norm=c["f_norm"], **alone),
        "remax": lambda: advantages.remax(rewards, i["reward_baselines"]),
    }
    by_token = {
        "reinforce_plus_plus": lambda: advantages.reinforce_plus_plus(
            token_rewards, masks, c["gamma"]
        ),
        "reinforce_plus_plus_baseline": lambda: advantages.reinforce_plus_plus_baseline(
            rewards, groups, masks, **alone
        ),
    }
    name = verl_outcome.name
    found = by_token[name]() if name in by_token else advantages.spread(by_sample[name](), masks)
    alike(np.stack(found), verl_outcome.outputs["advantages"] * np.stack(masks))


def verl_correction(case, options):
    masks = rows(case, "loss_mask")
    old, rollout = (
        [x[m > 0] for x, m in zip(rows(case, k), masks, strict=True)]
        for k in ("old_log_probs", "rollout_log_probs")
    )
    policies = {"current": None, "old": old, "rollout": rollout}
    found = correction(policies, [np.ones(len(x)) for x in old], masks, options)
    return found, [OracleSample(m) for m in masks]


def test_verl_weights(verl_weights):
    threshold = verl_weights.config["rollout_is_threshold"]
    options = {"weights": verl_weights.config["rollout_is"]}
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        options |= {"low": low, "high": high, "outside": "zero"}
    else:
        options |= {"high": threshold}
    found, samples = verl_correction(verl_weights, options)
    got = np.stack([s.scatter(c.weights) for s, c in zip(samples, found, strict=True)])
    alike(got, verl_weights.outputs["weights"] * np.stack([s.mask for s in samples]))


def test_verl_rejections(verl_rejection):
    c = verl_rejection.config
    rejections = []
    for statistic, bounds in zip(
        c["rollout_rs"].split(","), c["rollout_rs_threshold"].split(","), strict=True
    ):
        low, high = map(float, bounds.split("_")) if "_" in bounds else (0.0, float(bounds))
        rejections.append({"statistic": statistic, "low": low, "high": high})
    found, samples = verl_correction(verl_rejection, {"rejections": rejections})
    got = np.stack([s.scatter(x.accepted) for s, x in zip(samples, found, strict=True)])
    np.testing.assert_array_equal(got, verl_rejection.outputs["mask"])
    assert 0 < got.sum() < verl_rejection.inputs["loss_mask"].sum()


def test_verl_mismatch(verl_mismatch):
    arrays = zip(
        *(rows(verl_mismatch, k) for k in ("loss_mask", "old_log_probs", "rollout_log_probs")),
        strict=True,
    )
    got = mismatch_metrics(
        [OracleSample(m, old_log_probs=old, rollout_log_probs=r) for m, old, r in arrays]
    )
    for name, value in verl_mismatch.metrics.items():
        mine = name.replace("training", "trainer").replace("chi2_seq", "chi2_sequence")
        alike(
            got[mine],
            value,
            name,
            terms=1.0 if "kl" in name or "diff" in name or "chi2" in name else 0.0,
        )
