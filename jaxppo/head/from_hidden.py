"""Log-probs and entropy from hidden states and a head kernel; the logits never exist."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxppo._arrays import check_choice, check_floating, check_integers
from jaxppo._sharding import ParallelMesh, ShardAxes, shard_call
from jaxppo.head.columns import LANES, Features, Parameters
from jaxppo.head.head import Head, as_head
from jaxppo.head.hidden_rule import Inputs, Rule, token_stats
from jaxppo.head.placement import HeadPlacement, place_head
from jaxppo.head.stats import Entropy, TokenStats, as_temperature, as_token_ids, check_targets, check_where, stats_of
from jaxppo.head.tokens import even_block
from jaxppo.head.varying import low_rank

ARRAYS = ("hidden", "kernel", "bias", "lora_a", "lora_b", "targets", "nucleus_ids", "where", "temperature")
BLOCK_BYTES = 8 * 2**20
ONE_BLOCK, MAX_TOKENS, MIN_COLUMNS, MAX_COLUMNS = 2048, 1024, 512, 2048


def log_probs_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    targets: Int[Array, "R T"],
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    temperature: float | Array = 1.0,
    entropy: Entropy = "none",
    logit_stats: bool = False,
    nucleus_ids: Int[Array, "R T K"] | None = None,
    where: Bool[Array, "R T"] | None = None,
    hidden_spec: jax.sharding.PartitionSpec | None = None,
    block_bytes: int | None = None,
    keep_logits: bool = True,
) -> TokenStats:
    """Log-probs of the targets, and the entropy, of a head's distribution, without its logits ever existing.

    z = softcap(scale * (hidden @ kernel + bias + LoRA)) / temperature, then as `log_probs_from_logits`: blocks of
    the vocabulary, with an online softmax, in the forward and again in the backward, so that temporaries are a block of
    logits and one f32 accumulator.

    Args:
      hidden: `[R, T, H]`, f32 or bf16; sharded by `parallel.hidden_spec`.
      head: a `Head`, or its bare kernel `[H, V]`. Where no gradient of a parameter is asked for, nothing of it is
        computed.
      targets: `i32[R, T]`, the token that each position predicts.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      temperature: divides the logits, as the sampler did; a positive scalar or `[R, T]`, a constant of differentiation.
      entropy: "none", "metric" (no gradient: nothing of its backward exists) or "bonus" (differentiable).
      logit_stats: also compute log_z, the log-sum-exp of z, and the mean of z (see `sft_loss`), both differentiable and
        over the whole vocabulary, and the accuracy, whether no token is likelier than the target, a constant.
      nucleus_ids: `i32[R, T, K]`, -1 padded, the sampler's top-p/top-k nucleus: log-probs are renormalised over it and
        the target; the entropy stays that of the full distribution.
      where: `bool[R, T]`, the positions that count: only they meet the kernel. The others read 0 and may hold anything.
      hidden_spec: how the hidden states are sharded, where it is not `parallel.hidden_spec`.
      block_bytes: bytes of a block of f32 logits and their gradient, 8 MiB by default.
      keep_logits: keep the logits of the first H tokens for the backward in the memory that the kernel's gradient will
        take, where that is f32 and no sum over devices; elsewhere all are computed again. At T = 2 * H an eighth of the
        work is saved, for no memory where the backward follows at once. False where it does not, or where a step has
        several heads, each of which would hold its own until then.

    Returns:
      `TokenStats`, `f32[R, T]` each, None if not asked for; a log-prob is at most 0, and NaN where a counted target is
      not in the vocabulary.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype, rank, shape, sharding or range, named.

    Example:
      >>> hidden, kernel = jnp.ones((1, 2, 3)), jnp.zeros((3, 4))
      >>> log_probs_from_hidden(hidden, kernel, jnp.array([[0, 3]]), entropy="metric").entropy.round(4)
      Array([[1.3863, 1.3863]], dtype=float32)
    """
    call = prepare_head(
        hidden,
        head,
        targets,
        parallel=parallel,
        temperature=temperature,
        entropy=entropy,
        logit_stats=logit_stats,
        nucleus_ids=nucleus_ids,
        where=where,
        hidden_spec=hidden_spec,
        block_bytes=block_bytes,
        keep_logits=keep_logits,
    )
    specs = lambda p: (call.specs(p), p.tokens_spec)  # noqa: E731
    found: TokenStats = shard_call("log_probs_from_hidden", _per_shard, parallel, call.arrays, specs, call.static)
    return found


def _per_shard(axes: ShardAxes, static: HeadCall, *given: Any) -> TokenStats:
    arrays = dict(zip(ARRAYS, given, strict=True))
    log_probs, h, found = token_stats(*static.on_device(axes, arrays))
    stats = stats_of(log_probs, h, found, static.entropy)
    return jax.tree.map(lambda x: x.reshape(arrays["targets"].shape), stats)


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """What is static about a call to a head, checked."""

    placement: HeadPlacement
    head: Head
    """Its static fields; None in place of arrays."""
    entropy: Entropy
    logit_stats: bool
    block_bytes: int
    keep_logits: bool

    def on_device(self, axes: ShardAxes, arrays: dict[str, Any]) -> tuple[Rule, Inputs]:
        """Per-shard: the rule and its inputs, tokens flattened."""
        targets, where = arrays["targets"], arrays["where"]
        N = targets.size
        block_tokens, block_columns = block_sizes(N, self.block_bytes, masked=where is not None)
        columns = self.placement.columns(axes, self.head, arrays["kernel"], block_columns)
        sequence_parallel = self.placement.sequence_parallel
        rule = Rule(columns, self.entropy, block_tokens, sequence_parallel, self.logit_stats, self.keep_logits)
        flat: Any = lambda x: None if x is None else x.reshape(N, *x.shape[2:])  # noqa: E731
        where = None if where is None else flat(where).astype(bool)
        temperature = flat(arrays["temperature"]) if arrays["temperature"].ndim else arrays["temperature"]
        features, parameters = features_and_parameters(self.head, arrays)
        return rule, Inputs(features, parameters, flat(targets), flat(arrays["nucleus_ids"]), where, temperature)


def features_and_parameters(head: Head, arrays: dict[str, Any]) -> tuple[Features, Parameters]:
    """Per-shard: what tokens multiply which parameters with."""
    low = lora_b = None
    if head.lora is not None:
        low = low_rank(arrays["hidden"], arrays["lora_a"])
        lora_b = arrays["lora_b"] if head.layout == "hv" else arrays["lora_b"].T
    return Features(arrays["hidden"], low), Parameters(arrays["kernel"], arrays["bias"], lora_b)


@dataclasses.dataclass(frozen=True)
class PreparedHead:
    """A call to a head: what is static, and the arrays by name."""

    static: HeadCall
    arrays: dict[str, Any]

    def specs(self, p: ParallelMesh) -> list[Any]:
        """The PartitionSpecs of the arrays, for `shard_call`."""
        specs = self.static.placement.specs(p) | dict.fromkeys(("targets", "nucleus_ids", "where"), p.tokens_spec)
        specs["temperature"] = p.tokens_spec if self.arrays["temperature"].ndim else jax.sharding.PartitionSpec()
        return [specs[name] for name in ARRAYS]


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
    head: Any,
    targets: Any,
    *,
    parallel: ParallelMesh | ShardAxes | None,
    temperature: Any,
    entropy: Entropy,
    logit_stats: bool = False,
    nucleus_ids: Any = None,
    where: Any = None,
    hidden_spec: jax.sharding.PartitionSpec | None = None,
    block_bytes: int | None = None,
    keep_logits: bool = True,
) -> PreparedHead:
    """The arguments of `log_probs_from_hidden`, checked."""
    check_floating("hidden", hidden, 3, "[R, T, H]")
    head = as_head("head", head)
    check_choice("entropy", entropy, Entropy)
    placement = place_head(parallel, "head", hidden, head, hidden_spec)
    tokens = placement.check_hidden(hidden)
    check_targets(targets, tokens, "hidden")
    check_where(where, tokens)
    if block_bytes is not None and block_bytes <= 0:
        raise ValueError(f"block_bytes: got {block_bytes}, expected a positive number of bytes")
    if nucleus_ids is not None:
        check_integers("nucleus_ids", nucleus_ids)
        if nucleus_ids.ndim != 3 or nucleus_ids.shape[:2] != tokens:
            raise ValueError(f"nucleus_ids: got shape {nucleus_ids.shape}, expected [R, T, K] with [R, T] = {tokens}")
        nucleus_ids = as_token_ids(nucleus_ids)
    arrays = head_arrays(hidden, head) | {
        "targets": as_token_ids(targets),
        "nucleus_ids": nucleus_ids,
        "where": where,
        "temperature": as_temperature(temperature, tokens),
    }
    return PreparedHead(
        HeadCall(placement, static_head(head), entropy, logit_stats, block_bytes or BLOCK_BYTES, keep_logits), arrays
    )


def static_head(head: Head) -> Head:
    """The head without its arrays, whose places say which there are."""
    return jax.tree.map(lambda _: None, head)


def head_arrays(hidden: Any, head: Head) -> dict[str, Any]:
    """The arrays of a head and its hidden states by name, None where there is none."""
    lora = head.lora
    adapters = {"lora_a": lora and lora.a, "lora_b": lora and lora.b}
    return {"hidden": hidden, "kernel": head.kernel, "bias": head.bias, **adapters}
