"""Random configs of policy losses, in the oracle's words and in jaxppo's, and the comparison of
their results.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import oracle
from hypothesis import strategies as st
from oracle import OracleSample
from oracle.step import StepLoss
from oracle.step import compared as compared_policies
from random_steps import agree

from jaxppo import KL, OffPolicyConfig, PolicyLossConfig, Rejection, Unusable, explain_broken_rules
from jaxppo.base.arrays import Aggregation, Compared
from jaxppo.base.kl import Estimator, Importance, Over
from jaxppo.policy.off_policy import Statistic
from jaxppo.policy_losses import PolicyLoss, by_name

BASE = {  # all keys of a loss's config; tests change those that they are about
    "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.25, "dual_clip": None},
    "kl": {"coef": 0.25, "estimator": "k3", "importance": "none", "compares": "current/old"},
    "entropy_coef": 0.125,
    "ratio_to": "old",
    "aggregation": "sequence_mean_token_mean",
    "aggregation_norm": None,
    "metric_aggregation": "token_mean",
    "off_policy": None,
    "unusable": "nan",
    "weighted_denominators": None,  # None: the batch has no loss weights
}
RULES = {  # every rule for unusable tokens
    "weight_0": {"policy": "weight_0", "denominators": "in", "penalties": "in"},
    "weight_0, no penalties": {"policy": "weight_0", "denominators": "in", "penalties": "out"},
    "out": {"policy": "weight_0", "denominators": "out", "penalties": "out"},
    "ratio_1": {"policy": "ratio_1", "denominators": "in", "penalties": "in"},
    "ratio_1, no penalties": {"policy": "ratio_1", "denominators": "in", "penalties": "out"},
}
# hyperparameters of ClipCov and KLCov that `covariance_mask` reads
PICKS = ("share", "low", "high")


def between(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers between two bounds that f32 represents exactly."""
    return st.floats(low, high, width=32)


CLIPS = {"clip_low": between(0.0625, 0.75), "clip_high": between(0.0625, 2)}
SIGNS = ("positive", "negative")
LEVEL = {"level": st.sampled_from(["token", "sequence"])}
DUAL = {"dual_clip": st.none() | between(1.125, 5)}
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": CLIPS | DUAL,
    "gspo": CLIPS | DUAL | {"gradient": st.sampled_from(["sequence", "token"])},
    "cispo": CLIPS | LEVEL | {"unified_mask": st.booleans()},
    "sapo": {"tau_positive": between(0.125, 3), "tau_negative": between(0.125, 3)} | LEVEL,
    "aspo": CLIPS | {"dual_clip": between(1.125, 5)},
    "reinforce": {},
    "dppo_tv": CLIPS | {"ratio_cap": between(0.5, 20)},
    "dppo_kl": CLIPS | {"ratio_cap": between(0.5, 20)},
    "gmpo": CLIPS,
    "dro": {"beta": between(0, 2)},
    "vespo": {
        f"{x}_{sign}": between(0, 4) for x in ("k", "lambda") for sign in ("positive", "negative")
    },
    "probability_mask": CLIPS | {"ratio_cap": between(0.5, 20), "pull": between(0, 2)},
    "clip_cov": CLIPS | {"share": between(0, 1), "low": between(-1, 0.5), "high": between(0.75, 5)},
    "kl_cov": {"share": between(0, 1), "coef": between(0, 2)},
}
PLAIN = tuple(LOSSES)[:-2]  # those that select no tokens
LOSSES["by_sign"] = {
    sign: st.deferred(lambda: st.sampled_from(PLAIN).flatmap(losses)) for sign in SIGNS
}
BOUNDS = {
    "k1": (between(0.125, 0.875), between(1.125, 8)),
    "k2": (st.just(0.0), between(2**-10, 1)),
    "k3": (st.just(0.0), between(2**-10, 1)),
    "error": (st.just(0.0), between(1.0625, 4)),
    "diff": (between(-0.5, -(2**-10)), between(2**-10, 0.5)),
}
compared = st.sampled_from(get_args(Compared))


@st.composite
def losses(draw, name: str) -> dict[str, Any]:
    return {"name": name} | {k: draw(v) for k, v in LOSSES[name].items()}


@st.composite
def rejections(draw) -> dict[str, Any]:
    statistic = draw(st.sampled_from(get_args(Statistic)))
    low, high = (draw(bound) for bound in BOUNDS[statistic.rpartition("_")[2]])
    return {"statistic": statistic, "low": low, "high": high, "compares": draw(compared)}


@st.composite
def corrections(draw, name: str, ratio_to: str) -> dict[str, Any]:
    """Any corrections, but for weights that are already in the loss's ratio."""
    beside = {"old": ["old/rollout"], "rollout": [], "current": list(get_args(Compared))}[ratio_to]
    free = list(get_args(Compared)) if name in ("reinforce", "dro") else beside
    found = {
        "compares": draw(st.sampled_from(free) if free else compared),
        "weights": (
            draw(st.sampled_from(["token", "sequence", "geometric", "none"])) if free else "none"
        ),
        "low": draw(st.just(0.0) | between(0.0625, 0.875)),
        "high": draw(between(1.125, 4)),
        "outside": draw(st.sampled_from(["clamp", "zero"])),
        "rejections": tuple(draw(st.lists(rejections(), max_size=2))),
        "veto": draw(st.none() | between(2**-10, 0.875)),
        "opsm_delta": draw(st.none() | between(0, 0.5)),
        "opsm_fraction": draw(st.sampled_from(["loss", "response"])),
        "opsm_compares": draw(compared),
    }
    normalizes = found["weights"] != "none" and found["compares"] == "old/rollout"
    return found | {"batch_normalize": normalizes and draw(st.booleans())}


AGGREGATIONS = get_args(Aggregation)
norms = between(1, 64)


def norm_of(draw, aggregation: str) -> float | None:
    return draw(norms) if aggregation == "sequence_mean_token_sum_norm" else None


@st.composite
def penalties(draw) -> dict[str, Any]:
    estimator = draw(st.sampled_from(get_args(Estimator)))
    weights = [x for x in get_args(Importance) if x != "score" or not estimator.endswith("+")]
    found = {"coef": draw(st.just(0.0) | between(-0.5, 2)), "estimator": estimator}
    return found | {
        "importance": draw(st.sampled_from(weights)),
        "compares": draw(st.sampled_from(get_args(Over))),
    }


@st.composite
def configs(draw, name: str) -> dict[str, Any]:
    """The arguments of `oracle.policy_loss` for a loss: its own hyperparameters and those of
    `PICKS`.
    """
    ratio_to = draw(st.sampled_from(["old", "old", "rollout", "current"]))
    aggregation = draw(st.sampled_from(AGGREGATIONS))
    return {
        "loss": draw(losses(name)),
        "kl": draw(st.none() | penalties()),
        "entropy_coef": draw(st.just(0.0) | between(-0.5, 0.5)),
        "ratio_to": ratio_to,
        "aggregation": aggregation,
        "aggregation_norm": norm_of(draw, aggregation),
        "metric_aggregation": draw(st.sampled_from(["token_mean", "loss"])),
        "off_policy": draw(st.none() | corrections(name, ratio_to)),
        "unusable": draw(st.just("nan") | st.sampled_from(list(RULES.values()))),
        # describes the batch: None without loss weights
        "weighted_denominators": draw(st.sampled_from([None, None, False, True])),
    }


def needed(config: dict[str, Any]) -> set[str]:
    """The values that a batch must have for the config."""
    found = {f"{policy}_log_probs" for policy in compared_policies(config) - {"current"}}
    return {"advantages"} | found | (set() if config["kl"] is None else {"ref_log_probs"})


def of_jaxppo(config: dict[str, Any], numbers: dict[str, Any] | None = None) -> PolicyLossConfig:
    """The config, its coefficients replaced by `numbers`, which may be traced."""
    loss = loss_of(config["loss"], {} if numbers is None else numbers["loss"])
    kl = config["kl"]
    off = config["off_policy"]
    entropy_coef = config["entropy_coef"]
    if numbers is not None:
        kl = kl and kl | {"coef": numbers["kl"]}
        entropy_coef = numbers["entropy_coef"]
    if off is not None:
        off = OffPolicyConfig(
            **off | {"rejections": tuple(Rejection(**r) for r in off["rejections"])}
        )
    rest = {
        k: config[k] for k in ("ratio_to", "aggregation", "aggregation_norm", "metric_aggregation")
    }
    rest["unusable"] = (
        config["unusable"] if config["unusable"] == "nan" else Unusable(**config["unusable"])
    )
    return PolicyLossConfig(
        loss, kl=kl and KL(**kl), entropy_coef=entropy_coef, off_policy=off, **rest
    )


def loss_of(given: dict[str, Any], numbers: dict[str, Any]) -> PolicyLoss:
    """The loss of these options, with `numbers` in place of some of them."""
    options = {k: loss_of(v, {}) if k in SIGNS else v for k, v in given.items()} | numbers
    name = options.pop("name")
    if name.startswith("dppo"):
        name, options["divergence"] = name.split("_")
    return by_name(name, **options)


def numbers_of(config: dict[str, Any]) -> dict[str, Any]:
    """The coefficients that a schedule may move, as arrays."""
    found = {k: jnp.float32(v) for k, v in config["loss"].items() if isinstance(v, float)}
    kl = 0.0 if config["kl"] is None else config["kl"]["coef"]
    return {
        "loss": found,
        "kl": jnp.float32(kl),
        "entropy_coef": jnp.float32(config["entropy_coef"]),
    }


def of_oracle(
    config: dict[str, Any], samples: list[OracleSample]
) -> tuple[list[OracleSample], dict[str, Any]]:
    """The arguments of `oracle.policy_loss`."""
    # neither penalty nor metric, even if the batch has reference log-probs
    if config["kl"] is None:
        samples = [dataclasses.replace(s, ref_log_probs=None) for s in samples]
    picks = PICKS if config["loss"]["name"] in ("clip_cov", "kl_cov") else ()
    return samples, config | {"loss": {k: v for k, v in config["loss"].items() if k not in picks}}


@dataclasses.dataclass
class Found:
    """A result in the oracle's form: gradients by sample, `[tokens]` each, or None; metrics by
    name.
    """

    loss: Any
    by_log_probs: Any
    by_entropy: Any
    metrics: dict[str, Any]


def check_step(
    got: Found | StepLoss, expected: StepLoss, config: dict[str, Any], rtol: float = 1e-5
) -> None:
    """Raises if a loss, a gradient or a metric differs from the oracle's by more than rounding
    explains.
    """
    check_metrics(got.loss, got.metrics, expected, config, rtol)
    heaviest = np.max(expected.weights * [len(p.total) > 0 for p in expected.parts], initial=0)
    for what in ("by_log_probs", "by_entropy"):
        wanted = getattr(expected, what)
        size = heaviest / 2 + max(np.max(np.abs(x), initial=0) for x in wanted)
        for i, (x, y) in enumerate(zip(getattr(got, what) or wanted, wanted, strict=True)):
            agree(f"gradient {what} of sample {i}", x, y, size, rtol)


def check_metrics(
    loss: Any, found: dict[str, Any], expected: StepLoss, config: dict[str, Any], rtol: float
) -> None:
    """Raises if a loss or a metric is not the oracle's, or if one of the two has a metric that
    the other lacks.
    """
    weights = expected.weights
    parts = expected.parts

    def total(values):
        return sum(w * np.abs(v).sum() for w, v in zip(weights, values, strict=True))

    count = max(sum(len(p.total) for p in parts), 1)
    of_ones = total([np.ones(len(p.total)) for p in parts])
    of_terms = total([abs(p.policy) + abs(p.total) + abs(p.total - p.policy) for p in parts])
    agree("loss", loss, expected.loss, of_terms + of_ones / 2, rtol)
    assert {*found} - {"broken_rules"} == {*expected.metrics}, "metrics: other names"
    bits = int(found.get("broken_rules", 0))
    assert bits == 0, f"broken_rules: {explain_broken_rules(bits)}"
    for name, value in expected.metrics.items():
        if name in ("loss", "pg_loss"):
            size = of_terms + of_ones / 2
        elif name in ("unusable_tokens", "rollout_capped"):
            size = 0.0
        elif name not in parts[0].values:  # extremes and shares
            size = 0.5
        elif config["metric_aggregation"] == "loss":
            size = total([p.values[name] for p in parts]) + of_ones / 2
        else:
            size = sum(np.abs(p.values[name]).sum() for p in parts) / count + 0.5
            off = config["off_policy"] or {}
            if name.startswith("tis") and off.get("weights") in ("sequence", "geometric"):
                # the ratio of a sequence has the rounding errors of all its log-probs
                size += 0.05 * max(len(p.total) for p in parts)
        agree(f"metric {name}", found[name], value, size, rtol)


def moved(samples: list[OracleSample], by: float, own: float = 0.0) -> list[OracleSample]:
    """The step with all log-probs times 1 + by, and the policy's own plus `own`: a change as
    small as rounding.
    """
    names = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")

    def given(s):
        return {k: getattr(s, k) * (1 + by) for k in names if getattr(s, k) is not None}

    found = [dataclasses.replace(s, **given(s)) for s in samples]
    return [dataclasses.replace(s, log_probs=s.log_probs + own) for s in found]


def is_steady(
    config: dict[str, Any], samples: list[OracleSample], rtol: float, own: float = 0.0
) -> bool:
    """Whether rounding changes no decision: no token is at the edge of a clip, a rejection or a
    clamp.
    """
    expected = oracle.policy_loss(*of_oracle(config, samples))
    for sign in (-1, 1):
        try:
            near = moved(samples, sign * 2e-6, sign * own)
            check_step(oracle.policy_loss(*of_oracle(config, near)), expected, config, rtol)
        except AssertionError:
            return False
    return True
