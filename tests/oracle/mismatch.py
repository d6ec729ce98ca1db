"""Sampler and trainer at each token, from logits written out, and the figures of a report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .head import log_softmax, times_log
from .samples import Array


def comparison(trainer: Array, sampler: Array) -> dict[str, Array]:
    """KL both ways, total variation and whether both like the same token most, of logits
    `[n, V]`; `[n]` each.
    """
    log_p = log_softmax(np.asarray(trainer, np.float64))
    log_q = log_softmax(np.asarray(sampler, np.float64))
    p = np.exp(log_p)
    q = np.exp(log_q)
    return {
        "kl": (times_log(q, log_q) - q * np.where(q > 0, log_p, 0.0)).sum(-1),
        "reverse_kl": (times_log(p, log_p) - p * np.where(p > 0, log_q, 0.0)).sum(-1),
        "total_variation": np.maximum(p - q, 0).sum(-1),
        "same_top": (p.argmax(-1) == q.argmax(-1)) * 1.0,
    }


def estimates(trainer: Array, sampler: Array) -> dict[str, float]:
    """The first three from log-probs of tokens that the sampler drew.

    The importance weighted form of each f-divergence, E_q f(p / q): Schulman 2020,
    http://joschu.net/blog/kl-approx.html
    """
    ratio = np.exp(np.asarray(trainer, np.float64) - np.asarray(sampler, np.float64))
    return {
        "kl": float(np.mean(ratio - 1 - np.log(ratio))),
        "reverse_kl": float(np.mean(ratio * np.log(ratio) - ratio + 1)),
        "total_variation": float(np.mean(np.maximum(ratio - 1, 0) + np.maximum(1 - ratio, 0)) / 2),
    }


def figures(d: Sequence[float]) -> dict[str, float]:
    """Moments and quantiles of d = trainer - sampler; a quantile lies between the two sorted
    values around it.
    """
    ordered = sorted(abs(x) for x in d)
    n = len(d)

    def quantile(q: float) -> float:
        at = q * (n - 1)
        low = int(at)
        high = min(low + 1, n - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    found = {
        f"abs_q{name}": quantile(q)
        for name, q in (("50", 0.5), ("90", 0.9), ("99", 0.99), ("99.9", 0.999))
    }
    mean = sum(d) / n
    square = sum(x * x for x in d) / n
    return found | {
        "mean": mean,
        "abs_mean": sum(ordered) / n,
        "abs_max": ordered[-1],
        "rms": square**0.5,
    }
