"""Correction for a sampler whose policy differs from the trainer's: weights, rejections, veto,
sequence masking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .kl import clamp, k3
from .samples import Array

OPTIONS: dict[str, Any] = {
    "weights": "none",
    "low": 0.0,
    "high": 2.0,
    "outside": "clamp",
    "batch_normalize": False,
    "rejections": (),
    "veto": None,
    "opsm_delta": None,
    "opsm_compares": "current/old",
    "opsm_fraction": "loss",
    "compares": "old/rollout",
}


class Correction(NamedTuple):
    """For one sequence's loss tokens, `[n]` each: what multiplies the policy loss, what is
    accepted, what to report.
    """

    weights: Array
    accepted: Array
    indicators: dict[str, Array]


def importance_weights(d: Array, level: str) -> Array:
    """rho = exp(d), d = log(trainer / sampler): of the token, of the sequence (sum of d), geometric
    (mean of d).

    Token: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; geometric: Zheng et al. 2025,
    2507.18071.
    """
    if len(d) == 0 or level == "none":
        return np.ones_like(d)
    return np.exp(
        clamp(
            {
                "token": d,
                "sequence": np.full_like(d, d.sum()),
                "geometric": np.full_like(d, d.mean()),
            }[level]
        )
    )


def bound(rho: Array, low: float, high: float, outside: str) -> Array:
    """Truncated ("clamp"), or 0 outside of [low, high] ("zero", IcePop,
    https://arxiv.org/abs/2510.18855).
    """
    return (
        np.clip(rho, low, high)
        if outside == "clamp"
        else np.where((low <= rho) & (rho <= high), rho, 0.0)
    )


def mean_weight(bounded: Sequence[Array], level: str) -> float:
    """Over the step's tokens; for the weights of sequences, over the sequences that have a
    token.
    """
    found = [b if level == "token" else b[:1] for b in bounded]
    total = np.concatenate([*found, np.zeros(0)])
    return float(total.mean()) if len(total) else 1.0


def equal_unless_finite(a: Array, b: Array) -> list[Array]:
    """Two log-probs, 0 where one of them is not finite: a ratio of 1, and a logarithm of 0 in a sum
    or mean.

    TRL 1.16, `nan_to_num` of their difference; Tunix, `log_ratio` where `valid_tok` is False.
    Whether such tokens are among these is a rule's choice.
    """
    both = np.isfinite(a) & np.isfinite(b)
    return [np.where(both, x, 0.0) for x in (a, b)]


def mean_of_step(
    old: Sequence[Array], rollout: Sequence[Array], options: Mapping[str, Any]
) -> float | None:
    """The mean weight over tokens whose log-probs these are, `[n]` a sequence; None where
    weights are not divided.
    """
    o = {**OPTIONS, **options}
    if not o["batch_normalize"]:
        return None
    pairs = [equal_unless_finite(t, r) for t, r in zip(old, rollout, strict=True)]
    rho = [importance_weights(t - r, o["weights"]) for t, r in pairs]
    return mean_weight([bound(x, o["low"], o["high"], o["outside"]) for x in rho], o["weights"])


def runs(mask: Array) -> list[Array]:
    """The loss tokens, numbered among themselves, in groups that follow one another without a
    gap.
    """
    places = np.nonzero(np.asarray(mask) > 0)[0]
    cuts = np.nonzero(np.diff(places) > 1)[0] + 1
    return [x for x in np.split(np.arange(len(places)), cuts) if len(x)]


def statistic(a: Array, b: Array, name: str, mask: Array) -> Array:
    """k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, error = exp |d|, d = a - b, or exp(a) - exp(b),
    of each token.

    Or their sum, mean, maximum or minimum over the sequence, or the mean over each run. The levels
    of ROLL: token, run ("segment"), sequence (sums of either), geometric (means).
    """
    level, kind = name.rsplit("_", 1)
    d = a - b
    # NeMo-RL's seq_logprob_error_threshold: the mean of exp |d|
    error = np.exp(np.minimum(np.abs(d), 700))
    k = {"k1": -d, "k2": d * d / 2, "k3": k3(d), "diff": np.exp(a) - np.exp(b), "error": error}[
        kind
    ]
    if level == "token" or len(d) == 0:
        return k
    if level == "run_mean":
        return np.concatenate([np.full(len(places), k[places].mean()) for places in runs(mask)])
    return np.full_like(
        k, {"seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max, "seq_min": np.min}[level](k)
    )


def accepted(a: Array, b: Array, rejection: Mapping[str, Any], mask: Array) -> Array:
    """Within [low, high]; the bounds of k1 are of exp(k1), the ratio b / a."""
    name = rejection["statistic"]
    high = rejection.get("high", np.inf)
    low = rejection.get("low", -np.inf if name.endswith("diff") else 0.0)
    if name.endswith("k1"):
        with np.errstate(divide="ignore"):
            low = np.log(low)
            high = np.log(high)
    k = statistic(a, b, name, mask)
    return (low <= k) & (k <= high)


def vetoed(d: Array, threshold: float) -> Array:
    """All tokens of a sequence that has one with rho below the threshold."""
    return np.full(len(d), bool(np.any(np.exp(clamp(d)) < threshold)))


def sequence_masked(d: Array, advantages: Array, delta: float) -> Array:
    """Tokens with A < 0 of a sequence whose mean of -d exceeds delta. DeepSeek-V3.2, 2512.02556."""
    return (advantages < 0) & bool(len(d) and np.mean(-d) > delta)


def response_span(mask: Array) -> int:
    """Positions from the first to the last loss token."""
    places = np.nonzero(np.asarray(mask) > 0)[0]
    return int(places[-1] - places[0] + 1) if len(places) else 0


def _known(policies: Mapping[str, Any], name: str) -> Any:
    if policies[name] is None:
        raise ValueError(f"{name}_log_probs: got None, expected [m]")
    return policies[name]


def correction(
    policies: Mapping[str, Sequence[Array] | None],
    advantages: Sequence[Array],
    masks: Sequence[Array],
    options: Mapping[str, Any],
    mean: float | None = None,
) -> list[Correction]:
    """All corrections of a step.

    Arrays are those of the loss tokens of each sequence, `masks` whole.

    `policies` are the log-probs of "current", "old" and "rollout"; a pair "a/b" has d = log a - log
    b. `mean` is the mean weight of the step where it is not that of these tokens.

    The policy loss of a token is times `weights`, and 0 where it is not accepted; KL and entropy,
    and the denominators, stay those of all loss tokens. (The masked importance weight of the papers
    is a factor of the policy gradient.)
    """
    unknown = set(options) - set(OPTIONS)
    if unknown:
        raise ValueError(f"off_policy: got {sorted(unknown)}, expected {sorted(OPTIONS)}")
    o = {**OPTIONS, **options}
    level = o["weights"]
    low = o["low"]
    high = o["high"]

    def pairs(name):
        a, b = (_known(policies, x) for x in name.split("/"))
        return [equal_unless_finite(x, y) for x, y in zip(a, b, strict=True)]

    def differences(name):
        return [a - b for a, b in pairs(name)]

    weighs = level != "none" or o["veto"] is not None
    d = differences(o["compares"]) if weighs else [np.zeros(len(x)) for x in advantages]
    rho = [importance_weights(x, level) for x in d]
    bounded = [bound(x, low, high, o["outside"]) if level != "none" else x for x in rho]
    if mean is None:
        mean = mean_weight(bounded, level) if o["batch_normalize"] else 1.0
    out = []
    for i, x in enumerate(d):
        weights = bounded[i] / mean if mean > 0 else np.zeros_like(x)
        keep = np.ones(len(x), bool)
        said: dict[str, Array] = {}
        if level != "none":
            beyond = (rho[i] < low) | (rho[i] > high)
            said |= {"tis": rho[i], "tis_abs": np.abs(rho[i] - 1), "tis_clipfrac": beyond * 1.0}
        if o["rejections"]:
            keep = np.ones(len(x), bool)
            for r in o["rejections"]:
                keep = keep & accepted(*pairs(r.get("compares", "old/rollout"))[i], r, masks[i])
            said["rejected_fraction"] = ~keep * 1.0
        if o["veto"] is not None:
            veto = vetoed(x, o["veto"])
            keep = keep & ~veto
            said["veto_fraction"] = veto * 1.0
        if o["opsm_delta"] is not None:
            out_of_loss = sequence_masked(
                differences(o["opsm_compares"])[i], advantages[i], o["opsm_delta"]
            )
            weights = np.where(out_of_loss, 0.0, weights)
            spread = (
                response_span(masks[i]) / max(len(x), 1)
                if o["opsm_fraction"] == "response"
                else 1.0
            )
            said["opsm_clipfrac"] = out_of_loss * spread
        out.append(Correction(weights, keep * 1.0, said))
    return out
