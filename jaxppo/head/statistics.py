"""The statistics of a token's distribution, which follow from a few numbers over the vocabulary's
columns, `Reduced`.

Each device reduces its columns, and `over_devices` joins the numbers of all. JAX differentiates
`sums_of` tile by tile, and `stats_of_numbers` once per token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxppo.head.call import Asked, Tokens
from jaxppo.head.columns import Columns
from jaxppo.head.head import TokenStats
from jaxppo.head.tile import LOW
from jaxppo.sharding import ShardAxes, note, vary, varying

NO_ID = 2**31 - 1  # the id of an empty place among the likeliest, which sorts last
DIFFERENTIABLE = ("log_z", "mean_logit")  # of `LogitStat`
Numbers = dict[str, jax.Array]  # `[N]` each, and `[N, K]` of ids: see below `Reduced`
Top = tuple[jax.Array, jax.Array]  # f32[N, k] and i32[N, k], the k largest logits and their ids


class Reduced(NamedTuple):
    """The numbers of N tokens over some columns; peaks and top are constants of differentiation."""

    peaks: Numbers  # largest values
    sums: Numbers  # of functions of a logit, relative to the peaks
    top: Top | None = None


# The keys of `Numbers`.
# peaks: m          the largest logit
#        nucleus    the largest logit in the nucleus
#        key        i32, of accuracy: see `_sortable`
# sums:  s          of exp(z - m)
#        u          of exp(z - m) (z - m), for the entropy
#        z_y        the target's logit: a sum with one term that is not 0
#        nucleus    of exp(z - peaks["nucleus"]) in the nucleus
#        squares    of exp(2 (z - m))
#        total      of the finite logits
#        finite     how many logits are finite
#        ids        f32[N, K], the logits of `tokens.ids`


def reduce_columns(
    asked: Asked, z: jax.Array, tokens: Tokens, columns: Columns, gathers: bool = False
) -> Reduced:
    """All numbers of one tile; sums are relative to the largest logits.

    `gathers` reads a target's logit by itself.
    """
    constant = lax.stop_gradient(z)
    peaks = {"m": jnp.maximum(constant.max(1), LOW)}  # all logits may be -inf
    if tokens.nucleus_ids is not None:
        peaks["nucleus"] = jnp.where(
            columns.nucleus(tokens) & ~(constant < LOW), constant, LOW
        ).max(1)
    if "accuracy" in asked.logit_stats:
        peaks["key"] = _sortable(constant, columns.one_hot(tokens.targets)).max(1)
    top = None
    if asked.top_k:
        top = _top_of(constant, columns, asked.top_k)
    return Reduced(peaks, sums_of(asked, z, peaks, tokens, columns, gathers=gathers), top)


def sums_of(
    asked: Asked,
    z: jax.Array,
    peaks: Numbers,
    tokens: Tokens,
    columns: Columns,
    *,
    differentiated: bool = False,
    gathers: bool = False,
) -> Numbers:
    """The sums over columns `[C, B]`, or only those through which a gradient flows.

    With `differentiated` the others are left out: JAX would compute their derivatives and multiply
    them by 0. With `gathers` a target's logit is read where it lies, but not if JAX differentiates:
    a gather's transpose scatters.
    """
    d = z - peaks["m"][:, None]
    e = jnp.exp(d)
    sums = {"s": e.sum(1)}
    if tokens.targets is not None and gathers:
        sums["z_y"] = _logits_at(z, tokens.targets[:, None], columns)[:, 0]
    elif tokens.targets is not None:
        sums["z_y"] = jnp.where(columns.one_hot(tokens.targets), z, 0).sum(1)
    if asked.entropy == "bonus" or (asked.entropy == "metric" and not differentiated):
        if differentiated:
            d = jnp.where(e > 0, d, 0)  # it may be -inf, and its slope 0 * inf
        sums["u"] = jnp.where(e > 0, e * d, 0).sum(1)
    if tokens.nucleus_ids is not None:
        inside = columns.nucleus(tokens) & ~(z < LOW)
        d_nucleus = jnp.where(inside, z, LOW) - peaks["nucleus"][:, None]
        sums["nucleus"] = jnp.where(inside, jnp.exp(d_nucleus), 0).sum(1)
    if "sum_p2" in asked.logit_stats and not differentiated:
        sums["squares"] = (e * e).sum(1)
    if "mean_logit" in asked.logit_stats:
        exists = ~(z <= LOW / 2)
        sums["total"] = jnp.where(exists, z, 0).sum(1)
        if not differentiated:
            sums["finite"] = exists.astype(jnp.float32).sum(1)
    if tokens.ids is not None:
        text = f"logits of {tokens.ids.shape[1]} ids per token, gathered from each tile"
        if differentiated:
            text = f"gradients of {tokens.ids.shape[1]} ids per token, one scatter-add per tile"
        with note(text):
            sums["ids"] = _logits_at(z, tokens.ids, columns)
    return sums


def _logits_at(z: jax.Array, ids: jax.Array, columns: Columns) -> jax.Array:
    """The logits of those ids, `[C, K]`, that are among the columns; else 0."""
    place, inside = columns.places(ids)
    return jnp.where(inside, jnp.take_along_axis(z, place, axis=1), 0)


def _sortable(z: jax.Array, is_target: jax.Array) -> jax.Array:
    """Integers that sort like the logits z but for their lowest bit, which is set at the target.

    Of two logits an ulp apart either may be the larger one.
    """
    bits = lax.bitcast_convert_type(jnp.where(z == 0, 0, z), jnp.int32)  # -0 is as likely as 0
    key = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
    return (key & ~1) | is_target.astype(jnp.int32)


def _top_of(z: jax.Array, columns: Columns, k: int) -> Top:
    """The k largest logits of a tile and their ids; among equal logits the lowest id is first."""
    z = jnp.where(z == 0, 0, z)  # otherwise -0 would come behind 0
    if k == 1:
        # a logit and its id are read together: a program may compute a logit twice, an ulp apart
        ids = vary(jnp.broadcast_to(columns.ids[None], z.shape), varying(z))
        z, ids = lax.reduce((z, ids), (jnp.float32(LOW), jnp.int32(NO_ID)), _before, (1,))
        z = z[:, None]
        ids = ids[:, None]
    else:
        z, place = lax.top_k(z, min(k, columns.width))
        ids = columns.ids[place]
    ids = jnp.where(z <= LOW / 2, NO_ID, ids)
    missing = ((0, 0), (0, max(0, k - columns.width)))
    return jnp.pad(z, missing, constant_values=LOW), jnp.pad(ids, missing, constant_values=NO_ID)


def _before(first: Top, second: Top) -> Top:
    is_first = (first[0] > second[0]) | ((first[0] == second[0]) & (first[1] < second[1]))
    return jnp.where(is_first, first[0], second[0]), jnp.where(is_first, first[1], second[1])


def first_of(z: jax.Array, ids: jax.Array, k: int) -> Top:
    """The k largest of several logits per token."""
    z, ids = lax.sort((-z, ids), num_keys=2)
    return -z[..., :k], ids[..., :k]


def over_devices(reduced: Reduced, axes: ShardAxes) -> Reduced:
    """The numbers over the whole vocabulary: a maximum, a sum, and a gather of the k largest,
    over the tensor axis.
    """
    names = axes.tensor
    if not names:
        return reduced
    reduced = jax.tree.map(lambda array: vary(array, names), reduced)
    peaks = lax.pmax(reduced.peaks, names)
    sums = lax.psum(rescaled(reduced.sums, reduced.peaks, peaks), names)
    if reduced.top is None:
        return Reduced(peaks, sums)
    k = reduced.top[0].shape[1]
    with note(f"{k} likeliest ids per token, gathered over the tensor axis"):
        z, ids = (
            lax.all_gather(array, names, axis=1, tiled=True, to="invarying")
            for array in reduced.top
        )
    return Reduced(peaks, sums, first_of(z, ids, k))


def rescaled(sums: Numbers, old: Numbers, new: Numbers) -> Numbers:
    """Sums relative to `old` peaks as sums relative to larger ones."""
    result = dict(sums)
    delta = old["m"] - new["m"]
    factor = jnp.exp(delta)
    result["s"] = sums["s"] * factor
    if "u" in sums:  # the factor can be 0 if delta is huge: then nothing is left of either sum
        result["u"] = jnp.where(factor > 0, factor * (sums["u"] + sums["s"] * delta), 0)
    if "squares" in sums:
        result["squares"] = sums["squares"] * factor**2
    if "nucleus" in sums:
        result["nucleus"] = sums["nucleus"] * jnp.exp(old["nucleus"] - new["nucleus"])
    return result


def stats_of_numbers(
    asked: Asked, reduced: Reduced, tokens: Tokens, vocab_size: int, sums: Numbers | None = None
) -> TokenStats:
    """The statistics from the numbers over the whole vocabulary; JAX differentiates it with respect
    to `sums`.

    They take the place of those of `reduced` that have their names.
    """
    peaks = reduced.peaks
    sums = reduced.sums | (sums or {})
    # a target or an id outside the vocabulary makes log s NaN, and the gradient too
    log_s = _nan_unless(jnp.log(sums["s"]), ~(peaks["m"] <= LOW / 2))
    stats = {"log_probs": _target_log_probs(peaks, sums, log_s, tokens, vocab_size)}
    if "u" in sums:
        stats["entropy"] = log_s - sums["u"] / sums["s"]
        if asked.entropy != "bonus":
            stats["entropy"] = lax.stop_gradient(stats["entropy"])
    if "log_z" in asked.logit_stats:
        stats["log_z"] = peaks["m"] + log_s
    if "total" in sums:
        stats["mean_logit"] = sums["total"] / jnp.maximum(sums["finite"], 1)
    if "key" in peaks:
        stats["accuracy"] = (peaks["key"] & 1).astype(jnp.float32)
    if "squares" in sums:
        stats["sum_p2"] = lax.stop_gradient(sums["squares"] * jnp.exp(-2 * log_s))
    if "ids" in sums:
        exists = (tokens.ids >= -1) & (tokens.ids < vocab_size)
        log_s_of_ids = _nan_unless(jnp.broadcast_to(log_s[:, None], tokens.ids.shape), exists)
        log_probs = _log_probs(sums["ids"], peaks["m"][:, None], log_s_of_ids)
        stats["id_log_probs"] = jnp.where(tokens.ids == -1, -jnp.inf, log_probs)
    if reduced.top is not None:
        z, ids = reduced.top
        log_probs = lax.stop_gradient(_log_probs(z, peaks["m"][:, None], log_s[:, None]))
        stats["top_ids"] = jnp.where(ids == NO_ID, -1, ids)
        stats["top_log_probs"] = jnp.where(ids == NO_ID, -jnp.inf, log_probs)
    return TokenStats(**stats, entropy_mode=asked.entropy)


def _target_log_probs(
    peaks: Numbers, sums: Numbers, log_s: jax.Array, tokens: Tokens, vocab_size: int
) -> jax.Array:
    """The log-probs of the targets, in the whole distribution or in the nucleus."""
    exists = (tokens.targets >= 0) & (tokens.targets < vocab_size)
    peak = peaks["m"]
    if "nucleus" in sums:
        log_s = jnp.log(sums["nucleus"])
        peak = peaks["nucleus"]
    return _log_probs(sums["z_y"], peak, _nan_unless(log_s, exists))


def _log_probs(z: jax.Array, peak: jax.Array, log_s: jax.Array) -> jax.Array:
    log_probs = (z - peak) - log_s
    log_probs = log_probs - lax.stop_gradient(jnp.maximum(log_probs, 0))  # above 0 by rounding only
    return log_probs + jnp.where(z <= LOW / 2, -jnp.inf, 0)


@jax.custom_vjp
def _nan_unless(array: jax.Array, sound: jax.Array) -> jax.Array:
    """The array, or NaN; a cotangent that is not 0 becomes NaN too."""
    return jnp.where(sound, array, jnp.nan)


_nan_unless.defvjp(
    lambda array, sound: (_nan_unless(array, sound), sound),
    lambda sound, cotangent: (jnp.where(sound | (cotangent == 0), cotangent, jnp.nan), None),
)


def zero_stats(asked: Asked, tokens: Tokens, count: int) -> TokenStats:
    """Zeros in the place of all that `stats_of_numbers` returns for so many tokens."""
    names = ["log_probs", *asked.logit_stats]
    if asked.entropy != "none":
        names.append("entropy")
    stats = dict.fromkeys(names, jnp.zeros(count, jnp.float32))
    if tokens.ids is not None:
        stats["id_log_probs"] = jnp.zeros((count, tokens.ids.shape[1]), jnp.float32)
    if asked.top_k:
        stats["top_log_probs"] = jnp.zeros((count, asked.top_k), jnp.float32)
        stats["top_ids"] = jnp.zeros((count, asked.top_k), jnp.int32)
    return TokenStats(**stats, entropy_mode=asked.entropy)


def with_gradients(asked: Asked, sums: Numbers) -> Numbers:
    """Those of the sums through which a gradient flows."""
    constant = {"squares", "finite"}
    if asked.entropy != "bonus":
        constant.add("u")
    return {name: sum_ for name, sum_ in sums.items() if name not in constant}


def left_for_gradients(asked: Asked, reduced: Reduced) -> Reduced:
    """What a backward reads of the numbers: an entropy that is a metric leaves nothing."""
    peaks = {name: peak for name, peak in reduced.peaks.items() if name != "key"}
    sums = with_gradients(asked, reduced.sums)
    if "finite" in reduced.sums:
        sums["finite"] = reduced.sums["finite"]
    return Reduced(peaks, sums)


def cotangents(
    asked: Asked, reduced: Reduced, tokens: Tokens, vocab_size: int, dstats: TokenStats
) -> tuple[Asked, jax.Array, Numbers]:
    """What a backward asks for, the tokens with a cotangent that is not 0, and the cotangents of
    the sums.
    """
    logit_stats = tuple(name for name in asked.logit_stats if name in DIFFERENTIABLE)
    names = ["log_probs", "id_log_probs", *logit_stats]
    asked_back = Asked("none", logit_stats)  # no gradient reads an entropy as a metric
    if asked.entropy == "bonus":
        names.append("entropy")
        asked_back = Asked("bonus", logit_stats)
    cotangent = {name: getattr(dstats, name) for name in names if getattr(dstats, name) is not None}

    def finished(sums: Numbers) -> Numbers:
        stats = stats_of_numbers(asked_back, reduced, tokens, vocab_size, sums)
        return {name: getattr(stats, name) for name in cotangent}

    _, pull = jax.vjp(finished, with_gradients(asked_back, reduced.sums))
    (dsums,) = pull(cotangent)
    by_name = [(array != 0).reshape(array.shape[0], -1).any(1) for array in cotangent.values()]
    has_cotangent = jnp.stack(by_name).any(0)
    return asked_back, has_cotangent, dsums
