"""A draft's distance from the policy k places on, from logits; gradients by the draft's logits.

With ids, column j of the draft stands for the policy's id ids[j].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .head import HeadGradient, OracleHead, head_gradient, log_softmax, logits
from .samples import Array, OracleSample, sample_weights


def probabilities(policy: Array, ids: Any) -> Array:
    """The policy's over its whole vocabulary, at the draft's columns: those of these ids, or
    all.
    """
    p = np.exp(log_softmax(policy))
    return p if ids is None else p[..., np.asarray(ids)]


def soft_cross_entropy(z: Array, policy: Array, ids: Any = None) -> tuple[Array, Array]:
    """-sum p log d of logits `[n, V]`, and its gradient: d sum p - p."""
    log_d = log_softmax(z)
    p = probabilities(policy, ids)
    return -(p * log_d).sum(-1), np.exp(log_d) * p.sum(-1, keepdims=True) - p


def acceptance(z: Array, policy: Array, ids: Any = None) -> tuple[Array, Array]:
    """a = sum min(p, d), and its gradient by the draft's logits: by d it is 1 where d < p, else 0.

    2606.12370.
    """
    d = np.exp(log_softmax(z))
    p = probabilities(policy, ids)
    below = (d < p) * 1.0
    return np.minimum(p, d).sum(-1), d * (below - (d * below).sum(-1, keepdims=True))


def likelihood(z: Array, policy: Array, eta: float = 3.0, ids: Any = None) -> tuple[Array, Array]:
    """l KL(p | d) + (1 - l) (1 - a) with l = exp(-eta a) held constant.

    2602.23881. KL is sum p log(p / d) - p + d.
    """
    (cross, slope), (a, by_a) = soft_cross_entropy(z, policy, ids), acceptance(z, policy, ids)
    p = probabilities(policy, ids)
    share = np.exp(-eta * a)
    value = share * (cross + (p * np.log(p) - p).sum(-1) + 1) + (1 - share) * (1 - a)
    return value, share[:, None] * slope - (1 - share[:, None]) * by_a


def end_to_end(a: Sequence[float]) -> tuple[float, Array]:
    """1 - (1 / G) sum_j a_1 ... a_j over the depths that one token has, and its gradient by each
    a.
    """
    a = np.asarray(a, np.float64)
    value = 1 - np.cumprod(a).mean()
    slopes = [
        -sum(np.prod(np.delete(a[: j + 1], i)) for j in range(i, len(a))) / len(a)
        for i in range(len(a))
    ]
    return float(value), np.array(slopes)


def shared_mask(mask: Any, k: int) -> Array:
    """`[m]`, 1 where the token and the one k places further on both carry loss."""
    here = np.asarray(mask) > 0
    later = np.zeros(len(here), bool)
    later[: max(len(here) - k, 0)] = here[k:]
    return (here & later) * 1.0


def draft_loss(
    samples: Sequence[OracleSample],
    hidden: Sequence[Sequence[Any]],
    heads: Sequence[OracleHead],
    policy: Sequence[Any],
    policy_head: OracleHead,
    objective: str,
    *,
    eta: float,
    coef: float,
    aggregation: str,
    decay: float = 1.0,
    temperature: float = 1.0,
    ids: Any = None,
) -> tuple[float, list[list[Array]], list[HeadGradient], dict[str, float]]:
    """coef times the mean over depths k, weighed by decay^(k - 1), of the aggregated loss.

    It is from `hidden[k - 1][sample]` and the policy's own.

    States are `[m, H]`, of positions. The end-to-end objective is one loss, coef times. Gradients
    are by depth.
    """
    depths = len(hidden)
    shares = decay ** np.arange(depths) / np.sum(decay ** np.arange(depths))
    masks = [[shared_mask(s.mask, k) for s in samples] for k in range(1, depths + 1)]
    weights = [
        sample_weights([replace(s, mask=m) for s, m in zip(samples, of, strict=True)], aggregation)
        for of in masks
    ]
    # by logits
    slopes = [[np.zeros((len(s.mask), heads[k].columns)) for s in samples] for k in range(depths)]
    accepted: list[list[float]] = [[] for _ in range(depths)]
    loss = 0.0
    for i, s in enumerate(samples):
        for t in range(len(s.mask)):
            chain: list[tuple[float, Array]] = []
            for k in range(depths):
                if not masks[k][i][t]:
                    continue
                z = logits(np.asarray(hidden[k][i])[t : t + 1], heads[k], temperature)
                q = logits(np.asarray(policy[i])[t + k + 1 : t + k + 2], policy_head, temperature)
                (a,), (by_a,) = acceptance(z, q, ids)
                accepted[k].append(float(a))
                if len(chain) == k:
                    chain.append((float(a), by_a))
                if objective == "end_to_end":
                    continue
                if objective == "total_variation":
                    value = 1 - a
                    slope = -by_a
                else:
                    (value,), (slope,) = (
                        soft_cross_entropy(z, q, ids)
                        if objective == "soft_cross_entropy"
                        else likelihood(z, q, eta, ids)
                    )
                loss += coef * shares[k] * weights[k][i] * value
                slopes[k][i][t] = coef * shares[k] * weights[k][i] * slope
            if objective == "end_to_end" and chain:
                value, by_each = end_to_end([a for a, _ in chain])
                loss += coef * weights[0][i] * value
                for k, ((_, by_a), slope) in enumerate(zip(chain, by_each, strict=True)):
                    slopes[k][i][t] = coef * weights[0][i] * slope * by_a
    by_hidden = []
    by_heads = []
    for states, head, of in zip(hidden, heads, slopes, strict=True):
        each = [
            head_gradient(np.asarray(h, np.float64), head, dz, temperature)
            for h, dz in zip(states, of, strict=True)
        ]
        by_hidden.append([dh for dh, _ in each])
        parts = zip(*(parts for _, parts in each), strict=True)
        by_heads.append(HeadGradient(*(None if x[0] is None else np.sum(x, axis=0) for x in parts)))
    means = {
        f"draft_{k}_acceptance": float(np.mean(x)) if x else 0.0 for k, x in enumerate(accepted, 1)
    }
    return float(loss), by_hidden, by_heads, {"draft_loss": float(loss), **means}
