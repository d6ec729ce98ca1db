"""The arguments of slime, read as the fields of a `PolicyLossConfig`.

An argument is translated, or has a remark in `Translation.elsewhere`, or is refused by name: a value without an
equivalent here is an error.
"""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from jaxppo.base.arrays import Coefficient, RatioTo
from jaxppo.base.kl import KL
from jaxppo.policy import slime_keys as SLIME
from jaxppo.policy.off_policy import OffPolicyConfig, Rejection
from jaxppo.policy.options import Options, Reading
from jaxppo.policy_losses import CISPO, GSPO, PPO, PolicyLoss

_MISMATCH = "train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
_STATISTICS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def read(args: Namespace | Mapping[str, Any], keys: Any = SLIME) -> Reading:
    """Reads the policy loss of a configuration and the options around it, see `slime.translate`.

    `keys` is the module of the names of slime, or of a system that began as slime.
    """
    if not isinstance(args, Namespace | Mapping):
        expected = f"{keys.NAME}'s parsed arguments, or a mapping of them"
        raise TypeError(f"args: got {type(args).__name__}, expected {expected}")
    given, others = (vars(args), f"no argument of {keys.NAME}'s own") if isinstance(args, Namespace) else (args, None)
    known = keys.DEFAULTS | keys.MISMATCH_HELPER
    options = Options(given, known, keys.ELSEWHERE, f"{keys.NAME} at {keys.VERSION}", others)
    options.choice("loss_type", ("policy_loss",), "SFT is a loss of its own, a loss of your own a PolicyLoss")
    if options["custom_pg_loss_reducer_function_path"] is not None:
        options.refuse("custom_pg_loss_reducer_function_path", "None; see PolicyLossConfig(aggregation=)")
    kl_coef = options.number("kl_loss_coef") if options.flag("use_kl_loss") else 0.0
    ratio_to: RatioTo = "rollout" if options.flag("use_rollout_logprobs") else "old"
    anew = "skip_actor_forward_only" in keys.DEFAULTS and options.flag("skip_actor_forward_only")
    if anew and ratio_to == "old":
        ratio_to = "current"
    kl_type = options.choice("kl_loss_type", ("k1", "k2", "k3", "low_var_kl"))
    weighed = {"importance": "token", "compares": f"current/{ratio_to}"}
    if ratio_to == "current":  # the ratio of a policy to itself has a gradient
        weighed = {"importance": "score"}
    weight: Any = weighed if options.flag("use_unbiased_kl") else {}
    entropy_coef = options.number("entropy_coef")
    policy = {
        "loss": _loss(options, keys),
        "kl": KL(kl_coef, kl_type, **weight),  # type: ignore[arg-type]
        "entropy_coef": entropy_coef,
        "ratio_to": ratio_to,
        "aggregation": "token_mean" if options.flag("calculate_per_token_loss") else "rollout_mean",
        "metric_aggregation": "loss",
        "off_policy": _correction(options, keys, anew, penalised=kl_coef != 0 or entropy_coef != 0),
    }
    head = {"temperature": options.number("rollout_temperature")}
    return Reading(policy, head, _batching(options), options.elsewhere)


def _loss(options: Options, keys: Any) -> PolicyLoss:
    low = options.number("eps_clip")
    high = low if options["eps_clip_high"] is None else options.number("eps_clip_high")
    dual_clip: Coefficient | None = None if options["eps_clip_c"] is None else options.number("eps_clip_c")
    match options.choice("advantage_estimator", keys.ADVANTAGES):
        case "gspo":
            return GSPO(low, high, dual_clip)
        case "cispo":
            return CISPO(low, high)
    return PPO(low, high, dual_clip)


def _correction(options: Options, keys: Any, anew: bool, penalised: bool) -> OffPolicyConfig | None:
    """The corrections; their trainer's log-probs are the current ones where none were computed before the step."""
    if anew and options.flag("use_opsm"):
        options.refuse("use_opsm", "False with skip_actor_forward_only: the policy has not moved")
    delta = options.number("opsm_delta") if options.flag("use_opsm") else None
    corrected: dict[str, Any] = {"opsm_delta": delta, "opsm_fraction": "response"} if delta is not None else {}
    if delta is not None and options.flag("use_rollout_logprobs"):
        corrected["opsm_compares"] = "current/rollout"
    weighs, path = options.flag("use_tis"), options["custom_tis_function_path"]
    if weighs and options.flag("use_rollout_logprobs"):
        options.refuse("use_tis", "False with use_rollout_logprobs, as slime does")
    if weighs or options.flag("get_mismatch_metrics"):
        if path is not None and str(path).endswith(_MISMATCH):
            corrected |= _mismatch_helper(options, penalised) if weighs else {}
        elif path in (None, keys.ICEPOP):
            low, high = options.number("tis_clip_low"), options.number("tis_clip")
            outside = "clamp" if path is None else "zero"
            corrected |= {"weights": "token", "low": low, "high": high, "outside": outside}
        else:
            options.refuse("custom_tis_function_path", f"None, {keys.ICEPOP} or examples.{_MISMATCH}")
        if anew and corrected:
            corrected |= {"compares": "current/rollout"}
            of = [dataclasses.replace(x, compares="current/rollout") for x in corrected.get("rejections", ())]
            corrected |= {"rejections": tuple(of)}
    return OffPolicyConfig(**corrected) if corrected else None


def _mismatch_helper(options: Options, penalised: bool) -> dict[str, Any]:
    """The correction of examples/train_infer_mismatch_helper, as fields of an `OffPolicyConfig`."""
    missing = [name for name in SLIME.MISMATCH_HELPER if name not in options.given]
    if missing:
        raise ValueError(
            f"custom_tis_function_path: got the mismatch helper without {', '.join(missing)}, expected them"
        )

    def positive(name: str, default: float) -> float:
        return default if options[name] is None else options.number(name, above=0)

    level = options.choice("tis_level", _STATISTICS)
    mode = options.choice("tis_mode", ("truncate", "clip", "mask"))
    high = positive("tis_upper_bound", math.nan)
    low = positive("tis_lower_bound", 1 / high)
    rejections, veto = [_within(level, low, high)] if mode == "mask" else [], None
    if options.flag("use_rs"):
        bounds = positive("rs_lower_bound", low), positive("rs_upper_bound", high)
        rejections.append(_within(options.choice("rs_level", _STATISTICS), *bounds))
        veto = None if options["rs_veto_threshold"] is None else options.number("rs_veto_threshold")
    if rejections and penalised:
        expected = "no entropy_coef and no kl_loss_coef with it, since slime drops the penalties of rejected tokens"
        options.refuse("custom_tis_function_path", expected)
    normalise = options.flag("tis_batch_normalize")
    if normalise and level == "geometric":
        options.refuse("tis_batch_normalize", "False with tis_level='geometric', as slime does")
    limits = {"truncate": (0.0, high), "clip": (low, high), "mask": (0.0, math.inf)}[mode]
    return {
        "weights": level,
        "low": limits[0],
        "high": limits[1],
        "batch_normalize": normalise,
        "rejections": tuple(rejections),
        "veto": veto,
    }


def _within(level: str, low: float, high: float) -> Rejection:
    """Accepts trainer / sampler ratios of that level from low to high; `Rejection` has bounds of the inverse."""
    return Rejection(_STATISTICS[level], 1 / high, 1 / low)  # type: ignore[arg-type]


def _batching(options: Options) -> dict[str, int]:
    context, prompt, response = (options.count(f"rollout_max_{name}_len") for name in ("context", "prompt", "response"))
    longest = context or (prompt + response if prompt and response else None)
    tokens = options.count("max_tokens_per_gpu")
    if not options.flag("use_dynamic_batch_size"):
        samples = options.count("micro_batch_size")
        tokens = samples * longest if samples and longest else None
    return ({"row_length": longest} if longest else {}) | ({"max_tokens": tokens} if tokens else {})
