"""Checks the arguments of a call to a head, and makes one static object and one tuple of arrays of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxppo.base.arrays import as_token_ids, check_choice, check_flag, check_floating, dtype_name
from jaxppo.base.stacked import part_of_a_step
from jaxppo.head import plan
from jaxppo.head.checks import (
    as_adapter_ids,
    as_asked,
    as_id_sets,
    as_temperature,
    check_targets,
    check_vocab_size,
    check_where,
    temperature_spec,
    with_nuclei,
)
from jaxppo.head.head import Head, as_head
from jaxppo.head.low_rank import low_rank, low_rank_by_row
from jaxppo.head.placement import bring_hidden, entry_names, place_head
from jaxppo.head.ring import LANES
from jaxppo.head.types import (
    Asked,
    Entropy,
    Features,
    HeadCall,
    Inputs,
    LogitStat,
    Parameters,
    Precision,
    Prepared,
    SumDtype,
)
from jaxppo.sharding import ParallelMesh, ShardAxes, one_a_device, vary_like, varying


class HeadOptions(TypedDict, total=False):
    """Options of how a head computes; they change its results by rounding only.

    Args:
      hidden_spec: the PartitionSpec of hidden states, if they are not sharded as `parallel.hidden_spec`. They are
        resharded like the batch's tokens, which `sharding.audit` notes. Inside a `shard_map` another spec is refused.
      memory: bytes that a device may spend beside its results. By default an eighth of an accelerator's memory for
        one pass, 0.27 GiB (and dhidden in f32 beyond 8192 tokens) for two; on CPUs 48 MiB and tiles of 8 MiB.
      precision: the precision of products, as in `jnp.dot`. bf16 operands multiply in one pass with f32 sums. For f32
        operands the default is "highest", since accelerators would round them to bf16 or TF32. On a TPU v5p the
        products then take 6.5 times the time of bf16. If hidden states are bf16 and the kernel is f32, both count as
        f32, and the products take 4.5 times the time (two passes, estimated). `kernel.astype(hidden.dtype)` avoids
        that. An "f32 head" is a kernel in f32 at that cost; the logits are always f32.
      gradient_sum_dtype: the dtype in which gradients of parameters are summed over devices: "float32", or "parameter"
        for the parameter's own dtype. bf16 sums send two thirds of the bytes on TPUs and half elsewhere. They lose 0.3%
        rms over 4 devices and 1.4% over 128.
      follow_mask: compute only the tokens that count; True by default. False computes all tokens, which takes less
        memory on accelerators if nearly all tokens count.
      deterministic: a token's log-prob and entropy have the same bits whatever else is in the batch, and on tp = 1, 2,
        4 and 8, for one platform, jax version, kernel dtype and `memory`. Tiles then do not depend on the number of
        tokens, which costs time if there are few, and CPUs take two passes. Each eighth of the vocabulary is summed
        apart. The bits agree for these tp only if 8 divides the number of columns and FSDP does not shard them. With
        `logit_stats` or `top_k` the bits may differ from those without. On TPUs and GPUs the code is the same, but
        nobody has tested the bits there.
    """

    hidden_spec: P | None
    memory: int | None
    precision: Precision | lax.Precision | None
    gradient_sum_dtype: SumDtype | DTypeLike
    follow_mask: bool
    deterministic: bool


def prepare_head(
    hidden: Any,
    head: Any,
    targets: Any,
    *,
    parallel: ParallelMesh | ShardAxes | None,
    temperature: Any,
    entropy: Entropy,
    options: HeadOptions,
    logit_stats: Sequence[LogitStat] = (),
    top_k: int = 0,
    nucleus_ids: Any = None,
    ids: Any = None,
    where: Any = None,
    adapter_ids: Any = None,
    heads: int = 1,
    name: str = "head",
) -> Prepared:
    """Checks the arguments of `log_probs_from_hidden` and prepares the call.

    There are two more arguments. `heads` is the number of heads that share the memory, and `name` is the name of this
    head in errors. `targets` may be None if no log-probs are asked for.
    """
    chosen = check_options(options)
    check_floating(f"{name.removesuffix('head')}hidden", hidden, 3, "[R, T, H]")
    head = as_head(name, head)
    asked = as_asked(entropy, logit_stats, top_k)
    what = f"{name.removesuffix('head')}hidden_spec"
    hidden, sequence_parallel = bring_hidden(what, parallel, hidden, chosen.get("hidden_spec"))
    kernel_spec, hidden_spec, tokens = place_head(parallel, name, hidden, head, sequence_parallel)
    inputs = _inputs(hidden, head, targets, nucleus_ids, ids, where, temperature, tokens)
    inputs = inputs._replace(adapter_ids=as_adapter_ids(f"{name}.lora", head.lora, adapter_ids, tokens[0]))
    call = _call(parallel, head, kernel_spec, sequence_parallel, chosen, asked, heads)
    if not isinstance(parallel, ParallelMesh):
        return Prepared(call, inputs, None, tokens)
    specs = _specs(parallel, head, kernel_spec, hidden_spec, inputs)
    if call.copied:
        inputs, specs = _copied(parallel, inputs, specs)
    return Prepared(call, inputs, specs, tokens)


def _inputs(
    hidden: Any,
    head: Head,
    targets: Any,
    nucleus_ids: Any,
    ids: Any,
    where: Any,
    temperature: Any,
    tokens: tuple[int, int],
) -> Inputs:
    if targets is not None:
        check_targets(targets, tokens, "hidden")
        targets = as_token_ids(targets)
    check_where(where, tokens)
    nucleus_ids = None if nucleus_ids is None else as_id_sets("nucleus_ids", nucleus_ids, tokens)
    ids = None if ids is None else as_id_sets("ids", ids, tokens)
    lora_a, lora_b = (None, None) if head.lora is None else (head.lora.a, head.lora.b)
    parameters = Parameters(head.kernel, head.bias, lora_b)
    temperature = as_temperature(temperature, tokens)
    return Inputs(Features(hidden), parameters, lora_a, targets, nucleus_ids, ids, where, temperature)


def _call(
    parallel: ParallelMesh | ShardAxes | None,
    head: Head,
    kernel_spec: P,
    sequence_parallel: bool,
    options: dict[str, Any],
    asked: Asked,
    heads: int,
) -> HeadCall:
    axes = parallel.axes if isinstance(parallel, ParallelMesh) else parallel or ShardAxes()
    h_names, v_names = (entry_names(kernel_spec[dim]) for dim in (1 - head.v_dim, head.v_dim))
    columns = head.kernel.shape[head.v_dim]
    if isinstance(parallel, ParallelMesh):
        own = columns // math.prod(parallel.mesh.shape.get(n, 1) for n in v_names)  # `shard_call` refuses a remainder
    else:
        v_names = tuple(n for n in v_names if n in varying(head.kernel))
        own, columns = columns, columns * axes.size(v_names)
    device = plan.device_kind(parallel, head.kernel)
    # a TPU stores a `[H, V]` kernel transposed if V is not a multiple of 128
    transposed = head.layout == "hv" and "TPU" in device and own % LANES != 0
    deterministic = options.get("deterministic", False)
    return HeadCall(
        axes=axes,
        layout="vh" if transposed or head.v_dim == 0 else "hv",
        transposed=transposed,
        h_names=h_names,
        v_names=v_names,
        sequence_parallel=sequence_parallel,
        transform=head.transform,
        lora_scale=1.0 if head.lora is None else head.lora.scale,
        vocab_size=check_vocab_size(head.vocab_size, columns),
        asked=asked,
        profile=next(profile for kind, profile in plan.PROFILES.items() if kind in device),
        precision=options.get("precision"),
        sum_dtype=options.get("gradient_sum_dtype", "float32"),
        memory=options.get("memory"),
        follow_mask=options.get("follow_mask", True) or deterministic,
        deterministic=deterministic,
        heads=heads,
        copied=bool(part_of_a_step.value and isinstance(parallel, ParallelMesh) and axes.tokens),
    )


def _specs(p: ParallelMesh, head: Head, kernel_spec: P, hidden_spec: P | None, inputs: Inputs) -> Inputs:
    v_entry, tokens = kernel_spec[head.v_dim], p.tokens_spec
    of_b = P(None, v_entry) if inputs.adapter_ids is None else P(None, None, v_entry)
    parameters = Parameters(kernel_spec, P(v_entry), of_b)
    of_tokens = (tokens, tokens, tokens, tokens, temperature_spec(p, inputs.temperature))
    return Inputs(Features(hidden_spec), parameters, P(), *of_tokens, P(p.rows_spec[0]))


def _copied(p: ParallelMesh, inputs: Inputs, specs: Inputs) -> tuple[Inputs, Inputs]:
    """Gives each device its own copy of the parameters, so that a step of many micro-batches sums gradients once."""
    of_given = (*specs.parameters, specs.lora_a)
    given = zip((*inputs.parameters, inputs.lora_a), of_given, strict=True)
    *parameters, lora_a = (None if x is None else one_a_device(x, p, spec) for x, spec in given)
    *of_parameters, of_lora_a = (p.copies_spec(spec) for spec in of_given)
    inputs = inputs._replace(parameters=Parameters(*parameters), lora_a=lora_a)
    return inputs, specs._replace(parameters=Parameters(*of_parameters), lora_a=of_lora_a)


def on_device(call: HeadCall, inputs: Inputs) -> Inputs:
    """Per-shard: flattens tokens to N = R * T, and adds the low-rank features hidden @ lora.a."""
    if call.copied:
        parameters, lora_a = jax.tree.map(lambda x: x[0], (inputs.parameters, inputs.lora_a))
        inputs = inputs._replace(parameters=parameters, lora_a=lora_a)
    hidden, (kernel, bias, lora_b) = inputs.features.hidden, inputs.parameters
    low = None
    if inputs.adapter_ids is not None:
        low, lora_b = low_rank_by_row(call, hidden, inputs.lora_a, lora_b, inputs.adapter_ids)
    elif inputs.lora_a is not None:
        low = low_rank(call, hidden, inputs.lora_a)
    kernel = kernel.T if call.transposed else kernel
    lora_b = None if lora_b is None else lora_b.T if call.layout == "vh" else lora_b
    targets = with_nuclei(inputs.targets, inputs.nucleus_ids, call.vocab_size)
    per_token = targets, inputs.nucleus_ids, inputs.ids, inputs.counts, inputs.temperature
    shards = call.axes.size(call.axes.tensor) if call.sequence_parallel else 1
    R, T = hidden.shape[0], hidden.shape[1] * shards
    targets, nucleus_ids, ids, counts, temperature = jax.tree.map(
        lambda x: x.reshape(R * T, *x.shape[2:]) if x.ndim else jnp.broadcast_to(x, R * T), per_token
    )
    if counts is None and call.deterministic:  # the same program with a mask and without
        counts = jnp.ones(R * T, bool)
    counts = None if counts is None else counts.astype(bool)
    # if devices share hidden states but not targets, JAX sums the gradients of hidden states over these devices
    features = jax.tree.map(lambda x: vary_like(x, per_token), Features(hidden, low))
    return Inputs(features, Parameters(kernel, bias, lora_b), None, targets, nucleus_ids, ids, counts, temperature)


def whole(call: HeadCall, inputs: Inputs) -> tuple[HeadCall, Inputs]:
    """Per-shard: gathers hidden states over the tensor axis and turns sequence parallelism off in the call."""
    if not call.sequence_parallel:
        return call, inputs
    hidden = lax.all_gather(inputs.features.hidden, call.axes.tensor, axis=1, tiled=True)
    return dataclasses.replace(call, sequence_parallel=False), inputs._replace(features=Features(hidden))


def check_options(options: HeadOptions) -> dict[str, Any]:
    """The options, with a precision and a dtype as names; raises if an option is unknown or out of range."""
    unknown = set(options) - set(HeadOptions.__annotations__)
    if unknown:
        raise TypeError(f"options: got {sorted(unknown)}, expected some of {sorted(HeadOptions.__annotations__)}")
    choices = {"precision": Precision, "gradient_sum_dtype": SumDtype}
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
    """The name of a precision in any form that jnp takes. Anything else is returned, and `check_choice` refuses it."""
    try:
        return lax.Precision(precision).name.lower()
    except (ValueError, TypeError):
        return precision
