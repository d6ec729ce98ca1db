"""Log-probs and entropy from logits whose vocabulary may be sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo._arrays import check_floating
from jaxppo.head import softmax
from jaxppo.head.asked import answers, empty_sums, id_cotangents
from jaxppo.head.checks import (
    as_asked,
    as_id_sets,
    as_temperature,
    as_token_ids,
    check_targets,
    check_vocab_size,
    check_where,
    temperature_spec,
)
from jaxppo.head.gradient_sums import as_primal
from jaxppo.head.token_blocks import zero_unless
from jaxppo.head.types import Asked, Entropy, LogitStat, TokenStats
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary_like, varying


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of one call on a device."""

    asked: Asked
    vocab_size: int
    axes: ShardAxes
    window: int | None
    """How many of the logits' columns a device works on, where it holds all of them; None where it holds its own."""


def log_probs_from_logits(
    logits: Float[Array, "R T V"],
    targets: Int[Array, "R T"],
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    temperature: float | Array = 1.0,
    entropy: Entropy = "none",
    logit_stats: Sequence[LogitStat] = (),
    top_k: int = 0,
    nucleus: Bool[Array, "R T V"] | None = None,
    ids: Int[Array, "R T K"] | None = None,
    where: Bool[Array, "R T"] | None = None,
    vocab_size: int | None = None,
) -> TokenStats:
    """Log-probs of the targets, and the entropy, of logits whose vocabulary may be sharded over the tensor axis.

    log_prob = (z_y - m) - log s,  entropy = log s - u / s,  with z = logits / temperature, m = max z,
    s = sum exp(z - m), u = sum exp(z - m) (z - m), all in f32. No softmax is kept for the backward.

    Args:
      logits: `[R, T, V]`, f32 or bf16; sharded by `parallel.logits_spec`, or replicated over a tensor axis that does
        not divide V, of which each device then works on a window.
      targets: `i32[R, T]`, the token that each position predicts.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      temperature: divides the logits, as the sampler did; a positive scalar or `[R, T]`, a constant of
        differentiation.
      entropy: "none", "metric" (no gradient: nothing of its backward exists) or "bonus" (differentiable).
      logit_stats: names of what else to compute: "log_z", the log-sum-exp of z, "mean_logit", the mean of the finite z
        (see `sft_loss`), both differentiable, and the constants "accuracy", whether no token is likelier than the
        target, and "sum_p2", the sum of p^2. They are over all of `vocab_size`. What is not named costs nothing.
      top_k: how many of the likeliest ids to find, as `top_ids`, with their log-probs in the full distribution. They
        are constants: for gradients ask for those ids again, as `ids`.
      nucleus: `bool[R, T, V]`, the sampler's top-p/top-k nucleus: log-probs are renormalised over it and the
        target; the entropy stays that of the full distribution.
      ids: `i32[R, T, K]`, the ids whose log-probs are asked for too, of the full distribution and differentiable. -1 is
        an empty slot: its log-prob is -inf, its probability 0.
      where: `bool[R, T]`, the positions that count; the others read 0 and may hold anything.
      vocab_size: columns from here on are padding, with probability 0 and gradient 0.

    Returns:
      `TokenStats`, `f32[R, T]` each, `[R, T, K]` of ids and of the likeliest, None if not asked for; a log-prob is at
      most 0, and NaN where a counted target, or the id, is not in `[0, vocab_size)`.

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
    asked = as_asked(entropy, logit_stats, top_k)
    if nucleus is not None and nucleus.shape != logits.shape:
        raise ValueError(f"nucleus: got shape {nucleus.shape}, expected {logits.shape}, the shape of logits")
    if nucleus is not None and nucleus.dtype != bool:
        raise TypeError(f"nucleus: got dtype {nucleus.dtype}, expected bool")
    if not isinstance(parallel, ShardAxes):
        check_vocab_size(vocab_size, logits.shape[2])
    args: dict[str, Any] = {
        "logits": logits,
        "targets": as_token_ids(targets),
        "nucleus": nucleus,
        "ids": None if ids is None else as_id_sets("ids", ids, targets.shape),
        "where": where,
        "temperature": as_temperature(temperature, targets.shape),
    }

    def specs(p: ParallelMesh) -> tuple[list[P], P]:
        # JAX cannot shard a dimension that an axis does not divide: such logits arrive whole
        of_logits = p.logits_spec if logits.shape[2] % p.tensor_size == 0 else P(*p.tokens_spec, None)
        of_temperature = temperature_spec(p, args["temperature"])
        of_tokens = p.tokens_spec
        return [of_logits, of_tokens, of_logits, of_tokens, of_tokens, of_temperature], of_tokens

    found: TokenStats = shard_call("log_probs_from_logits", _per_shard, parallel, args, specs, (asked, vocab_size))
    return found


def _per_shard(
    axes: ShardAxes,
    static: tuple[Asked, int | None],
    logits: Any,
    targets: Any,
    nucleus: Any,
    token_ids: Any,
    where: Any,
    temperature: Any,
) -> TokenStats:
    asked, vocab_size = static
    R, T, V_local = logits.shape
    own = bool(axes.tensor) and not set(axes.tensor) & varying(logits)
    window = -(-V_local // axes.size(axes.tensor)) if own else None
    vocab_size = check_vocab_size(vocab_size, V_local * (1 if own else axes.size(axes.tensor)))
    call = _Call(asked, vocab_size, axes, window)
    temperature = jnp.ones((), jnp.float32) if temperature is None else temperature
    by_token = temperature[..., None] if temperature.ndim else None
    of_tokens = logits, targets, nucleus, token_ids, where, by_token
    logits, targets, nucleus, token_ids, where, by_token = jax.tree.map(
        lambda x: x.reshape(R * T, *x.shape[2:]), of_tokens
    )
    where = None if where is None else where.astype(bool)
    temperature = temperature if by_token is None else by_token
    found = _token_stats(call, logits, targets, nucleus, token_ids, where, temperature)
    return jax.tree.map(lambda x: x.reshape(R, T, *x.shape[1:]), found)


def _own_columns(call: _Call, x: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """The columns of x `[N, V]` that this device works on, their ids, and which are no other device's as well."""
    index = call.axes.index(call.axes.tensor)
    if call.window is None:
        return x, index * x.shape[1] + jnp.arange(x.shape[1], dtype=jnp.int32), True
    first = jnp.minimum(index * call.window, x.shape[1] - call.window)
    ids = first + jnp.arange(call.window, dtype=jnp.int32)
    return lax.dynamic_slice_in_dim(x, first, call.window, axis=1), ids, ids >= index * call.window


def _scaled(call: _Call, logits: Any, temperature: Any) -> Any:
    """f32 logits after temperature, the ids of their columns, and which are valid; the others hold -inf."""
    own, ids, mine = _own_columns(call, logits)
    valid = (ids < call.vocab_size) & mine
    z = jnp.where(valid[None], own.astype(jnp.float32) / temperature, -jnp.inf)
    return z, ids, valid


def _nucleus(call: _Call, nucleus: Any, is_target: Any) -> Any:
    return None if nucleus is None else _own_columns(call, nucleus)[0] | is_target


def _place(token_ids: jax.Array, ids: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The column of each token id among `ids`, and whether it is there and valid."""
    place = jnp.clip(token_ids - ids[0], 0, ids.shape[0] - 1)
    return place, (ids[place] == token_ids) & valid[place]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_stats(
    call: _Call, logits: Any, targets: Any, nucleus: Any, token_ids: Any, where: Any, temperature: Any
) -> Any:
    return _forward(call, logits, targets, nucleus, token_ids, where, temperature)[0]


def _forward(call: _Call, logits: Any, targets: Any, nucleus: Any, token_ids: Any, where: Any, temperature: Any) -> Any:
    z, ids, valid = _scaled(call, logits, temperature)
    is_target = (ids[None] == targets[:, None]) & valid[None]
    inside = _nucleus(call, nucleus, is_target)
    z_y = softmax.target_logits(z, is_target, *_place(targets, ids, valid))
    places = None if token_ids is None else softmax.IdPlaces(*_place(token_ids, ids, valid))
    of_ids = 0 if token_ids is None else token_ids.shape[1]
    with_entropy = call.asked.entropy != "none"
    like = empty_sums(0, call.asked, entropy=with_entropy, nucleus=inside is not None, ids=of_ids)
    sums = softmax.block_sums(z, z_y, is_target, inside, like, ids=places, columns=ids[None])
    sums = softmax.combine(sums, call.axes)
    out, residuals = answers(sums, call.asked, targets, token_ids, call.vocab_size)
    out = zero_unless(where, out)
    return out, (logits, targets, nucleus, token_ids, where, temperature, residuals)


def _backward(call: _Call, saved: Any, cotangents: Any) -> Any:
    logits, targets, nucleus, token_ids, where, temperature, residuals = saved
    e = cotangents.entropy if call.asked.entropy == "bonus" else None
    z, ids, valid = _scaled(call, logits, temperature)
    is_target = (ids[None] == targets[:, None]) & valid[None]
    inside = _nucleus(call, nucleus, is_target)
    places = of_ids = None
    if token_ids is not None:
        places = softmax.IdPlaces(*_place(token_ids, ids, valid))
        of_ids = id_cotangents(cotangents.id_log_probs, token_ids, call.vocab_size)
    of_logits = cotangents.log_z, cotangents.mean_logit
    cotangents = softmax.Cotangents.of(cotangents.log_probs, e, *of_logits, ids=of_ids)
    counts = cotangents.counts | _finite(residuals)
    counts = counts if where is None else counts & where
    dz = softmax.dlogits(z, is_target, inside, residuals, cotangents, places) / temperature
    dz = jnp.where(counts[:, None] & (z > -jnp.inf), dz, 0)  # padded columns hold anything
    return _in_place(call, dz, logits), None, None, None, None, jnp.zeros_like(temperature)


def _finite(residuals: softmax.Residuals) -> jax.Array:
    """A position without a cotangent counts where all about it is finite: its gradient is 0, but may have a derivative.

    One that carries no loss and holds NaN does not count, since 0 * NaN is NaN.
    """
    return reduce(jnp.logical_and, [jnp.isfinite(x) for x in jax.tree.leaves(residuals)])


def _in_place(call: _Call, dz: jax.Array, logits: jax.Array) -> jax.Array:
    """The gradient of this device's columns, at their place in those that it was given."""
    if call.window is not None:
        first = jnp.minimum(call.axes.index(call.axes.tensor) * call.window, logits.shape[1] - call.window)
        whole = vary_like(jnp.zeros(logits.shape, jnp.float32), dz, first)
        dz = lax.dynamic_update_slice_in_dim(whole, dz, first, axis=1)
    return as_primal(dz, logits)


_token_stats.defvjp(_forward, _backward)
