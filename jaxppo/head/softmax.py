"""Online softmax statistics of blocks of logits, their merge, and the gradient that they determine.

Per token, over any set of logits z with maximum m:  s = sum exp(z - m),  u = sum exp(z - m) * (z - m).
Sums of two disjoint sets merge after both are rescaled to the larger maximum. m and log s stay apart: folded into one
log-sum-exp, logits of 1e4 would cost four digits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import needed
from jaxppo.head.likeliest import Top, merge_top, top_of_block, top_over_shards
from jaxppo.sharding import ShardAxes, note, vary

Places = tuple[Array, Array]  # i32[N] or [N, K], the columns of ids in a block; bool, whether the block holds them


class Sums(NamedTuple):
    """Softmax sums of some of the logits of N tokens, f32[N] each; None if not asked for."""

    m: Any  # the largest logit, or the reference in its place
    s: Any  # sum of exp(z - m)
    u: Any  # sum of exp(z - m) (z - m)
    nucleus_m: Any  # as m, over the logits that the sampler could draw
    nucleus_s: Any  # as s, over these
    z_y: Array  # the target's logit, 0 where it is not among the logits
    total: Array | None = None  # the sum of the finite logits
    finite: Array | None = None  # the number of finite logits
    likeliest: Array | None = None  # `top_key` of the largest
    squares: Array | None = None  # sum of exp(z - m)^2
    z_ids: Array | None = None  # f32[N, K], the logits of the ids that are asked for, 0 where one is not among them
    top: Top | None = None  # what `top_of_block` returns


class Cotangents(NamedTuple):
    """The cotangents of tokens' statistics, f32[N] each, None for a statistic without one."""

    log_prob: Any
    entropy: Any
    log_z: Any
    mean_logit: Any
    counts: Array
    """bool[N]: the tokens with a cotangent that is not 0. The others may hold NaN."""
    ids: Any = None
    """f32[N, K], the cotangents of the ids' log-probs."""


class Residuals(NamedTuple):
    """The numbers that the backward reads beside its inputs, f32[N] each; None if no gradient needs them."""

    m: Any
    log_s: Any
    entropy: Any
    nucleus_m: Any
    nucleus_log_s: Any
    finite: Any = None
    """The number of finite logits, over which the mean logit is taken."""

    def without_entropy(self, nucleus_only: bool) -> Residuals:
        """The residuals that the gradient of the log-probs alone needs."""
        return self._replace(m=None, log_s=None, entropy=None) if nucleus_only else self._replace(entropy=None)


def _exp_below(z: Array, m: Array) -> tuple[Array, Array]:
    """exp(z - m) and z - m. The exponentials of a row without any finite logit are 0."""
    d = z - jnp.where(m == -jnp.inf, 0, m)[:, None]
    return jnp.exp(d), d


def no_sums(like: Sums) -> Sums:
    """The sums over no logits, in the structure and shape of `like`."""
    fill = {"m": -jnp.inf, "nucleus_m": -jnp.inf, "likeliest": jnp.iinfo(jnp.int32).min}
    fields: Any = {k: None if x is None else jnp.full_like(x, fill.get(k, 0)) for k, x in like._asdict().items()}
    return Sums(**fields)


def top_key(z: Float[Array, "N B"], is_target: Bool[Array, "N B"]) -> Int[Array, "N B"]:
    """Integers that sort like the logits; their lowest bit is set at the target.

    The lowest bit of the largest integer says whether the target is a likeliest token. Comparing the target's logit
    with the maximum is not safe: a program may compute a logit twice, an ulp apart. Logits an ulp apart are equal here.
    """
    bits = lax.bitcast_convert_type(z, jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
    return (ordered & ~1) | is_target.astype(jnp.int32)


def target_logits(
    z: Float[Array, "N B"], is_target: Bool[Array, "N B"], place: Int[Array, " N"], inside: Bool[Array, " N"]
) -> Array:
    """The targets' logits, 0 where they are not in the block. TPUs compare columns, since they gather slowly.

    Args:
      z: f32 logits.
      is_target: one-hot of the target, if the block holds it.
      place: its column.
      inside: whether the block holds it.
    """

    def compare(z: Array, is_target: Array, place: Array, inside: Array) -> Array:
        return jnp.where(is_target, z, 0).sum(axis=1)

    def gather(z: Array, is_target: Array, place: Array, inside: Array) -> Array:
        return jnp.where(inside, jnp.take_along_axis(z, place[:, None], axis=1)[:, 0], 0)

    return lax.platform_dependent(z, is_target, place, inside, tpu=compare, default=gather)


def logits_of_ids(z: Float[Array, "N B"], places: Places) -> Float[Array, "N K"]:
    """The logits of ids, 0 where they are not in the block."""
    place, inside = places
    with note(f"logits of {place.shape[1]} ids per token, gathered from each tile"):
        return jnp.where(inside, jnp.take_along_axis(z, place, axis=1), 0)


def spread_ids(g: Float[Array, "N K"], places: Places, like: Float[Array, "N B"]) -> Float[Array, "N B"]:
    """sum_k g_k [j = id_k]. An id that is asked for twice gets the sum of both."""
    place, inside = places
    with note(f"gradients of {place.shape[1]} ids per token, one scatter-add per tile"):
        rows = jnp.arange(like.shape[0], dtype=jnp.int32)[:, None]
        return jnp.zeros_like(like).at[rows, jnp.where(inside, place, like.shape[1])].add(g, mode="drop")


def block_sums(
    z: Float[Array, "N B"],
    z_y: Float[Array, " N"],
    is_target: Bool[Array, "N B"],
    nucleus: Bool[Array, "N B"] | None,
    like: Sums,
    reference: Float[Array, " N"] | None = None,
    ids: Places | None = None,
    columns: Int[Array, "1 B"] | None = None,
) -> Sums:
    """The sums of one block of logits; columns that do not exist hold -inf.

    Args:
      z: f32 logits, after soft-cap and temperature.
      z_y: the target's logit, 0 where the block does not hold it.
      is_target: one-hot of the target, if the block holds it.
      nucleus: the columns that the sampler could draw, the target's included.
      like: which sums to compute.
      reference: takes the place of the maximum m, if given.
      ids: the places of the ids whose logits are asked for.
      columns: the vocabulary ids of the block, rising; needed if the likeliest ids are asked for.
    """
    m = s = u = nucleus_m = nucleus_s = total = count = likeliest = squares = top = None
    if like.m is not None:
        m = z.max(axis=1) if reference is None else reference
        e, d = _exp_below(z, m)
        s = e.sum(axis=1)
        if like.u is not None:
            u = jnp.where(e > 0, e * d, 0).sum(axis=1)
        if like.squares is not None:
            squares = (e * e).sum(axis=1)
    if nucleus is not None:
        inside = jnp.where(nucleus, z, -jnp.inf)
        nucleus_m = inside.max(axis=1)
        nucleus_s = _exp_below(inside, nucleus_m)[0].sum(axis=1)
    if like.total is not None:
        total = jnp.where(z > -jnp.inf, z, 0).sum(axis=1)
        count = (z > -jnp.inf).astype(jnp.float32).sum(axis=1)
    if like.likeliest is not None:
        likeliest = top_key(z, is_target).max(axis=1)
    if like.top is not None:
        top = top_of_block(z, needed("columns", columns, "those of the block"), like.top[0].shape[1])
    z_ids = None if ids is None else logits_of_ids(z, ids)
    return Sums(m, s, u, nucleus_m, nucleus_s, z_y, total, count, likeliest, squares, z_ids, top)


def _rescale(sums: Sums, m: Array | None, nucleus_m: Array | None) -> Sums:
    """The same sums relative to larger maxima."""

    def factor(old: Array, new: Array) -> tuple[Array, Array]:
        delta = jnp.where(old == -jnp.inf, 0, old - new)  # -inf - -inf is NaN; the sums are 0 there
        return jnp.exp(delta), delta

    s, u, nucleus_s, squares = sums.s, sums.u, sums.nucleus_s, sums.squares
    if m is not None:
        f, delta = factor(sums.m, m)
        # f can be 0 if delta is huge: then nothing is left of either sum
        u = None if u is None else jnp.where(f > 0, f * (u + s * delta), 0)
        s = s * f
        squares = None if squares is None else squares * f**2
    if nucleus_m is not None:
        nucleus_s = nucleus_s * factor(sums.nucleus_m, nucleus_m)[0]
    rescaled = sums._replace(m=m, s=s, u=u, nucleus_m=nucleus_m, nucleus_s=nucleus_s, squares=squares)
    return rescaled._replace(likeliest=None, top=None)


def merge(a: Sums, b: Sums) -> Sums:
    """The sums of two disjoint sets of logits of the same tokens."""
    of_both = (a.m, a.nucleus_m, a.likeliest), (b.m, b.nucleus_m, b.likeliest)
    m, nucleus_m, likeliest = jax.tree.map(jnp.maximum, *of_both)
    top = None if a.top is None or b.top is None else merge_top(a.top, b.top)
    a, b = _rescale(a, m, nucleus_m), _rescale(b, m, nucleus_m)
    added = jax.tree.map(jnp.add, a._replace(m=None, nucleus_m=None), b._replace(m=None, nucleus_m=None))
    return added._replace(m=m, nucleus_m=nucleus_m, likeliest=likeliest, top=top)


def merge_pieces(pieces: Sums) -> Sums:
    """The sums of N tokens from those of pieces of their logits, `[N, pieces]`."""
    m, nucleus_m, likeliest = jax.tree.map(lambda x: x.max(axis=1), (pieces.m, pieces.nucleus_m, pieces.likeliest))
    rescaled = _rescale(pieces, *jax.tree.map(lambda x: x[:, None], (m, nucleus_m)))._replace(m=None, nucleus_m=None)
    return jax.tree.map(lambda x: x.sum(axis=1), rescaled)._replace(m=m, nucleus_m=nucleus_m, likeliest=likeliest)


def merge_in_pairs(parts: Sums) -> Sums:
    """The sums of N tokens from those of 2^k parts of their logits, `[2^k, N]`, by a tree that is always the same.

    A device merges its own parts. Then all devices merge the results of each. The order is always the vocabulary's.
    """
    each = [jax.tree.map(operator.itemgetter(i), parts) for i in range(parts.z_y.shape[0])]
    while len(each) > 1:
        each = [merge(a, b) for a, b in zip(each[::2], each[1::2], strict=True)]
    return each[0]


def combine(sums: Sums, axes: ShardAxes, in_order: tuple[str, ...] = ()) -> Sums:
    """The sums over all vocabulary shards, by one max and one sum over the tensor axis, and more for likeliest ids.

    Args:
      sums: the sums of the device's own columns.
      axes: the roles of the mesh axes.
      in_order: the tensor axes in the order in which they shard the vocabulary, if the sums are to be merged by
        `merge_in_pairs`. One gather then takes the place of the max and the sum: it gives every device the sums of all
        devices, in order.
    """
    if not axes.tensor:
        return sums
    sums = jax.tree.map(lambda x: vary(x, axes.tensor), sums)
    if in_order:
        gather = partial(lax.all_gather, axis_name=in_order, axis=1, to="invarying")
        parts = _all_at_once(gather, sums._replace(likeliest=None, top=None))
        return merge_in_pairs(parts)._replace(**_largest(sums, axes))
    # constants: results do not depend on the maxima, and JAX has no derivative of a pmax
    maxima = _all_at_once(lambda x: lax.pmax(lax.stop_gradient(x), axes.tensor), (sums.m, sums.nucleus_m))
    exact = _largest(sums, axes)
    rescaled = _rescale(sums, *maxima)._replace(m=None, nucleus_m=None)
    summed = _all_at_once(lambda x: lax.psum(x, axes.tensor), rescaled)
    return summed._replace(m=maxima[0], nucleus_m=maxima[1], **exact)


def _largest(sums: Sums, axes: ShardAxes) -> dict[str, Any]:
    """The fields that say which ids are likeliest, over all vocabulary shards. No order of merging changes them."""
    likeliest = None if sums.likeliest is None else lax.pmax(sums.likeliest, axes.tensor)
    return {"likeliest": likeliest, "top": None if sums.top is None else top_over_shards(sums.top, axes)}


def _all_at_once(reduce: Callable[[Array], Array], tree: Any) -> Any:
    """Applies `reduce` once to all leaves, f32[N] or f32[N, K], stacked along the first dimension: one collective.

    The result of `reduce` may have more dimensions, between the first and that of the tokens.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) == 1:
        return jax.tree.unflatten(treedef, [reduce(leaves[0])])
    widths = [1 if x.ndim == 1 else x.shape[1] for x in leaves]
    rows = reduce(jnp.concatenate([x[None] if x.ndim == 1 else x.T for x in leaves]))
    parts = jnp.split(rows, list(accumulate(widths))[:-1])
    found = [x[0] if y.ndim == 1 else jnp.moveaxis(x, 0, -1) for x, y in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(treedef, found)


def dlogits(
    z: Float[Array, "N B"],
    is_target: Bool[Array, "N B"],
    nucleus: Bool[Array, "N B"] | None,
    residuals: Residuals,
    cotangents: Cotangents,
    ids: Places | None = None,
) -> Float[Array, "N B"]:
    """dz_j = g * ([j = y] - p_j) - e * p_j * (log p_j + entropy) + a * p_j + b / finite, for finite z_j.

    g, e, a and b are the cotangents of log-prob, entropy, log_z and mean logit. In the first term p is over the
    nucleus. Ids with cotangents g_k add sum_k g_k * ([j = id_k] - p_j), with p over all columns.

    Args:
      z: f32 logits, -inf in columns that do not exist.
      is_target: one-hot of the target.
      nucleus: the columns that the sampler could draw, or None for all.
      residuals: those of the whole vocabulary.
      cotangents: those of the tokens.
      ids: the places of the ids whose log-probs have a cotangent.
    """
    log_p: Any = None
    if residuals.m is not None:
        log_p = (z - residuals.m[:, None]) - residuals.log_s[:, None]
    if nucleus is None:
        p = jnp.exp(log_p)
    else:
        p = jnp.where(nucleus, jnp.exp((z - residuals.nucleus_m[:, None]) - residuals.nucleus_log_s[:, None]), 0)
    dz = cotangents.log_prob[:, None] * (is_target.astype(p.dtype) - p)
    if cotangents.entropy is not None:
        full_p = jnp.exp(log_p)
        dz -= cotangents.entropy[:, None] * jnp.where(full_p > 0, full_p * (log_p + residuals.entropy[:, None]), 0)
    if cotangents.log_z is not None:
        dz += cotangents.log_z[:, None] * jnp.exp(log_p)
    if cotangents.mean_logit is not None:
        dz += jnp.where(z > -jnp.inf, (cotangents.mean_logit / residuals.finite)[:, None], 0)
    if cotangents.ids is not None and ids is not None:
        dz += spread_ids(cotangents.ids, ids, z) - cotangents.ids.sum(axis=1)[:, None] * jnp.exp(log_p)
    return dz
