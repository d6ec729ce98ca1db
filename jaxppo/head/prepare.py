"""Checks the arguments of a call to a head, and makes one static object, arrays and their PartitionSpecs of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import (
    as_token_ids,
    check,
    check_array,
    check_choice,
    check_count,
    check_flag,
    check_floating,
    check_number,
    check_type,
    dtype_name,
)
from jaxppo.base.stacked import part_of_a_step
from jaxppo.head import call as calls
from jaxppo.head.call import Asked, HeadCall, HeadOptions, Inputs, Names, Prepared, Tokens
from jaxppo.head.head import Entropy, Head, LogitsDtype, LogitStat, Transform, as_head
from jaxppo.sharding import ParallelMesh, ShardAxes, check_parallel, note, one_a_device, varying

Parallel = ParallelMesh | ShardAxes | None
Pair = tuple[Any, Any]  # hidden states and a head
NO_MESH = "the mesh that has these axes, or no spec"


def prepare_head(
    hidden: Any,
    head: Any,
    targets: Any,
    *,
    parallel: Parallel,
    temperature: Any,
    entropy: Entropy,
    options: HeadOptions,
    logit_stats: Sequence[LogitStat] = (),
    top_k: int = 0,
    nucleus_ids: Any = None,
    ids: Any = None,
    where: Any = None,
    adapter_ids: Any = None,
    heads: int = 1,  # that share the memory
    name: str = "head",  # in errors
) -> Prepared:
    """Checks the arguments of `log_probs_from_hidden`, with targets or without, and prepares the call."""
    chosen, what = check_options(options), name.removesuffix("head")
    check_floating(f"{what}hidden", hidden, 3, "[R, T, H]")
    head = as_head(name, head)
    asked = as_asked(entropy, logit_stats, top_k)
    check_parallel(parallel)
    roles = parallel.axes if isinstance(parallel, ParallelMesh) else parallel or ShardAxes()
    spec = chosen.pop("hidden_spec")
    hidden, by_position = _bring_hidden(f"{what}hidden_spec", parallel, roles, hidden, spec)
    head.check(name, hidden.shape[2])
    h_names, v_names = _kernel_axes(parallel, roles, name, hidden, head)
    columns = own = head.kernel.shape[head.v_dim]
    R, T = hidden.shape[:2]
    if isinstance(parallel, ParallelMesh):
        own //= math.prod(parallel.mesh.shape.get(n, 1) for n in v_names)  # `shard_call` refuses a remainder
    else:
        columns *= roles.size(v_names)
        T *= roles.size(roles.tensor) if by_position else 1
    tokens, where = as_token_arrays("hidden", (R, T), targets, nucleus_ids, ids, where, temperature)
    a, b, scales = (None, None, ()) if head.lora is None else (head.lora.a, head.lora.b, (head.lora.scale,))
    adapter_ids = as_adapter_ids(f"{name}.lora", head.lora, adapter_ids, R)
    device = calls.device_kind(parallel, head.kernel)
    # a TPU stores a `[H, V]` kernel transposed if V is not a multiple of 128, the lanes of a register
    transposed = head.layout == "hv" and "TPU" in device and own % 128 != 0
    vocab_size = columns if head.vocab_size is None else head.vocab_size
    check("vocab_size", vocab_size, vocab_size <= columns, f"1 to {columns}, the columns there are")
    call = HeadCall(
        axes=roles,
        v_dim=0 if transposed else head.v_dim,
        transposed=transposed,
        h_names=h_names,
        v_names=v_names,
        sequence_parallel=by_position,
        transform=Transform(cast(LogitsDtype, head.logits_dtype), head.softcap, head.scale),
        scales=(1.0, *scales, *([] if head.bias is None else [1.0])),
        vocab_size=vocab_size,
        asked=asked,
        profile=next(profile for kind, profile in calls.PROFILES.items() if kind in device),
        heads=heads,
        copied=bool(part_of_a_step.value and isinstance(parallel, ParallelMesh) and roles.tokens),
        **chosen,
    )
    inputs = Inputs(hidden, head.kernel, head.bias, a, b, tokens, where, adapter_ids)
    if not isinstance(parallel, ParallelMesh):
        return Prepared(call, inputs, None, (R, T))
    return Prepared(call, *_on_mesh(parallel, head.v_dim, call, inputs), (R, T))


def _bring_hidden(
    what: str, parallel: Parallel, roles: ShardAxes, hidden: jax.Array, given: P | None
) -> tuple[jax.Array, bool]:
    """Reshards hidden states like the batch's tokens, and tells whether the tensor axis shards their positions too."""
    check_type(what, given, isinstance(given, P | None), "a PartitionSpec or None")
    if given is None or parallel is None:
        check(what, f"{given} without parallel=", parallel is not None or not any(given or ()), NO_MESH)
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
    each = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    return [tuple(name for name in names if sizes.get(name) != 1) for names in each]


def _kernel_axes(parallel: Parallel, roles: ShardAxes, name: str, hidden: jax.Array, head: Head) -> tuple[Names, Names]:
    """The mesh axes that shard the kernel's H and its V. Raises unless its shape then fits the hidden states."""
    kernel, v_dim, on_mesh = head.kernel, head.v_dim, isinstance(parallel, ParallelMesh)
    h_names, v_names = _given_axes(parallel, roles, hidden, head)
    rows = kernel.shape[1 - v_dim] * (1 if on_mesh else roles.size(h_names))
    got, expected = f"shape {kernel.shape} with layout {head.layout!r}", f"{hidden.shape[2]} rows of H, as in hidden"
    check(f"{name}.kernel", got, rows == hidden.shape[2], f"{expected} {hidden.shape}")
    if on_mesh:
        return h_names, v_names
    own, shards, names = kernel.shape[v_dim], roles.size(roles.tensor), varying(kernel)
    if set(roles.tensor) & names and head.vocab_size is not None and head.vocab_size <= own * (shards - 1):
        raise ValueError(
            f"{name}.vocab_size: got {head.vocab_size} with {own} columns on each of {shards} tensor shards, the last "
            "of which would hold padding alone, expected each device's part of the vocabulary; a kernel that was "
            "gathered over the tensor axis is to be invariant over it: all_gather(..., to='invarying')"
        )
    return h_names, tuple(n for n in v_names if n in names)


def _given_axes(parallel: Parallel, roles: ShardAxes, hidden: jax.Array, head: Head) -> tuple[Names, Names]:
    """The axes of the head's spec, of H and of V, or the defaults."""
    kernel, v_dim, given = head.kernel, head.v_dim, head.spec
    if isinstance(parallel, ParallelMesh) and parallel.is_explicit and given is None:
        given = getattr(jax.typeof(kernel).sharding, "spec", None)
    if given is None and isinstance(parallel, ParallelMesh):
        # JAX cannot shard a kernel that the tensor axis does not divide, so it arrives whole
        return roles.fsdp, () if kernel.shape[v_dim] % parallel.tensor_size else roles.tensor
    if given is None:
        return roles.fsdp if kernel.shape[1 - v_dim] != hidden.shape[2] else (), roles.tensor
    check("head.spec", f"{given} without parallel=", parallel is not None or not any(given), NO_MESH)
    check("head.spec", given, len(given) <= 2, "a PartitionSpec of two dimensions")
    sizes: Any = parallel.mesh.shape if isinstance(parallel, ParallelMesh) else {}
    entries = _above_1(sizes, (*given, *[None] * (2 - len(given))))
    h_names, v_names, tensor = entries[1 - v_dim], entries[v_dim], set(roles.tensor)
    check("head.spec", given, not set(h_names) & tensor, f"the tensor axes {roles.tensor} on the vocabulary only")
    good = set(v_names) & tensor in (set(), tensor)
    check("head.spec", given, good, f"all of the tensor axes {roles.tensor} or none")
    return h_names, v_names


def _on_mesh(p: ParallelMesh, v_dim: int, call: HeadCall, inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The inputs with their specs; with copies of the parameters, so that a step of many parts sums gradients once."""
    hidden_spec = dataclasses.replace(p, sequence_parallel=call.sequence_parallel).hidden_spec
    h, v = call.h_names or None, call.v_names or None
    of_b = P(None, v) if inputs.adapter_ids is None else P(None, None, v)
    of_tokens = token_specs(p, inputs.tokens), p.tokens_spec, P(p.rows_spec[0])
    specs = Inputs(hidden_spec, P(h, v) if v_dim == 1 else P(v, h), P(v), P(), of_b, *of_tokens)
    for name in ("kernel", "bias", "lora_a", "lora_b") if call.copied else ():
        x, spec = getattr(inputs, name), getattr(specs, name)
        inputs = inputs._replace(**{name: None if x is None else one_a_device(x, p, spec)})
        specs = specs._replace(**{name: p.copies_spec(spec)})
    return inputs, specs


def as_token_arrays(
    source: str, tokens: tuple[int, ...], targets: Any, nucleus_ids: Any, ids: Any, where: Any, temperature: Any
) -> tuple[Tokens, Any]:
    """The last five arguments, checked against the [R, T] of `source`: ids in i32, the temperature in f32."""
    for name, x, of in (("targets", targets, f"the [R, T] of {source}"), ("where", where, "the shape of targets")):
        if x is not None:
            check_array(name, x)
            check(name, f"shape {x.shape}", x.shape == tokens, f"{tokens}, {of}")
    targets = None if targets is None else as_token_ids(targets)
    where = None if where is None else where.astype(bool)
    nucleus_ids, ids = calls.as_id_sets("nucleus_ids", nucleus_ids, tokens), calls.as_id_sets("ids", ids, tokens)
    return Tokens(targets, nucleus_ids, ids, as_temperature(temperature, tokens)), where


def as_asked(entropy: Any, logit_stats: Any, top_k: Any) -> Asked:
    check_choice("entropy", entropy, Entropy)
    check_count("top_k", top_k)
    return Asked(entropy, calls.as_logit_stats(logit_stats), top_k)


def as_adapter_ids(what: str, lora: Any, adapter_ids: Any, rows: int) -> Int[Array, " R"] | None:
    """The adapter of each row, as i32; None if all rows share one adapter, or there is none."""
    if lora is None or lora.a.ndim == 2:
        check("adapter_ids", "an array", adapter_ids is None, f"None without several adapters in {what}, [A, H, r]")
        return None
    check("adapter_ids", None, adapter_ids is not None, f"i32[R] for the {lora.a.shape[0]} adapters of {what}")
    check_array("adapter_ids", adapter_ids)
    check("adapter_ids", f"shape {adapter_ids.shape}", adapter_ids.shape == (rows,), f"{(rows,)}, one per row")
    return as_token_ids(adapter_ids)


def as_temperature(temperature: Any, shape: tuple[int, ...]) -> Float[Array, ""] | Float[Array, "R T"] | None:
    """The temperature in f32, without a gradient; NaN where it is not a finite number above 0. None stands for 1."""
    if not isinstance(temperature, (np.ndarray, jax.Array)):
        check_number("temperature", temperature, above=0)
    else:
        check_array("temperature", temperature)
    if isinstance(temperature, (int, float, np.number)) and temperature == 1:
        return None
    temperature = jnp.asarray(temperature, jnp.float32)
    good = temperature.shape in ((), shape)
    check("temperature", f"shape {temperature.shape}", good, f"a scalar or {shape}, one per token")
    sound = (temperature > 0) & jnp.isfinite(temperature)
    return jax.lax.stop_gradient(jnp.where(sound, temperature, jnp.nan))


def token_specs(p: ParallelMesh, tokens: Tokens) -> Tokens:
    t = p.tokens_spec
    return Tokens(t, t, t, t if getattr(tokens.temperature, "ndim", 0) else P())


def check_options(options: HeadOptions) -> dict[str, Any]:
    """All options, with a precision and a dtype as names; raises if one is unknown or out of range."""
    unknown = set(options) - set(HeadOptions.__annotations__)
    if unknown:
        raise TypeError(f"options: got {sorted(unknown)}, expected some of {sorted(HeadOptions.__annotations__)}")
    found: dict[str, Any] = {"gradient_sum_dtype": "float32", "follow_mask": True, "deterministic": False}
    found = {**dict.fromkeys(HeadOptions.__annotations__), **found, **options}
    if found["precision"] is not None:
        with suppress(ValueError, TypeError):  # of what is no precision, and is refused below
            found["precision"] = lax.Precision(found["precision"]).name.lower()
        check_choice("precision", found["precision"], calls.Precision)
    found["gradient_sum_dtype"] = dtype_name(found["gradient_sum_dtype"])
    check_choice("gradient_sum_dtype", found["gradient_sum_dtype"], calls.SumDtype)
    for name in ("follow_mask", "deterministic"):
        check_flag(name, found[name])
    found["follow_mask"] |= found["deterministic"]
    if found["memory"] is not None:
        check_count("memory", found["memory"], least=1)
    return found


def prepare_pair(
    first: Pair, second: Pair, *, names: tuple[str, str], second_spec: P | None, options: HeadOptions, **given: Any
) -> tuple[Prepared, Prepared]:
    """Prepares two calls, each of hidden states and a head, and checks that tokens, columns and shards agree.

    `names` are those of the models in errors: the arguments may be `hidden`, `head`, `teacher_hidden`, `teacher_head`.
    """
    prepare: Callable[..., Prepared] = partial(prepare_head, targets=None, entropy="none", heads=2, **given)
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
