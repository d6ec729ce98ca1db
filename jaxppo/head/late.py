"""The products behind a walk: the gradients of features and of parameters, from those of the tiles' products.

They follow the mask: rows behind the last chunk that counts are not multiplied, but for what a part rounds up to. Each
is cut along one dimension into terms, `term(starts, size)`, which `sums.py` sums over devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.door import Local, whole_features
from jaxppo.head.order import Index, read, unless
from jaxppo.head.sums import Starts, Term, in_order, scattered, summed
from jaxppo.head.tile import feature_gradient, parameter_gradient, rounded
from jaxppo.head.walk import Work
from jaxppo.sharding import vary, varying

PIECES = 4  # of a sum over devices: the product of one is computed beside the sum of another


def late_products(work: Work, local: Local, dproducts: jax.Array) -> Local:
    """The cotangents of `local` from dproducts, `[N', V]`."""
    features = []
    for k, primal in enumerate(local.features):
        total = sum_features(work, partial(feature_term, work, k, dproducts), primal)
        features.append(feature_cotangent(work, total, primal))
    parameters = [parameter_cotangent(work, k, primal, dproducts) for k, primal in enumerate(local.parameters)]
    return Local(tuple(features), tuple(parameters), None, None)


def feature_term(work: Work, k: int, dproducts: jax.Array, starts: Starts, size: int) -> jax.Array:
    """The gradient of features k of some tokens, f32; anything where nothing is written."""

    def product(start: Index, rows: int) -> jax.Array:
        # XLA for TPUs would copy rows that are read outside of the branch
        gradient = feature_gradient(work.call, k, read(dproducts, start, rows), work.parameters[k])
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
    """The gradient of features of all tokens in order, `[N', f]`, summed over the axes that the features lack.

    It is no sum yet, and f32, if each device holds the features of some positions: then `feature_cotangent` sums it.
    """
    if work.call.sequence_parallel:
        return unless(work.counts, term((0,), work.rows))
    names = in_order(work.mesh_axes - varying(primal))
    total = summed(term, 0, work.rows, names, primal.dtype, work.call.profile.ring, PIECES)
    return unless(work.counts, total)


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


def parameter_cotangent(work: Work, k: int, primal: jax.Array, dproducts: jax.Array, pieces: int = PIECES) -> jax.Array:
    """The gradient of the columns of parameter k that `dproducts` are of, summed over devices in so many pieces."""
    call = work.call
    features = work.features[k]
    dtype = jnp.float32
    if work.mesh_axes <= varying(primal):
        dtype = primal.dtype  # of columns: no sum follows

    # A slice of rows and columns is one: XLA for TPUs would copy what lies between two.
    def of_columns(starts: Starts, size: int) -> jax.Array:
        def product(rows: int) -> jax.Array:
            gradients = []
            for start in starts:
                dx = lax.dynamic_slice(dproducts, (0, start), (rows, size), allow_negative_indices=False)
                gradients.append(parameter_gradient(call, k, dx, features[:rows], dtype))
            return jnp.concatenate(gradients, call.v_dim)

        return of_written(work, product)

    def of_features(starts: Starts, size: int) -> jax.Array:
        def product(rows: int) -> jax.Array:  # one for all starts: it reads all of dproducts
            x = []
            for start in starts:
                x.append(lax.dynamic_slice(features, (0, start), (rows, size), allow_negative_indices=False))
            return parameter_gradient(call, k, dproducts[:rows], jnp.concatenate(x, 1))

        return of_written(work, product)

    if cut_dim(work, k) != call.v_dim:
        return sum_parameter(work, k, of_features, primal, features.shape[1], pieces)
    return sum_parameter(work, k, of_columns, primal, dproducts.shape[1], pieces)


def of_written(work: Work, product: Callable[[int], jax.Array]) -> jax.Array:
    """product(rows), with the number of rows that are written."""
    if isinstance(work.turns, int):
        return product(work.rows)
    written = [*range(0, work.rows, work.part * work.chunk), work.rows]
    return lax.switch(-(-work.turns // work.part), [partial(product, rows) for rows in written])


def sum_parameter(work: Work, k: int, term: Term, primal: jax.Array, length: int, pieces: int = PIECES) -> jax.Array:
    """The sum over devices of terms of the gradient of parameter k, cut along `cut_dim`, in the parameter's dtype."""
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
    """The dimension of parameter k along which its gradient is cut into terms: features if FSDP shards these."""
    if k == 0 and work.call.h_names:
        return 1 - work.call.v_dim
    return work.call.v_dim
