"""Estimators of the KL divergence to a reference policy, per token, as a loss term or a reward
penalty.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxppo.base.arrays import (
    Coefficient,
    as_number,
    check_alike,
    check_choice,
    check_choices,
    check_field,
    sound,
)
from jaxppo.base.option_names import NamesItsOptions
from jaxppo.sharding import wider_dtype

__all__ = ["KL", "adaptive_kl_coef", "kl_divergence"]

MAX_LOG_RATIO = 20.0
Estimator = Literal[
    "k1", "abs", "k2", "k3", "low_var_kl", "k1+", "abs+", "k2+", "k3+", "low_var_kl+"
]
Importance = Literal["none", "token", "sequence", "score"]
Over = Literal["current/old", "current/rollout"]


@dataclasses.dataclass(frozen=True)
class KL(NamesItsOptions):
    """The penalty of a policy loss: coef * KL(policy || reference), of the batch's `ref_log_probs`.

    Args:
      coef: a number or a traced schedule; with the number 0 the divergence is only a metric.
      estimator: see `kl_divergence`.
      importance: the weight of the estimate, whose gradient counts too: "none"; "token", the ratio
        of two policies; "sequence", the geometric mean of the ratios of the sequence; "score", a
        weight of 1 that adds the score-function term, so that on samples of the policy the gradient
        of "k1", log-ratio + 1, is unbiased. An estimator with a "+" has that gradient by itself.
      compares: the two policies of that ratio, "current/old" or "current/rollout", independently of
        the loss's ratio.

    Raises:
      ValueError: a coefficient that is not a finite number, an unknown name, "score" with a "+".

    Example:
      >>> KL(0.01, "low_var_kl")
      KL(coef=0.01, estimator='low_var_kl', importance='none', compares='current/old')
    """

    coef: Coefficient
    estimator: Estimator = "k3"
    importance: Importance = "none"
    compares: Over = "current/old"

    def __post_init__(self) -> None:
        check_field(self, "coef")
        check_choices(self, estimator=Estimator, importance=Importance, compares=Over)
        if self.importance == "score" and self.estimator.endswith("+"):
            raise ValueError(
                f"importance: got 'score', expected another with estimator={self.estimator!r},"
                " whose weight is constant"
            )

    @property
    def policies(self) -> frozenset[str]:
        """The policies that the weight compares."""
        if self.importance in ("token", "sequence"):
            return frozenset(self.compares.split("/"))
        return frozenset()


def log_ratio(log_probs: Float[Array, "..."], base: Float[Array, "..."]) -> Float[Array, "..."]:
    """log_probs - base clamped to [-20, 20], f32 at least.

    Its exp is finite, and the gradient is 0 where clamped.
    """
    dtype = wider_dtype(log_probs, base, jnp.float32)
    return jnp.clip(log_probs.astype(dtype) - base.astype(dtype), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(d: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp(d) - 1 - d, never below 0.

    It uses expm1: for a small d, exp(d) - 1 would be only rounding error.

    Above d = 20 the tangent replaces exp, so that value and gradient are finite and have the right
    sign.
    """
    beyond = jnp.maximum(d - MAX_LOG_RATIO, 0)
    value = jnp.expm1(jnp.minimum(d, MAX_LOG_RATIO)) + jnp.exp(MAX_LOG_RATIO) * beyond - d
    # clamps at 0 and leaves the gradient as it is
    return value - lax.stop_gradient(jnp.minimum(value, 0))


def magnitude(d: Float[Array, "..."]) -> Float[Array, "..."]:
    """|d| with the gradient sign(d), which is 0 where policies agree; `jnp.abs` has the gradient 1 there."""
    return d * lax.stop_gradient(jnp.sign(d))


def kl_divergence(
    log_probs: Float[Array, "..."],
    ref_log_probs: Float[Array, "..."],
    estimator: Estimator = "k3",
    importance_ratio: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """KL(policy || reference) of sampled tokens, with d = log_probs - ref_log_probs and importance
    ratio w (or 1).

        k1: w d      abs: w |d|      k2: w d^2 / 2      k3: w (exp(-d) - 1 + d)      low_var_kl: k3 clamped to [-10, 10]

    A "+" after the name keeps the value and takes the gradient of k2, w d, which on samples of the
    policy is an unbiased gradient of the divergence; w is then constant. Below d = -20 the tangent
    replaces exp(-d), so that value and gradient are finite and have the right sign at any
    log-ratio. k3 is at least 0.

    Args:
      log_probs: `[...]`, the policy's.
      ref_log_probs: `[...]`, the reference's; no gradient flows to them.
      estimator: "k1", "abs", "k2", "k3", "low_var_kl", each with or without "+".
      importance_ratio: `[...]`, the policy over the sampling policy; its gradient is a part of the
        result's.

    Returns:
      `f32[...]`, nats.

    Raises:
      TypeError, ValueError: an unknown estimator; arrays that are not floats, or have different
        shapes.

    Example:
      >>> kl_divergence(jnp.array([0.0, -1.0]), jnp.array([-1.0, -1.0]), "k2")
      Array([0.5, 0. ], dtype=float32)

    Schulman 2020, Approximating KL divergence, http://joschu.net/blog/kl-approx.html; Liu et al.
    2025, Rethinking KL regularization in RLHF, https://arxiv.org/abs/2510.01555; importance weight:
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556
    """
    check_choice("estimator", estimator, Estimator)
    arrays = {"log_probs": log_probs, "ref_log_probs": ref_log_probs}
    if importance_ratio is not None:
        arrays["importance_ratio"] = importance_ratio
    check_alike(arrays)
    log_probs = sound("log_probs", log_probs)
    ref_log_probs = sound("ref_log_probs", ref_log_probs)
    d = log_probs.astype(jnp.float32) - lax.stop_gradient(ref_log_probs).astype(jnp.float32)
    ratio = jnp.float32(1)
    if importance_ratio is not None:
        ratio = importance_ratio.astype(jnp.float32)
    match estimator.removesuffix("+"):
        case "k1":
            value = ratio * d
        case "abs":
            value = ratio * magnitude(d)
        case "k2":
            value = ratio * (d**2 / 2)
        case "k3":
            value = ratio * k3(-d)
        case _:
            value = jnp.clip(ratio * k3(-d), -10, 10)
    if estimator.endswith("+"):
        k2 = lax.stop_gradient(ratio) * d**2 / 2
        # this order adds exactly 0 to the value
        value = lax.stop_gradient(value) + (k2 - lax.stop_gradient(k2))
    return value


def adaptive_kl_coef(
    coef: Float[Array, ""] | float,
    kl: Float[Array, ""],
    target: float,
    samples: int,
    horizon: float = 10000.0,
) -> Float[Array, ""]:
    """The next KL coefficient: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).

    Args:
      coef: the coefficient of this step.
      kl: the mean divergence measured in this step, nats.
      target: the divergence to keep, nats, above 0.
      samples: the number of samples in the step.
      horizon: the number of samples in which the coefficient can move by its own size.

    Returns:
      `f32[]`.

    Raises:
      ValueError: a value that is not a number, a target or horizon that is not positive.

    Example:
      >>> float(adaptive_kl_coef(0.1, jnp.array(6.0), target=3.0, samples=1000))
      0.10199...

    Ziegler et al. 2019, Fine-tuning language models from human preferences,
    https://arxiv.org/abs/1909.08593
    """
    relative = _number("kl", kl) / _number("target", target, above=0)
    error = jnp.clip(relative - 1, -0.2, 0.2)
    share = _number("samples", samples, least=0) / _number("horizon", horizon, above=0)
    return _number("coef", coef) * (1 + error * share)


def _number(what: str, value: Any, **bounds: float) -> Float[Array, ""]:
    """`as_number` that takes a metric too, which numpy holds as an array."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    return as_number(what, value, **bounds)
