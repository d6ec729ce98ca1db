"""Log-probs and entropy from hidden states and a head kernel; the logits never exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from jaxtyping import Array, Bool, Float, Int

from jaxppo._arrays import check_array
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
    adapter_ids: Int[Array, "R"] | None = None,
    **options: Unpack[HeadOptions],
) -> TokenStats:
    """Log-probs of the targets, and the entropy, of a head's distribution, without its logits ever existing.

    z = softcap(scale * (hidden @ kernel + bias + LoRA)) / temperature, then as `log_probs_from_logits`: tiles of
    tokens by columns, with an online softmax, in the forward and again in the backward.

    Args:
      hidden: `[R, T, H]`, f32 or bf16; sharded by `parallel.hidden_spec`.
      head: a `Head`, or its bare kernel `[H, V]`. Only the gradients that are asked for are computed.
      targets: `i32[R, T]`, the token that each position predicts.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      temperature: divides the logits, as the sampler did; a positive scalar or `[R, T]`, a constant of differentiation.
      entropy: "none", "metric" (no gradient: nothing of its backward exists) or "bonus" (differentiable).
      logit_stats: names of what else to compute: "log_z", the log-sum-exp of z, "mean_logit", the mean of the finite z
        (see `sft_loss`), both differentiable, and the constants "accuracy", whether no token is likelier than the
        target, and "sum_p2", the sum of p^2. They are over the whole vocabulary. What is not named costs nothing.
      top_k: how many of the likeliest ids to find, as `top_ids`, with their log-probs in the full distribution. They
        are constants: for gradients ask for those ids again, as `ids`.
      nucleus_ids: `i32[R, T, K]`, -1 padded, the sampler's top-p/top-k nucleus: log-probs are renormalised over it and
        the target; the entropy stays that of the full distribution.
      ids: `i32[R, T, K]`, ids whose log-probs are asked for too, of the full distribution and differentiable: a
        teacher's top-k, candidates. In any order; one that stands twice gets both gradients. -1 is an empty slot: its
        log-prob is -inf, its probability 0. They are gathered from each tile, their gradients scattered into it.
      adapter_ids: `i32[R]`, which of several adapters of the head each row has, -1 for none; see `LoRA`. A row of an id
        that is of no adapter has NaN.
      where: `bool[R, T]`, the positions that count: only they meet the kernel. The others read 0 and may hold anything.
      **options: see `HeadOptions`.

    Returns:
      `TokenStats`, `f32[R, T]` each, `[R, T, K]` of ids and of the likeliest, None if not asked for; a log-prob is at
      most 0, and NaN where a counted target, or the id, is not in the vocabulary.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype, rank, shape, sharding or range, named.
      NotImplementedError: an `implementation` that does not support the call, with the reason.

    Example:
      >>> hidden, kernel = jnp.ones((1, 2, 3)), jnp.zeros((3, 4))
      >>> log_probs_from_hidden(hidden, kernel, jnp.array([[0, 3]]), entropy="metric").entropy.round(4)
      Array([[1.3863, 1.3863]], dtype=float32)
    """
    check_array("targets", targets, "integers")  # prepare_head takes None, where nothing asks for log-probs
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
    return found


def _per_shard(axes: ShardAxes, call: HeadCall, inputs: Inputs) -> TokenStats:
    return stats_of_tokens(call, inputs)
