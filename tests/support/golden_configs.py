"""Translates the configs of the reference vectors to jaxppo's."""

import dataclasses

from golden_data import Case

from jaxppo import KL, OffPolicyConfig, PolicyLossConfig, policy_losses, presets
from jaxppo.policy_losses import PolicyLoss

VERL_LOSSES = {
    "gpg": "reinforce",
    "vanilla": "ppo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}
VERL_AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}


def slime_config(c: dict) -> PolicyLossConfig:
    off_policy = None
    if c["use_tis"]:
        outside = "zero" if c["icepop"] else "clamp"
        off_policy = OffPolicyConfig(
            weights="token", low=c["tis_clip_low"], high=c["tis_clip"], outside=outside
        )
    if c["use_opsm"]:
        off_policy = OffPolicyConfig(opsm_delta=c["opsm_delta"], opsm_fraction="response")
    name = {"grpo": "ppo"}.get(c["advantage_estimator"], c["advantage_estimator"])
    given = {
        "clip_low": c["eps_clip"],
        "clip_high": c["eps_clip_high"],
        "dual_clip": c["eps_clip_c"],
    }
    return dataclasses.replace(
        presets.slime_default(),
        loss=loss_with(name, given),
        entropy_coef=c["entropy_coef"],
        kl=KL(
            c["kl_loss_coef"] if c["use_kl_loss"] else 0.0,
            c["kl_loss_type"],
            "token" if c["use_unbiased_kl"] else "none",
            (
                "current/rollout"
                if c["use_rollout_logprobs"] and c["use_unbiased_kl"]
                else "current/old"
            ),
        ),
        **{"aggregation": "token_sum"} if c["calculate_per_token_loss"] else {},
        ratio_to="rollout" if c["use_rollout_logprobs"] else "old",
        off_policy=off_policy,
    )


def loss_with(name: str, given: dict) -> PolicyLoss:
    """The loss, given those hyperparameters that it has, unless they are None."""
    fields = {field.name for field in dataclasses.fields(policy_losses.BY_NAME[name])}
    return policy_losses.by_name(
        name, **{k: v for k, v in given.items() if k in fields and v is not None}
    )


def verl_config(case: Case) -> PolicyLossConfig:
    c = case.config
    name = VERL_LOSSES.get(c["loss_mode"], c["loss_mode"])
    aggregation = VERL_AGGREGATIONS[c["loss_agg_mode"]]
    if name == "gmpo":
        # upstream ignores the option: one value per sequence, and their mean
        aggregation = "sequence_mean_token_mean"
    given = {
        # upstream's default, which does not follow clip_ratio
        "clip_low": c.get("clip_ratio_low", 0.2),
        "clip_high": c.get("clip_ratio_high", 0.2),
        "dual_clip": c.get("clip_ratio_c") if name == "ppo" else None,
        "gradient": "token",
        "divergence": c["loss_mode"].removeprefix("dppo_"),
        "ratio_cap": c.get("clip_ratio_c"),
        "tau_positive": c.get("tau_pos"),
        "tau_negative": c.get("tau_neg"),
        "beta": c.get("dro_beta"),
        "share": c.get("clip_cov_ratio", c.get("kl_cov_ratio")),
        "low": c.get("clip_cov_lb"),
        "high": c.get("clip_cov_ub"),
        "coef": c.get("ppo_kl_coef"),
    }
    return dataclasses.replace(
        presets.verl_default(),
        loss=loss_with(name, given),
        aggregation=aggregation,
        aggregation_norm=(
            float(case.inputs["loss_mask"].shape[1]) if aggregation.endswith("norm") else None
        ),
        off_policy=(
            OffPolicyConfig(weights="token", high=1e6)
            if "rollout_is_weights" in case.inputs
            else None
        ),
    )


ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
