"""Metrics as sums that are merged over devices and micro-batches, and divided once, at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo.base.arrays import check_choice, check_type
from jaxppo.base.pytree import register
from jaxppo.sharding import ShardAxes, vary

__all__ = [
    "Composite",
    "Metric",
    "Metrics",
    "collapse_metrics",
    "finalize_metrics",
    "merge_metrics",
]

Reduce = Literal["mean", "sum", "min", "max"]


@register(static=["reduce"])
@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric before its division: its value is total / count for "mean", else the total itself.

    Args:
      total: the sum, smallest or largest value so far. Arrays merge entry by entry; the counts of
        broken rules are one.
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
        if self.reduce == "sum":
            return self.total
        return jnp.where(self.count == 0, 0, self.total)


@register(static=["combine"])
@dataclasses.dataclass(frozen=True)
class Composite:
    """A metric that is a function of several others, which are merged, and combined once, at the
    end.

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
    """Merges metrics (`Metric`, `Composite`), or dicts of them, of several micro-batches or
    processes into one.

    Raises:
      ValueError: structures (names, or ways to reduce) that differ.

    Example:
      >>> one, two = (Metric(jnp.array(x), jnp.array(1.0), "max") for x in (3.0, 5.0))
      >>> float(merge_metrics({"ratio": one}, {"ratio": two})["ratio"].value)
      5.0
    """
    _check_metrics("first", first)
    for other in others:
        _check_metrics("others", other)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, *others)
    return collapse_metrics(stacked)


def collapse_metrics(stacked: Any) -> Any:
    """Merges a dict of metrics (or one) along the leading axis of its arrays, as `lax.scan`
    stacks them.
    """
    _check_metrics("stacked", stacked)

    def collapsed(x: Metric) -> Metric:
        match x.reduce:
            case "min":
                total = jnp.min(x.total, axis=0)
            case "max":
                total = jnp.max(x.total, axis=0)
            case _:
                total = jnp.sum(x.total, axis=0)
        return Metric(total, jnp.sum(x.count, axis=0), x.reduce)

    return jax.tree.map(collapsed, stacked, is_leaf=lambda x: isinstance(x, Metric))


def finalize_metrics(metrics: Mapping[str, Metric | Composite]) -> dict[str, Float[Array, ""]]:
    """The numbers of a loss's metrics by name: totals divided by counts, composite ones combined.

    Raises:
      TypeError: anything else than `Metric` or `Composite`, such as metrics that are numbers
        already.

    Example:
      >>> finalize_metrics({"loss": Metric(jnp.float32(6), jnp.float32(2))})
      {'loss': Array(3., dtype=float32)}
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics: got {type(metrics).__name__}, expected the metrics of a loss, by name"
        )
    _check_metrics("metrics", metrics)
    return {name: metric.value for name, metric in metrics.items()}


def _check_metrics(what: str, metrics: Any) -> None:
    by_place = {what: metrics}
    if isinstance(metrics, Mapping):
        by_place = {f"{what}[{name!r}]": metric for name, metric in metrics.items()}
    for place, metric in by_place.items():
        good = isinstance(metric, Metric | Composite)
        check_type(place, metric, good, "Metric or Composite, as losses return them")


# values, weights, and how they are reduced
Term = tuple[Float[Array, "R T"], Float[Array, "R T"], Reduce]


class CompositeTerm(NamedTuple):
    """What a `Composite` is reduced from: the terms of its parts, and the function that combines
    their values.
    """

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

    "mean" and "sum" multiply values by their weights; "min" and "max" read the values with a weight
    above 0. No gradient flows, and values may be NaN where the weight is 0.
    """
    # by the name of the metric, and that of the part of a composite one
    flat: dict[tuple[str, str], Term] = {}
    for name, term in terms.items():
        if isinstance(term, CompositeTerm):
            for part, part_term in term.parts.items():
                flat[name, part] = part_term
        else:
            flat[name, ""] = term
    metrics = _reduce_terms(axes, flat)
    result: Metrics = {}
    for name, term in terms.items():
        if isinstance(term, CompositeTerm):
            result[name] = Composite(
                {part: metrics[name, part] for part in term.parts}, term.combine
            )
        else:
            result[name] = metrics[name, ""]
    return result


def _reduce_terms(axes: ShardAxes, terms: Mapping[Any, Term]) -> dict[Any, Metric]:
    """Per-shard: the metric of each term. A smallest value is the largest of the negated ones."""
    sums: Any = {}
    largest: Any = {}
    for key, (x, weights, reduce) in terms.items():
        x, weights = lax.stop_gradient((x.astype(jnp.float32), weights.astype(jnp.float32)))
        if reduce in ("mean", "sum"):
            sums[key] = (jnp.where(weights > 0, x, 0) * weights).sum(), weights.sum()
            continue
        sums[key] = jnp.zeros_like(weights.sum()), weights.sum()
        counts = weights > 0
        if reduce == "min":
            x = -x
        largest[key] = jnp.where(counts, x, -jnp.inf).max()
    sums, largest = jax.tree.map(lambda x: vary(x, axes.tokens), (sums, largest))
    sums = axes.psum(sums, axes.tokens)
    if axes.tokens and largest:
        largest = lax.pmax(largest, axes.tokens)
    metrics = {}
    for key, (_, _, reduce) in terms.items():
        total, count = sums[key]
        if reduce == "max":
            total = largest[key]
        elif reduce == "min":
            total = -largest[key]
        metrics[key] = Metric(total, count, reduce)
    return metrics


def reduce_metric(
    axes: ShardAxes, x: Float[Array, "R T"], weights: Float[Array, "R T"], reduce: Reduce = "mean"
) -> Metric:
    """`reduce_metrics` for a single one."""
    return _reduce_terms(axes, {"": (x, weights, reduce)})[""]


def share(part: Float[Array, ""], whole: Float[Array, ""]) -> Float[Array, ""]:
    """part / whole, 0 where the whole is 0."""
    return part / jnp.where(whole == 0, 1, whole)


def effective_share(first: Float[Array, ""], second: Float[Array, ""]) -> Float[Array, ""]:
    """(sum r)^2 / (N sum r^2), the effective sample size as a share: 1 where all r are equal, 0
    where there is none.
    """
    return jnp.minimum(share(first**2, second), 1)  # rounding would make it 1 + 1e-7


def deviation(first: Float[Array, ""], second: Float[Array, ""]) -> Float[Array, ""]:
    """The standard deviation from the means of x - c and (x - c)^2, for any c near x."""
    return jnp.sqrt(jnp.maximum(second - first**2, 0))
