"""Checks the arguments of a call to a head, and makes one static object, arrays and their
PartitionSpecs of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxppo.base.arrays import (
    check,
    check_choice,
    check_count,
    check_flag,
    check_floating,
    check_type,
    dtype_name,
)
from jaxppo.head import call as calls
from jaxppo.head import profiles
from jaxppo.head.call import HeadCall, HeadOptions, Inputs, Names, Prepared, Tokens
from jaxppo.head.head import Entropy, Head, LogitsDtype, LogitStat, Transform, as_head
from jaxppo.head.quantized import QuantizedArray
from jaxppo.head.token_arguments import as_adapter_ids, as_asked, as_token_arrays
from jaxppo.sharding import ParallelMesh, ShardAxes, check_parallel, note, varying

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
    """Checks the arguments of `log_probs_from_hidden`, with targets or without, and prepares the
    call.
    """
    prefix = name.removesuffix("head")  # of its arguments' names
    checked = check_options(options)
    hidden_spec = checked.pop("hidden_spec")
    asked = as_asked(entropy, logit_stats, top_k)
    check_parallel(parallel)
    axes = parallel.axes if isinstance(parallel, ParallelMesh) else parallel or ShardAxes()

    check_floating(f"{prefix}hidden", hidden, 3, "[R, T, H]")
    head = as_head(name, head)
    hidden, sequence_parallel = _bring_hidden(
        f"{prefix}hidden_spec", parallel, axes, hidden, hidden_spec
    )
    head = head.checked(name, hidden.shape[2])
    h_names, v_names = _kernel_axes(parallel, axes, name, hidden, head)

    R, T = hidden.shape[:2]
    kernel_width = head.kernel.shape[head.v_dim]
    if not isinstance(parallel, ParallelMesh):  # arrays are one device's part
        kernel_width *= axes.size(v_names)
        if sequence_parallel:
            T *= axes.size(axes.tensor)
    vocab_size = kernel_width
    if head.vocab_size is not None:
        vocab_size = head.vocab_size
    check(
        f"{name}.vocab_size",
        vocab_size,
        vocab_size <= kernel_width,
        f"1 to {kernel_width}, the columns there are",
    )

    tokens, where = as_token_arrays(
        f"{prefix}hidden", (R, T), targets, nucleus_ids, ids, where, temperature
    )
    adapter_ids = as_adapter_ids(f"{name}.lora", head.lora, adapter_ids, R)

    device = profiles.device_kind(parallel, jax.tree.leaves(head.kernel)[0])
    transposed = _lies_transposed(parallel, head, v_names, device)
    call = HeadCall(
        axes=axes,
        v_dim=0 if transposed else head.v_dim,
        transposed=transposed,
        h_names=h_names,
        v_names=v_names,
        sequence_parallel=sequence_parallel,
        transform=Transform(cast(LogitsDtype, head.logits_dtype), head.softcap, head.scale),
        scales=_scales(head),
        quantized=head.quantized,
        kernel_width=kernel_width,
        vocab_size=vocab_size,
        asked=asked,
        profile=profiles.profile_of(device),
        heads=heads,
        **checked,
    )
    lora_a = getattr(head.lora, "a", None)
    lora_b = getattr(head.lora, "b", None)
    inputs = Inputs(hidden, head.kernel, head.bias, lora_a, lora_b, tokens, where, adapter_ids)
    return _placed(parallel, head.v_dim, Prepared(call, inputs, None, (R, T)))


def _lies_transposed(parallel: Parallel, head: Head, v_names: Names, device: str) -> bool:
    """Whether the device stores a `[H, V]` kernel as `[V, H]`: TPUs do unless 128, their lanes,
    divides V.
    """
    width = head.kernel.shape[head.v_dim]  # of a device
    if isinstance(parallel, ParallelMesh):
        width //= math.prod(parallel.mesh.shape.get(name, 1) for name in v_names)
    return head.layout == "hv" and "TPU" in device and width % 128 != 0


def _scales(head: Head) -> tuple[float, ...]:
    """The factor of each product of a head."""
    scales = [1.0]
    if head.lora is not None:
        scales.append(head.lora.scale)
    if head.bias is not None:
        scales.append(1.0)
    return tuple(scales)


def _bring_hidden(
    what: str, parallel: Parallel, axes: ShardAxes, hidden: jax.Array, spec: P | None
) -> tuple[jax.Array, bool]:
    """Reshards hidden states like the batch's tokens, and tells whether the tensor axis shards
    their positions too.
    """
    check_type(what, spec, isinstance(spec, P | None), "a PartitionSpec or None")
    if parallel is None:
        check(what, f"{spec} without parallel=", not any(spec or ()), NO_MESH)
    if parallel is None or spec is None:
        return hidden, bool(axes.tensor) and axes.sequence_parallel
    sizes: Any = jax.sharding.get_abstract_mesh().shape
    if isinstance(parallel, ParallelMesh):
        sizes = parallel.mesh.shape
    entries = _cutting_axes(sizes, (*spec, *[None] * (3 - len(spec))))
    data, context, tensor = _cutting_axes(sizes, (axes.data, axes.context, axes.tensor))
    if entries == [data, context, ()]:
        return hidden, False
    if entries == [data, context + tensor, ()]:
        return hidden, True
    if not isinstance(parallel, ParallelMesh) or not _can_move(parallel, hidden, entries):
        raise ValueError(_wrong_spec(what, parallel, hidden, spec, data, context, tensor))
    divides = hidden.shape[1] % parallel.size(context + tensor) == 0
    sequence_parallel = bool(tensor) and set(tensor) <= set(entries[1]) and divides
    wanted = dataclasses.replace(parallel, sequence_parallel=sequence_parallel).hidden_spec
    move: Any = lax.with_sharding_constraint
    if parallel.is_explicit:
        move = jax.reshard
    with note(f"hidden states brought from {spec} to {wanted}"):
        hidden = move(hidden, parallel.sharding(spec))  # gives the gradient the caller's spec
        return move(hidden, parallel.sharding(wanted)), sequence_parallel


def _cutting_axes(sizes: Any, entries: Sequence[Any]) -> list[Names]:
    """The axes of each entry, without those of size 1, which have no role and do not cut
    anything.
    """
    each = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    return [tuple(name for name in names if sizes.get(name) != 1) for names in each]


def _can_move(parallel: ParallelMesh, hidden: jax.Array, entries: list[Names]) -> bool:
    """Whether hidden states can have this spec, of R and T."""
    names = [name for entry in entries for name in entry]
    if (
        len(entries) != 3
        or entries[2]
        or len(set(names)) < len(names)
        or not set(names) <= set(parallel.mesh.shape)
    ):
        return False
    return all(
        n % parallel.size(entry) == 0 for n, entry in zip(hidden.shape, entries, strict=True)
    )


def _wrong_spec(
    what: str,
    parallel: Parallel,
    hidden: jax.Array,
    spec: P,
    data: Names,
    context: Names,
    tensor: Names,
) -> str:
    expected = f"{P(data or None, context or None, None)}, as the tokens of the batch lie"
    if tensor:
        expected += f", or {P(data or None, context + tensor, None)}"
    where = " inside a shard_map"
    if isinstance(parallel, ParallelMesh):
        where = ""
        expected += ", or another spec of R and T that fits the mesh"
    return f"{what}: got {spec} for shape {hidden.shape}{where}, expected {expected}"


def _kernel_axes(
    parallel: Parallel, axes: ShardAxes, name: str, hidden: jax.Array, head: Head
) -> tuple[Names, Names]:
    """The mesh axes that shard the kernel's H and its V.

    Raises unless its shape then fits the hidden states.
    """
    kernel = head.kernel
    on_mesh = isinstance(parallel, ParallelMesh)
    h_names, v_names = _spec_axes(parallel, axes, name, hidden, head)
    features = kernel.shape[1 - head.v_dim]
    if not on_mesh:  # of this device's part
        features *= axes.size(h_names)
    shape = f"shape {kernel.shape} with layout {head.layout!r}"
    expected = f"{hidden.shape[2]} rows of H, as in hidden {hidden.shape}"
    check(f"{name}.kernel", shape, features == hidden.shape[2], expected)
    if on_mesh:
        return h_names, v_names
    width = kernel.shape[head.v_dim]
    shards = axes.size(axes.tensor)
    names = varying(kernel)
    sharded = bool(set(axes.tensor) & names)
    if sharded and head.vocab_size is not None and head.vocab_size <= width * (shards - 1):
        raise ValueError(
            f"{name}.vocab_size: got {head.vocab_size} with {width} columns on each of {shards}"
            " tensor shards, the last of which would hold padding alone, expected each device's"
            " part of the vocabulary; a kernel that was gathered over the tensor axis is to be"
            " invariant over it: all_gather(..., to='invarying')"
        )
    if isinstance(kernel, QuantizedArray):
        whole = not set(h_names) & varying(kernel.scale)
        check(
            f"{name}.kernel.scale",
            f"one that differs over {h_names}",
            whole,
            "that of all H on each device",
        )
    return h_names, tuple(n for n in v_names if n in names)


def _spec_axes(
    parallel: Parallel, axes: ShardAxes, name: str, hidden: jax.Array, head: Head
) -> tuple[Names, Names]:
    """The axes of the head's spec, of H and of V, or the defaults."""
    spec = head.spec
    if isinstance(parallel, ParallelMesh) and parallel.is_explicit and spec is None:
        spec = getattr(jax.typeof(jax.tree.leaves(head.kernel)[0]).sharding, "spec", None)
    if spec is None:
        return _default_axes(parallel, axes, hidden, head)
    what = f"{name}.spec"
    check(what, f"{spec} without parallel=", parallel is not None or not any(spec), NO_MESH)
    check(what, spec, len(spec) <= 2, "a PartitionSpec of two dimensions")
    sizes: Any = {}
    if isinstance(parallel, ParallelMesh):
        sizes = parallel.mesh.shape
    entries = _cutting_axes(sizes, (*spec, *[None] * (2 - len(spec))))
    h_names = entries[1 - head.v_dim]
    v_names = entries[head.v_dim]
    tensor = set(axes.tensor)
    check(
        what,
        spec,
        not set(h_names) & tensor,
        f"the tensor axes {axes.tensor} on the vocabulary only",
    )
    check(
        what,
        spec,
        set(h_names) <= set(axes.tokens),
        f"H over axes that tokens are spread over, {axes.tokens}",
    )
    good = set(v_names) & tensor in (set(), tensor)
    check(what, spec, good, f"all of the tensor axes {axes.tensor} or none")
    return h_names, v_names


def _default_axes(
    parallel: Parallel, axes: ShardAxes, hidden: jax.Array, head: Head
) -> tuple[Names, Names]:
    """H over the fsdp axes, V over the tensor axes."""
    if not isinstance(parallel, ParallelMesh):
        if head.kernel.shape[1 - head.v_dim] == hidden.shape[2]:
            return (), axes.tensor
        return axes.fsdp, axes.tensor
    if head.kernel.shape[head.v_dim] % parallel.tensor_size:
        # JAX cannot shard a kernel that the tensor axis does not divide, so it arrives whole
        return axes.fsdp, ()
    return axes.fsdp, axes.tensor


def _placed(parallel: Parallel, v_dim: int, prepared: Prepared) -> Prepared:
    """The call with the PartitionSpecs of its inputs, if there is a mesh."""
    if not isinstance(parallel, ParallelMesh):
        return prepared
    call = prepared.call
    inputs = prepared.inputs
    v = call.v_names or None
    kernel = [call.h_names or None, v]
    scale = [None, v]
    lora_b = [None, v]
    if v_dim == 0:
        kernel.reverse()
        scale.reverse()
    kernel_spec: Any = P(*kernel)
    if isinstance(inputs.kernel, QuantizedArray):
        kernel_spec = QuantizedArray(P(*kernel), P(*scale))  # type: ignore[arg-type]
    if inputs.adapter_ids is not None:
        lora_b.insert(0, None)
    specs = Inputs(
        hidden=dataclasses.replace(parallel, sequence_parallel=call.sequence_parallel).hidden_spec,
        kernel=kernel_spec,
        bias=P(v),
        lora_a=P(),
        lora_b=P(*lora_b),
        tokens=token_specs(parallel, inputs.tokens),
        counts=parallel.tokens_spec,
        adapter_ids=P(parallel.rows_spec[0]),
    )
    return prepared._replace(specs=specs)


def token_specs(parallel: ParallelMesh, tokens: Tokens) -> Tokens:
    spec = parallel.tokens_spec
    temperature = P()
    if getattr(tokens.temperature, "ndim", 0):
        temperature = spec
    return Tokens(spec, spec, spec, temperature)


def check_options(options: HeadOptions) -> dict[str, Any]:
    """All options, with a precision and a dtype as names; raises if one is unknown or out of
    range.
    """
    unknown = set(options) - set(HeadOptions.__annotations__)
    if unknown:
        raise TypeError(
            f"options: got {sorted(unknown)}, expected some of"
            f" {sorted(HeadOptions.__annotations__)}"
        )
    checked: dict[str, Any] = dict.fromkeys(HeadOptions.__annotations__)
    checked |= {"gradient_sum_dtype": "float32", "follow_mask": True, "deterministic": False}
    checked |= options
    if checked["precision"] is not None:
        with suppress(ValueError, TypeError):  # of what is no precision, and is refused below
            checked["precision"] = lax.Precision(checked["precision"]).name.lower()
        check_choice("precision", checked["precision"], calls.Precision)
    checked["gradient_sum_dtype"] = dtype_name(checked["gradient_sum_dtype"])
    check_choice("gradient_sum_dtype", checked["gradient_sum_dtype"], calls.SumDtype)
    for name in ("follow_mask", "deterministic"):
        check_flag(name, checked[name])
    checked["follow_mask"] |= checked["deterministic"]
    if checked["memory"] is not None:
        check_count("memory", checked["memory"], least=1)
    return checked


def prepare_pair(
    first: Pair,
    second: Pair,
    *,
    names: tuple[str, str],
    second_spec: P | None,
    options: HeadOptions,
    **arguments: Any,
) -> tuple[Prepared, Prepared]:
    """Prepares two calls, each of hidden states and a head, and checks that tokens, columns and
    shards agree.

    `names` are those of the models in errors: the arguments may be `hidden`, `head`,
    `teacher_hidden`, `teacher_head`.
    """
    name = f"{names[1]}_head"
    the = f"the {names[0]}'s"
    prepare: Callable[..., Prepared] = partial(
        prepare_head, targets=None, entropy="none", heads=2, **arguments
    )
    one = prepare(*first, options=options)
    other = prepare(*second, name=name, options={**options, "hidden_spec": second_spec})
    good = one.shape == other.shape
    check(f"{names[1]}_hidden", f"[R, T] = {other.shape}", good, f"{the}, {one.shape}")
    widths = (one.call.kernel_width, other.call.kernel_width)
    vocab_sizes = (one.call.vocab_size, other.call.vocab_size)
    # equal but for padding
    by_padding = widths[0] != widths[1] and vocab_sizes[0] == vocab_sizes[1]
    cut = isinstance(arguments["parallel"], ShardAxes) and bool(
        one.call.v_names or other.call.v_names
    )
    if by_padding and not cut:
        first = (first[0], _padded(as_head("head", first[1]), max(widths)))
        second = (second[0], _padded(as_head(name, second[1]), max(widths)))
        return prepare_pair(
            first, second, names=names, second_spec=second_spec, options=options, **arguments
        )
    advice = ""
    if by_padding:  # padding at the end of each device's part would move the columns after it
        advice = "; pad kernels that a shard_map cuts to one width before it, and give vocab_size"
    elif widths[0] != widths[1]:
        advice = (
            f"; if some are padding, give both heads one vocab_size, here {vocab_sizes[1]} and"
            f" {the} {vocab_sizes[0]}"
        )
    check(
        f"{name}.kernel",
        f"{widths[1]} columns",
        widths[0] == widths[1],
        f"{the} {widths[0]}{advice}",
    )
    check(
        f"{name}.vocab_size",
        vocab_sizes[1],
        vocab_sizes[0] == vocab_sizes[1],
        f"{the}, {vocab_sizes[0]}",
    )
    v_names = (one.call.v_names, other.call.v_names)
    good = v_names[0] == v_names[1]
    check(
        f"{name}.kernel", f"its vocabulary over {v_names[1]}", good, f"over {v_names[0]}, as {the}"
    )
    return one, other


def _padded(head: Head, width: int) -> Head:
    """The head with padding up to so many columns."""
    before = head.kernel.shape[head.v_dim]
    added = (0, width - before)
    padding = [(0, 0), (0, 0)]
    padding[head.v_dim] = added
    bias = head.bias
    if bias is not None:
        bias = jnp.pad(bias, added)
    lora = head.lora
    if lora is not None:
        lora = dataclasses.replace(lora, b=jnp.pad(lora.b, [*[(0, 0)] * (lora.b.ndim - 1), added]))
    kernel = head.kernel
    if isinstance(kernel, QuantizedArray):
        kernel = kernel.by_column(head.v_dim)
    kernel = jax.tree.map(partial(jnp.pad, pad_width=padding), kernel)
    return dataclasses.replace(
        head, kernel=kernel, bias=bias, lora=lora, vocab_size=head.vocab_size or before
    )
