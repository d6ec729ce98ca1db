"""Online softmax statistics of blocks of logits, how they merge, and the gradient that they determine.

Per token, over any set of logits z with maximum m:  s = sum exp(z - m),  u = sum exp(z - m) * (z - m).
Sums of two disjoint sets merge after both are rescaled to the larger maximum. m and log s stay apart: folded into one
log-sum-exp, logits of 1e4 would cost four digits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxppo._sharding import ShardAxes, vary


class Sums(NamedTuple):
    """Softmax sums of some of the logits of N tokens, f32[N] each; None where not asked for.

    m, s, u are over all the logits, kept_m and kept_s over those that the sampler could draw, z_y is the target's
    logit, 0 where it is not among them, total the sum of all the logits.
    """

    m: Any
    s: Any
    u: Any
    kept_m: Any
    kept_s: Any
    z_y: Array
    total: Array | None = None


class Residuals(NamedTuple):
    """What the backward needs beside its inputs: f32[N] each, None where no gradient asks for it."""

    m: Any
    log_s: Any
    entropy: Any
    kept_m: Any
    kept_log_s: Any

    def without_entropy(self, kept: bool) -> Residuals:
        """What the gradient of the log-probs alone needs."""
        return self._replace(m=None, log_s=None, entropy=None) if kept else self._replace(entropy=None)


def _exp_below(z: Array, m: Array) -> tuple[Array, Array]:
    """exp(z - m) and z - m; a row without any finite logit gives zeros."""
    d = z - jnp.where(m == -jnp.inf, 0, m)[:, None]
    return jnp.exp(d), d


def empty_sums(count: int, *, full: bool, entropy: bool, kept: bool, moments: bool = False) -> Sums:
    """The sums of no logits."""
    low, zero = jnp.full(count, -jnp.inf, jnp.float32), jnp.zeros(count, jnp.float32)
    return Sums(
        m=low if full else None,
        s=zero if full else None,
        u=zero if entropy else None,
        kept_m=low if kept else None,
        kept_s=zero if kept else None,
        z_y=zero,
        total=zero if moments else None,
    )


def block_sums(z: Float[Array, "N B"], z_y: Float[Array, "N"], keep: Bool[Array, "N B"] | None, like: Sums) -> Sums:
    """The sums of one block of logits; columns that do not exist hold -inf.

    Args:
      z: f32 logits, after soft-cap and temperature.
      z_y: the target's logit where the block holds it, else 0.
      keep: the columns that the sampler could draw, the target's included.
      like: which sums to compute.
    """
    m = s = u = kept_m = kept_s = total = None
    if like.m is not None:
        m = z.max(axis=1)
        e, d = _exp_below(z, m)
        s = e.sum(axis=1)
        if like.u is not None:
            u = jnp.where(e > 0, e * d, 0).sum(axis=1)
    if keep is not None:
        kept = jnp.where(keep, z, -jnp.inf)
        kept_m = kept.max(axis=1)
        kept_s = _exp_below(kept, kept_m)[0].sum(axis=1)
    if like.total is not None:
        total = jnp.where(z > -jnp.inf, z, 0).sum(axis=1)
    return Sums(m, s, u, kept_m, kept_s, z_y, total)


def _rescale(sums: Sums, m: Array | None, kept_m: Array | None) -> Sums:
    """The same sums relative to larger maxima."""

    def factor(old: Array, new: Array) -> tuple[Array, Array]:
        delta = jnp.where(old == -jnp.inf, 0, old - new)  # -inf - -inf is NaN; the sums are 0 there
        return jnp.exp(delta), delta

    s, u, kept_s = sums.s, sums.u, sums.kept_s
    if m is not None:
        f, delta = factor(sums.m, m)
        # f can be 0 where delta is huge: then neither sum has anything left of it
        u = None if u is None else jnp.where(f > 0, f * (u + s * delta), 0)
        s = s * f
    if kept_m is not None:
        kept_s = kept_s * factor(sums.kept_m, kept_m)[0]
    return Sums(m, s, u, kept_m, kept_s, sums.z_y, sums.total)


def _larger(a: Any, b: Any) -> Any:
    return None if a is None else jnp.maximum(a, b)


def merge(a: Sums, b: Sums) -> Sums:
    """The sums of two disjoint sets of logits of the same tokens."""
    m, kept_m = _larger(a.m, b.m), _larger(a.kept_m, b.kept_m)
    a, b = _rescale(a, m, kept_m), _rescale(b, m, kept_m)
    added = jax.tree.map(jnp.add, a._replace(m=None, kept_m=None), b._replace(m=None, kept_m=None))
    return added._replace(m=m, kept_m=kept_m)


def combine(sums: Sums, axes: ShardAxes) -> Sums:
    """The sums over all vocabulary shards: one max and one sum over the tensor axis."""
    if not axes.tensor:
        return sums
    sums = jax.tree.map(lambda x: vary(x, axes.tensor), sums)
    maxima = _all_at_once(lambda x: lax.pmax(x, axes.tensor), (sums.m, sums.kept_m))
    rescaled = _rescale(sums, *maxima)._replace(m=None, kept_m=None)
    return _all_at_once(lambda x: lax.psum(x, axes.tensor), rescaled)._replace(m=maxima[0], kept_m=maxima[1])


def _all_at_once(reduce, tree):
    """`reduce` applied to the stacked leaves, so that it is one collective."""
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) == 1:
        return jax.tree.unflatten(treedef, [reduce(leaves[0])])
    return jax.tree.unflatten(treedef, list(reduce(jnp.stack(leaves))))


def finish(sums: Sums, target_exists: Bool[Array, "N"]) -> tuple[Array, Array | None, Residuals]:
    """Log-probs, entropy and residuals from the sums over the whole vocabulary; NaN where the target does not exist."""
    log_s = None if sums.s is None else jnp.log(sums.s)
    kept_log_s = None if sums.kept_s is None else jnp.log(sums.kept_s)
    entropy = None if sums.u is None else log_s - sums.u / sums.s
    # through log s, so that the gradient of a target that does not exist is NaN too
    log_s, kept_log_s = (None if x is None else jnp.where(target_exists, x, jnp.nan) for x in (log_s, kept_log_s))
    top, log_sum = (sums.m, log_s) if sums.kept_m is None else (sums.kept_m, kept_log_s)
    log_probs = (sums.z_y - top) - log_sum
    return log_probs, entropy, Residuals(sums.m, log_s, entropy, sums.kept_m, kept_log_s)


def moments(sums: Sums, residuals: Residuals, columns: int) -> tuple[Array, Array, Array] | None:
    """log_z, the log-sum-exp of all the logits, their mean, and the likeliest token's log-prob (a constant).

    The last is bit for bit what `finish` gives the target where it is that token. None where the sums lack what they
    take.
    """
    if sums.total is None:
        return None
    best = -(residuals.log_s if residuals.kept_log_s is None else residuals.kept_log_s)
    return residuals.m + residuals.log_s, sums.total / columns, best


def dlogits(
    z: Float[Array, "N B"],
    is_target: Bool[Array, "N B"],
    keep: Bool[Array, "N B"] | None,
    residuals: Residuals,
    g: Float[Array, "N"],
    e: Float[Array, "N"] | None,
    of_moments: tuple[Float[Array, "N"], ...] | None,
    columns: int,
) -> Float[Array, "N B"]:
    """dz_j = g * ([j = y] - p_j) - e * p_j * (log p_j + entropy) + a * p_j + b / columns.

    In the first term p is over the kept columns.

    Args:
      z: f32 logits, -inf in columns that do not exist.
      is_target: one-hot of the target.
      keep: the columns that the sampler could draw, or None for all.
      residuals: of the whole vocabulary.
      g: the cotangent of the log-prob.
      e: the cotangent of the entropy, or None.
      of_moments: (a, b, ...), the cotangents of log_z and the mean logit, or None.
      columns: of the whole vocabulary.
    """
    column = lambda x: x[:, None]  # noqa: E731
    log_p: Any = None
    if residuals.m is not None:
        log_p = (z - column(residuals.m)) - column(residuals.log_s)
    if keep is None:
        p = jnp.exp(log_p)
    else:
        p = jnp.where(keep, jnp.exp((z - column(residuals.kept_m)) - column(residuals.kept_log_s)), 0)
    dz = column(g) * (is_target - p)
    if e is not None:
        full_p = jnp.exp(log_p)
        dz -= column(e) * jnp.where(full_p > 0, full_p * (log_p + column(residuals.entropy)), 0)
    if of_moments is not None:
        dz += column(of_moments[0]) * jnp.exp(log_p) + column(of_moments[1]) / columns
    return dz
