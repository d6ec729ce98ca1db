"""The second of two passes: blocks of columns by all tokens, so that only the gradients of a
block's logits exist.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.columns import block_of
from jaxppo.head.door import Local
from jaxppo.head.late import feature_cotangent, parameter_cotangent, sum_features
from jaxppo.head.order import Index, loop, read, write
from jaxppo.head.quantized import QuantizedArray
from jaxppo.head.sums import stored
from jaxppo.head.tile import feature_gradient, raw_logits
from jaxppo.head.walk import Chunk, Work, gradient_of_raw
from jaxppo.sharding import vary, varying

SumsOfRaw = Callable[[jax.Array], Any]  # the sums of a tile as a function of its raw logits
# sums_at(work of a block, its first column, i, chunk i, what `by_token` has of its tokens): the
# sums of the tile, and their cotangents
SumsAt = Callable[[Work, Index, Index, Chunk, Any], tuple[SumsOfRaw, Any]]


def second_pass(work: Work, local: Local, width: int, by_token: Any, sums_at: SumsAt) -> Local:
    """The cotangents of `local`, in blocks of `width` columns.

    `by_token` are arrays `[N', ...]` of tokens in order.
    """
    V = work.columns.width
    v_dim = work.call.v_dim

    def one_block(b: Index, carry: Any) -> Any:
        dfeatures, dparameters = carry
        # the last block overlaps the one before it: there its gradients are 0
        start = jnp.minimum(b * width, V - width)
        columns = block_of(work.columns, start, width, b * width)
        block = work._replace(
            parameters=read(work.parameters, start, width, v_dim), columns=columns
        )
        d_raw = work.vary(lax.empty((work.rows, width), work.dtype))
        write_tile = partial(_write_tile, block, partial(sums_at, block, start), by_token)
        dfeatures, d_raw = loop(work.turns, write_tile, (dfeatures, d_raw))
        added = [
            parameter_cotangent(block, k, primal, d_raw, pieces=1)
            for k, primal in enumerate(local.parameters)
        ]
        before = read(dparameters, start, width, v_dim)
        return dfeatures, write(
            dparameters, jax.tree.map(jnp.add, before, tuple(added)), start, v_dim
        )

    dfeatures = work.vary(tuple(jnp.zeros(feature.shape, jnp.float32) for feature in work.features))
    zeros: list[Any] = []
    for parameter in local.parameters:
        if isinstance(parameter, QuantizedArray):
            zeros.append(None)
        else:
            zeros.append(vary(jnp.zeros(parameter.shape, parameter.dtype), varying(parameter)))
    dfeatures, dparameters = loop(-(-V // width), one_block, (dfeatures, tuple(zeros)))
    feature_cotangents = []
    for dfeature, primal in zip(dfeatures, local.features, strict=True):
        total = sum_features(work, partial(stored, dfeature, 0), primal)
        feature_cotangents.append(feature_cotangent(work, total, primal))
    return Local(tuple(feature_cotangents), dparameters, None, None)


def _write_tile(
    block: Work, sums_at: Callable[..., Any], by_token: Any, i: Index, carry: Any
) -> Any:
    """Writes the gradients of the products of one tile, chunk i by a block, and adds those of
    features.
    """
    dfeatures, d_raw = carry
    call = block.call
    C = block.chunk
    chunk = block.read(i)
    raw = raw_logits(call, chunk.features, block.parameters)
    sums_of, dsums = sums_at(i, chunk, read(by_token, i * C, C))
    # without a barrier XLA for TPUs computes it in both products that read it
    tile_d_raw = lax.optimization_barrier(gradient_of_raw(block, raw, sums_of, dsums))
    gradients = []
    for k, before in enumerate(read(dfeatures, i * C, C)):
        gradients.append(before + feature_gradient(call, k, tile_d_raw, block.parameters[k]))
    dfeatures = block.vary(write(dfeatures, tuple(gradients), i * C))
    return dfeatures, write(d_raw, block.vary(tile_d_raw), i * C)
