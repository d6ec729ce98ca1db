"""Translates the arguments of slime. https://github.com/THUDM/slime"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxppo.base.arrays import Aggregation, Compared, RatioTo, check
from jaxppo.base.kl import KL, Over
from jaxppo.integrations import slime_keys
from jaxppo.integrations.options import Options
from jaxppo.integrations.translation import Translation
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.off_policy import OffPolicyConfig, Rejection, Statistic
from jaxppo.policy_losses import CISPO, GSPO, PPO, PolicyLoss

_MISMATCH_HELPER = "train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
_STATISTICS: dict[str, Statistic] = {
    "token": "token_k1",
    "sequence": "seq_sum_k1",
    "geometric": "seq_mean_k1",
}


def translate(args: Namespace | Mapping[str, Any]) -> Translation:
    """Translates slime's arguments to a `Translation`: a policy loss and arguments of the functions
    around it.

    Missing arguments have the defaults of slime at 624b824a. An argument that slime does not define
    is taken for Megatron's or SGLang's in a `Namespace`, and is an error in a mapping. Mean weights
    (`tis_batch_normalize`) are over the whole step here; slime's are over a micro-batch.

    Args:
      args: the result of slime's `parse_args`, or its names and values, including those of the file
        of `--custom-config-path`.

    Raises:
      ValueError: unknown names, all of them listed; a value that its argument does not allow, or
        that has no equivalent here.

    Example:
      >>> translation = translate({"advantage_estimator": "gspo", "eps_clip": 4e-4, "lr": 1e-6})
      >>> translation.config.loss, translation.config.aggregation
      (GSPO(clip_low=0.0004, clip_high=0.0004, dual_clip=None, gradient='sequence'), 'rollout_mean')
      >>> translation.elsewhere
      {'lr': 'the optimizer'}
    """
    return translate_arguments(args, slime_keys)


def config_of(args: Namespace | Mapping[str, Any]) -> PolicyLossConfig:
    """The policy loss of slime's arguments: the `config` of `translate`, which also says what
    `args` may be.

    Example:
      >>> config_of({"eps_clip_high": 0.28, "use_tis": True}).off_policy.weights
      'token'
    """
    return translate(args).config


def translate_arguments(args: Namespace | Mapping[str, Any], keys: ModuleType) -> Translation:
    """`translate` for slime, or for a system that began as slime: `keys` is the module with its
    arguments.
    """
    options = _options(args, keys)
    options.choice(
        "loss_type", ("policy_loss",), "SFT is a loss of its own, a loss of your own a PolicyLoss"
    )
    reducer = "custom_pg_loss_reducer_function_path"
    options.check(reducer, options[reducer] is None, "None; see PolicyLossConfig(aggregation=)")
    ratio_to = _ratio_to(options, keys)
    kl_coef = 0.0
    if options.flag("use_kl_loss"):
        kl_coef = options.number("kl_loss_coef")
    entropy_coef = options.number("entropy_coef")
    aggregation: Aggregation = "rollout_mean"
    if options.flag("calculate_per_token_loss"):
        aggregation = "token_mean"
    config = PolicyLossConfig(
        loss=_loss(options, keys),
        kl=_kl(options, kl_coef, ratio_to),
        entropy_coef=entropy_coef,
        ratio_to=ratio_to,
        aggregation=aggregation,
        metric_aggregation="loss",
        off_policy=_correction(options, keys, penalised=kl_coef != 0 or entropy_coef != 0),
    )
    head = {"temperature": options.number("rollout_temperature")}
    batching = options.batching(
        _longest_sample(options), "use_dynamic_batch_size", "max_tokens_per_gpu", "micro_batch_size"
    )
    return Translation(config, head, batching, options.elsewhere)


def _options(args: Namespace | Mapping[str, Any], keys: ModuleType) -> Options:
    if isinstance(args, Namespace):
        configured: Mapping[str, Any] = vars(args)
        others = f"no argument of {keys.NAME}'s own"
    elif isinstance(args, Mapping):
        configured = args
        others = None
    else:
        expected = f"{keys.NAME}'s parsed arguments, or a mapping of them"
        raise TypeError(f"args: got {type(args).__name__}, expected {expected}")
    defaults = keys.DEFAULTS | keys.MISMATCH_HELPER
    elsewhere = keys.ELSEWHERE | slime_keys.OF_MEGATRON
    return Options(configured, defaults, elsewhere, f"{keys.NAME} at {keys.VERSION}", others)


def _skips_old_log_probs(options: Options, keys: ModuleType) -> bool:
    """Whether no log-probs are computed before the step: the old policy is then the current one."""
    return "skip_actor_forward_only" in keys.DEFAULTS and options.flag("skip_actor_forward_only")


def _ratio_to(options: Options, keys: ModuleType) -> RatioTo:
    skips = _skips_old_log_probs(options, keys)
    if options.flag("use_rollout_logprobs"):
        return "rollout"
    if skips:
        return "current"
    return "old"


def _kl(options: Options, coef: float, ratio_to: RatioTo) -> KL:
    estimator: Any = options.choice("kl_loss_type", ("k1", "k2", "k3", "low_var_kl"))
    if not options.flag("use_unbiased_kl"):
        return KL(coef, estimator)
    if ratio_to == "current":  # the ratio of a policy to itself has a gradient, which is the score
        return KL(coef, estimator, importance="score")
    compares: Over = "current/old"
    if ratio_to == "rollout":
        compares = "current/rollout"
    return KL(coef, estimator, importance="token", compares=compares)


def _longest_sample(options: Options) -> int | None:
    context = options.count("rollout_max_context_len")
    prompt = options.count("rollout_max_prompt_len")
    response = options.count("rollout_max_response_len")
    if context:
        return context
    if prompt and response:
        return prompt + response
    return None


def _loss(options: Options, keys: ModuleType) -> PolicyLoss:
    low = options.number("eps_clip")
    dual_clip = options.number_or("eps_clip_c", None)
    high = options.number_or("eps_clip_high", low)
    match options.choice("advantage_estimator", keys.ADVANTAGES):
        case "gspo":
            return GSPO(low, high, dual_clip)
        case "cispo":
            return CISPO(low, high)
    return PPO(low, high, dual_clip)


def _correction(options: Options, keys: ModuleType, penalised: bool) -> OffPolicyConfig | None:
    """The corrections; their trainer's log-probs are the current ones where none were computed
    before the step.
    """
    fields = _sequence_masking(options, keys) | _weights(options, keys, penalised)
    if not fields:
        return None
    return OffPolicyConfig(**fields)


def _sequence_masking(options: Options, keys: ModuleType) -> dict[str, Any]:
    """Off-policy sequence masking, as fields of an `OffPolicyConfig`."""
    if not options.flag("use_opsm"):
        return {}
    moved = not _skips_old_log_probs(options, keys)
    options.check("use_opsm", moved, "False with skip_actor_forward_only: the policy has not moved")
    compares = "current/old"
    if options.flag("use_rollout_logprobs"):
        compares = "current/rollout"
    return {
        "opsm_delta": options.number("opsm_delta"),
        "opsm_fraction": "response",
        "opsm_compares": compares,
    }


def _weights(options: Options, keys: ModuleType, penalised: bool) -> dict[str, Any]:
    """Weights and rejections, as fields of an `OffPolicyConfig`."""
    use_tis = options.flag("use_tis")
    good = not use_tis or not options.flag("use_rollout_logprobs")
    options.check("use_tis", good, "False with use_rollout_logprobs, as slime does")
    if not use_tis and not options.flag("get_mismatch_metrics"):
        return {}
    compares: Compared = "old/rollout"
    if _skips_old_log_probs(options, keys):
        compares = "current/rollout"
    path = options["custom_tis_function_path"]
    if path is not None and str(path).endswith(_MISMATCH_HELPER):
        if not use_tis:
            return {}
        return _mismatch_helper(options, penalised, compares)
    if path not in (None, keys.ICEPOP):
        options.refuse(
            "custom_tis_function_path", f"None, {keys.ICEPOP} or examples.{_MISMATCH_HELPER}"
        )
    outside = "clamp"
    if path == keys.ICEPOP:
        outside = "zero"
    low = options.number("tis_clip_low")
    high = options.number("tis_clip")
    return {"weights": "token", "low": low, "high": high, "outside": outside, "compares": compares}


def _rejection(level: str, low: float, high: float, compares: Compared) -> Rejection:
    """Accepts trainer / sampler from `low` to `high`; the bounds of a `Rejection` are of the
    inverse.
    """
    return Rejection(_STATISTICS[level], 1 / high, 1 / low, compares)


def _mismatch_helper(options: Options, penalised: bool, compares: Compared) -> dict[str, Any]:
    """The correction of examples/train_infer_mismatch_helper, as fields of an `OffPolicyConfig`."""
    missing = [name for name in slime_keys.MISMATCH_HELPER if name not in options.configured]
    check(
        "custom_tis_function_path",
        f"the mismatch helper without {', '.join(missing)}",
        not missing,
        "them",
    )
    level = options.choice("tis_level", _STATISTICS)
    mode = options.choice("tis_mode", ("truncate", "clip", "mask"))
    high = options.number_or("tis_upper_bound", math.nan, above=0)
    low = options.number_or("tis_lower_bound", 1 / high, above=0)
    rejections = []
    if mode == "mask":
        rejections.append(_rejection(level, low, high, compares))
    veto = None
    if options.flag("use_rs"):
        rs_low = options.number_or("rs_lower_bound", low, above=0)
        rs_high = options.number_or("rs_upper_bound", high, above=0)
        rs_level = options.choice("rs_level", _STATISTICS)
        rejections.append(_rejection(rs_level, rs_low, rs_high, compares))
        veto = options.number_or("rs_veto_threshold", None)
    expected = (
        "no entropy_coef and no kl_loss_coef with it, since slime drops the penalties of rejected"
        " tokens"
    )
    options.check("custom_tis_function_path", not rejections or not penalised, expected)
    batch_normalize = options.flag("tis_batch_normalize")
    good = not batch_normalize or level != "geometric"
    options.check("tis_batch_normalize", good, "False with tis_level='geometric', as slime does")
    if mode != "clip":
        low = 0.0
    if mode == "mask":
        high = math.inf
    return {
        "weights": level,
        "low": low,
        "high": high,
        "batch_normalize": batch_normalize,
        "rejections": tuple(rejections),
        "veto": veto,
        "compares": compares,
    }
