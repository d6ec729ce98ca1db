"""A draft's distance from the policy k places on, from logits; gradients by the draft's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .head import log_softmax
from .samples import Array


def soft_cross_entropy(z: Array, policy: Array) -> tuple[Array, Array]:
    """-sum p log d of logits `[n, V]`, and its gradient: d - p."""
    log_d, p = log_softmax(z), np.exp(log_softmax(policy))
    return -(p * log_d).sum(-1), np.exp(log_d) - p


def acceptance(z: Array, policy: Array) -> tuple[Array, Array]:
    """a = sum min(p, d), and its gradient by the draft's logits: by d it is 1 where d < p, else 0. 2606.12370."""
    d, p = np.exp(log_softmax(z)), np.exp(log_softmax(policy))
    below = (d < p) * 1.0
    return np.minimum(p, d).sum(-1), d * (below - (d * below).sum(-1, keepdims=True))


def likelihood(z: Array, policy: Array, eta: float = 3.0) -> tuple[Array, Array]:
    """l KL(p | d) + (1 - l) (1 - a) with l = exp(-eta a) held constant. 2602.23881."""
    (cross, slope), (a, by_a) = soft_cross_entropy(z, policy), acceptance(z, policy)
    log_p = log_softmax(policy)
    share = np.exp(-eta * a)
    value = share * (cross + (np.exp(log_p) * log_p).sum(-1)) + (1 - share) * (1 - a)
    return value, share[:, None] * slope - (1 - share[:, None]) * by_a


def end_to_end(a: Sequence[float]) -> tuple[float, Array]:
    """1 - (1 / G) sum_j a_1 ... a_j over the depths that one token has, and its gradient by each a."""
    a = np.asarray(a, np.float64)
    value = 1 - np.cumprod(a).mean()
    slopes = [-sum(np.prod(np.delete(a[: j + 1], i)) for j in range(i, len(a))) / len(a) for i in range(len(a))]
    return float(value), np.array(slopes)
