"""Scans over a shard's runs of neighbouring positions; only the ends of runs are sent to other
shards.

A flag marks a break between sequences, not a coefficient of 0: a value from beyond the break is
replaced by 0 before any product, so that NaN and inf stay in their sequence, in values and in
gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from ..axes import ShardAxes, vary, vary_like
from .base import Pair, take

# How y_t is computed. GOES_ON: from the neighbour's y. ENDS: y_t = b_t. ENTERS: from the y of the
# next run.
GOES_ON, ENDS, ENTERS = np.int8(0), np.int8(1), np.int8(2)
BLOCK = 128  # positions that a scan takes together: the lanes of a TPU's registers


@dataclasses.dataclass(frozen=True)
class Runs:
    """The P runs of neighbouring positions of each row on this shard: links of G chains of runs
    over all shards.

    Args:
      starts: the local place of each run's first position; absent runs lie anywhere.
      stops: the place behind its last one.
      of_place: the run of each place; P is ordered as [halves, G].
      halves: links of one chain on one shard: shard r has link r and, with two of them, link
        2C-1-r.
      shortest: a number of positions that every run has.
      sequence_ends: the position behind the sequence of each place; None where shards must ask
        others for it.
      links: the segment id at the exit of each run of a chain, 0 for one of padding, or None. Q is
        halves * C.
    """

    starts: Int[Array, "R P"]
    stops: Int[Array, "R P"]
    of_place: Int[Array, "R T"]
    halves: int
    shortest: int
    sequence_ends: Int[Array, "R T"] | None = None
    links: Int[Array, "Q R G"] | None = None


def following(axes: ShardAxes, heads: jax.Array) -> jax.Array:
    """`[R, halves, ...]`: for each run here, the head of the next run in its chain; 0 at the end
    of a chain.
    """
    last = axes.size(axes.context) - 1
    if not last:  # one shard has one run
        return jnp.zeros_like(heads)
    heads = vary(heads, axes.context)
    after_first = axes.permute(heads[:, :1], axes.context, [(r + 1, r) for r in range(last)])
    if heads.shape[1] == 1:
        return after_first
    turn = axes.index(axes.context) == last  # on the last shard a chain goes on in the second half
    after_second = axes.permute(heads[:, 1:], axes.context, [(r, r + 1) for r in range(last)])
    return jnp.concatenate([jnp.where(turn, heads[:, 1:], after_first), after_second], axis=1)


def scan_runs(
    axes: ShardAxes, runs: Runs, ab: Pair, reverse: bool, segment_ids: jax.Array | None
) -> jax.Array:
    """`scan_affine` of this device's shards, `[R, T_local]` each: y = total + product * lead *
    carry in each run.

    total is y as if the run stood alone, and product that of the a since the run's entry. lead is a
    at the entry, and carry is y at the exit of the run before it. Devices gather product and total
    at the exits and, where `runs.links` is None, the links and the leads too.
    """
    a = vary(vary_like(ab[0], ab, segment_ids), axes.context)
    b = vary(vary_like(ab[1], ab, segment_ids), axes.context)
    if segment_ids is None:
        ids = jnp.ones(b.shape, jnp.int32)
    else:
        ids = segment_ids.astype(jnp.int32)
    entries = runs.starts
    exits = runs.stops - 1
    if reverse:
        entries = runs.stops - 1
        exits = runs.starts
    is_entry = jnp.arange(b.shape[1], dtype=jnp.int32)[None] == take(entries, runs.of_place)
    why = jnp.where(is_entry, ENTERS, jnp.where(ids == _before(ids, 1, 1, reverse), GOES_ON, ENDS))
    why = jnp.where(ids > 0, why, ENDS)
    b = jnp.where(ids > 0, b, 0)
    if axes.size(axes.context) == 1:
        return _scan(a, [b], why, 1, reverse)[0]
    product, total = _scan(a, [jnp.where(why == GOES_ON, 0, jnp.ones_like(a)), b], why, 1, reverse)
    reaches = _scan(jnp.ones_like(a), [(why == ENTERS).astype(a.dtype)], why, 1, reverse)[0]
    why = jnp.where(reaches > 0, ENTERS, ENDS)
    ends = _Ends(
        ids=take(ids, entries),
        lead=take(a, entries),
        product=take(product, exits),
        total=take(total, exits),
    )
    if segment_ids is None:
        links = jnp.ones((runs.halves * axes.size(axes.context), b.shape[0], 1), jnp.int32)
        carried = _carried_along(axes, runs, ends, links, reverse)
    elif runs.links is not None:
        carried = _carried_along(axes, runs, ends, runs.links, reverse)
    else:
        link = jnp.where(take(why, exits) == ENTERS, 1, -1) * take(ids, exits)
        carried = _carried_unknown(axes, runs, ends, link, reverse)
    return total + product * jnp.where(why == ENTERS, take(carried, runs.of_place), 0)


class _Ends(NamedTuple):
    """What a run's ends say, `[R, P]` each: the ids and the leads at entries, products and
    totals at exits.
    """

    ids: jax.Array
    lead: jax.Array
    product: jax.Array
    total: jax.Array


def _carried_along(
    axes: ShardAxes, runs: Runs, ends: _Ends, links: jax.Array, reverse: bool
) -> jax.Array:
    """`[R, P]`: lead * carry of each run, where all shards know the links.

    Each run multiplies its own lead.
    """
    is_linked = _is_linked(axes, runs, ends, links, reverse)
    lead = jnp.where(is_linked, ends.lead, 0)
    products, totals = _chains(axes, runs, ends.product * lead, ends.total)
    ys = _scan_chain(products, jnp.ones_like(products), totals, links, reverse)
    return lead * jnp.where(is_linked, _of_previous(axes, runs, ys, reverse), 0)


def _carried_unknown(
    axes: ShardAxes, runs: Runs, ends: _Ends, link: jax.Array, reverse: bool
) -> jax.Array:
    """`[R, P]`: lead * carry of each run, where shards gather links and leads too.

    `link` `[R, P]` is the id at the exit of each run here, negative where y there needs no carry.
    """
    sent = ends.product, ends.total, ends.lead, link.astype(ends.total.dtype)
    products, totals, leads, gathered = _chains(axes, runs, *sent)
    links = gathered.real.astype(ends.ids.dtype)
    ys = _scan_chain(products, leads, totals, links, reverse)
    is_linked = _is_linked(axes, runs, ends, links, reverse)
    carry = jnp.where(is_linked, _of_previous(axes, runs, ys, reverse), 0)
    return jnp.where(is_linked, ends.lead, 0) * carry


def _scan_chain(
    products: jax.Array, leads: jax.Array, totals: jax.Array, links: jax.Array, reverse: bool
) -> jax.Array:
    """`[Q, R, G]`: y at the exits of all runs, from the product, the lead and the total of each."""
    goes_on = (links > 0) & (links == _before(jnp.abs(links), 1, 0, reverse))
    # a lead from beyond a break is replaced before the product, since it may be NaN
    products = products * jnp.where(goes_on, leads, 0)
    return _scan(products, [totals], jnp.where(goes_on, GOES_ON, ENDS), 0, reverse)[0]


def _of_previous(axes: ShardAxes, runs: Runs, chain: jax.Array, reverse: bool) -> jax.Array:
    """`[R, P]` from `[Q, R, G]`: the value of the run before each run here."""
    before = _before(chain, 1, 0, reverse)
    first = axes.index(axes.context)
    links_here = [first, chain.shape[0] - 1 - first][: runs.halves]
    return jnp.concatenate(
        [lax.dynamic_index_in_dim(before, link, keepdims=False) for link in links_here], axis=1
    )


def _is_linked(
    axes: ShardAxes, runs: Runs, ends: _Ends, links: jax.Array, reverse: bool
) -> jax.Array:
    """`bool[R, P]`: whether the run before each run here ends in the same sequence."""
    return (ends.ids > 0) & (ends.ids == _of_previous(axes, runs, jnp.abs(links), reverse))


def _chains(axes: ShardAxes, runs: Runs, *ends: jax.Array) -> jax.Array:
    """`[n, Q, R, G]`: n numbers for each run, `[R, P]` each, gathered from all shards in the
    order of the chains.
    """
    gathered = lax.all_gather(jnp.stack(ends), axes.context, axis=1)  # [n, C, R, P]
    if runs.halves == 1:
        return gathered
    first, second = jnp.split(gathered, 2, axis=3)
    return jnp.concatenate([first, second[:, ::-1]], axis=1)


def _before(x: jax.Array, distance: jax.Array | int, axis: int, reverse: bool) -> jax.Array:
    """For each entry of x, the entry that the scan visits `distance` earlier; 0 where there is
    none.
    """
    length = x.shape[axis]
    nothing = jnp.zeros_like(x)
    if reverse:
        padded = jnp.concatenate([x, nothing], axis)
        return lax.dynamic_slice_in_dim(padded, distance, length, axis)
    padded = jnp.concatenate([nothing, x], axis)
    return lax.dynamic_slice_in_dim(padded, length - distance, length, axis)


def _scan(
    a: jax.Array, bs: list[jax.Array], why: jax.Array, axis: int, reverse: bool
) -> list[jax.Array]:
    """Solves the recurrence for each b.

    The derivatives are scans too; the transpose by b runs the other way.

    The bs are stacked into one array, since JAX cannot transpose a linear solve by a subset of its
    arguments.
    """
    a, why, *bs = (vary_like(x, a, why, bs) for x in (a, why, *bs))
    on = why == GOES_ON

    def left_over(ys: jax.Array) -> jax.Array:
        """b as a linear function of y, which `custom_linear_solve` differentiates."""
        neighbours = [_before(y, 1, axis, reverse) for y in ys]
        return ys - jnp.stack([jnp.where(on, a, 0) * jnp.where(on, y, 0) for y in neighbours])

    def transposed(_: Any, bs: jax.Array) -> jax.Array:
        a_behind = _before(a, 1, axis, not reverse)
        on_behind = _before(on, 1, axis, not reverse)
        return jnp.stack(
            _solve(a_behind, list(bs), jnp.where(on_behind, GOES_ON, ENDS), axis, not reverse)
        )

    def solve(_: Any, bs: jax.Array) -> jax.Array:
        return jnp.stack(_solve(a, list(bs), why, axis, reverse))

    return list(lax.custom_linear_solve(left_over, jnp.stack(bs), solve, transposed))


def _solve(
    a: jax.Array, bs: list[jax.Array], why: jax.Array, axis: int, reverse: bool
) -> list[jax.Array]:
    """Solves the recurrence for each b: in blocks, then over the ends of the blocks, then both are
    combined.

    Blocks keep the scanned axis short: the TPU compiler unrolls the shifts of an axis of a million
    positions.
    """
    length = a.shape[axis]
    last = a.ndim - 1
    if length <= BLOCK:
        return _double(a, bs, why, axis, reverse)[0]
    a, why, *bs = (_in_blocks(jnp.moveaxis(x, axis, last), reverse) for x in (a, why, *bs))
    entry = 0
    exit_ = BLOCK - 1
    if reverse:
        entry = BLOCK - 1
        exit_ = 0
    is_entry = jnp.arange(BLOCK) == entry
    enters = (why == GOES_ON) & is_entry.reshape((1,) * (why.ndim - 1) + (BLOCK,))
    product = jnp.where(enters, a, jnp.zeros_like(a))
    within = jnp.where(enters, ENTERS, jnp.where(why == GOES_ON, GOES_ON, ENDS))
    (*totals, product), why = _double(a, [*bs, product], within, last + 1, reverse)
    linked = why == ENTERS
    ends = [total[..., exit_] for total in totals]
    whys = jnp.where(linked[..., exit_], GOES_ON, ENDS)
    carries = [
        _before(y, 1, last, reverse) for y in _solve(product[..., exit_], ends, whys, last, reverse)
    ]
    zero = jnp.zeros((), a.dtype)
    solved = []
    for total, carry in zip(totals, carries, strict=True):
        y = total + jnp.where(linked, product * carry[..., None], zero)
        solved.append(jnp.moveaxis(_out_of_blocks(y, length, reverse), last, axis))
    return solved


def _in_blocks(x: jax.Array, reverse: bool) -> jax.Array:
    """`[..., blocks, BLOCK]`: the last axis, with zeros at the end of the scan where the blocks
    do not divide it.
    """
    missing = -x.shape[-1] % BLOCK
    padding = [(0, 0)] * x.ndim
    padding[-1] = (missing, 0) if reverse else (0, missing)
    return jnp.pad(x, padding).reshape(*x.shape[:-1], -1, BLOCK)


def _out_of_blocks(x: jax.Array, length: int, reverse: bool) -> jax.Array:
    """`[..., length]` from `[..., blocks, BLOCK]`: the inverse of `_in_blocks`."""
    flat = x.reshape(*x.shape[:-2], -1)
    if reverse:
        return flat[..., -length:]
    return flat[..., :length]


def _double(
    a: jax.Array, bs: list[jax.Array], why: jax.Array, axis: int, reverse: bool
) -> tuple[list[jax.Array], jax.Array]:
    """Solves the recurrence for each b by doubling the reach of each place; also says where each
    scan began.

    The levels are the turns of a loop. Unrolled, as in `lax.associative_scan`, each level would be
    compiled anew.
    """

    def level(i: Any, carry: Any) -> Any:
        a, bs, why = carry
        distance = jnp.left_shift(1, i)

        def earlier(x: jax.Array) -> jax.Array:
            return _before(x, distance, axis, reverse)

        bs = [jnp.where(why == GOES_ON, b + a * earlier(b), b) for b in bs]
        return a * earlier(a), bs, jnp.where(why == GOES_ON, earlier(why), why)

    _, bs, why = lax.fori_loop(0, (a.shape[axis] - 1).bit_length(), level, (a, bs, why))
    return bs, why
