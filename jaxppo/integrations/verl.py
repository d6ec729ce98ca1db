"""Translates the configuration of verl's trainers. https://github.com/verl-project/verl

If verl's loss and its documentation differ, this module follows the loss, as verl 0.9.1 computes
it. Before 0.9.1 verl took the mean of sequence means for "gspo", whatever loss_agg_mode said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxppo.base.arrays import Aggregation, Compared, RatioTo, check
from jaxppo.base.kl import KL, Estimator
from jaxppo.integrations.options import Options
from jaxppo.integrations.translation import Translation
from jaxppo.integrations.verl_keys import ACTOR, CORRECTION, DEFAULTS, ELSEWHERE, LOSS, VERSION
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.off_policy import OffPolicyConfig, Outside, Rejection
from jaxppo.policy_losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    PPO,
    SAPO,
    ClipCov,
    KLCov,
    PolicyLoss,
    Reinforce,
)

_LOSSES = [
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "geo_mean",
    "gpg",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "dro",
]
_AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}
_OWN_AGGREGATION = ("sapo", "geo_mean")  # always a mean of sequence means
_ESTIMATORS: dict[str, Estimator] = {
    "kl": "k1",
    "mse": "k2",
    "k3": "low_var_kl",
    "k1": "k1",
    "abs": "abs",
    "k2": "k2",
    "low_var_kl": "low_var_kl",
    "kl+": "k1+",
    "mse+": "k2+",
    "k3+": "low_var_kl+",
    "k1+": "k1+",
    "abs+": "abs+",
    "k2+": "k2+",
    "low_var_kl+": "low_var_kl+",
}
_STATISTICS = [
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k1",
    "seq_max_k2",
    "seq_max_k3",
]
_ADVANTAGES = [
    "gae",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce_plus_plus",
    "remax",
    "rloo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
    "grpo_vectorized",
    "reinforce_plus_plus_baseline",
    "rloo_vectorized",
]


def translate(config: Mapping[str, Any]) -> Translation:
    """Translates a verl configuration to a policy loss and to arguments of the functions around it.

    Missing keys have verl's defaults. Keys are verl's, as nested mappings (a resolved OmegaConf
    config is one) or joined by dots, as on its command line. In bypass mode the ratio is over the
    sampler. Only verl's legacy trainer reads the other options of that mode, so `rollout_is`,
    `rollout_rs` and `loss_type` then need `trainer.use_v1=False`.

    The numbers are verl's, with two exceptions. Decoupled rejections do not change denominators and
    penalties; verl takes rejected tokens out of both. Covariances and mean weights are over the
    whole step; verl's are over a micro-batch.

    Returns:
      See `Translation`. On each device a micro-batch holds the tokens that
      `ppo_max_token_len_per_gpu` allows, or the places of `ppo_micro_batch_size_per_gpu` padded
      samples.

    Raises:
      ValueError: unknown keys, all of them listed; a value that its key does not allow, or that has
        no equivalent here.

    Example:
      >>> verl_config = {"actor_rollout_ref.actor.clip_ratio_high": 0.28, "algorithm": {"adv_estimator": "grpo"}}
      >>> translate(verl_config).config.loss
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
      >>> translate(verl_config).elsewhere
      {'algorithm.adv_estimator': 'jaxppo.advantages'}
    """
    options = _options(config)
    _refuse(options)
    policy = _policy_loss(options)
    kl_coef = 0.0
    if options.flag(ACTOR + "use_kl_loss"):
        kl_coef = options.number(ACTOR + "kl_loss_coef")
    entropy_coef = options.number(ACTOR + "entropy_coeff")
    aggregation = _aggregation(options, penalised=kl_coef != 0 or entropy_coef != 0)
    norm = None
    if aggregation == "sequence_mean_token_sum_norm":
        norm = _aggregation_norm(options)
    policy_loss = PolicyLossConfig(
        loss=policy.loss,
        kl=KL(kl_coef, _ESTIMATORS[options.choice(ACTOR + "kl_loss_type", _ESTIMATORS)]),
        entropy_coef=entropy_coef,
        ratio_to=policy.ratio_to,
        aggregation=aggregation,
        aggregation_norm=norm,
        off_policy=policy.off_policy,
    )
    head = {"temperature": options.number("actor_rollout_ref.rollout.temperature")}
    batching = options.batching(
        _longest_sample(options),
        ACTOR + "use_dynamic_bsz",
        ACTOR + "ppo_max_token_len_per_gpu",
        ACTOR + "ppo_micro_batch_size_per_gpu",
    )
    return Translation(policy_loss, head, batching, options.elsewhere)


def config_of(config: Mapping[str, Any]) -> PolicyLossConfig:
    """The policy loss of a verl configuration: the `config` of `translate`, which also says what
    `config` may be.

    Example:
      >>> actor = {"policy_loss": {"loss_mode": "gspo"}, "clip_ratio_low": 3e-4}
      >>> config_of({"actor_rollout_ref": {"actor": actor}}).loss
      GSPO(clip_low=0.0003, clip_high=0.2, dual_clip=None, gradient='token')
    """
    return translate(config).config


def _options(config: Mapping[str, Any]) -> Options:
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config: got {type(config).__name__}, expected verl's configuration as a mapping"
        )
    configured: dict[str, Any] = {}
    for key, value in _flat(config):
        before = configured.setdefault(key, value)
        check(key, f"{before!r} and {value!r}, nested and dotted", before == value, "one of them")
    return Options(configured, DEFAULTS, ELSEWHERE, f"verl at {VERSION}")


def _flat(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Keys joined by dots.

    Skips sections that are None or empty, and `_target_`, the class of a section.
    """
    for name, value in config.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, key + ".")
        elif name != "_target_" and (value not in (None, {}) or not _is_section(key)):
            yield key, value


def _is_section(key: str) -> bool:
    return any(name.startswith(key + ".") for name in (*DEFAULTS, *ELSEWHERE))


def _refuse(options: Options) -> None:
    """Raises for options that verl has and this package does not."""
    options.choice("algorithm.adv_estimator", _ADVANTAGES, "jaxppo.advantages has no other")
    key = "algorithm.use_pf_ppo"
    options.check(
        key, not options.flag(key), "False: samples are not drawn anew by their rewards here"
    )
    key = "distillation.enabled"
    expected = "False: its loss is no policy loss; see advantages.on_policy_distillation"
    options.check(key, not options.flag(key), expected)
    key = ACTOR + "ppo_micro_batch_size"
    options.check(key, options[key] is None, "None, and ppo_micro_batch_size_per_gpu in its place")


def _longest_sample(options: Options) -> int | None:
    prompt = options.count("data.max_prompt_length")
    response = options.count("data.max_response_length")
    if prompt and response:
        return prompt + response
    return None


class _Policy(NamedTuple):
    """What bypass_mode decides, as fields of a `PolicyLossConfig`."""

    loss: PolicyLoss
    ratio_to: RatioTo
    off_policy: OffPolicyConfig | None


def _policy_loss(options: Options) -> _Policy:
    mode = options.choice(
        LOSS + "loss_mode", _LOSSES, "a loss of your own is a jaxppo.policy_losses.PolicyLoss"
    )
    if not options.flag(CORRECTION + "bypass_mode"):
        return _Policy(_loss(options, mode), "old", _correction(options, "old/rollout"))
    loss_type = options.choice(CORRECTION + "loss_type", ("ppo_clip", "reinforce"))
    if options.flag("trainer.use_v1"):
        for name in ("rollout_is", "rollout_rs", "loss_type"):
            key = CORRECTION + name
            expected = (
                f"{DEFAULTS[key]!r} with bypass_mode, in which verl's V1 trainer does not read"
                " it, or"
            )
            expected += " trainer.use_v1=False for the loss of its legacy trainer"
            options.check(key, options[key] == DEFAULTS[key], expected)
        return _Policy(_loss(options, mode), "rollout", None)
    expected = "'vanilla' with bypass_mode and trainer.use_v1=False, where loss_type says the loss"
    options.check(LOSS + "loss_mode", mode == "vanilla", expected)
    if loss_type == "reinforce":
        return _Policy(Reinforce(), "rollout", _correction(options, "current/rollout"))
    # the loss's ratio is the importance weight
    return _Policy(
        _loss(options, mode), "rollout", _only_rejections(_rejections(options, "current/rollout"))
    )


def _loss(options: Options, mode: str) -> PolicyLoss:
    match mode:
        case "gpg":
            return Reinforce()
        case "sapo":
            return SAPO(options.number(ACTOR + "tau_pos"), options.number(ACTOR + "tau_neg"))
        case "kl_cov":
            return KLCov(
                options.number(LOSS + "kl_cov_ratio"), options.number(LOSS + "ppo_kl_coef")
            )
        case "dro":
            return DRO(options.number(LOSS + "dro_beta", above=0))
    return _clipped_loss(options, mode)


def _clipped_loss(options: Options, mode: str) -> PolicyLoss:
    low, high = _clip(options)
    match mode:
        case "gspo":
            return GSPO(low, high, gradient="token")
        case "cispo":
            return CISPO(low, high)
        case "geo_mean":
            return GMPO(low, high)
        case "clip_cov":
            ratio = options.number(LOSS + "clip_cov_ratio")
            return ClipCov(
                low,
                high,
                ratio,
                options.number(LOSS + "clip_cov_lb"),
                options.number(LOSS + "clip_cov_ub"),
            )
    cap = options.number(ACTOR + "clip_ratio_c")
    match mode:
        case "dppo_tv":
            return DPPO("tv", low, high, ratio_cap=cap)
        case "dppo_kl":
            return DPPO("kl", low, high, ratio_cap=cap)
    return PPO(low, high, dual_clip=cap)


def _clip(options: Options) -> tuple[float, float]:
    """The lower and the upper bound; the common bound replaces one that is None."""
    common = ACTOR + "clip_ratio"
    low = ACTOR + "clip_ratio_low"
    high = ACTOR + "clip_ratio_high"
    configured = low in options.configured or high in options.configured
    reads_common = options[low] is None or options[high] is None
    good = configured or reads_common or options[common] == DEFAULTS[common]
    options.check(
        common,
        good,
        "clip_ratio_low and clip_ratio_high, whose defaults, 0.2, verl reads in its place",
    )
    if options[low] is None:
        low = common
    if options[high] is None:
        high = common
    return options.number(low), options.number(high)


def _aggregation(options: Options, penalised: bool) -> Aggregation:
    key = ACTOR + "loss_agg_mode"
    loss = options[LOSS + "loss_mode"]
    aggregation = _AGGREGATIONS[options.choice(key, _AGGREGATIONS)]
    if loss not in _OWN_AGGREGATION:
        return aggregation
    expected = (
        f"'seq-mean-token-mean' with penalties and loss_mode={loss!r}, which takes that itself"
    )
    options.check(key, not penalised or aggregation == "sequence_mean_token_mean", expected)
    return "sequence_mean_token_mean"


def _aggregation_norm(options: Options) -> float:
    key = ACTOR + "loss_scale_factor"
    expected = (
        "a number with 'seq-mean-token-sum-norm', such as data.max_response_length: without one"
        " verl divides by "
    )
    options.check(
        key, options[key] is not None, f"{expected}the longest response of each micro-batch"
    )
    return options.number(key)


def _correction(options: Options, compares: Compared) -> OffPolicyConfig | None:
    """The weights and rejections under rollout_correction."""
    rejections = _rejections(options, compares)
    level_key = CORRECTION + "rollout_is"
    bounds_key = CORRECTION + "rollout_is_threshold"
    normalize_key = CORRECTION + "rollout_is_batch_normalize"
    if options[level_key] is None or options[bounds_key] is None:
        return _only_rejections(rejections)
    level: Any = options.choice(level_key, ("token", "sequence"))
    good = level != "token" or options[LOSS + "loss_mode"] != "geo_mean"
    options.check(
        level_key, good, "'sequence' or None with loss_mode='geo_mean', one value a sequence"
    )
    normalize = options.flag(normalize_key)
    expected = (
        "False with bypass_mode: the mean weight of a step is not known before its first"
        " micro-batch"
    )
    options.check(normalize_key, not normalize or compares != "current/rollout", expected)
    bounds = str(options[bounds_key])
    low, high = _bounds(options, bounds_key, bounds, 0.0)
    outside: Outside = "clamp"
    if "_" in bounds:
        outside = "zero"
    return OffPolicyConfig(level, low, high, outside, normalize, rejections, compares=compares)


def _only_rejections(rejections: tuple[Rejection, ...]) -> OffPolicyConfig | None:
    if not rejections:
        return None
    return OffPolicyConfig(rejections=rejections)


def _rejections(options: Options, compares: Compared) -> tuple[Rejection, ...]:
    key = CORRECTION + "rollout_rs"
    bounds_key = CORRECTION + "rollout_rs_threshold"
    if options[key] is None:
        return ()
    statistics = list(dict.fromkeys(_listed(options[key])))
    thresholds = _listed(options[bounds_key])
    good = len(thresholds) in (1, len(statistics))
    options.check(bounds_key, good, f"one threshold, or one for each of {', '.join(statistics)}")
    if len(thresholds) == 1:
        thresholds = thresholds * len(statistics)
    rejections = []
    for statistic, threshold in zip(statistics, thresholds, strict=True):
        options.check(key, statistic in _STATISTICS, f"some of {', '.join(_STATISTICS)}")
        of_ratio = statistic.endswith("k1")
        options.check(bounds_key, of_ratio or "_" not in threshold, f"one number for {statistic}")
        lowest = None if of_ratio else 0.0
        low, high = _bounds(options, bounds_key, threshold, lowest)
        rejections.append(Rejection(statistic, low, high, compares))  # type: ignore[arg-type]
    return tuple(rejections)


def _listed(value: Any) -> list[str]:
    """The entries of "a, b"; none of None."""
    if value is None:
        return []
    return [entry.strip() for entry in str(value).split(",") if entry.strip()]


def _bounds(options: Options, key: str, text: str, lowest: float | None) -> tuple[float, float]:
    """Both bounds of "low_high".

    A single number is the upper one; the lower is `lowest`, or its inverse if None.
    """
    low, _, high = text.rpartition("_")
    try:
        if low:
            return float(low), float(high)
        if lowest is None:
            return 1 / float(high), float(high)
        return lowest, float(high)
    except (ValueError, ZeroDivisionError):
        options.refuse(key, "a number above 0, or two as in '0.5_2.0'")
