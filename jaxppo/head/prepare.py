"""Checks the arguments of a call to a head, and makes one static object and one tuple of arrays of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec as P

from jaxppo.base.arrays import as_token_ids, check_choice, check_flag, check_floating, dtype_name
from jaxppo.base.stacked import part_of_a_step
from jaxppo.head import call as calls
from jaxppo.head.call import (
    Asked,
    HeadCall,
    HeadOptions,
    Inputs,
    Precision,
    Prepared,
    SumDtype,
    as_adapter_ids,
    as_asked,
    as_id_sets,
    as_temperature,
    check_targets,
    check_vocab_size,
    check_where,
    temperature_spec,
)
from jaxppo.head.head import Entropy, Head, LogitStat, as_head
from jaxppo.head.placement import bring_hidden, entry_names, place_head
from jaxppo.sharding import ParallelMesh, ShardAxes, one_a_device, varying

LANES = 128  # lanes of a register


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
    a, b = (None, None) if head.lora is None else (head.lora.a, head.lora.b)
    temperature = as_temperature(temperature, tokens)
    return Inputs(hidden, head.kernel, head.bias, a, b, targets, nucleus_ids, ids, where, temperature)


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
    device = calls.device_kind(parallel, head.kernel)
    # a TPU stores a `[H, V]` kernel transposed if V is not a multiple of 128
    transposed = head.layout == "hv" and "TPU" in device and own % LANES != 0
    deterministic = options.get("deterministic", False)
    return HeadCall(
        axes=axes,
        v_dim=0 if transposed else head.v_dim,
        transposed=transposed,
        h_names=h_names,
        v_names=v_names,
        sequence_parallel=sequence_parallel,
        transform=head.transform,
        scales=(1.0, *([] if head.lora is None else [head.lora.scale]), *([] if head.bias is None else [1.0])),
        vocab_size=check_vocab_size(head.vocab_size, columns),
        asked=asked,
        profile=next(profile for kind, profile in calls.PROFILES.items() if kind in device),
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
    of_tokens = (tokens, tokens, tokens, tokens, temperature_spec(p, inputs.temperature))
    return Inputs(hidden_spec, kernel_spec, P(v_entry), P(), of_b, *of_tokens, P(p.rows_spec[0]))


def _copied(p: ParallelMesh, inputs: Inputs, specs: Inputs) -> tuple[Inputs, Inputs]:
    """Gives each device its own copy of the parameters, so that a step of many micro-batches sums gradients once."""
    given, of_given = inputs._asdict(), specs._asdict()
    for name in ("kernel", "bias", "lora_a", "lora_b"):
        given[name] = None if given[name] is None else one_a_device(given[name], p, of_given[name])
        of_given[name] = p.copies_spec(of_given[name])
    return Inputs(**given), Inputs(**of_given)


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


def prepare_pair(
    first: tuple[Any, Any],
    second: tuple[Any, Any],
    *,
    names: tuple[str, str],
    second_spec: P | None,
    parallel: ParallelMesh | ShardAxes | None,
    temperature: Any,
    where: Any,
    options: HeadOptions,
) -> tuple[Prepared, Prepared]:
    """Prepares both calls and checks that their tokens, columns and shards agree.

    Args:
      first: hidden states and head, the arguments `hidden` and `head`.
      second: the arguments `teacher_hidden` and `teacher_head` where the second name is "teacher".
      names: the names of the two models, for errors.
      second_spec: how the second hidden states are sharded, see `HeadOptions.hidden_spec`.
      parallel: this and the remaining arguments are used in both calls, see `log_probs_from_hidden`.
    """
    prepare = partial(
        prepare_head, targets=None, parallel=parallel, entropy="none", temperature=temperature, where=where, heads=2
    )
    of_second: HeadOptions = {**options, "hidden_spec": second_spec}
    name = f"{names[1]}_head"
    pair = prepare(*first, options=options), prepare(*second, name=name, options=of_second)
    _check(names, (as_head("head", first[1]), as_head(name, second[1])), pair)
    return pair


def _check(names: tuple[str, str], heads: tuple[Head, Head], pair: tuple[Prepared, Prepared]) -> None:
    """Raises if the tokens or the vocabularies of the two calls differ."""
    (one, other), expected = pair, f"expected the {names[0]}'s"
    if one.tokens != other.tokens:
        raise ValueError(f"{names[1]}_hidden: got [R, T] = {other.tokens}, {expected}, {one.tokens}")
    columns = [head.kernel.shape[head.v_dim] for head in heads]
    if columns[0] != columns[1]:
        raise ValueError(f"{names[1]}_head.kernel: got {columns[1]} columns, {expected} {columns[0]}")
    if (heads[0].vocab_size or columns[0]) != (heads[1].vocab_size or columns[1]):
        got, there = heads[1].vocab_size, heads[0].vocab_size
        raise ValueError(f"{names[1]}_head.vocab_size: got {got}, {expected}, {there}")
    if one.call.v_names != other.call.v_names:
        raise ValueError(
            f"{names[1]}_head.kernel: got its vocabulary over {other.call.v_names}, expected over {one.call.v_names}, "
            f"as the {names[0]}'s"
        )
