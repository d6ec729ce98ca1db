"""Metrics as sums that are merged over devices and micro-batches, and divided once, at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo.base.arrays import check_choice
from jaxppo.base.pytree import register
from jaxppo.sharding import ShardAxes, vary

__all__ = ["Composite", "Metric", "Metrics", "collapse_metrics", "finalize_metrics", "merge_metrics"]

Reduce = Literal["mean", "sum", "min", "max"]


@register(static=["reduce"])
@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric before its division: its value is total / count for "mean", else the total itself.

    Args:
      total: the sum, smallest or largest value so far. Arrays merge entry by entry; the counts of broken rules are one.
      count: the number of values, or the sum of their weights; only "mean" divides by it.
      reduce: "mean", "sum", "min" or "max": how two of them merge.

    Raises:
      ValueError: an unknown `reduce`.

    Example:
      >>> parts = Metric(jnp.array(6.0), jnp.array(2.0)), Metric(jnp.array(1.0), jnp.array(5.0))
      >>> float(merge_metrics(*parts).value)  # and not the mean of 3 and 0.2
      1.0
    """

    total: Float[Array, "..."]
    count: Float[Array, ""]
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_choice("reduce", self.reduce, Reduce)

    @property
    def value(self) -> Float[Array, ""]:
        """The number itself; 0 for a mean, the smallest or the largest value of nothing."""
        if self.reduce == "mean":
            return share(self.total, self.count)
        return self.total if self.reduce == "sum" else jnp.where(self.count == 0, 0, self.total)


@register(static=["combine"])
@dataclasses.dataclass(frozen=True)
class Composite:
    """A metric that is a function of several others, which are merged, and combined once, at the end.

    Args:
      parts: metrics by name.
      combine: takes the values of the parts by name.

    Example:
      >>> part = Metric(jnp.array(6.0), jnp.array(2.0))
      >>> float(Composite({"mean": part, "same": part}, lambda mean, same: mean / same).value)
      1.0
    """

    parts: dict[str, Metric]
    combine: Callable[..., Float[Array, ""]]

    @property
    def value(self) -> Float[Array, ""]:
        return self.combine(**{name: part.value for name, part in self.parts.items()})


Metrics = dict[str, Metric | Composite]


def merge_metrics(first: Any, *others: Any) -> Any:
    """Merges metrics (`Metric`, `Composite`), or dicts of them, of several micro-batches or processes into one.

    Raises:
      ValueError: structures (names, or ways to reduce) that differ.

    Example:
      >>> one, two = (Metric(jnp.array(x), jnp.array(1.0), "max") for x in (3.0, 5.0))
      >>> float(merge_metrics({"ratio": one}, {"ratio": two})["ratio"].value)
      5.0
    """
    for given in (first, *others):
        _check_metrics("first" if given is first else "others", given)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, *others)
    return collapse_metrics(stacked)


def collapse_metrics(stacked: Any) -> Any:
    """Merges a dict of metrics (or one) along the leading axis of its arrays, as `lax.scan` stacks them."""
    _check_metrics("stacked", stacked)

    def collapsed(x: Metric) -> Metric:
        how = {"min": jnp.min, "max": jnp.max}.get(x.reduce, jnp.sum)
        return Metric(how(x.total, axis=0), jnp.sum(x.count, axis=0), x.reduce)

    return jax.tree.map(collapsed, stacked, is_leaf=lambda x: isinstance(x, Metric))


def finalize_metrics(metrics: Mapping[str, Metric | Composite]) -> dict[str, Float[Array, ""]]:
    """The numbers of a loss's metrics by name: totals divided by counts, composite ones combined.

    Raises:
      TypeError: anything else than `Metric` or `Composite`, such as metrics that are numbers already.

    Example:
      >>> finalize_metrics({"loss": Metric(jnp.float32(6), jnp.float32(2))})
      {'loss': Array(3., dtype=float32)}
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics: got {type(metrics).__name__}, expected the metrics of a loss, by name")
    _check_metrics("metrics", metrics)
    return {name: metric.value for name, metric in metrics.items()}


def _check_metrics(what: str, metrics: Any) -> None:
    for name, x in metrics.items() if isinstance(metrics, Mapping) else [(None, metrics)]:
        if not isinstance(x, Metric | Composite):
            where = what if name is None else f"{what}[{name!r}]"
            raise TypeError(f"{where}: got {type(x).__name__}, expected Metric or Composite, as losses return them")


Term = tuple[Float[Array, "R T"], Float[Array, "R T"], Reduce]  # values, weights, and how they are reduced


class CompositeTerm(NamedTuple):
    """What a `Composite` is reduced from: the terms of its parts, and the function that combines their values."""

    parts: Mapping[str, Term]
    combine: Callable[..., Float[Array, ""]]


Terms = dict[str, Term | CompositeTerm]


def means(values: Mapping[str, Float[Array, "R T"]], weights: Float[Array, "R T"]) -> Terms:
    """The terms of weighted means, by name."""
    return {name: (x, weights, "mean") for name, x in values.items()}


def moments(x: Float[Array, "R T"], weights: Float[Array, "R T"]) -> dict[str, Term]:
    """The terms that `deviation` and `effective_share` combine: the means of x and of x^2."""
    return {"first": (x, weights, "mean"), "second": (x**2, weights, "mean")}


def reduce_metrics(axes: ShardAxes, terms: Mapping[str, Term | CompositeTerm]) -> Metrics:
    """Per-shard: the metrics of all data and context shards from their terms, in one collective.

    "mean" and "sum" multiply values by their weights; "min" and "max" read the values with a weight above 0. No
    gradient flows, and values may be NaN where the weight is 0.
    """
    parts = {name: term.parts if isinstance(term, CompositeTerm) else {"": term} for name, term in terms.items()}
    flat = {(name, part): term for name, its in parts.items() for part, term in its.items()}
    sums, highest = {}, {}
    for key, (x, weights, reduce) in flat.items():
        x, weights = lax.stop_gradient((x.astype(jnp.float32), weights.astype(jnp.float32)))
        if reduce in ("mean", "sum"):
            sums[key] = (jnp.where(weights > 0, x, 0) * weights).sum(), weights.sum()
        else:
            sums[key] = jnp.zeros_like(weights.sum()), weights.sum()
            highest[key] = jnp.where(weights > 0, x if reduce == "max" else -x, -jnp.inf).max()
    sums, highest = jax.tree.map(lambda x: vary(x, axes.tokens), (sums, highest))
    sums = axes.psum(sums, axes.tokens)
    highest = lax.pmax(highest, axes.tokens) if axes.tokens and highest else highest
    found: Metrics = {}
    for name, term in terms.items():
        its = {}
        for part, (_, _, reduce) in parts[name].items():
            total, count = sums[name, part]
            extreme = highest.get((name, part), total)
            its[part] = Metric(-extreme if reduce == "min" else extreme, count, reduce)
        found[name] = Composite(its, term.combine) if isinstance(term, CompositeTerm) else its[""]
    return found


def reduce_metric(
    axes: ShardAxes, x: Float[Array, "R T"], weights: Float[Array, "R T"], reduce: Reduce = "mean"
) -> Metric:
    """`reduce_metrics` for a single one."""
    found: Any = reduce_metrics(axes, {"": (x, weights, reduce)})
    return found[""]


def share(part: Float[Array, ""], whole: Float[Array, ""]) -> Float[Array, ""]:
    """part / whole, 0 where the whole is 0."""
    return part / jnp.where(whole == 0, 1, whole)


def effective_share(first: Float[Array, ""], second: Float[Array, ""]) -> Float[Array, ""]:
    """(sum r)^2 / (N sum r^2), the effective sample size as a share: 1 where all r are equal, 0 where there is none."""
    return jnp.minimum(share(first**2, second), 1)  # rounding would make it 1 + 1e-7


def deviation(first: Float[Array, ""], second: Float[Array, ""]) -> Float[Array, ""]:
    """The standard deviation from the means of x - c and (x - c)^2, for any c near x."""
    return jnp.sqrt(jnp.maximum(second - first**2, 0))
