"""Chunks of tokens by all of a device's columns: their statistics, and a loss with the gradients
of raw logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head import statistics
from jaxppo.head.call import HeadCall, Tokens
from jaxppo.head.columns import Columns, columns_of
from jaxppo.head.door import Local, MeshAxes, whole_features, whole_parameter
from jaxppo.head.head import TokenStats
from jaxppo.head.order import Index, Order, Tree, loop, read, where_counts, write
from jaxppo.head.quantized import Quantization, quantized_operands
from jaxppo.head.statistics import Numbers, Reduced
from jaxppo.head.tile import Features, Parameters, logits, raw_logits
from jaxppo.sharding import vary, varying, wider_dtype

# (statistics f32[C], arrays [C, ...] of the same tokens) -> their losses, f32[C]
ChunkLoss = Callable[[TokenStats, Any], jax.Array]


class Chunk(NamedTuple):
    """Some tokens."""

    tokens: Tokens  # [C, ...]
    features: Features  # [C, f]
    counts: jax.Array | None  # bool[C]; None if all count


class Work(NamedTuple):
    """A device's tokens in chunks, those that count first, and its columns."""

    call: HeadCall
    # along which anything differs; features and parameters vary along all of them
    mesh_axes: MeshAxes
    chunk: int  # C, the tokens of a chunk
    rows: int  # N', the tokens of all chunks
    turns: Index  # how many chunks are computed, at least those with a token that counts
    chunks_of_part: int  # parts are computed as a whole
    dtype: Any  # in which the gradients of raw logits are multiplied
    order: Order
    counts: jax.Array | None  # bool[N']; None if all count
    tokens: Tokens  # [N', ...]
    features: Features  # [N', f], 0 where tokens do not count: they may hold NaN
    parameters: Parameters  # [f, V] or [V, f]
    columns: Columns

    @classmethod
    def of(
        cls,
        call: HeadCall,
        local: Local,
        chunk: int,
        *,
        group: int = 1,
        parts: int | None = None,
        together: bool = False,
        follow: bool = True,
    ) -> Work:
        """The work on `local` in chunks of so many tokens.

        Args:
          call, local, chunk: as above.
          group: of so many tokens there are whole groups.
          parts: in which work follows a mask; by default each chunk is one.
          together: all devices take as many turns, as a loop with collectives must.
          follow: False computes all chunks, whether or not their tokens count.
        """
        mesh_axes = varying(local) | set(call.axes.tensor)
        features = tuple(whole_features(call, mesh_axes, feature) for feature in local.features)
        parameters = []
        for k, parameter in enumerate(local.parameters):
            parameters.append(whole_parameter(call, k, mesh_axes, parameter))

        N = features[0].shape[0]
        unit = max(chunk, group)
        rows = -(-N // unit) * unit
        if call.deterministic:
            rows = max(rows, 2 * chunk)  # one turn would be another program, other bits
        chunks = rows // chunk
        chunks_of_part = -(-chunks // (parts or chunks))

        counts = local.counts
        order = Order(N)
        turns: Index = chunks
        # a single chunk keeps tokens in place
        if counts is not None and follow and call.follow_mask and rows > chunk:
            order = Order.of(counts)
            equal = mesh_axes if together else frozenset()
            turns = _turns(counts, chunk, chunks, chunks_of_part, equal)

        if counts is None and rows > N:
            counts = jnp.ones(N, bool)
        counts = order.put(counts, rows)
        tokens = order.put(local.tokens, rows)
        dtype = features[0].dtype
        if call.quantized is None:
            dtype = wider_dtype(dtype, parameters[0].dtype)
        work = cls(
            call=call,
            mesh_axes=mesh_axes,
            chunk=chunk,
            rows=rows,
            turns=turns,
            chunks_of_part=chunks_of_part,
            dtype=dtype,
            order=order,
            counts=counts,
            # 0 of what fills a chunk would be 0 / 0; without a cotangent it may be NaN, as features
            # may
            tokens=tokens._replace(temperature=where_counts(counts, tokens.temperature, 1)),
            features=where_counts(counts, order.put(features, rows)),
            parameters=tuple(parameters),
            columns=columns_of(call.axes, call.vocab_size, local.parameters[0].shape[call.v_dim]),
        )
        if call.quantized is not None:
            work = _quantized(call.quantized, work)
        return work

    def vary(self, tree: Tree, results: bool = False) -> Tree:
        """The arrays as varying along all of `mesh_axes`, as a loop's carry must from its start.

        `results`, which the devices of a tensor axis have in common, vary along the others only.
        """
        mesh_axes = self.mesh_axes
        if results:
            mesh_axes = mesh_axes - set(self.call.axes.tensor)
        return jax.tree.map(lambda array: vary(array, mesh_axes), tree)

    def read(self, i: Index) -> Chunk:
        """Chunk i."""
        return read(Chunk(self.tokens, self.features, self.counts), i * self.chunk, self.chunk)

    def logits(self, raw: jax.Array, tokens: Tokens) -> jax.Array:
        """f32[C, V], from the raw logits of a chunk."""
        return logits(self.call.transform, raw, tokens.temperature, self.columns.valid)


def _quantized(rule: Quantization, work: Work) -> Work:
    """The work with hidden states and kernel rounded."""
    features, parameters = quantized_operands(rule, work.call.v_dim, work.features, work.parameters)
    return work._replace(features=features, parameters=parameters)


def _turns(
    counts: jax.Array, chunk: int, chunks: int, chunks_of_part: int, equal: MeshAxes
) -> jax.Array:
    """How many chunks are computed: the parts that have a token that counts; equally many along
    the axes `equal`.
    """
    counted = counts.sum(dtype=jnp.int32)
    names = tuple(sorted(equal & varying(counted)))
    if names:
        counted = lax.pmax(counted, names)
    turns = -(-counted // (chunks_of_part * chunk)) * chunks_of_part
    # at most all chunks, which tells `audit` how many turns there may be
    return jnp.minimum(turns, chunks)


def sweep(work: Work) -> Reduced:
    """The numbers of all tokens over the device's columns, in order."""
    return over_chunks(work, lambda i: numbers_of_chunk(work, i)[0])


def numbers_of_chunk(work: Work, i: Index) -> tuple[Reduced, jax.Array]:
    """The numbers of a chunk over the device's columns, and its products, f32 `[C, V]`."""
    call = work.call
    chunk = work.read(i)
    raw = raw_logits(call, chunk.features, work.parameters)
    z = work.logits(raw, chunk.tokens)
    reduced = statistics.reduce_columns(
        call.asked, z, chunk.tokens, work.columns, gathers=call.profile.gathers
    )
    return work.vary((reduced, raw))


def over_chunks(
    work: Work, of_chunk: Callable[[Index], Tree], new: Callable[..., jax.Array] = jnp.zeros
) -> Tree:
    """Arrays `[N', ...]` of all tokens from those of each chunk, of_chunk(i).

    Where no chunk is computed they are as `new(shape, dtype)` makes them, by default 0.
    """

    def write_chunk(i: Index, arrays: Tree) -> Tree:
        return write(arrays, of_chunk(i), i * work.chunk)

    like = jax.eval_shape(of_chunk, 0)
    arrays = jax.tree.map(lambda array: new((work.rows, *array.shape[1:]), array.dtype), like)
    return loop(work.turns, write_chunk, work.vary(arrays))


def one_pass(
    work: Work, loss: ChunkLoss, per_token: Any
) -> tuple[tuple[jax.Array, TokenStats], jax.Array]:
    """The losses and statistics of all tokens in order, and the gradients of their products,
    `[N', V]`.

    `per_token` are arrays `[N', ...]` in order. Nothing is written into the rows of chunks that are
    not computed.
    """

    C = work.chunk

    def write_chunk(i: Index, carry: Any) -> Any:
        results, d_raw = carry
        chunk_results, chunk_d_raw = _loss_of_chunk(
            work, work.read(i), loss, read(per_token, i * C, C)
        )
        results = write(results, work.vary(chunk_results, results=True), i * C)
        return results, write(d_raw, work.vary(chunk_d_raw), i * C)

    stats = statistics.zero_stats(work.call.asked, work.tokens, work.rows)
    results = work.vary((stats.log_probs, stats), results=True)
    # XLA for TPUs would take 7 million cycles to fill it with zeros, at 8192 tokens by 37984
    # columns
    d_raw = work.vary(lax.empty((work.rows, work.columns.width), work.dtype))
    return loop(work.turns, write_chunk, (results, d_raw))


def _loss_of_chunk(
    work: Work, chunk: Chunk, loss: ChunkLoss, per_token: Any
) -> tuple[tuple[jax.Array, TokenStats], jax.Array]:
    """The losses and statistics of a chunk, and the gradient of its products, `[C, V]`."""
    call = work.call
    raw = raw_logits(call, chunk.features, work.parameters)  # f32[C, V]
    z = work.logits(raw, chunk.tokens)
    shard_numbers = statistics.reduce_columns(
        call.asked, z, chunk.tokens, work.columns, gathers=call.profile.gathers
    )
    reduced = statistics.over_devices(work.vary(shard_numbers), call.axes)

    def losses_of(sums: Numbers) -> Any:
        stats = statistics.stats_of_numbers(
            call.asked, reduced, chunk.tokens, call.vocab_size, sums
        )
        return where_counts(chunk.counts, (loss(stats, per_token), stats))

    sums = statistics.with_gradients(call.asked, reduced.sums)
    losses, pull, stats = jax.vjp(losses_of, sums, has_aux=True)
    (dsums,) = pull(jnp.ones_like(losses))
    sums_of_raw = partial(tile_sums, work, reduced.peaks, chunk.tokens)
    return (losses, stats), gradient_of_raw(
        work, raw, sums_of_raw, where_counts(chunk.counts, dsums)
    )


def tile_sums(work: Work, peaks: Numbers, tokens: Tokens, raw: jax.Array) -> Numbers:
    """The sums of a tile through which a gradient flows, from its products."""
    z = work.logits(raw, tokens)
    return statistics.sums_of(work.call.asked, z, peaks, tokens, work.columns, differentiated=True)


def gradient_of_raw(
    work: Work, raw: jax.Array, sums_of: Callable[[jax.Array], Any], dsums: Any
) -> jax.Array:
    """The gradient of a tile's products, in the dtype of products: JAX differentiates the sums
    over its columns.
    """
    sums, pull = jax.vjp(sums_of, raw)
    dsums = jax.tree.map(lambda cotangent, like: vary(cotangent, varying(like)), dsums, sums)
    (tile_d_raw,) = pull(dsums)
    return tile_d_raw.astype(work.dtype)
