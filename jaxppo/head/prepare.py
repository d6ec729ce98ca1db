"""Checks the arguments of a call to a head, and makes one static object, arrays and their PartitionSpecs of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxppo.base.arrays import check, check_choice, check_flag, check_floating, dtype_name
from jaxppo.base.stacked import part_of_a_step
from jaxppo.head import call as calls
from jaxppo.head.call import (
    Asked,
    HeadCall,
    HeadOptions,
    Inputs,
    Names,
    Precision,
    Prepared,
    SumDtype,
    as_adapter_ids,
    as_asked,
    as_token_arrays,
    check_vocab_size,
    temperature_spec,
)
from jaxppo.head.head import Entropy, Head, LogitsDtype, LogitStat, Transform, as_head
from jaxppo.sharding import ParallelMesh, ShardAxes, check_parallel, note, one_a_device, varying

LANES = 128  # lanes of a register
NEEDED_MESH = "the mesh that has these axes, or no spec"


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
    chosen, what = check_options(options), name.removesuffix("head")
    check_floating(f"{what}hidden", hidden, 3, "[R, T, H]")
    head = as_head(name, head)
    asked = as_asked(entropy, logit_stats, top_k)
    check_parallel(parallel)
    roles = parallel.axes if isinstance(parallel, ParallelMesh) else parallel or ShardAxes()
    hidden, by_position = _bring_hidden(f"{what}hidden_spec", parallel, roles, hidden, chosen.get("hidden_spec"))
    head.check(name, hidden.shape[2])
    h_names, v_names = _kernel_axes(parallel, roles, hidden, head)
    tokens = _check_shapes(parallel, roles, name, hidden, head, h_names, by_position)
    of_tokens = as_token_arrays("hidden", tokens, targets, nucleus_ids, ids, where, temperature)
    a, b = (None, None) if head.lora is None else (head.lora.a, head.lora.b)
    adapter_ids = as_adapter_ids(f"{name}.lora", head.lora, adapter_ids, tokens[0])
    inputs = Inputs(hidden, head.kernel, head.bias, a, b, *of_tokens, adapter_ids)
    call = _call(parallel, roles, head, h_names, v_names, by_position, chosen, asked, heads)
    if not isinstance(parallel, ParallelMesh):
        return Prepared(call, inputs, None, tokens)
    return Prepared(call, *_on_mesh(parallel, head, call, inputs, P(h_names or None), P(v_names or None)), tokens)


def entry_names(entry: Any) -> Names:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _bring_hidden(
    what: str, parallel: ParallelMesh | ShardAxes | None, roles: ShardAxes, hidden: jax.Array, given: P | None
) -> tuple[jax.Array, bool]:
    """Reshards hidden states like the batch's tokens, and tells whether the tensor axis shards their positions too.

    On a mesh any spec is accepted. Inside a `shard_map` hidden states must already be sharded like the tokens.
    """
    if given is not None and not isinstance(given, P):
        raise TypeError(f"{what}: got {given!r}, expected a PartitionSpec or None")
    if given is None or parallel is None:
        good = parallel is not None or not any(map(entry_names, given or ()))
        check(what, f"{given} without parallel=", good, NEEDED_MESH)
        return hidden, bool(roles.tensor) and roles.sequence_parallel
    mesh = parallel if isinstance(parallel, ParallelMesh) else None
    sizes = mesh.mesh.shape if mesh else jax.sharding.get_abstract_mesh().shape
    entries = _above_1(sizes, (*given, *[None] * (3 - len(given))))
    data, context, tensor = _above_1(sizes, (roles.data, roles.context, roles.tensor))
    if entries == [data, context, ()]:
        return hidden, False
    if entries == [data, context + tensor, ()]:
        return hidden, True
    names = [name for entry in entries for name in entry]
    possible = len(entries) == 3 and not entries[2] and len(set(names)) == len(names) and set(names) <= set(sizes)
    if mesh is None or not possible or any(n % mesh.size(e) for n, e in zip(hidden.shape, entries, strict=True)):
        where = "" if mesh else " inside a shard_map"
        expected = f"{P(data or None, context or None, None)}, as the tokens of the batch lie"
        expected += f", or {P(data or None, context + tensor, None)}" if tensor else ""
        expected += ", or another spec of R and T that fits the mesh" if mesh else ""
        raise ValueError(f"{what}: got {given} for shape {hidden.shape}{where}, expected {expected}")
    whole = hidden.shape[1] % mesh.size(context + tensor) == 0
    by_position = bool(tensor) and set(tensor) <= set(entries[1]) and whole
    wanted = dataclasses.replace(mesh, sequence_parallel=by_position).hidden_spec
    to = jax.reshard if mesh.is_explicit else lax.with_sharding_constraint
    with note(f"hidden states brought from {given} to {wanted}"):
        # the first constraint gives the gradient the caller's spec
        return to(to(hidden, mesh.sharding(given)), mesh.sharding(wanted)), by_position


def _above_1(sizes: Any, entries: Sequence[Any]) -> list[Names]:
    """The axes of each entry, without those of size 1, which have no role and do not cut anything."""
    return [tuple(name for name in entry_names(entry) if sizes.get(name) != 1) for entry in entries]


def _kernel_axes(
    parallel: ParallelMesh | ShardAxes | None, roles: ShardAxes, hidden: jax.Array, head: Head
) -> tuple[Names, Names]:
    """The mesh axes that shard the kernel's H and its V: those that were given, or the defaults."""
    kernel, v_dim, given = head.kernel, head.v_dim, head.spec
    if isinstance(parallel, ParallelMesh) and parallel.is_explicit and given is None:
        given = getattr(jax.typeof(kernel).sharding, "spec", None)
    if given is None and isinstance(parallel, ParallelMesh):
        # JAX cannot shard a kernel that the tensor axis does not divide, so it arrives whole
        return roles.fsdp, () if kernel.shape[v_dim] % parallel.tensor_size else roles.tensor
    if given is None:
        return roles.fsdp if kernel.shape[1 - v_dim] != hidden.shape[2] else (), roles.tensor
    good = parallel is not None or not any(map(entry_names, given))
    check("head.spec", f"{given} without parallel=", good, NEEDED_MESH)
    sizes: Any = parallel.mesh.shape if isinstance(parallel, ParallelMesh) else {}
    check("head.spec", given, len(given) <= 2, "a PartitionSpec of two dimensions")
    entries = _above_1(sizes, (*given, *[None] * (2 - len(given))))
    h_names, v_names, tensor = entries[1 - v_dim], entries[v_dim], set(roles.tensor)
    if set(h_names) & tensor:
        raise ValueError(f"head.spec: got {given}, expected the tensor axes {roles.tensor} on the vocabulary only")
    if set(v_names) & tensor and not tensor <= set(v_names):
        raise ValueError(f"head.spec: got {given}, expected all of the tensor axes {roles.tensor} or none")
    return h_names, v_names


def _check_shapes(
    parallel: ParallelMesh | ShardAxes | None,
    roles: ShardAxes,
    name: str,
    hidden: jax.Array,
    head: Head,
    h_names: Names,
    by_position: bool,
) -> tuple[int, int]:
    """[R, T] of the tokens; raises if the kernel does not fit hidden states, or the part that a device should hold."""
    kernel, on_mesh = head.kernel, isinstance(parallel, ParallelMesh)
    H = kernel.shape[1 - head.v_dim] * (1 if on_mesh else roles.size(h_names))
    if hidden.shape[2] != H:
        raise ValueError(
            f"{name}.kernel: got shape {kernel.shape} with layout {head.layout!r}, expected {hidden.shape[2]} rows of "
            f"H, as in hidden {hidden.shape}"
        )
    own, shards = kernel.shape[head.v_dim], 1 if on_mesh else roles.size(roles.tensor)
    is_part = not on_mesh and bool(set(roles.tensor) & varying(kernel))
    if is_part and head.vocab_size is not None and head.vocab_size <= own * (shards - 1):
        raise ValueError(
            f"{name}.vocab_size: got {head.vocab_size} with {own} columns on each of {shards} tensor shards, the last "
            "of which would hold padding alone, expected each device's part of the vocabulary; a kernel that was "
            "gathered over the tensor axis is to be invariant over it: all_gather(..., to='invarying')"
        )
    return hidden.shape[0], hidden.shape[1] * (shards if by_position else 1)


def _call(
    parallel: ParallelMesh | ShardAxes | None,
    roles: ShardAxes,
    head: Head,
    h_names: Names,
    v_names: Names,
    by_position: bool,
    options: dict[str, Any],
    asked: Asked,
    heads: int,
) -> HeadCall:
    columns = head.kernel.shape[head.v_dim]
    if isinstance(parallel, ParallelMesh):
        own = columns // math.prod(parallel.mesh.shape.get(n, 1) for n in v_names)  # `shard_call` refuses a remainder
    else:
        v_names = tuple(n for n in v_names if n in varying(head.kernel))
        own, columns = columns, columns * roles.size(v_names)
    device = calls.device_kind(parallel, head.kernel)
    # a TPU stores a `[H, V]` kernel transposed if V is not a multiple of 128
    transposed = head.layout == "hv" and "TPU" in device and own % LANES != 0
    deterministic = options.get("deterministic", False)
    return HeadCall(
        axes=roles,
        v_dim=0 if transposed else head.v_dim,
        transposed=transposed,
        h_names=h_names,
        v_names=v_names,
        sequence_parallel=by_position,
        transform=Transform(cast(LogitsDtype, head.logits_dtype), head.softcap, head.scale),
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
        copied=bool(part_of_a_step.value and isinstance(parallel, ParallelMesh) and roles.tokens),
    )


def _on_mesh(p: ParallelMesh, head: Head, call: HeadCall, inputs: Inputs, h: P, v: P) -> tuple[Inputs, Inputs]:
    """The inputs with their specs; with copies of the parameters, so that a step of many parts sums gradients once."""
    hidden_spec = dataclasses.replace(p, sequence_parallel=call.sequence_parallel).hidden_spec
    of_b = P(None, *v) if inputs.adapter_ids is None else P(None, None, *v)
    of_tokens = (*[p.tokens_spec] * 4, temperature_spec(p, inputs.temperature), P(p.rows_spec[0]))
    specs = Inputs(hidden_spec, P(*h, *v) if head.v_dim == 1 else P(*v, *h), v, P(), of_b, *of_tokens)
    if not call.copied:
        return inputs, specs
    for name in ("kernel", "bias", "lora_a", "lora_b"):
        x, spec = getattr(inputs, name), getattr(specs, name)
        inputs = inputs._replace(**{name: None if x is None else one_a_device(x, p, spec)})
        specs = specs._replace(**{name: p.copies_spec(spec)})
    return inputs, specs


def check_options(options: HeadOptions) -> dict[str, Any]:
    """The options, with a precision and a dtype as names; raises if an option is unknown or out of range."""
    unknown = set(options) - set(HeadOptions.__annotations__)
    if unknown:
        raise TypeError(f"options: got {sorted(unknown)}, expected some of {sorted(HeadOptions.__annotations__)}")
    found: dict[str, Any] = dict(options)
    of_names = {"precision": (_precision_name, Precision), "gradient_sum_dtype": (dtype_name, SumDtype)}
    for name, (named, choices) in of_names.items():
        if found.get(name) is not None:
            found[name] = named(found[name])
            check_choice(name, found[name], choices)
    for name in ("follow_mask", "deterministic"):
        check_flag(name, found.get(name, False))
    memory = options.get("memory")
    good = memory is None or (isinstance(memory, int) and memory > 0)
    check("memory", memory, good, "a positive number of bytes, or None")
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
    """Prepares two calls, each of hidden states and a head, and checks that tokens, columns and shards agree.

    Args:
      first: the arguments `hidden` and `head`.
      second: the arguments `teacher_hidden` and `teacher_head` where the second name is "teacher".
      names: the names of the two models, for errors.
      second_spec: how the second hidden states are sharded, see `HeadOptions.hidden_spec`.
      parallel: this and the remaining arguments are used in both calls, see `log_probs_from_hidden`.
    """
    prepare = partial(
        prepare_head, targets=None, parallel=parallel, entropy="none", temperature=temperature, where=where, heads=2
    )
    of_second: HeadOptions = {**options, "hidden_spec": second_spec}
    name, the = f"{names[1]}_head", f"the {names[0]}'s"
    one, other = prepare(*first, options=options), prepare(*second, name=name, options=of_second)
    good = one.tokens == other.tokens
    check(f"{names[1]}_hidden", f"[R, T] = {other.tokens}", good, f"{the}, {one.tokens}")
    heads = as_head("head", first[1]), as_head(name, second[1])
    columns = [head.kernel.shape[head.v_dim] for head in heads]
    check(f"{name}.kernel", f"{columns[1]} columns", columns[0] == columns[1], f"{the} {columns[0]}")
    sizes = [head.vocab_size for head in heads]
    good = (sizes[0] or columns[0]) == (sizes[1] or columns[1])
    check(f"{name}.vocab_size", sizes[1], good, f"{the}, {sizes[0]}")
    axes = one.call.v_names, other.call.v_names
    check(f"{name}.kernel", f"its vocabulary over {axes[1]}", axes[0] == axes[1], f"over {axes[0]}, as {the}")
    return one, other
