"""The arguments of slime, or of a system that began as slime, read as the fields of a `PolicyLossConfig`."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jaxppo.base.arrays import Compared, RatioTo, check
from jaxppo.base.kl import KL
from jaxppo.policy import slime_keys as SLIME
from jaxppo.policy.off_policy import OffPolicyConfig, Rejection
from jaxppo.policy.options import Options, Reading
from jaxppo.policy_losses import CISPO, GSPO, PPO, PolicyLoss

_MISMATCH = "train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
_STATISTICS: dict[str, Any] = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def read(args: Namespace | Mapping[str, Any], keys: Any = SLIME) -> Reading:
    """The policy loss of the arguments and the options around it, see `slime.translate`; `keys` has the names."""
    if not isinstance(args, Namespace | Mapping):
        expected = f"{keys.NAME}'s parsed arguments, or a mapping of them"
        raise TypeError(f"args: got {type(args).__name__}, expected {expected}")
    given, others = (vars(args), f"no argument of {keys.NAME}'s own") if isinstance(args, Namespace) else (args, None)
    known = keys.DEFAULTS | keys.MISMATCH_HELPER
    options = Options(given, known, keys.ELSEWHERE, f"{keys.NAME} at {keys.VERSION}", others)
    options.choice("loss_type", ("policy_loss",), "SFT is a loss of its own, a loss of your own a PolicyLoss")
    reducer = "custom_pg_loss_reducer_function_path"
    options.check(reducer, options[reducer] is None, "None; see PolicyLossConfig(aggregation=)")
    kl_coef = options.number("kl_loss_coef") if options.flag("use_kl_loss") else 0.0
    ratio_to: RatioTo = "rollout" if options.flag("use_rollout_logprobs") else "old"
    anew = "skip_actor_forward_only" in keys.DEFAULTS and options.flag("skip_actor_forward_only")
    if anew and ratio_to == "old":
        ratio_to = "current"
    kl: Any = {"estimator": options.choice("kl_loss_type", ("k1", "k2", "k3", "low_var_kl"))}
    if options.flag("use_unbiased_kl"):  # the ratio of a policy to itself has a gradient, which is the score
        current = ratio_to == "current"
        kl |= {"importance": "score"} if current else {"importance": "token", "compares": f"current/{ratio_to}"}
    entropy_coef = options.number("entropy_coef")
    policy = {
        "loss": _loss(options, keys),
        "kl": KL(kl_coef, **kl),
        "entropy_coef": entropy_coef,
        "ratio_to": ratio_to,
        "aggregation": "token_mean" if options.flag("calculate_per_token_loss") else "rollout_mean",
        "metric_aggregation": "loss",
        "off_policy": _correction(options, keys, anew, penalised=kl_coef != 0 or entropy_coef != 0),
    }
    head = {"temperature": options.number("rollout_temperature")}
    context, prompt, response = (options.count(f"rollout_max_{name}_len") for name in ("context", "prompt", "response"))
    longest = context or (prompt + response if prompt and response else None)
    batching = options.batching(longest, "use_dynamic_batch_size", "max_tokens_per_gpu", "micro_batch_size")
    return Reading(policy, head, batching, options.elsewhere)


def _loss(options: Options, keys: Any) -> PolicyLoss:
    low, dual_clip = options.number("eps_clip"), options.number_or("eps_clip_c", None)
    high = options.number_or("eps_clip_high", low)
    match options.choice("advantage_estimator", keys.ADVANTAGES):
        case "gspo":
            return GSPO(low, high, dual_clip)
        case "cispo":
            return CISPO(low, high)
    return PPO(low, high, dual_clip)


def _correction(options: Options, keys: Any, anew: bool, penalised: bool) -> OffPolicyConfig | None:
    """The corrections; their trainer's log-probs are the current ones where none were computed before the step."""
    corrected: dict[str, Any] = {}
    of_rollout = options.flag("use_rollout_logprobs")
    if options.flag("use_opsm"):
        options.check("use_opsm", not anew, "False with skip_actor_forward_only: the policy has not moved")
        corrected = {"opsm_delta": options.number("opsm_delta"), "opsm_fraction": "response"}
        corrected["opsm_compares"] = "current/rollout" if of_rollout else "current/old"
    weighs, path = options.flag("use_tis"), options["custom_tis_function_path"]
    options.check("use_tis", not weighs or not of_rollout, "False with use_rollout_logprobs, as slime does")
    if weighs or options.flag("get_mismatch_metrics"):
        compares: Compared = "current/rollout" if anew else "old/rollout"
        if path is not None and str(path).endswith(_MISMATCH):
            corrected |= _mismatch_helper(options, penalised, compares) if weighs else {}
        elif path in (None, keys.ICEPOP):
            low, high = options.number("tis_clip_low"), options.number("tis_clip")
            outside = "clamp" if path is None else "zero"
            corrected |= {"weights": "token", "low": low, "high": high, "outside": outside, "compares": compares}
        else:
            options.refuse("custom_tis_function_path", f"None, {keys.ICEPOP} or examples.{_MISMATCH}")
    return OffPolicyConfig(**corrected) if corrected else None


def _mismatch_helper(options: Options, penalised: bool, compares: Compared) -> dict[str, Any]:
    """The correction of examples/train_infer_mismatch_helper, as fields of an `OffPolicyConfig`."""
    missing = [name for name in SLIME.MISMATCH_HELPER if name not in options.given]
    check("custom_tis_function_path", f"the mismatch helper without {', '.join(missing)}", not missing, "them")

    def within(level: str, low: float, high: float) -> Rejection:
        """Accepts trainer / sampler ratios from low to high; `Rejection` has bounds of the inverse."""
        return Rejection(_STATISTICS[level], 1 / high, 1 / low, compares)

    level = options.choice("tis_level", _STATISTICS)
    mode = options.choice("tis_mode", ("truncate", "clip", "mask"))
    high = options.number_or("tis_upper_bound", math.nan, above=0)
    low = options.number_or("tis_lower_bound", 1 / high, above=0)
    rejections, veto = [within(level, low, high)] if mode == "mask" else [], None
    if options.flag("use_rs"):
        bounds = (options.number_or(f"rs_{name}_bound", x, above=0) for name, x in (("lower", low), ("upper", high)))
        rejections.append(within(options.choice("rs_level", _STATISTICS), *bounds))
        veto = options.number_or("rs_veto_threshold", None)
    expected = "no entropy_coef and no kl_loss_coef with it, since slime drops the penalties of rejected tokens"
    options.check("custom_tis_function_path", not rejections or not penalised, expected)
    normalise = options.flag("tis_batch_normalize")
    good = not normalise or level != "geometric"
    options.check("tis_batch_normalize", good, "False with tis_level='geometric', as slime does")
    low, high = {"truncate": (0.0, high), "clip": (low, high), "mask": (0.0, math.inf)}[mode]
    found: dict[str, Any] = {"weights": level, "low": low, "high": high, "batch_normalize": normalise}
    return found | {"rejections": tuple(rejections), "veto": veto, "compares": compares}
