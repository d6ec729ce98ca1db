"""What both ways to log-probs share: their result, their checks, their options."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Entropy = Literal["none", "metric", "bonus"]
ENTROPY_MODES = get_args(Entropy)


class TokenStats(NamedTuple):
    """Log-probs of the targets, entropies, log-sum-exps and means of the logits, f32 `[R, T]` each.

    The last is the log-prob of the likeliest token, a constant: a target is that token where `log_probs` equals it.
    All but the first are None where they are not asked for.
    """

    log_probs: Float[Array, "R T"]
    entropy: Float[Array, "R T"] | None = None
    log_z: Float[Array, "R T"] | None = None
    mean_logit: Float[Array, "R T"] | None = None
    max_log_prob: Float[Array, "R T"] | None = None


def check_floating(name: str, x: Any, rank: int, expected: str) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: got dtype {x.dtype}, expected a floating-point dtype such as float32 or bfloat16")
    if x.ndim != rank:
        raise ValueError(f"{name}: got shape {x.shape}, expected {expected}")


def check_targets(targets: Any, shape: tuple[int, ...], source: str) -> None:
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets: got dtype {targets.dtype}, expected an integer dtype")
    if targets.shape != shape:
        raise ValueError(f"targets: got shape {targets.shape}, expected {shape}, the [R, T] of {source}")


def check_where(where: Any, shape: tuple[int, ...]) -> None:
    if where is not None and where.shape != shape:
        raise ValueError(f"where: got shape {where.shape}, expected {shape}, the shape of targets")


def check_entropy(entropy: Any) -> None:
    if entropy not in ENTROPY_MODES:
        raise ValueError(f"entropy: got {entropy!r}, expected one of {', '.join(ENTROPY_MODES)}")


def as_temperature(temperature: Any) -> jax.Array:
    """The temperature as an f32 scalar, checked where its value is known."""
    if isinstance(temperature, (int, float, np.ndarray, np.generic)) and not np.all(np.asarray(temperature) > 0):
        raise ValueError(f"temperature: got {temperature}, expected a positive number")
    temperature = jnp.asarray(temperature, jnp.float32)
    if temperature.ndim:
        raise ValueError(f"temperature: got shape {temperature.shape}, expected a scalar")
    return jax.lax.stop_gradient(temperature)


def check_vocab_size(vocab_size: int | None, columns: int) -> int:
    if vocab_size is None:
        return columns
    if not 0 < vocab_size <= columns:
        raise ValueError(f"vocab_size: got {vocab_size}, expected 1 to {columns}, the columns there are")
    return vocab_size
