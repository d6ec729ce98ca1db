"""The configuration of verl's trainers, read as the fields of a `PolicyLossConfig`.

If verl's loss and its documentation differ, this module follows the loss, as verl 0.9.1 computes it. Before 0.9.1 verl
took the mean of sequence means for "gspo", whatever loss_agg_mode said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from jaxppo.base.arrays import Aggregation, Compared, RatioTo, check
from jaxppo.base.kl import KL
from jaxppo.policy.off_policy import OffPolicyConfig, Rejection
from jaxppo.policy.options import Options, Reading
from jaxppo.policy.verl_keys import ACTOR, CORRECTION, DEFAULTS, ELSEWHERE, LOSS, VERSION
from jaxppo.policy_losses import CISPO, DPPO, DRO, GMPO, GSPO, PPO, SAPO, ClipCov, KLCov, PolicyLoss, Reinforce

_AGGREGATIONS: dict[str, Aggregation] = {
    name.replace("sequence", "seq").replace("_", "-"): name for name in get_args(Aggregation) if name != "rollout_mean"
}
_OWN_AGGREGATION = ("sapo", "geo_mean")  # always a mean of sequence means
_ESTIMATORS = {"kl": "k1", "mse": "k2", "k3": "low_var_kl"} | {x: x for x in ("k1", "abs", "k2", "low_var_kl")}
_ESTIMATORS |= {f"{name}+": f"{ours}+" for name, ours in _ESTIMATORS.items()}
_STATISTICS = [f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")]
_PLAIN = ("gae", "gpg", "grpo", "grpo_passk", "opo", "reinforce_plus_plus", "remax", "rloo")
_OF_TOKENS = ("optimal_token_baseline", "tir_optimal_token_baseline")
_ADVANTAGES = (*_PLAIN, *_OF_TOKENS, "gdpo", "grpo_vectorized", "reinforce_plus_plus_baseline", "rloo_vectorized")
_LOSSES: dict[str, Callable[[Options], PolicyLoss]] = {
    "vanilla": lambda given: PPO(*_clip(given), dual_clip=given.number(ACTOR + "clip_ratio_c")),
    "gspo": lambda given: GSPO(*_clip(given), gradient="token"),
    "cispo": lambda given: CISPO(*_clip(given)),
    "sapo": lambda given: SAPO(given.number(ACTOR + "tau_pos"), given.number(ACTOR + "tau_neg")),
    "geo_mean": lambda given: GMPO(*_clip(given)),
    "gpg": lambda given: Reinforce(),
    "dppo_tv": lambda given: DPPO("tv", *_clip(given), ratio_cap=given.number(ACTOR + "clip_ratio_c")),
    "dppo_kl": lambda given: DPPO("kl", *_clip(given), ratio_cap=given.number(ACTOR + "clip_ratio_c")),
    "clip_cov": lambda given: ClipCov(*_clip(given), *_numbers(given, LOSS, "clip_cov_ratio clip_cov_lb clip_cov_ub")),
    "kl_cov": lambda given: KLCov(*_numbers(given, LOSS, "kl_cov_ratio ppo_kl_coef")),
    "dro": lambda given: DRO(given.number(LOSS + "dro_beta", above=0)),
}


def read(config: Mapping[str, Any]) -> Reading:
    """The policy loss of a configuration and the options around it, see `verl.translate`."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config: got {type(config).__name__}, expected verl's configuration as a mapping")
    given: dict[str, Any] = {}
    for key, value in _flat(config):
        before = given.setdefault(key, value)
        check(key, f"{before!r} and {value!r}, nested and dotted", before == value, "one of them")
    options = Options(given, DEFAULTS, ELSEWHERE, f"verl at {VERSION}")
    _refuse(options)
    loss, ratio_to, off_policy = _policy_loss(options)
    kl_coef = options.number(ACTOR + "kl_loss_coef") if options.flag(ACTOR + "use_kl_loss") else 0.0
    entropy_coef = options.number(ACTOR + "entropy_coeff")
    aggregation, norm = _aggregation(options, penalised=kl_coef != 0 or entropy_coef != 0)
    estimator: Any = _ESTIMATORS[options.choice(ACTOR + "kl_loss_type", _ESTIMATORS)]
    policy = {
        "loss": loss,
        "kl": KL(kl_coef, estimator),
        "entropy_coef": entropy_coef,
        "ratio_to": ratio_to,
        "aggregation": aggregation,
        "aggregation_norm": norm,
        "off_policy": off_policy,
    }
    head = {"temperature": options.number("actor_rollout_ref.rollout.temperature")}
    prompt, response = (options.count(f"data.max_{name}_length") for name in ("prompt", "response"))
    longest = prompt + response if prompt and response else None
    keys = (ACTOR + name for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu"))
    return Reading(policy, head, options.batching(longest, *keys), options.elsewhere)


def _flat(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Keys joined by dots. Skips sections that are None or empty, and `_target_`, the class of a section."""
    known = (*DEFAULTS, *ELSEWHERE)
    for name, value in config.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, key + ".")
        elif name != "_target_" and (value not in (None, {}) or not any(x.startswith(key + ".") for x in known)):
            yield key, value


def _refuse(options: Options) -> None:
    """Raises for options that verl has and this package does not."""
    options.choice("algorithm.adv_estimator", _ADVANTAGES, "jaxppo.advantages has no other")
    for key, expected in {
        "algorithm.use_pf_ppo": "False: samples are not drawn anew by their rewards here",
        "distillation.enabled": "False: its loss is no policy loss; see advantages.on_policy_distillation",
    }.items():
        options.check(key, not options.flag(key), expected)
    key = ACTOR + "ppo_micro_batch_size"
    options.check(key, options[key] is None, "None, and ppo_micro_batch_size_per_gpu in its place")


def _policy_loss(options: Options) -> tuple[PolicyLoss, RatioTo, OffPolicyConfig | None]:
    mode = options.choice(LOSS + "loss_mode", _LOSSES, "a loss of your own is a jaxppo.policy_losses.PolicyLoss")
    if not options.flag(CORRECTION + "bypass_mode"):
        return _LOSSES[mode](options), "old", _correction(options, True, "old/rollout")
    kind = options.choice(CORRECTION + "loss_type", ("ppo_clip", "reinforce"))
    if options.flag("trainer.use_v1"):
        for key in (CORRECTION + name for name in ("rollout_is", "rollout_rs", "loss_type")):
            expected = f"{DEFAULTS[key]!r} with bypass_mode, in which verl's V1 trainer does not read it, or"
            expected += " trainer.use_v1=False for the loss of its legacy trainer"
            options.check(key, options[key] == DEFAULTS[key], expected)
        return _LOSSES[mode](options), "rollout", None
    expected = "'vanilla' with bypass_mode and trainer.use_v1=False, where loss_type says the loss"
    options.check(LOSS + "loss_mode", mode == "vanilla", expected)
    if kind == "ppo_clip":  # its ratio is the importance weight
        return _LOSSES[mode](options), "rollout", _correction(options, False, "current/rollout")
    return Reinforce(), "rollout", _correction(options, True, "current/rollout")


def _numbers(options: Options, section: str, names: str) -> Iterator[float]:
    return (options.number(section + name) for name in names.split())


def _clip(options: Options) -> tuple[float, float]:
    """The lower and the upper bound; the common bound replaces one that is None."""
    keys = tuple(ACTOR + name for name in ("clip_ratio_low", "clip_ratio_high"))
    common = ACTOR + "clip_ratio"
    read = set(keys) & options.given.keys() or None in [options[key] for key in keys]
    expected = "clip_ratio_low and clip_ratio_high, whose defaults, 0.2, verl reads in its place"
    options.check(common, bool(read) or options[common] == DEFAULTS[common], expected)
    low, high = (options.number(common if options[key] is None else key) for key in keys)
    return low, high


def _aggregation(options: Options, penalised: bool) -> tuple[Aggregation, float | None]:
    key, loss = ACTOR + "loss_agg_mode", options[LOSS + "loss_mode"]
    aggregation = _AGGREGATIONS[options.choice(key, _AGGREGATIONS)]
    if loss in _OWN_AGGREGATION:
        expected = f"'seq-mean-token-mean' with penalties and loss_mode={loss!r}, which takes that itself"
        options.check(key, not penalised or aggregation == "sequence_mean_token_mean", expected)
        return "sequence_mean_token_mean", None
    if aggregation != "sequence_mean_token_sum_norm":
        return aggregation, None
    key = ACTOR + "loss_scale_factor"
    expected = "a number with 'seq-mean-token-sum-norm', such as data.max_response_length: without one verl divides by "
    options.check(key, options[key] is not None, f"{expected}the longest response of each micro-batch")
    return aggregation, options.number(key)


def _correction(options: Options, weighs: bool, compares: Compared) -> OffPolicyConfig | None:
    """The options under rollout_correction; with `weighs`, its weights too."""
    rejections, key = tuple(_rejections(options, compares)), CORRECTION + "rollout_is"
    bounds = options[f"{key}_threshold"]
    if not weighs or options[key] is None or bounds is None:
        return OffPolicyConfig(rejections=rejections) if rejections else None
    level: Any = options.choice(key, ("token", "sequence"))
    good = level != "token" or options[LOSS + "loss_mode"] != "geo_mean"
    options.check(key, good, "'sequence' or None with loss_mode='geo_mean', one value a sequence")
    normalise = options.flag(f"{key}_batch_normalize")
    expected = "False with bypass_mode: the mean weight of a step is not known before its first micro-batch"
    options.check(f"{key}_batch_normalize", not normalise or compares != "current/rollout", expected)
    low, high = _bounds(options, f"{key}_threshold", str(bounds), 0.0)
    outside: Any = "zero" if "_" in str(bounds) else "clamp"
    return OffPolicyConfig(level, low, high, outside, normalise, rejections, compares=compares)


def _rejections(options: Options, compares: Compared) -> Iterator[Rejection]:
    key, bounds = CORRECTION + "rollout_rs", CORRECTION + "rollout_rs_threshold"
    if options[key] is None:
        return
    names = list(dict.fromkeys(_parts(options[key])))
    thresholds = [] if options[bounds] is None else _parts(options[bounds])
    good = len(thresholds) in (1, len(names))
    options.check(bounds, good, f"one threshold, or one for each of {', '.join(names)}")
    for name, threshold in zip(names, thresholds * (len(names) if len(thresholds) == 1 else 1), strict=True):
        options.check(key, name in _STATISTICS, f"some of {', '.join(_STATISTICS)}")
        options.check(bounds, name.endswith("k1") or "_" not in threshold, f"one number for {name}")
        low, high = _bounds(options, bounds, threshold, None if name.endswith("k1") else 0.0)
        yield Rejection(name, low, high, compares)  # type: ignore[arg-type]


def _parts(value: Any) -> list[str]:
    return [part.strip() for part in str(value).split(",") if part.strip()]


def _bounds(options: Options, key: str, text: str, lowest: float | None) -> tuple[float, float]:
    """Both bounds of "low_high". A single number is the upper one; the lower is `lowest`, or its inverse if None."""
    low, _, high = text.rpartition("_")
    try:
        return (float(low) if low else 1 / float(high) if lowest is None else lowest), float(high)
    except (ValueError, ZeroDivisionError):
        options.refuse(key, "a number above 0, or two as in '0.5_2.0'")
