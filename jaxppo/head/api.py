"""Log-probs and entropies: from hidden states and a head, where the logits never exist as a whole, or from logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import check, check_array, check_count, check_floating
from jaxppo.head import reductions
from jaxppo.head.border import Window, flat_tokens, slice_of, unless
from jaxppo.head.call import Asked, HeadOptions, Names, Tokens
from jaxppo.head.gradient import in_rows, stats_of_tokens
from jaxppo.head.head import Entropy, Head, LogitStat, TokenStats, Transform
from jaxppo.head.prepare import as_asked, as_token_arrays, prepare_head, token_specs
from jaxppo.head.reductions import Columns
from jaxppo.head.tile import LOW
from jaxppo.head.tile import logits as to_logits
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary, varying


def log_probs_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
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
    adapter_ids: Int[Array, " R"] | None = None,
    **options: Unpack[HeadOptions],
) -> TokenStats:
    """Log-probs of the targets, and entropies, from hidden states and a head; the logits never exist as a whole.

    The logits are z = softcap(scale * (hidden @ kernel + bias + LoRA)) / temperature; `log_probs_from_logits` has the
    formulas of the results. The backward computes the logits again.

    Args:
      hidden: `[R, T, H]`, f32 or bf16; sharded by `parallel.hidden_spec`.
      head: a `Head`, or its bare kernel `[H, V]`. Only the gradients that are asked for are computed.
      targets: `i32[R, T]`, the token that each position predicts.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      temperature: divides the logits, as the sampler did; a positive scalar or `[R, T]`. No gradient flows to it.
      entropy: "none", "metric" (no gradient, and no cost in the backward) or "bonus" (differentiable).
      logit_stats: names of further statistics, see `TokenStats`: "log_z" and "mean_logit", which are differentiable,
        "accuracy" and "sum_p2", which are not. A statistic that you do not name costs nothing.
      top_k: how many of the likeliest ids to find, with their log-probs in the full distribution, without gradients:
        for gradients ask for those ids again, as `ids`.
      nucleus_ids: `i32[R, T, K]`, -1 padded, the sampler's top-p/top-k nucleus. Log-probs are renormalised over the
        nucleus and the target; the entropy stays that of the full distribution.
      ids: `i32[R, T, K]`, more ids whose log-probs are computed, such as a teacher's top-k, in any order. The log-probs
        are differentiable and those of the full distribution; an id that stands twice gets both gradients. -1 is an
        empty slot, with log-prob -inf and probability 0.
      adapter_ids: `i32[R]`, the adapter of each row if the head has several, -1 for none; see `LoRA`. The results of a
        row are NaN if its id names no adapter.
      where: `bool[R, T]`, the positions that count. The others are not computed: the results there are 0, and the
        inputs may hold anything.
      **options: see `HeadOptions`.

    Returns:
      `TokenStats`: `f32[R, T]` each, `[R, T, K]` for `ids` and for the likeliest ids, None for what was not asked for.
      A log-prob is at most 0. It is NaN if a target that counts, an id of its nucleus, or the id itself is not in the
      vocabulary.

    Raises:
      TypeError, ValueError: an argument has a wrong dtype, rank, shape, sharding or range; the message names it.

    Example:
      >>> hidden, kernel = jnp.ones((1, 2, 3)), jnp.zeros((3, 4))
      >>> log_probs_from_hidden(hidden, kernel, jnp.array([[0, 3]]), entropy="metric").entropy.round(4)
      Array([[1.3863, 1.3863]], dtype=float32)
    """
    check_array("targets", targets)  # here, because prepare_head accepts None
    given: dict[str, Any] = {"nucleus_ids": nucleus_ids, "ids": ids, "where": where, "adapter_ids": adapter_ids}
    given |= {"entropy": entropy, "logit_stats": logit_stats, "top_k": top_k, "temperature": temperature}
    call, inputs, specs, _ = prepare_head(hidden, head, targets, parallel=parallel, options=options, **given)
    of_head = {"head": inputs}, lambda p: ([specs], p.tokens_spec), call
    found: TokenStats = shard_call("log_probs_from_hidden", stats_of_tokens, parallel, *of_head)
    return dataclasses.replace(found, ids=inputs.tokens.ids)


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
      targets, parallel, temperature, entropy, logit_stats, top_k, nucleus_ids, ids, where: see `log_probs_from_hidden`.
      vocab_size: columns from here on are padding, with probability 0 and gradient 0.

    Returns:
      `TokenStats`, as `log_probs_from_hidden` returns them.

    Raises:
      TypeError, ValueError: an argument has a wrong dtype, rank, shape or range; the message names it.

    Example:
      >>> log_probs_from_logits(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]])).log_probs.round(4)
      Array([[-1.3863, -1.3863]], dtype=float32)
    """
    check_floating("logits", logits, 3, "[R, T, V]")
    check_array("targets", targets)
    asked = as_asked(entropy, logit_stats, top_k)
    if vocab_size is not None:
        check_count("vocab_size", vocab_size, least=1)
    tokens, where = as_token_arrays("logits", logits.shape[:2], targets, nucleus_ids, ids, where, temperature)
    args = {"logits": logits, "tokens": tokens, "where": where}

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        # JAX cannot shard a dimension that an axis does not divide: such logits arrive whole
        t = p.tokens_spec
        of_logits = P(*t, None) if logits.shape[2] % p.tensor_size else p.logits_spec
        return [of_logits, token_specs(p, tokens), t], t

    found: TokenStats = shard_call("log_probs_from_logits", _of_logits, parallel, args, specs, (asked, vocab_size))
    return dataclasses.replace(found, ids=tokens.ids)


def _of_logits(
    axes: ShardAxes, static: tuple[Asked, int | None], logits: jax.Array, tokens: Tokens, where: jax.Array | None
) -> TokenStats:
    (asked, vocab_size), (R, T, V_local) = static, logits.shape
    v_names = axes.tensor if set(axes.tensor) & varying(logits) else ()  # none if each device holds all columns
    columns = V_local * axes.size(v_names)
    vocab_size = columns if vocab_size is None else vocab_size
    check("vocab_size", vocab_size, vocab_size <= columns, f"1 to {columns}, the columns there are")
    call = _Call(axes, asked, v_names, vocab_size)
    tokens, where = flat_tokens(tokens, where, R * T, call.vocab_size)
    return in_rows((R, T), _statistics(call, logits.reshape(R * T, V_local), tokens, where))


class _Call(NamedTuple):
    """The static part of a call with logits, on a device."""

    axes: ShardAxes
    asked: Asked
    v_names: Names  # the mesh axes that shard the columns
    vocab_size: int


def _z(call: _Call, x: jax.Array, tokens: Tokens) -> tuple[jax.Array, Columns]:
    """The logits of the columns on which this device works, after temperature, and these columns."""
    window = Window.of(call.axes, call.v_names, x.shape[1], call.vocab_size, stored=True)
    start, columns = window.block(0, window.total)
    x = slice_of(x, start, window.total, 1).astype(jnp.float32)
    return to_logits(Transform(), x, tokens.temperature, columns.valid), columns


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(call: _Call, x: jax.Array, tokens: Tokens, where: jax.Array | None) -> TokenStats:
    return _forward(call, x, tokens, where)[0]


def _forward(call: _Call, x: jax.Array, tokens: Tokens, where: jax.Array | None) -> tuple[TokenStats, Any]:
    z, columns = _z(call, unless(where, x), tokens)
    found = reductions.over_devices(reductions.reduced(call.asked, z, tokens, columns), call.axes)
    stats = reductions.finish(call.asked, found, tokens, call.vocab_size)
    return unless(where, stats), (x, tokens, where, reductions.left_for_gradients(call.asked, found))


def _backward(call: _Call, saved: Any, of_stats: TokenStats) -> tuple[jax.Array, None, None]:
    x, tokens, where, found = saved
    asked, counts, of_sums = reductions.cotangents(call.asked, found, tokens, call.vocab_size, of_stats)
    # A token whose numbers are finite counts even without a cotangent: its gradient is 0, but may have a derivative.
    # One that has no loss and holds NaN, or excludes all columns, does not: 0 * NaN is NaN.
    finite = jnp.stack([jnp.isfinite(n).reshape(x.shape[0], -1).all(1) for n in found.sums.values()]).all(0)
    counts |= finite & (found.sums["s"] > 0)
    counts = counts if where is None else counts & where
    of_sums, peaks = unless(counts, of_sums), unless(counts, found.peaks, -LOW)

    def sums(x: jax.Array) -> reductions.Numbers:
        z, columns = _z(call, unless(counts, x), tokens)
        return reductions.sums_of(asked, z, peaks, tokens, columns, differentiated=True)

    like, pull = jax.vjp(sums, x)
    return *pull(jax.tree.map(lambda g, x: vary(g, varying(x)), of_sums, like)), None, None


_statistics.defvjp(_forward, _backward)
