"""A report of the difference between sampler and trainer: figures over all tokens, by position
and by entropy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxppo.base.arrays import (
    MAX_LOG_PROB,
    MAX_SAMPLED,
    check,
    check_alike,
    check_count,
    check_number,
    check_type,
)
from jaxppo.base.kl import MAX_LOG_RATIO
from jaxppo.mismatch.tokens import TokenMismatch
from jaxppo.sharding import multihost

Ranges = tuple[dict[str, float], ...]  # the figures of each range of positions or entropies
QUANTILES = (0.5, 0.9, 0.99, 0.999)
MOST_BINS = 1000
_BEYOND = 6.0


def _quantile(q: float) -> str:
    return f"abs_q{100 * q:g}"


_NAMES = {
    "mean": "mean of d",
    "abs_mean": "mean of |d|",
    "abs_max": "max of |d|",
    **{_quantile(q): f"{100 * q:g}% of |d| are below" for q in QUANTILES},
    "kl": "KL(sampler || trainer)",
    "reverse_kl": "KL(trainer || sampler)",
    "total_variation": "total variation",
    "same_top": "share with the same likeliest token",
    "rms": "root mean square of d",
    "rounding_rms": "of which rounding explains",
    "beyond_rounding": "share beyond 6 times what rounding explains",
}
_IN_TABLES = (
    "tokens",
    "abs_mean",
    "abs_max",
    "kl",
    "total_variation",
    "same_top",
    "beyond_rounding",
)


@dataclasses.dataclass(frozen=True)
class MismatchReport:
    """Figures of d = trainer - sampler log-prob; `print` shows them as a table.

    Args:
      tokens: the number of tokens that were compared.
      not_finite: the number of tokens left out because a log-prob is infinite or NaN.
      exact: KL and total variation are over the whole vocabulary, rather than estimates from the
        sampled tokens.
      figures: by name: mean, abs_mean, abs_max, abs_q50 to abs_q99.9, rms, kl, reverse_kl,
        total_variation and, where they are known, same_top, rounding_rms and beyond_rounding.
      by_position: the same figures for ranges of positions, with `low`, `high` (both included) and
        `tokens`.
      by_entropy: the same figures for ranges of entropy with about equally many tokens; empty
        without entropies.
    """

    tokens: int
    not_finite: int
    exact: bool
    figures: dict[str, float]
    by_position: Ranges
    by_entropy: Ranges

    def __str__(self) -> str:
        lines = [
            f"{'tokens':44}{self.tokens}",
            f"{'more, whose log-probs are not finite':44}{self.not_finite}",
        ]
        lines += [
            f"{text:44}{self.figures[name]:.6g}"
            for name, text in _NAMES.items()
            if name in self.figures
        ]
        if not self.exact:
            lines.append("KL and total variation are estimates from the sampled tokens")
        for title, ranges in (("position", self.by_position), ("entropy", self.by_entropy)):
            if ranges:
                lines += ["", *_table(title, ranges)]
        return "\n".join(lines)


def mismatch_report(
    tokens: TokenMismatch,
    *,
    where: Bool[Array, "..."] | None = None,
    positions: Int[Array, "..."] | None = None,
    bins: int = 8,
) -> MismatchReport:
    """Compares sampler and trainer over all tokens, by position and by entropy; on the host, in
    f64.

    Let d = log p - log q for a token that the sampler q drew, clamped to [-20, 20] before exp, and
    r = exp(d). KL and total variation are means of the values that `token_mismatch` found over the
    whole vocabulary, or else of these estimates,

        KL(q || p) = r - 1 - d      KL(p || q) = r d - r + 1      total variation = |r - 1| / 2

    whose expectations over q are right. Rounding explains differences with a root mean square of
    `rounding`, and practically no token beyond 6 times that. If the share beyond is not 0, look for
    a bug.

    Args:
      tokens: `TokenMismatch(log_probs, rollout_log_probs)`, or the result of `token_mismatch`;
        arrays of one shape, `[R, T]` or `[N]`. If they are spread over the devices of several
        processes, every process must call this.
      where: bool, the tokens that count; a loss mask does. All by default.
      positions: i32; by default the last dimension's index.
      bins: the number of ranges of positions, which are equally wide, and of entropies, which have
        equally many tokens; at most 1000.

    Raises:
      TypeError, ValueError: arrays of other shapes or dtypes, no token that counts, bins below 1 or
        above 1000.

    Example:
      >>> report = mismatch_report(TokenMismatch(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -2.0])), bins=1)
      >>> report.tokens, report.figures["abs_mean"], report.figures["abs_max"]
      (2, 0.25, 0.5)

    The estimates: Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    check_count("bins", bins, least=1)
    check_number("bins", bins, most=MOST_BINS)
    check_type("tokens", tokens, isinstance(tokens, TokenMismatch), "TokenMismatch")
    values, token_positions = _on_host(tokens, where, positions)
    _check_log_probs("log_probs", values["log_probs"], MAX_LOG_PROB)
    _check_log_probs("rollout_log_probs", values["rollout_log_probs"], MAX_SAMPLED)
    finite = np.isfinite(values["log_probs"]) & np.isfinite(values["rollout_log_probs"])
    check(
        "log_probs",
        f"{finite.size} that count and none that is finite",
        bool(finite.any()),
        "at least 1",
    )
    values = {name: x[finite] for name, x in values.items()}
    token_positions = token_positions[finite]
    by_token = _by_token(values)
    edges = np.linspace(token_positions.min(), token_positions.max() + 1, bins + 1).astype(np.int64)
    by_position = _in_ranges(by_token, token_positions, np.unique(edges)[1:-1])
    by_entropy: Ranges = ()
    if "entropy" in values:
        inner = np.quantile(values["entropy"], np.linspace(0, 1, bins + 1)[1:-1])
        by_entropy = _in_ranges(by_token, values["entropy"], inner)
    count = int(finite.sum())
    return MismatchReport(
        count, finite.size - count, "kl" in values, _figures(by_token), by_position, by_entropy
    )


def _on_host(
    tokens: TokenMismatch, where: Bool[Array, "..."] | None, positions: Int[Array, "..."] | None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The values of the tokens that count, in f64 by name, and their positions."""
    arrays = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
    arrays |= {"where": where, "positions": positions}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    check_alike(arrays)
    shape = tokens.log_probs.shape
    check("log_probs", f"shape {shape}", shape != (), "[R, T] or [N]")
    host: dict[str, Any] = {
        name: np.asarray(x) for name, x in jax.device_get(multihost.whole(arrays)).items()
    }
    token_positions = host.pop("positions", np.broadcast_to(np.arange(shape[-1]), shape))
    counts = host.pop("where", np.ones(shape, bool)) > 0
    values = {name: x[counts].astype(np.float64) for name, x in host.items()}
    return values, token_positions[counts]


def _check_log_probs(name: str, log_probs: np.ndarray, most: float) -> None:
    above = log_probs[log_probs > most]
    expected = f"log-probs of at most {most}, which probabilities are not"
    check(name, above.max(initial=most), above.size == 0, expected)


def _by_token(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of each token; the figures are their means and quantiles."""
    d = values["log_probs"] - values["rollout_log_probs"]
    bounded = np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    grown = np.expm1(bounded)
    estimates = {
        "d": d,
        "kl": grown - bounded,
        "reverse_kl": bounded * (grown + 1) - grown,
        "total_variation": np.abs(grown) / 2,
    }
    exact = {name: x for name, x in values.items() if name in _NAMES or name == "rounding"}
    return estimates | exact


def _figures(by_token: dict[str, np.ndarray]) -> dict[str, float]:
    d = by_token["d"]
    distance = np.abs(d)
    figures = {
        "mean": d.mean(),
        "abs_mean": distance.mean(),
        "abs_max": distance.max(),
        "rms": np.sqrt((d**2).mean()),
    }
    for q in QUANTILES:
        figures[_quantile(q)] = np.quantile(distance, q)
    for name in _NAMES:
        if name in by_token:
            figures[name] = by_token[name].mean()
    if "rounding" in by_token:
        rounding = by_token["rounding"]
        figures["rounding_rms"] = np.sqrt((rounding**2).mean())
        figures["beyond_rounding"] = (distance > _BEYOND * rounding).mean()
    return {name: float(x) for name, x in figures.items()}


def _in_ranges(by_token: dict[str, np.ndarray], quantity: np.ndarray, inner: np.ndarray) -> Ranges:
    """The figures of each range of a quantity, between these inner edges.

    Ranges without tokens are left out.
    """
    ranges = []
    index = np.searchsorted(inner, quantity, "right")
    for i in np.unique(index):
        inside = index == i
        low = float(quantity[inside].min())
        high = float(quantity[inside].max())
        figures = _figures({name: x[inside] for name, x in by_token.items()})
        ranges.append({"low": low, "high": high, "tokens": int(inside.sum())} | figures)
    return tuple(ranges)


def _table(title: str, ranges: Ranges) -> list[str]:
    names = [name for name in _IN_TABLES if name in ranges[0]]
    lines = [f"{title:>20}" + "".join(f"{name:>17}" for name in names)]
    for figures in ranges:
        ends = f"{figures['low']:.4g} to {figures['high']:.4g}"
        lines.append(f"{ends:>20}" + "".join(f"{figures[name]:>17.5g}" for name in names))
    return lines
