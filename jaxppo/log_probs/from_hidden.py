"""Log-probs and entropy from hidden states and a head kernel; the logits never exist."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxppo._sharding import ParallelMesh, ShardAxes, shard_call
from jaxppo.log_probs.head import LANES
from jaxppo.log_probs.head_placement import HeadPlacement, place_head
from jaxppo.log_probs.hidden_rule import Inputs, Rule, token_stats
from jaxppo.log_probs.stats import (
    Entropy,
    TokenStats,
    as_temperature,
    check_entropy,
    check_floating,
    check_targets,
    check_where,
)
from jaxppo.log_probs.tokens import even_block

BLOCK_BYTES = 8 * 2**20
ONE_BLOCK, MAX_TOKENS, MIN_COLUMNS, MAX_COLUMNS = 2048, 1024, 512, 2048


def log_probs_from_hidden(
    hidden: Float[Array, "R T H"],
    kernel: Float[Array, "H V"],
    targets: Int[Array, "R T"],
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    kernel_layout: str = "hv",
    bias: Float[Array, " V"] | None = None,
    logit_softcap: float | None = None,
    temperature: float | Array = 1.0,
    entropy: Entropy = "none",
    moments: bool = False,
    keep_ids: Int[Array, "R T K"] | None = None,
    where: Bool[Array, "R T"] | None = None,
    vocab_size: int | None = None,
    kernel_spec: jax.sharding.PartitionSpec | None = None,
    hidden_spec: jax.sharding.PartitionSpec | None = None,
    block_bytes: int | None = None,
    keep_logits: bool = True,
) -> TokenStats:
    """Log-probs of the targets, and the entropy, of a head's distribution, without its logits ever existing.

    z = softcap(hidden @ kernel + bias) / temperature, then as `log_probs_from_logits`: the vocabulary is walked in
    blocks with an online softmax, in the forward and again in the backward, so that temporaries are a block of logits
    and one f32 accumulator.

    Args:
      hidden: `[R, T, H]`, f32 or bf16; sharded by `parallel.hidden_spec`.
      kernel: `[H, V]`, or `[V, H]` with `kernel_layout="vh"` (tied embeddings); sharded by `parallel.kernel_spec`, or
        replicated over a tensor axis that does not divide V. Its gradient has its dtype and sharding; where none is
        asked for, nothing of it is computed.
      targets: `i32[R, T]`, the token that each position predicts.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      kernel_layout: "hv" or "vh".
      bias: `[V]`, sharded like the kernel's V.
      logit_softcap: logits become cap * tanh(logits / cap), before temperature.
      temperature: positive scalar that divides the logits, as the sampler did; a constant of differentiation.
      entropy: "none", "metric" (no gradient: nothing of its backward exists) or "bonus" (differentiable).
      moments: also compute log_z, the log-sum-exp of z, and the mean of z (see `sft_loss`), both differentiable and
        over all of `vocab_size`, and the likeliest token's log-prob, a constant.
      keep_ids: `i32[R, T, K]`, -1 padded, the sampler's top-p/top-k nucleus: log-probs are renormalised over it and
        the target; the entropy stays that of the full distribution.
      where: `bool[R, T]`, the positions that count: only they meet the kernel. The others read 0 and may hold anything.
      vocab_size: columns from here on are padding, with probability 0 and gradient 0.
      kernel_spec: how the kernel is sharded, where it is not `parallel.kernel_spec(kernel_layout)`.
      hidden_spec: how the hidden states are sharded, where it is not `parallel.hidden_spec`.
      block_bytes: bytes of a block of f32 logits and their gradient, 8 MiB by default.
      keep_logits: keep the logits of the first H tokens for the backward in the memory that the kernel's gradient will
        take, where that is f32 and no sum over devices; elsewhere all are computed again. At T = 2 * H an eighth of the
        work is saved, for no memory where the backward follows at once. False where it does not, or where a step has
        several heads, each of which would hold its own until then.

    Returns:
      `TokenStats(log_probs, entropy, log_z, mean_logit, max_log_prob)`, `f32[R, T]` each, None if not asked for; the
      log-prob is NaN where a counted target is not in `[0, vocab_size)`.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype, rank, shape, sharding or range, named.

    Example:
      >>> hidden, kernel = jnp.ones((1, 2, 3)), jnp.zeros((3, 4))
      >>> log_probs_from_hidden(hidden, kernel, jnp.array([[0, 3]]), entropy="metric").entropy.round(4)
      Array([[1.3863, 1.3863]], dtype=float32)
    """
    call, args = prepare_head(
        hidden,
        kernel,
        targets,
        parallel=parallel,
        kernel_layout=kernel_layout,
        bias=bias,
        logit_softcap=logit_softcap,
        temperature=temperature,
        entropy=entropy,
        moments=moments,
        keep_ids=keep_ids,
        where=where,
        vocab_size=vocab_size,
        kernel_spec=kernel_spec,
        hidden_spec=hidden_spec,
        block_bytes=block_bytes,
        keep_logits=keep_logits,
    )

    def per_shard(axes: ShardAxes, *arrays: Any) -> TokenStats:
        log_probs, h, found = token_stats(*call.on_device(axes, *arrays))
        return jax.tree.map(lambda x: x.reshape(arrays[3].shape), TokenStats(log_probs, h, *(found or ())))

    return shard_call("log_probs_from_hidden", per_shard, parallel, args, lambda p: (call.specs(p), p.tokens_spec))


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """What is static about a call to a head, checked."""

    placement: HeadPlacement
    entropy: Entropy
    moments: bool
    softcap: float | None
    vocab_size: int | None
    block_bytes: int
    keep_logits: bool

    def specs(self, parallel: ParallelMesh) -> list[Any]:
        """For `shard_call`, of the arguments that `prepare_head` returns."""
        return self.placement.specs(parallel)

    def on_device(self, axes: ShardAxes, *arrays: Any) -> tuple[Rule, Inputs]:
        """Per-shard: the rule and its inputs, tokens flattened."""
        hidden, kernel, bias, targets, keep_ids, where, temperature = arrays
        N = targets.size
        block_tokens, block_columns = block_sizes(N, self.block_bytes, masked=where is not None)
        head = self.placement.head(axes, hidden, kernel, self.softcap, self.vocab_size, block_columns)
        rule = Rule(head, self.entropy, block_tokens, self.placement.sequence_parallel, self.moments, self.keep_logits)
        flat: Any = lambda x: None if x is None else x.reshape(N, *x.shape[2:])  # noqa: E731
        where = None if where is None else flat(where).astype(bool)
        return rule, Inputs(hidden, kernel, bias, flat(targets), flat(keep_ids), where, temperature)


def block_sizes(tokens: int, block_bytes: int, *, masked: bool) -> tuple[int, int]:
    """Tokens and columns of a block, whose f32 logits and their gradient fit block_bytes.

    Few columns cost reads of the accumulated dhidden, few tokens those of an accumulated block of dkernel: 1024 of each
    cost little, and one block of all tokens has no such accumulation. With a mask, blocks of tokens are what the work
    can stop after, so there are at least four.

    Example:
      >>> [block_sizes(tokens, 8 * 2**20, masked=False) for tokens in (2048, 8192)]
      [(2048, 512), (1024, 1024)]
      >>> block_sizes(2048, 8 * 2**20, masked=True)
      (512, 2048)
    """
    most = MAX_TOKENS if masked or tokens > ONE_BLOCK else tokens
    if masked:
        most = min(most, max(LANES, -(-tokens // 4)))
    block_tokens = even_block(tokens, max(1, min(most, block_bytes // (8 * MIN_COLUMNS))))
    columns = block_bytes // (8 * block_tokens) // LANES * LANES
    return block_tokens, min(MAX_COLUMNS, max(MIN_COLUMNS, columns))


def prepare_head(
    hidden: Any,
    kernel: Any,
    targets: Any,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    kernel_layout: str = "hv",
    bias: Any = None,
    logit_softcap: float | None = None,
    temperature: Any = 1.0,
    entropy: Entropy = "none",
    moments: bool = False,
    keep_ids: Any = None,
    where: Any = None,
    vocab_size: int | None = None,
    kernel_spec: jax.sharding.PartitionSpec | None = None,
    hidden_spec: jax.sharding.PartitionSpec | None = None,
    block_bytes: int | None = None,
    keep_logits: bool = True,
) -> tuple[HeadCall, dict[str, Any]]:
    """The arguments of `log_probs_from_hidden`, checked: what is static, and the arrays by name for `shard_call`."""
    check_floating("hidden", hidden, 3, "[R, T, H]")
    check_floating("kernel", kernel, 2, "[H, V] or [V, H]")
    check_entropy(entropy)
    placement = place_head(parallel, hidden, kernel, kernel_layout, bias, kernel_spec, hidden_spec)
    tokens = placement.check_hidden(hidden)
    check_targets(targets, tokens, "hidden")
    check_where(where, tokens)
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap: got {logit_softcap}, expected a positive number or None")
    if block_bytes is not None and block_bytes <= 0:
        raise ValueError(f"block_bytes: got {block_bytes}, expected a positive number of bytes")
    if keep_ids is not None and (keep_ids.ndim != 3 or keep_ids.shape[:2] != tokens):
        raise ValueError(f"keep_ids: got shape {keep_ids.shape}, expected [R, T, K] with [R, T] = {tokens}")
    if keep_ids is not None and not jnp.issubdtype(keep_ids.dtype, jnp.integer):
        raise TypeError(f"keep_ids: got dtype {keep_ids.dtype}, expected an integer dtype")
    args = {
        "hidden": hidden,
        "kernel": kernel,
        "bias": bias,
        "targets": targets,
        "keep_ids": keep_ids,
        "where": where,
        "temperature": as_temperature(temperature),
    }
    call = HeadCall(placement, entropy, moments, logit_softcap, vocab_size, block_bytes or BLOCK_BYTES, keep_logits)
    return call, args
