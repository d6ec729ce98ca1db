"""The border between a caller's arrays and the walks over tiles, which know one device's tokens and columns.

What a device holds becomes what it works on by linear functions in plain JAX: positions and FSDP shards are gathered,
padding is zeroed. Their gradients: `ring.summed` sums over devices, and scatters what FSDP gathers over H; `back`
transposes the other gathers, in f32.

`varying(x)` is the set of mesh axes along which devices hold different x, by its type. `vary(x, axes)` adds axes to
that type and sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxppo.head.call import HeadCall, Inputs, Names, with_nuclei
from jaxppo.head.reductions import Columns, Tokens
from jaxppo.head.tile import Features, Parameters, low_rank, low_rank_by_row
from jaxppo.sharding import vary, vary_like, varying

Axes = frozenset[str]
Index = int | jax.Array  # a scalar
Tree = TypeVar("Tree")  # a pytree of arrays
PARTS = 8  # equal parts of the vocabulary, whose sums are merged in one order on any tensor axis


class Local(NamedTuple):
    """The arrays of a call on a device. Features may be shards by position, parameters are shards of the vocabulary."""

    features: Features  # [R, T, f]
    parameters: Parameters
    tokens: Tokens  # [N, ...]
    counts: jax.Array | None  # bool[N]

    def size(self, call: HeadCall) -> int:
        """N."""
        R, T = self.features[0].shape[:2]
        return int(R * T * (call.axes.size(call.axes.tensor) if call.sequence_parallel else 1))


def local(call: HeadCall, inputs: Inputs) -> Local:
    """Adapters and bias as further products, and tokens flat. JAX differentiates it."""
    if call.copied:
        of_head = {name: getattr(inputs, name) for name in ("kernel", "bias", "lora_a", "lora_b")}
        inputs = inputs._replace(**jax.tree.map(lambda x: x[0], of_head))
    hidden, counts = inputs.hidden, None if inputs.counts is None else inputs.counts.astype(bool)
    (R, T), axes = hidden.shape[:2], call.axes
    N = R * T * (axes.size(axes.tensor) if call.sequence_parallel else 1)
    products = [(hidden, inputs.kernel)]
    if inputs.lora_a is not None:
        if counts is not None:  # hidden states of the others may hold NaN, and 0 times it is NaN in the gradient of a
            own = slice_of(counts, axes.index(axes.tensor) * T, T, 1) if call.sequence_parallel else counts
            hidden = cleaned(hidden, own[..., None])
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
    targets = with_nuclei(inputs.targets, inputs.nucleus_ids, call.vocab_size)
    of_tokens = targets, inputs.nucleus_ids, inputs.ids, inputs.temperature
    tokens, counts = jax.tree.map(
        lambda x: x.reshape(N, *x.shape[2:]) if x.ndim > 1 else jnp.broadcast_to(x, N), (of_tokens, counts)
    )
    if counts is None and call.deterministic:  # the same program with a mask and without
        counts = jnp.ones(N, bool)
    tokens = (unless(counts, x, fill) for x, fill in zip(tokens, (0, -1, -1, 1), strict=True))  # may hold anything
    tokens = lax.stop_gradient(Tokens(*tokens))
    # if devices share hidden states but not targets, JAX sums the gradients of hidden states over these devices
    names = frozenset().union(*map(varying, jax.tree.leaves((tokens, counts))))
    return Local(tuple(vary(x, names) for x in features), parameters, tokens, counts)


@jax.custom_jvp
def cleaned(x: jax.Array, counts: jax.Array) -> jax.Array:
    """0 where tokens do not count: they may hold NaN. Their gradients are 0 already, and not masked once more."""
    return jnp.where(counts, x, 0)


cleaned.defjvp(lambda x, dx: (found := cleaned(*x), vary_like(dx[0], found)))


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
    return jax.tree.map(
        lambda x: jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(fill, x.dtype)), tree
    )


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
    def of(cls, call: HeadCall, own: int, each: bool) -> Window:
        """The window of a device that holds `own` columns."""
        stride, strides = own, {}
        for name in reversed(call.v_names):
            strides[name] = stride
            stride *= lax.axis_size(name)
        tensor = [name for name in call.v_names if name in call.axes.tensor]
        bases = jnp.asarray(sum(lax.axis_index(n) * strides[n] for n in tensor), jnp.int32).reshape(1)
        for name in call.gathered_v:  # in the order in which a gather concatenates them
            places = strides[name] * jnp.arange(lax.axis_size(name), dtype=jnp.int32)
            bases = (bases[:, None] + places[None]).reshape(-1)
        held, padding = own * (1 if each else bases.shape[0]), call.vocab_size < stride
        stored = not call.profile.whole
        if not call.shared:
            return cls(bases, own, each, 0, held, 0, call.vocab_size, padding, stored)
        count, index = window_size(call, held), call.axes.index(call.axes.tensor)
        duplicates = held % call.axes.size(call.axes.tensor) != 0
        start = jnp.minimum(index * count, held - count)
        return cls(bases, own, each, start, count, index * count, call.vocab_size, padding or duplicates, stored)

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


def window_size(call: HeadCall, held: int) -> int:
    """How many columns a device works on, out of those that it holds: JAX cannot shard what tp does not divide."""
    return -(-held // call.axes.size(call.axes.tensor)) if call.shared else held


def parts_of(call: HeadCall, held: int) -> int:
    """How many of 8 equal parts of the vocabulary a device works on; 0 if parts do not end where devices' columns end.

    In a deterministic call each part is summed apart, in tiles of the same shapes on any number of devices.
    """
    shards = call.axes.size(call.axes.tensor)
    whole = held if call.shared else held * shards
    return PARTS // shards if call.deterministic and not (PARTS % shards or whole % PARTS or call.gathered_v) else 0


def axes_of(call: HeadCall, arrays: Any) -> Axes:
    """The axes along which anything differs."""
    return frozenset().union(*map(varying, jax.tree.leaves(arrays)), call.axes.tensor)


def whole_parameter(call: HeadCall, k: int, axes: Axes) -> Callable[[jax.Array], jax.Array]:
    """The linear map from columns of a parameter as devices hold them to these columns as a device multiplies them."""

    def whole(p: jax.Array) -> jax.Array:
        if k == 0 and call.h_names:
            p = lax.all_gather(p, call.h_names, axis=1 - call.v_dim, tiled=True)
        if call.gathered_v:
            p = lax.all_gather(p, call.gathered_v, axis=call.v_dim, tiled=True)
        return vary(p, axes)

    return whole


def without_padding(call: HeadCall, columns: Columns, p: jax.Array) -> jax.Array:
    """Columns of a parameter, 0 where there is no token: padding may hold NaN."""
    return (
        p if columns.valid is None else jnp.where(jnp.expand_dims(columns.ids < call.vocab_size, 1 - call.v_dim), p, 0)
    )


def whole_features(call: HeadCall, axes: Axes) -> Callable[[jax.Array], jax.Array]:
    """The linear map from features `[R, T, f]` as the device holds them to those of its N tokens."""

    def whole(x: jax.Array) -> jax.Array:
        if call.sequence_parallel:
            x = lax.all_gather(x, call.axes.tensor, axis=1, tiled=True)
        return vary(x.reshape(-1, x.shape[2]), axes)

    return whole


def back(whole: Callable[[jax.Array], jax.Array], like: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient of an array `like` this one, from that of whole(it): JAX's transpose, in that gradient's dtype."""
    _, pull = jax.vjp(whole, vary(jnp.zeros(like.shape, gradient.dtype), varying(like)))
    return pull(gradient)[0]


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    if x.dtype == jnp.float32 and dtype == jnp.bfloat16:  # else XLA for TPUs would see the conversion, and sum in bf16
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


class Order(NamedTuple):
    """Tokens that count before the others."""

    places: jax.Array | None  # i32[N]; None if all tokens stay where they are
    inverse: jax.Array | None
    counted: Index  # how many count
    most: Index  # the largest such number of the devices whose loops take equally many turns

    @classmethod
    def of(cls, call: HeadCall, counts: jax.Array | None, count: int, equal: Axes) -> Order:
        """The order of `count` tokens. Along the axes `equal` all devices count as many: loops may hold collectives."""
        if counts is None or not call.follow_mask:
            return cls(None, None, count, count)
        total = counts.sum(dtype=jnp.int32)
        places = vary(jnp.argsort(~counts, stable=True).astype(jnp.int32), varying(counts))  # its type loses the axes
        inverse = vary(jnp.argsort(places).astype(jnp.int32), varying(counts))
        names = tuple(sorted(equal & varying(total)))
        return cls(places, inverse, total, lax.pmax(total, names) if names else total)

    def put(self, tree: Tree, size: int) -> Tree:
        """Arrays `[N, ...]` in order, with rows of 0 added up to `size`."""
        moved = tree if self.places is None else rows_at(tree, self.places)
        return jax.tree.map(lambda x: jnp.pad(x, ((0, size - x.shape[0]), *[(0, 0)] * (x.ndim - 1))), moved)

    def take_back(self, tree: Tree, count: int) -> Tree:
        tree = jax.tree.map(lambda x: x[:count], tree)
        return tree if self.inverse is None else rows_at(tree, self.inverse)


def rows_at(tree: Tree, places: jax.Array) -> Tree:
    """The rows at these places of all arrays of a pytree."""
    starts = lax.expand_dims(places, (1,))

    def of_array(x: jax.Array) -> jax.Array:
        # a start in all dimensions: XLA for a v6e cannot compile x[places] @ kernel if x has 15 to 16 MiB
        dims = lax.GatherDimensionNumbers(tuple(range(1, x.ndim)), (0,), tuple(range(x.ndim)))
        at = starts if x.ndim == 1 else lax.pad(starts, np.int32(0), ((0, 0, 0), (0, x.ndim - 1, 0)))
        return lax.gather(x, at, dims, (1, *x.shape[1:]), mode="promise_in_bounds")

    found: Tree = jax.tree.map(of_array, tree)
    return found


def slice_of(x: jax.Array, start: Index, size: int, dim: int = 0, carry: bool = False) -> jax.Array:
    """`size` entries of a dimension from `start` on, which must lie inside: a slice beyond the end would start earlier.

    With `carry` a bf16 array is moved as bits. XLA for CPUs would convert all of it to f32 and back in each turn of a
    loop, or before the loop if it may.
    """
    if size == x.shape[dim]:
        return x
    assert x.shape[dim] > size, "blocks divide what is padded for them"
    if not carry or x.dtype != jnp.bfloat16:
        return lax.dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)
    x, start = lax.optimization_barrier((x, jnp.asarray(start, jnp.int32)))
    found = lax.dynamic_slice_in_dim(to_bits(x), start, size, dim, allow_negative_indices=False)
    return from_bits(found, jnp.bfloat16)


def put_slice(x: jax.Array, part: jax.Array, start: Index, dim: int = 0) -> jax.Array:
    """x with `part` written along a dimension from `start` on; x may hold the bits of a bf16 array."""
    part = to_bits(part) if x.dtype == jnp.uint16 else part
    if part.shape == x.shape:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, start, dim, allow_negative_indices=False)


def to_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def count_of(call: HeadCall, own: int) -> int:
    """How many columns a device holds after it has gathered its shards of `own` columns."""
    return own * math.prod(map(lax.axis_size, call.gathered_v))
