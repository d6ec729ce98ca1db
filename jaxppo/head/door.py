"""Brings a call's arrays to the one layout that the walks know, and gradients back by JAX's
transpose.

Inside, a device has all features of its tokens, `[N, f]`, and an equal share V of the vocabulary of
each parameter, `[f, V]` or `[V, f]` as the kernel lies. `enter` makes that of any layout but for
the sums over devices:
`whole_features` and `whole_parameter` stand within the custom rules, which sum gradients in f32
there.

`varying(x)` is the set of mesh axes along which devices hold different x, by its type.
`vary(x, axes)` adds axes to that type and sends nothing; its transpose is a sum over devices.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.call import HeadCall, Inputs, Names, Tokens
from jaxppo.head.columns import columns_of
from jaxppo.head.order import where_counts
from jaxppo.head.quantized import QuantizedArray
from jaxppo.head.tile import Features, Parameters, low_rank, low_rank_by_row, rounded
from jaxppo.sharding import ShardAxes, vary, varying

MeshAxes = frozenset[str]


class Local(NamedTuple):
    """The arrays of a call on a device, or their cotangents."""

    features: Features  # [R, T, f]; [R, T / tensor, f] if hidden states are sharded by position
    parameters: Parameters  # [f, V] or [V, f]; with FSDP f of the kernel is H / fsdp
    tokens: Any  # `Tokens`, [N, ...]; None in a cotangent
    counts: jax.Array | None  # bool[N], the tokens that are computed; None for all


def enter(call: HeadCall, inputs: Inputs) -> Local:
    """Adapters and bias as further products, the device's columns, and tokens flat.

    JAX differentiates it.
    """
    R, T = inputs.hidden.shape[:2]
    kernel = inputs.kernel
    if call.transposed:
        kernel = kernel.T
    features = [inputs.hidden]
    parameters = [kernel]
    if inputs.lora_a is not None:
        low, lora_b = _adapter(call, inputs)
        features.append(low)
        parameters.append(lora_b)
    if inputs.bias is not None:
        # -inf hides a column; the least f32 does too, and 0 times it is not NaN
        bias = jnp.maximum(inputs.bias.astype(jnp.float32), jnp.finfo(jnp.float32).min)
        features.append(jnp.ones((R, T, 1), jnp.float32))
        parameters.append(jnp.expand_dims(bias, 1 - call.v_dim))
    N = R * T
    if call.sequence_parallel:
        N *= call.axes.size(call.axes.tensor)
    counts = inputs.counts
    if counts is None and call.deterministic:
        counts = jnp.ones(N, bool)  # the same program with a mask and without
    tokens, counts = flat_tokens(inputs.tokens, counts, N, call.vocab_size)
    # If devices share hidden states but not targets, the gradients of hidden states are summed over
    # these devices. Ones that a bias is multiplied by differ as hidden states do: their gradients
    # do.
    names = varying(inputs.hidden, tokens, counts)
    for k, feature in enumerate(features):
        missing = names - varying(feature)
        if missing:
            features[k] = vary_with_f32_sum(feature, missing)
    of_device = partial(own_columns, call.axes, call.v_names, call.vocab_size, dim=call.v_dim)
    return Local(
        tuple(features),
        jax.tree.map(of_device, tuple(parameters)),
        lax.stop_gradient(tokens),
        counts,
    )


def _adapter(call: HeadCall, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The features `[R, T, r]` and the parameter, `[r, V]` or `[V, r]`, of an adapter's product."""
    hidden = inputs.hidden
    lora_a = vary_with_f32_sum(inputs.lora_a, varying(hidden) - varying(inputs.lora_a))
    lora_b = inputs.lora_b
    if inputs.adapter_ids is None:
        low = low_rank(call, hidden, lora_a)
    else:
        low, lora_b = low_rank_by_row(call, hidden, lora_a, lora_b, inputs.adapter_ids)
    if call.v_dim == 0:
        lora_b = lora_b.T
    return low, lora_b


def own_columns(
    axes: ShardAxes, v_names: Names, vocab_size: int, matrix: jax.Array, dim: int
) -> jax.Array:
    """This device's equal share of the columns of a matrix, along `dim`, which the axes `v_names`
    shard.

    Other axes than the tensor axes, or these in another order, are gathered first. What the tensor
    axes do not divide is padded. Padding becomes 0, as it may hold NaN.
    """
    shards = axes.size(axes.tensor)
    first = v_names[: len(axes.tensor)]
    if first != axes.tensor:
        first = ()
    rest = v_names[len(first) :]
    if rest:
        matrix = lax.all_gather(matrix, rest, axis=dim, tiled=True, to="invarying")
    if shards > 1 and not first:
        width = -(-matrix.shape[dim] // shards)
        padding = [(0, 0), (0, 0)]
        padding[dim] = (0, width * shards - matrix.shape[dim])
        matrix = vary(jnp.pad(matrix, padding), axes.tensor)
        matrix = lax.dynamic_slice_in_dim(matrix, axes.index(axes.tensor) * width, width, dim)
    columns = columns_of(axes, vocab_size, matrix.shape[dim])
    if columns.valid is not None:
        matrix = jnp.where(jnp.expand_dims(columns.valid, 1 - dim), matrix, 0)
    return matrix


def flat_tokens(
    tokens: Tokens, counts: jax.Array | None, size: int, vocab_size: int
) -> tuple[Tokens, jax.Array | None]:
    """What statistics read of tokens, `[N, ...]`, without that of tokens that do not count: it
    may be anything.
    """
    if tokens.nucleus_ids is not None:
        # an id outside the vocabulary makes the log-prob NaN, as a target of -2 does
        exist = (tokens.nucleus_ids >= -1) & (tokens.nucleus_ids < vocab_size)
        tokens = tokens._replace(targets=jnp.where(exist.all(axis=-1), tokens.targets, -2))

    def flat(array: jax.Array) -> jax.Array:
        if array.ndim < 2:  # a scalar of all tokens, or `counts` that `enter` made
            return jnp.broadcast_to(array, size)
        return array.reshape(size, *array.shape[2:])

    tokens, counts = jax.tree.map(flat, (tokens, counts))
    fills = Tokens(targets=0, nucleus_ids=-1, ids=-1, temperature=1)
    return (
        Tokens(
            *(where_counts(counts, array, fill) for array, fill in zip(tokens, fills, strict=True))
        ),
        counts,
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def vary_with_f32_sum(array: jax.Array, mesh_axes: MeshAxes) -> jax.Array:
    """The array, varying along these axes too; its gradient is summed over them in f32."""
    return vary(array, mesh_axes)


def _f32_sum(mesh_axes: MeshAxes, _residual: None, cotangent: jax.Array) -> tuple[jax.Array]:
    if not mesh_axes:
        return (cotangent,)
    total = lax.psum(cotangent.astype(jnp.float32), tuple(sorted(mesh_axes)))
    return (rounded(total, cotangent.dtype),)


vary_with_f32_sum.defvjp(lambda array, mesh_axes: (vary(array, mesh_axes), None), _f32_sum)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_positions(hidden: jax.Array, names: Names) -> jax.Array:
    """Hidden states `[R, T, H]` of which each device along these axes holds some positions;
    gradients add up in f32.
    """
    return lax.all_gather(hidden, names, axis=1, tiled=True)


def _all_positions_backward(
    names: Names, _residual: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    share = lax.psum_scatter(cotangent.astype(jnp.float32), names, scatter_dimension=1, tiled=True)
    return (rounded(share, cotangent.dtype),)


all_positions.defvjp(
    lambda hidden, names: (all_positions(hidden, names), None), _all_positions_backward
)


def whole_features(call: HeadCall, mesh_axes: MeshAxes, features: jax.Array) -> jax.Array:
    """The features of all N tokens, `[N, f]`, from those that a device holds, `[R, T, f]`;
    linear.
    """
    if call.sequence_parallel:
        features = lax.all_gather(features, call.axes.tensor, axis=1, tiled=True)
    return vary(features.reshape(-1, features.shape[2]), mesh_axes)


def whole_parameter(call: HeadCall, k: int, mesh_axes: MeshAxes, parameter: Any) -> Any:
    """All features of some columns of parameter k, from those that a device holds."""
    if isinstance(parameter, QuantizedArray):
        values = whole_parameter(call, k, mesh_axes, parameter.values)
        return QuantizedArray(values, vary(parameter.scale, mesh_axes))
    if k == 0 and call.h_names:
        parameter = lax.all_gather(parameter, call.h_names, axis=1 - call.v_dim, tiled=True)
    return vary(parameter, mesh_axes)
