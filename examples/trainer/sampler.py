"""Sampling with a key-value cache: one compiled program for the whole response, on the same mesh
as training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from examples.trainer.attention import Attend, attention, ordered_attention
from examples.trainer.model import Config, Model, head_of
from examples.trainer.tasks import Tokenizer
from jaxppo import ParallelMesh, log_probs_from_hidden
from jaxppo.batch.trees import Paths


class Responses(NamedTuple):
    """What was sampled: tokens up to and including the end of text, their log-probs, and a mask
    of where they are.
    """

    tokens: Int[Array, "B M"]
    log_probs: Float[Array, "B M"]
    mask: Bool[Array, "B M"]


Sampler = Callable[..., Responses]
Place = Callable[..., jax.Array]
Over = Callable[[Paths, Paths], Attend]  # attention of queries to keys


class Cache(NamedTuple):
    """Keys and values `[B, slots, N, D]` of each layer, and what each slot holds: segment 1 is a
    token, 0 is empty.
    """

    layers: tuple[tuple[jax.Array, jax.Array], ...]
    segments: Int[Array, "B slots"]
    positions: Int[Array, "B slots"]


def rows_spec(parallel: ParallelMesh) -> P:
    """The PartitionSpec of responses: each is one row, and context shards serve as further data
    shards.
    """
    return P(parallel.data + parallel.context or None)


@functools.cache
def make_sampler(
    graphdef: nnx.GraphDef,
    config: Config,
    parallel: ParallelMesh,
    prompt_length: int,
    response_length: int,
    ends: tuple[int, ...] = (Tokenizer.end,),
    common: int = 0,
) -> Sampler:
    """`sample(variables, prompts [B, P], lengths [B], key, temperature, copies) -> Responses`,
    jitted; the same function for the same arguments.

    Each prompt has `copies` responses, which follow one another: it is read once, and its keys and
    values are copied. The first `common` tokens are the same in all prompts, and are read once for
    all. Temperature 0 is greedy. `variables` are the states of the model's parameters.

    Prompts are padded on the right to P, and keys and values of response token i go to slot P + i.
    Attention tells slots apart by segment and position, as it does the tokens of a packed training
    row. Log-probs are those of the trainer's function, so that the head gives both the same bits
    for the same hidden state.
    """
    rows = rows_spec(parallel)
    by_row = dataclasses.replace(
        parallel,
        data=parallel.data + parallel.context,
        context=None,
        context_layout="contiguous",
        sequence_parallel=False,
    )
    tensor = parallel.logits_spec[2]

    place = _placing(parallel, *rows)
    place_one = _placing(parallel, None)  # a single row, which all shards of the data hold

    def over(queries: Paths, keys: Paths) -> Attend:
        if config.slots is None:
            return partial(attention, queries=queries, keys=keys)
        return ordered_attention(queries, keys, config.slots, parallel)

    def start(lengths: jax.Array, place: Place) -> Cache:
        return _empty_cache(config, prompt_length, response_length, lengths, place, tensor)

    def read(model: Model, prompts: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Cache]:
        """The hidden states `[B, 1, H]` of the prompts' last tokens, and their keys and values."""
        cache = start(lengths, place)
        if common:
            begun = start(jnp.full(1, common, jnp.int32), place_one)
            _, begun = _extend(model, begun, prompts[:1, :common], 0, place_one, tensor, over)
            cache = cache._replace(layers=_copies(begun, len(lengths), place, tensor))
        hidden, cache = _extend(model, cache, prompts[:, common:], common, place, tensor, over)
        return jnp.take_along_axis(hidden, lengths[:, None, None] - 1 - common, axis=1), cache

    @partial(jax.jit, static_argnums=5)
    def sample(
        variables: tuple[nnx.State, ...],
        prompts: jax.Array,
        lengths: jax.Array,
        key: jax.Array,
        temperature: jax.Array,
        copies: int,
    ) -> Responses:
        model: Model = nnx.merge(graphdef, *variables)
        last, cache = jax.tree.map(
            lambda x: jnp.repeat(x, copies, axis=0), read(model, prompts, lengths)
        )

        def step(carry: Any, i: jax.Array) -> Any:
            hidden, cache, done = carry
            logits = place(model.logits(hidden[:, 0]), None)
            token, log_prob = _choose(
                model, config, hidden, logits, jax.random.fold_in(key, i), temperature, by_row
            )
            emitted = Responses(
                jnp.where(done, Tokenizer.pad, token), jnp.where(done, 0.0, log_prob), ~done
            )
            cache = cache._replace(segments=cache.segments.at[:, prompt_length + i].set(1))
            hidden, cache = _extend(
                model, cache, token[:, None], prompt_length + i, place, tensor, over
            )
            return (hidden, cache, done | jnp.isin(token, jnp.array(ends))), emitted

        carry = (last, cache, jnp.zeros(len(last), bool))
        _, emitted = lax.scan(step, carry, jnp.arange(response_length))
        return jax.tree.map(lambda x: x.T, emitted)

    return sample


def _placing(parallel: ParallelMesh, rows: Any) -> Place:
    """Puts the rows of arrays over these axes, and their other dimensions over the given ones."""

    def place(x: jax.Array, *dims: Any) -> jax.Array:
        return lax.with_sharding_constraint(x, parallel.sharding(P(rows, *dims)))

    return place


def _copies(cache: Cache, count: int, place: Place, tensor: Any) -> tuple[Any, ...]:
    """The keys and values of a single row for so many rows."""

    def copies(x: jax.Array) -> jax.Array:
        return place(jnp.repeat(x, count, 0), None, tensor, None)

    return tuple((copies(keys), copies(values)) for keys, values in cache.layers)


def _empty_cache(
    config: Config,
    prompt_length: int,
    response_length: int,
    lengths: jax.Array,
    place: Place,
    tensor: Any,
) -> Cache:
    """Room for keys and values of prompts of these lengths and their responses, with the
    segments of the prompts.
    """
    slots = jnp.arange(prompt_length + response_length)[None]
    empty = jnp.zeros((*lengths.shape, slots.size, config.kv_heads, config.head_dim), config.dtype)
    positions = jnp.where(slots < prompt_length, slots, lengths[:, None] + slots - prompt_length)
    segments = (slots < lengths[:, None]).astype(jnp.int32)
    layer = (place(empty, None, tensor, None),) * 2
    return Cache((layer,) * config.layers, segments, positions)


def _choose(
    model: Model,
    config: Config,
    hidden: jax.Array,
    logits: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    parallel: ParallelMesh,
) -> tuple[jax.Array, jax.Array]:
    """The token `[B]` that follows hidden states `[B, 1, H]` with these logits, and its
    log-prob.
    """
    if config.logits_dtype == "bfloat16":
        logits = lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=7)
    logits = jnp.where(jnp.arange(config.padded_vocab) < config.vocab_size, logits, -jnp.inf)
    scale = jnp.where(temperature > 0, temperature, 1)
    noise = jnp.where(temperature > 0, jax.random.gumbel(key, logits.shape), 0)
    token = jnp.argmax(logits / scale + noise, axis=-1)
    head = head_of(model, config)
    stats = log_probs_from_hidden(
        hidden, head, token[:, None], parallel=parallel, temperature=scale, deterministic=True
    )
    return token, stats.log_probs[:, 0]


def _extend(
    model: Model,
    cache: Cache,
    tokens: Int[Array, "B n"],
    at: Any,
    place: Place,
    tensor: Any,
    over: Over,
) -> tuple[Float[Array, "B n H"], Cache]:
    """Hidden states of n more tokens in the slots from `at` on, and the cache with their keys
    and values.
    """
    layers = list(cache.layers)
    here = (
        lax.dynamic_slice_in_dim(x, at, tokens.shape[1], 1)
        for x in (cache.segments, cache.positions)
    )
    segments, positions = here
    cached = over(Paths(segments, positions), Paths(cache.segments, cache.positions))

    def attend_in(layer: int) -> Attend:
        def attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            *,
            window: int | None = None,
            scale: float | None = None,
        ) -> jax.Array:
            def write(old, new):
                return place(lax.dynamic_update_slice_in_dim(old, new, at, 1), None, tensor, None)

            layers[layer] = keys, values = write(layers[layer][0], k), write(layers[layer][1], v)
            return cached(q, keys, values, window=window, scale=scale)

        return attend

    hidden = model(tokens, positions, [attend_in(layer) for layer in range(len(layers))])
    return hidden, cache._replace(layers=tuple(layers))
