"""Log-probs and entropies from hidden states and a head; the logits never exist as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import check_array
from jaxppo.head.head import Head
from jaxppo.head.prepare import HeadOptions, prepare_head
from jaxppo.head.types import Entropy, HeadCall, Inputs, LogitStat, TokenStats
from jaxppo.head.vjp import stats_of_tokens
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call


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

    The logits are z = softcap(scale * (hidden @ kernel + bias + LoRA)) / temperature. The results are those of
    `log_probs_from_logits`. They are computed one tile of some tokens by some columns at a time, with an online
    softmax, and the backward computes the tiles again.

    Args:
      hidden: `[R, T, H]`, f32 or bf16; sharded by `parallel.hidden_spec`.
      head: a `Head`, or its bare kernel `[H, V]`. Only the gradients that are asked for are computed.
      targets: `i32[R, T]`, the token that each position predicts.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      temperature: divides the logits, as the sampler did; a positive scalar or `[R, T]`. No gradient flows to it.
      entropy: "none", "metric" (no gradient, and no cost in the backward) or "bonus" (differentiable).
      logit_stats: names of further statistics. Differentiable are "log_z", the log-sum-exp of z, and "mean_logit", the
        mean of the finite z (see `SFT`). Without a gradient are "accuracy", whether no token is likelier than the
        target, and "sum_p2", the sum of p^2. They are over the whole vocabulary. What is not named costs nothing.
      top_k: how many of the likeliest ids to find. They are returned as `top_ids`, with their log-probs in the full
        distribution. They have no gradient: for gradients ask for those ids again, as `ids`.
      nucleus_ids: `i32[R, T, K]`, -1 padded, the sampler's top-p/top-k nucleus. Log-probs are renormalised over the
        nucleus and the target; the entropy stays that of the full distribution.
      ids: `i32[R, T, K]`, more ids whose log-probs are computed, such as a teacher's top-k or candidates. The log-probs
        are differentiable and those of the full distribution. The ids may stand in any order; an id that stands twice
        gets both gradients. -1 is an empty slot, with log-prob -inf and probability 0. The logits of ids are gathered
        from each tile, and their gradients are scattered into it.
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
    found: TokenStats = shard_call(
        "log_probs_from_hidden",
        _per_shard,
        parallel,
        {"head": prepared.inputs},
        lambda p: ([prepared.specs], p.tokens_spec),
        prepared.call,
    )
    return dataclasses.replace(found, ids=prepared.inputs.ids)


def _per_shard(axes: ShardAxes, call: HeadCall, inputs: Inputs) -> TokenStats:
    return stats_of_tokens(call, inputs)
