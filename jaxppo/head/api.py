"""Log-probs and entropy from hidden states and a head kernel; the logits never exist."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxppo._arrays import check_array, check_choice, check_flag, check_floating, dtype_name
from jaxppo.head import tiles
from jaxppo.head.columns import LANES
from jaxppo.head.head import Head, as_head
from jaxppo.head.ops.choice import Implementation, choose
from jaxppo.head.ops.tile import Features, Parameters
from jaxppo.head.placement import HeadPlacement, bring_hidden, place_head
from jaxppo.head.schedules import two_pass
from jaxppo.head.schedules.walk import Inputs, Rule
from jaxppo.head.stats import (
    Entropy,
    TokenStats,
    as_temperature,
    as_token_ids,
    check_targets,
    check_where,
    stats_of,
    temperature_spec,
)
from jaxppo.head.tokens import TokenOrder
from jaxppo.head.varying import Summing, low_rank
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary_like

ARRAYS = ("hidden", "kernel", "bias", "lora_a", "lora_b", "targets", "nucleus_ids", "where", "temperature")
Precision = Literal["default", "high", "highest"]
SumDtype = Literal["float32", "parameter"]


class HeadOptions(TypedDict, total=False):
    """How the work of a head is done; what it computes does not depend on it beyond rounding.

    Args:
      hidden_spec: how the hidden states are sharded, where it is not `parallel.hidden_spec`. Their tokens are brought
        to where the batch's lie, which `sharding.audit` notes; inside a `shard_map` another spec is refused.
      memory: bytes that a device may spend beside its results. By default a sixteenth of an accelerator's memory for
        one pass, 0.27 GiB (and dhidden in f32 beyond 8192 tokens) for two; on CPUs 48 MiB and tiles of 8 MiB.
      precision: of products, as `jnp.dot` takes it. bf16 operands multiply in one pass with f32 sums. Of f32 operands
        the default is "highest", since accelerators would round them to bf16 or TF32: the products then take 6.5 times
        the time of bf16 on a TPU v5p, and 4.5 times where hidden states are bf16 and the kernel f32, which counts as
        f32 operands (two passes, estimated).
        `kernel.astype(hidden.dtype)` avoids that. An "f32 head" is a kernel in f32 at that cost; the logits are f32
        always.
      implementation: of a tile's arithmetic, "xla" (the default), "mosaic_tpu" or "reference"; one that does not
        support the call is refused with the reason.
      gradient_sum_dtype: in which gradients of parameters are summed over devices: "float32", or "parameter" for that
        of the parameter. bf16 sums send two thirds of the bytes on TPUs, half elsewhere, and lose 0.3% rms over 4
        devices, 1.4% over 128.
      follow_mask: the work follows the tokens that count, by default. False computes all tokens: where nearly all count
        that is faster, by a sixth on a TPU v6e.
      deterministic: a token's log-prob and entropy have the same bits whatever else is in the batch: for one
        platform, jax version, tensor axis, kernel dtype and `memory`. Then tiles do not depend on the number of tokens,
        which costs time where there are few, and CPUs take two passes. With `logit_stats` the bits may be others than
        without. On TPUs and GPUs the option does the same, but nobody has tested the bits there.
    """

    hidden_spec: P | None
    memory: int | None
    precision: Precision | lax.Precision | None
    implementation: Implementation | None
    gradient_sum_dtype: SumDtype | DTypeLike
    follow_mask: bool
    deterministic: bool


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
    **options: Unpack[HeadOptions],
) -> TokenStats:
    """Log-probs of the targets, and the entropy, of a head's distribution, without its logits ever existing.

    z = softcap(scale * (hidden @ kernel + bias + LoRA)) / temperature, then as `log_probs_from_logits`: tiles of
    tokens by columns, with an online softmax, in the forward and again in the backward.

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
      **options: see `HeadOptions`.

    Returns:
      `TokenStats`, `f32[R, T]` each, None if not asked for; a log-prob is at most 0, and NaN where a counted target is
      not in the vocabulary.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype, rank, shape, sharding or range, named.
      NotImplementedError: an `implementation` that does not support the call, with the reason.

    Example:
      >>> hidden, kernel = jnp.ones((1, 2, 3)), jnp.zeros((3, 4))
      >>> log_probs_from_hidden(hidden, kernel, jnp.array([[0, 3]]), entropy="metric").entropy.round(4)
      Array([[1.3863, 1.3863]], dtype=float32)
    """
    check_array("targets", targets, "integers")  # prepare_head takes None, where nothing asks for log-probs
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
        options=options,
    )
    return token_stats(call, parallel)


def token_stats(call: PreparedHead, parallel: ParallelMesh | ShardAxes | None) -> TokenStats:
    """What `log_probs_from_hidden` returns."""
    specs = lambda p: (call.specs(p), p.tokens_spec)  # noqa: E731
    found: TokenStats = shard_call("log_probs_from_hidden", _per_shard, parallel, call.arrays, specs, call.static)
    return found


def _per_shard(axes: ShardAxes, static: HeadCall, *given: Any) -> TokenStats:
    rule, inputs, order = static.on_device(axes, dict(zip(ARRAYS, given, strict=True)))
    stats = stats_of(two_pass.token_stats(rule, inputs), static.entropy)
    return jax.tree.map(order.back, stats)


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """The static part of a call to a head, checked."""

    placement: HeadPlacement
    head: Head
    """Its static fields; None in place of arrays."""
    entropy: Entropy
    logit_stats: bool
    budget: tiles.Budget
    precision: Precision | None
    implementation: Implementation | None
    gradient_sum_dtype: SumDtype

    def on_device(self, axes: ShardAxes, arrays: dict[str, Any]) -> tuple[Rule, Inputs, TokenOrder]:
        """Per-shard: the rule, its inputs, and the order of their tokens."""
        placement, arrays = self._transposed(arrays)
        parts = axes.size(axes.tensor) if placement.sequence_parallel else 1
        R, T, _ = arrays["hidden"].shape
        order = TokenOrder.of((R, T * parts), parts, self.budget.least_tokens)
        summing = Summing(self.gradient_sum_dtype, self.budget.profile.shared_sums)
        columns, form = placement.columns(axes, self.head, arrays["kernel"], summing, self.precision)
        per_token = {name: order.flat(arrays[name]) for name in ("targets", "nucleus_ids", "where")}
        temperature = arrays["temperature"]
        temperature = order.flat(temperature) if getattr(temperature, "ndim", 0) else temperature
        where = None if per_token["where"] is None else per_token["where"].astype(bool)
        if where is None and self.budget.deterministic:  # the same program with a mask and without
            where = order.flat(jnp.ones((R, T * parts), bool))
        features, parameters = self._features_and_parameters(placement.layout, arrays)
        # where devices share hidden states but not targets, the sum over them is JAX's
        features = jax.tree.map(lambda x: vary_like(order.flat_part(x), (per_token, temperature)), features)
        inputs = Inputs(features, parameters, per_token["targets"], per_token["nucleus_ids"], where, temperature)
        op = choose(self.implementation, self.budget, form, inputs)
        return Rule(form, columns, op, self.entropy, self.logit_stats, parts, self.budget), inputs, order

    def _features_and_parameters(self, layout: str, arrays: dict[str, Any]) -> tuple[Features, Parameters]:
        """Per-shard: what tokens multiply which parameters with."""
        low = lora_b = None
        if self.head.lora is not None:
            tokens = self.budget.profile.deterministic if self.budget.deterministic else None
            low = low_rank(arrays["hidden"], arrays["lora_a"], tokens)
            lora_b = arrays["lora_b"] if layout == "hv" else arrays["lora_b"].T
        return Features(arrays["hidden"], low), Parameters(arrays["kernel"], arrays["bias"], lora_b)

    def _transposed(self, arrays: dict[str, Any]) -> tuple[HeadPlacement, dict[str, Any]]:
        """Where that is how a TPU holds it: a `[H, V]` kernel whose V is no multiple of 128 as its `[V, H]`."""
        placement, kernel = self.placement, arrays["kernel"]
        if placement.layout == "vh" or "TPU" not in self.budget.device or kernel.shape[1] % LANES == 0:
            return placement, arrays
        spec = P(placement.kernel_spec[1], placement.kernel_spec[0])
        return dataclasses.replace(placement, layout="vh", kernel_spec=spec), arrays | {"kernel": kernel.T}

    def whole(self, axes: ShardAxes, arrays: dict[str, Any]) -> tuple[HeadCall, dict[str, Any]]:
        """The call with the hidden states of all positions on each device of the tensor axis."""
        if not self.placement.sequence_parallel:
            return self, arrays
        hidden = lax.all_gather(arrays["hidden"], axes.tensor, axis=1, tiled=True)
        placement = dataclasses.replace(self.placement, sequence_parallel=False)
        return dataclasses.replace(self, placement=placement), arrays | {"hidden": hidden}


@dataclasses.dataclass(frozen=True)
class PreparedHead:
    """A call to a head: what is static, and the arrays by name."""

    static: HeadCall
    arrays: dict[str, Any]

    def specs(self, p: ParallelMesh) -> list[Any]:
        """The PartitionSpecs of the arrays, for `shard_call`."""
        specs = self.static.placement.specs(p) | dict.fromkeys(("targets", "nucleus_ids", "where"), p.tokens_spec)
        specs["temperature"] = temperature_spec(p, self.arrays["temperature"])
        return [specs[name] for name in ARRAYS]


def prepare_head(
    hidden: Any,
    head: Any,
    targets: Any,
    *,
    parallel: ParallelMesh | ShardAxes | None,
    temperature: Any,
    entropy: Entropy,
    options: HeadOptions,
    logit_stats: bool = False,
    nucleus_ids: Any = None,
    where: Any = None,
    keep: bool = True,
    heads: int = 1,
    name: str = "head",
) -> PreparedHead:
    """The arguments of `log_probs_from_hidden`, checked.

    Beside those: `keep`, logits may wait in the memory of a gradient; `heads`, how many are walked together;
    `name`, of this one; targets may be None where nothing asks for their log-probs.
    """
    chosen = check_options(options)
    check_floating(f"{name.removesuffix('head')}hidden", hidden, 3, "[R, T, H]")
    head = as_head(name, head)
    check_choice("entropy", entropy, Entropy)
    what = f"{name.removesuffix('head')}hidden_spec"
    hidden, sequence_parallel = bring_hidden(what, parallel, hidden, chosen.get("hidden_spec"))
    placement = place_head(parallel, name, hidden, head, sequence_parallel)
    tokens = placement.tokens(hidden)
    if targets is not None:
        check_targets(targets, tokens, "hidden")
        targets = as_token_ids(targets)
    check_where(where, tokens)
    if nucleus_ids is not None:
        check_array("nucleus_ids", nucleus_ids, "integers")
        if nucleus_ids.ndim != 3 or nucleus_ids.shape[:2] != tokens:
            raise ValueError(f"nucleus_ids: got shape {nucleus_ids.shape}, expected [R, T, K] with [R, T] = {tokens}")
        nucleus_ids = as_token_ids(nucleus_ids)
    arrays = head_arrays(hidden, head) | {
        "targets": targets,
        "nucleus_ids": nucleus_ids,
        "where": where,
        "temperature": as_temperature(temperature, tokens),
    }
    static = HeadCall(
        placement,
        static_head(head),
        entropy,
        logit_stats,
        tiles.Budget(
            tiles.device_kind(parallel, head.kernel),
            chosen.get("memory"),
            chosen.get("follow_mask", True) or chosen.get("deterministic", False),
            chosen.get("deterministic", False),
            keep,
            heads,
        ),
        chosen.get("precision"),
        chosen.get("implementation"),
        chosen.get("gradient_sum_dtype", "float32"),
    )
    return PreparedHead(static, arrays)


def check_options(options: HeadOptions) -> dict[str, Any]:
    """The options in one form each, a precision and a dtype by name; raises where one is unknown or out of range."""
    unknown = set(options) - set(HeadOptions.__annotations__)
    if unknown:
        raise TypeError(f"options: got {sorted(unknown)}, expected some of {sorted(HeadOptions.__annotations__)}")
    choices = {"precision": Precision, "implementation": Implementation, "gradient_sum_dtype": SumDtype}
    found: dict[str, Any] = dict(options)
    if found.get("precision") is not None:
        found["precision"] = _precision_name(found["precision"])
    if "gradient_sum_dtype" in found:
        found["gradient_sum_dtype"] = dtype_name(found["gradient_sum_dtype"])
    for name, choice in choices.items():
        if found.get(name) is not None:
            check_choice(name, found[name], choice)
    for name in ("follow_mask", "deterministic"):
        check_flag(name, found.get(name, False))
    memory = options.get("memory")
    if memory is not None and (not isinstance(memory, int) or memory <= 0):
        raise ValueError(f"memory: got {memory}, expected a positive number of bytes, or None")
    return found


def _precision_name(precision: Any) -> Any:
    """The name of what jnp takes as a precision; itself where it is none, for `check_choice` to refuse."""
    try:
        return lax.Precision(precision).name.lower()
    except ValueError:
        return precision


def static_head(head: Head) -> Head:
    """The head without its arrays, whose places say which there are."""
    return jax.tree.map(lambda _: None, head)


def head_arrays(hidden: Any, head: Head) -> dict[str, Any]:
    """The arrays of a head and its hidden states by name, None where there is none."""
    lora = head.lora
    adapters = {"lora_a": lora and lora.a, "lora_b": lora and lora.b}
    return {"hidden": hidden, "kernel": head.kernel, "bias": head.bias, **adapters}
