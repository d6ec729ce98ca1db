"""The products that wait for a walk: gradients of features and of parameters, from those of all
tiles' raw logits.

They follow the mask: rows after the last chunk that counts are not multiplied, but for what a part
rounds up to. A device's gradient is its term of a sum over devices. `sums.py` asks for it piece by
piece along one dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.door import Local, whole_features
from jaxppo.head.order import Index, read, where_counts
from jaxppo.head.quantized import QuantizedArray
from jaxppo.head.sums import Starts, Term, in_order, scattered, summed
from jaxppo.head.tile import feature_gradient, parameter_gradient, rounded
from jaxppo.head.walk import Work
from jaxppo.sharding import vary, varying

PIECES = 4  # of a sum over devices: the product of one is computed beside the sum of another


def late_products(work: Work, local: Local, d_raw: jax.Array) -> Local:
    """The cotangents of `local` from d_raw, `[N', V]`."""
    dfeatures = []
    for k, primal in enumerate(local.features):
        total = sum_features(work, partial(feature_term, work, k, d_raw), primal)
        dfeatures.append(feature_cotangent(work, total, primal))
    dparameters = [
        parameter_cotangent(work, k, primal, d_raw) for k, primal in enumerate(local.parameters)
    ]
    return Local(tuple(dfeatures), tuple(dparameters), None, None)


def feature_term(work: Work, k: int, d_raw: jax.Array, starts: Starts, size: int) -> jax.Array:
    """The gradient of features k of some tokens, f32; anything where nothing is written."""

    def product(start: Index, rows: int) -> jax.Array:
        # XLA for TPUs would copy rows that are read outside of the branch
        gradient = feature_gradient(work.call, k, read(d_raw, start, rows), work.parameters[k])
        return jnp.pad(gradient, ((0, size - rows), (0, 0)))

    gradients = []
    for start in starts:
        of_rows = partial(product, start)
        if size == work.rows:
            gradients.append(of_written(work, of_rows))
        elif isinstance(work.turns, int):
            gradients.append(of_rows(size))
        else:
            is_written = start < work.turns * work.chunk
            gradients.append(lax.cond(is_written, partial(of_rows, size), partial(of_rows, 0)))
    return jnp.concatenate(gradients)


def sum_features(work: Work, term: Term, primal: jax.Array) -> jax.Array:
    """The gradient of features of all tokens in order, `[N', f]`, summed over the axes that the
    features lack.

    It is no sum yet, and f32, if each device holds the features of some positions: then
    `feature_cotangent` sums it.
    """
    if work.call.sequence_parallel:
        return where_counts(work.counts, term((0,), work.rows))
    names = in_order(work.mesh_axes - varying(primal))
    total = summed(term, 0, work.rows, names, primal.dtype, work.call.profile.ring, PIECES)
    return where_counts(work.counts, total)


def feature_cotangent(work: Work, total: jax.Array, primal: jax.Array) -> jax.Array:
    """The gradient of features at the places and in the shape that the caller gave them."""
    total = work.order.take_back(total)
    if not work.call.sequence_parallel:
        return total.reshape(primal.shape)
    like = vary(jnp.zeros(primal.shape, total.dtype), varying(primal))
    # the transpose of a gather is a sum, of which each device keeps its part
    _, pull = jax.vjp(partial(whole_features, work.call, work.mesh_axes), like)
    (cotangent,) = pull(total)
    return rounded(cotangent, primal.dtype)


def parameter_cotangent(
    work: Work, k: int, primal: Any, d_raw: jax.Array, pieces: int = PIECES
) -> Any:
    """The gradient of the columns of parameter k that `d_raw` is of, summed over devices in so many
    pieces.

    None for a kernel that is quantised already.
    """
    if isinstance(primal, QuantizedArray):
        return None
    features = work.features[k]
    if isinstance(features, QuantizedArray):
        features = features.dequantized(work.dtype)
    if cut_dim(work, k) != work.call.v_dim:
        term: Term = partial(_features_term, work, k, features, d_raw)
        return sum_parameter(work, k, term, primal, features.shape[1], pieces)
    dtype = jnp.float32
    if work.mesh_axes <= varying(primal):
        dtype = primal.dtype  # no sum follows
    term = partial(_columns_term, work, k, features, d_raw, dtype)
    return sum_parameter(work, k, term, primal, d_raw.shape[1], pieces)


def _columns_term(
    work: Work, k: int, features: jax.Array, d_raw: jax.Array, dtype: Any, starts: Starts, size: int
) -> jax.Array:
    """The gradient of some columns of parameter k."""

    def product(rows: int) -> jax.Array:
        gradients = []
        for start in starts:
            # one slice cuts rows and columns: between two XLA for TPUs would write a copy
            part = lax.dynamic_slice(d_raw, (0, start), (rows, size), allow_negative_indices=False)
            gradients.append(parameter_gradient(work.call, k, part, features[:rows], dtype))
        return jnp.concatenate(gradients, work.call.v_dim)

    return of_written(work, product)


def _features_term(
    work: Work, k: int, features: jax.Array, d_raw: jax.Array, starts: Starts, size: int
) -> jax.Array:
    """The gradient of some features of parameter k; one product for all starts, since it reads
    all of `d_raw`.
    """

    def product(rows: int) -> jax.Array:
        x = []
        for start in starts:
            x.append(
                lax.dynamic_slice(features, (0, start), (rows, size), allow_negative_indices=False)
            )
        return parameter_gradient(work.call, k, d_raw[:rows], jnp.concatenate(x, 1))

    return of_written(work, product)


def of_written(work: Work, product: Callable[[int], jax.Array]) -> jax.Array:
    """product(rows), with the number of rows that are written."""
    if isinstance(work.turns, int):
        return product(work.rows)
    written = [*range(0, work.rows, work.chunks_of_part * work.chunk), work.rows]
    return lax.switch(
        -(-work.turns // work.chunks_of_part), [partial(product, rows) for rows in written]
    )


def sum_parameter(
    work: Work, k: int, term: Term, primal: jax.Array, length: int, pieces: int = PIECES
) -> jax.Array:
    """The sum over devices of terms of the gradient of parameter k, cut along `cut_dim`, in the
    parameter's dtype.
    """
    call = work.call
    dim = cut_dim(work, k)
    names = in_order(work.mesh_axes - varying(primal))
    if call.gradient_sum_dtype == "parameter":
        term = partial(_rounded_term, term, primal.dtype)
    if dim != call.v_dim:
        return scattered(term, dim, length, call.h_names, names, primal.dtype, call.profile.ring)
    return summed(term, dim, length, names, primal.dtype, call.profile.ring, pieces)


def _rounded_term(term: Term, dtype: Any, starts: Starts, size: int) -> jax.Array:
    return rounded(term(starts, size), dtype)


def cut_dim(work: Work, k: int) -> int:
    """The dimension of parameter k along which its gradient is computed in pieces: features if
    FSDP shards these.
    """
    if k == 0 and work.call.h_names:
        return 1 - work.call.v_dim
    return work.call.v_dim
