"""Deterministic calls: the vocabulary in eighths, so that sums have one order on any tensor axis.

Products have one shape on 1, 2, 4 and 8 devices. Two eighths are merged at a time, in the same
pairs: first those of a device, then the results of all devices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.columns import Columns
from jaxppo.head.order import Index, read, write
from jaxppo.head.statistics import Reduced, first_of, rescaled
from jaxppo.head.walk import Work, sweep
from jaxppo.sharding import note, vary


def sweep_in_eighths(work: Work) -> Reduced:
    """The numbers of all tokens over the whole vocabulary, in order."""
    call = work.call
    count = call.eighths
    width = work.columns.width // count

    def write_eighth(i: Index, reduced: Reduced) -> Reduced:
        start = i * width
        columns = Columns(work.columns.first + start, width)
        if work.columns.valid is not None:
            # not read from the array of all: on tp=8 XLA for CPUs made another program of that,
            # with other bits
            columns = columns._replace(valid=columns.ids < call.vocab_size)
        parameters = read(work.parameters, start, width, call.v_dim)
        eighth = sweep(work._replace(parameters=parameters, columns=columns))
        return write(reduced, jax.tree.map(lambda array: array[None], eighth), i)

    like = jax.eval_shape(partial(sweep, work))
    zeros = work.vary(
        jax.tree.map(lambda array: jnp.zeros((count, *array.shape), array.dtype), like)
    )
    # XLA would leave out a loop of one turn, and the rest is another program with other bits: it
    # gets a number of turns that it does not know
    turns = jnp.minimum(lax.optimization_barrier(jnp.int32(count)), count)
    with note("eighths of the vocabulary, whatever the tensor axis"):
        reduced = _merged(lax.fori_loop(0, turns, write_eighth, zeros))
        names = call.axes.tensor
        if not names:
            return reduced
        return _merged(
            jax.tree.map(
                lambda array: lax.all_gather(vary(array, names), names, to="invarying"), reduced
            )
        )


def _merged(reduced: Any) -> Reduced:
    """The numbers `[n, N', ...]` over n sets of columns as those over all of them."""
    while reduced.peaks["m"].shape[0] > 1:
        even = jax.tree.map(lambda array: array[0::2], reduced)
        odd = jax.tree.map(lambda array: array[1::2], reduced)
        reduced = lax.optimization_barrier(_merged_pair(even, odd))
    return jax.tree.map(lambda array: array[0], reduced)


def _merged_pair(left: Reduced, right: Reduced) -> Reduced:
    """The numbers over two disjoint sets of columns of the same tokens."""
    peaks = jax.tree.map(jnp.maximum, left.peaks, right.peaks)
    left_sums = rescaled(left.sums, left.peaks, peaks)
    right_sums = rescaled(right.sums, right.peaks, peaks)
    sums = jax.tree.map(jnp.add, left_sums, right_sums)
    if left.top is None or right.top is None:
        return Reduced(peaks, sums)
    z = jnp.concatenate([left.top[0], right.top[0]], axis=-1)
    ids = jnp.concatenate([left.top[1], right.top[1]], axis=-1)
    return Reduced(peaks, sums, first_of(z, ids, left.top[0].shape[-1]))
