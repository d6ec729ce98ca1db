"""Log-probs and entropy as simple as can be: one device, f32, all logits at once, JAX's own
gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxppo.head.head import TokenStats, as_head
from jaxppo.losses.distillation import Divergence
from sharding import wider_dtype


def columns(logits: jax.Array) -> jax.Array:
    """`i32[1, 1, V]`, the columns of logits `[R, T, V]`."""
    return jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]


def reference_from_logits(
    logits: Any,
    targets: Any,
    *,
    temperature: Any = 1.0,
    entropy: Any = "none",
    logit_stats: Any = (),
    top_k: int = 0,
    nucleus_ids: Any = None,
    ids: Any = None,
    where: Any = None,
    vocab_size: Any = None,
) -> TokenStats:
    """`log_probs_from_logits`, computed in its arguments' dtype, at least f32."""
    temperature = jnp.asarray(temperature)
    if temperature.ndim:
        temperature = (temperature if where is None else jnp.where(where, temperature, 1))[
            ..., None
        ]
    z = logits[..., :vocab_size].astype(wider_dtype(logits.dtype, jnp.float32)) / temperature
    z = z if where is None else jnp.where(where[..., None], z, 0)
    y = targets if where is None else jnp.where(where, targets, 0)
    is_target = y[..., None] == columns(z)
    inside = z
    if nucleus_ids is not None:
        drawn = (nucleus_ids[..., None] == columns(z)[..., None, :]).any(-2)
        inside = jnp.where(drawn | is_target, z, -jnp.inf)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(inside), y[..., None], axis=-1)[..., 0]
    log_probs = jnp.where((y >= 0) & (y < z.shape[-1]), log_probs, jnp.nan)
    log_p = jax.nn.log_softmax(z)
    plogp = jnp.where(
        jnp.exp(log_p) > 0, jnp.exp(log_p) * jnp.where(jnp.exp(log_p) > 0, log_p, 0), 0
    )
    h = -plogp.sum(-1)
    of_ids = None
    if ids is not None:
        of_ids = jnp.take_along_axis(log_p, jnp.clip(ids, 0, z.shape[-1] - 1), axis=-1)
        of_ids = jnp.where(
            ids == -1, -jnp.inf, jnp.where((ids >= 0) & (ids < z.shape[-1]), of_ids, jnp.nan)
        )
        of_ids = of_ids if where is None else jnp.where(where[..., None], of_ids, 0)
    if where is not None:
        log_probs = jnp.where(where, log_probs, 0)
        h = jnp.where(where, h, 0)
    found = {"none": None, "metric": jax.lax.stop_gradient(h), "bonus": h}[entropy]
    # of equal ones the lowest id is first
    likeliest = jax.lax.top_k(log_p, top_k) if top_k else (None, None)

    def mean_logit():
        finite = z > -jnp.inf
        return jnp.where(finite, z, 0).sum(-1) / finite.astype(z.dtype).sum(-1)

    def accuracy():
        return (jnp.argmax(z, -1).astype(y.dtype) == y).astype(z.dtype)

    def sum_p2():
        return (jnp.exp(log_p) ** 2).sum(-1)

    statistics = {
        "log_z": functools.partial(jax.nn.logsumexp, z, axis=-1),
        "mean_logit": mean_logit,
        "accuracy": accuracy,
        "sum_p2": sum_p2,
    }
    more = {name: statistics[name]() for name in logit_stats}
    more |= dict(zip(("top_log_probs", "top_ids"), likeliest, strict=True))
    if where is not None:
        here = where[..., None]
        more = {
            k: x if x is None else jnp.where(here if x.ndim == 3 else where, x, 0)
            for k, x in more.items()
        }
    return TokenStats(log_probs, found, id_log_probs=of_ids, ids=ids, entropy_mode=entropy, **more)


def plain_logits(hidden: Any, head: Any, where: Any = None) -> jax.Array:
    """The logits `[R, T, V]` of a head before any temperature, padding columns included."""
    head = as_head("head", head)
    dtype = wider_dtype(hidden.dtype, jnp.float32)
    hidden = hidden if where is None else jnp.where(where[..., None], hidden, 0)
    hidden = hidden.astype(dtype)
    kernel = head.kernel if head.layout == "hv" else head.kernel.T

    def product(a, b):
        return jnp.matmul(a, b.astype(dtype), precision="highest")

    logits = product(hidden, kernel)
    logits = logits if head.bias is None else logits + head.bias.astype(dtype)[None, None]
    if head.lora is not None:
        logits = logits + head.lora.scale * product(product(hidden, head.lora.a), head.lora.b)
    logits = head.scale * logits
    return logits if head.softcap is None else head.softcap * jnp.tanh(logits / head.softcap)


def reference_from_hidden(hidden: Any, head: Any, targets: Any, **options: Any) -> TokenStats:
    """`log_probs_from_hidden` through logits; `options` are those of `reference_from_logits`."""
    head = as_head("head", head)
    logits = plain_logits(hidden, head, options.get("where"))
    return reference_from_logits(logits, targets, vocab_size=head.vocab_size, **options)


def reference_divergence(
    student: tuple[Any, Any],
    teacher: tuple[Any, Any],
    divergence: Divergence = "reverse_kl",
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    where: Any = None,
) -> jax.Array:
    """`divergence_from_hidden` through logits, of (hidden states, head) each."""

    def log_softmax(states):
        return jax.nn.log_softmax(plain_logits(*states, where=where) / temperature)

    log_p = log_softmax(student)
    log_q = jax.lax.stop_gradient(log_softmax(teacher))
    p = jnp.exp(log_p)
    q = jnp.exp(log_q)
    log_m = jnp.log(beta * q + (1 - beta) * p)

    def kl(p, log_p, log_q):
        return (p * (log_p - log_q)).sum(-1)

    found = {
        "reverse_kl": kl(p, log_p, log_q),
        "forward_kl": kl(q, log_q, log_p),
        "jensen_shannon": beta * kl(q, log_q, log_m) + (1 - beta) * kl(p, log_p, log_m),
    }[divergence]
    return found if where is None else jnp.where(where, found, 0)
