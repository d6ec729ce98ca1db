"""Log-probs and entropies: from hidden states and a head, without all logits at once, or from
logits.
"""

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
from jaxppo.head import statistics
from jaxppo.head.arguments import prepare_head, token_specs
from jaxppo.head.call import Asked, HeadOptions, Names, Tokens
from jaxppo.head.columns import Columns, columns_of
from jaxppo.head.door import flat_tokens, own_columns
from jaxppo.head.gradient import in_rows, stats_of_inputs
from jaxppo.head.head import Entropy, Head, LogitStat, TokenStats, Transform
from jaxppo.head.kept import stats_with_kept_logits
from jaxppo.head.order import where_counts
from jaxppo.head.tile import LOW
from jaxppo.head.tile import logits as to_logits
from jaxppo.head.token_arguments import as_asked, as_token_arrays
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
    """Log-probs of the targets, and entropies, from hidden states and a head; the logits need not
    exist as a whole.

    The logits are z = softcap(scale * (hidden @ kernel + bias + LoRA)) / temperature;
    `log_probs_from_logits` has the formulas of the results. The backward computes the logits again.
    If `memory` is given and has room for them, they wait for it instead, 4 bytes for each token and
    column of a device.

    Args:
      hidden: `[R, T, H]`, f32 or bf16; sharded by `parallel.hidden_spec`.
      head: a `Head`, or its bare kernel `[H, V]`. Only the gradients that are asked for are
        computed.
      targets: `i32[R, T]`, the token that each position predicts.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      temperature: divides the logits, as the sampler did; a positive scalar or `[R, T]`. No
        gradient flows to it.
      entropy: "none", "metric" (no gradient, and no cost in the backward) or "bonus"
        (differentiable).
      logit_stats: names of further statistics, see `TokenStats`: "log_z" and "mean_logit", which
        are differentiable, "accuracy" and "sum_p2", which are not. A statistic that you do not name
        costs nothing.
      top_k: how many of the likeliest ids to find, with their log-probs in the full distribution,
        without gradients:
        for gradients ask for those ids again, as `ids`.
      nucleus_ids: `i32[R, T, K]`, -1 padded, the sampler's top-p/top-k nucleus. Log-probs are
        renormalised over the nucleus and the target; the entropy stays that of the full
        distribution.
      ids: `i32[R, T, K]`, more ids whose log-probs are computed, such as a teacher's top-k, in any
        order. The log-probs are differentiable and those of the full distribution; an id that
        stands twice gets both gradients. -1 is an empty slot, with log-prob -inf and probability 0.
      adapter_ids: `i32[R]`, the adapter of each row if the head has several, -1 for none; see
        `LoRA`. The results of a row are NaN if its id names no adapter.
      where: `bool[R, T]`, the positions that count. The others are not computed: the results there
        are 0, and the inputs may hold anything.
      **options: see `HeadOptions`.

    Returns:
      `TokenStats`: `f32[R, T]` each, `[R, T, K]` for `ids` and for the likeliest ids, None for what
      was not asked for. A log-prob is at most 0. It is NaN if a target that counts, an id of its
      nucleus, or the id itself is not in the vocabulary.

    Raises:
      TypeError, ValueError: an argument has a wrong dtype, rank, shape, sharding or range; the
        message names it.

    Example:
      >>> hidden, kernel = jnp.ones((1, 2, 3)), jnp.zeros((3, 4))
      >>> log_probs_from_hidden(hidden, kernel, jnp.array([[0, 3]]), entropy="metric").entropy.round(4)
      Array([[1.3863, 1.3863]], dtype=float32)
    """
    check_array("targets", targets)  # here, because prepare_head accepts None
    prepared = prepare_head(
        hidden,
        head,
        targets,
        parallel=parallel,
        temperature=temperature,
        entropy=entropy,
        logit_stats=logit_stats,
        top_k=top_k,
        nucleus_ids=nucleus_ids,
        ids=ids,
        where=where,
        adapter_ids=adapter_ids,
        options=options,
    )

    def specs(parallel: ParallelMesh) -> tuple[list[Any], P]:
        return [prepared.specs], parallel.tokens_spec

    stats_of = stats_of_inputs
    if prepared.call.memory is not None:
        stats_of = stats_with_kept_logits
    args = {"head": prepared.inputs}
    stats: TokenStats = shard_call(
        "log_probs_from_hidden", stats_of, parallel, args, specs, prepared.call
    )
    return dataclasses.replace(stats, ids=prepared.inputs.tokens.ids)


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
    """Log-probs of the targets, and the entropy, of logits whose vocabulary may be sharded over the
    tensor axis.

    log_prob = (z_y - m) - log s and entropy = log s - u / s, with y the target, z = logits /
    temperature, m = max z, s = sum exp(z - m) and u = sum exp(z - m) (z - m), all in f32. No
    softmax is kept for the backward.

    Args:
      logits: `[R, T, V]`, f32 or bf16; sharded by `parallel.logits_spec`. If the tensor axis does
        not divide V they are replicated over it, and each device works on a window of their
        columns.
      targets, parallel, temperature, entropy, logit_stats, top_k, nucleus_ids, ids, where: see
      `log_probs_from_hidden`.
      vocab_size: columns from here on are padding, with probability 0 and gradient 0.

    Returns:
      `TokenStats`, as `log_probs_from_hidden` returns them.

    Raises:
      TypeError, ValueError: an argument has a wrong dtype, rank, shape or range; the message names
        it.

    Example:
      >>> log_probs_from_logits(jnp.zeros((1, 2, 4)), jnp.array([[0, 3]])).log_probs.round(4)
      Array([[-1.3863, -1.3863]], dtype=float32)
    """
    check_floating("logits", logits, 3, "[R, T, V]")
    check_array("targets", targets)
    asked = as_asked(entropy, logit_stats, top_k)
    if vocab_size is not None:
        check_count("vocab_size", vocab_size, least=1)
    tokens, where = as_token_arrays(
        "logits", logits.shape[:2], targets, nucleus_ids, ids, where, temperature
    )
    args = {"logits": logits, "tokens": tokens, "where": where}

    def specs(parallel: ParallelMesh) -> tuple[list[Any], P]:
        spec = parallel.logits_spec
        # JAX cannot shard what an axis does not divide: it arrives whole
        if logits.shape[2] % parallel.tensor_size:
            spec = P(*parallel.tokens_spec, None)
        return [spec, token_specs(parallel, tokens), parallel.tokens_spec], parallel.tokens_spec

    stats: TokenStats = shard_call(
        "log_probs_from_logits", _of_logits, parallel, args, specs, (asked, vocab_size)
    )
    return dataclasses.replace(stats, ids=tokens.ids)


def _of_logits(
    axes: ShardAxes,
    static: tuple[Asked, int | None],
    logits: jax.Array,
    tokens: Tokens,
    where: jax.Array | None,
) -> TokenStats:
    asked, vocab_size = static
    R, T, V_local = logits.shape
    v_names: Names = ()
    if set(axes.tensor) & varying(logits):  # else each device holds all columns
        v_names = axes.tensor
    width = V_local * axes.size(v_names)
    if vocab_size is None:
        vocab_size = width
    check("vocab_size", vocab_size, vocab_size <= width, f"1 to {width}, the columns there are")
    call = _LogitsCall(axes, asked, v_names, vocab_size)
    tokens, where = flat_tokens(tokens, where, R * T, call.vocab_size)
    return in_rows((R, T), _statistics(call, logits.reshape(R * T, V_local), tokens, where))


class _LogitsCall(NamedTuple):
    """The static part of a call with logits, on a device."""

    axes: ShardAxes
    asked: Asked
    v_names: Names  # the mesh axes that shard the columns
    vocab_size: int


def _own_logits(call: _LogitsCall, logits: jax.Array, tokens: Tokens) -> tuple[jax.Array, Columns]:
    """The logits of the columns on which this device works, f32[N, V] after temperature, and
    these columns.
    """
    logits = own_columns(call.axes, call.v_names, call.vocab_size, logits, dim=1)
    columns = columns_of(call.axes, call.vocab_size, logits.shape[1])
    logits = logits.astype(jnp.float32)
    return to_logits(Transform(), logits, tokens.temperature, columns.valid), columns


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    call: _LogitsCall, logits: jax.Array, tokens: Tokens, where: jax.Array | None
) -> TokenStats:
    return _forward(call, logits, tokens, where)[0]


def _forward(
    call: _LogitsCall, logits: jax.Array, tokens: Tokens, where: jax.Array | None
) -> tuple[TokenStats, Any]:
    z, columns = _own_logits(call, where_counts(where, logits), tokens)
    reduced = statistics.over_devices(
        statistics.reduce_columns(call.asked, z, tokens, columns), call.axes
    )
    stats = statistics.stats_of_numbers(call.asked, reduced, tokens, call.vocab_size)
    return where_counts(where, stats), (
        logits,
        tokens,
        where,
        statistics.left_for_gradients(call.asked, reduced),
    )


def _backward(call: _LogitsCall, saved: Any, dstats: TokenStats) -> tuple[jax.Array, None, None]:
    logits, tokens, where, reduced = saved
    asked, counts, dsums = statistics.cotangents(
        call.asked, reduced, tokens, call.vocab_size, dstats
    )
    # A token whose numbers are finite counts even without a cotangent: its gradient is 0, but may
    # have a derivative. One that has no loss and holds NaN, or excludes all columns, does not: 0 *
    # NaN is NaN.
    finite = [
        jnp.isfinite(numbers).reshape(logits.shape[0], -1).all(1)
        for numbers in reduced.sums.values()
    ]
    counts |= jnp.stack(finite).all(0) & (reduced.sums["s"] > 0)
    if where is not None:
        counts = counts & where
    dsums = where_counts(counts, dsums)
    peaks = where_counts(counts, reduced.peaks, -LOW)

    def sums_of(logits: jax.Array) -> statistics.Numbers:
        z, columns = _own_logits(call, where_counts(counts, logits), tokens)
        return statistics.sums_of(asked, z, peaks, tokens, columns, differentiated=True)

    sums, pull = jax.vjp(sums_of, logits)
    dsums = jax.tree.map(lambda cotangent, like: vary(cotangent, varying(like)), dsums, sums)
    return *pull(dsums), None, None


_statistics.defvjp(_forward, _backward)
