"""Log-probs and entropy from logits whose vocabulary may be sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo.log_probs import softmax
from jaxppo.log_probs.stats import (
    Entropy,
    TokenStats,
    as_temperature,
    check_entropy,
    check_floating,
    check_targets,
    check_vocab_size,
    check_where,
)
from jaxppo.log_probs.varying import as_primal
from sharding import ParallelMesh, ShardAxes, shard_call


def log_probs_from_logits(
    logits: Float[Array, "R T V"],
    targets: Int[Array, "R T"],
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    temperature: float | Array = 1.0,
    entropy: Entropy = "none",
    keep_mask: Bool[Array, "R T V"] | None = None,
    where: Bool[Array, "R T"] | None = None,
    vocab_size: int | None = None,
) -> TokenStats:
    """Log-probs of the targets, and the entropy, of logits whose vocabulary may be sharded over the tensor axis.

    log_prob = (z_y - m) - log s,  entropy = log s - u / s,  with z = logits / temperature, m = max z,
    s = sum exp(z - m), u = sum exp(z - m) (z - m), all in f32. No softmax is kept for the backward.

    Args:
      logits: `[R, T, V]`, f32 or bf16; sharded by `parallel.logits_spec`.
      targets: `i32[R, T]`, the token that each position predicts.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      temperature: positive scalar that divides the logits, as the sampler did; a constant of differentiation.
      entropy: "none", "metric" (no gradient: nothing of its backward exists) or "bonus" (differentiable).
      keep_mask: `bool[R, T, V]`, the sampler's top-p/top-k nucleus: log-probs are renormalised over it and the
        target; the entropy stays that of the full distribution.
      where: `bool[R, T]`, the positions that count; the others read 0 and may hold anything.
      vocab_size: columns from here on are padding, with probability 0 and gradient 0.

    Returns:
      `TokenStats(log_probs f32[R, T], entropy f32[R, T] | None)`; NaN where a counted target is not in
      `[0, vocab_size)`.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype, rank, shape or range, named.

    Example:
      >>> stats = log_probs_from_logits(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]), entropy="metric")
      >>> stats.log_probs.round(4), stats.entropy.round(4)
      (Array([[-1.3863, -1.3863]], dtype=float32), Array([[1.3863, 1.3863]], dtype=float32))
    """
    check_floating("logits", logits, 3, "[R, T, V]")
    check_targets(targets, logits.shape[:2], "logits")
    check_where(where, targets.shape)
    check_entropy(entropy)
    if keep_mask is not None and keep_mask.shape != logits.shape:
        raise ValueError(f"keep_mask: got shape {keep_mask.shape}, expected {logits.shape}, the shape of logits")
    if not isinstance(parallel, ShardAxes):
        check_vocab_size(vocab_size, logits.shape[2])
    per_shard = partial(_per_shard, entropy=entropy, vocab_size=vocab_size)
    args = {
        "logits": logits,
        "targets": targets,
        "keep_mask": keep_mask,
        "where": where,
        "temperature": as_temperature(temperature),
    }
    return shard_call("log_probs_from_logits", per_shard, parallel, args, _specs)


def _specs(p: ParallelMesh):
    P = jax.sharding.PartitionSpec
    return [p.logits_spec, p.tokens_spec, p.logits_spec, p.tokens_spec, P()], p.tokens_spec


def _per_shard(axes: ShardAxes, logits, targets, keep_mask, where, temperature, *, entropy, vocab_size) -> TokenStats:
    R, T, V_local = logits.shape
    vocab_size = check_vocab_size(vocab_size, V_local * axes.size(axes.tensor))
    flat: Any = lambda x: None if x is None else x.reshape(R * T, *x.shape[2:])  # noqa: E731
    where = None if where is None else flat(where).astype(bool)
    log_probs, h = _log_probs(
        flat(logits), flat(targets), flat(keep_mask), where, temperature, axes, entropy, vocab_size
    )
    return TokenStats(log_probs.reshape(R, T), None if h is None else h.reshape(R, T))


def _scaled(logits, targets, temperature, axes: ShardAxes, vocab_size: int):
    """f32 logits after temperature with -inf in padding, the one-hot of the targets and its place in this shard."""
    first = axes.index(axes.tensor) * logits.shape[1]
    columns = first + jnp.arange(logits.shape[1])
    z = jnp.where(columns < vocab_size, logits.astype(jnp.float32) / temperature, -jnp.inf)
    return z, columns == targets[:, None], targets - first


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _log_probs(logits, targets, keep_mask, where, temperature, axes, entropy, vocab_size):
    return _forward(logits, targets, keep_mask, where, temperature, axes, entropy, vocab_size)[0]


def _forward(logits, targets, keep_mask, where, temperature, axes, entropy, vocab_size):
    z, is_target, place = _scaled(logits, targets, temperature, axes, vocab_size)
    here = (place >= 0) & (place < z.shape[1])
    z_y = jnp.take_along_axis(z, jnp.clip(place, 0, z.shape[1] - 1)[:, None], axis=1)[:, 0]
    keep = None if keep_mask is None else keep_mask | is_target
    with_entropy = entropy != "none"
    like = softmax.empty_sums(0, full=with_entropy or keep is None, entropy=with_entropy, kept=keep is not None)
    sums = softmax.combine(softmax.block_sums(z, jnp.where(here, z_y, 0), keep, like), axes)
    log_probs, h, residuals = softmax.finish(sums, (targets >= 0) & (targets < vocab_size))
    if where is not None:
        log_probs, h = jnp.where(where, log_probs, 0), None if h is None else jnp.where(where, h, 0)
    if entropy != "bonus":
        residuals = residuals.without_entropy(keep is not None)
    return (log_probs, h), (logits, targets, keep_mask, where, temperature, residuals)


def _backward(axes, entropy, vocab_size, saved, cotangents):
    logits, targets, keep_mask, where, temperature, residuals = saved
    g, e = cotangents[0], cotangents[1] if entropy == "bonus" else None
    counts = g != 0 if e is None else (g != 0) | (e != 0)
    counts = counts if where is None else counts & where
    z, is_target, _ = _scaled(logits, targets, temperature, axes, vocab_size)
    keep = None if keep_mask is None else keep_mask | is_target
    dz = softmax.dlogits(z, is_target, keep, residuals, g, e) / temperature
    # a position that carries no loss may hold NaN; padded columns hold anything
    dz = jnp.where(counts[:, None] & (z > -jnp.inf), dz, 0)
    return as_primal(dz, logits), None, None, None, jnp.zeros_like(temperature)


_log_probs.defvjp(_forward, _backward)
