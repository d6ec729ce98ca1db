"""Log-probs and entropy from logits whose vocabulary may be sharded."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo._sharding import ParallelMesh, ShardAxes, shard_call
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


def log_probs_from_logits(
    logits: Float[Array, "R T V"],
    targets: Int[Array, "R T"],
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    temperature: float | Array = 1.0,
    entropy: Entropy = "none",
    moments: bool = False,
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
      moments: also compute log_z, the log-sum-exp of z, and the mean of z (see `sft_loss`), both differentiable and
        over all of `vocab_size`, and the likeliest token's log-prob, a constant.
      keep_mask: `bool[R, T, V]`, the sampler's top-p/top-k nucleus: log-probs are renormalised over it and the
        target; the entropy stays that of the full distribution.
      where: `bool[R, T]`, the positions that count; the others read 0 and may hold anything.
      vocab_size: columns from here on are padding, with probability 0 and gradient 0.

    Returns:
      `TokenStats(log_probs, entropy, log_z, mean_logit, max_log_prob)`, `f32[R, T]` each, None if not asked for; the
      log-prob is NaN where a counted target is not in `[0, vocab_size)`.

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
    if keep_mask is not None and keep_mask.dtype != bool:
        raise TypeError(f"keep_mask: got dtype {keep_mask.dtype}, expected bool")
    if not isinstance(parallel, ShardAxes):
        check_vocab_size(vocab_size, logits.shape[2])
    per_shard = partial(_per_shard, entropy=entropy, moments=moments, vocab_size=vocab_size)
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


def _per_shard(
    axes: ShardAxes, logits, targets, keep_mask, where, temperature, *, entropy, moments, vocab_size
) -> TokenStats:
    R, T, V_local = logits.shape
    vocab_size = check_vocab_size(vocab_size, V_local * axes.size(axes.tensor))
    flat: Any = lambda x: None if x is None else x.reshape(R * T, *x.shape[2:])  # noqa: E731
    where = None if where is None else flat(where).astype(bool)
    log_probs, h, found = _token_stats(
        flat(logits), flat(targets), flat(keep_mask), where, temperature, axes, entropy, moments, vocab_size
    )
    return jax.tree.map(lambda x: x.reshape(R, T), TokenStats(log_probs, h, *(found or ())))


def _scaled(logits, targets, temperature, axes: ShardAxes, vocab_size: int):
    """f32 logits after temperature with -inf in padding, the one-hot of the targets and its place in this shard."""
    first = axes.index(axes.tensor) * logits.shape[1]
    columns = first + jnp.arange(logits.shape[1])
    z = jnp.where(columns < vocab_size, logits.astype(jnp.float32) / temperature, -jnp.inf)
    return z, columns == targets[:, None], targets - first


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _token_stats(logits, targets, keep_mask, where, temperature, axes, entropy, moments, vocab_size):
    return _forward(logits, targets, keep_mask, where, temperature, axes, entropy, moments, vocab_size)[0]


def _forward(logits, targets, keep_mask, where, temperature, axes, entropy, moments, vocab_size):
    z, is_target, place = _scaled(logits, targets, temperature, axes, vocab_size)
    here = (place >= 0) & (place < z.shape[1])
    z_y = jnp.take_along_axis(z, jnp.clip(place, 0, z.shape[1] - 1)[:, None], axis=1)[:, 0]
    keep = None if keep_mask is None else keep_mask | is_target
    with_entropy, kept = entropy != "none", keep is not None
    full = with_entropy or moments or not kept
    like = softmax.empty_sums(0, full=full, entropy=with_entropy, kept=kept, moments=moments)
    sums = softmax.combine(softmax.block_sums(z, jnp.where(here, z_y, 0), keep, like), axes)
    log_probs, h, residuals = softmax.finish(sums, (targets >= 0) & (targets < vocab_size))
    out = (log_probs, h, softmax.moments(sums, residuals, vocab_size))
    if where is not None:
        out = jax.tree.map(lambda x: jnp.where(where, x, 0), out)
    if entropy != "bonus":
        residuals = residuals.without_entropy(kept and not moments)
    return out, (logits, targets, keep_mask, where, temperature, residuals)


def _backward(axes, entropy, moments, vocab_size, saved, cotangents):
    del moments
    logits, targets, keep_mask, where, temperature, residuals = saved
    g, e, of_moments = cotangents
    e = e if entropy == "bonus" else None
    counts = reduce(jnp.logical_or, [x != 0 for x in jax.tree.leaves((g, e, of_moments))])
    counts = counts if where is None else counts & where
    z, is_target, _ = _scaled(logits, targets, temperature, axes, vocab_size)
    keep = None if keep_mask is None else keep_mask | is_target
    dz = softmax.dlogits(z, is_target, keep, residuals, g, e, of_moments, vocab_size) / temperature
    # a position that carries no loss may hold NaN; padded columns hold anything
    dz = jnp.where(counts[:, None] & (z > -jnp.inf), dz, 0)
    return as_primal(dz, logits), None, None, None, jnp.zeros_like(temperature)


_token_stats.defvjp(_forward, _backward)
