"""Log-probs and entropy from logits whose vocabulary may be sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import as_token_ids, check_floating
from jaxppo.head import softmax
from jaxppo.head.asked import answers, cotangents_of, empty_sums
from jaxppo.head.checks import (
    as_asked,
    as_id_sets,
    as_temperature,
    check_targets,
    check_vocab_size,
    check_where,
    temperature_spec,
    with_nuclei,
)
from jaxppo.head.gradient_sums import as_primal
from jaxppo.head.slices import put_slice, slice_of
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
    """How many of the logits' columns a device works on, if it holds all of them; None if it holds only its own."""


class _Inputs(NamedTuple):
    """The arrays of a call, or their specs, None for those not given. A device has the second shape, with N tokens."""

    logits: Any  # [R, T, V]; [N, V]
    targets: Any  # i32[R, T]; [N]
    nucleus_ids: Any  # i32[R, T, K]; [N, K]
    ids: Any  # i32[R, T, K]; [N, K]
    where: Any  # bool[R, T]; [N]
    temperature: Any  # f32, a scalar or [R, T], None for 1; a scalar or [N, 1]


def log_probs_from_logits(
    logits: Float[Array, "R T V"],
    targets: Int[Array, "R T"],
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    temperature: float | Array = 1.0,
    entropy: Entropy = "none",
    logit_stats: Sequence[LogitStat] = (),
    top_k: int = 0,
    nucleus_ids: Int[Array, "R T K"] | None = None,
    ids: Int[Array, "R T K"] | None = None,
    where: Bool[Array, "R T"] | None = None,
    vocab_size: int | None = None,
) -> TokenStats:
    """Log-probs of the targets, and the entropy, of logits whose vocabulary may be sharded over the tensor axis.

    log_prob = (z_y - m) - log s and entropy = log s - u / s, with y the target, z = logits / temperature, m = max z,
    s = sum exp(z - m) and u = sum exp(z - m) (z - m), all in f32. No softmax is kept for the backward.

    Args:
      logits: `[R, T, V]`, f32 or bf16; sharded by `parallel.logits_spec`. If the tensor axis does not divide V they are
        replicated over it, and each device works on a window of their columns.
      targets: `i32[R, T]`, the token that each position predicts.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      temperature: divides the logits, as the sampler did; a positive scalar or `[R, T]`. No gradient flows to it.
      entropy: "none", "metric" (no gradient, and no cost in the backward) or "bonus" (differentiable).
      logit_stats: names of further statistics. Differentiable are "log_z", the log-sum-exp of z, and "mean_logit", the
        mean of the finite z (see `SFT`). Without a gradient are "accuracy", whether no token is likelier than the
        target, and "sum_p2", the sum of p^2. They are over all of `vocab_size`. What is not named costs nothing.
      top_k: how many of the likeliest ids to find. They are returned as `top_ids`, with their log-probs in the full
        distribution. They have no gradient: for gradients ask for those ids again, as `ids`.
      nucleus_ids: `i32[R, T, K]`, -1 padded, the sampler's top-p/top-k nucleus. Log-probs are renormalised over the
        nucleus and the target; the entropy stays that of the full distribution.
      ids: `i32[R, T, K]`, more ids whose log-probs are computed. They are differentiable and those of the full
        distribution. -1 is an empty slot, with log-prob -inf and probability 0.
      where: `bool[R, T]`, the positions that count. The results at the others are 0, and the inputs may hold anything.
      vocab_size: columns from here on are padding, with probability 0 and gradient 0.

    Returns:
      `TokenStats`: `f32[R, T]` each, `[R, T, K]` for `ids` and for the likeliest ids, None for what was not asked for.
      A log-prob is at most 0. It is NaN if a target that counts, an id of its nucleus, or the id itself is not in
      `[0, vocab_size)`.

    Raises:
      TypeError, ValueError: an argument has a wrong dtype, rank, shape or range; the message names it.

    Example:
      >>> stats = log_probs_from_logits(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]]), entropy="metric")
      >>> stats.log_probs.round(4), stats.entropy.round(4)
      (Array([[-1.3863, -1.3863]], dtype=float32), Array([[1.3863, 1.3863]], dtype=float32))
    """
    check_floating("logits", logits, 3, "[R, T, V]")
    check_targets(targets, logits.shape[:2], "logits")
    check_where(where, targets.shape)
    asked = as_asked(entropy, logit_stats, top_k)
    if not isinstance(parallel, ShardAxes):
        check_vocab_size(vocab_size, logits.shape[2])
    nuclei = None if nucleus_ids is None else as_id_sets("nucleus_ids", nucleus_ids, targets.shape)
    token_ids = None if ids is None else as_id_sets("ids", ids, targets.shape)
    of_temperature = as_temperature(temperature, targets.shape)
    inputs = _Inputs(logits, as_token_ids(targets), nuclei, token_ids, where, of_temperature)

    def specs(p: ParallelMesh) -> tuple[list[_Inputs], P]:
        # JAX cannot shard a dimension that an axis does not divide: such logits arrive whole
        of_logits = p.logits_spec if logits.shape[2] % p.tensor_size == 0 else P(*p.tokens_spec, None)
        of_tokens = p.tokens_spec
        of_inputs = of_logits, of_tokens, of_tokens, of_tokens, of_tokens, temperature_spec(p, of_temperature)
        given = zip(inputs, of_inputs, strict=True)
        return [_Inputs(*(None if x is None else spec for x, spec in given))], of_tokens

    args = {"inputs": inputs}
    found: TokenStats = shard_call("log_probs_from_logits", _per_shard, parallel, args, specs, (asked, vocab_size))
    return found if token_ids is None else dataclasses.replace(found, ids=token_ids)


def _per_shard(axes: ShardAxes, static: tuple[Asked, int | None], inputs: _Inputs) -> TokenStats:
    asked, vocab_size = static
    R, T, V_local = inputs.logits.shape
    own = bool(axes.tensor) and not set(axes.tensor) & varying(inputs.logits)
    window = -(-V_local // axes.size(axes.tensor)) if own else None
    vocab_size = check_vocab_size(vocab_size, V_local * (1 if own else axes.size(axes.tensor)))
    one = jnp.ones((), jnp.float32) if inputs.temperature is None else inputs.temperature
    by_token = one[..., None] if one.ndim else None
    targets = with_nuclei(inputs.targets, inputs.nucleus_ids, vocab_size)
    inputs = inputs._replace(targets=targets, temperature=by_token)
    inputs = jax.tree.map(lambda x: x.reshape(R * T, *x.shape[2:]), inputs)
    where = None if inputs.where is None else inputs.where.astype(bool)
    inputs = inputs._replace(where=where, temperature=one if by_token is None else inputs.temperature)
    found = _token_stats(_Call(asked, vocab_size, axes, window), inputs)
    return jax.tree.map(lambda x: x.reshape(R, T, *x.shape[1:]), found)


def _own_columns(call: _Call, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | bool]:
    """The columns of x `[N, V]` that this device works on, their ids, and which of them no device before it has."""
    index = call.axes.index(call.axes.tensor)
    if call.window is None:
        return x, index * x.shape[1] + jnp.arange(x.shape[1], dtype=jnp.int32), True
    first = jnp.minimum(index * call.window, x.shape[1] - call.window)
    ids = first + jnp.arange(call.window, dtype=jnp.int32)
    return slice_of(x, first, call.window, 1), ids, ids >= index * call.window


def _scaled(call: _Call, inputs: _Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """f32 logits after temperature, the ids of their columns, and which columns are valid; the others hold -inf."""
    own, ids, mine = _own_columns(call, inputs.logits)
    valid = (ids < call.vocab_size) & mine
    z = jnp.where(valid[None], own.astype(jnp.float32) / inputs.temperature, -jnp.inf)
    return z, ids, valid


def _places(
    call: _Call, inputs: _Inputs, ids: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array | None, softmax.Places | None]:
    """One-hot of the target `[N, V]`, the nucleus with the target added, and the places of the requested ids."""
    is_target = (ids[None] == inputs.targets[:, None]) & valid[None]
    nucleus = None
    if inputs.nucleus_ids is not None:
        place, there = _place(inputs.nucleus_ids, ids, valid)
        place = jnp.where(there, place, ids.shape[0])
        tokens = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None]
        nucleus = is_target.at[tokens, place].set(True, mode="drop")
    return is_target, nucleus, None if inputs.ids is None else _place(inputs.ids, ids, valid)


def _place(token_ids: jax.Array, ids: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The column of each token id among `ids`, and whether it is there and valid."""
    place = jnp.clip(token_ids - ids[0], 0, ids.shape[0] - 1)
    return place, (ids[place] == token_ids) & valid[place]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_stats(call: _Call, inputs: _Inputs) -> TokenStats:
    return _forward(call, inputs)[0]


def _forward(call: _Call, inputs: _Inputs) -> tuple[TokenStats, tuple[_Inputs, softmax.Residuals]]:
    z, ids, valid = _scaled(call, inputs)
    is_target, nucleus, places = _places(call, inputs, ids, valid)
    z_y = softmax.target_logits(z, is_target, *_place(inputs.targets, ids, valid))
    of_ids = 0 if inputs.ids is None else inputs.ids.shape[1]
    with_entropy = call.asked.entropy != "none"
    like = empty_sums(0, call.asked, entropy=with_entropy, nucleus=nucleus is not None, ids=of_ids)
    sums = softmax.block_sums(z, z_y, is_target, nucleus, like, ids=places, columns=ids[None])
    sums = softmax.combine(sums, call.axes)
    out, residuals = answers(sums, call.asked, inputs.targets, inputs.ids, call.vocab_size)
    return zero_unless(inputs.where, out), (inputs, residuals)


def _backward(call: _Call, saved: tuple[_Inputs, softmax.Residuals], of_stats: TokenStats) -> tuple[_Inputs]:
    inputs, residuals = saved
    z, ids, valid = _scaled(call, inputs)
    is_target, nucleus, places = _places(call, inputs, ids, valid)
    cotangents = cotangents_of(of_stats, call.asked, inputs.ids, None, call.vocab_size)
    counts = cotangents.counts | _finite(residuals)
    counts = counts if inputs.where is None else counts & inputs.where
    dz = softmax.dlogits(z, is_target, nucleus, residuals, cotangents, places) / inputs.temperature
    dz = jnp.where(counts[:, None] & (z > -jnp.inf), dz, 0)  # padding columns may hold anything
    dlogits = _in_place(call, dz, inputs.logits)
    return (_Inputs(dlogits, None, None, None, None, jnp.zeros_like(inputs.temperature)),)


def _finite(residuals: softmax.Residuals) -> jax.Array:
    """bool[N], whether all residuals of a token are finite.

    Such a token counts even without a cotangent: its gradient is 0, but that gradient may have a derivative. A token
    that has no loss and holds NaN does not count, since 0 * NaN is NaN.
    """
    return reduce(jnp.logical_and, [jnp.isfinite(x) for x in jax.tree.leaves(residuals)])


def _in_place(call: _Call, dz: jax.Array, logits: jax.Array) -> jax.Array:
    """The gradient of this device's columns, at their place among all the columns that it was given."""
    if call.window is not None:
        first = jnp.minimum(call.axes.index(call.axes.tensor) * call.window, logits.shape[1] - call.window)
        whole = vary_like(jnp.zeros(logits.shape, jnp.float32), dz, first)
        dz = put_slice(whole, dz, first, 1)
    return as_primal(dz, logits)


_token_stats.defvjp(_forward, _backward)
