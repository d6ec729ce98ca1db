"""The statistics of a token's distribution, which follow from a few numbers over the vocabulary's columns, `Reduced`.

Tiles and devices are alike: the numbers of two disjoint sets of columns `merge`. JAX differentiates `sums_of` tile by
tile, and `finish` once per token.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.call import Asked, Names, Tokens
from jaxppo.head.head import TokenStats
from jaxppo.head.tile import LOW
from jaxppo.sharding import ShardAxes, note, vary, varying

NO_ID = 2**31 - 1  # the id of an empty place among the likeliest, which sorts last
FARTHEST = 8.8e6  # e^16: a larger sum means a logit so far above the reference that the sum loses digits
CONSTANT = ("squares", "count")  # sums without a gradient
Numbers = dict[str, jax.Array]  # f32[N] each, and f32[N, K] of ids
Tree = TypeVar("Tree")


class Reduced(NamedTuple):
    """The numbers of N tokens over some columns; peaks and top are constants of differentiation."""

    peaks: Numbers  # largest values
    sums: Numbers  # of functions of a logit, relative to the peaks
    top: tuple[jax.Array, jax.Array] | None = None  # f32[N, k] and i32[N, k], the k largest logits and their ids


class Columns(NamedTuple):
    ids: jax.Array  # i32[B], rising
    valid: jax.Array | None = None  # bool[B], False for padding and for another tile's columns; None if none is
    apart: bool = False  # ids do not rise by one: they are of several pieces of the vocabulary
    stored: bool = False  # logits lie in memory, so that one of them can be read: a sum over columns reads all again

    def are(self, ids: jax.Array) -> jax.Array:
        """One-hot `[C, B]` of one id per token."""
        hot = self.ids[None] == ids[:, None]
        return hot if self.valid is None else hot & self.valid[None]

    def places(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The place of each id, and whether it is there."""
        B = self.ids.shape[0]
        if self.apart:
            place = jnp.minimum(jnp.searchsorted(self.ids, ids).astype(jnp.int32), B - 1)
            inside = self.ids[place] == ids
        else:
            place = ids - self.ids[0]
            inside = (place >= 0) & (place < B)
            place = jnp.where(inside, place, 0)
        return place, inside if self.valid is None else inside & self.valid[place]

    def nucleus(self, tokens: Tokens) -> jax.Array:
        """bool[C, B], the columns that the sampler could draw, the target's included."""
        ids = jnp.concatenate([tokens.nucleus_ids, tokens.targets[:, None]], axis=1)
        (place, inside), B = self.places(ids), self.ids.shape[0]
        empty = vary(jnp.zeros((ids.shape[0], B), bool), varying(place) | varying(inside))
        rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        return empty.at[rows, jnp.where(inside, place, B)].set(True, mode="drop")


def sums_of(
    asked: Asked, z: jax.Array, peaks: Numbers, tokens: Tokens, columns: Columns, differentiated: bool = False
) -> Numbers:
    """The sums over columns `[C, B]`, or only those through which a gradient flows: 0 * u costs as much as g * u."""
    d = z - peaks["m"][:, None]
    e = jnp.exp(d)
    found = {"s": e.sum(1)}
    if tokens.targets is not None and columns.stored and not differentiated:
        place, inside = columns.places(tokens.targets[:, None])
        found["z_y"] = jnp.where(inside, jnp.take_along_axis(z, place, axis=1), 0)[:, 0]
    elif tokens.targets is not None:
        found["z_y"] = jnp.where(columns.are(tokens.targets), z, 0).sum(1)
    if asked.entropy == "bonus" or (asked.entropy == "metric" and not differentiated):
        d = jnp.where(e > 0, d, 0) if differentiated else d  # it may be -inf, and its slope 0 * inf
        found["u"] = jnp.where(e > 0, e * d, 0).sum(1)
    if tokens.nucleus_ids is not None:
        inside = columns.nucleus(tokens) & ~(z < LOW)
        found["nucleus"] = jnp.where(inside, jnp.exp(jnp.where(inside, z, LOW) - peaks["nucleus"][:, None]), 0).sum(1)
    if "sum_p2" in asked.logit_stats and not differentiated:
        found["squares"] = (e * e).sum(1)
    if "mean_logit" in asked.logit_stats:
        exists = ~(z <= LOW / 2)
        found["total"] = jnp.where(exists, z, 0).sum(1)
        if not differentiated:
            found["count"] = exists.astype(jnp.float32).sum(1)
    if tokens.ids is not None:
        place, inside = columns.places(tokens.ids)
        what = ("gradients", "one scatter-add per tile") if differentiated else ("logits", "gathered from each tile")
        with note(f"{what[0]} of {place.shape[1]} ids per token, {what[1]}"):
            found["ids"] = jnp.where(inside, jnp.take_along_axis(z, place, axis=1), 0)
    return found


def differentiated(asked: Asked, sums: Numbers) -> Numbers:
    """Those of the sums through which a gradient flows."""
    constant = CONSTANT if asked.entropy == "bonus" else (*CONSTANT, "u")
    return {name: x for name, x in sums.items() if name not in constant}


def left_for_gradients(asked: Asked, found: Reduced) -> Reduced:
    """What a backward reads of the numbers: an entropy that is a metric leaves nothing."""
    peaks = {name: x for name, x in found.peaks.items() if name != "key"}
    count = {"count": found.sums["count"]} if "count" in found.sums else {}
    return Reduced(peaks, differentiated(asked, found.sums) | count)


def reduced(asked: Asked, z: jax.Array, tokens: Tokens, columns: Columns, reference: Any = None) -> Reduced:
    """All numbers of one tile; sums are relative to the largest logits, or to a reference, which saves a reading."""
    constant = lax.stop_gradient(z)
    peaks = {"m": jnp.maximum(constant.max(1), LOW) if reference is None else reference}  # all may be -inf
    if tokens.nucleus_ids is not None:
        peaks["nucleus"] = jnp.where(columns.nucleus(tokens) & ~(constant < LOW), constant, LOW).max(1)
    if "accuracy" in asked.logit_stats:  # integers that sort like logits; the lowest bit is set at the target
        bits = lax.bitcast_convert_type(jnp.where(constant == 0, 0, constant), jnp.int32)  # -0 is as likely as 0
        key = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
        peaks["key"] = ((key & ~1) | columns.are(tokens.targets).astype(jnp.int32)).max(1)
    top = top_of(z, columns, asked.top_k) if asked.top_k else None
    return Reduced(peaks, sums_of(asked, z, peaks, tokens, columns), top)


def nothing(like: Reduced, count: int) -> Reduced:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), like)
    low = {"m": LOW, "nucleus": LOW, "key": jnp.iinfo(jnp.int32).min}
    peaks = {name: jnp.full(x.shape, low[name], x.dtype) for name, x in like.peaks.items()}
    top = like.top and (jnp.full(like.top[0].shape, LOW, jnp.float32), jnp.full(like.top[1].shape, NO_ID, jnp.int32))
    return Reduced(peaks, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.sums), top)


def _rescaled(sums: Numbers, old: Numbers, new: Numbers) -> Numbers:
    """Sums relative to `old` peaks as sums relative to larger ones."""
    delta = old["m"] - new["m"]
    f, found = jnp.exp(delta), dict(sums)
    found["s"] = sums["s"] * f
    if "u" in sums:  # f can be 0 if delta is huge: then nothing is left of either sum
        found["u"] = jnp.where(f > 0, f * (sums["u"] + sums["s"] * delta), 0)
    if "squares" in sums:
        found["squares"] = sums["squares"] * f**2
    if "nucleus" in sums:
        found["nucleus"] = sums["nucleus"] * jnp.exp(old["nucleus"] - new["nucleus"])
    return found


def merge(a: Reduced, b: Reduced) -> Reduced:
    """The numbers over two disjoint sets of columns of the same tokens."""
    peaks = jax.tree.map(jnp.maximum, a.peaks, b.peaks)
    sums = jax.tree.map(jnp.add, _rescaled(a.sums, a.peaks, peaks), _rescaled(b.sums, b.peaks, peaks))
    if a.top is None or b.top is None:
        return Reduced(peaks, sums)
    z, ids = (jnp.concatenate(pair, axis=-1) for pair in zip(a.top, b.top, strict=True))
    return Reduced(peaks, sums, _first_of(z, ids, a.top[0].shape[-1]))


def over_devices(found: Reduced, axes: ShardAxes) -> Reduced:
    """The numbers over the whole vocabulary: one max, one sum, and a gather of the k largest, over the tensor axis."""
    names = axes.tensor
    if not names:
        return found
    found = jax.tree.map(lambda x: vary(x, names), found)
    peaks = _at_once(lambda x: lax.pmax(x, names), found.peaks)
    sums = _at_once(lambda x: lax.psum(x, names), _rescaled(found.sums, found.peaks, peaks))
    if found.top is None:
        return Reduced(peaks, sums)
    (z, ids), k = found.top, found.top[0].shape[1]
    with note(f"{k} likeliest ids per token, gathered over the tensor axis"):
        both = jnp.stack([lax.bitcast_convert_type(z, jnp.int32), ids])
        bits, ids = lax.all_gather(both, names, axis=2, tiled=True, to="invarying")
    return Reduced(peaks, sums, _first_of(lax.bitcast_convert_type(bits, jnp.float32), ids, k))


def over_parts(found: Reduced, names: Names) -> Reduced:
    """The numbers over the whole vocabulary from a device's parts `[parts, N]`, merged in one order on any mesh.

    A device merges its own parts first, and then those of all devices in the order of the tensor axes, `names`.
    """

    def in_pairs(found: Reduced) -> Reduced:
        while (count := found.peaks["m"].shape[0]) > 1:
            pair = (jax.tree.map(lambda x, k=k: x[k:count:2], found) for k in (0, 1))
            found = lax.optimization_barrier(merge(*pair))
        return jax.tree.map(lambda x: x[0], found)

    def gather(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(lax.all_gather(vary(x, names), names, to="invarying"), 0, 1)

    found = in_pairs(found)
    return in_pairs(_at_once(gather, found)) if names else found


def _at_once(reduce: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    """Applies `reduce` to all leaves, `[N]` or `[N, K]`, stacked as rows `[., N]`: one collective for a dtype."""
    leaves, treedef = jax.tree.flatten(tree)
    found = list(leaves)
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        of_dtype = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        parts = [leaves[i][None] if leaves[i].ndim == 1 else leaves[i].T for i in of_dtype]
        rows = reduce(jnp.concatenate(parts))
        for i, x in zip(of_dtype, jnp.split(rows, list(accumulate(map(len, parts)))[:-1]), strict=True):
            found[i] = x[0] if leaves[i].ndim == 1 else jnp.moveaxis(x, 0, -1)
    return jax.tree.unflatten(treedef, found)


def top_of(z: jax.Array, columns: Columns, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest logits of a tile and their ids; among equal logits the lowest id is first."""
    z, B = lax.stop_gradient(jnp.where(z == 0, 0, z)), z.shape[1]  # otherwise -0 would come behind 0
    if k == 1:  # a logit and its id are read together: a program may compute a logit twice, an ulp apart
        ids = vary(jnp.broadcast_to(columns.ids[None], z.shape), varying(z))
        z, ids = (x[:, None] for x in lax.reduce((z, ids), (jnp.float32(LOW), jnp.int32(NO_ID)), _before, (1,)))
    else:
        z, place = lax.top_k(z, min(k, B))
        ids = columns.ids[place]
    ids = jnp.where(z <= LOW / 2, NO_ID, ids)
    missing = ((0, 0), (0, max(0, k - B)))
    return jnp.pad(z, missing, constant_values=LOW), jnp.pad(ids, missing, constant_values=NO_ID)


def _before(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])


def _first_of(z: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    z, ids = lax.sort((-z, ids), num_keys=2)
    return -z[..., :k], ids[..., :k]


def finish(asked: Asked, found: Reduced, tokens: Tokens, vocab_size: int, sums: Numbers | None = None) -> TokenStats:
    """The statistics from the numbers over the whole vocabulary; differentiable in `sums`, some of the numbers' own."""
    peaks, sums = found.peaks, found.sums | (sums or {})

    def log_probs(z: jax.Array, m: jax.Array, log_s: jax.Array) -> jax.Array:
        found = (z - m) - log_s
        found = found - lax.stop_gradient(jnp.maximum(found, 0))  # above 0 by rounding only
        return found + jnp.where(z <= LOW / 2, -jnp.inf, 0)

    # a target or an id outside the vocabulary makes log s NaN, and the gradient too
    log_s = _nan_unless(jnp.log(sums["s"]), ~(peaks["m"] <= LOW / 2))
    exists = (tokens.targets >= 0) & (tokens.targets < vocab_size)
    of_target = _nan_unless(jnp.log(sums["nucleus"]) if "nucleus" in sums else log_s, exists)
    stats = {"log_probs": log_probs(sums["z_y"], peaks.get("nucleus", peaks["m"]), of_target)}
    if "u" in sums:
        entropy = log_s - sums["u"] / sums["s"]
        stats["entropy"] = entropy if asked.entropy == "bonus" else lax.stop_gradient(entropy)
    if "log_z" in asked.logit_stats:
        stats["log_z"] = peaks["m"] + log_s
    if "total" in sums:
        stats["mean_logit"] = sums["total"] / jnp.maximum(sums["count"], 1)
    if "key" in peaks:
        stats["accuracy"] = (peaks["key"] & 1).astype(jnp.float32)
    if "squares" in sums:
        stats["sum_p2"] = lax.stop_gradient(sums["squares"] * jnp.exp(-2 * log_s))
    if "ids" in sums:
        exists = (tokens.ids >= -1) & (tokens.ids < vocab_size)
        of_ids = _nan_unless(jnp.broadcast_to(log_s[:, None], tokens.ids.shape), exists)
        of_ids = log_probs(sums["ids"], peaks["m"][:, None], of_ids)
        stats["id_log_probs"] = jnp.where(tokens.ids == -1, -jnp.inf, of_ids)
    if found.top is not None:
        z, ids = found.top
        of_top = lax.stop_gradient(log_probs(z, peaks["m"][:, None], log_s[:, None]))
        stats["top_ids"] = jnp.where(ids == NO_ID, -1, ids)
        stats["top_log_probs"] = jnp.where(ids == NO_ID, -jnp.inf, of_top)
    return TokenStats(**stats, entropy_mode=asked.entropy)


def zero_stats(asked: Asked, tokens: Tokens, count: int) -> TokenStats:
    """Zeros in the place of all that `finish` returns for so many tokens."""
    zeros = jnp.zeros(count, jnp.float32)
    names = ["log_probs", *asked.logit_stats, *([] if asked.entropy == "none" else ["entropy"])]
    stats = dict.fromkeys(names, zeros)
    if tokens.ids is not None:
        stats["id_log_probs"] = jnp.zeros((count, tokens.ids.shape[1]), jnp.float32)
    if asked.top_k:
        stats["top_log_probs"] = jnp.zeros((count, asked.top_k), jnp.float32)
        stats["top_ids"] = jnp.zeros((count, asked.top_k), jnp.int32)
    return TokenStats(**stats, entropy_mode=asked.entropy)


def cotangents(
    asked: Asked, found: Reduced, tokens: Tokens, vocab_size: int, of_stats: TokenStats
) -> tuple[Asked, jax.Array, Numbers]:
    """What a backward asks for, the tokens with a cotangent that is not 0, and the cotangents of the sums."""
    stats = tuple(name for name in asked.logit_stats if name in ("log_z", "mean_logit"))
    names = ["log_probs", *stats, "id_log_probs", *(["entropy"] if asked.entropy == "bonus" else [])]
    asked = Asked("bonus" if asked.entropy == "bonus" else "none", stats)  # no gradient reads an entropy as a metric
    given = {name: x for name in names if (x := getattr(of_stats, name)) is not None}

    def finished(sums: Numbers) -> Numbers:
        stats = finish(asked, found, tokens, vocab_size, sums)
        return {name: getattr(stats, name) for name in given}

    _, pull = jax.vjp(finished, differentiated(asked, found.sums))
    counts = jnp.stack([(x != 0).reshape(x.shape[0], -1).any(1) for x in given.values()]).any(0)
    return asked, counts, pull(given)[0]


@jax.custom_vjp
def _nan_unless(x: jax.Array, ok: jax.Array) -> jax.Array:
    """x, or NaN; a cotangent that is not 0 becomes NaN too."""
    return jnp.where(ok, x, jnp.nan)


_nan_unless.defvjp(lambda x, ok: (_nan_unless(x, ok), ok), lambda ok, g: (jnp.where(ok | (g == 0), g, jnp.nan), None))
