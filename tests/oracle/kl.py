"""Estimators of KL(policy || reference) on sampled tokens, with their derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np

from .samples import Array

MAX_LOG_RATIO = 20.0


def clamp(d: Any) -> Any:
    """A log-ratio as it enters exp: within [-20, 20]."""
    return np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def inside(d: Any) -> Any:
    """The derivative of `clamp`, as a float."""
    return (np.abs(d) <= MAX_LOG_RATIO) * 1.0


def k1_value(d: Array) -> tuple[Array, Array]:
    """d and its derivative."""
    return d, np.ones_like(d)


def abs_value(d: Array) -> tuple[Array, Array]:
    """|d| and its derivative."""
    return np.abs(d), np.sign(d)


def k2_value(d: Array) -> tuple[Array, Array]:
    """d^2 / 2 and its derivative."""
    return d * d / 2, d


def k3_value(d: Array) -> tuple[Array, Array]:
    """exp(-d) - 1 + d and its derivative; below d = -20, exp(-d) continues along its tangent
    there.
    """
    x = np.minimum(-d, MAX_LOG_RATIO)
    beyond = -d - x
    return np.expm1(x) + np.exp(x) * beyond + d, 1.0 - np.exp(x)


def k3(d: Array) -> Array:
    """exp(d) - 1 - d >= 0, with d = log(trainer / sampler): the estimator k3 of KL(sampler ||
    trainer).
    """
    return k3_value(-d)[0]


VALUES = {"k1": k1_value, "abs": abs_value, "k2": k2_value, "k3": k3_value, "low_var_kl": k3_value}
ESTIMATORS = [*VALUES, *(f"{name}+" for name in VALUES)]


def kl_divergence(
    log_probs: Array,
    ref_log_probs: Array,
    estimator: str = "k3",
    sampling_log_probs: Array | None = None,
) -> tuple[Array, Array]:
    """The estimate w f(d), d = log_prob - ref_log_prob, and its derivative by log_prob.

    w = exp(log_prob - sampling_log_prob), or 1 without sampling log-probs; dw = w. low_var_kl
    clamps w k3 to [-10, 10]. "+": the same value, k2's gradient w d with w constant. Schulman 2020,
    http://joschu.net/blog/kl-approx.html; Liu et al. 2025, https://arxiv.org/abs/2510.01555; w:
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.
    """
    d = log_probs - ref_log_probs
    gap = np.zeros_like(d) if sampling_log_probs is None else log_probs - sampling_log_probs
    w = np.exp(clamp(gap))
    dw = np.zeros_like(d) if sampling_log_probs is None else w * inside(gap)
    f, df = VALUES[estimator.removesuffix("+")](d)
    value = w * f
    slope = w * df + dw * f
    if estimator.startswith("low_var_kl"):
        slope = np.where(np.abs(value) <= 10.0, slope, 0.0)
        value = np.clip(value, -10.0, 10.0)
    return value, w * d if estimator.endswith("+") else slope


def kl_penalty(
    log_probs: Array,
    ref_log_probs: Array,
    estimator: str,
    importance: str,
    old: Array,
    held: Array,
    weights: Array | float = 1.0,
) -> tuple[Array, Array]:
    """The estimates of one sequence and the derivative of their weighted SUM by each log-prob, for
    each kind of w.

    "none": w = 1. "token": w = p / old. "sequence": w = exp(mean of log p - log old), which all
    log-probs move. "score": w = exp(log_prob - sg(log_prob)), 1 with the derivative 1. TRL and
    Liger, `use_bias_correction_kl`, the level that of the loss; NeMo-RL, `calculate_kl`.
    """
    if importance != "sequence":
        base = {"none": None, "token": old, "score": held}[importance]
        value, slope = kl_divergence(log_probs, ref_log_probs, estimator, base)
        return value, weights * slope
    n = max(len(log_probs), 1)
    mean = float(np.sum(log_probs - old)) / n
    w = float(np.exp(clamp(mean)))
    d = log_probs - ref_log_probs
    f, df = VALUES[estimator.removesuffix("+")](d)
    value = w * f
    free = np.ones_like(d)
    if estimator.startswith("low_var_kl"):
        free = (np.abs(value) <= 10.0) * 1.0
        value = np.clip(value, -10.0, 10.0)
    by_weight = w * inside(mean) * np.sum(weights * free * f) / n
    return value, (
        weights * w * d if estimator.endswith("+") else weights * free * w * df + by_weight
    )


def adaptive_kl_coef(
    coef: float, kl: float, target: float, samples: int, horizon: float = 10000.0
) -> float:
    """coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).

    Ziegler et al. 2019, 1909.08593.
    """
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)
