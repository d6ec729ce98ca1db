"""Value, supervised and multi-token-prediction losses, distillation, and how far sampler and
trainer are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .head import HeadGradient, OracleHead, log_softmax, times_log
from .kl import clamp, k3
from .samples import Array, OracleSample, sample_weights, token_mean, weighted_sum
from .step import through_head, with_stats

Metrics = dict[str, float]


def value_loss(
    samples: Sequence[OracleSample],
    *,
    clip: float | None = 0.2,
    factor: float = 0.5,
    huber_delta: float | None = None,
    clip_fraction: str = "worse",
    aggregation: str = "token_mean",
    aggregation_norm: float | None = None,
    metric_aggregation: str = "token_mean",
) -> tuple[float, list[Array], Metrics]:
    """factor * max((v - G)^2, (clip(v, old - c, old + c) - G)^2), v the samples' `new_values`; and
    the gradient by v.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; the clip: OpenAI baselines' PPO2. Twice
    Huber's loss, https://doi.org/10.1214/aoms/1177703732, takes the place of the squares where it
    has a delta.
    """
    delta = np.inf if huber_delta is None else huber_delta

    def square(e: Array) -> Array:
        return np.array([x * x if abs(x) <= delta else 2 * delta * (abs(x) - delta / 2) for x in e])

    def slope(e: Array) -> Array:
        return np.array([2 * x if abs(x) <= delta else 2 * delta * np.sign(x) for x in e])

    weights = sample_weights(samples, aggregation, aggregation_norm)
    losses = []
    gradients = []
    clipped = []
    values = []
    errors = []
    for s, w in zip(samples, weights, strict=True):
        v = s.at("new_values")
        g = s.at("returns")
        near = v
        far = np.zeros(len(v), bool)
        if clip is not None:
            near = np.clip(v, s.at("values") - clip, s.at("values") + clip)
            far = np.abs(v - s.at("values")) > clip
        worse = square(near - g) > square(v - g)
        losses.append(factor * np.maximum(square(near - g), square(v - g)))
        gradients.append(s.scatter(w * np.where(worse, 0.0, factor * slope(v - g))))
        clipped.append((worse if clip_fraction == "worse" else far) * 1.0)
        values.append(v)
        errors.append(np.abs(v - g))
    metrics = {
        "loss": weighted_sum(weights, losses),
        "value_mean": token_mean(values),
        "value_error": token_mean(errors),
    }
    if clip is not None:
        metrics["clip_fraction"] = (
            weighted_sum(weights, clipped) if metric_aggregation == "loss" else token_mean(clipped)
        )
    return metrics["loss"], gradients, metrics


def sft_loss(
    samples: Sequence[OracleSample],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
    aggregation: str = "token_mean",
    aggregation_norm: float | None = None,
) -> tuple[float, list[dict[str, Array]], Metrics]:
    """-(1 - s) log_prob + s (log_z - mean_logit) + z_loss log_z^2; gradients by name for
    `logit_gradient`.

    Szegedy et al. 2015, https://arxiv.org/abs/1512.00567; PaLM 2022,
    https://arxiv.org/abs/2204.02311. With `dft` all times the probability of the target, held:
    https://arxiv.org/abs/2508.05629.
    """
    weights = sample_weights(samples, aggregation, aggregation_norm)
    losses = []
    gradients = []
    for s, w in zip(samples, weights, strict=True):
        moments = label_smoothing != 0 or z_loss != 0
        log_z, mean = (
            (s.at("log_z"), s.at("mean_logit"))
            if moments
            else (np.zeros(s.count), np.zeros(s.count))
        )
        one = np.ones(s.count)
        held = np.exp(s.at("log_probs")) if dft else one
        of_token = (
            -(1 - label_smoothing) * s.at("log_probs")
            + label_smoothing * (log_z - mean)
            + z_loss * log_z**2
        )
        losses.append(held * of_token)
        gradients.append(
            {
                "by_log_prob": -w * (1 - label_smoothing) * held,
                "by_log_z": w * (label_smoothing + 2 * z_loss * log_z) * held,
                "by_mean_logit": -w * label_smoothing * held,
            }
        )
    metrics = {
        "loss": weighted_sum(weights, losses),
        "nll": token_mean([-s.at("log_probs") for s in samples]),
    }
    for name, field in (("entropy", "entropy"), ("log_z", "log_z"), ("accuracy", "likeliest")):
        if all(getattr(s, field) is not None for s in samples):
            metrics[name] = token_mean([s.at(field) for s in samples])
    return metrics["loss"], gradients, metrics


def shifted(s: OracleSample, by: int) -> OracleSample:
    """Targets and mask of position t + `by` at t, 0 where that leaves the sequence."""

    def move(x):
        return np.concatenate([np.asarray(x)[by:], np.zeros(min(by, len(x)), np.asarray(x).dtype)])

    return replace(s, targets=move(s.targets), mask=move(s.here))


def mtp_loss(
    samples: Sequence[OracleSample],
    hidden: Sequence[Sequence[Any]],
    head: OracleHead | Sequence[OracleHead],
    *,
    coef: float = 0.1,
    aggregation: str = "token_mean",
) -> tuple[float, list[list[Array]], list[HeadGradient], Metrics]:
    """coef / K * sum over depths k of the aggregated -log p(target of t + k), from
    `hidden[k - 1][sample]`, `[m, H]`.

    Samples are aligned to predicting positions. Gradients by hidden states and heads are by depth;
    a head that is shared has their sum. DeepSeek-V3, https://arxiv.org/abs/2412.19437.
    """
    depths = len(hidden)
    heads = [head] * depths if isinstance(head, OracleHead) else list(head)
    metrics: Metrics = {}
    loss = 0.0
    by_hidden = []
    by_head = []
    for k, (states, its_head) in enumerate(zip(hidden, heads, strict=True), 1):
        here = [replace(shifted(s, k), hidden=h) for s, h in zip(samples, states, strict=True)]
        nll, gradients, said = sft_loss(with_stats(here, its_head), aggregation=aggregation)
        scaled = [{name: coef / depths * g for name, g in each.items()} for each in gradients]
        hidden_gradient, head_gradient = through_head(here, its_head, scaled)
        loss += coef / depths * nll
        by_hidden.append(hidden_gradient)
        by_head.append(head_gradient)
        metrics |= {f"mtp_{k}_nll": said["nll"], f"mtp_{k}_accuracy": said["accuracy"]}
    return loss, by_hidden, by_head, {"mtp_loss": loss, **metrics}


def divergence(
    student: Array, teacher: Array, kind: str = "reverse_kl", beta: float = 0.5
) -> tuple[Array, Array]:
    """Between p and q, the softmax of logits `[n, V]`; `[n]`, and its gradient by the student's
    logits.

    reverse_kl KL(p | q), forward_kl KL(q | p), jensen_shannon beta KL(q | m) + (1 - beta) KL(p | m)
    with m = beta q + (1 - beta) p. By p a divergence has the slopes f_j; by logits p_j (f_j - sum_i
    p_i f_i). GKD, 2306.13649.
    """
    log_p = log_softmax(np.asarray(student, np.float64))
    log_q = log_softmax(np.asarray(teacher, np.float64))
    p = np.exp(log_p)
    q = np.exp(log_q)
    if kind == "forward_kl":
        return (times_log(q, log_q) - q * np.where(q > 0, log_p, 0.0)).sum(-1), p - q
    if kind == "reverse_kl":
        against = log_q
        share = 1.0
    else:
        with np.errstate(divide="ignore"):
            against = np.log(beta * q + (1 - beta) * p)
            share = 1 - beta
    gap = np.where(p > 0, log_p, 0.0) - np.where(p > 0, against, 0.0)
    value = share * (p * gap).sum(-1)
    if kind == "jensen_shannon":
        value = value + beta * (times_log(q, log_q) - q * np.where(q > 0, against, 0.0)).sum(-1)
    slope = share * gap
    return value, p * (slope - (p * slope).sum(-1, keepdims=True))


def top_k_divergence(
    log_p: Array, log_q: Array, kind: str = "forward_kl", beta: float = 0.5, tail: str = "bucket"
) -> tuple[float, Array]:
    """The divergence of one token whose K ids have these log-probs, and its gradient by each log p.

    p and q get one bucket more, or are divided by their sums, or stay. h are the slopes by the
    log-probs that are then compared; through 1 - sum p a log p_k has p_k of them, through the sum
    that it is divided by p_k / sum p.
    """
    p = np.exp(np.asarray(log_p, np.float64))
    q = np.exp(np.asarray(log_q, np.float64))
    own = p
    if tail == "bucket":
        p = np.append(p, 1 - p.sum())
        q = np.append(q, 1 - q.sum())
    elif tail == "renormalise":
        p = p / p.sum()
        q = q / q.sum()
    m = beta * q + (1 - beta) * p
    towards = beta * p + (1 - beta) * q

    def kl(a, b):
        return sum(x * np.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    # adaptive: ROLL's head and tail by cumulative mass of the ascending teacher; detached shares
    total = 0.0
    rest = 0.0
    gap = np.abs(q - p)
    for i in np.argsort(q, kind="stable"):
        total += q[i]
        rest += gap[i] * (total <= beta)
    g = 1 - rest / gap.sum() if gap.sum() > 0 else 0.0
    forward = -q
    reverse = p * np.log(p / q) + p
    value, h = {
        "skewed_forward_kl": (kl(q, m), -q * (1 - beta) * p / m),
        "skewed_reverse_kl": (kl(p, towards), p * np.log(p / towards) + p - p * beta * p / towards),
        "adaptive_kl": (g * kl(q, p) + (1 - g) * kl(p, q), g * forward + (1 - g) * reverse),
        "forward_kl": (kl(q, p), forward),
        "reverse_kl": (kl(p, q), reverse),
        "mixed_kl": (
            beta * kl(q, p) + (1 - beta) * kl(p, q),
            beta * forward + (1 - beta) * reverse,
        ),
        "jensen_shannon": (
            beta * kl(q, m) + (1 - beta) * kl(p, m),
            (1 - beta) * (p * np.log(p / m) + p) - (1 - beta) * p * (beta * q + (1 - beta) * p) / m,
        ),
    }[kind]
    if tail == "bucket":
        h = h[:-1] - own / p[-1] * h[-1]
    elif tail == "renormalise":
        h = h - p * h.sum()
    return float(value), h


def sampled_tail(log_p: Array, log_q: Array, drawn: int) -> tuple[float, Array]:
    """Reverse KL of p and q over the ids, and of the drawn token where it is none of them; the ids
    come first.

    `log_p`, `log_q` are of the ids and, last, of the drawn token; `drawn` is its place among the
    ids, -1 where it is none. Each id has p log(p / q) - p + q, whose slope by log p is p log(p / q)
    (MOPD, 2606.30406, equation 5). The drawn token has the log-ratio d as its slope, and exp(-d) -
    1 + d as its value: what the other tokens have on average, since over all of them p log(p / q) -
    p + q is p (q / p - 1 + log(p / q)).
    """
    log_p, log_q = (np.asarray(x, np.float64) for x in (log_p, log_q))
    p = np.exp(log_p)
    q = np.exp(log_q)
    d = log_p - log_q
    value = float((p * d - p + q)[:-1].sum())
    slopes = p * d
    slopes[-1] = 0.0
    if drawn < 0:
        value += float(np.exp(-d[-1]) - 1 + d[-1])
        slopes[-1] = d[-1]
    return value, slopes


def score_centering(
    log_p: Array, log_q: Array, f: Any, advantage: float, tail: str = "bucket"
) -> tuple[float, Array]:
    """A sum c_v log p_v of one token whose ids have these log-probs, and its gradient by each log
    p, c a constant.

    c_v = q_v f(p_v, q_v) - a p_v, a = rho f(1 - P, 1 - Q), rho = (1 - Q) / (1 - P); renormalised,
    of p / P and a of 0, and the gradient of log(p_v / P) has P's too. 2609.20807.
    """
    p = np.exp(np.asarray(log_p, np.float64))
    q = np.exp(np.asarray(log_q, np.float64))
    if tail == "renormalise":
        p = p / p.sum()
        q = q / q.sum()
        c = q * np.array([f(x, y) for x, y in zip(p, q, strict=True)])
        return float(advantage * (c * np.log(p)).sum()), advantage * (c - p * c.sum())
    rest_p = 1 - p.sum()
    rest_q = 1 - q.sum()
    c = (
        q * np.array([f(x, y) for x, y in zip(p, q, strict=True)])
        - rest_q / rest_p * f(rest_p, rest_q) * p
    )
    return float(advantage * (c * np.log(p)).sum()), advantage * c


def mismatch_metrics(samples: Sequence[OracleSample]) -> Metrics:
    """Trainer (`old_log_probs`) against sampler, over tokens and over sequences that have some; d
    their difference.

    Names: verl's rollout correction, https://verl.readthedocs.io/en/latest/algo/rollout_corr.html.
    """
    present = [s for s in samples if s.count]
    trainer = [s.at("old_log_probs") for s in present]
    sampler = [s.at("rollout_log_probs") for s in present]
    d = [t - r for t, r in zip(trainer, sampler, strict=True)]
    sums = np.array([x.sum() for x in d])
    of_trainer, of_sampler = (np.array([-x.mean() for x in each]) for each in (trainer, sampler))
    diff = of_trainer - of_sampler
    return {
        "kl": token_mean([-x for x in d]),
        "k3_kl": token_mean([k3(x) for x in d]),
        "log_prob_abs_diff": token_mean([np.abs(x) for x in d]),
        "chi2_token": token_mean([np.exp(2 * clamp(x)) for x in d]) - 1,
        "chi2_sequence": float(np.mean(np.exp(2 * clamp(sums)))) - 1,
        "trainer_log_ppl": float(np.mean(of_trainer)),
        "rollout_log_ppl": float(np.mean(of_sampler)),
        "trainer_ppl": float(np.mean(np.exp(np.minimum(of_trainer, 64)))),
        "rollout_ppl": float(np.mean(np.exp(np.minimum(of_sampler, 64)))),
        "log_ppl_diff": float(np.mean(diff)),
        "log_ppl_abs_diff": float(np.mean(np.abs(diff))),
        "log_ppl_diff_max": float(np.max(diff)),
        "log_ppl_diff_min": float(np.min(diff)),
        "ppl_ratio": float(np.mean(np.exp(clamp(diff)))),
        **policies_apart(d, sums),
    }


def policies_apart(d: Sequence[Array], sums: Array) -> Metrics:
    """What NeMo-RL says of sampler and trainer, d their differences by sample; and the spread of
    verl's weights.
    """
    everyone = clamp(np.concatenate(d))
    trainer = np.exp(everyone) / (1 + np.exp(everyone))  # its share of the mixture, times 1 / 2

    def half(x):
        return 2 * x - 1 - np.log(2 * x)

    weights = np.exp(everyone)
    of_samples = np.exp(clamp(sums))

    def share(w):
        return float(w.sum() ** 2 / (len(w) * np.sum(w * w)))

    return {
        "token_mult_prob_error": float(np.exp(np.abs(everyone)).mean()),
        "reverse_k3_kl": token_mean([k3(-x) for x in d]),
        "jensen_shannon": float(0.5 * (half(trainer) + half(1 / (1 + np.exp(everyone)))).mean()),
        "weight_std": float(weights.std()),
        "weight_min": float(weights.min()),
        "weight_max": float(weights.max()),
        "effective_sample_size": share(weights),
        "sequence_effective_sample_size": share(of_samples),
    }
