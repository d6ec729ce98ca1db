"""Which sums the requested statistics need, and how the statistics follow from the sums."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxppo.head.likeliest import NO_ID, no_top
from jaxppo.head.softmax import Cotangents, Residuals, Sums
from jaxppo.head.types import Asked, TokenStats


def empty_sums(count: int, asked: Asked, *, entropy: bool = False, nucleus: bool = False, ids: int = 0) -> Sums:
    """The sums before any logits are added, for `count` tokens.

    Args:
      count: the number of tokens.
      asked: the statistics that are asked for.
      entropy: include u, the sum for the entropy.
      nucleus: log-probs are renormalised over a nucleus.
      ids: the number of ids per token whose log-probs are asked for.
    """
    low, zero = jnp.full(count, -jnp.inf, jnp.float32), jnp.zeros(count, jnp.float32)
    stats, k = asked.logit_stats, asked.top_k
    full = entropy or bool(ids) or bool(k) or not nucleus or "log_z" in stats or "sum_p2" in stats
    return Sums(
        m=low if full else None,
        s=zero if full else None,
        u=zero if entropy else None,
        nucleus_m=low if nucleus else None,
        nucleus_s=zero if nucleus else None,
        z_y=zero,
        total=zero if "mean_logit" in stats else None,
        finite=zero if "mean_logit" in stats else None,
        likeliest=jnp.full(count, jnp.iinfo(jnp.int32).min, jnp.int32) if "accuracy" in stats else None,
        squares=zero if "sum_p2" in stats else None,
        z_ids=jnp.zeros((count, ids), jnp.float32) if ids else None,
        top=no_top(count, k) if k else None,
    )


def answers(
    sums: Sums, asked: Asked, targets: Int[Array, " N"], ids: Int[Array, "N K"] | None, vocab_size: int
) -> tuple[TokenStats, Residuals]:
    """The statistics of tokens from their sums over the whole vocabulary; NaN for a target outside the vocabulary."""
    log_s: Any = None if sums.s is None else jnp.log(sums.s)
    nucleus_log_s: Any = None if sums.nucleus_s is None else jnp.log(sums.nucleus_s)
    entropy = None if sums.u is None else log_s - sums.u / sums.s
    # log s becomes NaN, so that the gradient is NaN too if the target is outside the vocabulary
    exists = _exist(targets, vocab_size)
    log_s, nucleus_log_s = (None if x is None else jnp.where(exists, x, jnp.nan) for x in (log_s, nucleus_log_s))
    finite: Any = None if sums.finite is None else jnp.maximum(sums.finite, 1)
    residuals = Residuals(sums.m, log_s, entropy, sums.nucleus_m, nucleus_log_s, finite)
    of_all = sums.m, log_s
    log_probs = _log_probs(sums.z_y, *(of_all if sums.nucleus_m is None else (sums.nucleus_m, nucleus_log_s)))
    if asked.entropy == "none" and entropy is not None:
        # a use that changes nothing, without which the compiler would leave the entropy out; bits could then differ
        log_probs, entropy = jnp.where(jnp.isnan(entropy), jnp.nan, log_probs), None
    of_ids = top_ids = top_log_probs = None
    if ids is not None:
        of_ids = jnp.where(_exist(ids, vocab_size), _log_probs(sums.z_ids, *of_all), jnp.nan)
        of_ids = jnp.where(ids == -1, -jnp.inf, of_ids)
    if sums.top is not None:
        top_ids = jnp.where(sums.top[1] == NO_ID, -1, sums.top[1])
        top_log_probs = jnp.where(top_ids == -1, -jnp.inf, lax.stop_gradient(_log_probs(sums.top[0], *of_all)))
    others: dict[str, Any] = {
        "entropy": entropy,
        "log_z": sums.m + log_s if "log_z" in asked.logit_stats else None,
        "mean_logit": None if sums.total is None else sums.total / finite,
        "accuracy": None if sums.likeliest is None else (sums.likeliest & 1).astype(jnp.float32),
        "sum_p2": None if sums.squares is None else sums.squares * jnp.exp(-2 * log_s),
        "id_log_probs": of_ids,
        "top_ids": top_ids,
        "top_log_probs": top_log_probs,
    }
    stats = TokenStats(log_probs, **others, entropy_mode=asked.entropy)
    if asked.entropy != "bonus":
        nucleus_only = sums.nucleus_m is not None and stats.log_z is None and ids is None
        residuals = residuals.without_entropy(nucleus_only)
    return stats, residuals


def _log_probs(z: Any, m: Array, log_s: Array) -> Array:
    """log p of logits `[N]` or `[N, K]`; at most 0, even if m and log s come from logits that differ by an ulp."""
    found = (z - m.reshape(-1, *[1] * (z.ndim - 1))) - log_s.reshape(-1, *[1] * (z.ndim - 1))
    return found - lax.stop_gradient(jnp.maximum(found, 0))


def cotangents_of(
    of_stats: TokenStats, asked: Asked, ids: Int[Array, "N K"] | None, counts: Bool[Array, " N"] | None, vocab_size: int
) -> Cotangents:
    """The cotangents that the backward reads, from those of the statistics; tokens outside `counts` have none.

    That of an id's log-prob is 0 if the id is -1, and NaN if it is outside the vocabulary.
    """
    entropy = of_stats.entropy if asked.entropy == "bonus" else None
    given = of_stats.log_probs, entropy, of_stats.log_z, of_stats.mean_logit
    some, of_ids = [x != 0 for x in given if x is not None], None
    if ids is not None and (g := of_stats.id_log_probs) is not None:
        of_ids = jnp.where(ids == -1, 0, jnp.where(_exist(ids, vocab_size) | (g == 0), g, jnp.nan))
        some.append((of_ids != 0).any(axis=1))
    not_zero = reduce(jnp.logical_or, some)
    return Cotangents(*given, not_zero if counts is None else not_zero & counts, of_ids)


def _exist(ids: Int[Array, "..."], vocab_size: int) -> Bool[Array, "..."]:
    return (ids >= 0) & (ids < vocab_size)
