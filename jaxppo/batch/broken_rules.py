"""Which rules data break: counted in a loss, named by the metric `broken_rules`, raised on the
host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import PER_SEGMENT, check
from jaxppo.base.metrics import Composite, Metric
from jaxppo.batch.pairs import Pairs
from jaxppo.batch.reads import rule_of
from jaxppo.batch.rules import KNOWN, ON_DEVICE, RULES, View
from jaxppo.batch.trees import starts
from jaxppo.sharding import Segments, ShardAxes, vary

# `broken_rules` holds the numbers of the first 3 rules, 8 bits each: f32 holds such an integer
BITS = 8
FIRST = 3


@dataclasses.dataclass(frozen=True)
class Broken:
    """How often rules are broken, on all devices together."""

    numbers: tuple[int, ...]  # of the rules that this loss has, from 1
    counts: Float[Array, " n"]  # of each

    def __add__(self, other: Broken) -> Broken:
        """The counts of two lots of rules, or of arrays, together."""
        numbers = tuple(sorted({*self.numbers, *other.numbers}))
        counts = jnp.zeros(len(numbers), jnp.float32)
        for broken in (self, other):
            places = [numbers.index(number) for number in broken.numbers]
            counts = counts.at[np.asarray(places, int)].add(broken.counts)
        return Broken(numbers, counts)

    @property
    def any(self) -> Bool[Array, ""]:
        return self.counts.sum() > 0

    def metric(self, total: Float[Array, ""]) -> Composite:
        """The metric `broken_rules`.

        A loss that is not finite breaks the last rule if no other one is broken.
        """
        unexplained = ~(jnp.isfinite(total) | self.any)
        counts = lax.stop_gradient(jnp.append(self.counts, unexplained.astype(jnp.float32)))
        numbers = (*self.numbers, len(ON_DEVICE))
        return Composite({"counts": Metric(counts, jnp.float32(1), "sum")}, _First(numbers))


@dataclasses.dataclass(frozen=True)
class _First:
    """The numbers of the first broken rules as one number; a function of their counts."""

    numbers: tuple[int, ...]

    def __call__(self, counts: Float[Array, " n"]) -> Int[Array, ""]:
        return _first_of(self.numbers, counts)


# one program where a caller does not jit, and not one for each operation
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _first_of(numbers: tuple[int, ...], counts: Float[Array, " n"]) -> Int[Array, ""]:
    broken = counts > 0
    order = jnp.cumsum(broken, dtype=jnp.int32) - 1
    digits = jnp.asarray(numbers, jnp.int32) << BITS * jnp.clip(order, 0, FIRST - 1)
    return jnp.where(broken & (order < FIRST), digits, 0).sum(dtype=jnp.int32)


def count_broken(
    arrays: Mapping[str, Array | None],
    numbers: Mapping[str, Array],
    segments: Segments,
    *,
    real_last_targets: bool,
    vocab_size: int | None = None,
    adapters: int = 0,
    counted: Float[Array, "R T"] | None = None,
) -> Broken:
    """Per-shard: for each rule that has something to check, how often all devices' entries break
    it.

    `numbers` are the traced ones of the loss, by name, scalars or those of tokens; for the others
    see `View`. Absent arrays are None. `counted` are the tokens that a normalizer counts; None for
    those of the loss mask.
    """
    axes = segments.axes
    existing = {name: x for name, x in arrays.items() if x is not None}
    unsound = [_not_finite(x) for name, x in existing.items() if name not in KNOWN]
    existing |= _by_rule(numbers)
    if unsound:
        existing["another_array"] = functools.reduce(jnp.logical_or, unsound)
    if existing.keys() & {"normalizer", "pair_ids"}:
        if counted is None:
            counted = existing["loss_mask"]
        existing["loss_tokens"] = segments.sum(counted)
    if "pair_ids" in existing:
        pairs = Pairs.of(
            axes, existing["pair_ids"], existing["sample_rewards"], existing["loss_tokens"]
        )
        existing["alone"] = pairs.alone
    ends = segments.sum(jnp.ones_like(segments.segment_ids))
    if "parents" in existing:
        ends = ends + starts(existing["parents"], ends, jnp)
    existing["lasts"] = segments.spread(ends) - 1
    cut = bool(axes.unknown(segments.segment_ids))
    view = View(existing, segments.num_segments, real_last_targets, cut, vocab_size, jnp, adapters)
    return _counted(view, axes, existing)


def count_broken_tokens(
    arrays: Mapping[str, Array | None], checked: Collection[str], segments: Segments
) -> Broken:
    """Per-shard: `count_broken` of arrays of tokens alone, those that are `checked`, beside what
    their rules read.
    """
    existing = {name: x for name, x in arrays.items() if x is not None}
    unsound = [_not_finite(existing[name]) for name in checked if name not in KNOWN]
    if unsound:
        existing["another_array"] = functools.reduce(jnp.logical_or, unsound)
    view = View(existing, segments.num_segments, True, False, None, jnp)
    return _counted(view, segments.axes, {*checked, "another_array"})


def _counted(view: View, axes: ShardAxes, checked: Collection[str]) -> Broken:
    counts: dict[int, Any] = {}
    for number, rule in enumerate(ON_DEVICE, 1):
        for _, bad in rule.broken(view, checked):
            counts[number] = counts.get(number, 0) + bad.sum(dtype=jnp.float32)
    if not counts:
        return Broken((), jnp.zeros(0, jnp.float32))
    own = vary(jnp.stack([*counts.values()]), axes.tokens)
    return Broken((*counts,), axes.psum(own, axes.tokens))


def _not_finite(x: Array) -> Bool[Array, "R T"]:
    """Where a token has a number that is not finite."""
    return ~jnp.isfinite(x).reshape(*x.shape[:2], -1).all(-1)


def _by_rule(numbers: Mapping[str, Array]) -> dict[str, Array]:
    """The numbers of a loss, flat, by the rule that each must keep."""
    by_rule: dict[str, list[Array]] = {}
    for name, x in numbers.items():
        by_rule.setdefault(rule_of(name), []).append(x.reshape(-1))
    return {name: jnp.concatenate(several) for name, several in by_rule.items()}


def explain_broken_rules(broken_rules: int | float | Array) -> list[str]:
    """Explains the metric `broken_rules`.

    Args:
      broken_rules: the metric's value, a number.

    Returns:
      A line for each of the first three rules that are broken; an empty list for 0.

    Raises:
      TypeError: something else, such as the metric itself.
      ValueError: a number that names no rules.

    Example:
      >>> explain_broken_rules(2)
      ['loss_mask_on_padding: expected 0 where segment_ids is 0']
    """
    x = broken_rules
    numeric = isinstance(x, (int, float, np.number, np.ndarray, jax.Array)) and not isinstance(
        x, bool
    )
    if (
        not numeric
        or np.shape(x) != ()
        or not jnp.issubdtype(getattr(x, "dtype", float), np.number)
    ):
        got = f"shape {np.shape(x)}" if numeric else type(x).__name__
        raise TypeError(
            f'broken_rules: got {got}, expected a number, such as metrics["broken_rules"].value of'
            " a step"
        )
    number = float(x)
    bits = -1  # names no rule
    if number.is_integer() and 0 <= number < 1 << BITS * FIRST:
        bits = int(number)
    named = [bits >> BITS * i & (1 << BITS) - 1 for i in range(FIRST)]
    expected = f"an integer that names rules 1 to {len(ON_DEVICE)} in {FIRST} times {BITS} bits"
    check("broken_rules", f"{number:g}", max(named) <= len(ON_DEVICE), expected)
    rules = [ON_DEVICE[i - 1] for i in named if i]
    return [f"{rule.name}: expected {rule.expected.format(S='S', V='V - 1')}" for rule in rules]


def raise_first(view: View) -> None:
    """Raises ValueError at the first entry that breaks a rule, with its row and logical
    position, or segment.
    """
    for rule in sorted(RULES, key=lambda rule: not rule.structural):
        for name, bad in rule.broken(view):
            if not bad.any():
                continue
            row, column = np.argwhere(bad)[0].tolist()
            what = "segment" if name in (*PER_SEGMENT, "normalizer") else "position"
            expected = rule.expected.format(S=view.num_segments, V=(view.vocab_size or 0) - 1)
            got = f"{view[name][row, column]} at row {row}, {what} {column}"
            raise ValueError(f"{name}: got {got}, expected {expected}")
