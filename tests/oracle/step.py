"""The policy loss of a step: correction, policy loss, KL, entropy, aggregation, gradients and
metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .head import (
    HeadGradient,
    OracleHead,
    logit_gradient,
    logits,
    product_gradient,
    through_products,
    token_stats,
)
from .kl import k3, kl_penalty
from .off_policy import Correction, correction, mean_of_step
from .policy_losses import LOSSES, Tokens
from .samples import Array, OracleSample, sample_weights, token_mean, weighted_sum

CONFIG: dict[str, Any] = {
    "loss": "ppo",  # a name out of LOSSES, or {"name": ..., its hyperparameters}
    "kl": None,  # {"coef": ..., "estimator": "k3", "importance": "none", "compares": "current/old"}
    "entropy_coef": 0.0,
    "ratio_to": "old",  # "old", "rollout", "current"
    "aggregation": "token_mean",
    "aggregation_norm": None,
    "metric_aggregation": "token_mean",  # or "loss"
    # off_policy.OPTIONS, rejections as {"statistic": ..., "low": ..., "high": ...}
    "off_policy": None,
    # or {"policy": "weight_0" or "ratio_1", "denominators", "penalties": "in" or "out"}
    "unusable": "nan",
    "weighted_denominators": False,  # sums of loss weights in place of counts of loss tokens
}


class StepLoss(NamedTuple):
    """The loss; its gradients by log-probs and entropies, `[m]` a sample, 0 where there is no loss;
    metrics by name.

    `weights` and `parts` are each sample's weight and losses, for callers that need the size of the
    terms.
    """

    loss: float
    by_log_probs: list[Array]
    by_entropy: list[Array]
    metrics: dict[str, float]
    weights: Array
    parts: list[SampleLoss]


class SampleLoss(NamedTuple):
    """Arrays `[n]` over the loss tokens of a sample: losses, gradients of their sum, and terms
    of metrics.
    """

    total: Array
    policy: Array
    by_log_probs: Array
    by_entropy: Array
    values: dict[str, Array]


def complete(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config with its defaults; an unknown key is an error."""
    unknown = set(config or {}) - set(CONFIG)
    if unknown:
        raise ValueError(f"config: got {sorted(unknown)}, expected {sorted(CONFIG)}")
    full = {**CONFIG, **(config or {})}
    if isinstance(full["loss"], str):
        full["loss"] = {"name": full["loss"]}
    of_kl = {"coef": 0.0, "estimator": "k3", "importance": "none", "compares": "current/old"}
    full["kl"] = {**of_kl, **(full["kl"] or {})}
    return full


def old_log_probs(s: OracleSample, held: Array, ratio_to: str) -> Array:
    """The denominator of the ratio: the trainer's log-probs before the step, the sampler's, or the
    current ones.

    Where it is not finite it is the current one, a ratio of 1. (It is read there by a rule for
    unusable tokens alone.)
    """
    if ratio_to == "current":
        return held
    given = s.at({"old": "old_log_probs", "rollout": "rollout_log_probs"}[ratio_to])
    return np.where(np.isfinite(given), given, held)


def step_tokens(
    samples: Sequence[OracleSample], config: Mapping[str, Any], held: Sequence[Array]
) -> list[Tokens]:
    """The loss tokens of each sample, as arguments of a policy loss."""
    return [
        Tokens(
            s.at("log_probs"),
            old_log_probs(s, h, config["ratio_to"]),
            s.at("advantages"),
            h,
            None if s.selected is None else s.at("selected"),
        )
        for s, h in zip(samples, held, strict=True)
    ]


def policy_loss(
    samples: Sequence[OracleSample],
    config: Mapping[str, Any] | None = None,
    held: Sequence[Any] | None = None,
) -> StepLoss:
    """Sum over tokens of weight * (accepted * correction * policy loss + kl_coef * KL -
    entropy_coef * entropy).

    `held`, `[m]` a sample: the log-probs that constants of differentiation (a detached ratio, a
    correction by the current policy) come from. They are those of the samples, unless a finite
    difference moves the latter alone.
    """
    c = complete(config)
    counted = [in_denominators(s, c) for s in samples]
    weights = sample_weights(
        counted, c["aggregation"], c["aggregation_norm"], c["weighted_denominators"]
    )
    unusable = sum(int((impossible(s) | not_finite(s, c)).sum()) for s in samples)
    mean = mean_weight_before(counted, c)
    samples = [with_loss(s, c) for s in samples]
    mine = [s.log_probs for s in samples] if held is None else held
    constants = [
        replace(s, log_probs=h).at("log_probs") for s, h in zip(samples, mine, strict=True)
    ]
    tokens = step_tokens(samples, c, constants)
    policies: dict[str, Any] = {"current": constants, "old": None, "rollout": None}
    for name in ("old", "rollout"):
        if all(getattr(s, f"{name}_log_probs") is not None for s in samples):
            policies[name] = [s.at(f"{name}_log_probs") for s in samples]
    masks = [s.here for s in samples]
    advantages = [t.advantages for t in tokens]
    corrections = correction(policies, advantages, masks, c["off_policy"] or {}, mean)
    parts = [sample_loss(s, t, o, c) for s, t, o in zip(samples, tokens, corrections, strict=True)]

    by_token = [s.weights for s in samples]

    def weighed(values):
        return weighted_sum(weights, [w * v for w, v in zip(by_token, values, strict=True)])

    loss = weighed([p.total for p in parts])
    metrics = {"loss": loss, "pg_loss": weighed([p.policy for p in parts])}
    for name in parts[0].values:
        each = [p.values[name] for p in parts]
        metrics[name] = weighed(each) if c["metric_aggregation"] == "loss" else token_mean(each)
    if samples[0].rollout_log_probs is not None:
        metrics["rollout_capped"] = float(
            sum((s.at("rollout_log_probs") > 0).sum() for s in samples)
        )
    if c["unusable"] != "nan":
        metrics["unusable_tokens"] = float(unusable)
    return StepLoss(
        loss,
        [s.scatter(w * p.by_log_probs) for s, w, p in zip(samples, weights, parts, strict=True)],
        [s.scatter(w * p.by_entropy) for s, w, p in zip(samples, weights, parts, strict=True)],
        metrics | ratio_extremes([t.ratio for t in tokens]),
        weights,
        parts,
    )


def not_finite(s: OracleSample, c: Mapping[str, Any]) -> Array:
    """bool `[m]`: the tokens with loss for which the sampler's log-prob, or a compared old one,
    is not finite.
    """
    found = np.zeros(len(s.here), bool)
    for name in ["rollout_log_probs", *(["old_log_probs"] if "old" in compared(c) else [])]:
        if getattr(s, name) is not None:
            found |= ~np.isfinite(np.asarray(getattr(s, name), np.float64))
    return found & s.here


def impossible(s: OracleSample) -> Array:
    """bool `[m]`: the tokens with loss that the current policy finds impossible, with a log-prob
    of -inf.
    """
    return s.here & np.isneginf(np.asarray(s.log_probs, np.float64))


def but(s: OracleSample, tokens: Array) -> OracleSample:
    """The sample without the loss of these tokens."""
    return replace(s, mask=np.where(tokens, 0.0, np.asarray(s.mask, np.float64)))


def in_denominators(s: OracleSample, c: Mapping[str, Any]) -> OracleSample:
    """The tokens that denominators count.

    They are known before the step: the current policy takes none out.

    Out: torchtitan 0.3.0, `effective_loss_mask`. In: TRL 1.16 and Tunix.
    """
    if c["unusable"] == "nan" or c["unusable"]["denominators"] == "in":
        return s
    return but(s, not_finite(s, c))


def with_loss(s: OracleSample, c: Mapping[str, Any]) -> OracleSample:
    """The tokens with a policy loss or penalties: not those that the current policy finds
    impossible.
    """
    if c["unusable"] == "nan":
        return s
    return in_denominators(but(s, impossible(s)), c)


def with_policy_loss(s: OracleSample, c: Mapping[str, Any]) -> OracleSample:
    """Those of them with a policy loss, which a selection and the bounds of an adaptive clip are
    made of.
    """
    s = with_loss(s, c)
    if c["unusable"] == "nan" or c["unusable"]["policy"] == "ratio_1":
        return s
    return but(s, not_finite(s, c))


def compared(c: Mapping[str, Any]) -> set[str]:
    """The policies that the config compares."""
    off = c["off_policy"] or {}
    kl = c["kl"] or {}
    pairs = [r.get("compares", "old/rollout") for r in off.get("rejections", ())]
    if off.get("weights", "none") != "none" or off.get("veto") is not None:
        pairs.append(off.get("compares", "old/rollout"))
    if off.get("opsm_delta") is not None:
        pairs.append(off.get("opsm_compares", "current/old"))
    if kl.get("importance") in ("token", "sequence"):
        pairs.append(kl.get("compares", "current/old"))
    return {c["ratio_to"], *(name for pair in pairs for name in pair.split("/"))}


def mean_weight_before(samples: Sequence[OracleSample], c: Mapping[str, Any]) -> float | None:
    """The mean importance weight as it is known before the step, of the tokens in the denominators.

    None where weights are not divided by it.
    """
    if not (c["off_policy"] or {}).get("batch_normalize"):
        return None

    def of(name):
        return [s.at(name) for s in samples]

    return mean_of_step(of("old_log_probs"), of("rollout_log_probs"), c["off_policy"])


def sample_loss(
    s: OracleSample, t: Tokens, corrected: Correction, c: Mapping[str, Any]
) -> SampleLoss:
    """accepted * correction * policy loss + kl_coef * KL - entropy_coef * entropy of each loss
    token of a sample.

    The gradients are those of the sum of these, each times its loss weight.
    """
    finite = 1.0 - not_finite(s, c)[s.here]
    rule = {"policy": "ratio_1", "penalties": "in"} if c["unusable"] == "nan" else c["unusable"]
    upstream = (
        corrected.accepted * corrected.weights * (finite if rule["policy"] == "weight_0" else 1.0)
    )
    penalised = finite if rule["penalties"] == "out" else np.ones(s.count)
    loss = LOSSES[c["loss"]["name"]]
    values, jacobian, indicators = loss(t, **{k: v for k, v in c["loss"].items() if k != "name"})
    policy = total = upstream * values
    weighed = s.weights * upstream
    by_log_probs = weighed @ jacobian if jacobian.ndim == 2 else weighed * jacobian
    said = {**token_values(t), **indicators, **corrected.indicators}
    if s.ref_log_probs is not None or c["kl"]["coef"] != 0:
        estimator = c["kl"]["estimator"]
        importance = c["kl"]["importance"]
        base = t.held  # read for a ratio alone
        if importance in ("token", "sequence"):
            base = old_log_probs(s, t.held, c["kl"]["compares"].split("/")[1])
        reference = np.where(penalised > 0, s.at("ref_log_probs"), t.held)
        weights = s.weights * penalised
        values_of_kl, slope = kl_penalty(
            t.log_probs, reference, estimator, importance, base, t.held, weights
        )
        said["kl"] = values_of_kl * penalised
        total = total + c["kl"]["coef"] * said["kl"]
        by_log_probs = by_log_probs + c["kl"]["coef"] * slope
    if s.entropy is not None or c["entropy_coef"] != 0:
        said["entropy"] = s.at("entropy") * penalised
        total = total - c["entropy_coef"] * said["entropy"]
    if s.rollout_log_probs is not None:
        trainer = t.held if c["ratio_to"] == "rollout" else t.old
        sampler = s.at("rollout_log_probs")
        if c["unusable"] != "nan":
            sampler = np.where(finite > 0, sampler, trainer)
        said |= sampler_values(trainer, sampler)
    return SampleLoss(total, policy, by_log_probs, -c["entropy_coef"] * s.weights * penalised, said)


def token_values(t: Tokens) -> dict[str, Array]:
    """Metrics of every policy loss: old - current log-probs, and the ratio."""
    return {"ppo_kl": -t.d, "ratio_mean": t.ratio}


def sampler_values(trainer: Array, sampler: Array) -> dict[str, Array]:
    """The sampler compared with the trainer's old policy, or with the current one if the sampler is
    the old one.

    |d| and exp(d) - 1 - d, with d = trainer - sampler.
    """
    return {
        "sampler_log_prob_abs_diff": np.abs(trainer - sampler),
        "sampler_k3": k3(trainer - sampler),
    }


def ratio_extremes(ratios: Sequence[Array]) -> dict[str, float]:
    """Smallest and largest ratio, and (sum r)^2 / (N sum r^2), the effective sample size as a
    share.
    """
    r = np.concatenate([*ratios, np.zeros(0)])
    if len(r) == 0:
        return {"ratio_min": np.inf, "ratio_max": -np.inf, "effective_sample_size": 0.0}
    size = float(r.sum() ** 2 / (len(r) * np.sum(r * r)))
    return {"ratio_min": float(r.min()), "ratio_max": float(r.max()), "effective_sample_size": size}


def with_stats(samples: Sequence[OracleSample], head: OracleHead) -> list[OracleSample]:
    """The samples with the statistics of their hidden states and targets; positions without loss
    are NaN.
    """
    out = []
    for s in samples:
        y, nucleus, temperature = head_inputs(s)
        found = token_stats(logits(s.at("hidden"), head, temperature), y, nucleus)._asdict()
        fields: dict[str, Any] = {
            k: np.where(s.here, s.scatter(v), np.nan) for k, v in found.items()
        }
        out.append(replace(s, **fields))
    return out


def head_inputs(s: OracleSample) -> tuple[Array, Array | None, Array]:
    """Targets, nucleus ids and temperatures of the tokens with loss."""
    nucleus = None if s.nucleus_ids is None else s.at("nucleus_ids").astype(int)
    temperature = np.broadcast_to(np.asarray(s.temperature, np.float64), s.here.shape)[s.here]
    return s.at("targets").astype(int), nucleus, temperature


def policy_loss_from_hidden(
    samples: Sequence[OracleSample], head: OracleHead, config: Mapping[str, Any] | None = None
) -> tuple[StepLoss, list[Array], HeadGradient]:
    """`policy_loss` of `with_stats`, and its gradients by each sample's hidden states `[m, H]`
    and by the head.
    """
    result = policy_loss(with_stats(samples, head), config)
    return result, *through_head(samples, head, stats_gradients(samples, result))


def stats_gradients(samples: Sequence[OracleSample], loss: StepLoss) -> list[Mapping[str, Array]]:
    """A loss's gradients by the statistics of the tokens with loss, sample by sample."""
    gradients = zip(samples, loss.by_log_probs, loss.by_entropy, strict=True)
    return [{"by_log_prob": g[s.here], "by_entropy": e[s.here]} for s, g, e in gradients]


def through_head(
    samples: Sequence[OracleSample],
    head: OracleHead,
    by_stats: Sequence[Mapping[str, Array]],
    sizes: bool = False,
) -> tuple[list[Array], HeadGradient]:
    """From gradients by statistics, as `logit_gradient` names them, to those by hidden states and
    by the head.

    With `sizes` the sums of the sizes of their terms instead: what is rounded is a term.
    """
    by_hidden = []
    by_head = []
    for s, cotangents in zip(samples, by_stats, strict=True):
        y, nucleus, temperature = head_inputs(s)
        z = logits(s.at("hidden"), head, temperature)
        dz = logit_gradient(z, y, **cotangents, nucleus=nucleus)
        given = s.at("hidden"), head, product_gradient(s.at("hidden"), head, dz, temperature)
        if sizes:
            arrays = {
                k: np.abs(x)
                for k in ("kernel", "bias", "a", "b")
                if (x := getattr(head, k)) is not None
            }
            given = np.abs(given[0]), replace(head, **arrays), np.abs(given[2])
        dh, parts = through_products(*given)
        by_hidden.append(s.scatter(dh))
        by_head.append(parts)
    sums: list[Any] = [
        None if x[0] is None else np.sum(x, axis=0) for x in zip(*by_head, strict=True)
    ]
    return by_hidden, HeadGradient(*sums)


def covariance(samples: Sequence[OracleSample]) -> list[Array]:
    """(A - mean A)(log_prob - mean log_prob) of each loss token, `[n]`, means over the step's.

    2505.22617.
    """
    a = [s.at("advantages") for s in samples]
    p = [s.at("log_probs") for s in samples]
    return [(x - token_mean(a)) * (y - token_mean(p)) for x, y in zip(a, p, strict=True)]


def how_many(samples: Sequence[OracleSample], ratio: float) -> int:
    """max(1, ratio * the step's loss tokens), rounded down."""
    return max(1, int(ratio * sum(s.count for s in samples)))


def highest(samples: Sequence[OracleSample], ratio: float) -> list[Array]:
    """bool `[m]` a sample: the `how_many` loss tokens of highest covariance, which kl_cov
    penalises.
    """
    cov = covariance(samples)
    everything = np.sort(np.concatenate([*cov, np.zeros(0)]))
    if len(everything) == 0:
        return [s.here & False for s in samples]
    least = everything[-how_many(samples, ratio)]
    return [s.scatter(c >= least) > 0 for s, c in zip(samples, cov, strict=True)]


def clip_cov_candidates(
    samples: Sequence[OracleSample],
    config: Mapping[str, Any] | None,
    low: float = 1.0,
    high: float = 5.0,
) -> list[Array]:
    """bool `[m]` a sample: low < covariance < high, and not clipped by the ratio; clip_cov picks
    `how_many` of them.
    """
    c = complete(config)
    tokens = step_tokens(
        [replace(s, selected=None) for s in samples], c, [s.at("log_probs") for s in samples]
    )
    clips = {k: v for k, v in c["loss"].items() if k in ("clip_low", "clip_high")}
    clipped = [LOSSES["ppo"](t, **clips).indicators["clip_fraction"] > 0 for t in tokens]
    return [
        s.scatter((low < x) & (x < high) & ~gone) > 0
        for s, x, gone in zip(samples, covariance(samples), clipped, strict=True)
    ]
