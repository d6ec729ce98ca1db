"""Preference losses on a list of samples: pairs by group id, the one of higher reward chosen; and
reward models.

Each of them gives the loss, its gradient by the log-prob of each loss token (by each score), and
its metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .samples import Array, OracleSample

Metrics = dict[str, float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def smoothed(h: float, e: float = 0.0) -> tuple[float, float]:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h), and its slope."""
    value = (1 - e) * math.log1p(math.exp(-h)) + e * math.log1p(math.exp(h))
    return value, -(1 - e) * sigmoid(-h) + e * sigmoid(h)


# Each of a pair's two responses is told by the sum of its log-probs, that of its log-ratios to the
# reference, and its length; a loss gives its value and its slopes by the sum of log-probs (or
# log-ratios) of either.
Told = tuple[float, float, int]


def dpo(
    c: Told, r: Told, *, beta=0.1, label_smoothing=0.0, length_normalised=False, link="sigmoid"
) -> tuple[float, float, float]:
    """Rafailov et al. 2023, 2305.18290; with label smoothing Mitchell's cDPO; with other links
    as TRL has them.
    """
    by = (c[2], r[2]) if length_normalised else (1, 1)
    if link != "sigmoid":
        value, by_c, by_r = links(link, beta * c[1] / by[0], beta * r[1] / by[1], label_smoothing)
        return value, beta * by_c / by[0], beta * by_r / by[1]
    value, slope = smoothed(beta * (c[1] / by[0] - r[1] / by[1]), label_smoothing)
    return value, beta * slope / by[0], -beta * slope / by[1]


def links(link: str, c: float, r: float, e: float) -> tuple[float, float, float]:
    """The loss of two rewards by its published form, and its slopes by each, by differences in
    float64.
    """

    def value(c, r):
        h = c - r
        q = max(e, 1e-3)
        s = sigmoid
        w = s(h / 0.05)
        return {
            "hinge": max(0.0, 1 - h),
            "robust": ((1 - e) * -math.log(s(h)) - e * -math.log(s(-h))) / (1 - 2 * e),
            "exo": s(h) * math.log(s(h) / (1 - q)) + s(-h) * math.log(s(-h) / q),
            "nca": -math.log(s(c)) - 0.5 * math.log(s(-c)) - 0.5 * math.log(s(-r)),
            "apo_zero": 1 - s(c) + s(r),
            "apo_down": s(c) + 1 - s(h),
            "sppo": (c - 0.5) ** 2 + (r + 0.5) ** 2,
            "discopop": (1 - w) * -math.log(s(h)) + w * math.exp(-h),
        }[link]

    d = 1e-6
    by_c, by_r = (value(c + x, r + y) - value(c - x, r - y) for x, y in ((d, 0), (0, d)))
    return value(c, r), by_c / (2 * d), by_r / (2 * d)


def ipo(c: Told, r: Told, *, beta=0.1, length_normalised=True) -> tuple[float, float, float]:
    """Azar et al. 2023, 2310.12036, equation 17; of means in TRL."""
    by = (c[2], r[2]) if length_normalised else (1, 1)
    off = c[1] / by[0] - r[1] / by[1] - 1 / (2 * beta)
    return off * off, 2 * off / by[0], -2 * off / by[1]


def simpo(
    c: Told, r: Told, *, beta=2.0, margin=0.5, label_smoothing=0.0
) -> tuple[float, float, float]:
    """Meng et al. 2024, 2405.14734, equation 6."""
    value, slope = smoothed(beta / c[2] * c[0] - beta / r[2] * r[0] - margin, label_smoothing)
    return value, beta / c[2] * slope, -beta / r[2] * slope


def orpo(c: Told, r: Told, *, beta=0.1) -> tuple[float, float, float]:
    """Hong et al. 2024, 2403.07691, equation 7: the odds ratio's part alone."""

    def log_odds(x: Told) -> tuple[float, float]:
        p = math.exp(x[0] / x[2])
        # the derivative of m - log(1 - exp(m)) is 1 / (1 - exp(m))
        return math.log(p / (1 - p)), 1 / (1 - p) / x[2]

    (better, by_c), (worse, by_r) = log_odds(c), log_odds(r)
    value, slope = smoothed(better - worse)
    return beta * value, beta * slope * by_c, -beta * slope * by_r


PAIRWISE: dict[str, Callable[..., tuple[float, float, float]]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
}


def told(s: OracleSample, reference: bool) -> Told:
    ratio = s.at("log_probs") - s.at("ref_log_probs") if reference else s.at("log_probs")
    return float(s.at("log_probs").sum()), float(ratio.sum()), s.count


def implied(name: str, x: Told, options: dict[str, Any]) -> float:
    """The reward that the policy implies: beta times what the loss compares."""
    beta = options.get("beta", {"simpo": 2.0}.get(name, 0.1))
    if name in ("simpo", "orpo"):
        return beta * x[0] / x[2]
    normalised = options.get("length_normalised", name == "ipo")
    return beta * (x[1] / x[2] if normalised else x[1])


def pairs_of(samples: Sequence[OracleSample]) -> list[tuple[int, int]]:
    """(chosen, rejected) of each group."""
    found = []
    for group in sorted({s.group_id for s in samples if s.count}):
        one, other = (i for i, s in enumerate(samples) if s.group_id == group and s.count)
        found.append((one, other) if samples[one].reward > samples[other].reward else (other, one))
    return found


def preference_loss(
    samples: Sequence[OracleSample],
    name: str,
    *,
    nll_coef: float | None = None,
    nll="sequence_mean_token_mean",
    **options: Any,
) -> tuple[float, list[Array], Metrics]:
    """The mean over pairs of a loss out of PAIRWISE, and of `nll_coef` times the chosen
    response's NLL.
    """
    coef = (1.0 if name == "orpo" else 0.0) if nll_coef is None else nll_coef
    pairs = pairs_of(samples)
    gradients = [np.zeros(len(s.mask)) for s in samples]
    total = 0.0
    rewards: dict[str, list[float]] = {"chosen": [], "rejected": []}
    means: dict[str, list[float]] = {"chosen": [], "rejected": []}
    for c, r in pairs:
        one, other = (told(samples[i], name in ("dpo", "ipo")) for i in (c, r))
        value, by_c, by_r = PAIRWISE[name](one, other, **options)
        length = one[2] if nll == "sequence_mean_token_mean" else 1
        total += value - coef * one[0] / length
        gradients[c] += samples[c].here * (by_c - coef / length) / len(pairs)
        gradients[r] += samples[r].here * by_r / len(pairs)
        for side, x in (("chosen", one), ("rejected", other)):
            rewards[side].append(implied(name, x, options))
            means[side].append(x[0] / x[2])
    metrics = {"loss": total / len(pairs)}
    metrics |= {f"{side}_reward": float(np.mean(x)) for side, x in rewards.items()}
    metrics |= {f"{side}_log_prob": float(np.mean(x)) for side, x in means.items()}
    ahead = np.subtract(rewards["chosen"], rewards["rejected"])
    return (
        metrics["loss"],
        gradients,
        metrics | {"reward_margin": ahead.mean(), "accuracy": (ahead > 0).mean()},
    )


def kto(
    samples: Sequence[OracleSample],
    *,
    reference_point,
    beta=0.1,
    desirable_weight=1.0,
    undesirable_weight=1.0,
) -> tuple[float, list[Array], Metrics]:
    """Ethayarajh et al. 2024, 2402.01306, equation 8, its value function's mean taken from the
    weights.
    """
    present = [s for s in samples if s.count]
    total = 0.0
    gradients = []
    rewards: dict[str, list[float]] = {"chosen": [], "rejected": []}
    means: dict[str, list[float]] = {"chosen": [], "rejected": []}
    for s in samples:
        if not s.count:
            gradients.append(np.zeros(len(s.mask)))
            continue
        d = told(s, True)[1]
        good = s.reward > 0
        sign, w = (1, desirable_weight) if good else (-1, undesirable_weight)
        v = sigmoid(sign * beta * (d - reference_point))
        total += w * (1 - v)
        gradients.append(s.here * (-w * v * (1 - v) * sign * beta) / len(present))
        rewards["chosen" if good else "rejected"].append(beta * d)
        means["chosen" if good else "rejected"].append(float(s.at("log_probs").mean()))
    metrics = {"loss": total / len(present)}
    metrics |= {f"{side}_reward": float(np.mean(x)) if x else 0.0 for side, x in rewards.items()}
    metrics |= {f"{side}_log_prob": float(np.mean(x)) if x else 0.0 for side, x in means.items()}
    return metrics["loss"], gradients, metrics


def a2po(samples: Sequence[OracleSample], *, beta=1e-3) -> tuple[float, list[Array], Metrics]:
    """Brantley et al. 2025, 2505.20686: (beta d - A)^2, d the sum of log-ratios and A the reward
    less V*, given so.
    """
    present = [s for s in samples if s.count]
    total = 0.0
    gradients = []
    implied_by: dict[str, list[float]] = {"chosen": [], "rejected": []}
    means: dict[str, list[float]] = {"chosen": [], "rejected": []}
    for s in samples:
        if not s.count:
            gradients.append(np.zeros(len(s.mask)))
            continue
        off = beta * told(s, True)[1] - s.reward
        total += off**2
        gradients.append(s.here * (2 * beta * off / len(present)))
        side = "chosen" if s.reward > 0 else "rejected"
        implied_by[side].append(off + s.reward)
        means[side].append(float(s.at("log_probs").mean()))
    metrics = {"loss": total / len(present)}
    metrics |= {f"{side}_reward": float(np.mean(x)) if x else 0.0 for side, x in implied_by.items()}
    metrics |= {f"{side}_log_prob": float(np.mean(x)) if x else 0.0 for side, x in means.items()}
    return metrics["loss"], gradients, metrics


def real(samples: Sequence[OracleSample], *, tau=0.5) -> tuple[float, list[Array], Metrics]:
    """2602.05630, as in ms-swift 4.6: log(1 + sum_good exp(-s / tau)) + log(1 + sum_bad exp(s /
    tau)) of a group.

    s is the mean of log_prob - old_log_prob. The mean is over groups with a loss token; one without
    good or without bad samples has a loss of 0. Metrics weigh a sample by its share of its group's
    tokens.
    """
    groups = sorted({s.group_id for s in samples if s.count})
    gradients = [np.zeros(len(s.mask)) for s in samples]
    total = 0.0
    one_sided = 0
    s_of = {True: [], False: []}
    for group in groups:
        members = [i for i, s in enumerate(samples) if s.group_id == group and s.count]
        scores = {
            i: float((samples[i].at("log_probs") - samples[i].at("old_log_probs")).mean())
            for i in members
        }
        tokens = sum(samples[i].count for i in members)
        for i in members:
            s_of[samples[i].reward > 0].append((samples[i].count / tokens, scores[i]))
        sides = [[i for i in members if (samples[i].reward > 0) == good] for good in (True, False)]
        if not all(sides):
            one_sided += 1
            continue
        for side, sign in zip(sides, (-1, 1), strict=True):
            each = {i: math.exp(sign * scores[i] / tau) for i in side}
            whole = 1 + sum(each.values())
            total += math.log(whole)
            for i, x in each.items():
                gradients[i] += samples[i].here * (
                    sign * x / whole / tau / samples[i].count / len(groups)
                )
    metrics = {"loss": total / len(groups), "one_sided": one_sided / len(groups)}
    for name, good in (("chosen_log_ratio", True), ("rejected_log_ratio", False)):
        weight = sum(w for w, _ in s_of[good])
        metrics[name] = sum(w * s for w, s in s_of[good]) / weight if weight else 0.0
    return metrics["loss"], gradients, metrics


def reference_point(samples: Sequence[OracleSample]) -> float:
    """max(0, the mean over samples of the sum of log-ratios): TRL's estimate of KTO's z, of
    mismatched samples.
    """
    return max(0.0, float(np.mean([told(s, True)[1] for s in samples if s.count])))


def bradley_terry(
    samples: Sequence[OracleSample], scores: Sequence[float], *, margin=0.0, centring=0.0
) -> tuple[float, Array, Metrics]:
    """-log sigmoid(s_c - s_r - margin (r_c - r_r)) + centring (s_c + s_r)^2; the gradient is by
    each sample's score.
    """
    pairs = pairs_of(samples)
    gradient = np.zeros(len(samples))
    total = 0.0
    for c, r in pairs:
        value, slope = smoothed(
            scores[c] - scores[r] - margin * (samples[c].reward - samples[r].reward)
        )
        both = scores[c] + scores[r]
        total += value + centring * both**2
        gradient[c] += (slope + 2 * centring * both) / len(pairs)
        gradient[r] += (-slope + 2 * centring * both) / len(pairs)
    better, worse = (np.array([scores[pair[k]] for pair in pairs]) for k in (0, 1))
    metrics = {
        "loss": total / len(pairs),
        "chosen_reward": better.mean(),
        "rejected_reward": worse.mean(),
    }
    return (
        metrics["loss"],
        gradient,
        metrics
        | {
            "reward_margin": (better - worse).mean(),
            "accuracy": (better > worse).mean(),
        },
    )
