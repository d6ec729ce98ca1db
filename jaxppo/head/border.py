"""The border between a caller's arrays and the walks over tiles, which know one device's tokens and columns.

`varying(x)` is the set of mesh axes along which devices hold different x, by its type. `vary(x, axes)` adds axes to
that type and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxppo.head.call import HeadCall, Inputs, Names, Tokens
from jaxppo.head.reductions import Columns
from jaxppo.head.tile import Features, Parameters, low_rank, low_rank_by_row
from jaxppo.sharding import ShardAxes, vary, varying

Axes = frozenset[str]
Index = int | jax.Array  # a scalar
Tree = TypeVar("Tree")  # a pytree of arrays
_BITS = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint16)}
PARTS = 8  # of the vocabulary, in deterministic calls: tiles have the same shapes on any number of devices


class Local(NamedTuple):
    """The arrays of a call on a device. Features may be shards by position, parameters are shards of the vocabulary."""

    features: Features  # [R, T, f]
    parameters: Parameters
    tokens: Any  # `Tokens`, [N, ...]; None in a gradient
    counts: jax.Array | None  # bool[N]


def local(call: HeadCall, inputs: Inputs) -> Local:
    """Adapters and bias as further products, and tokens flat. JAX differentiates it."""
    if call.copied:
        of_head = {name: getattr(inputs, name) for name in ("kernel", "bias", "lora_a", "lora_b")}
        inputs = inputs._replace(**jax.tree.map(lambda x: x[0], of_head))
    hidden, counts, (R, T), axes = inputs.hidden, inputs.counts, inputs.hidden.shape[:2], call.axes
    products = [(hidden, inputs.kernel)]
    if inputs.lora_a is not None:
        if counts is not None:  # hidden states of the others may hold NaN, and 0 times it is NaN in the gradient of a
            own = slice_of(counts, axes.index(axes.tensor) * T, T, 1) if call.sequence_parallel else counts
            hidden = jnp.where(own[..., None], hidden, 0)
        a, b = shared(inputs.lora_a, tuple(sorted(varying(hidden) - varying(inputs.lora_a)))), inputs.lora_b
        if inputs.adapter_ids is None:
            low = low_rank(call, hidden, a)
        else:
            low, b = low_rank_by_row(call, hidden, a, b, inputs.adapter_ids)
        products.append((low, b if call.v_dim == 1 else b.T))
    if inputs.bias is not None:  # -inf hides a column; the least f32 does too, and 0 times it is not NaN
        bias = jnp.maximum(inputs.bias.astype(jnp.float32), jnp.finfo(jnp.float32).min)
        products.append((jnp.ones((R, T, 1), jnp.float32), jnp.expand_dims(bias, 1 - call.v_dim)))
    features, parameters = zip(*products, strict=True)
    parameters = (parameters[0].T if call.transposed else parameters[0], *parameters[1:])
    N = R * T * (axes.size(axes.tensor) if call.sequence_parallel else 1)
    if counts is None and call.deterministic:  # the same program with a mask and without
        counts = jnp.ones(N, bool)
    tokens, counts = flat_tokens(inputs.tokens, counts, N, call.vocab_size)
    # if devices share hidden states but not targets, JAX sums the gradients of hidden states over these devices
    names = frozenset().union(*map(varying, jax.tree.leaves((tokens, counts))))
    return Local(tuple(vary(x, names) for x in features), parameters, lax.stop_gradient(tokens), counts)


def flat_tokens(
    tokens: Tokens, counts: jax.Array | None, size: int, vocab_size: int
) -> tuple[Tokens, jax.Array | None]:
    """What reductions read of tokens, `[N, ...]`, without that of tokens that do not count: it may be anything."""
    if tokens.nucleus_ids is not None:  # an id outside the vocabulary makes the log-prob NaN, as a target of -2 does
        exist = (tokens.nucleus_ids >= -1) & (tokens.nucleus_ids < vocab_size)
        tokens = tokens._replace(targets=jnp.where(exist.all(axis=-1), tokens.targets, -2))
    tokens, counts = jax.tree.map(
        lambda x: x.reshape(size, *x.shape[2:]) if x.ndim > 1 else jnp.broadcast_to(x, size), (tokens, counts)
    )
    return Tokens(*(unless(counts, x, fill) for x, fill in zip(tokens, (0, -1, -1, 1), strict=True))), counts


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def shared(x: jax.Array, names: Names) -> jax.Array:
    """x, varying along these axes too; its gradient is summed over them in f32."""
    return vary(x, names)


def _shared_backward(names: Names, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (rounded(lax.psum(g.astype(jnp.float32), names), g.dtype) if names else g,)


shared.defvjp(lambda x, names: (vary(x, names), None), _shared_backward)


def unless(counts: jax.Array | None, tree: Tree, fill: float = 0) -> Tree:
    """Arrays `[N, ...]` of tokens, with `fill` at the tokens that do not count."""
    if counts is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, x.dtype.type(fill)), tree)


class Window(NamedTuple):
    """The columns on which a device works, among those that it holds or gathers."""

    bases: jax.Array  # i32[pieces], the first vocabulary id of each piece that is gathered; ids rise by one within
    own: int  # the columns of a piece
    each: bool  # blocks are gathered one by one: some columns of each piece
    start: Index  # the window's first column, of each piece or of all that is gathered
    total: int
    before: Index  # columns before this one belong to another device
    vocab_size: int
    masked: bool  # some column is padding, or another device's
    stored: bool  # see `Columns`

    @classmethod
    def of(cls, axes: ShardAxes, v_names: Names, own: int, vocab_size: int, stored: bool, each: bool = False) -> Window:
        """The window of a device that holds `own` columns, which `v_names` shard."""
        stride, strides = own, {}
        for name in reversed(v_names):
            strides[name] = stride
            stride *= lax.axis_size(name)
        tensor = [name for name in v_names if name in axes.tensor]
        bases = jnp.asarray(sum(lax.axis_index(n) * strides[n] for n in tensor), jnp.int32).reshape(1)
        for name in v_names:  # in the order in which a gather concatenates them
            if name not in tensor:
                places = strides[name] * jnp.arange(lax.axis_size(name), dtype=jnp.int32)
                bases = (bases[:, None] + places[None]).reshape(-1)
        held, padding = own * (1 if each else bases.shape[0]), vocab_size < stride
        if tensor or not axes.tensor:
            return cls(bases, own, each, 0, held, 0, vocab_size, padding, stored)
        shards, index = axes.size(axes.tensor), axes.index(axes.tensor)  # which hold the same columns
        count = -(-held // shards)
        start = jnp.minimum(index * count, held - count)
        return cls(bases, own, each, start, count, index * count, vocab_size, padding or held % shards != 0, stored)

    def block(self, i: Index, size: int) -> tuple[Index, Columns]:
        """The place of block i among the columns held, and its columns. A last block overlaps the one before it."""
        start = self.start + jnp.minimum(i * size, self.total - size) if size < self.total else self.start
        at, pieces = start + jnp.arange(size, dtype=jnp.int32), self.bases.shape[0]
        own = (at >= self.before) & (at >= self.start + i * size)
        if self.each:
            ids, own = (self.bases[:, None] + at[None]).reshape(-1), jnp.tile(own, pieces)
        else:
            ids = self.bases[0] + at if pieces == 1 else self.bases[at // self.own] + at % self.own
        masked = self.masked or self.total % size
        return start, Columns(ids, own & (ids < self.vocab_size) if masked else None, pieces > 1, self.stored)


def parts_of(call: HeadCall, held: int) -> int:
    """How many of 8 equal parts of the vocabulary a device works on; 0 if they do not end where its columns end."""
    shards = call.axes.size(call.axes.tensor)
    whole = held if call.shared else held * shards
    return PARTS // shards if call.deterministic and not (PARTS % shards or whole % PARTS or call.gathered_v) else 0


def axes_of(call: HeadCall, arrays: Any) -> Axes:
    """The axes along which anything differs."""
    return frozenset().union(*map(varying, jax.tree.leaves(arrays)), call.axes.tensor)


def whole_parameter(call: HeadCall, k: int, axes: Axes, p: jax.Array) -> jax.Array:
    """Columns of a parameter as a device multiplies them, from these columns as devices hold them; linear."""
    if k == 0 and call.h_names:
        p = lax.all_gather(p, call.h_names, axis=1 - call.v_dim, tiled=True)
    if call.gathered_v:
        p = lax.all_gather(p, call.gathered_v, axis=call.v_dim, tiled=True)
    return vary(p, axes)


def whole_features(call: HeadCall, axes: Axes, x: jax.Array) -> jax.Array:
    """The features of all N tokens, from those that a device holds, `[R, T, f]`; linear."""
    if call.sequence_parallel:
        x = lax.all_gather(x, call.axes.tensor, axis=1, tiled=True)
    return vary(x.reshape(-1, x.shape[2]), axes)


def back(whole: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], axes: Axes, gradient: jax.Array) -> jax.Array:
    """The gradient of an array that varies over `axes`, from that of whole(it): JAX's transpose, in its dtype."""
    _, pull = jax.vjp(whole, vary(jnp.zeros(shape, gradient.dtype), axes))
    return pull(gradient)[0]


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    if x.dtype == jnp.float32 and dtype == jnp.bfloat16:  # else XLA for TPUs would see the conversion, and sum in bf16
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


class Order(NamedTuple):
    """Tokens that count before the others."""

    places: jax.Array | None  # i32[N]; None if all tokens stay where they are
    inverse: jax.Array | None
    tokens: int  # N
    counted: Index  # how many count
    most: Index  # the largest such number of the devices whose loops take equally many turns

    @classmethod
    def of(cls, call: HeadCall, counts: jax.Array | None, count: int, equal: Axes) -> Order:
        """The order of `count` tokens. Along the axes `equal` all devices count as many: loops may hold collectives."""
        if counts is None or not call.follow_mask:
            return cls(None, None, count, count, count)
        total = counts.sum(dtype=jnp.int32)
        places = vary(jnp.argsort(~counts, stable=True).astype(jnp.int32), varying(counts))  # its type loses the axes
        inverse = vary(jnp.argsort(places).astype(jnp.int32), varying(counts))
        names = tuple(sorted(equal & varying(total)))
        return cls(places, inverse, count, total, lax.pmax(total, names) if names else total)

    def put(self, tree: Tree, size: int) -> Tree:
        """Arrays `[N, ...]` in order, with rows of 0 added up to `size`."""
        moved = tree if self.places is None else jax.tree.map(partial(rows_at, self.places), tree)
        return jax.tree.map(lambda x: jnp.pad(x, ((0, size - x.shape[0]), *[(0, 0)] * (x.ndim - 1))), moved)

    def take_back(self, tree: Tree) -> Tree:
        tree = jax.tree.map(lambda x: x[: self.tokens], tree)
        return tree if self.inverse is None else jax.tree.map(partial(rows_at, self.inverse), tree)


def rows_at(places: jax.Array, x: jax.Array) -> jax.Array:
    """x[places] by a start in all dimensions: XLA for a v6e cannot compile x[places] @ kernel if x has 15 to 16 MiB."""
    starts = lax.expand_dims(places, (1,))
    starts = starts if x.ndim == 1 else lax.pad(starts, np.int32(0), ((0, 0, 0), (0, x.ndim - 1, 0)))
    dims = lax.GatherDimensionNumbers(tuple(range(1, x.ndim)), (0,), tuple(range(x.ndim)))
    return lax.gather(x, starts, dims, (1, *x.shape[1:]), mode="promise_in_bounds")


def slice_of(x: jax.Array, start: Index, size: int, dim: int = 0, carry: bool = False) -> jax.Array:
    """`size` entries of a dimension from `start` on, which must lie inside: a slice beyond the end would start earlier.

    With `carry` a bf16 array is moved as bits: XLA for CPUs would convert all of it to f32 and back in a loop's turns.
    """
    if size == x.shape[dim]:
        return x
    assert x.shape[dim] > size, "blocks divide what is padded for them"
    if not carry or x.dtype != jnp.bfloat16:
        return lax.dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)
    x, start = lax.optimization_barrier((x, jnp.asarray(start, jnp.int32)))
    found = lax.dynamic_slice_in_dim(as_bits(x), start, size, dim, allow_negative_indices=False)
    return as_bits(found, jnp.bfloat16)


def put_slice(x: jax.Array, part: jax.Array, start: Index, dim: int = 0) -> jax.Array:
    """x with `part` written along a dimension from `start` on; x may hold the bits of a bf16 array."""
    part = as_bits(part) if x.dtype == jnp.uint16 else part
    if part.shape == x.shape:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, start, dim, allow_negative_indices=False)


def as_bits(x: jax.Array, dtype: Any = jnp.uint16) -> jax.Array:
    """The bits of a bf16 array, or the bf16 array of bits; other arrays as they are."""
    return lax.bitcast_convert_type(x, dtype) if {x.dtype, jnp.dtype(dtype)} == _BITS else x
